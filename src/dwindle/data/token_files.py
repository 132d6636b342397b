"""Token files: a directory of memory-mapped shards, written once and read by any number of runs.

    index.json          dtype, shards with SHA-256, tokenizer fingerprint, inputs, separator
    tokens-00000.bin    little-endian uint16 (vocabulary up to 65536) or uint32, documents concatenated
    documents.bin       little-endian uint64, start of each document
    answers.bin         of conversations: little-endian uint64 pairs, tokens [start, stop) that are learned
    conversations.bin   of conversations: little-endian uint64, start of each

The shards form one sequence; a document may cross a shard boundary. Of conversations, a document is one example; a
conversation has several where the chat template changes earlier turns.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError
from dwindle.core.files import atomic_directory, refuse_sources
from dwindle.core.progress import Bar
from dwindle.core.reading import read_json
from dwindle.core.sizes import at_least
from dwindle.data.chat import ChatEncoder
from dwindle.data.readers import INDEX_NAME, TextInput, expand_inputs, open_input
from dwindle.data.tokenizing import DocumentEncoder, EncodedPiece, Tokens, check_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
DEFAULT_SHARD_TOKENS = 1 << 28

_KIND = "dwindle-tokens"
_CHAT_KIND = "dwindle-chat-tokens"
_DOCUMENTS_NAME = "documents.bin"
_ANSWERS_NAME = "answers.bin"
_CONVERSATIONS_NAME = "conversations.bin"
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_HASH_BLOCK_BYTES = 1 << 20


class TokenFiles:
    """Memory-mapped token files; sizes are checked on opening, contents by ``verify()``."""

    def __init__(self, directory: Path, index: dict[str, Any]) -> None:
        self.directory = directory
        self.index = index
        self.num_tokens: int = index["tokens"]
        self.num_documents: int = index["documents"]["count"]
        self.tokenizer_fingerprint: str = index["tokenizer"]
        self.fingerprint: str = index["sha256"]
        self.template_fingerprint: str | None = index.get("template")
        """Fingerprint of the chat template; None for text."""
        dtype = np.dtype(_DTYPES[index["dtype"]])
        self._shards = [np.memmap(directory / shard["file"], dtype=dtype, mode="r") for shard in index["shards"]]
        self._ends = list(accumulate(len(shard) for shard in self._shards))
        self._starts = np.memmap(directory / _DOCUMENTS_NAME, dtype="<u8", mode="r")
        self.answers: npt.NDArray[np.uint64] | None = None
        """For conversations: spans [start, stop) of the learned tokens, in order, one per row."""
        self.conversation_starts: npt.NDArray[np.uint64] | None = None
        """For conversations: position of the first token of each."""
        if self.template_fingerprint is not None:
            self.conversation_starts = np.memmap(directory / _CONVERSATIONS_NAME, dtype="<u8", mode="r")
            self.answers = np.memmap(directory / _ANSWERS_NAME, dtype="<u8", mode="r").reshape(-1, 2)
            learned = self.template_fingerprint + index["answers"]["sha256"]
            self.fingerprint = hashlib.sha256((self.fingerprint + learned).encode()).hexdigest()

    @property
    def label(self) -> str:
        return str(self.directory)

    @property
    def document_starts(self) -> npt.NDArray[np.uint64]:
        return self._starts

    def read(self, start: int, stop: int) -> Tokens:
        """Token ids [start, stop): a view of the memory map, or a copy if the range crosses shards."""
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, max(start, stop - 1))
        if first == last:
            offset = self._ends[first] - len(self._shards[first])
            return self._shards[first][start - offset : stop - offset]
        border = self._ends[first]
        return np.concatenate([self.read(start, border), self.read(border, stop)])

    def verify(self) -> None:
        """Compare the SHA-256 of every file with the index; raises UserError naming the file that differs."""
        entries = [*self.index["shards"], {"file": _DOCUMENTS_NAME, **self.index["documents"]}]
        if "answers" in self.index:
            entries.append({"file": _ANSWERS_NAME, **self.index["answers"]})
            entries.append({"file": _CONVERSATIONS_NAME, **self.index["conversations"]})
        total = sum((self.directory / entry["file"]).stat().st_size for entry in entries)
        with Bar(f"checking {self.directory.name} (kB)", max(total // 1000, 1)) as bar:
            for entry in entries:
                if _sha256_of(self.directory / entry["file"], bar) != entry["sha256"]:
                    raise _damaged(self.directory / entry["file"], "its content differs from its checksum")

    def check_ids(self, num_embeddings: int | None, option: str = "data") -> None:
        """Raise UserError for token ids beyond the model's embedding; every token is looked at."""
        if num_embeddings is None or num_embeddings > np.iinfo(self._shards[0].dtype).max:
            return
        for shard in self._shards:
            for start in range(0, len(shard), _HASH_BLOCK_BYTES):
                largest = int(shard[start : start + _HASH_BLOCK_BYTES].max())
                check_ids(largest, num_embeddings, f"{option}: {self.directory} holds")

    def of_encoder(self, encoder: DocumentEncoder, option: str) -> TokenFiles:
        """These files; UserError unless the encoder could have written them, and its model has their ids."""
        ours, theirs = self.template_fingerprint, encoder.template_fingerprint
        if encoder.fingerprint != self.tokenizer_fingerprint:
            raise UserError(
                f"{option}: the tokenizer of {self.directory} does not match the model's: "
                "run dwindle tokenize again with --model set to this model"
            )
        if theirs is None and ours is not None:
            raise UserError(f"{option}: {self.directory} holds conversations: name it in task.chat")
        if theirs is not None and ours is None:
            raise UserError(f"{option}: {self.directory} holds text, not conversations: name it in data.train")
        if theirs != ours:
            raise UserError(f"{option}: {self.directory} was written with another chat template: render it again")
        self.check_ids(encoder.num_embeddings, option)
        return self


def is_token_files(path: str) -> bool:
    """Whether a path is a directory of token files rather than text."""
    return (Path(path).expanduser() / INDEX_NAME).is_file()


def open_token_files(directory: str | Path) -> TokenFiles:
    """Map token files; missing files, another format or wrong sizes are errors."""
    folder = Path(directory).expanduser()
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        raise UserError(f"{folder} has no {INDEX_NAME}: give a directory written by dwindle tokenize")
    try:
        index = read_json(index_path)
        is_ours = index["kind"] == (_CHAT_KIND if "answers" in index else _KIND)
    except (UserError, KeyError, TypeError) as error:
        raise _damaged(index_path, "it is not an index of token files") from error
    if not is_ours or index.get("format") != FORMAT:
        raise UserError(
            f"{index_path} has format {index.get('format')!r}, this version reads {FORMAT}: run dwindle tokenize again"
        )
    try:
        _check_sizes(folder, index)
        return TokenFiles(folder, index)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(index_path, f"an entry is missing or wrong ({error})") from error
    except OSError as error:
        raise _damaged(folder, f"a file cannot be mapped ({error.strerror or error})") from error


def write_token_files(
    inputs: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    text_field: str = "text",
    overwrite: bool = False,
    chat: bool = False,
    option: str = "data",
) -> TokenFiles:
    """Tokenize every input, in order, into one directory, which appears once it is complete.

    With ``chat`` the inputs are conversations.
    """
    names, out = expand_inputs(list(inputs), option), Path(out_dir).expanduser()
    refuse_sources(out, names)
    encoder = ChatEncoder(tokenizer) if chat else DocumentEncoder(tokenizer)
    opened = [open_input(name, text_field=text_field, option=option) for name in names]
    return write_inputs(opened, encoder, out, shard_tokens=shard_tokens, overwrite=overwrite)


def write_inputs(
    inputs: Sequence[TextInput],
    encoder: DocumentEncoder,
    out_dir: Path,
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    max_tokens: int | None = None,
    overwrite: bool = False,
    keep_existing: bool = False,
    out_option: str = "--out",
) -> TokenFiles:
    """``write_token_files`` for readers and an encoder that are already open.

    ``max_tokens`` stops early, for text that is longer than needed. ``keep_existing`` is for caches: if another process
    was faster, its equal result is used. ``out_option`` is the option named in messages about ``out_dir``.
    """
    at_least(1, shard_tokens=shard_tokens, max_tokens=max_tokens)
    with atomic_directory(
        out_dir, marker=INDEX_NAME, overwrite=overwrite, keep_existing=keep_existing, option=out_option
    ) as folder:
        with _ShardWriter(folder, encoder.dtype, shard_tokens, max_tokens) as writer:
            entries = [_write_input(source, encoder, writer) for source in inputs if not writer.is_full]
        index = {
            "kind": _KIND,
            "format": FORMAT,
            "dtype": encoder.dtype.name,
            "tokens": writer.num_tokens,
            "sha256": writer.sha256,
            "shards": writer.shards,
            "documents": writer.write_document_starts(),
            "tokenizer": encoder.fingerprint,
            "end_of_text": encoder.end_of_text,
            "beginning_of_text": encoder.beginning_of_text,
            "inputs": entries,
        }
        if encoder.template_fingerprint is not None:
            index |= {"kind": _CHAT_KIND, "template": encoder.template_fingerprint, **writer.write_answers()}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return open_token_files(out_dir)


class _ShardWriter:
    """Appends ids to shards of a fixed number of tokens and hashes them."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], shard_tokens: int, max_tokens: int | None) -> None:
        self.num_tokens = 0
        self.shards: list[dict[str, Any]] = []
        self._folder = folder
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._max_tokens = max_tokens
        self._stream_hash = hashlib.sha256()
        self._starts = array("Q")
        self._answers: list[npt.NDArray[np.uint64]] = []
        self._conversations: list[int] = []
        self._file: BinaryIO | None = None
        self._shard_hash = hashlib.sha256()
        self._in_shard = 0

    def __enter__(self) -> _ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._close_shard()
        elif self._file is not None:
            self._file.close()

    @property
    def is_full(self) -> bool:
        return self._max_tokens is not None and self.num_tokens >= self._max_tokens

    @property
    def sha256(self) -> str:
        return self._stream_hash.hexdigest()

    def append(self, piece: EncodedPiece) -> None:
        if piece.starts_document:
            self._starts.append(self.num_tokens)
        if piece.answers is not None:
            self._answers.append(piece.answers + np.uint64(self.num_tokens))
            if piece.starts_conversation:
                self._conversations.append(self.num_tokens)
        room = None if self._max_tokens is None else self._max_tokens - self.num_tokens
        ids = piece.ids[:room]
        self.num_tokens += len(ids)
        while len(ids):
            part = ids[: self._shard_tokens - self._in_shard]
            self._write(part)
            ids = ids[len(part) :]

    def write_document_starts(self) -> dict[str, Any]:
        return self._write_numbers(_DOCUMENTS_NAME, np.array(self._starts))

    def write_answers(self) -> dict[str, Any]:
        return {
            "answers": self._write_numbers(_ANSWERS_NAME, np.concatenate(self._answers)),
            "conversations": self._write_numbers(_CONVERSATIONS_NAME, np.array(self._conversations)),
        }

    def _write_numbers(self, name: str, numbers: npt.NDArray[Any]) -> dict[str, Any]:
        content = numbers.astype("<u8").tobytes()
        (self._folder / name).write_bytes(content)
        return {"count": len(numbers), "sha256": hashlib.sha256(content).hexdigest()}

    def _write(self, part: Tokens) -> None:
        if self._file is None:
            self._file = (self._folder / f"tokens-{len(self.shards):05d}.bin").open("wb")
            self._shard_hash = hashlib.sha256()
            self._in_shard = 0
        content = part.astype(self._dtype, copy=False).tobytes()
        self._file.write(content)
        self._shard_hash.update(content)
        self._stream_hash.update(content)
        self._in_shard += len(part)
        if self._in_shard == self._shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self.shards.append(
            {
                "file": f"tokens-{len(self.shards):05d}.bin",
                "tokens": self._in_shard,
                "sha256": self._shard_hash.hexdigest(),
            }
        )
        self._file = None
        self._in_shard = 0


def _write_input(source: TextInput, encoder: DocumentEncoder, writer: _ShardWriter) -> dict[str, Any]:
    tokens_before = writer.num_tokens
    for piece in _with_progress(source, encoder):
        writer.append(piece)
        if writer.is_full:
            break
    size, sha256 = source.digest()
    tokens = writer.num_tokens - tokens_before
    return {"name": Path(source.name).name, "bytes": size, "sha256": sha256, "tokens": tokens}


def _with_progress(source: TextInput, encoder: DocumentEncoder) -> Iterator[EncodedPiece]:
    pieces = encoder.encode_input(source)
    first = next(pieces)  # some readers know their total only once they have started
    yield first
    shown = 0
    name = Path(source.name).name
    with Bar(f"tokenizing {name} ({source.unit})", max(source.total, source.position, 1)) as bar:
        for piece in pieces:
            bar.advance(source.position - shown)
            shown = source.position
            yield piece


def _check_sizes(folder: Path, index: dict[str, Any]) -> None:
    if sum(shard["tokens"] for shard in index["shards"]) != index["tokens"]:
        raise ValueError("token counts do not add up")
    texts = [index["tokenizer"], index["sha256"], *(e["sha256"] for e in (*index["shards"], index["documents"]))]
    counts = [index["tokens"], index["documents"]["count"], *(shard["tokens"] for shard in index["shards"])]
    if "answers" in index:
        texts += [index["template"], index["answers"]["sha256"], index["conversations"]["sha256"]]
        counts += [index["answers"]["count"], index["conversations"]["count"]]
    if not all(type(text) is str for text in texts) or not all(type(n) is int and n > 0 for n in counts):
        raise ValueError("a checksum or a count is not one")
    item_bytes = np.dtype(_DTYPES[index["dtype"]]).itemsize
    expected = {shard["file"]: shard["tokens"] * item_bytes for shard in index["shards"]}
    expected[_DOCUMENTS_NAME] = index["documents"]["count"] * 8
    if "answers" in index:
        expected[_ANSWERS_NAME] = index["answers"]["count"] * 16
        expected[_CONVERSATIONS_NAME] = index["conversations"]["count"] * 8
    for name, size in expected.items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a plain file name")
        path = folder / name
        if not path.is_file():
            raise _damaged(path, "it is missing")
        if path.stat().st_size != size:
            raise _damaged(path, f"it has {path.stat().st_size} bytes, the index says {size}")


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(
        f"{path} is damaged ({problem}): delete the directory {path if path.is_dir() else path.parent} "
        "and tokenize again"
    )


def _sha256_of(path: Path, bar: Bar) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            sha.update(block)
            bar.advance(len(block) // 1000)
    return sha.hexdigest()
