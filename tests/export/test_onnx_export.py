"""ONNX graphs equal transformers in prefill and in cached decoding, for stock and for cluster models."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from dwindle.core.errors import UserError
from dwindle.export import onnx_graph
from dwindle.export.exporting import export
from dwindle.export.verification import Mismatch
from edge_models import pruned_smollm2, slow, tiny_loaded
from tiny import FAMILIES

pytest.importorskip("onnx", reason="pip install -e '.[onnx]'")
pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")
np = pytest.importorskip("numpy")

from dwindle.export.onnx_runtime import OnnxEngine  # noqa: E402


def largest_difference(model: Any, path: Path, batch: torch.Tensor, steps: int) -> float:
    """Prefill and ``steps`` cached tokens, both sides carrying their own cache."""
    engine = OnnxEngine(path)
    engine.reset([0] * len(batch))
    worst, past = 0.0, None
    new = batch
    with torch.inference_mode():
        for _ in range(steps + 1):
            out = model(input_ids=new, past_key_values=past, use_cache=True)
            past = out.past_key_values
            found = torch.from_numpy(engine.step(new.numpy()))
            worst = max(worst, float((found - out.logits).abs().max()))
            new = out.logits[:, -1:].argmax(-1)
    return worst


REFUSED = ("granite_swa", "lfm2", "qwen3_5_text")  # test_families_exported.py


STRUCTURES = ("odd", "cluster", "layers")


@pytest.mark.parametrize(
    ("family", "structure"),
    [
        *((family, STRUCTURES[n % 3]) for n, family in enumerate(FAMILIES) if family not in REFUSED),
        *(("llama", structure) for structure in STRUCTURES[1:]),  # the first of the families has the other one
        *((family, structure) for family in ("llama", "olmo2") for structure in ("depth", "blocks")),
    ],
)
def test_every_family_equals_transformers(family: str, structure: str, tmp_path: Path) -> None:
    loaded = tiny_loaded(family, structure)
    found = export(loaded, "onnx", tmp_path / "out")
    assert found.verified is not None and found.verified.max_error < 1e-5
    batch = torch.randint(300, (3, 11), generator=torch.Generator().manual_seed(1))
    assert largest_difference(loaded.model, tmp_path / "out" / "model.onnx", batch, 16) < 1e-4


@pytest.mark.parity
@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32
            }
        },
    ],
    ids=["biases", "linear", "yarn"],
)  # fmt: skip
def test_options_of_llama(options: dict[str, Any], tmp_path: Path) -> None:
    assert export(tiny_loaded("llama", **options), "onnx", tmp_path / "out").verified is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_live_models_of_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """They are compared with what their weights compute in float32, and stay as they were."""
    loaded = tiny_loaded()
    loaded.model.to(dtype)
    found = export(loaded, "onnx", tmp_path / "out")
    assert found.verified is not None and found.verified.max_error < 1e-5
    assert loaded.model.dtype == dtype


def test_attention_windows(tmp_path: Path) -> None:
    loaded = tiny_loaded("mistral", sliding_window=5)
    export(loaded, "onnx", tmp_path / "out")
    batch = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(1))
    assert largest_difference(loaded.model, tmp_path / "out" / "model.onnx", batch, 8) < 1e-4


def test_padding_on_the_left_changes_nothing(tmp_path: Path) -> None:
    """The mask and positions are inputs, so that prompts of different lengths share a batch."""
    import onnxruntime

    loaded = tiny_loaded()
    export(loaded, "onnx", tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    ids = np.array([[7, 8, 9, 10]], np.int64)
    with torch.inference_mode():
        expected = loaded.model(input_ids=torch.from_numpy(ids)).logits[0, -1]
    empty = {
        item.name: np.zeros((1, item.shape[1], 0, item.shape[3]), np.float32)
        for item in session.get_inputs()
        if item.name.startswith("past")
    }
    feeds = {
        "input_ids": np.concatenate([np.zeros((1, 3), np.int64), ids], 1),
        "attention_mask": np.array([[0, 0, 0, 1, 1, 1, 1]], np.int64),
        "position_ids": np.array([[0, 0, 0, 0, 1, 2, 3]], np.int64),
        **empty,
    }
    found = session.run(["logits"], feeds)[0][0, -1]
    assert np.abs(found - expected.numpy()).max() < 1e-4


def test_a_wrong_graph_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dwindle.export.onnx_graph._Decoder._rotated", lambda self, x, number: x)
    with pytest.raises(Mismatch, match="onnxruntime"):
        export(tiny_loaded(), "onnx", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["onnx", "transformers.js"])
@pytest.mark.parametrize("rows", [[305], [303, 304]], ids=["negated", "in another order"])
def test_rows_that_no_prompt_reads_are_compared(
    to: str, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rightly = onnx_graph._Graph.weight

    def wrongly(self: Any, name: str, values: Any) -> str:
        if "embed_tokens" in name and values.ndim > 1 and (to == "onnx" or values.dtype == np.uint8):
            values = values.copy()
            values[rows] = -values[rows[::-1]]  # of whole numbers 128 is zero: -q is 256 - q
        return rightly(self, name, values)

    monkeypatch.setattr(onnx_graph._Graph, "weight", wrongly)
    with pytest.raises(Mismatch, match=r"a row of model.embed_tokens.weight was written \d+% off"):
        export(tiny_loaded(tie_word_embeddings=False), to, tmp_path / "out")


@pytest.mark.parametrize("wrong", [None, 301])
def test_windows_that_prompts_do_not_fill_are_read(
    wrong: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny_loaded("mistral", sliding_window=300, max_position_embeddings=600)
    export(loaded, "onnx", tmp_path / "good")
    monkeypatch.setattr(onnx_graph._Decoder, "_window", lambda self, number: wrong)
    with pytest.raises(Mismatch, match="the graph has other windows than 300"):
        export(loaded, "onnx", tmp_path / "out")


def test_a_graph_that_ignores_padding_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has the mask of the longest."""
    rightly = onnx_graph._Graph.op

    def wrongly(self: Any, kind: str, *inputs: str, **attributes: Any) -> str:
        if kind == "Cast" and inputs == ("attention_mask",):
            inputs = (rightly(self, "ReduceMax", "attention_mask", self.ints(0), keepdims=1),)
        return rightly(self, kind, *inputs, **attributes)

    monkeypatch.setattr(onnx_graph._Graph, "op", wrongly)
    with pytest.raises(Mismatch, match="onnxruntime"):
        export(tiny_loaded(), "onnx", tmp_path / "out")


def test_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="activation 'gelu'"):
        export(tiny_loaded(hidden_act="gelu"), "onnx", tmp_path / "out")
    with pytest.raises(UserError, match="--type"):
        export(tiny_loaded(), "onnx", tmp_path / "out", type="q8_0")
    assert list(tmp_path.iterdir()) == []


def in_float64(model: Any) -> Any:
    """A copy that computes in float64 throughout: transformers' own norms and rotations stay in float32."""
    exact = deepcopy(model).double()

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    def rotation(module: Any, x: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        angles = position_ids[:, :, None].double() * module.inv_freq.double().repeat(2)
        return angles.cos(), angles.sin()

    for module in exact.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(rotation, module)
    return exact


@slow
@pytest.mark.parametrize("kind", ["source", "odd", "cluster"])
def test_smollm2_is_as_near_to_float64_as_transformers(kind: str, tmp_path: Path) -> None:
    """Two float32 programs cannot agree better than each agrees with float64, so that is what is asked of both."""
    loaded = pruned_smollm2(kind)
    export(loaded, "onnx", tmp_path / "out")
    assert loaded.tokenizer is not None
    texts = ("The capital of France is now a", "Once upon a time there was")
    batch = torch.tensor([loaded.tokenizer(text).input_ids[:6] for text in texts])
    engine = OnnxEngine(tmp_path / "out" / "model.onnx")
    engine.reset([0, 0])
    found = [torch.from_numpy(engine.step(batch.numpy()))]
    for _ in range(16):
        batch = torch.cat([batch, found[-1][:, -1:].argmax(-1)], dim=1)
        found.append(torch.from_numpy(engine.step(batch[:, -1:].numpy())))
    with torch.inference_mode():
        exact = in_float64(loaded.model)(input_ids=batch, use_cache=False).logits
        theirs = float((loaded.model(input_ids=batch, use_cache=False).logits - exact).abs().max())
    ours = float((torch.cat(found, dim=1) - exact).abs().max())
    print(
        f"{kind}: onnxruntime {ours:.1e}, transformers {theirs:.1e} from float64; largest logit {exact.abs().max():.1f}"
    )
    assert ours < 1e-4 or (kind != "source" and ours < 2 * theirs)
