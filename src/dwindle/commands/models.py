"""``dwindle inspect`` and ``dwindle prune``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dwindle.commands.app import Device, Json, Model, TextField, app, chosen_device, print_result
from dwindle.core.errors import UserError


def taken_model(name: str) -> str:
    """The model that is meant: of a run its own, which is said on standard error."""
    from dwindle.sources import model_of_run

    model = model_of_run(Path(name))
    if model is None:
        return name
    print(f"{name} is a run: its model, {model}, is taken", file=sys.stderr)
    return str(model)


def say_odd_sizes(model: str | Path, remedy: str | None) -> None:
    """Those who want a quantised file of what was just made should know before they measure it.

    ``remedy`` is what would have made the sizes round; None for the methods that cannot.
    """
    from dwindle.anatomy import Anatomy
    from dwindle.export.exporting import odd_sizes
    from dwindle.sources import load_config

    if odd := odd_sizes(Anatomy.of_config(load_config(str(model))).source):
        what = f"{' and '.join(odd)}: not in blocks of 32, so most rows of a quantised GGUF file stay f16"
        padding = "padding by `dwindle export --round 32`"
        ways = padding if remedy is None else f"{remedy}, or {padding},"
        print(f"note: {what}; {ways} avoids it", file=sys.stderr)


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """Show layers, heads, widths, parameters by part, and what a group of each type weighs."""
    from dwindle.run.inspection import inspect

    found = inspect(taken_model(model))
    print_result(found.to_json() if as_json else found.render(), as_json)


@app.command()
def prune(
    model: Model,
    to: Annotated[str, typer.Option(help="100M, 0.6, 60%, 50%nonemb, or hidden=512,heads=8,ffn=1280.")],
    out: Annotated[str, typer.Option(help="Directory to write.")],
    data: Annotated[
        list[str] | None, typer.Option(help="Text to calibrate on; default: CPython's own documentation (pydoc).")
    ] = None,
    more_data: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="More text after --data, such as of --data *.txt.")
    ] = None,
    text_field: TextField = "text",
    method: Annotated[
        str,
        typer.Option(
            help="efficientllm (minimal groups), adapt (layers by their importance, Adapt-Pruner) or uniform "
            "(the same share of every layer, LLM-Pruner)."
        ),
    ] = "efficientllm",
    selection: Annotated[
        str, typer.Option(help="With efficientllm: coupled (the same group in every layer) or global (anywhere).")
    ] = "coupled",
    metric: Annotated[
        str | None,
        typer.Option(
            help="taylor, taylor1, obd, wanda, obc, magnitude, random or a registered one; default: taylor, with "
            "adapt, uniform taylor1."
        ),
    ] = None,
    second_order: Annotated[
        bool, typer.Option("--second-order", help="Repair what stays from the layers' inputs (EfficientLLM-B).")
    ] = False,
    groups: Annotated[
        str | None,
        typer.Option(help="The types that may leave; default: attn,ffn,stem, with adapt and uniform attn,ffn."),
    ] = None,
    attention: Annotated[str, typer.Option(help="regular (stock everywhere) or cluster (the paper's).")] = "regular",
    compare: Annotated[str, typer.Option(help="How types are compared: mean or sum of element scores.")] = "mean",
    rounds: Annotated[
        int | None, typer.Option(help="Score anew this many times on the way; default: 1, with adapt 50.")
    ] = None,
    amplitude: Annotated[
        float, typer.Option(help="With adapt: how far a round moves the least and the most important layer apart.")
    ] = 0.02,
    distance: Annotated[
        str,
        typer.Option(help="With adapt: how a layer's change of the stream is measured: cosine, euclidean, manhattan."),
    ] = "cosine",
    balance: Annotated[
        str, typer.Option(help="With adapt, uniform: the weakest of a layer leaves (score), or equal shares (ratio).")
    ] = "score",
    round_to: Annotated[
        int | None,
        typer.Option(help="With efficientllm, coupled or global: make the final widths multiples of this."),
    ] = None,
    min_heads: Annotated[int, typer.Option(help="Query heads that stay in every layer.")] = 1,
    min_ffn: Annotated[int, typer.Option(help="FFN channels that stay in every layer.")] = 8,
    min_hidden: Annotated[int, typer.Option(help="Hidden channels that stay.")] = 8,
    sequences: Annotated[
        int | None, typer.Option(help="Calibration sequences; default: 64, with adapt and uniform 512.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a calibration sequence; default: 256, with adapt and uniform 64.")
    ] = None,
    gram_tokens: Annotated[
        int | None, typer.Option(help="Calibration tokens whose inputs the second order uses; default: all.")
    ] = None,
    damping: Annotated[float, typer.Option(help="Ridge of the second order, a share of the mean curvature.")] = 0.01,
    seed: Annotated[int, typer.Option(help="For the calibration sample and the random metric.")] = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing model directory.")] = False,
    as_json: Json = False,
) -> None:
    """Prune without training: in one go, or in rounds with new scores; every layer alike, or each by its importance."""
    from dwindle.run.prune import DEFAULT_TEXT, prune

    if more_data and not data:
        raise UserError(f"unexpected argument {more_data[0]!r}: calibration files follow --data")
    result = prune(
        model,
        to,
        out=out,
        data=[*(data or [DEFAULT_TEXT]), *(more_data or [])],
        text_field=text_field,
        method=method,  # type: ignore[arg-type]
        selection=selection,  # type: ignore[arg-type]
        metric=metric,
        second_order=second_order,
        groups=None if groups is None else [part.strip() for part in groups.split(",") if part.strip()],  # type: ignore[misc]
        attention=attention,  # type: ignore[arg-type]
        compare=compare,  # type: ignore[arg-type]
        rounds=rounds,
        amplitude=amplitude,
        distance=distance,  # type: ignore[arg-type]
        balance=balance,  # type: ignore[arg-type]
        round_to=round_to,
        min_heads=min_heads,
        min_ffn=min_ffn,
        min_hidden=min_hidden,
        num_sequences=sequences,
        seq_len=seq_len,
        gram_tokens=gram_tokens,
        damping=damping,
        seed=seed,
        device=chosen_device(device),
        overwrite=overwrite,
    )
    print_result(result.summary(out) if as_json else result.render(out), as_json)
    say_odd_sizes(out, "--round-to 32" if method == "efficientllm" else None)
