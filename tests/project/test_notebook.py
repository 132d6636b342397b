"""The notebook runs: the same cells on a tiny model; what is committed has outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_models import tiny_loaded
from notebooks.run import run_notebook

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "first-hour.ipynb"


def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp", reason="pip install -c constraints.txt -e '.[gguf]'")
    monkeypatch.chdir(tmp_path)
    source = tiny_loaded(hidden_size=64, intermediate_size=96, head_dim=32)
    source.model.save_pretrained("model")
    source.tokenizer.save_pretrained("model")
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text.replace("smollm2-135m", "model").replace("110M", "80%"))
    run_notebook(notebook, {})
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 5 and all(cell["outputs"] for cell in cells)
    assert "loss " in "".join(cells[1]["outputs"][-1]["data"]["text/html"])


def test_its_outputs_are_committed_and_name_no_place() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)
    assert "/home" not in str(cells) and "/tmp" not in str(cells) and "/work" not in str(cells)
