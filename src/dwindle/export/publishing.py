"""``push``: one commit on the Hugging Face Hub with a model, its card, ledger, structure, figures and GGUF files.

Only files that are known by name are sent. The token is huggingface_hub's own business: it is read by that library
alone, and never written or printed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import Any

from rich.table import Table

from dwindle.core.errors import UserError, first_line
from dwindle.core.notebook import Shown
from dwindle.core.run_directory import LEDGER, QUALITY, STRUCTURE
from dwindle.core.sizes import format_bytes
from dwindle.export import card_figure
from dwindle.export.card_running import as_published
from dwindle.sources.loading import model_of_run

CARD = "README.md"
WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "model.onnx",
    "model.onnx.data",
)
ALLOWED = (
    *WEIGHTS,
    *(CARD, LEDGER, STRUCTURE, QUALITY, card_figure.NAME, "LICENSE*", "NOTICE*"),
    *("config.json", "generation_config.json", "modeling_dwindle.py", "family.toml", "family.json", "recipe.yaml"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "Modelfile", "*.gguf"),
    *("onnx/*.onnx", "onnx/*.onnx_data"),
)
"""What may be published; anything else in the directory stays: data, checkpoints, caches, logs, optimizer state."""

_SECRET = re.compile(rb"hf_[A-Za-z0-9]{20,}")
_MAX_TEXT_BYTES = 32 * 2**20
_BINARY = (".safetensors", ".gguf", ".onnx", ".onnx_data", ".model")


@dataclass(slots=True)
class Published(Shown):
    """What was sent, or would be."""

    repo: str
    files: dict[str, int]
    """Sizes in bytes, by name."""
    private: bool
    url: str | None = None
    """None after a dry run."""
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"repo": self.repo, "files": self.files, "private": self.private, "url": self.url}

    def render(self) -> Table:
        table = Table("file", "size", title=None if self.url is None else self.url)
        table.columns[1].justify = "right"
        for name, size in self.files.items():
            table.add_row(name, format_bytes(size))
        who = "private" if self.private else "public"
        table.add_section()
        table.add_row(f"{self.repo} ({who})", format_bytes(sum(self.files.values())))
        return table


def push(
    model: str | PathLike[str],
    repo: str,
    *,
    gguf: Sequence[str | PathLike[str]] = (),
    private: bool = False,
    dry_run: bool = False,
    endpoint: str | None = None,
) -> Published:
    """Publish a model directory, or the model of a run, as ``user/name``; all files arrive in one commit, or none.

    ``gguf`` are files to put beside it; those in the directory, or in that of the run, are found.
    """
    _check_name(repo)
    files, left_out = collect(Path(model), gguf)
    card = as_published(files[CARD].read_text(encoding="utf-8"), repo, [n for n in files if n.endswith(".gguf")])
    sizes = {name: path.stat().st_size for name, path in files.items()} | {CARD: len(card.encode())}
    published = Published(repo, sizes, private, left_out=left_out)
    if not dry_run:
        published.url = _send(files | {CARD: card.encode()}, repo, private, endpoint)
    return published


def collect(model: Path, gguf: Sequence[str | PathLike[str]] = ()) -> tuple[dict[str, Path], list[str]]:
    """The files to publish by their name there, and the names of what stays."""
    folder = model_of_run(model) or model
    if not (folder / STRUCTURE).is_file() or not (folder / CARD).is_file():
        raise UserError(f"{model}: is neither a model that dwindle wrote nor a run: give one of those")
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path.relative_to(folder).as_posix(): path for path in found}
    files = {name: path for name, path in names.items() if _is_allowed(name)}
    beside = [] if folder == model else sorted(model.glob("*.gguf"))
    for path in [*beside, *map(Path, gguf)]:
        if not path.is_file() or path.suffix != ".gguf":
            raise UserError(f"--gguf {path}: is not a .gguf file: write one with `dwindle export --to gguf`")
        files[path.name] = path
    if not any(fnmatch(name, pattern) for name in files for pattern in (*WEIGHTS, "*.gguf", "onnx/*.onnx")):
        raise UserError(f"{folder}: holds no weights: give a directory that `dwindle` wrote completely")
    for name, path in files.items():
        _refuse_secrets(name, path)
    return files, [name for name in names if name not in files]


def _is_allowed(name: str) -> bool:
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in ALLOWED)


def _refuse_secrets(name: str, path: Path) -> None:
    if path.suffix in _BINARY or path.stat().st_size > _MAX_TEXT_BYTES:
        return
    if _SECRET.search(path.read_bytes()):
        raise UserError(f"{path}: holds what looks like an access token: remove it from {name}; nothing was sent")


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        repo_is_valid = False
    else:
        repo_is_valid = repo.count("/") == 1
    if not repo_is_valid:
        raise UserError(f"{repo!r}: is not the name of a repository: give user/name, such as me/smollm2-80m")


def _send(files: dict[str, Path | bytes], repo: str, private: bool, endpoint: str | None) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    if get_token() is None:
        raise UserError("push: huggingface_hub knows no access token: log in with `hf auth login`, or set HF_TOKEN")
    api = HfApi(endpoint=endpoint)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        there = set(api.list_repo_files(repo))
        stale = [name for name in there - set(files) if any(fnmatch(name, pattern) for pattern in WEIGHTS)]
        operations = [
            *(CommitOperationAdd(name, content) for name, content in files.items()),
            *(CommitOperationDelete(name) for name in stale),
        ]
        api.create_commit(repo, operations, commit_message="Upload model made with dwindle")
    except Exception as error:
        raise UserError(_explained(error, repo)) from None  # the chain may hold signed addresses
    return f"{api.endpoint}/{repo}"


def _explained(error: Exception, repo: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"push {repo}: the Hub refused the access token ({status}): run `hf auth login` with a token that may write"
        )
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
    reason = re.sub(r"\s*\(?(for url|https?:).*", "", first_line(cause), flags=re.IGNORECASE) or type(cause).__name__
    return (
        f"push {repo}: the upload failed ({reason}): no file of it is visible; run the same command again, what has "
        "arrived is not sent twice"
    )
