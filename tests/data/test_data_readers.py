"""Every kind of input gives the same documents, and every fault is one line that names the file."""

from __future__ import annotations

import gzip
import json
import logging
import lzma
import random
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dwindle.core.errors import UserError
from dwindle.data.pydoc_text import paragraphs, pydoc_documents
from dwindle.data.readers import expand_inputs, open_input, read_documents

DOCUMENTS = ["first document\nwith two lines", "zweites – größer", "third 日本語"]


def as_lines(documents: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "n": 1}) + "\n" for text in documents).encode()


def zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    compressed: bytes = zstandard.ZstdCompressor().compress(content)
    return compressed


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def complaint(path: Path | str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        list(read_documents(str(path), **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_and_text(tmp_path: Path, suffix: str) -> None:
    lines, plain = tmp_path / f"a.jsonl{suffix}", tmp_path / f"b.txt{suffix}"
    lines.write_bytes(COMPRESS[suffix](as_lines(DOCUMENTS)))
    plain.write_bytes(COMPRESS[suffix](DOCUMENTS[0].encode()))
    assert list(read_documents(str(lines))) == DOCUMENTS
    assert list(read_documents(str(plain))) == DOCUMENTS[:1]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damaged_compression_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    content = COMPRESS[suffix](as_lines([f"{i} {text}" for i in range(500) for text in DOCUMENTS]))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"no archive" + content[10:])
    message = complaint(path)
    assert "a.jsonl" in message and "damaged" in message


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_several_frames_are_one_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](as_lines(DOCUMENTS[:1])) + COMPRESS[suffix](as_lines(DOCUMENTS[1:])))
    assert list(read_documents(str(path))) == DOCUMENTS


def test_other_field_blank_lines_and_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + as_lines([*DOCUMENTS, "  "], "body") + b'\n{"body": "half \\ud800 pair"}\r\n')
    assert list(read_documents(str(path), text_field="body")) == [*DOCUMENTS, "half � pair"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json", ":2 is not valid JSON"),
        ("[1, 2]", ":2 is not a JSON object"),
        ('{"body": "x"}', ":2 has no field 'text' (it has: body): set data.text_field"),
        ('{"text": 3}', ":2 has a field 'text' that is not text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    assert "a.jsonl" + expected in complaint(path)


def test_missing_empty_unknown_and_not_utf8(tmp_path: Path) -> None:
    message = complaint(tmp_path / "books.txt", option="data.train")
    assert message.startswith("data.train: ") and "books.txt does not exist" in message
    (tmp_path / "blank.txt").write_text(" \n\n")
    assert "blank.txt contains no text" in complaint(tmp_path / "blank.txt")
    (tmp_path / "blank.jsonl").write_text("")
    assert "blank.jsonl contains no text" in complaint(tmp_path / "blank.jsonl")
    (tmp_path / "a.docx").write_text("x")
    assert ".jsonl" in complaint(tmp_path / "a.docx") and ".parquet" in complaint(tmp_path / "a.docx")
    (tmp_path / "notes.md").write_text("x")
    assert complaint(tmp_path / "notes.md").endswith("plain text must end in .txt")
    assert "is a directory" in complaint(tmp_path)
    (tmp_path / "photo.txt").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    assert "photo.txt is binary, not text" in complaint(tmp_path / "photo.txt")


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16"])
@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
def test_the_command_for_text_that_is_not_utf8_converts_it(encoding: str, tmp_path: Path) -> None:
    """It is pasted into a shell; without -f, iconv would take UTF-8 for granted and fail, too."""
    text = "“größer” – it’s 5 €"
    (tmp_path / "my text.txt").write_bytes(text.encode(encoding))
    message = complaint(tmp_path / "my text.txt")
    assert "not UTF-8" in message
    subprocess.run(["sh", "-c", message.partition("convert it with ")[2]], check=True)
    assert list(read_documents(str(tmp_path / "my text.utf8.txt"))) == [text]


def test_compressed_text_that_is_not_utf8_is_unpacked_first(tmp_path: Path) -> None:
    (tmp_path / "latin.txt.gz").write_bytes(gzip.compress("größer".encode("latin-1")))
    assert "not UTF-8 text: unpack and convert it" in complaint(tmp_path / "latin.txt.gz")


def test_wildcards_are_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("x")
    found = expand_inputs([str(tmp_path / "*.txt"), "pydoc"])
    assert [Path(name).name for name in found] == ["a.txt", "b.txt", "pydoc"]
    with pytest.raises(UserError, match="no file matches"):
        expand_inputs([str(tmp_path / "*.jsonl")])
    with pytest.raises(UserError, match="no files given"):
        expand_inputs([])


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [*DOCUMENTS, None], "n": [1, 2, 3, 4]}), path, row_group_size=2)
    assert list(read_documents(str(path))) == DOCUMENTS
    assert "has no field 'body' (it has: text, n)" in complaint(path, text_field="body")
    assert "not text" in complaint(path, text_field="n")
    path.write_bytes(path.read_bytes()[:-30])
    assert "damaged" in complaint(path)


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "large_string"])
def test_all_kinds_of_text_in_parquet(tmp_path: Path, kind: str) -> None:
    """Categories of pandas and polars, and views, are text too; a row without text is left out, as in JSON lines."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array([*DOCUMENTS, None, DOCUMENTS[0]])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in column.to_pylist()))
    for name in ("a.parquet", "a.jsonl"):
        assert list(read_documents(str(tmp_path / name))) == [*DOCUMENTS, DOCUMENTS[0]]


def test_parquet_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    """Its bytes are not checked by whoever writes the file."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    offsets = pyarrow.array([0, 2], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(b"\xff\xfe")])
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    assert "a.parquet" in (found := complaint(tmp_path / "a.parquet")) and "not UTF-8" in found


def test_zst_with_a_long_window(tmp_path: Path) -> None:
    """``zstd --long=31``, as large collections of comments are compressed."""
    zstandard = pytest.importorskip("zstandard")
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(as_lines(DOCUMENTS)) + compressor.flush())
    assert list(read_documents(str(tmp_path / "a.jsonl.zst"))) == DOCUMENTS


def test_missing_packages_give_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "zstandard", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    assert "pip install pyarrow" in complaint(tmp_path / "a.parquet")
    assert "pip install datasets" in complaint("hf:org/name")
    if sys.version_info < (3, 14):
        (tmp_path / "a.txt.zst").write_bytes(b"x")
        assert "pip install zstandard" in complaint(tmp_path / "a.txt.zst")


def test_hub_ids_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Stream:
        info = types.SimpleNamespace(splits={})

        def __iter__(self) -> Any:
            return iter([{"text": text} for text in DOCUMENTS])

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Stream:
        calls.append((path, config, split, streaming))
        if path == "org/none":
            raise ConnectionError("no route\nto host")
        return Stream()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for name in ("hf:org/name", "hf:org/name:test", "hf:org/name:en", "hf:org/name:en:test"):
        assert list(read_documents(name)) == DOCUMENTS
    assert calls == [
        ("org/name", None, "train", True),
        ("org/name", None, "test", True),
        ("org/name", "en", "train", True),
        ("org/name", "en", "test", True),
    ]
    assert "cannot be read (ConnectionError: no route)" in complaint("hf:org/none")
    assert "hf:org/name[:config][:split]" in complaint("hf:a:b:c:d")
    assert open_input("hf:org/name:en").cache_key == "hf:org/name:en"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.xz", "pydoc"])
def test_the_beginning_says_about_how_much_there_is(name: str, tmp_path: Path) -> None:
    """A share of the file that was read, in blocks; what fits is read whole."""
    rng, path = random.Random(0), str(tmp_path / name)
    lines = [" ".join(f"{rng.random():.6f}" for _ in range(40)) for _ in range(5000)]
    opener: Any = {"gz": gzip.open, "xz": lzma.open}.get(name.rpartition(".")[2], open)
    if name == "pydoc":
        path = name
    else:
        with opener(path, "wt") as file:
            file.writelines(json.dumps({"text": line}) + "\n" if ".jsonl" in name else f"{line}\n" for line in lines)
    whole = sum(len(text) for text in read_documents(path))
    texts, share = open_input(path).beginning(whole // 2)
    assert share < 0.8 and sum(map(len, texts)) / share == pytest.approx(whole, rel=0.3)
    texts, share = open_input(path).beginning(2 * whole)
    assert share == 1 and sum(map(len, texts)) == whole


def test_the_hub_is_asked_quietly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its library tells every retry; our error says it once. Later, when text flows, it may speak again."""
    logger = logging.getLogger("huggingface_hub.utils._http")

    class Stream:
        info = types.SimpleNamespace(splits=None)

        def __iter__(self) -> Any:
            for text in DOCUMENTS:
                logger.warning("Retrying in 1s before %s", text)
                yield {"text": text}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: Stream()))
    level = logging.getLogger("huggingface_hub").level
    assert list(read_documents("hf:org/name")) == DOCUMENTS
    assert [record.args for record in caplog.records] == [(text,) for text in DOCUMENTS[1:]]
    assert logging.getLogger("huggingface_hub").level == level


def test_pydoc_split_shares_no_text() -> None:
    everything, train, valid = (pydoc_documents(split) for split in (None, "train", "valid"))
    assert list(read_documents("pydoc")) == everything
    assert sorted(train + valid) == sorted(everything)
    share = sum(map(len, valid)) / sum(map(len, everything))
    assert 0.07 < share <= 0.10
    trained = {paragraph for text in train for paragraph in paragraphs(text)}
    validated = {paragraph for text in valid for paragraph in paragraphs(text)}
    assert len(validated) > 50
    assert not trained & validated
