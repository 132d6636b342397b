"""``dwindle compare``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import Device, Json, Model, TextField, app, chosen_device, print_result


@app.command()
def compare(
    model: Model,
    out: Annotated[str, typer.Option(help="Directory for compare.json and the figure.")],
    metrics: Annotated[
        str, typer.Option(help="Of taylor, taylor1, obd, wanda, obc, magnitude, random; commas between them.")
    ] = "taylor,obd,wanda,obc,magnitude,random",
    to: Annotated[
        str, typer.Option(help="What to remove, as in the paper's table: 10%, or 10%nonemb; or sizes such as 100M.")
    ] = "10%,36%,51%,74%",
    data: Annotated[list[str] | None, typer.Option(help="Text to calibrate and train on; default: pydoc.")] = None,
    valid: Annotated[
        list[str] | None, typer.Option(help="Text to measure on; default: windows held out of --data.")
    ] = None,
    text_field: TextField = "text",
    second_order: Annotated[
        bool, typer.Option("--second-order", help="Also repair what stays: a second row for every metric.")
    ] = False,
    tokens: Annotated[str, typer.Option(help="Also prune while training on this many tokens (each cell).")] = "0",
    tokens_per_step: Annotated[str, typer.Option(help="Tokens per training step.")] = "8192",
    lr: Annotated[float, typer.Option(help="Learning rate of the training.")] = 6e-4,
    tasks: Annotated[str, typer.Option(help="Also measure these tasks, such as commonsense or arc_easy,piqa.")] = "",
    task_data: Annotated[list[str] | None, typer.Option(help="Where the tasks' data is, as for dwindle eval.")] = None,
    task_limit: Annotated[int | None, typer.Option(help="The first N items of each task only.")] = None,
    groups: Annotated[str, typer.Option(help="The types that may leave.")] = "attn,ffn,stem",
    attention: Annotated[str, typer.Option(help="regular or cluster.")] = "regular",
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 64,
    seq_len: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 256,
    valid_tokens: Annotated[str, typer.Option(help="Measure on at most this many tokens.")] = "16384",
    seed: Annotated[int, typer.Option(help="For the calibration sample, training and the random metric.")] = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier comparison in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Every metric at every size: held-out loss without training, and with the same training tokens."""
    from dwindle.run.compare import compare, options_from

    options = options_from(
        groups=tuple(_parts(groups)),
        attention=attention,
        num_sequences=sequences,
        seq_len=seq_len,
        valid_tokens=valid_tokens,
        text_field=text_field,
        tokens=tokens,
        tokens_per_step=tokens_per_step,
        lr=lr,
        seed=seed,
        device=chosen_device(device),
    )
    result = compare(
        model,
        metrics=_parts(metrics),
        to=_parts(to),
        second_order=second_order,
        data=data or [],
        valid=valid or [],
        tasks=_parts(tasks),
        task_data=task_data or [],
        task_limit=task_limit,
        out=out,
        overwrite=overwrite,
        options=options,
    )
    print_result(result.to_json() if as_json else result.render(), as_json)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
