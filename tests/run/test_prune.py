"""``dwindle.prune`` and ``dwindle.replay`` on a tiny model: exact sizes, checkable slices, faithful ledgers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.export.exporting import export
from dwindle.pruning.layouts import final_count
from dwindle.pruning.ledger import read_ledger, replay_structure
from dwindle.pruning.pacing import Rounds
from dwindle.pruning.strategies.coupled import CoupledStrategy
from dwindle.pruning.target import Shape, parse_target, sizes_of
from tiny import tiny_directory, tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_directory(tmp_path_factory.mktemp("source") / "model"))


OPTIONS: dict[str, dict[str, Any]] = {
    "one shot": {},
    "cluster": {"attention": "cluster"},
    "three rounds": {"rounds": 3},
    "rounded": {"round_to": 8},
    "single groups": {"selection": "global"},
    "single groups, rounded": {"selection": "global", "round_to": 8},
    "only heads and channels": {"groups": ["attn", "ffn"]},
    "random": {"metric": "random", "seed": 3},
    "magnitude": {"metric": "magnitude"},
    "first order": {"metric": "taylor1", "compare": "sum"},
    "shape": {"to": "hidden=24,heads=4,ffn=20"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_output_can_be_checked_by_anyone(name: str, source: Path, tmp_path: Path) -> None:
    options = {"to": "70%", "sequences": 4, "seq_len": 32, **OPTIONS[name]}
    result = dwindle.prune(source, out=tmp_path / "out", **options)
    structure = json.loads((tmp_path / "out" / "structure.json").read_text())
    assert structure["source"] == source.name
    assert Structure.from_json(structure) == result.structure
    for layer in structure["layers"]:
        assert all(layer[key] == sorted(layer[key]) for key in layer)
    # The slices, by hand, from the two safetensors files and structure.json alone.
    big, small = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    hidden = structure["hidden"]
    for number, layer in enumerate(structure["layers"]):
        prefix = f"model.layers.{number}."
        rows = {key: [h * 4 + i for h in layer[key] for i in range(4)] for key in ("query_heads", "kv_heads")}
        expected = {
            "self_attn.q_proj.weight": (rows["query_heads"], hidden),
            "self_attn.k_proj.weight": (rows["kv_heads"], hidden),
            "self_attn.v_proj.weight": (rows["kv_heads"], hidden),
            "self_attn.o_proj.weight": (hidden, rows["query_heads"]),
            "mlp.gate_proj.weight": (layer["ffn"], hidden),
            "mlp.up_proj.weight": (layer["ffn"], hidden),
            "mlp.down_proj.weight": (hidden, layer["ffn"]),
        }
        for key, (out_rows, in_columns) in expected.items():
            assert torch.equal(small[prefix + key], big[prefix + key][out_rows][:, in_columns]), key
    assert result.after.total == sum(p.numel() for p in dwindle.load(tmp_path / "out").model.parameters())
    for number, weight in enumerate(structure.pop("layer_parameters")):
        assert weight == sum(t.numel() for name, t in small.items() if name.startswith(f"model.layers.{number}."))
    replayed = dwindle.replay(source, tmp_path / "out" / "ledger.jsonl")
    assert replayed.structure.to_json(str(source)) == structure
    batch = torch.arange(1, 20)[None]
    assert torch.equal(replayed.model(input_ids=batch).logits, result.model(input_ids=batch).logits)
    if name == "rounded":
        assert len(hidden) % 8 == 0 and len(structure["layers"][0]["ffn"]) % 8 == 0


@pytest.mark.parametrize(
    ("to", "attention", "rounds"),
    [
        ("ffn=20", "regular", 4),
        ("hidden=24", "cluster", 4),
        ("heads=4", "regular", 2),
        ("heads=4", "cluster", 4),
        ("heads=3", "regular", 4),
        ("heads=3", "cluster", 2),
        ("hidden=24,ffn=32", "regular", 2),
        ("hidden=24,ffn=32", "cluster", 4),
    ],
)
def test_rounds_end_in_the_shape_that_was_asked_for(source: Path, to: str, attention: Any, rounds: int) -> None:
    wanted = {"hidden": 32, "heads": 8, "ffn": 40} | {k: int(n) for k, n in (part.split("=") for part in to.split(","))}
    result = dwindle.prune(source, to, rounds=rounds, attention=attention, sequences=2, seq_len=16)
    assert sizes_of(result.structure) == wanted
    anatomy = Anatomy.of(dwindle.load(source).model)
    target = parse_target(to, anatomy)
    pacing = Rounds(result.before.total, final_count(anatomy, target), rounds)
    now = anatomy.source
    for number in range(1, rounds + 1):  # a round removes groups if and only if its share is not done already
        own = [event for event in result.ledger[1:] if event["step"] == number]
        is_due = Shape.of(now) != target.shape and anatomy.count(now).total > pacing.planned(number)
        assert bool(own) == is_due
        now = replay_structure(now, own)
        assert Shape.of(now) == target.shape or anatomy.count(now).total <= pacing.planned(number)
    assert Shape.of(now) == target.shape


def test_a_shape_that_was_missed_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoupledStrategy, "choose", lambda *args: iter(()))
    with pytest.raises(dwindle.UserError, match=r"^to hidden=24: .*hidden 32, heads 8, ffn 40"):
        dwindle.prune(source, "hidden=24", metric="magnitude")


def test_a_shape_for_layers_of_different_sizes_is_refused(source: Path, tmp_path: Path) -> None:
    """One channel of every layer is removed at a time: unequal layers stay unequal."""
    dwindle.prune(source, "80%", method="adapt", rounds=2, sequences=2, seq_len=16, out=tmp_path / "uneven")
    with pytest.raises(dwindle.UserError, match=r"^to ffn=8: the source's layers have"):
        dwindle.prune(tmp_path / "uneven", "ffn=8", metric="magnitude")
    kept = sizes_of(dwindle.prune(tmp_path / "uneven", "hidden=24", metric="magnitude", rounds=2).structure)
    assert kept["hidden"] == 24 and isinstance(kept["ffn"], list)


@pytest.mark.parametrize("rounds", [1, 3, 8])
@pytest.mark.parametrize("attention", ["regular", "cluster"])
def test_rounded_widths_fit_after_any_number_of_rounds(source: Path, attention: Any, rounds: int) -> None:
    for multiple in (8, 16):
        result = dwindle.prune(
            source, "50%", rounds=rounds, round_to=multiple, attention=attention, sequences=2, seq_len=16
        )
        sizes = sizes_of(result.structure)
        assert sizes["hidden"] % multiple == sizes["ffn"] % multiple == 0  # type: ignore[operator]
        assert result.after.total <= 0.5 * result.before.total


@pytest.mark.parametrize("rounds", [1, 3])
def test_layers_of_different_sizes_are_round(source: Path, rounds: int) -> None:
    result = dwindle.prune(
        source, "75%", rounds=rounds, selection="global", round_to=8, sequences=2, seq_len=16, second_order=True
    )
    widths = {len(la.ffn) for la in result.structure.layers}
    assert len(widths) > 1 and not any(width % 8 for width in {*widths, len(result.structure.hidden)})
    assert 0.75 * result.before.total - 8 * 3 * 32 < result.after.total <= 0.75 * result.before.total


def test_a_multiple_that_cannot_fit_is_refused_before_the_weights_are_read(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("dwindle.run.prune.load")
    with pytest.raises(dwindle.UserError, match="round_to 64: no multiple lies between the minimum sizes"):
        dwindle.prune(source, "50%", round_to=64)
    with pytest.raises(dwindle.UserError, match="round_to 32: the smallest model with such widths has"):
        dwindle.prune(source, "40%", round_to=32)
    with pytest.raises(dwindle.UserError, match="round_to 64: no multiple lies between the minimum sizes"):
        dwindle.prune(source, "50%", selection="global", round_to=64)


@pytest.mark.parametrize("how", [{}, {"selection": "global"}, {"method": "adapt"}])
def test_rounds_in_which_nothing_could_be_removed_are_refused(source: Path, how: dict[str, Any]) -> None:
    with pytest.raises(dwindle.UserError, match=r"rounds 100,000: this target takes at most \d+ events") as said:
        dwindle.prune(source, "80%", rounds=100_000, **how)
    most = int(str(said.value).rpartition(" ")[2])
    assert dwindle.prune(source, "80%", rounds=most, metric="magnitude", sequences=2, seq_len=16, **how).ledger


def test_rounds_show_progress(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is too short for a line of its own."""
    monkeypatch.setattr("dwindle.core.progress._PLAIN_LINE_EVERY_S", 0)
    dwindle.prune(source, "80%", rounds=3, sequences=2, seq_len=16)
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"pruning: {number}/6" for number in range(1, 7)]  # two sequences in each round


def test_replay_at_any_point(source: Path, tmp_path: Path) -> None:
    dwindle.prune(source, "60%", out=tmp_path / "out", metric="magnitude")
    events = [event for event in read_ledger(tmp_path / "out") if event["event"] == "prune"]
    for at in (0, 1, len(events) // 2, len(events)):
        replayed = dwindle.replay(source, tmp_path / "out", at=at)
        expected = replayed.before.total if at == 0 else events[at - 1]["parameters"]
        assert sum(p.numel() for p in replayed.model.parameters()) == replayed.after.total == expected
    first = next(event["parameters"] for event in events if event["parameters"] <= 30_000)
    assert dwindle.replay(source, tmp_path / "out", at="30k").after.total == first
    for share, size in (("80%", 0.8 * 37_408), ("0.8", 0.8 * 37_408), ("60%nonemb", 16_448 + 0.6 * 20_960)):
        first = next(event["parameters"] for event in events if event["parameters"] <= size)
        assert dwindle.replay(source, tmp_path / "out", at=share).after.total == first
    with pytest.raises(dwindle.UserError, match="only"):
        dwindle.replay(source, tmp_path / "out", at=10_000)
    with pytest.raises(dwindle.UserError, match="never reaches that size"):
        dwindle.replay(source, tmp_path / "out", at="1k")
    assert dwindle.replay(source, tmp_path / "out", at="1M").after.total == replayed.before.total
    with pytest.raises(dwindle.UserError, match="at -1: give"):
        dwindle.replay(source, tmp_path / "out", at=-1)


@pytest.mark.parametrize("at", [0, 10, None])
def test_a_saved_replay_says_what_it_is(at: int | None, source: Path, tmp_path: Path) -> None:
    """Not the model of the ledger: earlier sizes, the source's weights, nothing trained and nothing updated."""
    ledger = dwindle.prune(source, "60%", second_order=True, sequences=2, seq_len=16).ledger
    for event in ledger[1:]:  # as a run writes it
        event["tokens"] = 192 * event["step"]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in ledger))
    ledger = read_ledger(tmp_path)
    replayed, count = dwindle.replay(source, tmp_path / "ledger.jsonl", at=at), len(ledger) - 1 if at is None else at
    assert f" {count} events>" in repr(replayed) and replayed.to_json()["events"] == count
    replayed.save(tmp_path / "out")
    export(tmp_path / "out", "hf", tmp_path / "exported", verify=False)
    for folder in (tmp_path / "out", tmp_path / "exported"):
        saved, card = read_ledger(folder), (folder / "README.md").read_text()
        assert saved == [ledger[0] | {"replayed": True}, *ledger[1 : count + 1]]
        assert dwindle.replay(source, folder).structure == replayed.structure
        assert "training" not in card.partition("## Limits")[0].replace("without training", "")
        assert " tokens" not in card and "second_order" not in card
        assert "rebuilt from a ledger with the source's weights, without training" in card
        assert not count or f"{count} prune events" in card


def test_a_replay_never_replaces_what_it_was_read_from(source: Path, tmp_path: Path) -> None:
    pruned = dwindle.prune(source, "60%", out=tmp_path / "out", metric="magnitude")
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    replayed = dwindle.replay(source, tmp_path / "out" / "ledger.jsonl", at=1)
    for result, place in ((replayed, tmp_path / "out"), (replayed, source), (pruned, source)):
        with pytest.raises(dwindle.UserError, match="the input"):
            result.save(place, overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights


def test_the_ledger_says_what_happened(source: Path) -> None:
    result = dwindle.prune(source, "80%", sequences=2, seq_len=16)
    left = result.before.total
    for event in result.ledger[1:]:
        assert set(event) == {"event", "step", "tokens", "type", "indices", "saliency", "parameters"}
        assert event["parameters"] < left
        left = event["parameters"]
        assert len(event["indices"]) == (1 if event["type"] == "stem" else 3)
        assert set(event["saliency"]) == {"attn", "ffn", "stem"}
    assert left == result.after.total


def test_a_loaded_model_is_not_touched(source: Path) -> None:
    loaded = dwindle.load(source)
    batch = torch.arange(1, 20)[None]
    before = loaded.model(input_ids=batch).logits
    dwindle.prune(loaded, "80%", metric="magnitude")
    assert torch.equal(loaded.model(input_ids=batch).logits, before)


def test_the_same_seed_gives_the_same_model(source: Path) -> None:
    runs = [dwindle.prune(source, "75%", sequences=3, seq_len=24, seed=seed).structure for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_written_dtype_is_the_stored_one(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "model")
    dwindle.load(directory, dtype=torch.bfloat16).model.save_pretrained(directory)
    dwindle.prune(directory, "80%", metric="magnitude", out=tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_result_in_a_prompt_is_one_line(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "model")
    result = dwindle.prune(source, "80%", metric="magnitude")
    shown = repr(result)
    assert "\n" not in shown and len(shown) < 200 + len(str(source))
    assert str(source) in shown and f"{len(result.ledger) - 1} events" in shown and "hidden" in shown


def test_a_forgotten_percent_sign_is_told() -> None:
    with pytest.raises(UserError, match=r"--to 50: is 50 parameters: for a share write 50%$"):
        parse_target("50", Anatomy.of(tiny_model("llama")))
