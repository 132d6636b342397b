"""Integers that say what the float model says: exact smoothing, exact storage, errors as small as the bits allow."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import dwindle
from dwindle.anatomy.shrink import Float64Throughout
from dwindle.commands import main as cli
from dwindle.core.errors import UserError
from dwindle.export.verification import Mismatch
from dwindle.quantization import quantize as quantizing
from dwindle.quantization.clipping import CLIPS_4, group_clips
from dwindle.quantization.compressed_tensors import pack, unpack
from dwindle.quantization.linear import QuantizedLinear, dequantize, quantize_groups, quantize_rows, quantize_tokens
from dwindle.quantization.quantize import SCHEMES, load, quantize
from dwindle.quantization.smoothing import observe, smooth
from dwindle.sources.loading import Loaded
from tiny import FAMILIES, shrunk, tiny_directory, tiny_model, tiny_tokenizer, tokens


def logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=batch).logits


def tiny_source(family: str = "llama", **options: Any) -> Loaded:
    model = tiny_model(family, dtype=torch.float32, vocab_size=257, **options)
    return Loaded(model, tiny_tokenizer(), "tiny", "huggingface")


def test_rows_against_a_loop() -> None:
    weight = torch.randn(5, 7)
    values, scale = quantize_rows(weight)
    for row in range(5):
        step = max(abs(float(v)) for v in weight[row]) / 127
        assert float(scale[row, 0]) == pytest.approx(step)
        assert values[row].tolist() == [round(float(v) / float(scale[row, 0])) for v in weight[row]]


def test_tokens_against_a_loop() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    found = quantize_tokens(x)
    for b in range(2):
        for t in range(3):
            step = float(x[b, t].abs().max()) / 127.5
            for i in range(8):
                whole = min(round(float(x[b, t, i]) / step), 127)
                assert float(found[b, t, i]) == pytest.approx(whole * step, abs=1e-12)
    assert torch.equal(quantize_tokens(torch.zeros(1, 4)), torch.zeros(1, 4))


def test_groups_stay_within_a_step() -> None:
    """Half a step, and at most another half for the zero point, which is a whole number, too."""
    weight = torch.randn(6, 40)
    values, scale, zero = quantize_groups(weight, 8)
    assert values.min() >= -8 and values.max() <= 7 and scale.shape == zero.shape == (6, 5)
    error = (dequantize(values, scale, zero) - weight).abs()
    assert (error <= scale.repeat_interleave(8, dim=1) * 1.0001).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [32, 40, 7])
def test_packed_as_the_format_says(width: int, bits: int) -> None:
    high = 1 << (bits - 1)
    values = torch.randint(-high, high, (6, width), dtype=torch.int8)
    words = pack(values, bits)
    for row in range(6):
        whole = sum((int(v) + high) << (bits * i) for i, v in enumerate(values[row]))
        assert sum((int(w) % 2**32) << (32 * i) for i, w in enumerate(words[row])) == whole
    assert torch.equal(unpack(words, bits, width), values)
    assert torch.equal(unpack(pack(values, bits, rows=True), bits, 6, rows=True), values)
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(library.pack_to_int32(values, bits), words)
    assert torch.equal(library.pack_to_int32(values, bits, packed_dim=0), pack(values, bits, rows=True))


def test_clipping_never_makes_the_weighted_error_larger() -> None:
    weight, importance = torch.randn(9, 64).pow(3), torch.rand(64)

    def error(clip: Any) -> float:
        restored = dequantize(*quantize_groups(weight, 16, clip))
        return float(((restored - weight).square() * importance).sum())

    assert error(group_clips(weight, 16, importance)) < min(error(clip) for clip in CLIPS_4)


def test_a_linear_layer_multiplies_integers() -> None:
    layer = torch.nn.Linear(16, 8)
    values, scale = quantize_rows(layer.weight.detach())
    quantized = QuantizedLinear(values, scale, None, layer.bias.detach(), rounds="int8")
    x = torch.randn(3, 16)
    step = x.abs().amax(-1, keepdim=True) / 127.5
    whole = (x / step).round().clamp(max=127).long() @ values.long().T
    expected = whole * step * scale.T + layer.bias
    assert torch.allclose(quantized(x), expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_does_not_change_the_float_model(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64, vocab_size=257)
    with torch.no_grad():  # outliers, as real models have them
        for layer in model.model.layers:
            for name, gain in layer.named_parameters():
                if name.endswith("input_layernorm.weight"):
                    gain[3] *= 30
    batch = tokens(4, 24)
    smoothed = deepcopy(model)
    inputs = observe(smoothed, batch)
    found = smooth(smoothed, inputs)
    assert any(alpha is not None for alpha in found.chosen.values())
    assert all(found.error_after[k] <= found.error_before[k] for k in found.chosen)
    with Float64Throughout():
        assert torch.allclose(logits(smoothed, batch), logits(model, batch), atol=1e-9)
    again = observe(smoothed, batch)
    for name, seen in inputs.items():
        assert torch.allclose(seen.peak, again[name].peak, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_are_bit_equal_and_close_to_the_source(family: str, scheme: str, tmp_path: Path) -> None:
    source = tiny_source(family)
    found = quantize(source, scheme=scheme, out=tmp_path / "q", sequences=4, seq_len=32, group=8)
    batch = tokens(2, 16)
    expected = logits(source.model, batch)
    ours = logits(found.model, batch)
    assert torch.equal(logits(load(tmp_path / "q").model, batch), ours)
    limit = {"w8a8": 0.01, "w8": 0.005, "w4": 0.3, "fp8": 0.1}[scheme]
    limit *= 5 if family == "qwen3_5_text" else 1  # its linear attention adds errors up over positions
    assert float((ours - expected).square().mean() / expected.square().mean()) < limit
    assert found.bytes_after < 0.45 * found.bytes_before
    assert (tmp_path / "q" / "model.safetensors").stat().st_size < 0.7 * found.bytes_before


def test_cluster_models_and_generation(tmp_path: Path) -> None:
    folder = tiny_directory(tmp_path / "in")
    dwindle.prune(folder, "hidden=30,heads=5,ffn=33", metric="magnitude", attention="cluster", out=tmp_path / "cluster")
    found = quantize(tmp_path / "cluster", scheme="w8a8", out=tmp_path / "q", sequences=4, seq_len=32)
    model = load(tmp_path / "q").model
    batch = tokens(1, 8)
    assert torch.equal(logits(model, batch), logits(found.model, batch))
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(batch, **greedy), found.model.generate(batch, **greedy))


@pytest.mark.parametrize("kind", ["stock", "unequal", "cluster"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_and_its_package_compute_the_same(scheme: str, kind: str, tmp_path: Path) -> None:
    """Read by compressed-tensors; groups that do not divide the widths have 8-bit rows.

    Float arithmetic differs by 1e-6 of a value; a flip in the rounding of an activation may add one step of 8 bits.
    """
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model, _ = shrunk("llama", kind, vocab_size=257, intermediate_size=48)
    source = Loaded(model, tiny_tokenizer(), "tiny", "huggingface")
    found = quantize(source, scheme=scheme, out=tmp_path / "q", sequences=4, seq_len=32, group=16)
    assert (found.in_rows > 0) == (scheme == "w4" and kind != "stock")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    form = {"w8a8": "int-quantized", "fp8": "float-quantized"}.get(scheme, "pack-quantized")
    assert (config["dtype"], config["quantization_config"]["format"]) == ("bfloat16", form)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.float32, trust_remote_code=kind != "stock"
    )
    batch = tokens(2, 16)
    expected = logits(found.model, batch)
    tolerance = 1e-2 if SCHEMES[scheme].rounds else 1e-5
    difference = (logits(theirs, batch) - expected).abs()
    assert float(difference.max()) <= tolerance * float(expected.abs().max())
    assert float(difference.mean()) <= tolerance / 10 * float(expected.abs().mean())
    assert float((expected - logits(model, batch)).abs().mean()) > 1e-3 * float(expected.abs().mean())  # it was rounded


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_the_sources_are_found(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is what is evaluated, so both must be compared with the source."""
    for name in ("quantize_rows", "quantize_rows_fp8", "quantize_groups"):
        rightly = getattr(quantizing, name)
        monkeypatch.setattr(quantizing, name, lambda weight, *more, rightly=rightly: rightly(weight.flip(0), *more))
    with pytest.raises(Mismatch, match=r"self_attn.q_proj are 1\d\d% off the source's"):
        quantize(tiny_source(), scheme=scheme, out=tmp_path / "q", sequences=2, seq_len=16, group=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_and_tokens_of_zeros_stay_zeros(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Pruned channels and padding are such rows; float16 has no number near 1e-12 to divide by."""
    source = tiny_source()
    source.model.to(dtype)
    with torch.no_grad():
        source.model.model.layers[0].mlp.up_proj.weight[3] = 0
        source.model.model.layers[0].self_attn.q_proj.weight[0] = 1e-7
    found = quantize(source, scheme=scheme, out=tmp_path / "q", sequences=2, seq_len=16, group=8)
    layer = found.model.model.layers[0].mlp.up_proj
    assert torch.equal(dequantize(layer.weight, layer.scale, layer.zero)[3], torch.zeros(layer.weight.shape[1]))
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert all(tensor.float().isfinite().all() for tensor in stored.values())
    assert all((tensor.float() > 0).all() for name, tensor in stored.items() if name.endswith("_scale"))
    assert logits(load(tmp_path / "q").model, tokens(1, 6)).isfinite().all()
    for rounding in ("int8", "fp8"):
        assert torch.equal(quantize_tokens(torch.zeros(2, 4, dtype=dtype), rounding), torch.zeros(2, 4, dtype=dtype))


@pytest.mark.parametrize("name", ["model.layers.9.mlp.gate.weight", "model.norm.bias", "model.norm.weight"])
def test_tensors_that_do_not_fit_are_one_line(name: str, tmp_path: Path) -> None:
    quantize(tiny_source(), scheme="w8", out=tmp_path / "q", sequences=2, seq_len=16)
    file = tmp_path / "q" / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(3)}, file)
    with pytest.raises(UserError, match=r"^[^\n]* fit [^\n]*again$"):
        load(tmp_path / "q")


def test_perplexities_are_reported(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    found = quantize(
        tiny_source(), scheme="w8a8", valid=[str(tmp_path / "text.txt")], sequences=4, seq_len=32, valid_seq_len=64
    )
    assert set(found.perplexity) == {"source", "plain", "quantized"}
    assert found.perplexity["quantized"] == pytest.approx(found.perplexity["source"], rel=0.1)
    assert "against the source" in found._repr_html_()
    unmeasured = quantize(tiny_source(), scheme="w8", sequences=2, seq_len=16)
    assert "perplexity" not in unmeasured._repr_html_()
    json.dumps(found.to_json())


def test_inspection_says_who_reads_it(tmp_path: Path) -> None:
    folder = tiny_directory(tmp_path / "model")
    quantize(folder, scheme="w8a8", out=tmp_path / "q", sequences=2, seq_len=16)
    plain, found = dwindle.inspect(folder), dwindle.inspect(tmp_path / "q")
    assert plain.stock and plain.quantization is None
    assert found.stock and found.quantization == "compressed-tensors" and found.parameters == plain.parameters
    console = Console(width=80, file=StringIO())
    console.print(found.render())
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "quantized weights (compressed-tensors): transformers and vLLM load them" in shown
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    assert dwindle.inspect(folder).quantization == "gptq"


def test_user_errors(tmp_path: Path) -> None:
    source = tiny_source()
    with pytest.raises(UserError, match=r'^scheme: expected one of "w8a8", "w8", "w4", "fp8", got "w3"$'):
        quantize(source, scheme="w3")
    tiny_directory(tmp_path / "model")
    with pytest.raises(UserError, match="device: 'abacus' is not usable"):
        quantize(tmp_path / "model", scheme="w8", device="abacus")
    with pytest.raises(UserError, match=r"^group: 7 must be at least 2 and a multiple of 2$"):
        quantize(source, scheme="w4", group=7)
    quantize(source, scheme="w8", out=tmp_path / "q", sequences=2, seq_len=16)
    with pytest.raises(UserError, match="already exists"):
        quantize(source, scheme="w8", out=tmp_path / "q")
    with pytest.raises(UserError, match="compressed-tensors quantised"):
        dwindle.load(tmp_path / "q")
    with pytest.raises(UserError, match="not a complete directory"):
        load(tmp_path)
    whole = (tmp_path / "q" / "model.safetensors").read_bytes()
    (tmp_path / "q" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a complete directory"):
        load(tmp_path / "q")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_finds_what_the_cpu_finds(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    tiny_directory(tmp_path / "model")
    options: dict[str, Any] = {"sequences": 4, "seq_len": 32, "valid_seq_len": 64}
    valid = [str(tmp_path / "text.txt")]
    here, there = (
        quantize(tmp_path / "model", scheme=scheme, valid=valid, out=tmp_path / device, device=device, **options)
        for device in ("cpu", "cuda")
    )
    assert next(there.model.parameters()).is_cuda
    assert there.perplexity == pytest.approx(here.perplexity, rel=1e-3)
    batch = tokens(2, 9)
    again = load(tmp_path / "cuda").model.cuda()
    assert torch.equal(logits(again, batch.cuda()), logits(there.model, batch.cuda()))


@pytest.mark.skipif(os.environ.get("DWINDLE_SLOW") != "1", reason="minutes: set DWINDLE_SLOW=1 to run it")
def test_smollm2_w8a8_within_two_percent(shared_data: Path) -> None:
    text = str(shared_data / "corpus" / "wikitext-2-raw.test.txt")
    found = quantize("smollm2-135m", scheme="w8a8", valid=[text], valid_seq_len=512, valid_tokens=16_384)
    print(json.dumps(found.to_json()))
    assert found.perplexity["quantized"] < 1.02 * found.perplexity["source"]
    assert found.perplexity["quantized"] < found.perplexity["plain"]


def test_the_command_ends_with_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_directory(tmp_path / "model")
    arguments = ["dwindle", "quantize", "model", "--scheme", "w8", "--out", "q", "--sequences", "2", "--seq-len", "16"]
    monkeypatch.setattr(sys, "argv", arguments)
    with contextlib.suppress(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert "next: dwindle eval q --text TEXT" in said and "next: vllm serve q " in said


@pytest.mark.parametrize(
    ("value", "said"),
    [(1e6, r"--valid: source: a loss of .* nats per token has no perplexity"), (math.nan, "holds non-finite values")],
)
def test_a_model_without_a_perplexity_is_one_line(value: float, said: str, tmp_path: Path) -> None:
    loaded = tiny_source()
    with torch.no_grad():
        loaded.model.lm_head.weight.mul_(value)
    (tmp_path / "t.txt").write_text("The cat sat on the mat. " * 99)
    small: dict[str, Any] = {"sequences": 2, "seq_len": 32, "valid_seq_len": 32, "valid_tokens": 64}
    text = [str(tmp_path / "t.txt")]
    with pytest.raises(UserError, match=said):
        quantize(loaded, scheme="w8", data=text, valid=text, out=tmp_path / "out", **small)
    assert not (tmp_path / "out").exists()
