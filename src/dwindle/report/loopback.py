"""An HTTP server for this machine alone: the base of the live report and of the chat page.

No URL is mapped to a file: a handler knows its routes and answers everything else with 404.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

from dwindle.core.errors import UserError

HOST = "127.0.0.1"
_TEXT = "text/plain; charset=utf-8"


class LoopbackServer(ThreadingHTTPServer):
    """Answers on the loopback interface, each connection in a thread.

    Beyond ``max_connections`` the idle one that has waited longest is closed, so that clients that only connect cannot
    keep others out; a connection that is being answered (``busy``) is not.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    max_connections = 64

    def __init__(self, port: int, handler: type[LoopbackHandler]) -> None:
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        """Idle connections, the one that has waited longest first."""
        try:
            super().__init__((HOST, port), handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"--port {port}: cannot be used ({why}): choose another, or 0 for any free port") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, after closing the oldest connection if there are too many."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > self.max_connections else None
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

    @contextmanager
    def busy(self, request: Any) -> Iterator[None]:
        """Within the context the connection is not closed in favour of others."""
        self.forget(request)
        try:
            yield
        finally:
            with self._lock:
                self._open[request] = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class LoopbackHandler(BaseHTTPRequestHandler):
    """Checks the Host header and sends the headers that keep other pages out; ``get`` answers."""

    server: LoopbackServer
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

    def get(self, path: str) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        path = self.asked_path()
        if path is not None:
            self.get(path)

    do_HEAD = do_GET

    def asked_path(self) -> str | None:
        """The path of a request; None if it was answered because it is not for us."""
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body that is not read would be taken for the next request
        if not self._is_own_name():
            self.answer_text(HTTPStatus.FORBIDDEN, "use the address 127.0.0.1")
            return None
        self.server.touch(self.connection)
        try:
            return urlsplit(self.path).path
        except ValueError:
            self.answer_text(HTTPStatus.BAD_REQUEST, "not an address")
            return None

    def own_names(self) -> tuple[str, str]:
        port = self.server.server_port
        return f"{HOST}:{port}", f"localhost:{port}"

    def _is_own_name(self) -> bool:
        """Whether the Host header is ours: other names are refused, against DNS rebinding by other web pages."""
        return self.headers.get("Host") in self.own_names()

    def not_found(self) -> None:
        self.answer_text(HTTPStatus.NOT_FOUND, "not found")

    def answer_text(self, status: HTTPStatus, line: str) -> None:
        self.answer(status, f"{line}\n".encode(), _TEXT)

    def answer(self, status: HTTPStatus, body: bytes, kind: str, extra: dict[str, str] | None = None) -> None:
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
