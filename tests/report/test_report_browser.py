"""The page in a real browser: drawn without complaints, readable by pointer and keyboard, live."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from made_runs import make_run

from dwindle.core.quality import Quality, Sample
from dwindle.report.page import render_page, write_page
from dwindle.report.run import Run, open_run
from dwindle.report.server import ReportServer
from dwindle.report.summary import summarise

POINTS = """
return [...document.querySelectorAll("figure.card path.line")].map((path) => [
  path.closest("figure").id, path.dataset.name, Number(path.dataset.points),
  path.getAttribute("d").split(path.classList.contains("step") ? /[MH]/ : /[ML]/).length - 1])
"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        started.look_like(width=1280)
        yield started


def show(browser: Browser, run: Path, name: str = "report.html") -> dict[str, Any]:
    summary = summarise(open_run(run))
    browser.open(write_page(render_page(summary), run.parent / name).as_uri())
    return summary


def center(browser: Browser, selector: str, share: float = 0.5) -> tuple[float, float]:
    """A place in the window over an element, which is scrolled into view."""
    script = """
    const found = document.querySelector(arguments[0]);
    found.scrollIntoView({ block: "center" });
    const box = found.getBoundingClientRect();
    return [box.left + box.width * arguments[1], box.top + box.height / 2];
    """
    x, y = browser.run(script, selector, share)
    return x, y


def test_every_figure_has_its_points(browser: Browser, tmp_path: Path) -> None:
    summary = show(browser, make_run(tmp_path / "run", steps=300, events=60))
    drawn = {(figure, name): (said, real) for figure, name, said, real in browser.run(POINTS)}
    wanted = {
        (figure["id"], series["name"]): len(series["x"])
        for figure in summary["figures"]
        for panel in figure["panels"]
        for series in panel["series"]
    }
    assert {key: (count, count) for key, count in wanted.items()} == drawn
    ticks = browser.run('return [...document.querySelectorAll("#loss .rug")].map((rug) => Number(rug.dataset.count))')
    loss = next(figure for figure in summary["figures"] if figure["id"] == "loss")
    assert ticks == [len(rug["x"]) for rug in loss["rugs"]]
    assert browser.run('return document.querySelectorAll("#loss line.mark").length') == len(loss["marks"]) == 2
    assert browser.run('return document.querySelectorAll("#architecture .row").length') == 3
    assert browser.console() == []


def test_hover_and_arrow_keys_show_values(browser: Browser, tmp_path: Path) -> None:
    summary = show(browser, make_run(tmp_path / "run"))
    tip = 'const tip = document.querySelector("#loss .tip"); return tip.hidden ? "" : tip.innerText'
    assert browser.run(tip) == ""
    browser.move_to(*center(browser, "#loss .hit"))
    text = browser.run(tip)
    assert "tokens" in text and "validation" in text and "parameters" in text
    half = summary["figures"][0]["panels"][1]["series"][0]["x"][-1] / 2
    assert f"{half / 1000:.3g}"[:2] in text.splitlines()[0]
    browser.move_to(5, 5)
    assert browser.run(tip) == ""
    keys = """
    const drawing = document.querySelector("#loss svg");
    drawing.focus();
    drawing.dispatchEvent(new KeyboardEvent("keydown", { key: "End", bubbles: true }));
    """
    browser.run(keys)
    assert browser.run(tip).startswith("102.4k tokens")
    assert browser.console() == []


def test_a_touch_shows_values_until_the_next(browser: Browser, tmp_path: Path) -> None:
    browser.look_like(width=390, phone=True)
    try:
        show(browser, make_run(tmp_path / "run"))
        tips = 'return [...document.querySelectorAll(".tip")].filter((tip) => !tip.hidden).map((tip) => tip.innerText)'
        browser.tap(*center(browser, "#share .hit"))
        assert "FFN channels" in browser.run(tips)[0]
        browser.tap(*center(browser, "#optimizer .hit"))
        assert [("learning rate" in tip) for tip in browser.run(tips)] == [True]
        browser.tap(*center(browser, "h1"))
        assert browser.run(tips) == [] and browser.console() == []
    finally:
        browser.look_like(width=1280)


def test_it_prints_on_few_pages(browser: Browser, tmp_path: Path) -> None:
    shape = {"hidden": 576, "layers": 30, "heads": 9, "kv": 3, "ffn": 1536}
    show(browser, make_run(tmp_path / "run", shape=shape, events=300))
    paper = base64.b64decode(browser.devtools("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])
    assert paper.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", paper)) <= 5
    assert browser.console() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_all_heads_of_a_layer_are_in_view(browser: Browser, tmp_path: Path, width: int) -> None:
    """Groups that do not fit beside the others are below them; nothing has to be scrolled to the side."""
    browser.look_like(width=width)
    try:
        show(browser, make_run(tmp_path / "run", shape={"hidden": 64, "layers": 12, "heads": 32, "kv": 8, "ffn": 40}))
        places = """
        const edge = document.querySelector("#architecture").getBoundingClientRect().right;
        return [...document.querySelectorAll("#architecture .map circle")].map(
          (one) => edge - one.getBoundingClientRect().right)
        """
        found = browser.run(places)
        assert len(found) == 32 and min(found) > 0
        assert browser.run('return document.querySelectorAll("#architecture .scroll").length') == 0
    finally:
        browser.look_like(width=1280)


def test_choosing_a_layer_draws_its_map(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", events=70)
    summary = show(browser, run)
    for layer in (0, 2):
        browser.run(
            'document.querySelector(`#architecture [data-layer="${arguments[0]}"]`)'
            '.dispatchEvent(new MouseEvent("click", { bubbles: true }))',
            layer,
        )
        view = summary["architecture"]["layers"][layer]
        left = len(view["kv_of_query"]) - len(view["gone_queries"])
        assert browser.run('return document.querySelectorAll("#architecture .map .link").length') == left
        assert f"Layer {layer}" in browser.run('return document.querySelector("#architecture .map h4").innerText')
    assert browser.console() == []


def test_data_links_give_the_json_behind_a_figure(browser: Browser, tmp_path: Path) -> None:
    summary = show(browser, make_run(tmp_path / "run"))
    links = browser.run('return [...document.querySelectorAll("a.data")].map((link) => link.download)')
    names = [figure["id"] for figure in summary["figures"]]
    assert set(links) == {f"{name}.json" for name in [*names, "architecture"]}
    # The page's own policy forbids asking for its links by script, so the text is taken where they are made.
    script = """
    const texts = [];
    const real = window.Blob;
    window.Blob = class extends real { constructor(parts, options) { super(parts, options); texts.push(parts[0]); } };
    dataLink("probe", arguments[0]);
    window.Blob = real;
    return texts[0];
    """
    assert json.loads(browser.run(script, summary["figures"][0])) == summary["figures"][0]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
def test_desktop_and_phone_light_and_dark(
    browser: Browser, tmp_path: Path, width: int, phone: bool, dark: bool
) -> None:
    browser.look_like(width=width, phone=phone, dark=dark)
    try:
        shape = {"hidden": 64, "layers": 6, "heads": 32, "kv": 8, "ffn": 40}
        show(browser, make_run(tmp_path / ("a-long-name-" * 8), shape=shape))
        assert browser.run(OVERFLOW) <= 0
        ground = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) is dark
        shot = browser.screenshot(tmp_path / "page.png")
        assert shot.read_bytes().startswith(b"\x89PNG") and shot.stat().st_size > 20_000
        assert browser.console() == []
    finally:
        browser.look_like(width=1280)


def test_nothing_from_the_run_becomes_code(browser: Browser, tmp_path: Path) -> None:
    nasty = "</script><script>document.body.dataset.bad=1</script><img src=x onerror='document.body.dataset.bad=1'>"
    run = make_run(tmp_path / "<b>bold<b>", recipe=f"# {nasty}\n")
    (run / "evaluation.json").write_text(json.dumps({nasty: {"acc": nasty}}))
    Quality([nasty], 9, True, 1.0, 2.0, [Sample(nasty, nasty, nasty)]).write(run / "quality.json")
    show(browser, run)
    assert browser.run('return document.querySelector("#samples .said p").textContent') == nasty + nasty
    assert browser.run("return document.body.dataset.bad ?? null") is None
    assert browser.run('return document.querySelectorAll("main img, main script, main b").length') == 0
    assert nasty in browser.run('return document.querySelector("#recipe pre").textContent')
    assert browser.run('return document.querySelector("h1").firstChild.textContent') == "<b>bold<b>"
    assert browser.console() == []


def test_the_verdict_comes_first_and_no_card_is_half_empty(browser: Browser, tmp_path: Path) -> None:
    shape = {"hidden": 64, "layers": 6, "heads": 8, "kv": 4, "ffn": 40}
    show(browser, make_run(tmp_path / "run", shape=shape, source_loss=2.0))
    order = browser.run(
        'return [...document.querySelectorAll("header, .tiles, .card, h2")].map((e) => e.id || e.innerText)'
    )
    assert "worse than the source" in order[0] and "loss against the source" in order[1]
    assert order[2:5] == ["loss", "samples", "How it was pruned"] and "How it was trained" in order
    assert "there was a fox." in browser.run('return document.querySelector("#samples").innerText')
    assert browser.run('return document.querySelectorAll("#loss path.c-source").length') == 1
    boxes = browser.run(
        'return [...document.querySelectorAll("figure.card")].map((card) => { const box = card.getBoundingClientRect();'
        'const drawn = card.querySelector(".plot svg"); return [Math.round(box.top), box.width,'
        "drawn ? drawn.getBoundingClientRect().height : 0]; })"
    )
    whole = browser.run('return document.querySelector(".figures").clientWidth')
    for top, width, _ in boxes:
        beside = [other for other in boxes if other[0] == top]
        assert sum(other[1] for other in beside) > 0.95 * whole, "a card beside nothing"
        assert len({round(other[2]) for other in beside}) == 1 or width == whole, "drawings side by side are as tall"
    assert browser.console() == []


def test_what_is_missing_is_on_the_page(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", finished=False)
    (run / "ledger.jsonl").unlink()
    data = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(data[:-15])
    show(browser, run)
    text = browser.run('return document.querySelector(".missing").innerText')
    assert "ledger.jsonl is missing" in text and "ends with an incomplete line" in text
    assert browser.run('return document.querySelectorAll("figure.card").length') == 3
    for name in ("metrics.jsonl", "recipe.toml"):
        (run / name).write_text("")
    show(browser, run)
    assert browser.run('return document.querySelectorAll("figure.card").length') == 0
    assert browser.console() == []


def test_a_run_of_days_is_drawn_at_once(browser: Browser, long_run: Path) -> None:
    show(browser, long_run)
    milliseconds = int(browser.run("return document.documentElement.dataset.drawMs"))
    print(f"drawn in {milliseconds} ms")  # a figure for people; busy machines must not fail the test
    assert browser.run('return document.querySelectorAll("figure.card svg").length') >= 6
    assert browser.run('return document.querySelectorAll("*").length') < 20_000
    assert browser.console() == []


def test_live_refresh_picks_up_a_new_event(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", finished=False)
    with ReportServer(Run(run)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            browser.open(server.url)
            tile = 'return /in %d prune events/.test(document.querySelector(".lead").innerText)'
            assert browser.run(tile % 40)
            browser.move_to(*center(browser, "#loss .hit"))
            with (run / "ledger.jsonl").open("a") as file:
                event = {"event": "prune", "step": 201, "tokens": 102_500, "type": "stem", "indices": [[99]]}
                file.write(json.dumps({**event, "saliency": {}, "parameters": 12_345}) + "\n")
            browser.wait_for(tile % 41)
            assert not browser.run('return document.querySelector("#loss .tip").hidden'), "the cursor stays"
            assert browser.run('return document.querySelectorAll("figure.card").length') >= 5
            assert browser.console() == []
        finally:
            browser.open("about:blank")
            server.shutdown()
            thread.join()
