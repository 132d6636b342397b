"""The reference of recipe keys: complete, and the same on the page, on the screen and in the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dwindle.pruning.config import PretrainPruneConfig
from dwindle.recipe.recipe import Recipe
from dwindle.recipe.reference import markdown, recipe_keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def test_every_key_is_there_and_has_a_meaning() -> None:
    found = {key.name: key for key in recipe_keys()}
    assert all(key.meaning for key in found.values())
    for section in Recipe.model_fields:
        assert any(name.startswith(f"{section}.") for name in found)
    own = [name.removeprefix("prune.") for name in found if name.startswith("prune.")]
    assert own == list(PretrainPruneConfig.model_fields)
    assert found["data.sources.NAME.weight"].default == "1.0"
    assert found["prune.attention"].values == '"cluster", "regular"'
    assert found["training.tokens"].values == "text or whole number"
    assert found["training.tokens"].default == "must be given"
    assert found["prune.horizon"].default == "not set" and found["prune.horizon"].values == "number"


def test_a_word_chooses() -> None:
    assert [key.name for key in recipe_keys("distill.t")] == [
        "distill.temperature",
        "distill.top_k",
        "distill.teacher",
    ]


def test_the_page_is_what_the_code_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.endswith("prints.\n\n" + markdown()), "run `dwindle keys --markdown` and put it under Keys"


def test_keys_and_mistyped_ones_do_not_wait_for_torch() -> None:
    code = """
import sys
sys.modules.update(torch=None, transformers=None)
from dwindle.core.errors import UserError
from dwindle.recipe.recipe import recipe_from
from dwindle.recipe.reference import recipe_keys
assert recipe_keys("training.lr")
try:
    recipe_from({}, ["training.lrr=1"], "recipe.toml")
except UserError as error:
    assert "did you mean training.lr?" in str(error), error
"""
    subprocess.run([sys.executable, "-c", code], check=True)
