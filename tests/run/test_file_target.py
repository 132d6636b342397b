"""A file's size as the target: reached by pruning, kept by export, the same after a resume, or refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

import dwindle
from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.anatomy.structure import Group
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.export.gguf_size import ABOUT_BYTES, FileSize
from dwindle.pruning.ledger import read_ledger
from dwindle.pruning.target import parse_target
from dwindle.recipe.recipe import load_recipe
from dwindle.run.plan import make_plan
from dwindle.run.pretrain import pretrain, resume
from dwindle.sources.loading import load
from runs import COMPACT_OFTEN, metrics, tiny_recipe
from tiny import merged_directory, tiny_directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("file")
    merged_directory(place / "model", 320, hidden_size=64, intermediate_size=512, num_attention_heads=4, head_dim=16)
    return place


def source_bytes(place: Path, type_: str) -> int:
    model, tokenizer = load(place / "model")
    return FileSize(model.config, tokenizer, type_, "--to")(Anatomy.of(model).source)


@pytest.mark.parametrize("selection", ["coupled", "global"])
@pytest.mark.parametrize("type_", ["bf16", "q8_0", "q4_k_m"])
def test_pruned_to_a_file(place: Path, tmp_path: Path, type_: str, selection: str) -> None:
    """At most as large as asked, and (of a type that stores all matrices alike) within one group of it."""
    if type_ == "q4_k_m":
        pytest.importorskip("xllamacpp")
    limit = int(0.75 * source_bytes(place, type_))
    to = f"{limit / 1000:.3f}kB@{type_}"
    made = dwindle.prune(
        place / "model", to, out=tmp_path / "m", selection=selection, metric="magnitude", measure=False
    )
    exported = dwindle.export_model(tmp_path / "m", "gguf", tmp_path / "m.gguf", type=type_, verify=False)
    assert exported.num_bytes == exported.predicted_bytes <= limit
    blocks = 1 if type_ == "bf16" else 32
    rows = 3 * 64 * (3 if selection == "coupled" else 1)
    heads = 2 * 16 * 64 * 2 * (3 if selection == "coupled" else 1)
    group = {"bf16": 2.0, "q8_0": 34 / 32, "q4_k_m": 2.0}[type_] * max(rows * blocks, heads)
    assert limit - exported.num_bytes <= group + ABOUT_BYTES
    assert all(len(layer.ffn) % blocks == 0 for layer in made.structure.layers)


def recipe(place: Path, **prune: Any) -> Any:
    to = f"{int(0.8 * source_bytes(place, 'q8_0'))}B@q8_0"
    return tiny_recipe(
        place,
        steps=8,
        sequences=4,
        training={"micro_batch": 4},
        prune={"target": to, "horizon": 0.6, "selection": "global", **COMPACT_OFTEN, **prune},
        checkpoint={"every": 2, "keep_last": 9},
    )


def test_a_run_reaches_its_file_and_resumes(place: Path, tmp_path: Path) -> None:
    settings = recipe(place)
    assert settings.prune.round_to == 32 and make_plan(settings).file == settings.prune.target
    run = tmp_path / "run"
    assert pretrain(settings, run).target_reached
    exported = dwindle.export_model(run, "gguf", tmp_path / "m.gguf", type="q8_0", verify=False)
    limit = int(settings.prune.target.partition("B@")[0])
    assert limit - 3 * 64 * 32 * 34 / 32 - ABOUT_BYTES <= exported.num_bytes <= limit
    assert load_recipe(run / "recipe.toml").prune.round_to == 32
    for step in (2, 6):
        copy = tmp_path / f"copy{step}"
        shutil.copytree(run, copy)
        shutil.rmtree(copy / "model")
        for later in range(step + 2, 9, 2):
            shutil.rmtree(RunDirectory(copy).checkpoint(later))
        resume(copy)
        assert metrics(copy) == metrics(run) and read_ledger(copy) == read_ledger(run)
        weights = "model/model.safetensors"
        assert (copy / weights).read_bytes() == (run / weights).read_bytes()


def test_a_new_recipe_has_the_file_as_its_target(place: Path, tmp_path: Path) -> None:
    text = tmp_path / "books.txt"
    text.write_text("\n\n".join(f"The number {n} follows {n - 1}." for n in range(4000)))
    to = f"{int(0.8 * source_bytes(place, 'q8_0'))}B@q8_0"
    _, made = dwindle.new_recipe(str(place / "model"), [str(text)], to)
    assert made.prune.target == to and made.prune.round_to == 32


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ("90MB@q9_0", r"^to 90MB@q9_0: 'q9_0' is not a type of GGUF files: give one of f32, f16"),
        ("90MB@q8_0", r"^to 90MB@q8_0: the source's file has .* already, .*: choose less$"),
        (
            "20kB@q8_0",
            r"^target: a q8_0 file of 20.* is below the smallest reachable one, .*, or trim the vocabulary first$",
        ),
        ("90@q8_0", r"^to: '90@q8_0' is not a file's size and type such as 90MB@q8_0"),
        ("MB@q8_0", r"^to: 'MB@q8_0' is not a file's size"),
    ],
)
def test_files_that_cannot_be_are_refused(place: Path, tmp_path: Path, to: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        dwindle.prune(place / "model", to, out=tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_more_refusals(place: Path, tmp_path: Path) -> None:
    low = f"{int(0.8 * source_bytes(place, 'q8_0'))}B@q8_0"
    for method in ("adapt", "minitron", "shortgpt", "slicegpt"):
        with pytest.raises(UserError, match=f"method {method} lands on a number of parameters"):
            dwindle.prune(place / "model", low, method=method)
    with pytest.raises(UserError, match=r"round_to 32: .* \(q8_0 files store rows in blocks, so"):
        dwindle.prune(place / "model", low, groups=["ffn", "layer"])
    with pytest.raises(UserError, match=r"below the smallest reachable one, .*: choose more, lower minimum"):
        dwindle.prune(place / "model", low, min_ffn=512, min_heads=4, min_hidden=64)
    with pytest.raises(
        UserError, match=r"file: .*llama.cpp's pre-tokenizers .* own: give a size such as 60%$"
    ):  # no GGUF file can be written of this one
        dwindle.prune(tiny_directory(tmp_path / "bytes"), "10kB@q8_0")
    with pytest.raises(UserError, match=r"^at: '9kB@q8_0' is not a number"):
        dwindle.replay(place / "model", _ledger(place, tmp_path), at="9kB@q8_0")


def test_the_floors_are_checked_before_training(place: Path, tmp_path: Path) -> None:
    """33 channels are not whole blocks, so the smallest model has a larger file than its count suggests."""
    model, tokenizer = load(place / "model")
    source, size = Anatomy.of(model).source, FileSize(model.config, tokenizer, "q8_0", "it")
    least = size(replace(source, layers=tuple(replace(la, ffn=la.ffn[:33]) for la in source.layers)))
    settings: dict[str, Any] = {"groups": ["ffn"], "min_ffn": 33, "round_to": 1}
    with pytest.raises(UserError, match=r"prune.target: .* is below the smallest reachable one"):
        pretrain(recipe(place, target=f"{least - 100}B@q8_0", **settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    made = dwindle.prune(
        place / "model", f"{least}B@q8_0", selection="global", metric="magnitude", measure=False, **settings
    )
    assert size(made.structure) <= least


def test_the_widest_embedding_that_fits(tmp_path: Path) -> None:
    """q4_0 stores the embedding with more bits than the layers, so its channels are worth more bytes."""
    few = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    merged_directory(tmp_path / "u", 640, hidden_size=512, intermediate_size=128, **few)
    model, tokenizer = load(tmp_path / "u")
    source, size = Anatomy.of(model).source, FileSize(model.config, tokenizer, "q4_0", "it")
    by_width = {n: size(replace(source, hidden=source.hidden[:n])) for n in range(128, 513, 32)}
    for share in (0.7, 0.6):
        limit = int(share * by_width[512])
        made = dwindle.prune(
            tmp_path / "u",
            f"{limit}B@q4_0",
            groups=["stem"],
            selection="global",
            metric="magnitude",
            min_hidden=32,
            measure=False,
        )
        assert len(made.structure.hidden) == max(n for n, num_bytes in by_width.items() if num_bytes <= limit)


def test_a_layer_without_ffn_has_an_estimate(place: Path) -> None:
    model, tokenizer = load(place / "model")
    anatomy, size = Anatomy.of(model), FileSize(model.config, tokenizer, "q8_0", "it")
    rest = anatomy.source.without(Group("layer", ((1,), *[()] * (len(anatomy.source.layers) - 1))))
    smaller = Anatomy.of(cut(model, anatomy, rest, anatomy.source))
    limit = int(0.8 * size(rest))
    assert 0 < parse_target(f"{limit}B@q8_0", smaller, files=lambda _: size).num_parameters < anatomy.count(rest).total


def _ledger(place: Path, tmp_path: Path) -> Path:
    dwindle.prune(place / "model", "90%", metric="magnitude", measure=False, out=tmp_path / "m")
    return tmp_path / "m" / "ledger.jsonl"
