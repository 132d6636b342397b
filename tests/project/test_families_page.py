"""docs/families.md: its tables are what the code says, its example is what the tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from dwindle.anatomy.family import UNITS
from dwindle.core.errors import UserError
from dwindle.run.family_check import check_family
from dwindle.run.family_table import EXAMPLES, keys_markdown, markdown
from outside_family import PAGE, STARCODER2
from tiny import FAMILIES, PUBLISHED

TEXT = PAGE.read_text(encoding="utf-8")
HINT = "run `dwindle families --markdown` and put its tables into docs/families.md"


def between(marker: str) -> str:
    return TEXT.partition(f"<!-- {marker} -->\n")[2].partition("<!-- end -->")[0]


def test_the_tables_are_what_the_code_says() -> None:
    assert between("families") == markdown(), HINT
    assert between("keys") == keys_markdown(), HINT
    assert set(EXAMPLES) <= set(FAMILIES)
    for unit in UNITS:
        assert f"`{unit}`" in TEXT


def test_the_example_is_refused_before_it_has_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    AutoConfig.for_model("starcoder2").save_pretrained("starcoder2")
    with pytest.raises(UserError) as refused:
        check_family("starcoder2")
    assert f"error: {refused.value}" in " ".join(TEXT.split())
    assert 'model_type = "starcoder2"' in STARCODER2


def test_models_that_were_checked_are_named() -> None:
    named = TEXT.replace(" ", "").replace("-", "").lower()
    for model in ("Llama 3.2 1B", "Qwen3 0.6B", "Phi-4-mini", "Gemma 3 270M", "EXAONE 4.0 1.2B", "SmolLM2-135M"):
        assert model.replace(" ", "").replace("-", "").lower() in named
    assert len(PUBLISHED) >= 7
