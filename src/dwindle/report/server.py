"""``dwindle report --watch``: serves the report on the loopback interface and updates it while the run writes."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from typing import Any

from dwindle.report.loopback import LoopbackHandler, LoopbackServer
from dwindle.report.page import render_page
from dwindle.report.run import Run
from dwindle.report.summary import encode, fingerprint, summarise


class ReportServer(LoopbackServer):
    """Serves the report of one run, to this machine only."""

    def __init__(self, run: Run, port: int = 0, *, published: bool = False) -> None:
        self._run, self._published = run, published
        self._reading = threading.Lock()
        self._seen: object = None
        self._summary: dict[str, Any] = {}
        super().__init__(port, _Handler)

    def summary(self) -> dict[str, Any]:
        """The page's data, read again if the run's files changed; thread-safe."""
        with self._reading:
            if (now := self._run.directory.signature()) != self._seen:
                self._run.refresh()
                self._seen, self._summary = now, summarise(self._run, published=self._published)
            return self._summary


class _Handler(LoopbackHandler):
    server: ReportServer

    def get(self, path: str) -> None:
        if path == "/":
            page = render_page(self.server.summary(), live=True)
            self.answer(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
        elif path == "/data.json":
            self._data()
        elif path.startswith("/data/") and path.endswith(".json"):
            self._figure(path.removeprefix("/data/").removesuffix(".json"))
        else:
            self.not_found()

    def _data(self) -> None:
        body = encode(self.server.summary())
        tag = f'"{fingerprint(body)}"'
        if self.headers.get("If-None-Match") == tag:
            self.answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", {"ETag": tag})
        else:
            self.answer(HTTPStatus.OK, body, "application/json", {"ETag": tag})

    def _figure(self, name: str) -> None:
        summary = self.server.summary()
        known: dict[str, Any] = {figure["id"]: figure for figure in summary["figures"]}
        known |= {key: summary[key] for key in ("architecture", "cost") if summary[key] is not None}
        if name in known:
            self.answer(HTTPStatus.OK, json.dumps(known[name]).encode(), "application/json")
        else:
            self.not_found()
