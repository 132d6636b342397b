"""Readers of documents: text, JSON lines and Parquet, compressed or not, Hugging Face datasets, and ``pydoc``.

Each reader knows its position, for the progress bar, and the size and SHA-256 of its input, for the index of token
files. Every error is one line that names the file.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import logging
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from dwindle.core.errors import UserError, first_line
from dwindle.core.reading import parse_json
from dwindle.data.compression import COMPRESSIONS, CorruptError, open_compressed
from dwindle.data.pydoc_text import pydoc_documents

HUB_PREFIX = "hf:"
PYDOC_IDS = {"pydoc": None, "pydoc:train": "train", "pydoc:valid": "valid"}
ACCEPTED = ".txt, .jsonl (each also .gz, .xz, .zst), .parquet, hf:org/name, pydoc"
INDEX_NAME = "index.json"

_TEXT_TYPES = ("string", "large_string", "string_view")
"""Of a column of Parquet, or of the categories in it."""
_SPLIT_NAMES = ("train", "validation", "valid", "dev", "test")


def read_documents(path_or_id: str, *, text_field: str = "text", option: str = "data") -> Iterator[str]:
    """The documents of one input, in order, without blank ones; ``option`` is the name used in error messages."""
    return open_input(path_or_id, text_field=text_field, option=option).documents()


def open_input(path_or_id: str, *, text_field: str = "text", option: str = "data") -> TextInput:
    """The reader for a file name or id; a missing file or unknown format is an error before anything is read."""
    if path_or_id in PYDOC_IDS:
        return PydocInput(path_or_id, option)
    if path_or_id.startswith(HUB_PREFIX):
        return HubInput(path_or_id, text_field, option)
    path = Path(path_or_id).expanduser()
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else None
    kind = suffixes[-1] if suffixes else ""
    if path.is_dir():
        raise UserError(
            f"{option}: {path_or_id} is a directory without {INDEX_NAME}: name the files in it, "
            f"such as {path / '*.txt'}, or a directory written by dwindle tokenize"
        )
    if not path.is_file():
        raise UserError(f"{option}: {path_or_id} does not exist: check the path")
    if kind == ".parquet" and compression is None:
        return ParquetInput(path, option, text_field=text_field)
    if kind == ".jsonl":
        return JsonLinesInput(path, option, text_field=text_field, compression=compression)
    if kind == ".txt":
        return PlainTextInput(path, option, compression=compression)
    raise UserError(f"{option}: {path_or_id} has an unknown format: use one of {ACCEPTED}; plain text must end in .txt")


def expand_inputs(paths: list[str], option: str = "data") -> list[str]:
    """Wildcards expanded (sorted), other names unchanged; an empty list or a wildcard without a match is an error."""
    if not paths:
        raise UserError(f"{option}: no files given: name at least one of {ACCEPTED}")
    expanded: list[str] = []
    for name in paths:
        is_pattern = glob.has_magic(name) and not name.startswith(HUB_PREFIX)
        if is_pattern and not Path(name).expanduser().exists():
            found = sorted(glob.glob(str(Path(name).expanduser()), recursive=True))
            if not found:
                raise UserError(f"{option}: no file matches {name}: check the pattern")
            expanded += found
        else:
            expanded.append(name)
    return expanded


class TextInput(ABC):
    """One input; ``position`` (of ``total``, in ``unit``) advances while ``documents()`` is iterated."""

    unit = "kB"

    def __init__(self, name: str, option: str) -> None:
        self.name = name
        self.option = option
        self.position = 0
        self.total = 0

    @abstractmethod
    def _texts(self) -> Iterator[str]: ...

    @abstractmethod
    def digest(self) -> tuple[int, str]:
        """Bytes and SHA-256 of the input."""

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every record with the number of its line or row, for inputs that have any."""
        raise self._error("is plain text, which has no conversations: give .jsonl, .parquet or hf:org/name")

    @property
    def cache_key(self) -> str:
        """Identifies the text in the cache of tokenized texts."""
        return self.digest()[1]

    def documents(self) -> Iterator[str]:
        """Every document that is not blank; an input without any is an error."""
        empty = True
        for text in self._texts():
            if text and not text.isspace():
                empty = False
                yield text
        if empty:
            raise self._error("contains no text: give a file with at least one document")

    def beginning(self, num_chars: int) -> tuple[list[str], float]:
        """The first documents with at least ``num_chars`` characters, and their approximate fraction of the input."""
        texts, seen = list[str](), 0
        for text in self.documents():
            texts.append(text)
            seen += len(text)
            if seen >= num_chars:
                return texts, self.share_read()
        return texts, 1.0

    def share_read(self) -> float:
        """Approximate fraction of the input that was read."""
        return min(max(self.position, 1) / max(self.total, 1), 1.0)

    def _text_of(self, record: dict[str, Any], field: str, line: int | None = None) -> str:
        if field not in record:
            raise self._error(_no_field(field, record), line)
        text = "" if record[field] is None else record[field]
        if not isinstance(text, str):
            raise self._error(f"has a field {field!r} that is not text", line)
        return without_lone_surrogates(text)

    def _error(self, problem: str, line: int | None = None) -> UserError:
        place = self.name if line is None else f"{self.name}:{line}"
        return UserError(f"{self.option}: {place} {problem}")


class FileInput(TextInput):
    """Common to all files: progress in bytes, the digest, and errors as one line."""

    def __init__(self, path: Path, option: str, *, text_field: str = "", compression: str | None = None) -> None:
        super().__init__(str(path), option)
        self.path, self.text_field, self.compression = path, text_field, compression
        self.total = path.stat().st_size // 1000
        self._digest: tuple[int, str] | None = None

    def digest(self) -> tuple[int, str]:
        if self._digest is None:
            with self._named_errors(), self.path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                self._digest = file.tell(), sha256
        return self._digest

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, CorruptError) as error:
            raise self._error(f"is damaged or truncated ({error}): fetch it again") from error
        except UnicodeDecodeError as error:
            raise self._error(self._conversion()) from error
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror or error})") from error

    def _conversion(self) -> str:
        """What is wrong with text that is not UTF-8, and the command that converts it; iconv's default is UTF-8."""
        if self.path.suffix.lower() in COMPRESSIONS:
            return "is not UTF-8 text: unpack and convert it"
        with self.path.open("rb") as file:
            head = file.read(1 << 16)
        utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if b"\0" in head and not utf16:
            return f"is binary, not text: name one of {ACCEPTED}"
        encoding, known = ("utf-16", "UTF-16") if utf16 else ("windows-1252", "perhaps Windows-1252")
        place, out = quote(self.name), quote(str(self.path.with_suffix(f".utf8{self.path.suffix}")))
        return f"is not UTF-8 text but {known}: convert it with iconv -f {encoding} -t utf-8 {place} > {out}"

    @contextmanager
    def _open_text(self, newline: str | None = None) -> Iterator[io.TextIOWrapper]:
        with self._named_errors(), self.path.open("rb") as raw:
            counted: io.BufferedReader = io.BufferedReader(_Counted(raw, self), buffer_size=1 << 17)
            binary = open_compressed(counted, self.compression, f"{self.option}: {self.name}")
            yield io.TextIOWrapper(binary, encoding="utf-8-sig", newline=newline)


class _Counted(io.RawIOBase):
    """Raw file reader that updates the position of its input."""

    def __init__(self, raw: BinaryIO, owner: FileInput) -> None:
        self._raw = raw
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._raw.read(len(buffer))
        buffer[: len(block)] = block
        self._owner.position = self._raw.tell() // 1000
        return len(block)

    def tell(self) -> int:
        return self._raw.tell()


class PlainTextInput(FileInput):
    """A whole file is one document."""

    def _texts(self) -> Iterator[str]:
        with self._open_text() as file:
            yield file.read()

    def whole(self) -> str:
        """The text with its line ends as they are."""
        with self._open_text(newline="") as file:
            return file.read()

    def beginning(self, num_chars: int) -> tuple[list[str], float]:
        """At most ``num_chars`` characters of the file are read."""
        with self._open_text() as file:
            text = file.read(num_chars)
            share = self.share_read() if file.read(1) else 1.0
        if not text or text.isspace():
            raise self._error("contains no text: give a file with at least one document")
        return [text], share


class JsonLinesInput(FileInput):
    """One JSON object per line, the document in one of its fields."""

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with self._open_text() as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield number, self._record_of(line, number)

    def _texts(self) -> Iterator[str]:
        for number, record in self.records():
            yield self._text_of(record, self.text_field, number)

    def _record_of(self, line: str, number: int) -> dict[str, Any]:
        try:
            record = parse_json(line)
        except ValueError as error:
            raise self._error(f"is not valid JSON ({error}): fix or remove the line", number) from error
        if not isinstance(record, dict):
            raise self._error('is not a JSON object: each line must look like {"text": …}', number)
        return record


class ParquetInput(FileInput):
    """One document per row, read in batches of rows; of texts only their column."""

    unit = "rows"

    def _texts(self) -> Iterator[str]:
        with self._opened() as (file, types):
            columns = file.schema_arrow.names
            if self.text_field not in columns:
                raise self._error(_no_field(self.text_field, columns))
            kind = file.schema_arrow.field(self.text_field).type
            if str(kind.value_type if types.is_dictionary(kind) else kind) not in _TEXT_TYPES:
                raise self._error(f"has a column {self.text_field!r} of {kind}, not text")
            for batch in file.iter_batches(batch_size=1024, columns=[self.text_field]):
                for text in batch.column(0).to_pylist():
                    self.position += 1
                    yield text or ""

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with self._opened() as (file, _):
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    self.position += 1
                    yield self.position, record

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The file and ``pyarrow.types``; errors of the library become one line."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise self._error("needs the pyarrow package: pip install pyarrow") from error
        self.position = 0
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                self.total = file.metadata.num_rows
                yield file, pyarrow.types
        except UnicodeDecodeError as error:
            raise self._error("holds text that is not UTF-8: write it again") from error
        except (pyarrow.ArrowException, OSError) as error:
            raise self._error(f"is damaged or not Parquet ({first_line(error)}): fetch it again") from error


class PydocInput(TextInput):
    """The language reference of CPython, whole or one side of its fixed split."""

    unit = "topics"

    def __init__(self, name: str, option: str) -> None:
        super().__init__(name, option)
        self._documents = pydoc_documents(PYDOC_IDS[name])
        self.total = len(self._documents)

    def _texts(self) -> Iterator[str]:
        for text in self._documents:
            yield text
            self.position += 1

    def digest(self) -> tuple[int, str]:
        content = "\0".join(self._documents).encode()
        return len(content), hashlib.sha256(content).hexdigest()


class HubInput(TextInput):
    """``hf:org/name[:config][:split]``, streamed, so that only what is read is downloaded.

    Its cache key is the id alone: a resumed run must map the same tokens even if the dataset has changed or the hub
    cannot be reached.
    """

    unit = "documents"

    def __init__(self, name: str, text_field: str, option: str) -> None:
        super().__init__(name, option)
        self.text_field = text_field
        self._sha = hashlib.sha256()
        self._bytes = 0
        parts = name.removeprefix(HUB_PREFIX).split(":")
        if not parts[0] or len(parts) > 3 or not all(parts):
            raise self._error("is not of the form hf:org/name[:config][:split]")
        if len(parts) == 2 and parts[1] in _SPLIT_NAMES:
            parts.insert(1, "")
        self.dataset, self.config, self.split = [*parts, "", ""][:3]
        self.split = self.split or "train"

    @property
    def cache_key(self) -> str:
        return self.name

    def digest(self) -> tuple[int, str]:
        """Digest of the text read so far, because a stream has no known size."""
        return self._bytes, self._sha.hexdigest()

    def _texts(self) -> Iterator[str]:
        for record in self._stream():
            text = self._text_of(record, self.text_field)
            self._hash(text)
            yield text

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for record in self._stream():
            self._hash(repr(record))
            yield self.position, record

    def _hash(self, text: str) -> None:
        encoded = text.encode(errors="replace")
        self._sha.update(encoded + b"\0")
        self._bytes += len(encoded)
        self.position += 1

    def _stream(self) -> Iterator[dict[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise self._error("needs the datasets package: pip install datasets") from error
        try:
            with _quiet_hub():
                stream = datasets.load_dataset(self.dataset, self.config or None, split=self.split, streaming=True)
                splits = getattr(stream.info, "splits", None) or {}
                self.total = getattr(splits.get(self.split), "num_examples", None) or 0
                records = iter(stream)
                first = list(islice(records, 1))
            yield from first
            yield from records
        except Exception as error:  # the library raises many types: network, missing id, missing split
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise self._error(f"cannot be read ({reason}): check the id, its split and the network") from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Silence the retries of the first request, which end in one error of ours; later ones are shown."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _no_field(field: str, names: Any) -> str:
    found = ", ".join(map(str, names)) or "none"
    return f"has no field {field!r} (it has: {found}): set data.text_field or --text-field"


def without_lone_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON allows and tokenizers reject, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
