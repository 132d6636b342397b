"""A metric of one's own works wherever a built-in one does, and a broken one is said in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dwindle
from dwindle.anatomy.structure import Group
from dwindle.core.errors import UserError
from dwindle.pruning import metrics
from dwindle.pruning.metrics import METRICS, known_metrics, metric_named
from dwindle.pruning.saliency import begin_scores, score_model
from dwindle.pruning.surgery import Prunable
from dwindle.recipe.recipe import load_recipe
from dwindle.recipe.reference import recipe_keys
from dwindle.run.compare import compare
from tiny import random_group, tiny_directory, tiny_model

RECIPE = """
[source]
model = "{model}"
device = "cpu"
[data]
train = ["pydoc:train"]
seq_len = 16
[training]
tokens = 640
tokens_per_step = 64
micro_batch = 4
[prune]
target = "80%"
horizon = 0.5
metric = "{metric}"
"""


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Unregister what a test registers."""
    before = dict(metrics._METRICS)
    yield
    metrics._METRICS.clear()
    metrics._METRICS.update(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_directory(tmp_path_factory.mktemp("mine") / "model"))


def first_order(w: Tensor, g: Tensor, f: None) -> Tensor:
    return (w * g).abs()


def diagonal(w: Tensor, g: None, f: Tensor) -> Tensor:
    return w**2 * f


def prune(model: Path, metric: str) -> Any:
    found = dwindle.prune(model, "80%", metric=metric, sequences=4, seq_len=24)
    return found.structure, [event["saliency"] for event in found.ledger[1:]]


@pytest.mark.parametrize(
    ("own", "needs", "curvature", "like"),
    [
        (first_order, ("gradient",), None, "taylor1"),
        (lambda w, g, f: 0.5 * w**2 * f, "fisher", None, "obd"),
        (diagonal, ("inputs",), None, "wanda"),
        (diagonal, ("inputs",), "inverse", "obc"),
        (lambda w, g, f: w**2, (), None, "magnitude"),
    ],
)
def test_the_same_score_prunes_like_the_built_in_one(
    model: Path, own: Any, needs: Any, curvature: Any, like: str
) -> None:
    assert dwindle.register_metric("mine", own, needs=needs, curvature=curvature) is own
    structure, saliencies = prune(model, "mine")
    expected, others = prune(model, like)
    assert structure == expected
    for mine, other in zip(saliencies, others, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_it_works_as_a_decorator_in_recipes_and_comparisons(model: Path, tmp_path: Path) -> None:
    @dwindle.register_metric("mine", needs=("gradient",))
    def mine(w: Tensor, g: Tensor, f: None) -> Tensor:
        return (w * g).abs()

    sizes: dict[str, Any] = {"sequences": 4, "seq_len": 24, "valid_tokens": 240, "tokens": 480, "tokens_per_step": 240}
    first, second = compare(model, metrics=["mine", "taylor1"], to=["20%"], **sizes).cells
    assert (first.metric, first.shape) == ("mine", second.shape)
    assert first.trained_loss == pytest.approx(second.trained_loss, rel=1e-4)
    ledgers = []
    for name in ("mine", "taylor1"):
        (tmp_path / f"{name}.toml").write_text(RECIPE.format(model=model, metric=name))
        run = dwindle.pretrain(load_recipe(tmp_path / f"{name}.toml"), tmp_path / name).run
        ledgers.append((run / "ledger.jsonl").read_text().splitlines()[1:])
    assert len(ledgers[0]) > 3 and ledgers[0] == ledgers[1]


def test_a_run_that_lost_its_metric_says_so(model: Path, tmp_path: Path) -> None:
    dwindle.register_metric("mine", first_order, needs=("gradient",))
    (tmp_path / "mine.toml").write_text(RECIPE.format(model=model, metric="mine"))
    dwindle.pretrain(dwindle.load_recipe(tmp_path / "mine.toml"), tmp_path / "run")
    del metrics._METRICS["mine"]
    with pytest.raises(UserError, match=r"run/recipe.toml: prune.metric: 'mine' is unknown.*dwindle.register_metric"):
        dwindle.resume(tmp_path / "run")
    dwindle.register_metric("mine", first_order, needs=("gradient",))
    assert dwindle.resume(tmp_path / "run").status == "finished"


def test_unknown_names_list_the_known_ones(model: Path, tmp_path: Path) -> None:
    dwindle.register_metric("mine", first_order, needs=("gradient",))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model, metric="taylr"))
    with pytest.raises(UserError, match=r"prune.metric: 'taylr' is unknown: choose one of taylor, .*random, mine;"):
        load_recipe(tmp_path / "recipe.toml")
    with pytest.raises(UserError, match=r"metric 'taylr' is unknown: choose one of taylor, .*random, mine;"):
        dwindle.prune(model, "80%", metric="taylr")
    (key,) = recipe_keys("prune.metric")
    named = key.meaning.partition(": ")[2].partition(" or a registered metric")[0].split(", ")
    assert sorted(named) == sorted(METRICS)
    assert key.default == "not set"


def test_names_are_taken_once() -> None:
    for name in METRICS:
        with pytest.raises(UserError, match=f"metric '{name}': is built in: choose another name"):
            dwindle.register_metric(name, first_order)
    dwindle.register_metric("mine", first_order, needs=("gradient",))
    dwindle.register_metric("mine", first_order, needs=("gradient",))  # a cell of a notebook, run again
    with pytest.raises(UserError, match=r"'mine': is registered already, by .*first_order: choose another"):
        dwindle.register_metric("mine", diagonal)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a,b"}, "'a,b': a name is made of"),
        ({"name": ""}, "'': a name is made of"),
        ({"score": 3}, "score must be a function of w, g and f, not int"),
        ({"needs": ["gradients"]}, "needs 'gradients': choose of gradient, fisher, inputs"),
        ({"needs": ["fisher", "inputs"]}, "f can be only one of them"),
        ({"needs": ["inputs"], "curvature": "full"}, "curvature 'full': choose diagonal or inverse"),
        ({"curvature": "inverse"}, "add inputs to needs"),
    ],
)
def test_wrong_registrations(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        dwindle.register_metric(**{"name": "mine", "score": first_order} | arguments)
    assert message in str(error.value) and "mine" not in known_metrics()


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda w, g, f: w.sum(), r"must return a score for each weight, \(32, 32\), not shape \(\)"),
        (lambda w, g, f: 1.0, "not float"),
        (lambda w, g, f: w / 0, "a score is not finite"),
        (lambda w, g, f: w.mul_(2), "changes what it is given"),
    ],
)
def test_wrong_scores(score: Any, message: str) -> None:
    dwindle.register_metric("mine", score)
    with pytest.raises(UserError, match=f"metric 'mine': .*{message}"):
        score_model(Prunable(tiny_model()), {}, {}, metric_named("mine"))


def test_what_is_not_asked_for_is_none_and_dead_weights_score_nothing() -> None:
    seen = []

    def ones(w: Tensor, g: None, f: None) -> Tensor:
        seen.append((g, f))
        return torch.ones_like(w) > 0

    dwindle.register_metric("mine", ones)
    prunable = Prunable(tiny_model())
    prunable.prune(random_group("stem", prunable.alive))
    scores = begin_scores(prunable, {}, None, metric_named("mine"), fused=True)()
    assert set(seen) == {(None, None)}
    assert {float(value) for value in scores.ffn[0]} == {31.0}  # one of 32 rows is pruned


def test_seeded_metrics_draw_the_same_again() -> None:
    def drawn(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return lambda w, g, f: torch.rand(w.shape, generator=generator)

    dwindle.register_metric("mine", drawn, seeded=True)
    prunable = Prunable(tiny_model())
    one, again, other, stock = (
        score_model(prunable, {}, {}, metric_named(name, seed)).stem
        for name, seed in (("mine", 1), ("mine", 1), ("mine", 2), ("random", 1))
    )
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.allclose(one, stock)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize("name", ["mine", "random"])
def test_draws_do_not_depend_on_what_was_compacted(family: str, name: str) -> None:
    """Heads, channels, hidden channels and a layer are gone: what is left scores as it does in the masked model."""

    def drawn(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return lambda w, g, f: w.square() * torch.rand(w.shape, generator=generator, dtype=w.dtype)

    dwindle.register_metric("mine", drawn, seeded=True)
    prunable = Prunable(tiny_model(family))
    prunable.prune(Group("layer", ((0, 1), (), ())))
    for kind in ("attn", "ffn", "stem"):
        prunable.prune(random_group(kind, prunable.alive))
    masked = score_model(prunable, {}, {}, metric_named(name, 5))
    prunable.compact()
    compacted, expected = score_model(prunable, {}, {}, metric_named(name, 5)), masked.restricted(prunable.physical)
    for ours, theirs in ((compacted.attn, expected.attn), (compacted.ffn, expected.ffn)):
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(ours, theirs, strict=True))
    assert torch.allclose(compacted.stem, expected.stem, rtol=1e-6)


def install(folder: Path, package: str, metric: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip writes for a package of one module with an entry point."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dwindle.metrics]\n{metric} = {module}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


def test_installed_packages_are_loaded_when_their_metric_is_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import dwindle\n@dwindle.register_metric('offered')\ndef offered(w, g, f):\n    return w.abs()\n"
    install(tmp_path, "offering-one", "offered", code, monkeypatch)
    assert "offered" in known_metrics()
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model, metric="taylor"))
    load_recipe(tmp_path / "recipe.toml")
    with pytest.raises(UserError, match=f"{METRICS[-1]}, offered;"):
        metric_named("nothing")
    assert "offering_one" not in sys.modules
    assert load_recipe(tmp_path / "recipe.toml", ["prune.metric=offered"]).prune.metric == "offered"
    assert "offering_one" in sys.modules and metric_named("offered").needs == frozenset()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "metric 'offered': the package offering-two cannot be loaded: ZeroDivisionError"),
        ("", "the package offering-two offers it and does not register it: offering_two must call"),
    ],
)
def test_broken_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    install(tmp_path, "offering-two", "offered", code, monkeypatch)
    with pytest.raises(UserError, match=message):
        metric_named("offered")


def test_a_package_cannot_take_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "offering-three", "taylor", "1 / 0", monkeypatch)
    assert metric_named("taylor").score is metrics.taylor
    install(tmp_path, "offering-four", "twice", "", monkeypatch)
    install(tmp_path, "offering-five", "twice", "", monkeypatch)
    with pytest.raises(UserError, match=r"metric 'twice': is offered by several packages .*remove all but one"):
        metric_named("twice")
