"""A judge at an address: what it is sent, what its replies mean, and what a bad server leads to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from chats import write_answers
from dwindle.core.errors import UserError
from dwindle.evaluation import judges
from dwindle.evaluation.judges import AddressJudge, Pair, verdict_in
from hostile import shell


class Stub(BaseHTTPRequestHandler):
    """Says A if the first answer is the longer one; fails now and then."""

    seen: list[tuple[str, str, dict[str, Any]]] = []  # noqa: RUF012
    mode = "good"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, self.headers.get("Authorization", ""), body))
        if self.mode == "garbled":
            self.wfile.write(b"nonsense\r\n\r\n")
            self.close_connection = True
            return
        if self.mode == "redirect":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            return
        if self.mode in ("busy", "odd") and len(self.seen) == 1:
            self.send_response(429)
            self.send_header("Retry-After", "0" if self.mode == "busy" else "\xb2")
            self.end_headers()
            return
        text = body["messages"][0]["content"]
        first, second = (text.split(f"[Answer {x}]\n")[1].split("\n[End of")[0] for x in "AB")
        said = {"mute": "I cannot decide.", "broken": None}.get(self.mode, "A" if len(first) > len(second) else "B.")
        content = json.dumps({"choices": [{"message": {"content": said}}]} if self.mode != "broken" else {"x": 1})
        self.send_response(401 if self.mode == "denied" else 200)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Stub.seen, Stub.mode = [], "good"
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_time_to_wait_that_is_no_number_is_ignored(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(judges.time, "sleep", waited.append)
    Stub.mode = "odd"
    assert AddressJudge(address, "m").judge(Pair(1, "q", "a long answer", "b"), a_first=True) == 1.0
    assert waited == [1.0]


def test_an_address_judges_only_when_it_is_allowed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(judges.KEY_VARIABLE, "secret-key")
    a = write_answers(tmp_path / "a.jsonl", {1: "a long answer", 2: "x", 3: "zzz"})
    b = write_answers(tmp_path / "b.jsonl", {1: "short", 2: "longer", 3: "y"})
    run = partial(shell, "winrate", a, b, "--judge", address)
    code, _, error = run("--judge-model", "m")
    assert code == 2 and "pass --allow-network to agree" in error and not Stub.seen
    code, _, error = run("--allow-network")
    assert code == 2 and "--judge-model: is missing" in error and not Stub.seen
    Stub.mode = "busy"
    code, said, error = run("--judge-model", "m", "--allow-network", "--json", "--out", str(tmp_path / "out"))
    found = json.loads(said)
    assert code == 0 and (found["wins"], found["losses"]) == (2, 1) and found["consistency"] == 1
    assert len(Stub.seen) == 7 and all(key == "Bearer secret-key" for _, key, _ in Stub.seen)
    assert Stub.seen[0][0] == "/v1/chat/completions" and Stub.seen[0][2]["model"] == "m"
    kept = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "secret-key" not in said + error + kept
    code, said, _ = run("--judge-model", "m", "--allow-network")
    assert code == 0 and "length-controlled" in said and "position bias" in said
    for mode, message in {
        "mute": "said neither A nor B for any of 3 pairs",
        "broken": "not an answer of an OpenAI-compatible server",
        "denied": "cannot be asked (status 401)",
        "redirect": "cannot be asked (status 302)",
    }.items():
        Stub.mode = mode
        code, _, error = run("--judge-model", "m", "--allow-network")
        assert code == 2 and message in error and error.count("\n") == 1 and "secret-key" not in error, mode


def test_a_server_that_does_not_speak_http_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(judges.time, "sleep", waited.append)
    Stub.mode = "garbled"
    with pytest.raises(UserError, match=r"cannot be asked \(nonsense\): check the address") as error:
        AddressJudge(address, "m").judge(Pair(1, "q", "a", "b"), a_first=True)
    assert "\n" not in str(error.value)
    assert waited == [0.25, 0.5, 1.0]  # between four tries


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get the key in the clear."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(judges.time, "sleep", lambda seconds: None)
    assert AddressJudge(address, "m").judge(Pair(1, "q", "a long answer", "b"), a_first=True) == 1.0


def test_a_key_is_not_sent_in_the_clear_nor_taken_from_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(judges.KEY_VARIABLE, "secret-key")
    with pytest.raises(UserError, match="sent by https only"):
        AddressJudge("http://example.org/v1", "m")
    with pytest.raises(UserError, match="an address holds no key") as error:
        AddressJudge("https://user:hidden@example.org/v1", "m")
    assert "hidden" not in str(error.value)
    assert "secret" not in AddressJudge("https://example.org/v1", "m").name


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [("A", 1.0), ("B.", 0.0), (" **A** is better", 1.0), ("Answer: B", 0.0), ("The better answer is A", 1.0),
     ("tie", 0.5), ("Both", 0.5), ("I prefer A", 1.0), ("", None), ("Apples", None),
     ("A close call, but B is better.", 0.0), ("A and B are equal", 0.5), ("The better answer is answer B", 0.0),
     ("Both answers are fine, but B is better", 0.0), ("a", None), ("A lot of text", None), ("[[B]]", 0.0),
     ("B is better than A.", 0.0), ("A: it is right, in contrast to answer B.", 1.0),
     ("Neither A nor B is better", None), ("A is better in style, B is better in content", None),
     ("B is not better", None), ("I don't think A is better", None),
     ("As for A, it is wrong. Verdict: B", None), ("**Answer A** is clearly better", 1.0)],
)  # fmt: skip
def test_verdicts_in_words(answer: str, verdict: float | None) -> None:
    assert verdict_in(answer) == verdict
