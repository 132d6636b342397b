"""From a recipe's [data] table to samples; validation and calibration windows; text that is in both is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.data.batches import BatchStream
from dwindle.data.config import DataConfig, SourceConfig
from dwindle.data.text_windows import calibration_windows, validation_windows
from dwindle.data.token_files import write_token_files
from dwindle.data.tokenizing import DocumentEncoder
from dwindle.data.training_data import open_stream, open_training_data
from dwindle.recipe.recipe import Recipe


def packed_ids(tokenizer: Any, paths: list[str]) -> list[int]:
    stream = open_stream(paths, DocumentEncoder(tokenizer))
    return stream.read(0, len(stream)).tolist()


def test_validation_windows_are_in_order(tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]) -> None:
    paths = [text_file("a.txt", 300, 1), text_file("b.txt", 300, 2)]
    ids = packed_ids(tokenizer, paths)
    windows = validation_windows(paths, tokenizer, 16, 10**9)
    expected = [ids[i : i + 17] for i in range(0, len(ids) - 16, 16)]
    assert windows.tolist() == expected
    few = validation_windows(paths, tokenizer, 16, 16 * 5 + 3)
    assert few.tolist() == [expected[row * len(expected) // 5] for row in range(5)]
    cached = validation_windows(paths, tokenizer, 16, 10**9, cache_dir=tmp_path / "cache")
    write_token_files(paths, tokenizer, tmp_path / "tokens")
    from_files = validation_windows([str(tmp_path / "tokens")], tokenizer, 16, 10**9)
    assert torch.equal(cached, windows) and torch.equal(from_files, windows)
    with pytest.raises(UserError, match=r"data\.valid: only"):
        validation_windows(paths, tokenizer, 10_000, 10**9)


def test_calibration_windows_are_seeded_and_disjoint(
    tmp_path: Path, tokenizer: Any, new_text: Callable[..., str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": new_text(150, seed=i)}) + "\n" for i in range(40)))
    options: dict[str, Any] = {"num_sequences": 20, "seq_len": 16}
    windows, _ = calibration_windows([str(path)], tokenizer, seed=0, **options)
    assert windows.shape == (20, 16) and windows.dtype == torch.int64
    assert torch.equal(windows, calibration_windows([str(path)], tokenizer, seed=0, **options)[0])
    assert not torch.equal(windows, calibration_windows([str(path)], tokenizer, seed=1, **options)[0])
    assert len({tuple(row) for row in windows.tolist()}) == 20
    text = "\n".join(map(str, packed_ids(tokenizer, [str(path)])))
    inside = [row for row in windows.tolist() if 0 not in row]
    assert inside and all("\n".join(map(str, row)) in text for row in inside)


def test_calibration_of_token_files_and_short_text(
    tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]
) -> None:
    path = text_file(num_words=60)
    num_tokens = len(packed_ids(tokenizer, [path]))
    write_token_files([path], tokenizer, tmp_path / "tokens")
    short: dict[str, Any] = {"num_sequences": 30, "seq_len": num_tokens // 2, "seed": 0}
    windows, _ = calibration_windows([path], tokenizer, **short)
    assert windows.shape == (30, num_tokens // 2)
    assert len({tuple(row) for row in windows.tolist()}) > 20
    assert torch.equal(calibration_windows([str(tmp_path / "tokens")], tokenizer, **short)[0], windows)
    whole, _ = calibration_windows([path], tokenizer, num_sequences=1, seq_len=num_tokens, seed=0)
    assert whole.tolist() == [packed_ids(tokenizer, [path])]
    with pytest.raises(UserError, match=rf"--data: only {num_tokens} tokens, a sequence needs {num_tokens + 1}"):
        calibration_windows([path], tokenizer, num_sequences=2, seq_len=num_tokens + 1, seed=0)
    with pytest.raises(UserError, match="num_sequences"):
        calibration_windows([path], tokenizer, num_sequences=0, seq_len=4, seed=0)


def test_recipe_to_batches(tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]) -> None:
    books, web = text_file("books.txt", 600, 1), text_file("web.txt", 400, 2)
    config = DataConfig(
        sources={"books": SourceConfig(paths=[books], weight=3.0), "web": SourceConfig(paths=[web], weight=1.0)},
        valid=[text_file("valid.txt", 300, 3)],
        seq_len=16,
        valid_tokens="64",
    )
    data = open_training_data(config, tokenizer, seed=7, cache_dir=tmp_path / "cache")
    assert data.mixture.turns == [3, 1] and data.mixture.seed == 7
    assert data.valid_windows is not None and data.valid_windows.shape == (4, 17)
    ids = packed_ids(tokenizer, [books])
    stream = BatchStream(data.mixture, tokens_per_step=128, micro_batch=8)
    rows = torch.cat(stream.next_step()).tolist()
    windows = [ids[i : i + 17] for i in range(0, len(ids) - 16, 16)]
    assert sum(row in windows for row in rows) == 6
    again = open_training_data(config, tokenizer, seed=7, cache_dir=tmp_path / "cache")
    assert torch.cat(BatchStream(again.mixture, tokens_per_step=128, micro_batch=8).next_step()).tolist() == rows


def test_pydoc_split_can_be_trained_and_validated(tmp_path: Path, tokenizer: Any) -> None:
    config = DataConfig(train=["pydoc:train"], valid=["pydoc:valid"], seq_len=64, valid_tokens="4k")
    data = open_training_data(config, tokenizer, seed=0, cache_dir=tmp_path)
    assert data.valid_windows is not None and data.valid_windows.shape == (62, 65)
    config.train = ["pydoc"]
    with pytest.raises(UserError, match=r"data.valid: 100% of its tokens are documents that data.train also contains"):
        open_training_data(config, tokenizer, seed=0, cache_dir=tmp_path)


def test_validation_text_in_training_is_refused_in_any_container(
    tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]
) -> None:
    path = text_file("a.txt")
    packed = tmp_path / "other-name.txt.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    config = DataConfig(train=[text_file("b.txt", seed=9), path], valid=[str(packed)], seq_len=16)
    with pytest.raises(UserError, match=r"data.valid: .* has the same content as .* in data.train"):
        open_training_data(config, tokenizer, seed=0, cache_dir=tmp_path / "cache")


def test_shared_boilerplate_is_allowed(tmp_path: Path, tokenizer: Any, new_text: Callable[..., str]) -> None:
    licence = "the cat"
    for name, seed in (("train", 0), ("valid", 100)):
        documents = [licence, *(new_text(200, seed=seed + i) for i in range(10))]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = DataConfig(
        train=[str(tmp_path / "train.jsonl")], valid=[str(tmp_path / "valid.jsonl")], seq_len=16, valid_tokens=64
    )
    open_training_data(config, tokenizer, seed=0, cache_dir=tmp_path / "cache")


def test_damaged_cache_is_named(tmp_path: Path, tokenizer: Any, text_file: Callable[..., str]) -> None:
    config = DataConfig(train=[text_file()], seq_len=16)
    open_training_data(config, tokenizer, seed=0, cache_dir=tmp_path / "cache")
    [shard] = (tmp_path / "cache").glob("*/tokens-00000.bin")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"tokens-00000.bin is damaged .*: delete the directory .*text-txt"):
        open_training_data(config, tokenizer, seed=0, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "data.train: missing"),
        ({"train": ["pydoc"], "sources": {"a": {"paths": ["pydoc"]}}}, "data.train: cannot be combined"),
        ({"train": ["nowhere.txt"]}, "data.train: nowhere.txt does not exist"),
        ({"train": ["pydoc"], "valid": ["nowhere.txt"]}, "data.valid: nowhere.txt does not exist"),
        ({"sources": {"a": {}}}, "data.sources.a.paths: is empty"),
        ({"sources": {"a": {"paths": ["pydoc"], "weight": -1}}}, "data.sources.a.weight: -1 must be above 0"),
        ({"sources": {"a": {"paths": ["pydoc"], "max_tokens": "x"}}}, "data.sources.a.max_tokens: 'x' is not"),
        ({"train": ["pydoc"], "seq_len": 0}, "data.seq_len: 0 must be at least 2"),
        ({"train": ["pydoc"], "valid_tokens": 10}, "data.valid_tokens: must be at least data.seq_len"),
        ({"train": ["pydoc"], "text_field": ""}, "data.text_field: must not be empty"),
    ],
)
def test_bad_tables_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        from_dict(Recipe, {"source": {"model": "x"}, "training": {"tokens": 1}, "data": options}).data.check()
    assert str(caught.value).startswith(expected)


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = DataConfig(train=["a.txt", "pydoc", "hf:org/name", "/x/y.txt"], valid=["d/*.txt"], cache_dir="cache")
    config.make_paths_absolute()
    assert config.train == [str(tmp_path / "a.txt"), "pydoc", "hf:org/name", "/x/y.txt"]
    assert config.valid == [str(tmp_path / "d/*.txt")] and config.cache_dir == str(tmp_path / "cache")


def test_real_texts(tmp_path: Path, tokenizer: Any, shared_data: Path) -> None:
    corpus = shared_data / "corpus"
    config = DataConfig(
        train=[str(corpus / "tinystories-sample.txt")], valid=[str(corpus / "wikitext-2-raw.test.txt")], seq_len=128
    )
    data = open_training_data(config, tokenizer, seed=0, cache_dir=tmp_path)
    assert data.valid_windows is not None and len(data.valid_windows) == 2000
