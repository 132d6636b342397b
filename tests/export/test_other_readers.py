"""What programs beside transformers 5 read in our directories: keys here, logits in their own processes.

`make readers` installs transformers 4 and mlx-lm below build/readers; without them those tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import BLOCKS, Group
from dwindle.export.huggingface import save_model
from dwindle.export.other_readers import MLX_EQUAL_HEADS, MLX_FAMILIES, add_for_other_readers, rotary_keys
from dwindle.pruning.ledger import source_event
from dwindle.pruning.surgery import Prunable
from tiny import FAMILIES, VOCAB, shrunk, tiny_model, tiny_tokenizer

READERS = Path(__file__).parents[2] / "build" / "readers"
NOT_IN_TRANSFORMERS_4 = {"granite_swa", "granitemoehybrid", "ministral3", "qwen3_5_text"}
"""Families that it does not have, or only with other layers; it refuses them."""
ROTATIONS: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.1, 1.2],
    "long_factor": [1.5, 2.5],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
}
BASE = 54321.0
"""A rotary base that no program has by default."""
Written = tuple[Path, npt.NDArray[np.float32]]
"""A directory, and the logits of its model."""
IDS = torch.arange(50)[None] * 7 % VOCAB
TRANSFORMERS_4 = """
import json, sys
import numpy as np, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4."), transformers.__version__
ids, found = torch.tensor(json.loads(sys.argv[1])), {}
for folder in sys.argv[2:]:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found[folder] = model(ids, use_cache=False).logits.tolist()
    except Exception as error:
        found[folder] = repr(error)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found[folder + " tokens"] = tokenizer("Two words.").input_ids
print(json.dumps(found))
"""
MLX = """
import json, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
ids, found = mx.array(json.loads(sys.argv[1])), {}
for folder in sys.argv[2:]:
    try:
        model, _ = load_model(Path(folder), trust_remote_code=True)
        cache = make_prompt_cache(model)
        parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 20), (20, 21), (21, 50))]
        found[folder] = [model(ids).tolist(), mx.concatenate(parts, 1).tolist()]
    except Exception as error:
        found[folder] = repr(error)
print(json.dumps(found))
"""


def with_base(rope: dict[str, Any]) -> dict[str, Any]:
    """The same rotations with other bases: that of OLMo 3's two is one number, Gemma 3 has two."""
    if all(isinstance(one, dict) for one in rope.values()):
        return {name: {**one, "rope_theta": 1.7 * one["rope_theta"]} for name, one in rope.items()}
    return {**rope, "rope_theta": BASE}


def written(folder: Path, model: Any) -> Written:
    """A model, saved as users get it."""
    anatomy = Anatomy.of(model)
    ledger = [source_event("tiny", anatomy, {})]
    save_model(model.eval(), tiny_tokenizer(), folder, structure=anatomy.source, source="tiny", ledger=ledger)
    with torch.no_grad():
        return folder, model(IDS, use_cache=False).logits.float().numpy()


def without_blocks(family: str) -> Any:
    """Attention gone from the first layer, FFN from the second."""
    prunable = Prunable(tiny_model(family, dtype=torch.float32))
    for layer, place in enumerate((BLOCKS.index("attn"), BLOCKS.index("mlp"))):
        prunable.prune(Group.of_layer("layer", layer, (place,), 3))
    return prunable.compacted()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """A directory and its logits for every family, and for a Llama with each kind of scaling."""
    place = tmp_path_factory.mktemp("stock")
    models = {family: tiny_model(family, dtype=torch.float32) for family in FAMILIES}
    for family, model in models.items():
        if rope := getattr(model.config, "rope_parameters", None):
            config = type(model.config).from_dict({**model.config.to_dict(), "rope_parameters": with_base(rope)})
            models[family] = type(model)(config)
            models[family].load_state_dict(model.state_dict())
    for name, rope in ROTATIONS.items():
        models[name] = tiny_model("llama", dtype=torch.float32, rope_parameters=with_base(rope))
    models["longrope"] = tiny_model("phi3", dtype=torch.float32, rope_parameters=with_base(LONGROPE))
    return {name: written(place / name, model) for name, model in models.items()}


def asked(command: list[str], script: str, folders: list[Path], **environment: str) -> dict[str, Any]:
    """What a program in another process says of the directories."""
    words = [*command, "-c", script, json.dumps(IDS.tolist()), *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def transformers_4() -> list[str]:
    if not (READERS / "transformers4" / "transformers").is_dir():
        pytest.skip("transformers 4 is not installed: make readers")
    return [sys.executable]


@pytest.fixture(scope="module")
def mlx() -> list[str]:
    python = READERS / "mlx" / "bin" / "python"
    if not python.exists():
        pytest.skip("mlx-lm is not installed: make readers")
    if subprocess.run([python, "-c", "import mlx.core"], capture_output=True, check=False).returncode:
        pytest.skip("mlx does not run on this machine")
    return [str(python)]


def close(found: Any, expected: npt.NDArray[np.float32]) -> bool:
    assert not isinstance(found, str), found
    return bool(np.abs(np.array(found) - expected).max() <= 2e-5 * np.abs(expected).max())


def test_transformers_5_reads_the_same_model(stock: dict[str, Written]) -> None:
    for name, (folder, logits) in stock.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            assert np.array_equal(model(IDS, use_cache=False).logits.numpy(), logits), name
        again = AutoConfig.from_pretrained(folder)
        add_for_other_readers(folder)  # nothing is added twice
        assert AutoConfig.from_pretrained(folder).to_dict() == again.to_dict(), name


def test_transformers_4_computes_the_same_logits(stock: dict[str, Written], transformers_4: list[str]) -> None:
    folders = [folder for folder, _ in stock.values()]
    found = asked(transformers_4, TRANSFORMERS_4, folders, PYTHONPATH=str(READERS / "transformers4"))
    refused = {name for name, (folder, _) in stock.items() if isinstance(found[str(folder)], str)}
    assert refused == NOT_IN_TRANSFORMERS_4, {name: found[str(stock[name][0])] for name in refused}
    for name, (folder, logits) in stock.items():
        assert name in refused or close(found[str(folder)], logits), name
        assert found[f"{folder} tokens"] == tiny_tokenizer()("Two words.").input_ids, name


def test_mlx_computes_the_same_logits(stock: dict[str, Written], mlx: list[str], tmp_path: Path) -> None:
    """Also in steps, with a cache; and models whose layers differ, by the file that is saved with them."""
    models = {name: stock[name] for name in (*MLX_FAMILIES, *MLX_EQUAL_HEADS, *ROTATIONS)}
    for family in (*MLX_FAMILIES, *MLX_EQUAL_HEADS):
        heads = {"cluster"} if family in {"glm4", "seed_oss", "ernie4_5"} else {"cluster", "unequal"}  # few heads
        for kind in {"ffn"} if family in MLX_EQUAL_HEADS else {"ffn"} | heads:
            models[f"{family} {kind}"] = written(tmp_path / f"{family}-{kind}", shrunk(family, kind)[0])
        models[f"{family} blocks"] = written(tmp_path / f"{family}-blocks", without_blocks(family))
    found = asked(mlx, MLX, [folder for folder, _ in models.values()])
    for name, (folder, logits) in models.items():
        answer = found[str(folder)]
        assert not isinstance(answer, str), f"{name}: {answer}"
        assert close(answer[0], logits) and close(answer[1], logits), name


@pytest.mark.parametrize(
    ("family", "kind", "named"),
    [
        ("llama", "cluster", True),
        ("llama", "stock", False),
        ("gemma3_text", "ffn", False),
        ("qwen2", "ffn", True),
        ("qwen2", "unequal", False),
    ],
)
def test_only_what_mlx_computes_alike_has_a_file_for_it(family: str, kind: str, named: bool, tmp_path: Path) -> None:
    folder, _ = written(tmp_path / "out", shrunk(family, kind)[0])
    config = json.loads((folder / "config.json").read_text())
    assert ("model_file" in config) == (folder / "mlx_dwindle.py").is_file() == named


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 5.0}, {"rope_theta": 5.0, "rope_scaling": None}),
        (
            {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0, "partial_rotary_factor": 0.5},
            {
                "rope_theta": 5.0,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "partial_rotary_factor": 0.5,
            },
        ),
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3.0},
            },
            {
                "rope_theta": 7.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 3.0,
            },
        ),
        (
            {**LONGROPE, "rope_theta": 5.0, "attention_factor": 1.2},  # no older form has it: all is kept
            {
                "rope_theta": 5.0,
                "rope_scaling": {
                    **{key: value for key, value in LONGROPE.items() if key != "partial_rotary_factor"},
                    "attention_factor": 1.2,
                },
                "partial_rotary_factor": 1.0,
            },
        ),
        (
            {"sliding_attention": {"rope_type": "default", "rope_theta": 3.0}, "full_attention": None},
            {"rope_theta": 3.0, "rope_scaling": None, "rope_local_base_freq": 3.0},
        ),
        ({"rope_type": "default"}, {}),
        (None, {}),
    ],
)
def test_older_keys_of_rotations(rope: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert rotary_keys(rope) == expected


def test_tokenizers_keep_a_class_and_special_tokens_that_transformers_4_knows(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"
    add_for_other_readers(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<a>", "<b>"] and "extra_special_tokens" not in config
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again("<a> x").input_ids == tokenizer("<a> x").input_ids
