"""K types and IQ4_NL: llama.cpp's own rounding, its choice of types, and what rows that do not fit cost."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dwindle.export import gguf_types
from dwindle.export.exporting import export
from dwindle.sources.gguf_file import open_gguf
from edge_models import tiny_loaded

gguf = pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
xllamacpp = pytest.importorskip("xllamacpp", reason="pip install -e '.[gguf]'")

MIXED = ("q4_k_m", "q5_k_m", "q6_k", "iq4_nl")
ROUND = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_key_value_heads": 4}
"""Every row is a whole number of blocks of 256."""


@pytest.mark.parametrize(("name", "largest"), [("Q4_K", 0.09), ("Q5_K", 0.045), ("Q6_K", 0.025), ("IQ4_NL", 0.09)])
def test_bytes_are_read_back_bit_by_bit(name: str, largest: float) -> None:
    """By the gguf package as by llama.cpp's own function, and close to what was written; threads change nothing."""
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    packed = gguf_types.quantize(gguf, values, kind)
    assert np.array_equal(gguf_types.quantize(gguf, values, kind, threads=4), packed)
    ours = gguf.quants.dequantize(packed, kind)
    library = next(Path(xllamacpp.__file__).parent.glob("*.so"))
    read = getattr(ctypes.CDLL(str(library)), f"dequantize_row_{name.lower().replace('_k', '_K')}")
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    theirs = np.zeros_like(values)
    read(packed.ctypes.data, theirs.ctypes.data, values.size)
    assert np.array_equal(ours, theirs)
    assert float(np.sqrt(np.square(ours - values).mean())) < largest


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("structure", ["full", "layers", "cluster"])
def test_files_run_in_llamacpp(kind: str, structure: str, tmp_path: Path) -> None:
    """Stock, unequal layers and cluster attention; llama.cpp's probabilities are those of the stored weights."""
    found = export(tiny_loaded("llama", structure, **ROUND), "gguf", tmp_path / "m.gguf", type=kind)
    assert found.verified is not None and found.verified.runtime == "llama.cpp"
    assert structure != "full" or not found.warnings
    assert found.architecture == ("llama" if structure == "full" else "deci")


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def test_quantized_files_state_the_version_of_their_blocks(tmp_path: Path) -> None:
    """The specification asks for it where any tensor has blocks."""
    for type_, version in (("f16", None), ("q8_0", 2), ("q4_k_m", 2)):
        export(tiny_loaded("llama", **ROUND), "gguf", tmp_path / f"{type_}.gguf", type=type_, verify=False)
        assert open_gguf(tmp_path / f"{type_}.gguf").metadata.get("general.quantization_version") == version


def test_some_layers_get_more_bits(tmp_path: Path) -> None:
    """As llama-quantize: the tied embedding, and v and down of the first and last eighth and every third between."""
    loaded = tiny_loaded("llama", **ROUND, num_hidden_layers=10, tie_word_embeddings=True)
    export(loaded, "gguf", tmp_path / "m.gguf", type="q4_k_m", verify=False)
    found = types_of(tmp_path / "m.gguf")
    assert found["token_embd.weight"] == "Q6_K" and found["output_norm.weight"] == "F32"
    for number in range(10):
        more = number in (0, 3, 6, 8, 9)  # ⌊10 / 8⌋ = 1, ⌊70 / 8⌋ = 8
        for part in ("attn_v", "ffn_down"):
            assert found[f"blk.{number}.{part}.weight"] == ("Q6_K" if more else "Q4_K"), (number, part)
        assert found[f"blk.{number}.attn_q.weight"] == found[f"blk.{number}.ffn_up.weight"] == "Q4_K"


def test_rows_that_do_not_fit_and_what_they_cost(tmp_path: Path) -> None:
    """Hidden 64 has no block of 256: q5_0 and q8_0 there, and padding would cost more, so it is not advised."""
    loaded = tiny_loaded("llama", hidden_size=64, intermediate_size=256, head_dim=32)
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="q4_k_m", verify=False)
    types = types_of(tmp_path / "m.gguf")
    assert types["blk.0.attn_q.weight"] == "Q5_0" and types["blk.0.ffn_down.weight"] in ("Q4_K", "Q6_K")
    assert types["output.weight"] == "Q8_0"
    assert len(found.warnings) == 1 and "hidden 64 is not a multiple of it" in found.warnings[0]
    assert "stored as q5_0 and q8_0 (" in found.warnings[0] and "--round 256 pads" not in found.warnings[0]
    assert "`dwindle prune --round-to 256` avoids it" in found.warnings[0]
    loaded = tiny_loaded("llama", hidden_size=256, intermediate_size=500, head_dim=32)
    found = export(loaded, "gguf", tmp_path / "n.gguf", type="q4_k_m", verify=False)
    assert "FFN 500 in all layers" in found.warnings[0] and "--round 256 pads widths" in found.warnings[0]
    rounded = export(loaded, "gguf", tmp_path / "r.gguf", type="q4_k_m", round_to=256, verify=False)
    assert not rounded.warnings and rounded.num_bytes < found.num_bytes


def test_a_file_with_two_block_sizes_names_the_larger(tmp_path: Path) -> None:
    """IQ4_NL has blocks of 32, but its head is Q6_K, which hidden 64 has no block of 256 for."""
    loaded = tiny_loaded("llama", hidden_size=64, intermediate_size=256, head_dim=32)
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="iq4_nl", verify=False)
    types = types_of(tmp_path / "m.gguf")
    assert types["blk.0.attn_q.weight"] == "IQ4_NL" and types["output.weight"] == "Q8_0"
    assert len(found.warnings) == 1 and "stores some rows in blocks of 256, and hidden 64 is not" in found.warnings[0]
    fallback = gguf_types.Fallback("a", "f16", 32, 1.0, 2.0)
    assert "1 tensor is stored as f16" in gguf_types.describe_fallbacks("q8_0", [fallback], [])


def test_the_cost_is_the_difference_in_bytes(tmp_path: Path) -> None:
    choice: Any = gguf_types.TypeChoice(gguf, "q4_k_m", ["blk.0.attn_q.weight"], 1)
    assert choice("blk.0.attn_q.weight", (8, 96)).name == "Q5_0"
    assert choice.fallbacks[0].more_bytes == pytest.approx(8 * 96 * (22 / 32 - 144 / 256))
    assert choice.fallbacks[0].padding_bytes == pytest.approx(8 * 160 * 144 / 256)
