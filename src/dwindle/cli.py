"""The commands: each parses, calls the Python API and prints; messages go to stderr, results to stdout."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from dwindle.errors import UserError

app = typer.Typer(
    name="dwindle",
    help="Make a pretrained language model smaller while it keeps training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="A Hugging Face directory or id, a .gguf file, a llama2.c .bin, or smollm2-135m.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def main() -> None:
    """Entry point: user errors become one line and exit code 2."""
    _quiet_libraries()
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from dwindle import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """Show layers, heads, widths, parameters by part, and what a group of each type weighs."""
    from dwindle.inspection import inspect

    found = inspect(model)
    _print(found.to_json() if as_json else found.render(), as_json)


@app.command()
def prune(
    model: Model,
    to: Annotated[str, typer.Option(help="100M, 0.6, 60%, 50%nonemb, or hidden=512,heads=8,ffn=1280.")],
    out: Annotated[str, typer.Option(help="Directory to write.")],
    data: Annotated[
        list[str] | None, typer.Option(help="Text to calibrate on; default: CPython's own documentation (pydoc).")
    ] = None,
    more_data: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    metric: Annotated[str, typer.Option(help="taylor, taylor1, magnitude or random.")] = "taylor",
    groups: Annotated[str, typer.Option(help="The types that may leave.")] = "attn,ffn,stem",
    attention: Annotated[str, typer.Option(help="regular (stock everywhere) or cluster (the paper's).")] = "regular",
    compare: Annotated[str, typer.Option(help="How types are compared: mean or sum of element scores.")] = "mean",
    rounds: Annotated[int, typer.Option(help="Score anew this many times on the way.")] = 1,
    round_to: Annotated[int | None, typer.Option(help="Make the final widths multiples of this.")] = None,
    min_heads: Annotated[int, typer.Option(help="Query heads that stay in every layer.")] = 1,
    min_ffn: Annotated[int, typer.Option(help="FFN channels that stay in every layer.")] = 8,
    min_hidden: Annotated[int, typer.Option(help="Hidden channels that stay.")] = 8,
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 64,
    seq_len: Annotated[int, typer.Option(help="Tokens in a calibration sequence.")] = 256,
    seed: Annotated[int, typer.Option(help="For the calibration sample and the random metric.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing model directory.")] = False,
    as_json: Json = False,
) -> None:
    """Prune without training: one-shot, or in rounds with new scores."""
    from dwindle.posttraining import DEFAULT_TEXT, prune

    if more_data and not data:
        raise UserError(f"unexpected argument {more_data[0]!r}: calibration files follow --data")
    result = prune(
        model,
        to,
        out=out,
        data=[*(data or [DEFAULT_TEXT]), *(more_data or [])],
        metric=metric,
        groups=[part.strip() for part in groups.split(",") if part.strip()],  # type: ignore[misc]
        attention=attention,  # type: ignore[arg-type]
        compare=compare,  # type: ignore[arg-type]
        rounds=rounds,
        round_to=round_to,
        min_heads=min_heads,
        min_ffn=min_ffn,
        min_hidden=min_hidden,
        num_sequences=sequences,
        seq_len=seq_len,
        seed=seed,
        device=device,
        overwrite=overwrite,
    )
    _print(result.summary(out) if as_json else result.render(out), as_json)


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Argument(help="A recipe, such as recipes/demo.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value …, such as prune.target=70M training.lr=3e-4.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Directory of the run; default: runs/<recipe's name>.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing run.")] = False,
    as_json: Json = False,
) -> None:
    """Continue pretraining a model while it is pruned to a target size."""
    from pathlib import Path

    from dwindle.pretrain import pretrain
    from dwindle.recipe import load_recipe

    chosen = load_recipe(recipe, overrides or [])
    if dry_run:
        from dwindle.plan import make_plan

        plan = make_plan(chosen)
        _print(plan.to_json() if as_json else plan.render(), as_json)
        return
    run = Path(out) if out is not None else Path("runs") / Path(recipe).stem
    _print_run(pretrain(chosen, run, overwrite=overwrite), as_json)


@app.command()
def resume(run: Annotated[str, typer.Argument(help="Directory of a run.")], as_json: Json = False) -> None:
    """Continue a run from its newest good checkpoint."""
    from dwindle.pretrain import resume

    _print_run(resume(run), as_json)


@app.command()
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files (.txt, .jsonl, .parquet, compressed), or hf: ids.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer to use.")],
    out: Annotated[str, typer.Option(help="Directory to write.")],
    text_field: Annotated[str, typer.Option(help="Field of JSON lines or column that holds the text.")] = "text",
    overwrite: Annotated[bool, typer.Option(help="Replace existing token files.")] = False,
    as_json: Json = False,
) -> None:
    """Write text as memory-mapped token files, which recipes can name in place of the text."""
    from dwindle.sources import load_tokenizer
    from dwindle.training.data import write_token_files

    files = write_token_files(
        inputs, load_tokenizer(model), out, text_field=text_field, overwrite=overwrite, option="inputs"
    )
    found = {"out": out, "tokens": files.num_tokens, "documents": files.num_documents}
    _print(found if as_json else f"{out}: {files.num_tokens:,} tokens of {files.num_documents:,} documents", as_json)


def _print_run(result: Any, as_json: bool) -> None:
    """How a run ended, and the command that continues or uses it."""
    from dataclasses import asdict

    if as_json:
        values = {
            key: str(value) if key in ("run", "model") and value else value for key, value in asdict(result).items()
        }
        print(json.dumps(values))
        return
    if result.status == "stopped":
        print(f"stopped after step {result.step:,}; continue with: dwindle resume {result.run}")
        return
    if not result.target_reached:
        print(f"warning: the target was not reached: {result.parameters:,} parameters are left", file=sys.stderr)
    losses = f"loss {result.loss:.4f}" if result.loss is not None else ""
    if result.valid_loss is not None:
        losses += f", validation {result.valid_loss:.4f}"
    print(f"finished: {result.parameters:,} parameters, {result.tokens:,} tokens, {losses}\nmodel: {result.model}")


def _print(what: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(what))
        return
    from rich.console import Console

    Console().print(what)


def _quiet_libraries() -> None:
    """Our own messages only; warnings of the libraries underneath are for developers."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
