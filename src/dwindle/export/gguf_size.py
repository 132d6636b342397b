"""The size of a GGUF file before it is written, to the byte: from names, shapes, types and metadata only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import build_on_meta, config_for
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.export.equivalents import in_common_terms
from dwindle.export.gguf_types import TYPES
from dwindle.export.gguf_vocabulary import Vocabulary, vocabulary_of
from dwindle.export.gguf_writer import add_about, architecture_of, padding_for, rope_tables, tensors_of
from dwindle.export.resize import resize
from dwindle.sources.gguf_file import import_gguf

_HEADER_BYTES, _TENSOR_BYTES = 24, 24
"""Magic number, version and two counts; of a tensor the lengths of its name, its axes, its type and place."""

ABOUT_BYTES = 1024
"""Kept free for name, description and licence where they are not known yet: a file may be smaller by so much."""


class FileSize:
    """Sizes of the files of a model's smaller versions, by structure."""

    def __init__(self, config: Any, tokenizer: Any, type_: str, option: str) -> None:
        if type_ not in TYPES:
            raise UserError(f"{option}: {type_!r} is not a type of GGUF files: give one of {', '.join(TYPES)}")
        self._config, self._type, self._option = config, type_, option
        with self._refusing():
            with_tokens = vocabulary_of(tokenizer, config.vocab_size, config.name_or_path or "the model")
            self._vocabulary = vocabulary_bytes(with_tokens)

    def __call__(self, structure: Structure) -> int:
        """Bytes of the file; at most ``ABOUT_BYTES`` more than will be written."""
        model: Any = build_on_meta(config_for(self._config, structure))
        about = {"name": " " * ABOUT_BYTES, "description": "", "licence": ""}
        with self._refusing():
            padded = in_common_terms(resize(model, **padding_for(model)).model)
            return predicted_bytes(padded, self._vocabulary, type_=self._type, **about)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Refuse what ``export`` refuses; its advice, another format, does not apply to a target."""
        try:
            yield
        except UserError as error:
            why = str(error).partition(": export to ")[0]
            raise UserError(f"{self._option}: there is no such file: {why}: give a size such as 60%") from error


def predicted_bytes(model: Any, vocabulary: Vocabulary | int, *, type_: str, **about: str) -> int:
    """The size of the file that ``write_gguf`` writes, from names and shapes only: the model may be without weights.

    ``vocabulary`` may be given as its ``vocabulary_bytes``.
    """
    gguf = import_gguf("writing GGUF")
    writer = gguf.GGUFWriter(None, architecture_of(model))
    add_about(writer, model, type_, about)
    header = _HEADER_BYTES + _metadata_bytes(gguf, writer)
    header += vocabulary if isinstance(vocabulary, int) else vocabulary_bytes(vocabulary)
    tables = rope_tables(model.config, Anatomy.of(model).head_dim)
    tensors = [(name, table.shape, table.nbytes) for name, table in tables.items()]
    layout, parameters, kind_of = tensors_of(gguf, model, type_)
    for name, parameter in parameters.items():
        target, shape = layout.name(name), layout.shape(name, parameter)
        tensors.append((target, shape, kind_of.num_bytes(kind_of(target, shape), shape)))
    header += sum(len(name.encode()) + _TENSOR_BYTES + 8 * len(shape) for name, shape, _ in tensors)
    align = gguf.GGUF_DEFAULT_ALIGNMENT
    return int(sum(-(-size // align) * align for size in (header, *(size for *_, size in tensors))))


def vocabulary_bytes(vocabulary: Vocabulary) -> int:
    """Bytes of the metadata of a vocabulary."""
    gguf = import_gguf("writing GGUF")
    writer = gguf.GGUFWriter(None, "")
    writer.kv_data[0].clear()  # the architecture
    vocabulary.write(writer)
    return _metadata_bytes(gguf, writer)


def _metadata_bytes(gguf: Any, writer: Any) -> int:
    """Each key is its text and type, then the value; texts and lists begin with their length."""
    kinds = gguf.GGUFValueType
    wide, narrow = (kinds.UINT64, kinds.INT64, kinds.FLOAT64), {kinds.BOOL: 1, kinds.UINT8: 1, kinds.INT8: 1}
    narrow |= {kinds.UINT16: 2, kinds.INT16: 2} | dict.fromkeys(wide, 8)

    def size(value: Any, kind: Any) -> int:
        if kind == kinds.STRING:
            return 8 + len(value.encode() if isinstance(value, str) else value)
        if kind == kinds.ARRAY:
            inner = kinds.get_type(value[0])
            return 12 + (sum(size(one, inner) for one in value) if inner == kinds.STRING else len(value) * width(inner))
        return width(kind)

    def width(kind: Any) -> int:
        return narrow.get(kind, 4)

    return sum(8 + len(key.encode()) + 4 + size(one.value, one.type) for key, one in writer.kv_data[0].items())
