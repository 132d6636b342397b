"""The server of the chat page: streams, lets a bounded number wait, stops for who is gone, and serves nobody else."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from chat_models import Parrot

from dwindle.evaluation.config import SamplingConfig
from dwindle.report.chat_server import MAX_WAITING, ChatServer


@contextmanager
def serving(*models: Parrot) -> Iterator[ChatServer]:
    with ChatServer(models, config=SamplingConfig(temperature=0.5)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def body(text: str = "one two", model: int = 0, **settings: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], "settings": settings}).encode()


def ask(server: ChatServer, content: bytes, path: str = "/answer", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST", path, content, {"Content-Type": "application/json", **headers})
    reply = connection.getresponse()
    found = reply.status, dict(reply.headers), reply.read()
    connection.close()
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "never"
        time.sleep(0.02)


def test_an_answer_is_streamed_piece_by_piece() -> None:
    parrot = Parrot(words=3)
    with serving(parrot) as server:
        status, headers, content = ask(server, body())
        rows = [json.loads(line) for line in content.splitlines()]
        assert status == 200 and "".join(row["text"] for row in rows) == "one two one "
        assert rows[-1]["last"] and rows[-1]["finished"] and rows[-1]["tokens"] == 3 and rows[-1]["memory"] > 0
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        # the first piece is there before the second one is made
        parrot.pause_s = 0.3
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request("POST", "/answer", body(), {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().readline())["text"] == "one " and parrot.num_words < 6
        connection.close()


def test_two_hundred_requests_at_once_are_all_answered() -> None:
    """Some wait, the others are told when to come back; none is dropped, and the server lives."""
    parrot = Parrot(words=2, pause_s=0.02)
    with serving(parrot) as server:
        with ThreadPoolExecutor(200) as pool:
            found = list(pool.map(lambda number: ask(server, body(f"w{number}")), range(200)))
        by_status = {status: [one for one in found if one[0] == status] for status in (200, 503)}
        assert len(by_status[200]) + len(by_status[503]) == 200
        assert len(by_status[200]) >= MAX_WAITING + 1 and by_status[503]
        for number, (status, headers, content) in enumerate(found):
            if status == 200:
                assert "".join(json.loads(line)["text"] for line in content.splitlines()) == f"w{number} w{number} "
            else:
                assert headers["Retry-After"] == "5" and "too many requests" in json.loads(content)["error"]
        assert parrot.most_at_once == 1 and parrot.num_started == parrot.num_ended == len(by_status[200])
        assert ask(server, body())[0] == 200 and server.desks[0].num_waiting == 0


def test_a_closed_tab_stops_its_answer_and_frees_the_model() -> None:
    parrot = Parrot(words=10_000, pause_s=0.01)
    with serving(parrot) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request("POST", "/answer", body(), {"Content-Type": "application/json"})
        connection.getresponse().readline()
        waiting = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)  # waits for the first
        content = body("never asked")
        head = f"POST /answer HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\n"
        waiting.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        until(lambda: server.desks[0].num_waiting == 1)
        waiting.close()
        until(lambda: server.num_stopped == 1 and server.desks[0].num_waiting == 0)
        assert parrot.num_started == 1 and parrot.num_ended == 0
        connection.close()
        until(lambda: parrot.num_ended == 1)
        assert parrot.num_words < 5000 and server.num_stopped == 2
        parrot.words = 2
        assert ask(server, body())[0] == 200


def test_a_client_that_does_not_read_cannot_hold_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from dwindle.report.loopback import LoopbackHandler

    monkeypatch.setattr(LoopbackHandler, "timeout", 0.5)
    parrot = Parrot(words=10**9)
    with serving(parrot) as server:
        connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
        content = body("x" * 2000)
        head = f"POST /answer HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        until(lambda: parrot.num_ended == 1)
        connection.close()


def test_a_body_that_never_comes_can_be_closed_in_favour_of_others() -> None:
    with serving(Parrot()) as server:
        connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
        head = f"POST /answer HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n".encode())
        until(lambda: len(server._open) == 1)
        time.sleep(0.2)
        assert len(server._open) == 1  # it is one of those that wait, not one that is answered
        connection.close()


def test_descriptors_above_1023_are_watched() -> None:
    """As with hundreds of files open: select() would take them for clients that are gone."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[0] < 1200:
        if limit[1] != resource.RLIM_INFINITY and limit[1] < 1200:
            pytest.skip("this machine allows fewer descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (1200, limit[1]))
    held = []
    try:
        with serving(Parrot(words=3)) as server:
            while not held or held[-1] < 1030:
                held.append(os.open(os.devnull, os.O_RDONLY))
            status, _, content = ask(server, body())
            assert status == 200 and len(content.splitlines()) == 4 and server.num_stopped == 0
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_models_answer_side_by_side() -> None:
    first, second = Parrot("a", words=3, pause_s=0.2), Parrot("b", words=3, pause_s=0.2)
    with serving(first, second) as server, ThreadPoolExecutor(2) as pool:
        slow = pool.submit(ask, server, body("x", 0))
        until(lambda: first.num_at_once == 1)
        quick = pool.submit(ask, server, body("y", 1))
        until(lambda: first.num_at_once == second.num_at_once == 1)
        assert slow.result()[0] == quick.result()[0] == 200


BAD = {
    b"": "not a chat",
    b"[]": "not a chat",
    b'{"model": 0, "messages": 3}': "not a chat",
    b'{"model": 7, "messages": [{"role": "user", "content": "x"}]}': "not a chat",
    b'{"model": true, "messages": [{"role": "user", "content": "x"}]}': "not a chat",
    b'{"model": 0, "messages": []}': "messages: give 1 to",
    b'{"model": 0, "messages": [{"role": "critic", "content": "x"}]}': "messages: give 1 to",
    body(temperature=-1): "temperature: -1 must be at least 0",
    body(colour=1): "colour",
    body("forbidden"): "the model's context 8",
}


@pytest.mark.parametrize("content", BAD)
def test_bad_requests_get_one_line(content: bytes) -> None:
    with serving(Parrot()) as server:
        status, _, reply = ask(server, content)
        found = json.loads(reply)["error"]
        assert status == 400 and BAD[content] in found and "\n" not in found
        assert ask(server, body())[0] == 200


def test_lone_surrogates_are_replaced() -> None:
    """JSON can escape them, and no tokenizer takes them."""
    with serving(Parrot(words=1)) as server:
        status, _, content = ask(server, body("x\ud800"))
        assert status == 200 and json.loads(content.splitlines()[0])["text"] == "x\ufffd "


def test_only_its_own_page_may_ask() -> None:
    parrot = Parrot()
    with serving(parrot) as server:
        port = server.server_port
        assert ask(server, body(), Host="evil.example")[0] == 403
        assert ask(server, body(), Origin="http://evil.example")[0] == 403
        assert ask(server, body(), Origin="null")[0] == 403
        assert ask(server, body(), **{"Content-Type": "text/plain"})[0] == 403
        assert ask(server, body(), **{"Content-Type": "application/x-www-form-urlencoded"})[0] == 403
        assert ask(server, body(), path="/etc/passwd")[0] == 404 and parrot.num_started == 0
        assert ask(server, body(), Origin=f"http://127.0.0.1:{port}")[0] == 200
        assert ask(server, body(), Origin=f"http://localhost:{port}", Host=f"localhost:{port}")[0] == 200
        for method in ("OPTIONS", "PUT", "DELETE"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request(method, "/answer")
            assert connection.getresponse().status == 501
            connection.close()
        assert server.server_address[0] == "127.0.0.1"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/answer", headers={"Content-Type": "application/json", "Content-Length": "9999999"})
        assert connection.getresponse().status == 400
        connection.close()


def test_the_page_is_self_contained_and_inert() -> None:
    with serving(Parrot("</script><b>x")) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request("GET", "/")
        page = connection.getresponse().read().decode()
        connection.close()
    assert "</script><b>" not in page and "connect-src 'self'" in page and "default-src 'none'" in page
    assert "http://" not in page and "https://" not in page


def test_the_body_of_a_refused_request_is_never_read_as_the_next_one() -> None:
    """A page of another name that leads to this machine could hide a request in the body of a form."""
    parrot = Parrot()
    with serving(parrot) as server:
        content = body()
        own = f"Host: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\n"
        hidden = f"POST /answer HTTP/1.1\r\n{own}Content-Length: {len(content)}\r\n\r\n".encode() + content
        for method in ("POST", "GET"):
            head = f"{method} / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {len(hidden)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
                connection.sendall(head.encode() + hidden)
                received = b"".join(iter(lambda: connection.recv(65536), b""))
            assert received.startswith(b"HTTP/1.1 403") and received.count(b"HTTP/1.1") == 1
        assert parrot.num_started == 0


@pytest.mark.parametrize("length", ["", "-1", "1e3", "\xb2", "9" * 5000])
def test_a_length_that_is_none_gets_one_line(length: str, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(Parrot()) as server:
        status, _, reply = ask(server, b"", **{"Content-Length": length})
        assert status == 400 and "needs a length" in json.loads(reply)["error"]
    assert "Traceback" not in capfd.readouterr().err
