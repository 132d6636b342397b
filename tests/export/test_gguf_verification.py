"""A GGUF file that says or computes something else than its source is refused: weights, numbers, tokens, chats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dwindle.export import gguf_verification, gguf_writer
from dwindle.export.exporting import export
from dwindle.export.gguf_vocabulary import vocabulary_of
from dwindle.export.gguf_writer import write_gguf
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.export.verification import Mismatch
from edge_models import byte_pair_tokenizer, tiny_loaded

pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install -e '.[gguf]'")


def write_a_strong_layer(path: Path, model: Any, *args: Any, **options: Any) -> gguf_writer.Written:
    """A file whose last FFN is half too strong, and that does not say so."""
    down = model.model.layers[-1].mlp.down_proj.weight
    with torch.no_grad():
        down.mul_(1.5)
        written = write_gguf(path, model, *args, **options)
        down.div_(1.5)
    written.stored |= {name: values / 1.5 for name, values in written.stored.items() if "2.mlp.down" in name}
    return written


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_1"])
def test_a_layer_that_is_half_too_strong_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean difference of 0.24, which quantized types were allowed once."""
    monkeypatch.setattr(gguf_writer, "write_gguf", write_a_strong_layer)
    with pytest.raises(Mismatch, match="mean difference of a log-probability"):
        export(tiny_loaded("llama", hidden_size=64, intermediate_size=96), "gguf", tmp_path / "m.gguf", type=kind)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_1"])
def test_where_rounding_alone_is_more_it_is_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for models that were pruned and not trained; here the limit is lowered instead."""
    loaded = tiny_loaded("llama", hidden_size=64, intermediate_size=96)
    monkeypatch.setitem(gguf_verification.LLAMACPP_TOLERANCE, kind, 1e-4)
    found = export(loaded, "gguf", tmp_path / "m.gguf", type=kind).verified
    assert found is not None and 1e-4 < found.max_error < found.tolerance < 0.2
    monkeypatch.setattr(gguf_writer, "write_gguf", write_a_strong_layer)
    with pytest.raises(Mismatch):
        export(loaded, "gguf", tmp_path / "m.gguf", type=kind, overwrite=True)


def test_a_doubtful_file_is_kept_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above what rounding explains, but by less than twice: the user may judge it; a worse one is removed."""
    loaded = tiny_loaded("llama", hidden_size=64, intermediate_size=96)
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="q8_0").verified
    assert found is not None
    monkeypatch.setattr(gguf_verification, "ROUNDING_FACTOR", 0.0)
    for share, kept in ((0.7, {"n.unverified.gguf"}), (0.3, set())):
        (tmp_path / "n.unverified.gguf").unlink(missing_ok=True)
        monkeypatch.setitem(gguf_verification.LLAMACPP_TOLERANCE, "q8_0", share * found.max_error)
        with pytest.raises(Mismatch, match="kept as .*n.unverified.gguf" if kept else "was removed"):
            export(loaded, "gguf", tmp_path / "n.gguf", type="q8_0")
        assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "m.Modelfile"} | kept
    assert export(loaded, "gguf", tmp_path / "n.gguf", type="q8_0", verify=False).verified is None


def test_rounding_as_llamacpp_does_it() -> None:
    x = torch.randn(3, 64)
    rounded = gguf_verification.rounded_input(x, "q8_0")
    for row, found in zip(x.view(6, 32), rounded.view(6, 32), strict=True):
        step = row.abs().max() / 127
        assert (
            torch.allclose(found / step, (row / step).round(), atol=1e-3) and (found - row).abs().max() <= step / 1.99
        )
    assert torch.equal(gguf_verification.rounded_input(x[:, :31], "q4_0"), x[:, :31].half().float())
    assert torch.equal(gguf_verification.rounded_input(x, "bf16"), x.bfloat16().float())


def test_a_wrong_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_writer, "interleaved_from", lambda rows, heads: rows)
    with pytest.raises(Mismatch, match=r"a row of model.layers.0.self_attn.q_proj.weight was written \d+% off"):
        export(tiny_loaded(), "gguf", tmp_path / "m.gguf", type="f32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("type_", ["f16", "bf16", "q8_0", "q4_0", "q4_k_m", "iq4_nl"])
def test_stored_weights_that_are_not_the_sources_are_found(
    type_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runtimes are compared with the weights as stored, so those must be the source's, but for rounding."""
    loaded, rightly = tiny_loaded(), gguf_writer.quantize

    def wrongly(gguf: Any, values: Any, kind: Any, threads: int) -> Any:
        return rightly(gguf, 2 * values if kind.name != "F32" else values, kind, threads)

    export(loaded, "gguf", tmp_path / "good.gguf", type=type_)
    monkeypatch.setattr(gguf_writer, "quantize", wrongly)
    with pytest.raises(Mismatch, match=r"a row of .* was written \d+% off the source's"):
        export(loaded, "gguf", tmp_path / "bad.gguf", type=type_)
    assert not (tmp_path / "bad.gguf").exists()


@pytest.mark.parametrize("type_", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("rows", [[305], [7, 8]], ids=["that no prompt reads", "in another order"])
def test_rows_that_are_not_the_sources_are_found(
    type_: str, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, rightly = tiny_loaded(), gguf_writer.quantize

    def wrongly(gguf: Any, values: Any, kind: Any, threads: int) -> Any:
        if len(values) == 310:
            values = values.copy()
            values[rows] = -values[rows[::-1]]
        return rightly(gguf, values, kind, threads)

    monkeypatch.setattr(gguf_writer, "quantize", wrongly)
    with pytest.raises(Mismatch, match=r"a row of model.embed_tokens.weight was written \d+% off"):
        export(loaded, "gguf", tmp_path / "m.gguf", type=type_)


@pytest.mark.parametrize("share", [1.1, 0.9])
def test_a_scale_that_rounding_does_not_explain_is_found(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once 40 % of a tensor were allowed for every type: too strong by a tenth is too much for 8 bits."""
    loaded, rightly = tiny_loaded("llama", hidden_size=64, intermediate_size=96), gguf_writer.quantize
    monkeypatch.setattr(gguf_writer, "quantize", lambda gguf, values, *more: rightly(gguf, share * values, *more))
    for type_ in ("f32", "bf16", "q8_0"):
        with pytest.raises(Mismatch, match="written 10% off"):
            export(loaded, "gguf", tmp_path / "m.gguf", type=type_)
    monkeypatch.setattr(gguf_writer, "quantize", lambda gguf, values, *more: rightly(gguf, share**2 * values, *more))
    for type_ in ("q4_0", "q4_1", "q4_k_m", "iq4_nl"):
        with pytest.raises(Mismatch, match="off the source's"):
            export(loaded, "gguf", tmp_path / "m.gguf", type=type_)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "iq4_nl"])
def test_rows_that_round_worst_are_written(kind: str, tmp_path: Path) -> None:
    """One large value in every block, zeros, a row of values that 16 bits do not have, and wide ranges."""
    loaded = tiny_loaded("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                rows = torch.full((5, 256), 0.99 / 16)
                rows[0, ::32], rows[1, ::32], rows[2], rows[3] = 1, -1, 0, 3e-8
                rows[4] = torch.logspace(-6, 0, 256)
                weight.copy_(0.3 * rows.repeat(len(weight) // 5 + 1, 1)[: len(weight)])
    export(loaded, "gguf", tmp_path / "m.gguf", type=kind, verify=False)


@pytest.mark.parametrize("type_", ["f16", "q8_0"])
def test_rotations_of_late_positions_are_seen(type_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3's divisors change slow rotations only; single sentences did not show their absence in 8 bits."""
    monkeypatch.setattr(gguf_writer, "rope_tables", lambda *a: {})
    with pytest.raises(Mismatch, match=r"for model\.rotary_emb\.inv_freq the output states another one"):
        export(tiny_loaded("Llama-3.2-1B"), "gguf", tmp_path / "m.gguf", type=type_)


@pytest.mark.parametrize(
    ("family", "key", "factor", "said"),
    [
        ("llama", "attention.layer_norm_rms_epsilon", 10, "eps(ilon)?"),
        ("lfm2", "attention.layer_norm_rms_epsilon", 0.1, "eps(ilon)?"),
        ("llama", "rope.freq_base", 1.001, "inv_freq"),
        ("llama", "context_length", 2, "context"),
        ("mistral", "context_length", 2, "context"),
        ("granite", "residual_scale", 1.001, "residual_multiplier"),
        ("granite", "attention.scale", 1.001, "scaling"),
        ("gemma3_text", "rope.freq_base_swa", 1.001, "inv_freq"),
        ("gemma3_text", "attention.sliding_window", 2, "sliding_window"),
        ("ministral3", "attention.temperature_scale", 1.01, "llama_4_scaling_beta"),
        ("ministral3", "rope.scaling.factor", 1.001, "inv_freq"),
        ("yarn", "rope.scaling.attn_factor", 1.001, "attention_scaling"),
        ("llama3", "rope.freq_base", 1.001, "inv_freq"),
        ("linear", "rope.scaling.factor", 1.001, "inv_freq"),
    ],
)
def test_numbers_that_prompts_hardly_show_are_read_back(
    family: str, key: str, factor: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32, "attention_factor": 1.5}
    options: dict[str, Any] = {
        "mistral": {"sliding_window": 300, "max_position_embeddings": 600},
        "lfm2": {"conv_bias": False},
        "gemma3_text": {"query_pre_attn_scalar": 8},
        "ministral3": {"sliding_window": None},
        "yarn": {"rope_parameters": {**rope, "rope_type": "yarn"}},
        "llama3": {"rope_parameters": {**rope, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    }
    loaded = tiny_loaded("llama" if "rope_parameters" in options.get(family, {}) else family, **options.get(family, {}))
    export(loaded, "gguf", tmp_path / "good.gguf", type="q8_0")
    rightly = gguf_writer._hyperparameters

    def wrongly(model: Any, architecture: str) -> dict[str, Any]:
        values = rightly(model, architecture)
        return values | {key: type(values[key])(values[key] * factor)}

    monkeypatch.setattr(gguf_writer, "_hyperparameters", wrongly)
    with pytest.raises(Mismatch, match=f"for .*{said} the output states"):
        export(loaded, "gguf", tmp_path / "bad.gguf", type="q8_0")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"types": [1] * 310}, "as an ordinary token: '<.endoftext.>'"),
        ({"types": [4, 4, *[1] * 298, *[5] * 10]}, "as an ordinary token: '<.endoftext.>'"),
        ({"special_ids": {"bos": 0, "eos": 0, "padding": 3}}, "3 as the padding token, not None"),
        ({"special_ids": {"bos": 0, "eos": 5}}, "5 as the eos token, not 0"),
        ({"chat_template": "{{ 'x' }}"}, "another chat template"),
        ({"chat_template": None}, "another chat template"),
    ],
)
def test_what_runtimes_read_besides_weights_is_compared(
    changed: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = vocabulary_of(byte_pair_tokenizer(), 310, "tiny")
    monkeypatch.setattr("dwindle.export.exporting.vocabulary_of", lambda *a: replace(vocabulary, **changed))
    with pytest.raises(Mismatch, match=said):
        export(tiny_loaded(), "gguf", tmp_path / "m.gguf")


def test_a_file_llamacpp_refuses_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, *args: Any, **kwargs: Any) -> gguf_writer.Written:
        path.write_bytes(b"GGUF" + bytes(100))
        return gguf_writer.Written("llama")

    monkeypatch.setattr(gguf_writer, "write_gguf", broken)
    with pytest.raises(Mismatch, match="cannot be read back"):
        export(tiny_loaded(), "gguf", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_other_token_ids_are_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dwindle.export.gguf_vocabulary.added_around", lambda tokenizer: (True, False))
    with pytest.raises(Mismatch, match="differently"):
        export(tiny_loaded(), "gguf", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


ROLES = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ROLES + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}\n", None),
        ("{{ bos_token }}" + ROLES, None),
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + ROLES, None),
        (
            "{{ messages[-1]['content'] }}",
            "renders a chat of system and user differently",
        ),
        (
            "{% for m in messages %}{{ m['content'].zfill(9) }}{% endfor %}",
            "cannot render a chat of user: it cannot read",
        ),
        (ROLES + "{{ '%04d' % 7 if messages | length > 2 }}", "cannot render a chat of user, assistant and user: "),
        (None, None),
    ],
    ids=["roles", "begin", "no system", "drops the system", "not read", "not rendered", "none"],
)
def test_chats_are_rendered_as_by_the_tokenizer(template: str | None, said: str | None, tmp_path: Path) -> None:
    """llama.cpp adds a system message where the template drops it, and knows less of Jinja."""
    loaded = tiny_loaded()
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = template
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="f16")
    assert len(found.warnings) == (said is not None)
    assert said is None or f"llama.cpp {said}" in found.warnings[0]


def test_an_error_is_that_of_the_call_and_not_that_of_the_template(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = "{{ messages[0]['content'].zfill(9) }}"
    out = export(loaded, "gguf", tmp_path / "m.gguf", type="f16", verify=False).out
    with (
        RuntimeProcess("llamacpp", out, context=64) as runtime,
        pytest.raises(RuntimeFailure, match="exceeds the available context"),
    ):
        runtime.call("greedy", ids=[5] * 999, count=1)
