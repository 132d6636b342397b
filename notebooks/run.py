"""Runs the cells of a notebook in this process and stores their outputs: ``python notebooks/run.py first-hour.ipynb``.

A cell shows what it prints and its last expression, as HTML where that has any. No other package is needed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_cell(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of one cell, as the notebook format has them."""
    tree, printed, last = ast.parse(code), io.StringIO(), None
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if shown is not None:
            last = eval(compile(ast.Expression(shown.value), "cell", "eval"), names)  # noqa: S307  (our own notebook)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if last is not None:
        data = {"text/plain": repr(last).splitlines(True)}
        if hasattr(last, "_repr_html_"):
            data["text/html"] = last._repr_html_().splitlines(True)
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs


def run_notebook(notebook: dict[str, Any], names: dict[str, Any]) -> None:
    """Run all code cells in order; ``names`` are defined beforehand."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = run_cell("".join(cell["source"]), names)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    found = json.loads(path.read_text(encoding="utf-8"))
    run_notebook(found, {})
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
