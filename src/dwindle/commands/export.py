"""``dwindle export``, ``dwindle quantize`` and ``dwindle bench latency``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import Device, Json, Model, TextField, app, chosen_device, print_result
from dwindle.commands.models import taken_model
from dwindle.core.errors import UserError

bench = typer.Typer(help="Measure speed relative to a baseline.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.command()
def export(
    model: Model,
    to: Annotated[str, typer.Option(help="hf (directory), gguf (llama.cpp file) or onnx (directory).")],
    out: Annotated[str, typer.Option(help="Directory, or for gguf a file name that ends in .gguf.")],
    type_: Annotated[
        str | None,
        typer.Option("--type", help="gguf: f32, f16, bf16, q8_0, q4_0, q4_1 (default f16); hf: f32, f16, bf16."),
    ] = None,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Pad cluster attention and unequal layers to a stock model (exact)."),
    ] = False,
    round_to: Annotated[
        int | None, typer.Option("--round", help="Pad hidden and FFN widths to a multiple of this (exact).")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads for the verification.")] = 1,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing export.")] = False,
    as_json: Json = False,
) -> None:
    """Export a model for another runtime; the export is run there and compared with its source."""
    from dwindle.export.exporting import export

    model = taken_model(model)
    found = export(model, to, out, type_=type_, stock=stock, round_to=round_to, threads=threads, overwrite=overwrite)
    print_result(found.to_json() if as_json else found.render(), as_json)


@app.command()
def quantize(
    model: Model,
    out: Annotated[str, typer.Option(help="Directory to write.")],
    scheme: Annotated[str, typer.Option(help="w8a8, w8 or w4.")] = "w8a8",
    data: Annotated[list[str] | None, typer.Option(help="Text to calibrate on; default: CPython's docs.")] = None,
    valid: Annotated[list[str] | None, typer.Option(help="Text to measure perplexity on.")] = None,
    text_field: TextField = "text",
    smoothing: Annotated[bool, typer.Option(help="Move activation outliers into the weights (w8a8).")] = True,
    group: Annotated[int, typer.Option(help="w4: weights that share a scale.")] = 32,
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 32,
    seq_len: Annotated[int, typer.Option(help="Tokens per calibration sequence.")] = 256,
    valid_seq_len: Annotated[int, typer.Option(help="Tokens per window of --valid.")] = 1024,
    valid_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of --valid.")] = 65_536,
    seed: Annotated[int, typer.Option(help="Seed of the calibration sample.")] = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing quantized model.")] = False,
    as_json: Json = False,
) -> None:
    """Quantize weights (and activations) to 8 or 4 bits, calibrated on text."""
    from dwindle.data.pydoc_text import DEFAULT_TEXT
    from dwindle.quantization import quantize

    found = quantize(
        taken_model(model),
        scheme,
        out=out,
        data=data or [DEFAULT_TEXT],
        valid=valid or [],
        text_field=text_field,
        smoothing=smoothing,
        group=group,
        num_sequences=sequences,
        seq_len=seq_len,
        valid_seq_len=valid_seq_len,
        valid_tokens=valid_tokens,
        seed=seed,
        device=chosen_device(device),
        overwrite=overwrite,
    )
    print_result(found.to_json() if as_json else found.render(), as_json)


@bench.command()
def latency(
    models: Annotated[list[str], typer.Argument(help="Models to compare; the first one is the baseline.")],
    runtime: Annotated[str, typer.Option(help="torch, llamacpp, onnx, or several separated by commas.")] = "torch",
    threads: Annotated[str, typer.Option(help="Thread counts, such as 1,2,4,8.")] = "1",
    prompt: Annotated[int, typer.Option(help="Tokens in the prompt.")] = 64,
    new: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    repeats: Annotated[int, typer.Option(help="Repetitions; models take turns within each.")] = 5,
    type_: Annotated[str, typer.Option("--type", help="GGUF type for llama.cpp.")] = "f16",
    round_to: Annotated[int | None, typer.Option("--round", help="Pad widths to a multiple of this.")] = None,
    as_json: Json = False,
) -> None:
    """Time prefill and decoding of several models, as ratios to the first."""
    from dwindle.evaluation.latency import measure_latency

    try:
        counts = [int(part) for part in threads.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(f"--threads {threads!r}: give whole numbers, such as 1,2") from error
    found = measure_latency(
        [taken_model(model) for model in models],
        runtime=[part.strip() for part in runtime.split(",") if part.strip()],
        threads=counts or [1],
        prompt_tokens=prompt,
        new_tokens=new,
        repeats=repeats,
        type_=type_,
        round_to=round_to,
    )
    print_result(found.to_json() if as_json else found.render(), as_json)
