"""Recipes: the shipped ones load and add up, and impossible ones are refused by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dwindle.core.config import from_dict, iter_fields, parse_toml, to_toml, write_toml
from dwindle.core.errors import UserError
from dwindle.pruning.config import DEFAULT_HORIZON
from dwindle.recipe.recipe import Recipe, load_recipe, resolve_recipe

RECIPES = Path(__file__).resolve().parents[2] / "src/dwindle/recipe/ready"
SHIPPED = sorted(RECIPES.glob("*.toml"))

ISSUE_SHAPE = """
[source]
model = "smollm2-135m"
[data]
train = ["books.jsonl.xz"]
valid = ["held-out.jsonl.xz"]
seq_len = 1024
[training]
tokens = "16M"
tokens_per_step = "64k"
lr = 1e-3
schedule = "cosine"
seed = 0
[prune]
target = "50%nonemb"
metric = "taylor"
horizon = 0.1
[checkpoint]
every = 100
keep_last = 2
"""


ADAPT = ["prune.method=adapt", "prune.horizon=none"]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(ISSUE_SHAPE)
    return path


def test_the_promised_recipes_are_there() -> None:
    assert {path.stem for path in SHIPPED} >= {
        "demo",
        "smollm2-135m-to-80m",
        "smollm-1.7b-to-469m",
        "smollm-1.7b-to-1.1b",
        "smollm-360m-to-134m",
        "mobilellm-350m-to-125m",
        "qwen2.5-0.5b-to-350m",
        "adapt-demo",
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    assert from_dict(Recipe, parse_toml(to_toml(recipe))) == recipe
    assert recipe.data.validated_on(recipe.task) and recipe.prune.enabled == (recipe.task.kind == "text")
    header = path.read_text(encoding="utf-8").split("[source]")[0]
    assert "Cost" in header and "Memory" in header


@pytest.mark.parametrize(
    ("name", "ratio", "pruning", "after"),
    [
        ("smollm-1.7b-to-469m", "1:9", 72.1e9, 50e9),
        ("smollm-1.7b-to-1.1b", "1:9", 36.7e9, 50e9),
        ("smollm-360m-to-134m", None, 50.3e9, 50e9),
    ],
)
def test_token_counts_of_the_paper(name: str, ratio: str | None, pruning: float, after: float) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    assert recipe.num_tokens == pytest.approx(pruning + after, rel=1e-4)
    assert recipe.prune.ratio == ratio
    if recipe.prune.effective_horizon is not None:
        assert recipe.prune.effective_horizon * recipe.num_tokens == pytest.approx(pruning, rel=1e-3)


@pytest.mark.parametrize("name", ["mobilellm-350m-to-125m", "qwen2.5-0.5b-to-350m"])
def test_settings_of_the_adapt_paper(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    assert recipe.num_tokens == pytest.approx(3.87e9, rel=1e-4) and recipe.num_sequences_per_step == 128
    assert (recipe.training.lr, recipe.training.min_lr_ratio, recipe.training.schedule) == (2e-5, 0.1, "wsd")
    assert recipe.num_warmup_steps == pytest.approx(0.05 * recipe.num_steps, abs=1)
    assert recipe.training.decay_steps(recipe.num_steps) == pytest.approx(0.1 * recipe.num_steps, abs=1)
    assert recipe.prune.method == "adapt" and recipe.prune.effective_horizon is None
    assert recipe.prune.effective_groups == ("attn", "ffn")


def test_demo_fits_a_cpu() -> None:
    recipe = load_recipe(RECIPES / "demo.toml")
    assert recipe.num_steps == 8
    assert recipe.num_tokens == 16384
    assert recipe.num_tokens_per_step == 2048


def test_shape_of_the_issue(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.num_sequences_per_step == 64_000 // 1024 == 62
    assert recipe.num_tokens_per_step == 62 * 1024
    assert recipe.num_steps == 16_000_000 // (62 * 1024) == 252
    assert recipe.num_tokens == 252 * 62 * 1024 <= 16_000_000
    assert recipe.num_warmup_steps == 5 == recipe.num_steps_before_pruning
    assert recipe.training.decay_steps(recipe.num_steps) == 0
    assert recipe.prune.effective_horizon == 0.1
    assert recipe.prune.steps_ratio is None


def test_overrides(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        ["prune.target=0.6", "training.lr=3e-4", "prune.horizon=none", "prune.ratio=4:1", "training.warmup=20"],
    )
    assert recipe.prune.target == "0.6"
    assert recipe.training.lr == 3e-4
    assert recipe.prune.steps_ratio == (4, 1)
    assert recipe.prune.effective_horizon is None
    assert recipe.num_warmup_steps == 20
    assert load_recipe(recipe_file, ["prune.horizon=none"]).prune.effective_horizon == DEFAULT_HORIZON
    wsd = load_recipe(recipe_file, ["training.schedule=wsd", "training.decay=0.25"])
    assert wsd.training.decay_steps(wsd.num_steps) == 63


def test_resolved_recipe_is_saved_and_read_again(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ["data.train=[]", "data.sources.books.paths=b.txt", "prune.milestones=120M,100M"])
    write_toml(recipe, tmp_path / "saved.toml")
    assert load_recipe(tmp_path / "saved.toml") == recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.tokens=10"], "training.tokens: 10 is below one step"),
        (["training.tokens=0"], "training.tokens: 0 is below one step"),
        (["training.tokens=lots"], "training.tokens: 'lots' is not a number such as 100M"),
        (["training.tokens=-5"], "training.tokens: -5 is not a number such as 100M"),
        (["training.tokens_per_step=512"], "training.tokens_per_step: 512 is below one sequence"),
        (["data.seq_len=0"], "data.seq_len: 0 must be at least 2"),
        (["training.micro_batch=63"], "training.micro_batch: must be between 0 (choose) and the 62 sequences"),
        (["training.micro_batch=-1"], "training.micro_batch: -1 must be at least 0"),
        (["training.lr=0"], "training.lr: 0 must be above 0"),
        (["training.min_lr_ratio=2"], "training.min_lr_ratio: 2 must be at least 0 and at most 1"),
        (["training.warmup=1.0"], "training.warmup: 1.0 is neither a fraction below 1"),
        (["training.warmup=-1"], "training.warmup: must not be negative"),
        (["training.warmup=252"], "training.warmup: warm-up and decay take 252 of 252 steps: shorten them"),
        (
            ["training.schedule=wsd", "training.decay=0.6", "training.warmup=0.5"],
            "training.warmup: warm-up and decay take 277 of 252 steps: shorten them",
        ),
        (["training.decay=1.5"], "training.decay: 1.5 must be at least 0 and at most 1"),
        (["training.betas=0.9"], "training.betas: must be two numbers"),
        (["training.betas=0.9,1"], "training.betas: must be two numbers"),
        (["training.eps=0"], "training.eps: 0 must be above 0"),
        (["training.clip=-1"], "training.clip: -1 must be at least 0"),
        (["training.ce_chunk_tokens=0"], "training.ce_chunk_tokens: 0 must be at least 1"),
        (["checkpoint.keep_last=0"], "checkpoint.keep_last: 0 must be at least 1"),
        (["data.text_field="], "data.text_field: must not be empty"),
        (["data.seed=-1"], "data.seed: -1 must be at least 0"),
        (["source.model= "], "source.model: is empty"),
        (["data.train=[]"], "data.train: missing"),
        (["data.sources.a.paths=x"], "data.train: cannot be combined with data.sources"),
        (["data.train=[]", "data.sources.a.paths=[]"], "data.sources.a.paths: is empty"),
        (["data.train=[]", "data.sources.a={paths=['x'],weight=0}"], "data.sources.a.weight: 0 must be above 0"),
        (["validation.batch=-1"], "validation.batch: -1 must be at least 0"),
        (["data.valid=books.jsonl.xz"], "data.valid: books.jsonl.xz is also trained on"),
        (["data.valid=[]", "validation.every=5"], "validation.every: needs data.valid, data.holdout or"),
        (["prune.target="], "prune.target: missing"),
        (["prune.target=small"], "prune.target: 'small' is not a size such as"),
        (["prune.target=hidden=0"], "prune.target: 'hidden=0' is not part of a shape"),
        (["prune.ratio=1:9"], "prune.horizon: give either horizon or ratio, not both"),
        (["prune.horizon=none", "prune.ratio=1:0"], "prune.ratio: '1:0' is not pruning steps : gradient steps"),
        (["prune.horizon=none", "prune.ratio=often"], "prune.ratio: 'often' is not pruning steps"),
        (["prune.horizon=0"], "prune.horizon: 0 must be above 0"),
        (["prune.horizon=1.5"], "prune.horizon: 1.5 must be above 0 and at most 1"),
        (
            ["prune.warmup_steps=252"],
            "prune.warmup_steps: 252 leaves none of the 252 steps for events: lower it",
        ),
        (["prune.groups=[]"], "prune.groups: nothing is prunable: name at least one of attn, ffn, stem"),
        (["prune.smoothing=1"], "prune.smoothing: 1 must be at least 0 and below 1"),
        (["prune.fisher=adam", "training.optimizer=muon"], 'prune.fisher: "adam" needs AdamW'),
        (["prune.compact_threshold=0"], "prune.compact_threshold: 0 must be above 0 and at most 1"),
        (["prune.compact_wait=-1"], "prune.compact_wait: -1 must be at least 0"),
        (["prune.min_heads=0"], "prune.min_heads: 0 must be at least 1"),
        (["distill.weight=2"], "distill.weight: 2 must be at least 0 and at most 1"),
        (["distill.temperature=0"], "distill.temperature: 0 must be above 0"),
        (
            ["distill.weight=0", "distill.top_k=5"],
            "distill.weight: is 0, so there is no teacher: set a weight such as 0.5",
        ),
        (["prune.damping=-1"], "prune.damping: -1 must be at least 0"),
        (["prune.gram_tokens=0"], "prune.gram_tokens: 0 must be at least 1"),
        (["prune.gram_tokens=few"], "prune.gram_tokens: 'few' is not a number such as"),
        (["prune.metric=taylr"], "prune.metric: 'taylr' is unknown: choose one of taylor, "),
        (["prune.amplitude=2"], "prune.amplitude: 2 must be at least 0 and at most 1"),
        (["prune.amplitude=0.1"], "prune.amplitude: is a setting of method adapt, not efficientllm: remove it, or"),
        (["prune.balance=ratio"], "prune.balance: is a setting of method adapt or uniform, not efficientllm"),
        (["prune.interleaves=3"], "prune.interleaves: is a setting of method adapt or uniform"),
        ([*ADAPT, "prune.compare=sum"], "prune.compare: is a setting of method efficientllm, not adapt"),
        ([*ADAPT, "prune.selection=global"], "prune.selection: is a setting of method efficientllm, not adapt"),
        ([*ADAPT, "prune.round_to=8"], "prune.round_to: is a setting of method efficientllm or "),
        ([*ADAPT, "prune.target=heads=4"], 'prune.target: method "adapt" gives every layer its own sizes: give a'),
        ([*ADAPT, "prune.groups=stem"], "prune.groups: stem: adapt keeps the hidden size: choose among attn and ffn"),
        ([*ADAPT, "prune.interleaves=253"], "prune.interleaves: 253 must be between 1 and the 252 steps after"),
        ([*ADAPT, "prune.ratio=1:9"], "prune.ratio: method adapt prunes in prune.interleaves stages: remove it"),
        (["prune.method=adapt"], "prune.horizon: method adapt prunes in prune.interleaves stages: remove it"),
        (["prune.method=uniform"], "prune.horizon: method uniform prunes in prune.interleaves stages: remove it"),
        (["prune.selection=global", "prune.target=heads=4"], 'prune.target: selection "global" gives every layer'),
        (["prune.milestones=40%nonemb"], "prune.milestones: '40%nonemb' is not above prune.target"),
        (["prune.milestones=ffn=3"], "prune.milestones: 'ffn=3': give a size"),
        (["prune.milestones=many"], "prune.milestones: 'many' is not a size"),
    ],
)
def test_impossible_recipes_name_the_key(recipe_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, overrides)
    blamed = {override.split("=")[0]: f"override {override}" for override in overrides}
    assert str(caught.value).startswith(f"{blamed.get(message.split(':')[0], recipe_file)}: {message}")
    assert "\n" not in str(caught.value)


def test_all_kinds_with_adapt_are_those_that_it_prunes(recipe_file: Path) -> None:
    """Runs of earlier versions have saved this list as the default."""
    recipe = load_recipe(recipe_file, [*ADAPT, 'prune.groups=["attn","ffn","stem"]'])
    assert recipe.prune.effective_groups == ("attn", "ffn")


def test_assigned_fields_are_checked_before_a_run(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    recipe.training.lr = -1.0
    with pytest.raises(UserError, match=r"^training\.lr: -1\.0 must be above 0$"):
        recipe.check()
    recipe = load_recipe(recipe_file)
    recipe.prune.method = "adapt"
    with pytest.raises(
        UserError, match=r"^prune\.horizon: method adapt prunes in prune\.interleaves stages: remove it$"
    ):
        recipe.check()
    recipe.prune.horizon = None
    recipe.check()
    recipe.data.seq_len = "long"  # type: ignore[assignment]
    with pytest.raises(UserError, match=r'^data\.seq_len: expected a whole number, got "long"$'):
        recipe.check()


def test_a_recipe_without_pruning_needs_no_target(recipe_file: Path) -> None:
    assert not load_recipe(recipe_file, ["prune.enabled=false", "prune.target="]).prune.enabled


def test_missing_sections_are_named_by_their_required_key(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    with pytest.raises(UserError, match=r"empty\.toml: source\.model: missing"):
        load_recipe(path)
    path.write_text('[source]\nmodel = "x"\n')
    with pytest.raises(UserError, match=r"training\.tokens: missing"):
        load_recipe(path)


def test_existing_paths_become_absolute(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books.txt").write_text("text")
    recipe = load_recipe(recipe_file, ["data.train=books.txt,pydoc:train", "data.cache_dir=cache"])
    resolved = resolve_recipe(recipe)
    assert resolved.data.train == [str(tmp_path / "books.txt"), "pydoc:train"]
    assert resolved.data.cache_dir == str(tmp_path / "cache")
    assert resolved.source.model == "smollm2-135m"
    assert recipe.data.train == ["books.txt", "pydoc:train"]
    assert resolve_recipe(resolved) == resolved
    assert recipe.prune.horizon is None or resolved.prune.horizon == recipe.prune.horizon
    recipe.prune.horizon = None
    assert resolve_recipe(recipe).prune.horizon == DEFAULT_HORIZON  # a later default does not change a run
    recipe.prune.ratio = "1:9"
    assert resolve_recipe(recipe).prune.horizon is None


def test_every_field_has_its_line_of_help() -> None:
    for path, field in iter_fields(Recipe):
        assert field.description, path
    for name, section in Recipe.model_fields.items():
        assert section.annotation.__doc__, name  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "folder", "a.gguf"])
def test_a_model_in_the_place_of_a_recipe_is_told_what_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "a.gguf").write_text("")
    with pytest.raises(UserError, match=f"{name} is a model, not a recipe.*dwindle pretrain {name} TEXT --to 50%$"):
        load_recipe(name)
