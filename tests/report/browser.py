"""A real browser over the WebDriver protocol, with the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1280,900",
)


def installed() -> tuple[str, str] | None:
    """Paths of chromium and its driver, if both are there."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """``with Browser(tmp_path) as browser: browser.open(url)``; skips the test where there is none."""

    def __init__(self, folder: Path) -> None:
        found = installed()
        if found is None:
            pytest.skip(
                "chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"
            )
        self.binary, driver = found
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._root = f"http://127.0.0.1:{port}"
        self._profile = folder / "profile"
        self._log = (folder / "chromedriver.log").open("wb")
        self._process = subprocess.Popen([driver, f"--port={port}"], stdout=self._log, stderr=self._log)

    def __enter__(self) -> Browser:
        self._wait_for_driver()
        options = {"binary": self.binary, "args": [*FLAGS, f"--user-data-dir={self._profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if hasattr(self, "_session"):
                self._ask("DELETE", self._session)
        finally:
            self._process.terminate()
            self._process.wait(timeout=120)
            self._log.close()

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script body returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, seconds: float = 120) -> Any:
        """The first true value of a script body."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.1)
        return value

    def devtools(self, command: str, **parameters: Any) -> Any:
        body = {"cmd": command, "params": parameters}
        return self._ask("POST", f"{self._session}/goog/cdp/execute", body)

    def look_like(self, *, width: int, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> Path:
        """The whole page, not only what is in view."""
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def console(self) -> list[str]:
        """Warnings and errors since the last call; also those of the security policy."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def tap(self, x: float, y: float) -> None:
        """One finger, down and up."""
        down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        finger = {
            "type": "pointer",
            "id": "finger",
            "parameters": {"pointerType": "touch"},
            "actions": [move, down, up],
        }
        self._ask("POST", f"{self._session}/actions", {"actions": [finger]})

    def move_to(self, x: float, y: float) -> None:
        """The pointer, in pixels of the window."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._ask("POST", f"{self._session}/actions", {"actions": [pointer]})

    def _wait_for_driver(self) -> None:
        end = time.monotonic() + 120
        while True:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except (urllib.error.URLError, ConnectionError):
                pass
            assert time.monotonic() < end and self._process.poll() is None, "chromedriver does not start"
            time.sleep(0.1)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode(errors='replace')[:2000]}") from error
