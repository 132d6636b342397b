"""Token files hold what the tokenizer says, survive a round trip, and refuse everything that does not fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dwindle.core.errors import UserError
from dwindle.data import tokenizing as tokenizing_module
from dwindle.data.readers import open_input
from dwindle.data.token_files import open_token_files, write_inputs, write_token_files
from dwindle.data.tokenizing import DocumentEncoder, split_text, tokenizer_fingerprint
from dwindle.data.training_data import open_stream


def write_lines(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


@pytest.fixture
def documents(new_text: Callable[..., str]) -> list[str]:
    return [new_text(5 + 13 * i % 40, seed=i) for i in range(30)]


def expected_ids(tokenizer: Any, documents: list[str]) -> list[int]:
    ids: list[int] = []
    for text in documents:
        ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return ids


def test_contents_equal_the_tokenizer(tmp_path: Path, tokenizer: Any, documents: list[str]) -> None:
    inputs = [
        write_lines(tmp_path / "a.jsonl", documents[:20]),
        write_lines(tmp_path / "b.jsonl", documents[20:]),
    ]
    files = write_token_files(inputs, tokenizer, tmp_path / "out", shard_tokens=100)
    ids = expected_ids(tokenizer, documents)
    assert files.num_tokens == len(ids) and files.num_documents == len(documents)
    assert files.read(0, len(ids)).tolist() == ids
    for start, stop in [(0, 1), (99, 101), (50, 350), (100, 200), (len(ids) - 1, len(ids)), (7, 7)]:
        assert files.read(start, stop).tolist() == ids[start:stop]
    ends = np.cumsum([len(expected_ids(tokenizer, [text])) for text in documents]).tolist()
    assert files.document_starts.tolist() == [0, *ends[:-1]]

    index = json.loads((tmp_path / "out" / "index.json").read_text())
    raw = b"".join((tmp_path / "out" / shard["file"]).read_bytes() for shard in index["shards"])
    assert raw == np.array(ids, dtype="<u2").tobytes()
    assert index["sha256"] == hashlib.sha256(raw).hexdigest()
    assert [shard["tokens"] for shard in index["shards"][:-1]] == [100] * (len(ids) // 100)
    assert [entry["name"] for entry in index["inputs"]] == ["a.jsonl", "b.jsonl"]
    assert index["inputs"][0]["sha256"] == hashlib.sha256(Path(inputs[0]).read_bytes()).hexdigest()
    assert sum(entry["tokens"] for entry in index["inputs"]) == len(ids)
    assert index["tokenizer"] == tokenizer_fingerprint(tokenizer)
    open_token_files(tmp_path / "out").verify()


def test_same_bytes_whatever_the_shards_and_container(tmp_path: Path, tokenizer: Any, documents: list[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", documents)
    one = write_token_files([path], tokenizer, tmp_path / "one")
    many = write_token_files([path], tokenizer, tmp_path / "many", shard_tokens=64)
    memory = open_stream([path], DocumentEncoder(tokenizer))
    assert one.fingerprint == many.fingerprint == memory.fingerprint
    assert memory.read(0, len(memory)).tolist() == one.read(0, one.num_tokens).tolist()


def test_wide_vocabulary_takes_four_bytes(tmp_path: Path, text_file: Callable[..., str], new_tokenizer: Any) -> None:
    tokenizer = new_tokenizer(eos_token="<|endoftext|>")
    tokenizer.add_tokens([f"word{i}x" for i in range(66_000)])
    files = write_token_files([text_file()], tokenizer, tmp_path / "out")
    assert files.index["dtype"] == "uint32"
    assert files.read(0, 5).dtype == np.dtype("<u4")
    assert (tmp_path / "out" / "tokens-00000.bin").stat().st_size == 4 * files.num_tokens


def test_separator_and_start_tokens(new_tokenizer: Any) -> None:
    def ends(specials: tuple[str, ...], **names: Any) -> tuple[int, int | None]:
        encoder = DocumentEncoder(new_tokenizer(specials=specials, **names))
        [piece] = encoder.encode(["the cat"])
        has_start = encoder.beginning_of_text is not None and piece.ids[0] == encoder.beginning_of_text
        assert has_start == (encoder.beginning_of_text is not None)
        assert piece.ids[-1] == encoder.end_of_text
        return encoder.end_of_text, encoder.beginning_of_text

    chat = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert ends(chat, bos_token="<|im_start|>", eos_token="<|im_end|>") == (0, None)
    llama2 = ("<unk>", "<s>", "</s>")
    assert ends(llama2, bos_token="<s>", eos_token="</s>", add_bos=True) == (2, 1)
    assert ends(llama2, bos_token="<s>", eos_token="</s>") == (2, None)
    llama3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    assert ends(llama3, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", add_bos=True) == (1, 0)
    assert ends(("<s>",), bos_token="<s>", add_bos=True) == (0, None)
    with pytest.raises(UserError, match="no end-of-text"):
        DocumentEncoder(new_tokenizer(specials=("<unk>",)))


def test_fingerprint_survives_use_and_saving(tmp_path: Path, tokenizer: Any, new_tokenizer: Any) -> None:
    before = tokenizer_fingerprint(tokenizer)
    used = new_tokenizer(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    used(["a cat", "the cat sat on"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(used) == before
    [piece] = DocumentEncoder(used).encode(["the cat sat on the mat"])
    assert len(piece.ids) > 3, "truncation left on by an earlier call must not cut training text"
    used.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(type(used).from_pretrained(tmp_path)) == before
    assert tokenizer_fingerprint(new_tokenizer(280, eos_token="<|endoftext|>")) != before


def test_long_documents_are_encoded_in_pieces(
    tokenizer: Any, new_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = new_text(3000)
    assert "".join(split_text(text, 777)) == text
    assert max(map(len, split_text("x" * 2000, 777))) == 777
    [whole] = DocumentEncoder(tokenizer).encode([text])
    monkeypatch.setattr(tokenizing_module, "_PIECE_CHARS", 1000)
    monkeypatch.setattr(tokenizing_module, "_BATCH_CHARS", 2500)
    pieces = list(DocumentEncoder(tokenizer).encode([text, "a cat"]))
    assert [piece.starts_document for piece in pieces] == [True, *[False] * (len(pieces) - 2), True]
    assert sum(int((piece.ids == 0).sum()) for piece in pieces) == 2
    together = np.concatenate([piece.ids for piece in pieces[:-1]])
    assert tokenizer.decode(together[:-1]) == text
    assert abs(len(together) - len(whole.ids)) <= len(pieces)


def test_max_tokens_stops(tmp_path: Path, tokenizer: Any, documents: list[str]) -> None:
    inputs = [open_input(name) for name in (write_lines(tmp_path / "a.jsonl", documents), "pydoc")]
    files = write_inputs(inputs, DocumentEncoder(tokenizer), tmp_path / "out", max_tokens=57)
    assert files.num_tokens == 57
    assert files.read(0, 57).tolist() == expected_ids(tokenizer, documents)[:57]
    assert len(files.index["inputs"]) == 1


def test_existing_output_is_refused_or_replaced(tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]) -> None:
    first, second = text_file("a.txt", seed=1), text_file("b.txt", seed=2)
    out = tmp_path / "out"
    one = write_token_files([first], tokenizer, out)
    with pytest.raises(UserError, match=r"already exists: .*--overwrite"):
        write_token_files([second], tokenizer, out)
    assert open_token_files(out).fingerprint == one.fingerprint
    two = write_token_files([second], tokenizer, out, overwrite=True)
    assert two.fingerprint != one.fingerprint
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="already exists and has no"):
        write_token_files([first], tokenizer, precious, overwrite=True)
    assert (precious / "thesis.txt").exists()


def test_nothing_is_left_after_a_failure(tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{broken\n')
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=r"bad\.jsonl:2"):
        write_token_files([str(bad)], tokenizer, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_full_disk_is_one_line(tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(UserError, match="cannot be written"):
        write_token_files([text_file()], tokenizer, blocked / "out")


def test_what_killed_processes_left_is_removed(tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]) -> None:
    import socket

    dead = tmp_path / f".out.writing-{socket.gethostname()}-999999999"
    alive = tmp_path / f".out.writing-{socket.gethostname()}-1"
    elsewhere = tmp_path / ".out.writing-otherhost-999999999"
    for path in (dead, alive, elsewhere):
        path.mkdir()
    write_token_files([text_file()], tokenizer, tmp_path / "out")
    assert not dead.exists() and alive.exists() and elsewhere.exists()


def test_damage_is_found(tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]) -> None:
    out = tmp_path / "out"
    write_token_files([text_file()], tokenizer, out, shard_tokens=100)
    shard = out / "tokens-00001.bin"
    good = shard.read_bytes()
    shard.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    files = open_token_files(out)
    with pytest.raises(UserError, match=r"tokens-00001\.bin is damaged \(its content differs"):
        files.verify()
    shard.write_bytes(good[:-2])
    with pytest.raises(UserError, match=r"tokens-00001\.bin is damaged \(it has 198 bytes, the index says 200\)"):
        open_token_files(out)
    shard.unlink()
    with pytest.raises(UserError, match=r"tokens-00001\.bin is damaged \(it is missing\)"):
        open_token_files(out)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda index: index.update(format=99), "format 99"),
        (lambda index: index.update(kind="other"), "this version reads"),
        (lambda index: index.pop("sha256"), "missing or wrong"),
        (lambda index: index.update(dtype="float64"), "missing or wrong"),
        (lambda index: index.update(tokens=1), "do not add up"),
        (lambda index: index["shards"][0].update(file="../secret"), "not a plain file name"),
    ],
)
def test_odd_indexes_are_refused(
    tmp_path: Path, tokenizer: Any, text_file: Callable[..., str], change: Callable[[Any], Any], expected: str
) -> None:
    write_token_files([text_file()], tokenizer, tmp_path / "out")
    path = tmp_path / "out" / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=expected):
        open_token_files(tmp_path / "out")
    path.write_text("{")
    with pytest.raises(UserError, match="not an index"):
        open_token_files(tmp_path / "out")


def test_other_tokenizer_is_refused(
    tmp_path: Path, tokenizer: Any, new_tokenizer: Any, text_file: Callable[..., str]
) -> None:
    write_token_files([text_file()], tokenizer, tmp_path / "out")
    open_stream([str(tmp_path / "out")], DocumentEncoder(tokenizer))
    other = DocumentEncoder(new_tokenizer(280, eos_token="<|endoftext|>"))
    with pytest.raises(UserError, match=r"data.train: the tokenizer of .*out does not match the model's: run dwindle"):
        open_stream([str(tmp_path / "out")], other, option="data.train")


def test_cache_is_written_once_per_content_and_tokenizer(
    tmp_path: Path, tokenizer: Any, new_tokenizer: Any, text_file: Callable[..., str]
) -> None:
    cache = tmp_path / "cache"
    path = text_file("books.txt")

    def use(**options: Any) -> set[str]:
        encoder = options.pop("encoder", DocumentEncoder(tokenizer))
        open_stream([path], encoder, cache_dir=cache, **options)
        return {entry.name for entry in cache.iterdir()}

    [first] = use()
    assert first.startswith("books-txt-")
    stamp = (cache / first / "index.json").stat().st_mtime_ns
    assert use() == {first}
    assert (cache / first / "index.json").stat().st_mtime_ns == stamp
    assert len(use(encoder=DocumentEncoder(new_tokenizer(280, eos_token="<|endoftext|>")))) == 2
    assert len(use(max_tokens=50)) == 3
    text_file("books.txt", seed=5)
    assert len(use()) == 4
