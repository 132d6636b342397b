"""A Hugging Face directory with structure and ledger, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from dwindle.anatomy import Structure, modeling_dwindle
from dwindle.anatomy.build import is_custom
from dwindle.errors import UserError
from dwindle.pruning.ledger import Event, to_line


def check_output(out: str | PathLike[str], *, overwrite: bool) -> Path:
    """Refuse an existing output, and a place that cannot be written, before any work is done."""
    out = Path(out)
    if out.exists() and not overwrite:
        raise UserError(f"output {out} exists: choose another --out, or give --overwrite")
    if out.exists() and not (out.is_dir() and ((out / "config.json").is_file() or not any(out.iterdir()))):
        raise UserError(f"output {out} is not a model directory: --overwrite replaces model directories only")
    nearest = next(parent for parent in out.resolve().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"output {out} cannot be written: {nearest} is not a directory that may be written to")
    return out


def save_model(
    model: Any,
    tokenizer: Any,
    out: str | PathLike[str],
    *,
    structure: Structure,
    source: str,
    ledger: Sequence[Event],
    overwrite: bool = False,
) -> Path:
    """Write weights (safetensors), configuration, tokenizer, ``structure.json`` and ``ledger.jsonl``.

    Everything goes into a temporary directory beside ``out``, which then takes its place.
    """
    out = check_output(out, overwrite=overwrite)
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.resolve().parent))
    try:
        model.save_pretrained(staging)
        if is_custom(model.config):
            shutil.copyfile(str(modeling_dwindle.__file__), staging / "modeling_dwindle.py")
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        (staging / "structure.json").write_text(json.dumps(structure.to_json(source)) + "\n", encoding="utf-8")
        (staging / "ledger.jsonl").write_text("".join(map(to_line, ledger)), encoding="utf-8")
        staging.chmod(0o755)
        for file in staging.iterdir():
            file.chmod(0o644)  # safetensors files come out readable by their owner only
        _replace(staging, out)
    except OSError as error:
        raise UserError(f"output {out} could not be written: {error.strerror}; nothing was left there") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _replace(staging: Path, out: Path) -> None:
    """Rename into place; an old directory is moved aside first, so that a complete one is always there or beside."""
    if not out.exists():
        staging.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.resolve().parent))
    out.rename(aside / out.name)
    staging.rename(out)
    shutil.rmtree(aside, ignore_errors=True)
