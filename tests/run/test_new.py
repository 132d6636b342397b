"""``dwindle new``: recommended settings, scaled to the text; recipes that load, plan and run."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

from dwindle.core.errors import UserError
from dwindle.recipe.library import find_recipe, ready_recipes
from dwindle.recipe.recipe import load_recipe
from dwindle.recipe.recommended import GOALS, PASSES, RECOMMENDED, TOKENS, TOKENS_PER_STEP, Goal
from dwindle.run.new import correction, new_recipe, recipe_name, scaled
from dwindle.run.plan import make_plan
from dwindle.run.pretrain import pretrain
from tiny import tiny_directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    tiny_directory(place / "model", hidden_size=64, intermediate_size=96)
    (place / "book.txt").write_text("It was the best of times, it was the worst of times. \n\n" * 200)
    return place


def test_with_enough_text_the_settings_are_the_measured_ones() -> None:
    """Those of the best row of the ladder, as the ready-made recipe has them."""
    chosen = {key: setting.value for key, setting in scaled("quality", 20e6, None, 2048).items()}
    recipe = load_recipe("smollm2-135m-to-80m-mixed")
    assert chosen["training.tokens"] == TOKENS and chosen["training.tokens_per_step"] == TOKENS_PER_STEP
    for key in ("lr", "optimizer"):
        assert chosen[f"training.{key}"] == getattr(recipe.training, key)
    for key in ("selection", "metric", "horizon"):
        assert chosen[f"prune.{key}"] == getattr(recipe.prune, key), key
    assert recipe.prune.effective_smoothing(recipe.num_warmup_steps) == pytest.approx(
        1 - 1 / recipe.num_warmup_steps, abs=1e-3
    )  # what is not set gives the same
    assert "prune.warmup_steps" not in chosen and recipe.prune.warmup_steps is None  # while the rate warms up
    assert chosen["distill.weight"] == recipe.distill.weight and chosen["data.seq_len"] == recipe.data.seq_len


def test_teacher_correction_is_recommended_where_it_was_measured(place: Path) -> None:
    def overrides(goal: str = "quality", tokens: str = "16M", *more: str) -> tuple[list[str], list[str]] | None:
        return correction(
            new_recipe(
                str(place / "model"), [str(place / "book.txt")], "50%", goal=goal, tokens=tokens, overrides=more
            )[1]
        )

    found = overrides()
    assert found is not None and found[1] == ["data.skip=1M", "training.tokens=15M"]
    assert {"prune.enabled=false", "distill.weight=0", "training.tokens=1M", "training.lr=0.0024"} < {*found[0]}
    assert overrides("stock") is None and overrides(tokens="6M") is None
    assert overrides("quality", "16M", "distill.weight=0") is None


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("length", [300, 2_000, 30_000, 400_000, 3e6, 1e9, math.inf])
def test_every_length_of_text_gives_a_sound_run(goal: Goal, length: float) -> None:
    chosen = {key: setting.value for key, setting in scaled(goal, length, None, 512).items()}
    tokens, per_step, seq_len = (chosen[key] for key in ("training.tokens", "training.tokens_per_step", "data.seq_len"))
    steps = tokens // (per_step // seq_len * seq_len)
    assert seq_len <= min(per_step, 512) and steps >= 1
    assert tokens <= PASSES * length and chosen["data.valid_tokens"] >= seq_len
    assert chosen["training.lr"] <= RECOMMENDED[goal]["training.lr"].value
    narrow, wide = (scaled(goal, length, None, 512, hidden)["training.lr"].value for hidden in (288, 1152))
    assert narrow == pytest.approx(2 * chosen["training.lr"], rel=0.1)
    assert wide == pytest.approx(chosen["training.lr"] / 2, rel=0.1)
    if length < math.inf:
        assert chosen["data.holdout"] * length >= 0.9 * chosen["data.valid_tokens"]
    if length >= 30_000:
        assert steps >= 150 and chosen["data.holdout"] < 0.11


@pytest.mark.parametrize("goal", GOALS)
def test_a_recipe_that_is_read_planned_and_run(goal: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    text, recipe = new_recipe("model", ["book.txt"], "70%", goal=goal, tokens="6k")
    file = place / f"{goal}.toml"
    file.write_text(text)
    assert load_recipe(file) == recipe
    for line in text.splitlines():
        assert len(line) <= 120
    plan = make_plan(recipe)
    assert plan.text_passes["train"] < 1 and not plan.warnings and plan.teacher == "model"
    result = pretrain(recipe, place / "runs" / goal)
    assert result.target_reached and result.quality is not None and result.quality.source_loss is not None
    assert result.quality.text == ["book.txt"]


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("to", ["layers=2", "hidden=16", "hidden=24,ffn=16,layers=2"])
def test_a_shape_as_the_target(to: str, goal: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of their own sizes cannot have one shape, so all are pruned alike."""
    monkeypatch.chdir(place)
    text, recipe = new_recipe("model", ["book.txt"], to, goal=goal, tokens="6k")
    assert recipe.prune.target == to and recipe.prune.effective_selection == "coupled"
    assert "trust_remote_code" not in text


def test_choices_of_the_user_win(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "other.txt").write_text("Another text to validate on, which is long enough for it. " * 40)
    text, recipe = new_recipe("model", ["book.txt"], "50%", valid=["other.txt"], overrides=["training.lr=7e-4"])
    assert recipe.training.lr == 7e-4 and tomllib.loads(text)["training"]["lr"] == 7e-4
    assert "# as given" in text and "# share of the teacher" in text  # the other reasons stay
    text, recipe = new_recipe("model", ["book.txt"], "50%", overrides=["prune.horizon=none", "prune.ratio=1:2"])
    assert recipe.prune.ratio == tomllib.loads(text)["prune"]["ratio"] == "1:2"
    assert "horizon" not in tomllib.loads(text)["prune"]
    text, recipe = new_recipe("model", ["book.txt"], "50%", valid=["other.txt"], overrides=["training.lr=7e-4"])
    assert recipe.data.valid == ["other.txt"] and not recipe.data.holdout
    with pytest.raises(UserError, match="to 900M: the source has"):
        new_recipe("model", ["book.txt"], "900M")
    (place / "note.txt").write_text("It was the best.")
    with pytest.raises(UserError, match=r"note.txt: only about .* tokens, too few to hold any out: give more text"):
        new_recipe("model", ["note.txt"], "50%")


@pytest.mark.parametrize(
    ("model", "to", "name"),
    [("a/b/Small-1B", "50%", "Small-1B-to-50pct"), ("x.gguf", "hidden=32,ffn=64", "x-to-hidden-32-ffn-64")],
)
def test_names(model: str, to: str, name: str) -> None:
    assert recipe_name(model, to) == name


def test_ready_made_recipes_are_found_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"demo", "smollm2-135m-to-80m-mixed"} <= set(ready_recipes())
    assert load_recipe("demo") == load_recipe("recipes/demo.toml") == load_recipe(ready_recipes()["demo"])
    (tmp_path / "demo").write_text(ready_recipes()["demo"].read_text().replace("16384", "20480"))
    assert find_recipe("demo") == Path("demo") and load_recipe("demo").training.tokens == 20480  # a file comes first
    with pytest.raises(UserError, match="did you mean adapt-demo"):
        find_recipe("adapt-dmo")
