"""The predicted size of a GGUF file is the written one, for every type, kind of layers and vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.export.gguf_size import ABOUT_BYTES, FileSize
from dwindle.export.gguf_types import TYPES
from dwindle.sources.loading import Loaded, load
from tiny import merged_directory, merged_tokenizer, shrunk, tiny_directory


@pytest.mark.parametrize("type_", TYPES)
def test_every_type_to_the_byte(type_: str, tmp_path: Path) -> None:
    """Widths of 256, 96 and 31: whole blocks, blocks of 32 alone, and none."""
    if type_ in ("q4_k_m", "q5_k_m", "q6_k", "iq4_nl"):
        pytest.importorskip("xllamacpp")
    for hidden, ffn in ((256, 96), (32, 31)):
        place = merged_directory(tmp_path / f"model-{hidden}", 320, hidden_size=hidden, intermediate_size=ffn)
        out = tmp_path / f"{hidden}.gguf"
        found = dwindle.export_model(place, "gguf", out, type=type_, verify=False)
        assert found.predicted_bytes == found.num_bytes == out.stat().st_size
        assert f"predicted {found.num_bytes:,} bytes, written {found.num_bytes:,}" in found.render()
        model, tokenizer = load(place)
        limit = FileSize(model.config, tokenizer, type_, "--to")(Anatomy.of(model).source)
        assert 0 <= limit - found.num_bytes <= ABOUT_BYTES


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in ("stock", "ffn", "unequal", "cluster")),
        *(
            ("qwen2", "unequal"),
            ("gemma3_text", "stock"),
            ("gemma3_text", "ffn"),
            ("lfm2", "stock"),
            ("olmo2", "stock"),
        ),
    ],
)
def test_every_kind_of_layers(family: str, kind: str, tmp_path: Path) -> None:
    """From the structure alone, also where heads are padded; what cannot be written is refused by both."""
    options: dict[str, Any] = {"vocab_size": 320}
    if family == "llama":
        options |= {"attention_bias": False, "mlp_bias": False}
    if family == "gemma3_text":
        options |= {"query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 3}
    model, structure = shrunk(family, kind, **options)
    whole, _ = shrunk(family, "stock", **options)
    tokenizer = merged_tokenizer(320)
    source = Loaded(model, tokenizer, "it", "huggingface")
    size_of = FileSize(whole.config, tokenizer, "q8_0", "--to")
    try:
        found = dwindle.export_model(source, "gguf", tmp_path / "m.gguf", type="q8_0", verify=False)
    except UserError:
        with pytest.raises(UserError, match=r"^--to: there is no such file"):
            size_of(structure)
        return
    assert found.predicted_bytes == found.num_bytes
    assert 0 <= size_of(structure) - found.num_bytes <= ABOUT_BYTES


def test_a_wrong_prediction_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = merged_directory(tmp_path / "model", 320)
    about: dict[str, Any] = {"type": "bf16", "verify": False}
    assert not dwindle.export_model(place, "gguf", tmp_path / "right.gguf", **about).warnings
    monkeypatch.setattr("dwindle.export.exporting.predicted_bytes", lambda *_, **__: 1)
    found = dwindle.export_model(place, "gguf", tmp_path / "wrong.gguf", **about)
    assert [text for text in found.warnings if text.startswith("the file has another size than predicted")]


def test_unknown_types_are_refused(tmp_path: Path) -> None:
    model, tokenizer = load(tiny_directory(tmp_path / "model"))
    with pytest.raises(UserError, match=r"^--to 9MB@q9: 'q9' is not a type of GGUF files: give one of f32"):
        FileSize(model.config, tokenizer, "q9", "--to 9MB@q9")
