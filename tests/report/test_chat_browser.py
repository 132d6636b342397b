"""The chat page in a real browser: side by side, by keyboard, on a phone, in the dark; a closed tab ends answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Browser
from chat_models import Parrot

from dwindle.report.chat_server import ChatServer

OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
TEXTS = 'return [...document.querySelectorAll(".said .text")].map((one) => one.textContent)'
DONE = 'return document.querySelectorAll(".said").length > 0 && !document.querySelector(".said.running")'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        started.look_like(width=1280)
        yield started


@contextmanager
def serving(*models: Parrot) -> Iterator[ChatServer]:
    with ChatServer(models) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def press(browser: Browser, *keys: str) -> None:
    """Real keys, to whatever has the focus."""
    actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
    keyboard = {"type": "key", "id": "keyboard", "actions": actions}
    browser._ask("POST", f"{browser._session}/actions", {"actions": [keyboard]})


ENTER, ESCAPE, UP, TAB = "\ue007", "\ue00c", "\ue013", "\ue004"


def say(browser: Browser, message: str) -> None:
    """Type a message and send it."""
    enter(browser, "textarea", message)
    press(browser, ENTER)


def enter(browser: Browser, field: str, text: str) -> None:
    """Type into what has the focus, again if need be: a browser drops keys that come before the first frame."""
    end, found = time.monotonic() + 60, f"document.querySelector({json.dumps(field)}).value"
    press(browser, *text)
    while browser.run(f"return {found}") != text:
        assert time.monotonic() < end, "the field does not get the keys"
        time.sleep(0.2)
        browser.run(f'{found} = ""')
        press(browser, *text)


def test_a_question_by_keyboard_is_answered_side_by_side(browser: Browser) -> None:
    with serving(Parrot("source", words=4), Parrot("half", words=2)) as server:
        browser.open(server.url)
        say(browser, "one two")  # the field has the focus from the start
        browser.wait_for(DONE)
        assert browser.run(TEXTS) == ["one two one two ", "one two "]
        left, right = browser.run(
            'return [...document.querySelectorAll(".said")].map((one) => one.getBoundingClientRect().left)'
        )
        assert left < right
        stats = browser.run('return [...document.querySelectorAll(".said .stats")].map((one) => one.textContent)')
        assert all("20.0 tokens/s" in one and "541 MB memory" in one and "270 MB on disk" in one for one in stats)
        press(browser, UP, ENTER)  # the last message again
        browser.wait_for('return document.querySelectorAll(".said").length === 4')
        browser.wait_for(DONE)
        assert browser.run('return document.querySelectorAll(".asked")[1].textContent') == "one two"
        browser.run('document.querySelectorAll(".under button")[0].click()')
        assert browser.run('return document.querySelectorAll(".said").length') == 0
        assert browser.run("return document.activeElement.tagName") == "TEXTAREA"
        assert browser.console() == []


def test_words_appear_as_they_come_and_escape_stops_them(browser: Browser) -> None:
    parrot = Parrot(words=10_000, pause_s=0.03)
    with serving(parrot) as server:
        browser.open(server.url)
        say(browser, "go")
        browser.wait_for('return (document.querySelector(".said .text")?.textContent.length || 0) > 10')
        assert browser.run('return document.querySelector("button.main").textContent') == "Stop"
        press(browser, ESCAPE)
        browser.wait_for(DONE)
        end = time.monotonic() + 20
        while parrot.num_ended < 1:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert parrot.num_words < 9000
        assert "stopped" in browser.run('return document.querySelector(".stats").textContent')
        parrot.words = 1
        say(browser, "on")  # the chat goes on
        browser.wait_for('return document.querySelectorAll(".said").length === 2')
        browser.wait_for(DONE)


def test_a_new_chat_during_an_answer_is_empty(browser: Browser) -> None:
    """What the old chat still brings goes nowhere; a question that was stopped before an answer is dropped too."""
    parrot = Parrot(words=10_000, pause_s=0.03)
    with serving(parrot) as server:
        browser.open(server.url)
        for restart in ('document.querySelectorAll(".under button")[0].click()',
                        'inputs.system.value = ""; inputs.system.dispatchEvent(new Event("change"))'):  # fmt: skip
            parrot.words, parrot.pause_s = 10_000, 0.03
            say(browser, "go")
            browser.wait_for('return (document.querySelector(".said .text")?.textContent.length || 0) > 10')
            browser.run(restart)
            assert browser.run('return document.querySelector("button.main").textContent') == "Send"
            parrot.words, parrot.pause_s = 2, 0
            say(browser, "on")
            browser.wait_for(DONE)
            assert browser.run("return chats[0].map((one) => [one.role, one.content.trim()])") == [
                ["user", "on"],
                ["assistant", "on on"],
            ]
            browser.run('document.querySelectorAll(".under button")[0].click()')
        parrot.words, parrot.pause_s = 5, 2.0
        say(browser, "slow")
        browser.wait_for('return document.querySelectorAll(".said.running").length === 1')
        press(browser, ESCAPE)
        browser.wait_for(DONE)
        assert browser.run("return chats[0].length") == 0


def test_a_closed_tab_stops_its_answers(browser: Browser) -> None:
    parrots = Parrot("a", words=10_000, pause_s=0.03), Parrot("b", words=10_000, pause_s=0.03)
    with serving(*parrots) as server:
        browser.open(server.url)
        say(browser, "go")
        browser.wait_for('return [...document.querySelectorAll(".said .text")].every((one) => one.textContent)')
        browser.open("about:blank")
        end = time.monotonic() + 20
        while any(parrot.num_ended < 1 for parrot in parrots):
            assert time.monotonic() < end, "an answer goes on for nobody"
            time.sleep(0.05)
        assert all(parrot.num_words < 9000 for parrot in parrots)


def test_what_is_refused_is_said_and_not_kept(browser: Browser) -> None:
    with serving(Parrot()) as server:
        browser.open(server.url)
        say(browser, "forbidden")
        browser.wait_for('return document.querySelector(".said.error .text")?.textContent.includes("context 8")')
        say(browser, "ok")
        browser.wait_for('return document.querySelectorAll(".said").length === 2')
        browser.wait_for(DONE)
        assert browser.run("return chats[0].map((one) => one.role)") == ["user", "assistant"]
        assert all("400" in line for line in browser.console())


def test_tab_goes_from_a_new_system_prompt_to_the_next_setting(browser: Browser) -> None:
    with serving(Parrot()) as server:
        browser.open(server.url)
        browser.run("tune.click(); inputs.system.focus()")
        browser.wait_for('return document.activeElement.dataset.name === "system"')
        enter(browser, "[data-name=system]", "be kind")
        press(browser, TAB)
        assert browser.run("return document.activeElement.dataset.name ?? null") == "temperature"
        assert browser.run("return chats[0]") == [
            {"role": "system", "content": browser.run("return inputs.system.value")}
        ]


def test_only_answered_questions_are_saved(browser: Browser) -> None:
    """As ``dwindle winrate`` and ``tune`` read them; an answer that failed is not announced as one."""
    with serving(Parrot("one"), Parrot("two")) as server:
        browser.open(server.url)
        browser.run("save.click()")
        assert browser.run("return state.textContent") == "nothing to save yet" and browser.run("return saved()") == []
        say(browser, "forbidden")
        browser.wait_for('return document.querySelectorAll(".said.error").length === 2')
        browser.wait_for(DONE)
        assert browser.run("return state.textContent") == "" and browser.run("return saved()") == []
        say(browser, "hello")
        browser.wait_for('return state.textContent === "answered"')
        browser.run('chats[1].push({ role: "user", content: "and" })')  # which is not answered yet
        rows = [json.loads(row) for row in browser.run("return saved()")]
        assert [row["id"] for row in rows] == ["one", "two"]
        assert [[one["role"] for one in row["messages"]] for row in rows] == 2 * [["user", "assistant"]]
        browser.console()


def test_nothing_that_is_said_becomes_code(browser: Browser) -> None:
    nasty = "<img src=x onerror='document.body.dataset.bad=1'><script>document.body.dataset.bad=1</script>"
    with serving(Parrot(nasty, words=3)) as server:
        browser.open(server.url)
        browser.run('document.querySelector("textarea").value = arguments[0]', nasty)
        browser.run('document.querySelector("form").requestSubmit()')
        browser.wait_for(DONE)
        assert browser.run("return document.body.dataset.bad ?? null") is None
        assert browser.run('return document.querySelectorAll("main img, main script").length') == 0
        assert browser.run('return document.querySelector(".model h2").textContent') == nasty
        assert browser.console() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 900, False), (390, 780, True)])
def test_desktop_and_phone_light_and_dark(
    browser: Browser, tmp_path: Path, width: int, height: int, phone: bool, dark: bool
) -> None:
    browser.look_like(width=width, height=height, phone=phone, dark=dark)
    try:
        with serving(Parrot("runs/" + "a-long-name-" * 6, words=60), Parrot("half", words=20)) as server:
            browser.open(server.url)
            say(browser, "why is the sky blue")
            browser.wait_for(DONE)
            browser.run('document.querySelectorAll(".under button")[1].click()')
            assert browser.run(OVERFLOW) <= 0
            boxes = browser.run(
                'return [...document.querySelectorAll(".said")].map((one) => one.getBoundingClientRect().left)'
            )
            assert (boxes[0] == boxes[1]) is phone  # one below the other on a phone
            assert browser.run('return document.querySelector("textarea").getBoundingClientRect().bottom') <= height
            ground = browser.run("return getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, ground[4:-1].split(","))) < 200) is dark
            assert browser.screenshot(tmp_path / "page.png").stat().st_size > 10_000
            assert browser.console() == []
    finally:
        browser.look_like(width=1280)


def test_four_models_fit_a_phone(browser: Browser) -> None:
    """Their names two by two, the rest below their answers."""
    browser.look_like(width=390, height=780, phone=True)
    try:
        with serving(*map(Parrot, ("a/first.bin", "half", "runs/" + "a-long-name-" * 6, "q.gguf"))) as server:
            browser.open(server.url)
            assert browser.run(OVERFLOW) <= 0
            boxes = browser.run(
                'return [...document.querySelectorAll(".model")].map((one) => [one.offsetTop, one.offsetHeight])'
            )
            assert boxes[0][0] == boxes[1][0] < boxes[2][0] == boxes[3][0] and max(height for _, height in boxes) < 40
    finally:
        browser.look_like(width=1280)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("/a/long/path/stories.bin", "runs/half/model"), ["stories.bin", "half"]),
        (("org/model-a", "runs/half.gguf"), ["model-a", "half.gguf"]),
        (("one/half", "two/half"), ["one/half", "two/half"]),
        (("/long/a.bin", "one/half/model", "two/half", "/long/a.bin"), ["a.bin", "one/half", "two/half", "a.bin"]),
    ],
)
def test_models_are_headed_by_what_distinguishes_them(
    browser: Browser, names: tuple[str, ...], shown: list[str]
) -> None:
    with serving(*map(Parrot, names)) as server:
        browser.open(server.url)
        heads = 'return [...document.querySelectorAll("header h2")]'
        assert browser.run(f"{heads}.map((one) => one.textContent)") == shown
        assert browser.run(f"{heads}.map((one) => one.title)") == list(names)
