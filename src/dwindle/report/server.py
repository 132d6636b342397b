"""``dwindle report --watch``: serves the report on the loopback interface and updates it while the run writes.

No URL is mapped to a file: the server knows three routes and answers everything else with 404.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

from dwindle.core.errors import UserError
from dwindle.report.page import render_page
from dwindle.report.run import Run
from dwindle.report.summary import encode, fingerprint, summarise

HOST = "127.0.0.1"
MAX_CONNECTIONS = 64


class LiveReport:
    """The summary of a run, refreshed on request if its files changed; thread-safe."""

    def __init__(self, run: Run, *, published: bool = False) -> None:
        self._run, self._published = run, published
        self._lock = threading.Lock()
        self._seen: object = None
        self._summary: dict[str, Any] = {}

    def summary(self) -> dict[str, Any]:
        with self._lock:
            if (now := self._run.signature()) != self._seen:
                self._run.refresh()
                self._seen, self._summary = now, summarise(self._run, published=self._published)
            return self._summary


class ReportServer(ThreadingHTTPServer):
    """Serves the report of one run, to this machine only.

    A connection that is kept open holds a thread. Beyond ``MAX_CONNECTIONS`` the one that has waited longest is closed,
    so that clients that only connect cannot keep others out.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, run: Run, port: int = 0, *, published: bool = False) -> None:
        self.report = LiveReport(run, published=published)
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        """Connections, the one that has waited longest first."""
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"--port {port}: cannot be used ({why}): choose another, or 0 for any free port") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, after closing the oldest connection if there are too many."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
        if oldest is not None:
            self.forget(oldest)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread then ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.forget(request)
        super().shutdown_request(request)

    def touch(self, request: Any) -> None:
        """A request arrived on this connection: it has not been waiting."""
        with self._lock:
            if request in self._open:
                del self._open[request]
                self._open[request] = None

    def forget(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "dwindle"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 10
    """Seconds for the next request, or for the rest of one."""

    HEADERS: ClassVar[dict[str, str]] = {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }

    def do_GET(self) -> None:
        if not self._is_own_name():
            self._answer(HTTPStatus.FORBIDDEN, b"use the address 127.0.0.1\n", "text/plain; charset=utf-8")
            return
        self.server.touch(self.connection)
        try:
            path = urlsplit(self.path).path
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, b"not an address\n", "text/plain; charset=utf-8")
            return
        if path == "/":
            page = render_page(self.server.report.summary(), live=True)
            self._answer(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
        elif path == "/data.json":
            self._data()
        elif path.startswith("/data/") and path.endswith(".json"):
            self._figure(path.removeprefix("/data/").removesuffix(".json"))
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain; charset=utf-8")

    do_HEAD = do_GET

    def _data(self) -> None:
        body = encode(self.server.report.summary())
        tag = f'"{fingerprint(body)}"'
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", {"ETag": tag})
        else:
            self._answer(HTTPStatus.OK, body, "application/json", {"ETag": tag})

    def _figure(self, name: str) -> None:
        summary = self.server.report.summary()
        known: dict[str, Any] = {figure["id"]: figure for figure in summary["figures"]}
        known |= {key: summary[key] for key in ("architecture", "cost") if summary[key] is not None}
        if name in known:
            self._answer(HTTPStatus.OK, json.dumps(known[name]).encode(), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain; charset=utf-8")

    def _is_own_name(self) -> bool:
        """Whether the Host header is ours: other names are refused, against DNS rebinding by other web pages."""
        port = self.server.server_port
        return self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**self.HEADERS, **(extra or {})}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No access log: the terminal may show the run."""
