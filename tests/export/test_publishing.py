"""``dwindle push`` against a Hub on loopback: what is sent, in one commit, what never is, and what a failure leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

import dwindle
from dwindle.commands import main as cli
from dwindle.core.errors import UserError
from dwindle.export.publishing import collect, push
from tiny import tiny_directory

TOKEN = "hf_" + "NeverWrittenAnywhere1234567890"


class Hub:
    """The few requests of an upload: repositories, uploaded objects, commits."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.seen: list[str] = []
        self.fail_uploads_after: int | None = None
        self.fail_commit = False
        self.status = 200

    def answer(self, method: str, path: str, body: bytes, host: str) -> tuple[int, Any]:
        self.seen.append(f"{method} {path}")
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if self.status != 200:
                return self.status, {"error": "no"}
            if name in self.repos:
                return 409, {"error": "exists", "url": f"http://{host}/{name}"}
            self.repos[name], self.private[name] = {}, asked.get("private", asked.get("visibility") == "private")
            return 200, {"url": f"http://{host}/{name}"}
        repo = next((name for name in self.repos if f"/{name}" in path), "")
        if not repo:
            return 404, {"error": "not found"}
        if "/tree/" in path:
            return 200, [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in self.repos[repo].items()]
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            big = (".safetensors", ".gguf", ".onnx")
            return 200, {
                "files": [
                    {
                        "path": f["path"],
                        "uploadMode": "lfs" if f["path"].endswith(big) else "regular",
                        "shouldIgnore": False,
                    }
                    for f in files
                ]
            }
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = {
                o["oid"]: {"upload": {"href": f"http://{host}/put/{repo}/{o['oid']}?signature=secret"}} for o in objects
            }
            return 200, {
                "transfer": "basic",
                "objects": [o | ({} if o["oid"] in self.objects else {"actions": upload[o["oid"]]}) for o in objects],
            }
        if method == "PUT":
            if self.fail_uploads_after is not None and len(self.objects) >= self.fail_uploads_after:
                return 400, {"error": "the line broke"}
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            return 200, {}
        assert "/commit/" in path
        if self.fail_commit:
            return 400, {"error": "the line broke"}
        return 200, self.commit(repo, [json.loads(line) for line in body.splitlines()], host)

    def commit(self, repo: str, lines: list[Any], host: str) -> Any:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repos[repo][value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.repos[repo][value["path"]]
        self.commits.append(sorted(self.repos[repo]))
        return {"commitUrl": f"http://{host}/{repo}/commit/1", "commitOid": "1", "success": True}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, str]]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else b"".join(self._chunks())
            host = f"127.0.0.1:{server.server_port}"
            code, found = state.answer(self.command, urlsplit(self.path).path, body, host)
            data = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _chunks(self) -> Iterator[bytes]:
            while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
                yield self.rfile.read(size)
                self.rfile.readline()

        do_PUT = do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield state, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned model with things beside it that are nobody's business."""
    place = tmp_path_factory.mktemp("push")
    source = tiny_directory(place / "model")
    out = place / "smaller"
    dwindle.prune(str(source), to="80%", sequences=4, seq_len=24, out=out)
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "model.safetensors").write_bytes(b"weights of another step")
    for name in ("optimizer.safetensors", "train.jsonl", "tokens.bin", ".env", "notes.txt", "metrics.jsonl"):
        (out / name).write_text("private")
    (place / "smaller-q8_0.gguf").write_bytes(b"GGUF file")
    return out


def test_everything_in_one_commit(model: Path, hub: tuple[Hub, str]) -> None:
    state, endpoint = hub
    gguf = model.parent / "smaller-q8_0.gguf"
    found = push(model, "me/smaller", gguf=[gguf], private=True, endpoint=endpoint)
    assert found.url == f"{endpoint}/me/smaller" and state.private == {"me/smaller": True}
    files = state.repos["me/smaller"]
    assert len(state.commits) == 1 and set(files) == set(found.files)
    expected = {"config.json", "model.safetensors", "README.md", "ledger.jsonl", "structure.json", "architecture.svg"}
    assert expected | {"tokenizer.json", "quality.json", gguf.name} <= set(files)
    private = {"optimizer.safetensors", "train.jsonl", "tokens.bin", ".env", "notes.txt", "metrics.jsonl"}
    assert not private & set(files) and not any("checkpoint" in name for name in files)
    assert private <= set(found.left_out)
    for name, content in files.items():
        assert name == "README.md" or content == (gguf if name == gguf.name else model / name).read_bytes()
        assert TOKEN.encode() not in content
    card = files["README.md"].decode()
    assert 'folder = "me/smaller"' in card and "path/to/this/directory" not in card
    assert f"--hf-repo me/smaller --hf-file {gguf.name}" in card and f"ollama run hf.co/me/smaller:{gguf.name}" in card
    assert "path/to/this/directory" in (model / "README.md").read_text(), "the card on disk stays as it is"
    for part in ("## Results", "## Run it", "## Limits", "| source | this model |", "architecture.svg", "llama-cli"):
        assert part in card, part


@pytest.mark.parametrize("where", ["upload", "commit"])
def test_a_failure_leaves_nothing_and_a_retry_finishes(model: Path, hub: tuple[Hub, str], where: str) -> None:
    state, endpoint = hub
    gguf = [model.parent / "smaller-q8_0.gguf"]
    state.fail_uploads_after, state.fail_commit = (1 if where == "upload" else None), where == "commit"
    with pytest.raises(
        UserError, match=r"push me/x: the upload failed .*: no file of it is visible; run the same"
    ) as e:
        push(model, "me/x", gguf=gguf, endpoint=endpoint)
    assert "\n" not in str(e.value) and "signature" not in str(e.value) and TOKEN not in str(e.value)
    assert state.repos == {"me/x": {}} and not state.commits
    sent = len(state.objects)
    state.fail_uploads_after, state.fail_commit = None, False
    state.seen.clear()
    push(model, "me/x", gguf=gguf, endpoint=endpoint)
    assert len(state.commits) == 1 and "model.safetensors" in state.repos["me/x"]
    assert sum(line.startswith("PUT") for line in state.seen) == 2 - sent, "what has arrived is not sent again"


def test_old_weights_do_not_stay_beside_new_ones(model: Path, hub: tuple[Hub, str]) -> None:
    state, endpoint = hub
    state.repos["me/y"] = {"model-00001-of-00002.safetensors": b"old", "mine.txt": b"kept"}
    push(model, "me/y", endpoint=endpoint)
    assert {"model.safetensors", "mine.txt"} <= set(state.repos["me/y"])
    assert "model-00001-of-00002.safetensors" not in state.repos["me/y"]


def test_the_command(
    model: Path, hub: tuple[Hub, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, endpoint = hub

    def dwindle_push(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dwindle", "push", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        return code, *capsys.readouterr()

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    code, out, err = dwindle_push(str(model), "me/z", "--dry-run")
    assert code == 0 and "model.safetensors" in out and " kB" in out and "nothing was sent" in err
    assert "stays here: notes.txt" in err and not state.seen
    code, out, err = dwindle_push(str(model), "me/z", "--json")
    assert code == 0 and json.loads(out)["url"].endswith("/me/z") and state.commits and TOKEN not in out + err
    state.status = 401
    code, _, err = dwindle_push(str(model), "me/other")
    assert code == 2 and "refused the access token (401)" in err and TOKEN not in err and len(err.splitlines()) == 1
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "log in with `hf auth login`" in dwindle_push(str(model), "me/other")[2]
    code, _, err = dwindle_push(str(model), "smaller")
    assert code == 2 and "give user/name" in err


def test_refused_before_anything_is_sent(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a model that dwindle wrote nor a run"):
        collect(tmp_path)
    with pytest.raises(UserError, match=r"is not a \.gguf file"):
        collect(model, [tmp_path / "x.gguf"])
    generation = model / "generation_config.json"
    before = generation.read_bytes()
    generation.write_text(json.dumps({"token": TOKEN}))
    with pytest.raises(UserError, match="looks like an access token") as refused:
        collect(model)
    generation.write_bytes(before)
    assert TOKEN not in str(refused.value)
