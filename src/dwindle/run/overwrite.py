"""``--overwrite``: the old run stays beside the new one until that has made a step, so that a mistake costs nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dwindle.core.directories import refuse_place, refuse_sources, remove_abandoned
from dwindle.core.run_lock import RunLock
from dwindle.recipe.recipe import Recipe
from dwindle.training.checkpoint import has_begun, remove_leftovers


def _aside(run: Path) -> Path:
    real = run.resolve()  # a link stays where it is
    return real.parent / f".{real.name}.replaced"


@contextmanager
def put_aside(run: Path) -> Iterator[None]:
    """Make place for a new run, which is made inside; one that a process is writing is refused."""
    with RunLock(run):
        if _aside(run).is_dir() and not has_begun(run):
            shutil.rmtree(run.resolve())  # an attempt that failed: what it was to replace is still aside
        else:
            discard_replaced(run)
            os.rename(run.resolve(), _aside(run))
        try:
            yield
        except BaseException:
            restore_replaced(run)
            raise


def restore_replaced(run: Path) -> None:
    """Bring back what a run that never began, or whose process was killed in between, would have replaced."""
    if _aside(run).is_dir() and not run.exists():
        os.rename(_aside(run), run.resolve())


def discard_replaced(run: Path) -> None:
    """The new run has begun: what it replaces goes."""
    shutil.rmtree(_aside(run), ignore_errors=True)


def forget_if_not_begun(run: Path, *, only_replacing: bool = False) -> None:
    """A run that failed before its first step leaves nothing behind, and nothing replaced.

    ``only_replacing``: one that replaces nothing is left as it is, for ``resume``.
    """
    if has_begun(run) or (only_replacing and not _aside(run).is_dir()):
        return
    shutil.rmtree(run.resolve(), ignore_errors=True)
    restore_replaced(run)
    if run.is_symlink() and not run.exists():
        run.resolve().mkdir()  # a link to an empty directory, as it was


def refuse_inputs(recipe: Recipe, run: Path) -> None:
    """What the new run reads would be put aside with the old one, and be gone after a step."""
    texts = [*recipe.data.trained_on(), *recipe.data.valid, *recipe.validation.data]
    refuse_sources(run, [recipe.source.model, recipe.distill.teacher, *texts])


def tidy(run: Path) -> None:
    """Remove what an attempt that was killed left half written or half deleted.

    Models that are written anew, where one was written before, must not hold the current folder by then.
    """
    for folder in (run / "model", *sorted(run.glob("milestones/*"))):
        refuse_place(folder, "output")
    for folder in (run, run / "milestones"):
        remove_abandoned(folder)
    remove_leftovers(run)
    if has_begun(run):
        discard_replaced(run)
