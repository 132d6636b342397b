"""``dwindle push`` against a Hub on loopback: what is sent, in one commit, what never is, and what a failure leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

import dwindle
from dwindle.core.errors import UserError
from dwindle.export.card_running import as_published, how_to_run
from dwindle.export.publishing import collect, push
from hostile import shell
from tiny import tiny_directory

TOKEN = "hf_" + "NeverWrittenAnywhere1234567890"
SECRET_TEXT = "quince"
"""Of the user's own data."""


class Hub:
    """The few requests of an upload: repositories, uploaded objects, commits."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.seen: list[str] = []
        self.fail_uploads_after: int | None = None
        self.fail_commit: str | None = None
        self.status = 200
        self.heads: dict[str, str] = {}
        """The last commit of each repository."""

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
        head = self.heads.get(repo, f"{1:040x}")
        if path == f"/api/models/{repo}":
            siblings = [{"rfilename": name} for name in self.repos[repo]]
            return 200, {"id": repo, "sha": head, "private": self.private.get(repo, False), "siblings": siblings}
        if "/resolve/" in path:
            assert f"/{repo}/resolve/{head}/" in path, "another commit than the one that was read"
            return 200, self.repos[repo][path.partition(f"/resolve/{head}/")[2]]
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
            begun = sum(line.startswith("PUT") for line in self.seen)  # several may be under way
            if self.fail_uploads_after is not None and begun > self.fail_uploads_after:
                return 400, {"error": "the line broke"}
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            return 200, {}
        assert "/commit/" in path
        if self.fail_commit == "before":
            return 400, {"error": "the line broke"}
        if self.fail_commit == "after":
            self.commit(repo, [json.loads(line) for line in body.splitlines()], host)
            return 400, {"error": "the answer was lost"}
        return 200, self.commit(repo, [json.loads(line) for line in body.splitlines()], host)

    def commit(self, repo: str, lines: list[Any], host: str) -> Any:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                assert value["parentCommit"] == self.heads.get(repo, f"{1:040x}")
            elif line["key"] == "file":
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repos[repo][value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.repos[repo][value["path"]]
        self.commits.append(sorted(self.repos[repo]))
        self.heads[repo] = f"{len(self.commits) + 1:040x}"
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
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", f"{1:040x}")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _chunks(self) -> Iterator[bytes]:
            while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
                yield self.rfile.read(size)
                self.rfile.readline()

        do_PUT = do_GET = do_HEAD = do_POST

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
    text = place / "text.txt"
    text.write_text(f"{SECRET_TEXT} " * 2000)
    dwindle.prune(str(source), to="80%", sequences=4, seq_len=24, data=[str(text)], out=out)
    assert SECRET_TEXT in (out / "README.md").read_text() and SECRET_TEXT in (out / "quality.json").read_text()
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "model.safetensors").write_bytes(b"weights of another step")
    for name in ("optimizer.safetensors", "train.jsonl", "tokens.bin", ".env", "notes.txt", "metrics.jsonl"):
        (out / name).write_text("private")
    (out / "smaller.unverified.gguf").write_bytes(b"GGUF of doubt")
    (place / "smaller-q8_0.gguf").write_bytes(b"GGUF file")
    (place / "smaller-q8_0.Modelfile").write_text("FROM ./smaller-q8_0.gguf\n")
    return out


def test_everything_in_one_commit(model: Path, hub: tuple[Hub, str]) -> None:
    state, endpoint = hub
    gguf = model.parent / "smaller-q8_0.gguf"
    found = push(model, "me/smaller", gguf=[gguf], private=True, endpoint=endpoint)
    assert found.url == f"{endpoint}/me/smaller" and state.private == {"me/smaller": True}
    files = state.repos["me/smaller"]
    assert len(state.commits) == 1 and set(files) == set(found.files)
    expected = {"config.json", "model.safetensors", "README.md", "ledger.jsonl", "structure.json", "architecture.svg"}
    assert expected | {"tokenizer.json", "quality.json", gguf.name, "smaller-q8_0.Modelfile"} <= set(files)
    private = {
        "smaller.unverified.gguf",
        "optimizer.safetensors",
        "train.jsonl",
        "tokens.bin",
        ".env",
        "notes.txt",
        "metrics.jsonl",
    }
    assert not private & set(files) and not any("checkpoint" in name for name in files)
    assert private <= set(found.left_out)
    for name, content in files.items():
        place = model.parent if name.startswith("smaller-q8_0.") else model
        made_here = name in ("README.md", "quality.json", "dwindle-files.json")
        assert made_here or content == (place / name).read_bytes()
        assert TOKEN.encode() not in content and SECRET_TEXT.encode() not in content
    assert json.loads(files["dwindle-files.json"])["files"] == sorted(files)
    quality = json.loads((model / "quality.json").read_text())
    assert quality["samples"] and json.loads(files["quality.json"]) == quality | {"samples": []}
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
    state.fail_uploads_after = 1 if where == "upload" else None
    state.fail_commit = "before" if where == "commit" else None
    with pytest.raises(
        UserError, match=r"push me/x: the upload failed .*: the commit was not confirmed; run the same"
    ) as e:
        push(model, "me/x", gguf=gguf, endpoint=endpoint)
    assert "\n" not in str(e.value) and "signature" not in str(e.value) and TOKEN not in str(e.value)
    assert state.repos == {"me/x": {}} and not state.commits
    sent = len(state.objects)
    state.fail_uploads_after = state.fail_commit = None
    state.seen.clear()
    push(model, "me/x", gguf=gguf, endpoint=endpoint)
    assert len(state.commits) == 1 and "model.safetensors" in state.repos["me/x"]
    assert sum(line.startswith("PUT") for line in state.seen) == 2 - sent, "what has arrived is not sent again"


def test_an_answer_that_is_lost(model: Path, hub: tuple[Hub, str]) -> None:
    """The commit was made: everything is there, and the same command does not harm."""
    state, endpoint = hub
    state.fail_commit = "after"
    with pytest.raises(UserError, match="the commit was not confirmed; run the same command again"):
        push(model, "me/x", endpoint=endpoint)
    there = dict(state.repos["me/x"])
    state.fail_commit = None
    assert set(push(model, "me/x", endpoint=endpoint).files) == set(there) and state.repos["me/x"] == there


def test_only_files_of_an_earlier_push_are_deleted(model: Path, hub: tuple[Hub, str]) -> None:
    state, endpoint = hub
    shard = "model-00001-of-00002.safetensors"
    state.repos["me/y"] = {shard: b"of someone", "mine.txt": b"kept", ".gitattributes": b""}
    for dry_run in (True, False):
        with pytest.raises(UserError, match=f"{shard} is there, which no push of dwindle wrote"):
            push(model, "me/y", dry_run=dry_run, endpoint=endpoint)
    assert not state.commits and not state.objects
    listed = json.dumps({"format": 1, "files": [shard, "old.gguf", ".gitattributes", "gone.gguf"]})
    state.repos["me/y"] |= {"dwindle-files.json": listed.encode(), "old.gguf": b"old"}
    found = push(model, "me/y", dry_run=True, endpoint=endpoint)
    assert found.deleted == [shard, "old.gguf"] and not state.commits and not state.objects
    assert push(model, "me/y", endpoint=endpoint).deleted == found.deleted
    assert set(state.repos["me/y"]) == {*found.files, "mine.txt", ".gitattributes"}
    assert push(model, "me/y", gguf=[model.parent / "smaller-q8_0.gguf"], endpoint=endpoint).deleted == []
    assert push(model, "me/y", endpoint=endpoint).deleted == ["smaller-q8_0.Modelfile", "smaller-q8_0.gguf"]


def test_private_is_never_public(model: Path, hub: tuple[Hub, str]) -> None:
    state, endpoint = hub
    state.repos["me/open"], state.private["me/open"] = {}, False
    for dry_run in (True, False):
        with pytest.raises(UserError, match="--private: me/open exists and everyone can read it"):
            push(model, "me/open", private=True, dry_run=dry_run, endpoint=endpoint)
    assert not state.objects and not state.commits and not state.repos["me/open"]
    state.repos["me/closed"], state.private["me/closed"] = {}, True
    assert push(model, "me/closed", endpoint=endpoint).private, "as it is there"


def test_samples_are_sent_when_asked_for(model: Path, hub: tuple[Hub, str]) -> None:
    state, endpoint = hub
    push(model, "me/x", with_samples=True, gguf=[model / "smaller.unverified.gguf"], endpoint=endpoint)
    files = state.repos["me/x"]
    assert files["quality.json"] == (model / "quality.json").read_bytes()
    assert SECRET_TEXT in files["README.md"].decode() and "smaller.unverified.gguf" in files


def test_a_quantised_directory(model: Path, tmp_path: Path, hub: tuple[Hub, str]) -> None:
    state, endpoint = hub
    dwindle.quantize(model, scheme="w8", sequences=4, seq_len=24, out=tmp_path / "w8")
    push(tmp_path / "w8", "me/w8", endpoint=endpoint)
    files = state.repos["me/w8"]
    assert {"quantization.json", "model.safetensors", "config.json"} <= set(files)
    assert b"vllm serve me/w8" in files["README.md"] and b"path/to/this" not in files["README.md"]
    assert json.loads(files["quantization.json"])["source"] == "smaller", "no path of this machine"


@pytest.mark.parametrize("layout", [None, "deci"])
def test_code_that_the_configuration_names_is_sent(tmp_path: Path, layout: str | None) -> None:
    source, out = tiny_directory(tmp_path / "model"), tmp_path / "out"
    dwindle.prune(str(source), to="80%", selection="global", sequences=4, seq_len=24, measure=False, out=tmp_path / "p")
    dwindle.export_model(tmp_path / "p", "hf", out, layout=layout)
    auto_map = json.loads((out / "config.json").read_text())["auto_map"]
    named = {f"{value.partition('.')[0]}.py" for value in auto_map.values()}
    assert named and named <= set(collect(out)[0])
    (out / named.pop()).unlink()
    with pytest.raises(UserError, match=r"\.py: is missing, and config\.json names it"):
        collect(out)


def test_half_a_model_is_refused(model: Path, tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(model, folder)
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        return folder

    with pytest.raises(UserError, match=r"00002-of-00002\.safetensors: is missing, and model\.safetensors\.index"):
        collect(copied("missing"))
    linked = copied("linked")
    (linked / "model-00002-of-00002.safetensors").symlink_to(linked / "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match=r"00002\.safetensors: is a link"):
        collect(linked)
    alone = copied("alone")
    (alone / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"index\.json: is missing, and model-00001-of-00002\.safetensors names it"):
        collect(alone)
    (tmp_path / "smaller-q8_0.gguf").write_bytes(b"another")
    with pytest.raises(UserError, match="has the same name: rename one"):
        collect(model, [model.parent / "smaller-q8_0.gguf", tmp_path / "smaller-q8_0.gguf"])


def test_the_command(model: Path, hub: tuple[Hub, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (state, endpoint), dwindle_push = hub, partial(shell, "push")
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    code, out, err = dwindle_push(str(model), "me/z", "--dry-run")
    assert code == 0 and "model.safetensors" in out and " kB" in out and "nothing was sent" in err
    assert "new or cannot be read" in err
    assert "stays here: notes.txt" in err and not state.repos and {line[:4] for line in state.seen} == {"GET "}
    code, out, err = dwindle_push(str(model), "me/z", "--json")
    assert code == 0 and json.loads(out)["url"].endswith("/me/z") and state.commits and TOKEN not in out + err
    said = {401: "refused the access token", 404: "has no such repository", 412: "was changed meanwhile"}
    for state.status, why in said.items():
        code, _, err = dwindle_push(str(model), "me/other")
        assert code == 2 and f"{why}" in err and f"({state.status})" in err
        assert TOKEN not in err and len(err.splitlines()) == 1
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
    key = "0123456789abcdefABCDEF"
    for secret in (TOKEN, f"sk-proj-{key}", f"ghp_{key}", "AKIA" + "A1B2" * 4, "https://me:pass1@files.example/x"):
        generation.write_text(json.dumps({"token": secret}))
        with pytest.raises(UserError, match="looks like an access token or password") as refused:
            collect(model)
        assert secret not in str(refused.value)
    for harmless in ("risk-assessment-and-management-2024", "https://files.example:80/@x", "mailto:a@b"):
        generation.write_text(json.dumps({"text": harmless}))
        collect(model)
    generation.write_bytes(before)


def test_the_code_for_onnxruntime_loads_from_the_hub() -> None:
    code = as_published(how_to_run("onnxruntime"), "me/x").removeprefix("```python\n").removesuffix("\n```")
    compile(code, "card", "exec")
    lines = code.splitlines()
    assert "from huggingface_hub import snapshot_download" in lines and 'folder = snapshot_download("me/x")' in lines
    assert 'folder = "me/x"' in as_published(how_to_run("transformers"), "me/x").splitlines()
