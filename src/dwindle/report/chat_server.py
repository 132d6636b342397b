"""``dwindle chat --page``: one page on the loopback interface where models answer the same prompt side by side.

An answer is streamed as JSON lines. Each model answers one request at a time; a bounded number waits, further ones are
asked to retry (503). A client that goes away stops its answer.
"""

from __future__ import annotations

import json
import re
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.core.names import short_names
from dwindle.core.reading import parse_json
from dwindle.data.readers import without_lone_surrogates
from dwindle.evaluation.config import LONG_ANSWER, SamplingConfig
from dwindle.report.loopback import LoopbackHandler, LoopbackServer
from dwindle.report.page import self_contained

if TYPE_CHECKING:
    from dwindle.run.chat import ChatModel, Piece

MAX_WAITING = 16
"""Requests that wait for a model; later ones get 503."""
MAX_BODY_BYTES = 1 << 20
MAX_MESSAGES = 400
RETRY_AFTER_S = 5
_ROLES = ("system", "user", "assistant")
_POLL_S = 0.1
_JSON = "application/json"


class Busy(Exception):
    """Too many requests wait."""


class Gone(Exception):
    """The client closed its connection."""


class Desk:
    """One model: a request is answered at a time, a few wait."""

    def __init__(self, model: ChatModel) -> None:
        self.model = model
        self.num_waiting = 0
        self._turn = threading.Lock()
        self._count = threading.Lock()

    @contextmanager
    def turn(self, is_gone: Any) -> Iterator[None]:
        """Wait for the model; ``Busy`` if too many do already, ``Gone`` if the client leaves meanwhile."""
        with self._count:
            if self.num_waiting >= MAX_WAITING:
                raise Busy
            self.num_waiting += 1
        try:
            while not self._turn.acquire(timeout=_POLL_S):
                if is_gone():
                    raise Gone
        finally:
            with self._count:
                self.num_waiting -= 1
        try:
            yield
        finally:
            self._turn.release()


class ChatServer(LoopbackServer):
    """The chat page of some models, to this machine only."""

    max_connections = 512

    def __init__(
        self, models: Sequence[ChatModel], port: int = 0, *, config: SamplingConfig | None = None, system: str = ""
    ) -> None:
        self.desks = [Desk(model) for model in models]
        self.num_stopped = 0
        """Answers that ended because their client went away."""
        self.page = render_chat(models, config or SamplingConfig(), system).encode()
        super().__init__(port, _Handler)


def _headings(names: Sequence[str]) -> list[str]:
    """What distinguishes the models: the ends of their paths, and of a run's model the run."""
    if not all(re.fullmatch(r"[\w .~/-]+", name) for name in names):
        return [*names]
    return short_names([Path(re.sub(r"/(model/?)?$", "", name) or name) for name in names])


def render_chat(models: Sequence[ChatModel], config: SamplingConfig, system: str = "") -> str:
    """The page; text of models and users only ever becomes text nodes."""
    settings = config.model_dump(include=set(SamplingConfig.model_fields))
    settings["tokens"] = settings["tokens"] or LONG_ANSWER
    facts = [asdict(model.facts) for model in models]
    for fact, name in zip(facts, _headings([fact["name"] for fact in facts]), strict=True):
        fact["shown"] = name
    data = {"models": facts, "settings": settings, "system": system}
    return self_contained(
        "chat",
        json.dumps(data).encode(),
        styles=("colours.css", "chat.css"),
        scripts=("chat.js",),
        asks=True,
        noscript="The conversation needs the script inside this page: enable JavaScript.",
    )


class _Handler(LoopbackHandler):
    server: ChatServer

    def get(self, path: str) -> None:
        if path == "/":
            self.answer(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        else:
            self.not_found()

    def do_POST(self) -> None:
        path = self.asked_path()
        if path is None:
            return
        if not self._is_own_page():
            self.answer_text(HTTPStatus.FORBIDDEN, "only this server's own page may ask")
        elif path != "/answer":
            self.not_found()
        else:
            self._respond()

    def _is_own_page(self) -> bool:
        """Not a form or script of another site: these cannot send JSON without asking first, and name their origin."""
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{name}" for name in self.own_names()}:
            return False
        return self.headers.get("Content-Type", "").partition(";")[0].strip() == _JSON

    def _respond(self) -> None:
        try:
            desk, messages, config = self._request()  # a body that never comes may be closed in favour of others
            with (
                self.server.busy(self.connection),
                desk.turn(self._is_gone),
                closing(desk.model.stream(messages, config)) as pieces,
            ):
                self._stream(pieces)
        except UserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Busy:
            retry = {"Retry-After": str(RETRY_AFTER_S)}
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests wait for this model", retry)
        except (Gone, ConnectionError, TimeoutError):
            self.server.num_stopped += 1

    def _refuse(self, status: HTTPStatus, why: str, extra: dict[str, str] | None = None) -> None:
        self.answer(status, json.dumps({"error": why}).encode(), _JSON, extra)

    def _request(self) -> tuple[Desk, list[dict[str, str]], SamplingConfig]:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY_BYTES:
            raise UserError(f"the request needs a length of at most {MAX_BODY_BYTES:,} bytes: start a new chat")
        try:
            body = parse_json(self.rfile.read(int(length)))
            desk = self.server.desks[_index(body["model"], len(self.server.desks))]
            messages = [
                {"role": str(one["role"]), "content": without_lone_surrogates(str(one["content"]))}
                for one in body["messages"]
            ]
            settings = dict(body.get("settings") or {})
        except (ValueError, LookupError, TypeError) as error:
            raise UserError("the request is not a chat: send model, messages and settings") from error
        if not 0 < len(messages) <= MAX_MESSAGES or any(one["role"] not in _ROLES for one in messages):
            raise UserError(f"messages: give 1 to {MAX_MESSAGES} of the roles {', '.join(_ROLES)}: start a new chat")
        return desk, messages, from_dict(SamplingConfig, settings)

    def _stream(self, pieces: Iterator[Piece]) -> None:
        """The headers follow the first piece: what is refused before it has a status of its own."""
        first = next(pieces)
        self.send_response(HTTPStatus.OK)
        for name, value in self.HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/x-ndjson; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._send(first)
            for piece in pieces:
                self._send(piece)
        except UserError as error:
            self._chunk({"error": str(error)})
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, piece: Piece) -> None:
        if self._is_gone():
            raise Gone
        self._chunk(
            {
                "text": piece.text,
                "tokens": piece.tokens,
                "seconds": round(piece.seconds, 4),
                "memory": piece.memory_bytes,
                "last": piece.is_last,
                "finished": piece.is_finished,
            }
        )

    def _chunk(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _is_gone(self) -> bool:
        """Whether the client has closed its side: then reading would return nothing at once."""
        try:
            watched = select.poll()  # select() takes no descriptor above 1023
            watched.register(self.connection, select.POLLIN)
            return bool(watched.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True


def _index(value: Any, count: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise LookupError(value)
    return value
