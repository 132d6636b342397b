"""Hugging Face directories and hub ids: safetensors preferred, no remote code, pickles only with ``weights_only``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from dwindle.anatomy.build import name_code
from dwindle.anatomy.families import register_beside
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.anatomy.family_files import NAMES
from dwindle.anatomy.modeling_dwindle import classes_for
from dwindle.core.errors import UserError, first_line
from dwindle.core.limits import LIMITS, check_sizes
from dwindle.core.reading import read_json
from dwindle.sources.common import (
    build_model,
    check_floating,
    complete_model,
    config_reason,
    quiet_transformers,
)
from dwindle.sources.generation import read_generation
from dwindle.sources.stored_tensors import stored_tensors
from dwindle.sources.text_tower import read_text_tower, text_config, text_name

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_ANSWERS_WITHIN_S = 8.0
_IN_JSON = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes, new and old, of tokenizers that ``tokenizer.json`` describes."""
_MAX_TOKENIZER_BYTES = 1 << 28
_DROPOUTS = ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop")
_CONFIG_FILES = ["config.json", "generation_config.json", *NAMES]
_TOKENIZER_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"]
_CHAT_FILES = ["chat_template*"]
_SAFETENSORS_FILES = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_PICKLE_FILES = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]
MODEL_FILES = [*_CONFIG_FILES, *_TOKENIZER_FILES, *_CHAT_FILES, *_SAFETENSORS_FILES, *_PICKLE_FILES]
"""Patterns of all files that are read."""


def looks_like_hub_id(source: str) -> bool:
    """Whether a name has the form org/name."""
    return _HUB_ID.fullmatch(source) is not None


def fetch(repo_id: str, *, weights: bool, instead: str = "a local directory can be given instead") -> Path:
    """Download ``repo_id`` to the local cache and return its directory; ``instead`` ends the message of a failure.

    One request with a short timeout precedes the download, which would retry for minutes if the hub does not answer. If
    it fails, a complete copy in the cache is used. Everything else works on a directory, so hub ids and directories
    share all checks.
    """
    from huggingface_hub import HfApi, snapshot_download

    patterns = [*_CONFIG_FILES, *_TOKENIZER_FILES, *_CHAT_FILES]
    if weights:
        patterns += _SAFETENSORS_FILES
    try:
        HfApi().model_info(repo_id, timeout=_HUB_ANSWERS_WITHIN_S)
        folder = Path(snapshot_download(repo_id, allow_patterns=patterns))
        if weights and _weight_file(folder) is None:
            folder = Path(snapshot_download(repo_id, allow_patterns=[*patterns, *_PICKLE_FILES]))
    except Exception as error:
        cached = _cached(repo_id, weights=weights)
        if cached is not None:
            return cached
        raise UserError(f"source {repo_id}: {_hub_reason(error)}; {instead}") from error
    return folder


def _cached(repo_id: str, *, weights: bool) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
    except Exception:
        return None
    complete = (folder / "config.json").is_file() and (not weights or _weight_file(folder) is not None)
    return folder if complete else None


def _hub_reason(error: Exception) -> str:
    from huggingface_hub import errors

    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__

    def any_is(*kinds: type[BaseException]) -> bool:
        return any(isinstance(item, kinds) for item in chain)

    if any_is(errors.GatedRepoError):
        return "the hub requires that you accept its licence (gated): accept it on its page and run `hf auth login`"
    if any_is(errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private: check the spelling, or run `hf auth login`"
    if any_is(errors.OfflineModeIsEnabled):
        return "it is not in the local cache and HF_HUB_OFFLINE=1 forbids downloads: unset it"
    if any_is(errors.HFValidationError):
        return "it is not a valid hub id: write org/name"
    silent = ("ConnectError", "TimeoutException", "NetworkError", "TransportError")
    if any_is(errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) or any(
        kind.__name__ in silent for item in chain for kind in type(item).__mro__
    ):
        return "no such directory, not in the local cache, and the hub cannot be reached: check the path or the network"
    return f"the download failed ({first_line(error)}): try again"


def read_config(folder: Path, where: str) -> PreTrainedConfig:
    """The configuration of a directory, stock or ours; that of its text model if it is a vision-language model.

    Dropout is switched off: with it, a masked model and a compacted one would train differently.
    """
    config = text_config(_read_config(folder, where))
    own = vars(config)  # where heads of different layers may be read, too
    check_sizes({name: own[name] if name in own else getattr(config, name, None) for name in LIMITS}, where)
    # "org/name" would make transformers fetch and run a kernel from the hub
    config._attn_implementation = config._experts_implementation = None
    for name in _DROPOUTS:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    return config


def _read_config(folder: Path, where: str) -> PreTrainedConfig:
    raw = _raw_config(folder, where)
    register_beside(folder, raw["model_type"])
    with quiet_transformers():
        try:
            if raw["model_type"].startswith(CUSTOM_PREFIX):  # the installed code: none of the directory is executed
                config: PreTrainedConfig = classes_for(raw["model_type"])[0].from_pretrained(folder)
                name_code(config)  # what is written from it has today's files
                return config
            return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except UserError:
            raise
        except Exception as error:
            raise _config_error(raw, where, error) from error


def generation_of(folder: Path, where: str) -> GenerationConfig:
    """The generation settings of a directory, repaired."""
    return read_generation(folder, _raw_config(folder, where), where)


def read_tokenizer(folder: Path, where: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer; None if the directory has none."""
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab.*")):
        return None
    for file in folder.iterdir():
        if any(file.match(pattern) for pattern in _TOKENIZER_FILES) and not _is_readable(file):
            raise UserError(f"source {where}: {file} is not a regular file, or too large: fetch it again")
    with quiet_transformers():
        try:
            if _is_all_in_json(folder):
                return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            config = read_config(folder, where) if (folder / "config.json").is_file() else None
            return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False, local_files_only=True)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"source {where}: the tokenizer files cannot be read ({first_line(error)}): fetch them again"
            ) from error


def _is_all_in_json(folder: Path) -> bool:
    """Whether ``tokenizer.json`` is the whole tokenizer, as of a GGUF file that was saved.

    ``AutoTokenizer`` then still takes the class of some models (qwen2), which has a normalizer and a pattern of its
    own: the tokenizer would change by saving and loading.
    """
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    try:
        found = read_json(config)
    except UserError:  # AutoTokenizer says why
        return False
    return isinstance(found, dict) and found.get("tokenizer_class") in _IN_JSON and "auto_map" not in found


def _is_readable(file: Path) -> bool:
    return file.is_dir() or (file.is_file() and file.stat().st_size <= _MAX_TOKENIZER_BYTES)


def read_model(folder: Path, dtype: torch.dtype | None, device: torch.device, where: str) -> PreTrainedModel:
    """The model of a directory, with every weight checked to be there; ``dtype`` None keeps the stored dtype.

    Weights of safetensors files are on ``device``; those of pickles, and the buffers, are on the CPU.
    """
    raw = _raw_config(folder, where)
    _refuse_quantized(raw, where)
    files, safetensors = _check_weight_files(folder, where)
    config, generation = read_config(folder, where), generation_of(folder, where)
    if config.model_type != raw["model_type"]:
        model = read_text_tower(files, config, dtype, device, where)
        check_floating(model, {text_name(n) or n: t for n, t in _integers(files, safetensors).items()}, where)
        model.generation_config = generation
        return model
    try:
        if safetensors:
            model = build_model(config, stored_tensors(files, device), dtype, where)
        else:
            pickles = {"local_files_only": True, "use_safetensors": False, "weights_only": True}
            model = complete_model(folder, config, dtype, where, **pickles)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"source {where}: the model cannot be loaded ({first_line(error)}): "
            "check that it is a causal language model and that its files are complete"
        ) from error
    check_floating(model, _integers(files, safetensors), where)
    model.config.name_or_path = str(folder)
    model.generation_config = generation
    return model


def check_folder(folder: Path, where: str) -> None:
    """Raise UserError if a directory is not a model; reads nothing."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"source {where}: {path} does not exist: give a directory with config.json and safetensors weights"
        )


def _raw_config(folder: Path, where: str) -> dict[str, Any]:
    check_folder(folder, where)
    path = folder / "config.json"
    try:
        raw = read_json(path)
    except UserError as error:
        raise UserError(f"source {where}: {error}: fetch it again") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise UserError(f"source {where}: {path} has no model_type: it is not a transformers configuration")
    check_sizes(raw, where)
    return raw


def _config_error(raw: dict[str, Any], where: str, error: Exception) -> UserError:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = raw["model_type"]
    if model_type not in CONFIG_MAPPING:
        reason = "runs code from the model's author, which dwindle never does" if "auto_map" in raw else "is unknown"
        return UserError(f"source {where}: model_type {model_type!r} {reason}: give a model that transformers has")
    return UserError(f"source {where}: config.json is not a valid {model_type} configuration: {config_reason(error)}")


def _refuse_quantized(raw: dict[str, Any], where: str) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise UserError(
            f"source {where}: config.json declares {method} quantised weights, which cannot be trained or sliced: "
            "give the unquantised model (or a GGUF of it)"
        )


def _weight_file(folder: Path) -> Path | None:
    """The file that transformers reads first: safetensors before pickle, a single file before an index."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        for name in (stem, f"{stem}.index.json"):
            if (folder / name).is_file():
                return folder / name
    return None


def _check_weight_files(folder: Path, where: str) -> tuple[list[Path], bool]:
    """Check that every weight file is complete; returns them, and whether they are safetensors."""
    first = _weight_file(folder)
    if first is None:
        raise UserError(f"source {where}: {folder / 'model.safetensors'} does not exist: the directory has no weights")
    shards = [first] if first.suffix != ".json" else _shards(first, where)
    safetensors = ".safetensors" in first.name
    for shard in shards:
        if not shard.is_file():
            raise UserError(f"source {where}: {shard} is named in {first.name} but does not exist: fetch it again")
        if safetensors:
            _check_safetensors(shard, where)
    return shards, safetensors


def _shards(index: Path, where: str) -> list[Path]:
    try:
        weight_map = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
    except (UserError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"source {where}: {index} is not a readable weight index: fetch it again") from error
    if outside:  # transformers would follow it
        raise UserError(f"source {where}: {index} names {outside[0]!r}, which is not a file beside it: fetch it again")
    return [index.parent / name for name in names]


def _check_safetensors(path: Path, where: str) -> None:
    try:
        with safe_open(path, framework="pt") as handle:
            empty = not handle.keys()
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"source {where}: {path} is damaged or truncated ({first_line(error)}): fetch it again"
        ) from error
    if empty:
        raise UserError(f"source {where}: {path} holds no tensors: fetch it again")


def _integers(files: list[Path], safetensors: bool) -> dict[str, str]:
    """The dtype of every stored integer tensor, by name; no values are read."""
    stored: dict[str, Any] = dict(stored_tensors(files, torch.device("cpu"))) if safetensors else {}
    for path in () if safetensors else files:
        stored |= torch.load(path, map_location="meta", weights_only=True)
    whole = {name: tensor.dtype for name, tensor in stored.items() if not tensor.is_floating_point()}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in whole.items()}
