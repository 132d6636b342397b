"""The pages say what the JSON files of the studies say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.recipe.library import find_recipe
from dwindle.recipe.recipe import Recipe, load_recipe, resolve_recipe
from tiny import shrunk, tiny_model

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = sorted(DOCS.glob("results*.md"))


def script(name: str) -> ModuleType:
    if str(ROOT / "studies") not in sys.path:
        sys.path.append(str(ROOT / "studies"))
    spec = importlib.util.spec_from_file_location(f"study_{name}", ROOT / "studies" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("tables")


@pytest.mark.parametrize("page", ["README.md", "results.md", "results-peers.md", "benchmarks.md", "evaluation.md"])
def test_a_page_with_tables_is_rendered(tables: ModuleType, page: str) -> None:
    assert page in {found.name for found in tables.PAGES}


def test_the_tables_match_their_files(tables: ModuleType) -> None:
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.render(text, page.parent) == text, f"{page.name}: run `python studies/tables.py`"


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_every_table_of_results_has_a_file(tables: ModuleType, page: Path) -> None:
    outside = tables.MARKED.sub("", page.read_text(encoding="utf-8"))
    assert "| ---" not in outside and "<!--" not in outside, "a table that no file backs, or a broken marker"


def test_every_file_of_results_is_named_by_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert [file.name for file in (DOCS / "results").iterdir() if f"results/{file.name}" not in pages] == []


def test_a_changed_number_is_noticed(tables: ModuleType, tmp_path: Path) -> None:
    text = (DOCS / "results-textbooks.md").read_text(encoding="utf-8")
    (tmp_path / "results").mkdir()
    for name in {file for files in re.findall(r"<!-- table: \S+ from (\S+) -->", text) for file in files.split(",")}:
        content = (DOCS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(content.replace("3.1184", "3.1384"), encoding="utf-8")
    found = tables.render(text, tmp_path)
    assert "**3.138**" in found and "**3.118**" in text and found != text


def test_levers_are_compared_with_the_row_before(tables: ModuleType) -> None:
    """A row that was not run is added together with the next one; shares are of the whole gain."""
    loss = {"one-shot+kd@2e-3": 3.5, "global-muon+kd@2.5e-3": 3.4, "global-group-muon+kd@1.5e-3": 3.1}
    rows = [{"row": "source", "model": "m", "tokens": 0, "size": "", "seed": 0}]
    for row, value in loss.items():
        texts = {"marketing": value, "mixed.test": value - 1, "wikitext2": value + 1}
        rows.append({"row": row, "model": "m", "tokens": 16_000_000, "size": "50%", "seed": 0, **texts})
    found = [line.split(" | ") for line in tables.training.levers({"rows": rows}).splitlines()[2:]]
    assert [cells[4] for cells in found] == ["", "0.100 (25 %)", "0.300 (75 %)"]
    assert found[1][1].startswith("+ optimizer: Muon; selection:")
    assert [cells[5] for cells in found] == ["2.500", "2.400", "2.100"]


def test_half_a_study_is_half_a_table(tables: ModuleType) -> None:
    """A size whose controls are not there yet, and a row with settings of its own, leave the other rows as they are."""
    rows = [{"row": "source", "model": "m", "tokens": 0, "size": "", "seed": 0}]
    names = ("one-shot+kd@2e-3", "one-shot-muon+kd@2.5e-3", "global-group-muon+kd@1.5e-3")
    for size, row in [*(("50%nonemb", name) for name in names), ("30%nonemb", names[1]), ("80%nonemb", names[0])]:
        losses = dict.fromkeys(("marketing", "mixed.test", "wikitext2"), 4.0 - 0.1 * len(rows))
        rows.append({"row": row, "model": "m", "tokens": 16_000_000, "size": size, "seed": 0, "set": ["a=1"], **losses})
    more = rows[3] | {"set": ["b=2", "a=1"], "settings": ["b=2"], "marketing": 9.0}
    for kind in (tables.training.headline, tables.training.levers):
        found = kind({"rows": rows})
        assert kind({"rows": [*rows, more]}) == found
        assert found.count("| 50%nonemb |") == len(found.splitlines()) - 2 >= 3


@pytest.mark.parametrize("size", ["80%nonemb", "50%nonemb", "30%nonemb"])
def test_the_default_recipe_is_the_best_of_the_table(tables: ModuleType, size: str) -> None:
    """What the best row sets, the recipe sets as well, and nothing else about pruning and teaching."""
    data = json.loads((DOCS / "results" / "main-table.json").read_text(encoding="utf-8"))
    rivals = [
        seeds for seeds in tables.training.grouped(data) if seeds[0]["size"] == size and seeds[0]["tokens"] < 17_000_000
    ]
    best = min(rivals, key=lambda seeds: sum(row["textbooks"] for row in seeds) / len(seeds))[0]
    recipe = load_recipe("smollm2-135m-to-80m")
    like = load_recipe("smollm2-135m-to-80m", overrides=best["settings"])
    assert like == recipe and recipe.num_tokens == best["tokens"]
    named = {setting.partition("=")[0] for setting in best["settings"]}
    text = tomllib.loads(find_recipe("smollm2-135m-to-80m").read_text(encoding="utf-8"))
    own = {f"{section}.{key}" for section in ("prune", "distill") for key in text[section]}
    assert own - named <= {"prune.target", "prune.metric", "prune.milestones", "prune.warmup_steps"}


def test_only_unusual_settings_are_told(tables: ModuleType) -> None:
    rows = [row(name, 0, 3.0, set=["lr=1", "steps=16"]) for name in ("a", "b", "c")]
    found = tables.training.losses({"rows": [*rows, row("a", 0, 3.1, set=["lr=1", "steps=64"], settings=["steps=64"])]})
    assert "[steps=64]" in found and "steps=16" not in found and "lr=1" not in found
    found = tables.training.losses({"rows": [*rows, row("a", 0, 3.1, set=["steps=16"], settings=["steps=16"])]})
    assert "| a [no lr=1] |" in found and "| a |" in found


def row(name: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    found = {"row": name, "title": name, "size": "50%", "seed": seed, "tokens": 1000, "settings": [], "commit": "abc"}
    return found | {"command": f"run {name}", "parameters": 90 + seed, "textbooks": loss} | more


def test_losses_of_a_study(tables: ModuleType) -> None:
    """Seeds are one line with mean and sample deviation; unreached targets and refusals never win."""
    task = {"value": 0.5, "stderr": 0.02}
    scores = {
        "tasks": dict.fromkeys(tables.training.TASKS, task) | {"boolq": {"value": 0.38, "stderr": 0.01}},
        "average": {"value": 0.41, "stderr": 0.01},
    }
    rows = [
        row("one", 0, 3.0, wikitext2=4.0, **scores),
        row("two", 0, 2.9, wikitext2=3.0),
        row("two", 1, 3.0, wikitext2=5.0),
        row("two", 0, 2.8, wikitext2=3.0, repeat=1),
        row("easy", 0, 1.0, target_reached=False),
        {k: v for k, v in row("never", 0, 0.0).items() if k != "textbooks"} | {"refused": "too few steps"},
    ]
    lines = tables.training.losses(json.loads(json.dumps({"rows": rows}))).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[5:8] for line in cells] == [
        ["3.000", "4.000", "41.00 (±1.00)"],
        ["**2.900 ± 0.100**", "3.667 ± 1.155", ""],
        ["1.000", "", ""],
        ["not possible: too few steps", "", ""],
    ]
    assert cells[1][3:5] == ["0 ×2, 1", "90–91"] and cells[2][4] == "90 (target not reached)"
    assert tables.training.tasks({"rows": rows}).splitlines()[2:] == [
        "| 50% | one | 1,000 | 50.00 ±2.00 | 50.00 ±2.00 | 38.00 ±1.00 |"
        + " 50.00 ±2.00 |" * 4
        + " 41.00 ±1.00 | 50.00 ±0.82 |"  # the last: 2 / √6
    ]
    other = [row("one", 0, 3.0, set=["a.b=1"]), row("one", 0, 2.0, set=["a.b=1", "c.d=2"], settings=["c.d=2"])]
    found = tables.training.losses({"rows": other})
    assert "| one |" in found and "| one [c.d=2] |" in found
    assert "| two 50% | 0 ×2, 1 | abc | `run two` |" in tables.training.commands({"rows": rows})


def test_margins_over_one_shot(tables: ModuleType) -> None:
    """One-shot less the row, over seeds; another number of tokens or other settings for all are no control."""
    rows = [
        *(row("one-shot", seed, loss, wikitext2=5.0) for seed, loss in ((0, 3.1), (1, 3.3))),
        *(row("aware", seed, loss, wikitext2=4.0) for seed, loss in ((0, 3.0), (1, 3.0))),
        row("aware", 0, 2.0, tokens=2000),
        row("late", 0, 2.5, set=["a.b=1"]),
        row("once", 0, 3.15),
    ]
    lines = tables.training.margins({"rows": rows}).splitlines()[2:]
    assert lines == [
        "| 50% | aware | 1,000 | 2 and 2 | 0.200 ± 0.141 | 1.000 ± 0.000 |",
        "| 50% | once | 1,000 | 1 and 2 | 0.050 |  |",
    ]
    taught = [row("one-shot+kd", 0, 3.0), row("aware+kd", 0, 2.9), *rows]
    assert tables.training.margins_distilled({"rows": taught}).splitlines()[2:] == [
        "| 50% | aware+kd | 1,000 | 1 and 1 | 0.100 |  |"
    ]


def test_seeds_that_were_run_alike_share_a_command(tables: ModuleType) -> None:
    """Another option is another command; commits are those of the runs."""
    rows = [row("one", seed, 3.0, command=f"run --rows one --seeds {seed}", commit=f"c{seed}") for seed in range(3)]
    rows.append(row("one", 0, 3.1, command="run --rows one --seeds 0 --tasks-data sets", commit="d"))
    assert tables.training.commands({"rows": rows}).splitlines()[2:] == [
        "| one 50% | 0, 1, 2 | c0, c1, c2 | `run --rows one --seeds 0,1,2` |",
        "| one 50% | 0 | d | `run --rows one --seeds 0 --tasks-data sets` |",
    ]


def test_choices_are_told_by_what_they_change(tables: ModuleType) -> None:
    """The reference is the row in the middle; removed, changed and added settings are named, tokens are not."""
    one = ["a.b=1", "c.d=2"]
    rows = [
        row("far", 0, 3.5, settings=["a.b=9", "c.d=2", "e.f=3"], order=3),
        row("base", 0, 3.0, settings=one, order=0),
        row("plain", 0, 3.2, settings=["a.b=1", "training.tokens=1k"], order=1),
        row("easy", 0, 1.0, settings=[*one, "e.f=3"], order=2, target_reached=False),
        row("small", 0, 4.0, settings=[], tokens=500),
    ]
    small, large = tables.training.choices({"rows": rows}).split("\n\n50%, 1,000")
    head, *lines = large.split("\n\n")[1].splitlines()
    assert large.startswith(" tokens, `a.b=1` `c.d=2`:")
    assert head == "| changed | seeds | held-out loss | minus reference |"
    assert lines[1:] == [
        "| reference | 0 | 3.000 |  |",
        "| no `c.d=2` | 0 | 3.200 | +0.200 |",
        "| `e.f=3` | 0 | 1.000 (target not reached) | -2.000 |",
        "| `a.b=9`, `e.f=3` | 0 | 3.500 | +0.500 |",
    ]
    assert small.startswith("50%, 500 tokens, all defaults:") and "| reference | 0 | 4.000 |" in small


def test_choices_beside_another_row_have_that_as_reference(tables: ModuleType) -> None:
    """Two rows that differ from `c.d=3` by one setting, and from the base by two, are measured against it."""
    rows = [
        row("base", 0, 3.0, settings=["c.d=2"], order=0),
        row("c-3", 0, 2.8, settings=["c.d=3"], order=1),
        row("c-4", 0, 2.9, settings=["c.d=4"], order=1),
        *(row(f"e-{n}", 0, 2.7, settings=["c.d=3", f"e.f={n}"], order=2) for n in range(2)),
    ]
    first, second = tables.training.choices({"rows": rows}).split("\n\n50%, 1,000 tokens, `c.d=3`:\n\n")
    assert first.count("`c.d=3`") == 1 and "e.f" not in first
    assert second.splitlines()[2:] == [
        "| reference | 0 | 2.800 |  |",
        "| `e.f=0` | 0 | 2.700 | -0.100 |",
        "| `e.f=1` | 0 | 2.700 | -0.100 |",
    ]


def test_the_figure_of_scalability() -> None:
    """Means over seeds by the tokens of pruning, ratios apart; missed targets and other tokens are left out."""
    about: dict[str, Any] = {"target_reached": True, "wikitext2": 5.0, "loss_at_target": 6.0}
    rows = [
        row("horizon-40%", 0, 2.8, pruning_tokens=400, **about),
        row("base", 0, 3.0, pruning_tokens=100, **about),
        row("base", 1, 3.2, pruning_tokens=100, **about),
        row("ratio-1:9", 0, 1.0, pruning_tokens=900, **about | {"target_reached": False}),
        row("ratio-4:1", 0, 2.9, pruning_tokens=200, **about),
        row("horizon-5%", 0, 1.0, pruning_tokens=50, **about | {"tokens": 500}),
        row("lr-3e-3", 0, 1.0, pruning_tokens=100, **about),
    ]
    study = script("scalability")
    reached, books, wiki = study.scalability({"rows": rows}).panels
    assert books.series[0].x == wiki.series[0].x == [100, 400]
    assert reached.series[0].y == [6.0, 6.0]
    assert [(s.name, s.x, s.y) for s in books.series[1:]] == [("prune.ratio", [200], [2.9])]
    assert books.series[0].y == [pytest.approx(3.1), 2.8] and wiki.series[0].y == [5.0, 5.0]
    with pytest.raises(UserError, match="fewer than two"):
        study.scalability({"rows": rows[1:3]})


def test_the_peers_table_and_figure() -> None:
    """One line for all seeds; a curve for each method, apart without and with training; refused rows say why."""
    about: dict[str, Any] = {"mixed.test": 3.5, "wikitext2": 4.0, "valid": "psychology", "sequences": 4, "model": "one"}
    cost = {"seconds": 2.5, "peak_bytes": 3 * 2**30, "device": "cpu"}
    rows = [
        row("source", 0, 2.0, **about | {"size": "", "tokens": 0, "decode_speedup": 1.0}),
        row("flap", 0, 5.0, **about, pruning=cost, decode_speedup=1.25) | {"tokens": 0},
        row("flap", 0, 7.0, **about, pruning=cost, decode_speedup=2.0) | {"tokens": 0, "size": "25%"},
        row("flap-trained+kd", 0, 3.0, **about, pruning=cost, decode_speedup=1.25, non_embedding=2_000_000),
        row("flap-trained+kd", 1, 3.2, **about, pruning=cost, decode_speedup=1.25),
        {k: v for k, v in row("ours", 0, 0.0, valid="psychology").items() if k != "textbooks"} | {"refused": "no"},
    ]
    lines = script("tables").TABLES["peers"]({"rows": rows}).splitlines()
    shown = ["non-emb.", "psychology", "mixed.test", "WikiText-2", "decode ×", "pruning, s", "pruning memory, GiB |"]
    assert lines[0].split(" | ")[5:] == shown
    cells = [
        "| 50%",
        "flap-trained+kd",
        "0M",
        "0, 1",
        "0.0M",
        "2.0M",
        "3.100 ± 0.141",
        "3.500 ± 0.000",
        "4.000 ± 0.000",
    ]
    assert " | ".join([*cells, "1.25 ± 0.00", "2.5", "3.00 |"]) in lines
    assert any("not possible: no" in line for line in lines)
    drawn = script("peers_speed").figure({"rows": rows})
    pruned, trained = drawn.panels
    assert drawn.caption.startswith("one at several sizes")
    assert [(s.name, s.x, s.y) for s in pruned.series] == [("flap", [0.5, 0.8], [3.5, 3.5])]
    assert [s.name for s in trained.series] == ["flap"]
    assert pruned.legend and not trained.legend
    more = script("peers_speed").figure({"rows": [*rows, rows[3] | {"row": "sheared-trained+kd"}]})
    assert more.panels[1].legend  # it has a line that the first panel lacks
    assert "only its order of magnitude can be compared" in " ".join(lines)


def test_speed_is_measured_on_a_model_of_the_same_shape() -> None:
    source = tiny_model("llama", dtype=torch.float32, attention_bias=False, mlp_bias=False)
    for kind in ("stock", "unequal", "cluster"):
        model, _ = shrunk("llama", kind)  # with biases
        shape = script("measures").shape_of(model)
        assert shape["output_bias"]
        built = script("peers_speed").model_of(shape, source)
        assert {n: p.shape for n, p in built.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_the_smallest_recipe_has_the_settings_of_its_row() -> None:
    """What a recipe does not set is what was measured as the row "smallest" (with teacher)."""
    settings = {"source.model": "x", "data.train": ["books"], "training.tokens": "2M", "prune.target": "50%nonemb"}
    resolved = resolve_recipe(from_dict(Recipe, _tables(settings)))
    rows = json.loads((DOCS / "results" / "defaults.json").read_text(encoding="utf-8"))["rows"]
    measured = next(row for row in rows if row["row"] == "smallest+kd")["settings"]
    assert len(measured) >= 8
    for key, value in dict(setting.split("=", 1) for setting in measured).items():  # the last one counts
        section, _, name = key.partition(".")
        assert str(getattr(getattr(resolved, section), name)) == str(_parsed(value)), key


def test_a_run_that_does_not_prune_has_no_teacher_unless_it_asks() -> None:
    settings = {"source.model": "x", "data.train": ["books"], "training.tokens": "2M", "prune.enabled": False}
    assert from_dict(Recipe, _tables(settings)).teacher_weight == 0
    assert from_dict(Recipe, _tables(settings | {"distill.weight": 0.3})).teacher_weight == 0.3


def _tables(settings: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    return tables


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
