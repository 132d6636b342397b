"""``--watch``: loopback only, that run only, no path tricks."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import make_run

from dwindle.core.errors import UserError
from dwindle.report.run import Run
from dwindle.report.server import ReportServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    (tmp_path / "secret.txt").write_text("secret")
    with ReportServer(Run(make_run(tmp_path / "run", finished=False))) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    reply = connection.getresponse()
    found = reply.status, dict(reply.getheaders()), reply.read()
    connection.close()
    return found


def test_page_and_data(server: ReportServer) -> None:
    status, headers, body = ask(server, "/")
    assert status == 200 and b'data-live="/data.json"' in body and headers["X-Content-Type-Options"] == "nosniff"
    status, headers, body = ask(server, "/data.json")
    assert status == 200 and json.loads(body)["name"] == "run"
    assert ask(server, "/data.json", If_None_Match=headers["ETag"])[0] == 304
    status, _, body = ask(server, "/data/loss.json")
    assert status == 200 and json.loads(body)["id"] == "loss"
    status, headers, body = ask(server, "/", method="HEAD")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 1000


def test_new_events_appear_and_change_the_tag(server: ReportServer, tmp_path: Path) -> None:
    _, headers, body = ask(server, "/data.json")
    assert " in 40 prune events" in json.loads(body)["removed"]
    with (tmp_path / "run" / "ledger.jsonl").open("a") as file:
        event = {"event": "prune", "step": 201, "tokens": 999_999, "type": "stem", "indices": [[31]], "parameters": 5}
        file.write(json.dumps(event) + "\n")
    status, after, body = ask(server, "/data.json", If_None_Match=headers["ETag"])
    assert status == 200 and after["ETag"] != headers["ETag"]
    assert " in 41 prune events" in json.loads(body)["removed"] and json.loads(body)["tiles"][2]["value"] == "5"


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "//secret.txt",
        "/run/recipe.toml",
        "/recipe.toml",
        "/ledger.jsonl",
        "/data/../../secret.txt.json",
        "/data/..%2f..%2fetc%2fpasswd.json",
        "/data//etc/passwd.json",
        "/data/.json",
        "/data/nothing.json",
        "/static/page.js",
        "/etc/passwd",
        "/.",
        "/index.html",
        "/%00",
    ],
)
def test_nothing_else_is_served(server: ReportServer, path: str) -> None:
    status, _, body = ask(server, path)
    assert (status, body) == (404, b"not found\n")


def test_other_methods_and_names_are_refused(server: ReportServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method=method)[0] == 501
    assert ask(server, "/data.json", Host="evil.example")[0] == 403
    assert ask(server, "/data.json", Host=f"evil.example:{server.server_port}")[0] == 403
    assert ask(server, "/data.json", Host=f"localhost:{server.server_port}")[0] == 200


def test_only_loopback_answers(server: ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with socket.socket() as probe:
        probe.connect_ex(("192.0.2.1", 9))  # no packet is sent by this: it only chooses the outgoing address
        address = probe.getsockname()[0]
    if not address.startswith(("127.", "0.")):
        with pytest.raises(OSError, match=""):
            socket.create_connection((address, server.server_port), timeout=2)


def test_a_taken_port_is_a_clear_error(server: ReportServer, tmp_path: Path) -> None:
    for port in (server.server_port, 99_999):
        with pytest.raises(UserError, match=f"--port {port}: cannot be used"):
            ReportServer(Run(tmp_path / "run"), port)


def test_idle_clients_do_not_keep_others_out(server: ReportServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.server_port), timeout=60) for _ in range(200)]
    busy = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    for _ in range(3):
        busy.request("GET", "/data.json")
        reply = busy.getresponse()
        assert reply.status == 200 and reply.read()
        assert ask(server, "/")[0] == 200
    assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) <= server.max_connections + 20
    for connection in (busy, *idle):
        connection.close()


@pytest.mark.parametrize("address", ["http://[::1/", "//[", "/" + "a" * 70_000, "\x00"])
def test_odd_addresses_are_answered(server: ReportServer, address: str) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        host = f"Host: 127.0.0.1:{server.server_port}\r\nConnection: close\r\n"
        connection.sendall(f"GET {address} HTTP/1.1\r\n{host}\r\n".encode())
        assert connection.recv(100).split(b" ")[1] in (b"400", b"404", b"414")
