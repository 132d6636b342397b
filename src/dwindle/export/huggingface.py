"""Writes a Hugging Face directory with structure and ledger, atomically."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NotRequired, TypedDict, Unpack

from huggingface_hub import split_torch_state_dict_into_shards
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from dwindle.anatomy import modeling_dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import is_custom
from dwindle.anatomy.families import outside_family
from dwindle.anatomy.family import CODE_FILES
from dwindle.anatomy.family_files import write_family
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError, first_line
from dwindle.core.files import atomic_directory, refuse_existing
from dwindle.core.jsonl import json_line
from dwindle.core.quality import Quality
from dwindle.core.run_directory import LEDGER, QUALITY, STRUCTURE, model_title
from dwindle.distributed.safetensors_stream import file_blocks
from dwindle.export import card_figure, deci
from dwindle.export.card import Card, model_card
from dwindle.export.card_running import Runtime
from dwindle.export.gguf_vocabulary import probes_of
from dwindle.export.other_readers import add_for_other_readers
from dwindle.pruning.ledger import Event, vocabulary_in
from dwindle.sources.huggingface import read_tokenizer

_MAX_FILE_BYTES = 50 * 10**9
"""As in transformers: larger models are several files with an index."""


def check_output(out: str | PathLike[str], *, overwrite: bool, sources: Sequence[str | PathLike[str]] = ()) -> None:
    """Refuse an existing output, one that contains an input, or an unwritable directory, before any work."""
    refuse_existing(Path(out), marker=STRUCTURE, overwrite=overwrite, sources=sources)


class About(TypedDict):
    """Metadata that a model directory holds beside the weights."""

    structure: Structure
    """Which indices of the source were kept."""
    source: str
    ledger: Sequence[Event]
    recipe: NotRequired[str | None]
    """For the card."""
    results: NotRequired[Mapping[str, float | int | str] | None]
    """For the card."""
    source_card: NotRequired[Path | None]
    """For the card: that of an earlier model made from the same source."""
    runtime: NotRequired[Runtime]
    """For the card: what loads the directory."""
    quality: NotRequired[Quality | None]
    """Loss and samples of source and result; written as ``quality.json``, and for the card."""


def save_model(
    model: Any, tokenizer: Any, out: str | PathLike[str], *, overwrite: bool = False, **about: Unpack[About]
) -> Path:
    """Write weights (safetensors), configuration, tokenizer, model card, ``structure.json`` and ``ledger.jsonl``.

    The write is atomic: the directory is complete or does not exist.
    """
    with write_model(model, tokenizer, out, overwrite=overwrite, **about):
        pass
    return Path(out)


@contextmanager
def write_model(
    model: Any,
    tokenizer: Any,
    out: str | PathLike[str],
    *,
    overwrite: bool = False,
    weights: bool = True,
    layout: str | None = None,
    **about: Unpack[About],
) -> Iterator[Path]:
    """Like ``save_model``, but yields the temporary directory before it is put in place.

    The caller may verify it or add files; if it raises, the directory is deleted. ``weights=False`` writes everything
    but the weights, for formats that store them in their own file. ``layout`` ``deci`` is that of ``deci.py``.
    """
    with atomic_directory(Path(out), marker=STRUCTURE, overwrite=overwrite) as folder:
        _write_files(model, tokenizer, folder, Path(out), weights, layout, about)
        yield folder
        for file in folder.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # some libraries create files that only their owner can read


def try_save(
    model: Any, tokenizer: Any, out: str | PathLike[str], *, overwrite: bool = False, **about: Unpack[About]
) -> None:
    """Write everything but the weights beside ``out`` and delete it: what cannot be saved must fail before any work."""
    try:
        with write_model(model, tokenizer, out, overwrite=overwrite, weights=False, **about):
            raise _Tried
    except _Tried:
        pass
    except UserError:
        raise
    except Exception as error:  # whatever transformers raises for settings that it loads and does not save
        raise UserError(
            f"source {about['source']}: the result could not be saved ({first_line(error)}): correct its "
            "configuration or tokenizer files"
        ) from error


class _Tried(Exception):
    """Everything was written, so it can be deleted."""


def _write_files(
    model: Any, tokenizer: Any, folder: Path, out: Path, weights: bool, layout: str | None, about: About
) -> None:
    structure = about["structure"].to_json(about["source"])
    structure["layer_parameters"] = _layer_parameters(model.config, about["structure"])
    if any(event.get("event") == "rotate" for event in about["ledger"]):
        structure["rotated"] = True  # its hidden indices number directions, not channels of the source
    if (vocabulary := vocabulary_in(about["ledger"], LEDGER)) is not None:
        structure["vocabulary"] = vocabulary.to_json()
    if weights:
        _save_weights(model, folder)
    else:
        model.config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    custom_code = weights and layout is None and is_custom(model.config)
    if layout is not None:
        deci.write_config(model, folder)
    write_beside(model, tokenizer, folder, custom_code=custom_code)
    (folder / STRUCTURE).write_text(json.dumps(structure) + "\n", encoding="utf-8")
    (folder / LEDGER).write_text("".join(map(json_line, about["ledger"])), encoding="utf-8")
    if (quality := about.get("quality")) is not None:
        quality.write(folder / QUALITY)
    card = Card(
        name=model_title(out),
        source=about["source"],
        structure=structure,
        ledger=about["ledger"],
        recipe=about.get("recipe"),
        results=about.get("results"),
        quality=about.get("quality"),
        custom_code=custom_code,
        model_type=model.config.model_type,
        chat=bool(getattr(tokenizer, "chat_template", None)),
        tokenizer=tokenizer is not None,
        runtime=about.get("runtime", "transformers"),
        source_card=about.get("source_card"),
    )
    (folder / "README.md").write_text(model_card(card), encoding="utf-8")
    if (figure := card_figure.architecture_svg(structure, about["ledger"])) is not None:
        (folder / card_figure.NAME).write_text(figure, encoding="utf-8")


def write_beside(model: Any, tokenizer: Any, folder: Path, *, custom_code: bool) -> None:
    """What loading needs beside weights and configuration: modelling files, a family's table, the tokenizer."""
    if custom_code:
        for file in CODE_FILES:
            shutil.copyfile(Path(str(modeling_dwindle.__file__)).with_name(file), folder / file)
    if (table := outside_family(model.config.model_type)) is not None:
        write_family(table, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    add_for_other_readers(folder)
    if tokenizer is not None:
        _check_tokenizer(folder, tokenizer)


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Raise unless the same tokenizer comes back: for some types of models transformers has rules of its own."""
    again, texts = read_tokenizer(folder, str(folder)), probes_of(tokenizer)
    assert again is not None
    same = all(again(text).input_ids == tokenizer(text).input_ids for text in texts)
    names = ("bos_token_id", "eos_token_id", "chat_template")
    if not same or any(getattr(again, name) != getattr(tokenizer, name) for name in names):
        raise UserError(
            f"tokenizer: {type(tokenizer).__name__} is not the same after it was saved and loaded: save it as a "
            "tokenizer.json that transformers reads as it is"
        )


def _layer_parameters(config: Any, structure: Structure) -> list[int]:
    """Parameters of every layer of the source; 0 for removed layers, which the model's configuration lacks."""
    counts = Anatomy.of_config(config).layer_counts(Structure(structure.hidden, structure.present))
    return [counts[structure.places[n]] if n in structure.places else 0 for n in range(len(structure.layers))]


def _save_weights(model: Any, folder: Path) -> None:
    """``save_pretrained``, but with the weights copied from their device and written one by one."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict={})  # configuration and code
    finally:
        if shown:
            logging.enable_progress_bar()
    tensors = revert_weight_conversion(model, remove_tied_weights_from_state_dict(model.state_dict(), model))
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=_MAX_FILE_BYTES)
    for name, inside in split.filename_to_tensors.items():
        with (folder / name).open("wb") as file:
            file.writelines(file_blocks({tensor: tensors[tensor] for tensor in inside}))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
