"""``push``: one commit on the Hugging Face Hub with a model, its card, ledger, structure, figures and GGUF files.

Only files that are known by name are sent (``collect``); ``hub`` sends them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import Any

from rich.table import Table

from dwindle.anatomy.family import CODE_FILES
from dwindle.core.errors import UserError
from dwindle.core.names import public_name
from dwindle.core.notebook import Shown
from dwindle.core.quality import read_quality
from dwindle.core.reading import read_json
from dwindle.core.run_directory import LEDGER, QUALITY, QUANTIZATION, STRUCTURE
from dwindle.core.sizes import format_bytes
from dwindle.export import card_figure, hub, ollama
from dwindle.export.card import without_samples
from dwindle.export.card_running import as_published
from dwindle.export.other_readers import MLX_FILE
from dwindle.sources.loading import model_of_run

CARD = "README.md"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
WEIGHTS = ("model.safetensors", SHARDS, INDEX, "model.onnx", "model.onnx.data")
GGUF = "*.gguf"
UNVERIFIED = "*.unverified.gguf"
ALLOWED = (
    *WEIGHTS,
    *(CARD, LEDGER, STRUCTURE, QUANTIZATION, QUALITY, card_figure.NAME, "LICENSE*", "NOTICE*"),
    *("config.json", "generation_config.json", "family.toml", "family.json"),
    *(*CODE_FILES, "configuration_decilm.py", MLX_FILE),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", GGUF),
    *("onnx/*.onnx", "onnx/*.onnx_data"),
)
"""What may be published; anything else in the directory stays: data, checkpoints, caches, logs, optimizer state."""

_SECRET = re.compile(
    rb"hf_[A-Za-z0-9]{20,}"
    rb"|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    rb"|(?<![A-Za-z0-9])AKIA[0-9A-Z]{16}(?![A-Za-z0-9])"
    rb"|(?<![A-Za-z0-9])sk-(?=[\w-]*[0-9])[A-Za-z0-9_-]{20,}"
    rb"|[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@\"'<>]+:[^\s/@\"'<>]+@"
)
"""Access tokens of the Hub, GitHub, AWS and OpenAI, and addresses with a password."""
_MAX_TEXT_BYTES = 32 * 2**20
_BINARY = (".safetensors", ".gguf", ".onnx", ".onnx_data", ".data", ".model")


@dataclass(slots=True)
class Published(Shown):
    """What was sent, or would be sent."""

    repo: str
    files: dict[str, int]
    """Sizes in bytes, by name."""
    private: bool
    """As it is on the Hub; as asked for where the repository does not exist yet or cannot be read."""
    url: str | None = None
    """None after a dry run."""
    left_out: list[str] = field(default_factory=list)
    deleted: list[str] | None = None
    """Files of an earlier push that this one does not have; None if the repository could not be read."""

    def to_json(self) -> dict[str, Any]:
        names = ("repo", "files", "deleted", "private", "url")
        return {name: getattr(self, name) for name in names}

    def render(self) -> Table:
        table = Table("file", "size", title=None if self.url is None else self.url)
        table.columns[1].justify = "right"
        for name, size in self.files.items():
            table.add_row(name, format_bytes(size))
        for name in self.deleted or []:
            table.add_row(name, "deleted" if self.url else "is deleted there")
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
    with_samples: bool = False,
    dry_run: bool = False,
    endpoint: str | None = None,
) -> Published:
    """Publish a model directory, or the model of a run, as ``user/name``; all files arrive in one commit, or none.

    ``gguf`` are files to put beside it; those in the directory, or in that of the run, are found. The samples of the
    card, which begin with held-out text of yours, are sent only with ``with_samples``.
    """
    hub.check_name(repo)
    files, left_out = collect(Path(model), gguf)
    contents: dict[str, Path | bytes] = {**files, **_rewritten(files, repo, with_samples)}
    contents[hub.MANIFEST] = _json({"format": 1, "files": sorted([*contents, hub.MANIFEST])})
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in contents.items()}
    published = Published(repo, dict(sorted(sizes.items())), private, left_out=left_out)
    there = hub.look(repo, private, endpoint) if dry_run else hub.open_repository(repo, private, endpoint)
    if there is not None:
        published.private = there.private
        published.deleted = sorted(name for name in there.ours - set(contents) if _is_allowed(name) or _is_made(name))
        _refuse_mixture(there, contents, published.deleted)
        if not dry_run:
            published.url = hub.send(there, contents, published.deleted, endpoint)
    return published


def _rewritten(files: dict[str, Path], repo: str, with_samples: bool) -> dict[str, bytes]:
    """The files that are not sent as they are: no text or folder of the user is sent unasked."""
    card = files[CARD].read_text(encoding="utf-8")
    card = as_published(card if with_samples else without_samples(card), repo, [n for n in files if fnmatch(n, GGUF)])
    found = {CARD: card.encode()}
    if QUALITY in files and not with_samples:
        quality = read_quality(files[QUALITY])
        if quality is None:
            raise UserError(f"{files[QUALITY]}: is not as dwindle writes it: delete it; nothing was sent")
        found[QUALITY] = _json(replace(quality, samples=[]).to_json())
    if QUANTIZATION in files:
        about = read_json(files[QUANTIZATION])
        found[QUANTIZATION] = _json(about | {"source": public_name(str(about.get("source", "")))})
    return found


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def collect(model: Path, gguf: Sequence[str | PathLike[str]] = ()) -> tuple[dict[str, Path], list[str]]:
    """The files to publish by their name there, and the names of what stays."""
    folder = model_of_run(model) or model
    marked = any((folder / marker).is_file() for marker in (STRUCTURE, QUANTIZATION))
    if not marked or not (folder / CARD).is_file():
        raise UserError(f"{model}: is neither a model that dwindle wrote nor a run: give one of those")
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    files = {name: path for name, path in names.items() if _is_allowed(name) and not fnmatch(name, UNVERIFIED)}
    for name, path in files.items():
        if path.is_symlink():
            raise UserError(f"{path}: is a link: replace it with the file, or delete it; nothing was sent")
        _refuse_secrets(name, path)
    for path in _gguf_files(folder, model, gguf):
        for beside in (path, ollama.place_of(path)):
            if beside.is_file():
                _add(files, beside)
    _refuse_incomplete(folder, files)
    sent = {path.resolve() for path in files.values()}
    return files, [name for name, path in names.items() if path.resolve() not in sent]


def _gguf_files(folder: Path, model: Path, named: Sequence[str | PathLike[str]]) -> Iterable[Path]:
    """Those in the directory, in that of the run, and those that were named."""
    for path in map(Path, named):
        if not path.is_file() or path.suffix != ".gguf":
            raise UserError(f"--gguf {path}: is not a .gguf file: write one with `dwindle export --to gguf`")
    beside = [path for place in dict.fromkeys([folder, model]) for path in sorted(place.glob(GGUF))]
    return [*(path for path in beside if not fnmatch(path.name, UNVERIFIED)), *map(Path, named)]


def _add(files: dict[str, Path], path: Path) -> None:
    there = files.setdefault(path.name, path)
    if there.resolve() != path.resolve():
        raise UserError(f"--gguf {path}: {there} has the same name: rename one of them; nothing was sent")
    _refuse_secrets(path.name, path)


def _is_allowed(name: str) -> bool:
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in ALLOWED)


def _is_made(name: str) -> bool:
    """Whether a generated file is sent beside those of the list."""
    return name == hub.MANIFEST or (name.endswith(".Modelfile") and "/" not in name)


def _refuse_incomplete(folder: Path, files: dict[str, Path]) -> None:
    """Refuse a directory that would not load: without weights, with a missing shard, or without its code."""
    if not any(fnmatch(name, pattern) for name in files for pattern in (*WEIGHTS, GGUF, "onnx/*.onnx")):
        raise UserError(f"{folder}: holds no weights: give a directory that `dwindle` wrote completely")
    wanted: dict[str, str] = {}
    if INDEX in files:
        wanted |= dict.fromkeys(read_json(files[INDEX]).get("weight_map", {}).values(), INDEX)
    elif shard := next((name for name in files if fnmatch(name, SHARDS)), None):
        wanted[INDEX] = shard
    for name in ("config.json", "tokenizer_config.json"):
        if name in files:
            wanted |= dict.fromkeys(_own_code(read_json(files[name])), name)
    for name, why in wanted.items():
        if name not in files:
            raise UserError(f"{folder / name}: is missing, and {why} names it: export the model again")


def _own_code(config: Mapping[str, Any]) -> list[str]:
    """The Python files beside the weights that a configuration names; ``repo--module.Class`` are elsewhere."""
    auto_map, model_file = config.get("auto_map"), config.get("model_file")
    values = auto_map.values() if isinstance(auto_map, dict) else []
    classes = [one for value in values for one in (value if isinstance(value, list) else [value])]
    own = [f"{one.partition('.')[0]}.py" for one in classes if isinstance(one, str) and "--" not in one]
    return own + ([model_file] if isinstance(model_file, str) else [])


def _refuse_mixture(there: hub.Repository, contents: Iterable[str], deleted: Iterable[str]) -> None:
    """Refuse weights of another model in the repository, which loaders would take for this one's."""
    left = there.names.difference(contents, deleted)
    for name in sorted(left):
        if any(fnmatch(name, pattern) for pattern in WEIGHTS):
            raise UserError(
                f"push {there.repo}: {name} is there, which no push of dwindle wrote, and loaders may take it for a "
                "part of this model: delete it there, or give another name; nothing was sent"
            )


def _refuse_secrets(name: str, path: Path) -> None:
    if path.suffix in _BINARY or path.stat().st_size > _MAX_TEXT_BYTES:
        return
    if _SECRET.search(path.read_bytes()):
        raise UserError(
            f"{path}: holds what looks like an access token or password: remove it from {name}; nothing was sent"
        )
