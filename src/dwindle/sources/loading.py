"""``load``: one function for every kind of source, with the same checks for all."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dwindle.core.errors import UserError
from dwindle.core.progress import status
from dwindle.core.run_directory import RunDirectory
from dwindle.sources import huggingface, llama2c
from dwindle.sources.aliases import ALIASES
from dwindle.sources.built_tokenizers import gguf_tokenizer
from dwindle.sources.common import build_model, check_finite, limit_ids, parse_dtype
from dwindle.sources.generation import implied_generation
from dwindle.sources.gguf_file import open_gguf
from dwindle.sources.gguf_model import gguf_config, gguf_tensors

_FILE_SUFFIXES = (".gguf", ".bin", ".safetensors", ".json", ".jsonl", ".toml", ".txt")
"""Suffixes of files, which are never hub ids."""

SourceKind = Literal["huggingface", "gguf", "llama2c"]


@dataclass
class Loaded:
    """A loaded model, its tokenizer if the source has one, and their origin."""

    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    source: str
    kind: SourceKind

    def __iter__(self) -> Iterator[PreTrainedModel | PreTrainedTokenizerBase | None]:
        """``model, tokenizer = load(…)``"""
        yield self.model
        yield self.tokenizer


def load(source: str | os.PathLike[str], *, dtype: torch.dtype | str = torch.float32, device: str = "cpu") -> Loaded:
    """Load a model from a Hugging Face directory or hub id, a GGUF or llama2.c file, or an alias.

    Raises ``UserError`` for anything that would fail later: missing tensors, wrong shapes, damaged files, non-finite
    weights, quantised Hugging Face weights, remote code. ``dtype="auto"`` keeps the dtype stored in a Hugging Face
    directory (float32 for other kinds). Weights of a Hugging Face directory are read straight to ``device``, tensor by
    tensor.
    """
    where = os.fspath(source)
    wanted = parse_dtype(dtype)
    target = _device(device)
    kind, path = locate(where, weights=True)
    with status(f"loading {where}"):
        model, tokenizer = _read(kind, path, where, wanted, target)
        if kind != "huggingface":
            model.generation_config = implied_generation(model.config, where)
        limit_ids(tokenizer, model.config)
        check_finite(model, where)
        return Loaded(model.to(target).eval(), tokenizer, where, kind)


def _read(
    kind: str, path: Path, where: str, wanted: torch.dtype | None, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    if kind == "huggingface":
        return huggingface.read_model(path, wanted, device, where), huggingface.read_tokenizer(path, where)
    dtype = wanted or torch.float32
    if kind == "gguf":
        file = open_gguf(path)
        config = gguf_config(file)
        tokenizer = gguf_tokenizer(file.metadata, file.architecture, path)
        return build_model(config, gguf_tensors(file, config, dtype), dtype, where), tokenizer
    header = llama2c.read_header(path)
    model = build_model(header.config(), llama2c.read_tensors(path, header, dtype), dtype, where)
    return model, llama2c.read_tokenizer(path, header)


def load_config(source: str | os.PathLike[str]) -> PreTrainedConfig:
    """The configuration only, which is enough to count parameters or to plan a run."""
    where = os.fspath(source)
    kind, path = locate(where, weights=False)
    if kind == "huggingface":
        return huggingface.read_config(path, where)
    return gguf_config(open_gguf(path)) if kind == "gguf" else llama2c.read_header(path).config()


def load_generation(source: str | os.PathLike[str]) -> GenerationConfig:
    """The generation settings only: stop tokens and sampling, without what transformers refuses to save."""
    where = os.fspath(source)
    kind, path = locate(where, weights=False)
    if kind == "huggingface":
        return huggingface.generation_of(path, where)
    return implied_generation(load_config(where), where)


def load_tokenizer(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer only; an error if the source has none."""
    where = os.fspath(source)
    kind, path = locate(where, weights=False)
    tokenizer: PreTrainedTokenizerBase | None
    if kind == "huggingface":
        tokenizer = huggingface.read_tokenizer(path, where)
    elif kind == "gguf":
        file = open_gguf(path)
        tokenizer = gguf_tokenizer(file.metadata, file.architecture, path)
    else:
        tokenizer = llama2c.read_tokenizer(path, llama2c.read_header(path))
    limit_ids(tokenizer, load_config(where))
    return needed_tokenizer(tokenizer, where)


def needed_tokenizer(tokenizer: PreTrainedTokenizerBase | None, where: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a source; an error if it has none."""
    if tokenizer is None:
        raise UserError(
            f"source {where}: has no tokenizer, which is required here: put its tokenizer files next to the model"
        )
    return tokenizer


def check_source(source: str | os.PathLike[str]) -> None:
    """Raise UserError if this cannot be a source, before long work; nothing is read, and the hub is not contacted."""
    where = os.fspath(source)
    found = _locate_here(where)
    if found is not None and found[0] == "huggingface":
        huggingface.check_folder(found[1], where)


def locate(where: str, *, weights: bool) -> tuple[SourceKind, Path]:
    """The kind of a source and its file or directory."""
    return _locate_here(where) or ("huggingface", huggingface.fetch(where, weights=weights, instead=_instead(where)))


def _locate_here(where: str) -> tuple[SourceKind, Path] | None:
    """The same without contacting the hub, None for hub ids; an existing path takes precedence."""
    path = Path(where).expanduser()
    if where and path.is_dir():
        return _in_directory(path, where)
    if where and path.exists():
        return _file_kind(path, where), path
    if where in ALIASES:
        return "gguf", _alias_path(where)
    meant = _did_you_mean(path)
    if path.suffix in _FILE_SUFFIXES or where.startswith((".", "/", "~")):
        raise UserError(f"source {where}: does not exist: {meant or 'check the path'}")
    if huggingface.looks_like_hub_id(where):
        return None
    kinds = (
        "give an existing Hugging Face directory, a .gguf file, a llama2.c .bin file, a hub id such as org/name, or an "
        f"alias ({', '.join(ALIASES)})"
    )
    raise UserError(f"source {where!r}: {meant or kinds}")


def _instead(repo_id: str) -> str:
    """What to give where the hub does not answer: what has nearly this name here, or the alias of nearly this model."""
    if meant := _did_you_mean(Path(repo_id)):
        return f"no such path is here either: {meant}"
    for name, alias in ALIASES.items():
        if alias.hub_id.lower().startswith(repo_id.lower()):
            return f"{name} ({alias.hub_id} from a pip package) needs no network, or give a local directory"
    return "a local directory can be given instead"


def _did_you_mean(path: Path) -> str:
    """The nearest alias, file or directory; empty if nothing is near."""
    folder = path.parent
    here = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, [*(ALIASES if folder == Path() else ()), *here], n=1, cutoff=0.7)
    return f"did you mean {folder / near[0]}?" if near else ""


def _in_directory(folder: Path, where: str) -> tuple[SourceKind, Path]:
    if (folder / "config.json").is_file():
        return "huggingface", folder
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and (runs := sorted(child for child in folder.iterdir() if RunDirectory(child).recipe.is_file())):
        raise UserError(f"source {where}: holds runs: give one of them, such as {runs[0]}, or {ggufs[0]}")
    if len(ggufs) == 1:
        return "gguf", ggufs[0]
    if ggufs:
        raise UserError(f"source {where}: holds {len(ggufs)} GGUF files: give one of them, such as {ggufs[0]}")
    if (model := model_of_run(folder)) is not None:
        raise UserError(f"source {where}: is a run of dwindle pretrain: give its model, {model}")
    if files := [file for file in sorted(folder.glob("*.bin")) if _is_llama2c(file)]:
        raise UserError(f"source {where}: has no config.json: give the llama2.c file in it, {files[0]}")
    return "huggingface", folder


def _is_llama2c(file: Path) -> bool:
    try:
        llama2c.read_header(file)
    except (UserError, OSError):
        return False
    return True


def model_of_run(folder: Path) -> Path | None:
    """The model of a finished run; None if the folder is not a run, an error if the run has no model yet."""
    run = RunDirectory(folder)
    if not run.recipe.is_file() or (folder / "config.json").is_file():
        return None
    if not run.is_finished:
        raise UserError(f"{folder}: the run has no model yet: finish it with `{run.resume_command}`")
    return run.model


def model_in(source: str | os.PathLike[str]) -> str:
    """The model of a finished run, by its path; any other source as it is."""
    return os.fspath(model_of_run(Path(source)) or source)


def _file_kind(path: Path, where: str) -> SourceKind:
    if path.suffix == ".gguf":
        return "gguf"
    if path.suffix == ".bin":
        return "llama2c"
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise UserError(f"source {where}: give the directory that holds it: {path.parent}")
    raise UserError(f"source {where}: is not a .gguf file, a llama2.c .bin file or a directory: give one of those")


def _alias_path(name: str) -> Path:
    """The file inside the installed package, found without importing it (its imports build llama.cpp)."""
    alias = ALIASES[name]
    spec = importlib.util.find_spec(alias.package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder) / alias.file).is_file():
            return path
    raise UserError(f"source {name}: its package is not installed: {alias.install}")


def chosen_device(name: str) -> str:
    """Resolves ``auto``: a GPU if there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _device(device: str) -> torch.device:
    device = chosen_device(device)
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device: {device!r} is not usable here: give cpu or an available device") from error
    return target
