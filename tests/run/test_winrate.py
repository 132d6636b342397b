"""Win rates against brute force, judges of all three kinds, and what a bad judge leads to."""

from __future__ import annotations

import io
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from chats import write_answers
from dwindle.core.errors import UserError
from dwindle.core.terminal import PlainConsole
from dwindle.evaluation import judges
from dwindle.evaluation.judges import AddressJudge, LocalJudge, Pair
from dwindle.evaluation.preferences import agreement, combined, length_controlled, outcome, rates
from dwindle.run.winrate import Verdict, judge_pairs, summarise, win_rate
from dwindle.sources.loading import load
from tiny import tiny_directory, tiny_tokenizer


def write_verdicts(path: Path, verdicts: dict[int, str]) -> Path:
    path.write_text("".join(json.dumps({"id": name, "verdict": one}) + "\n" for name, one in verdicts.items()))
    return path


def slow_length_controlled(values: list[float], differences: list[float]) -> float:
    """The same penalised likelihood, climbed by torch."""
    spread = float(np.std(differences)) or 1.0
    x, y = (
        torch.tanh(torch.tensor(differences, dtype=torch.float64) / spread),
        torch.tensor(values, dtype=torch.float64),
    )
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    climb = torch.optim.LBFGS([theta], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        climb.zero_grad()
        logits = theta[0] + theta[1] * x
        found = torch.nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum")
        found = found + 0.005 * theta.square().sum()
        found.backward()
        return found

    climb.step(loss)
    return float(torch.sigmoid(theta[0].detach()))


@pytest.mark.parametrize("seed", range(4))
def test_rates_equal_a_slow_computation(seed: int) -> None:
    draw = random.Random(seed)
    differences = [draw.gauss(200, 300) for _ in range(60)]
    chances = [1 / (1 + math.exp(0.4 - d / 200)) for d in differences]
    values = [float(draw.random() < p) if draw.random() < 0.9 else 0.5 for p in chances]
    found = length_controlled(np.array([values]), np.array([differences]))[0]
    assert found == pytest.approx(slow_length_controlled(values, differences), abs=1e-6)
    plain, controlled = rates(values, differences, seed=seed)
    assert (
        controlled is not None
        and plain.value == pytest.approx(sum(values) / 60)
        and controlled.value == pytest.approx(found)
    )
    assert controlled.value < plain.value  # longer answers won: part of the rate was length
    generator, resampled = np.random.default_rng(seed), []
    for row in generator.integers(60, size=(1000, 60)):
        resampled.append(sum(values[place] for place in row) / 60)
    assert (plain.low, plain.high) == pytest.approx(tuple(np.quantile(resampled, [0.025, 0.975])))
    assert controlled.low < controlled.value < controlled.high


def test_extremes_stay_finite() -> None:
    plain, controlled = rates([1.0] * 10, list(range(10)))
    assert plain.value == 1 and controlled is not None and 0.9 < controlled.value < 1
    same, equal = rates([1.0, 0.0, 0.5, 0.5], [0, 0, 0, 0])
    assert equal is not None and same.value == equal.value == pytest.approx(0.5)
    assert rates([1.0], [5.0])[0].value == 1


def test_what_the_pairs_do_not_say_is_not_reported() -> None:
    """20 wins of 20 are no proof of 100 %; a length that always differs by the same explains what it likes."""
    sure, _ = rates([1.0] * 20, list(range(20)))
    z = 1.959964
    assert sure.high == 1 and sure.low == pytest.approx(20 / (20 + z**2))  # Wilson's, for p = 1
    never, controlled = rates([0.0] * 20, list(range(20)))
    assert never.low == 0 and never.high == pytest.approx(z**2 / (20 + z**2))
    assert controlled is not None and controlled.low <= controlled.value <= controlled.high
    values = [1.0, 0.0, 1.0, 1.0]
    assert rates(values, [30] * 4)[1] is None and rates([1.0] * 4, [30] * 4)[1] is None
    few = rates(values, [30, 30, 30, -5])[1]  # some resamples have one length alone
    assert few is not None and 0 < few.low <= few.high < 1
    pairs = [Pair(number, "q", "xxx", "x") for number in range(3)]
    found = summarise(pairs, judge_pairs(Longer(), pairs), names=("a", "b"), judge=Longer())
    assert found.length_controlled is None and found.to_json()["length_controlled"] is None
    out = io.StringIO()
    Console(file=out, width=120).print(found.render())
    assert "not identifiable" in out.getvalue()


def test_orders_are_combined() -> None:
    assert combined(1.0, 0.0) == pytest.approx(1, abs=1e-5) and combined(0.0, 1.0) == pytest.approx(0, abs=1e-5)
    assert combined(1.0, 1.0) == pytest.approx(0.5) and combined(None, None) is None
    assert combined(None, 0.2) is None and combined(0.9, None) is None  # one order alone has the favour in it
    # a judge that favours the first by a factor: cancelled
    sigmoid = lambda z: 1 / (1 + math.exp(-z))  # noqa: E731
    assert combined(sigmoid(3 + 0.4), sigmoid(3 - 0.4)) == pytest.approx(sigmoid(0.4))
    assert [outcome(p, 0.1) for p in (0.61, 0.6, 0.45, 0.39)] == ["A", "tie", "tie", "B"]


def test_agreement_is_cohens() -> None:
    judged, given = ["A", "A", "B", "tie", "B", "A"], ["A", "B", "B", "tie", "A", "A"]
    found = agreement(judged, given)  # type: ignore[arg-type]
    chance = (3 * 3 + 2 * 2 + 1 * 1) / 36
    assert found.agreement == pytest.approx(4 / 6) and found.kappa == pytest.approx((4 / 6 - chance) / (1 - chance))
    assert found.agreement_without_ties == pytest.approx(3 / 5)
    assert agreement(["A"], ["A"]).kappa is None


class Longer:
    """A stand-in: prefers the longer answer, and the first one if they are equal."""

    name, sees_order, identity = "longer", True, None

    def judge(self, pair: Pair, *, a_first: bool) -> float | None:
        first, second = (pair.a, pair.b) if a_first else (pair.b, pair.a)
        return None if not first else float(len(first) >= len(second))


def shown(found: Any) -> str:
    """What the command prints."""
    out = io.StringIO()
    PlainConsole(width=200, file=out).print(found.render())
    return out.getvalue()


def test_a_summary_counts_what_there_is() -> None:
    pairs = [Pair(n, "q", a, b) for n, (a, b) in enumerate([("xx", "x"), ("x", "xx"), ("x", "y"), ("", "")])]
    judge = Longer()
    verdicts = judge_pairs(judge, pairs)
    assert verdicts[2] == Verdict(2, 1.0, 1.0) and verdicts[3].preference is None
    found = summarise(pairs, verdicts, names=("a", "b"), judge=judge)
    assert (found.wins, found.ties, found.losses, found.num_without_verdict) == (1, 1, 1, 1)
    assert found.win_rate.value == 0.5 and found.first_share == pytest.approx(4 / 6)
    assert found.consistency == pytest.approx(2 / 3) and "do not rely" not in shown(found)
    equal = [Pair(0, "q", "x", "y")]
    assert "do not rely on it" in shown(summarise(equal, judge_pairs(judge, equal), names=("a", "b"), judge=judge))


def test_verdicts_of_unknown_ids_are_reported(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "_LEAST_MASS", 0.0)
    a = write_answers(tmp_path / "a.jsonl", dict.fromkeys(range(5), "long answer"))
    b = write_answers(tmp_path / "b.jsonl", dict.fromkeys(range(1, 7), "short"))
    people = tmp_path / "people.jsonl"
    named = [1, 2, "2", 0, "three", 98, 99]  # "2" is a text, and only one file has an answer to 0
    people.write_text("".join(json.dumps({"id": one, "verdict": "A"}) + "\n" for one in named))
    line = "verdicts without answers of both: 5, of the ids '2', 0, 'three', 98 …"
    for found in (
        win_rate(a, b, people),
        win_rate(a, b, place / "model", calibrate=people, device="cpu"),
    ):
        assert found.unknown_ids == found.to_json()["unknown_ids"] == ["2", 0, "three", 98, 99]
        assert line in shown(found)
    assert win_rate(a, b, people, limit=1).unknown_ids == []  # those of other prompts are there, too
    assert "without answers" not in shown(win_rate(a, b, write_verdicts(tmp_path / "known.jsonl", {1: "A"})))


def test_verdicts_of_people(tmp_path: Path) -> None:
    a = write_answers(tmp_path / "a.jsonl", dict.fromkeys(range(5), "long answer"))
    b = write_answers(tmp_path / "b.jsonl", dict.fromkeys(range(1, 7), "short"))
    file = write_verdicts(tmp_path / "people.jsonl", {1: "A", 2: "b", 3: "tie"})
    found = win_rate(a, b, file)
    assert (found.num_pairs, found.num_without_verdict) == (4, 1) and found.first_share is None
    assert (found.wins, found.ties, found.losses) == (1, 1, 1) and found.win_rate.value == 0.5
    assert found.mean_length == (11, 5) and found.num_unpaired == (1, 2)
    assert "left out: 1 answers of A alone, 2 of B alone" in shown(found)
    assert "left out" not in shown(win_rate(a, a, file))
    for line, message in {
        '{"id": true, "verdict": "A"}': "line 1: needs an id and a verdict, A, B or tie",
        '{"id": 1, "verdict": "C"}': "line 1: needs an id and a verdict, A, B or tie",
        '{"id": 1, "verdict": "A"}\n{"id": 1, "verdict": "A"}': "line 2: the id 1 is there twice",
        "": "has no verdicts",
        '{"id": 99, "verdict": "A"}': "none of its ids has answers of both",
        '{"id": "1", "verdict": "A"}': "none of its ids has answers of both: check the ids, such as '1'",
    }.items():
        (tmp_path / "bad.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match=message):
            win_rate(a, b, tmp_path / "bad.jsonl")
    other = write_answers(tmp_path / "c.jsonl", {1: "x"}, question="Another {}?")
    with pytest.raises(UserError, match="id 1 answers another question"):
        win_rate(a, other, file)
    with pytest.raises(UserError, match="have no id in common"):
        win_rate(a, write_answers(tmp_path / "d.jsonl", {77: "x"}), file)
    with pytest.raises(UserError, match="a model needs --prompts FILE"):
        win_rate(a, tmp_path, file)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("judge")
    tiny_directory(place / "model", max_position_embeddings=2048)
    return place


def test_a_local_judge_is_the_logit_of_its_verdict(place: Path, tmp_path: Path) -> None:
    loaded = load(place / "model")
    tokenizer: Any = tiny_tokenizer()
    pair = Pair(1, "Why?", "Because.", "So.")
    judge = LocalJudge(loaded.model, tokenizer, "tiny")
    for a_first in (True, False):
        ids = tokenizer(pair.question(a_first=a_first) + "\n\nThe better answer is").input_ids
        with torch.no_grad():
            p = loaded.model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
        a, b = (float(p[tokenizer(letter).input_ids[0]]) for letter in "AB")
        found = judge.judge(pair, a_first=a_first)
        assert found is None if a + b < 0.01 else found == pytest.approx(a / (a + b), rel=1e-4)
    assert pair.question(a_first=True).index("Because.") < pair.question(a_first=True).index("So.")
    assert pair.question(a_first=False).index("Because.") > pair.question(a_first=False).index("So.")
    assert judge.judge(Pair(1, "x" * 3000, "", ""), a_first=True) is None  # longer than its context


def test_a_judge_that_never_says_a_or_b_is_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "_LEAST_MASS", 0.999)
    a = write_answers(tmp_path / "a.jsonl", {1: "x", 2: "y"})
    with pytest.raises(UserError, match="said neither A nor B for any of 2 pairs: choose") as error:
        win_rate(a, a, place / "model", device="cpu")
    assert "\n" not in str(error.value)


def test_models_answer_first_and_an_interrupted_command_continues(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "_LEAST_MASS", 0.0)
    (tmp_path / "p.txt").write_text("One\nTwo\nThree\n")
    model, out = place / "model", tmp_path / "out"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    tokenizer.save_pretrained(model)
    real, calls = LocalJudge.judge, []

    def judge(self: LocalJudge, pair: Pair, *, a_first: bool) -> float | None:
        calls.append(pair.id)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, pair, a_first=a_first)

    monkeypatch.setattr(LocalJudge, "judge", judge)
    settings: dict[str, Any] = {"prompts": tmp_path / "p.txt", "tokens": 5, "device": "cpu"}
    sampled = write_answers(tmp_path / "b.jsonl", {0: "x", 1: "y", 2: "z"}, question="{}")
    rows = [json.loads(line) for line in sampled.read_text().splitlines()]
    for row, text in zip(rows, ("One", "Two", "Three"), strict=True):
        row["messages"][0]["content"] = text
    sampled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(KeyboardInterrupt):
        win_rate(model, sampled, model, out=out, **settings)
    assert (out / "a.answers.jsonl").is_file()
    first = win_rate(model, sampled, model, out=out, **settings)
    assert calls == [0, 0, 1, 1, 1, 1, 2, 2]  # the pair that was interrupted is asked again, no other
    assert win_rate(model, sampled, model, out=out, **settings) == first and len(calls) == 8
    people = write_verdicts(tmp_path / "people.jsonl", {0: "A", 2: "B"})
    found = win_rate(model, sampled, model, calibrate=people, out=tmp_path / "calibrated", **settings)
    assert found.calibration is not None and found.num_pairs == found.calibration.num_pairs == 2
    same = [
        outcome(verdict.preference or 0.0) == given
        for verdict, given in zip(judge_again(tmp_path / "calibrated"), ("A", "B"), strict=True)
    ]
    assert found.calibration.agreement == sum(same) / 2


def test_answers_and_verdicts_of_another_command_are_refused_by_name(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "_LEAST_MASS", 0.0)
    (tmp_path / "p.txt").write_text("One\nTwo\nThree\n")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    models = [tmp_path / name for name in ("first", "second")]
    for number, model in enumerate(models):
        tiny_directory(model, max_position_embeddings=2048, seed=number + 1)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)
    settings: dict[str, Any] = {"prompts": tmp_path / "p.txt", "tokens": 4, "device": "cpu", "out": tmp_path / "out"}
    first = win_rate(models[0], models[1], models[0], **settings)
    assert win_rate(models[0], models[1], models[0], **settings) == first
    for arguments, changed, name in (
        ((models[1], models[1], models[0]), {}, r"a\.answers\.jsonl: was begun with another model"),
        ((models[0], models[0], models[0]), {}, r"b\.answers\.jsonl: was begun with another model"),
        ((models[0], models[1], models[0]), {"temperature": 1.0, "seed": 3}, "another temperature, seed"),
        ((models[0], models[1], models[0]), {"limit": 2}, "another prompts"),
        ((models[0], models[1], models[1]), {}, r"verdicts\.jsonl: was begun with another judge"),
        ((models[0], models[1], models[0]), {"dtype": "float64"}, "another dtype"),
    ):
        with pytest.raises(UserError, match=name):
            win_rate(*arguments, **(settings | changed))
    (tmp_path / "out" / "a.answers.jsonl.header").unlink()
    with pytest.raises(UserError, match="is missing, which says what gave it: pass --overwrite"):
        win_rate(models[0], models[1], models[0], **settings)
    again = win_rate(models[1], models[1], models[0], overwrite=True, **settings)
    assert again.win_rate.value == 0.5 and win_rate(models[1], models[1], models[0], **settings) == again


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"b": "nowhere.jsonl"}, r"^nowhere.jsonl: does not exist"),
        ({"b": "no/such/model"}, "no/such/model"),
        ({"judge": "no/such/model"}, "no/such/model"),
        ({"judge": "nowhere.jsonl"}, r"^--judge nowhere.jsonl: does not exist"),
        ({"judge": "https://h.example/v1"}, "pass --allow-network"),
        (
            {"judge": "https://[::1/v1", "allow_network": True, "judge_model": "m"},
            r"^--judge: is not an address \(.*\):",
        ),
        ({"calibrate": "nowhere.jsonl"}, r"^--calibrate nowhere.jsonl: does not exist"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_answered(
    place: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    (tmp_path / "p.txt").write_text("One\n")
    given = {"a": place / "model", "b": place / "model", "judge": place / "model"} | changed
    with pytest.raises(UserError, match=message):
        win_rate(**given, prompts=tmp_path / "p.txt", out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_calibration_is_continued_with_all_pairs(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same --out: the verdicts of the calibration are not asked again."""
    monkeypatch.setattr(judges, "_LEAST_MASS", 0.0)
    a, b = (write_answers(tmp_path / name, {n: name[n:] for n in range(4)}) for name in ("first.jsonl", "two.jsonl"))
    real, asked = LocalJudge.judge, []

    def judge(self: LocalJudge, pair: Pair, *, a_first: bool) -> float | None:
        asked.append(pair.id)
        return real(self, pair, a_first=a_first)

    monkeypatch.setattr(LocalJudge, "judge", judge)
    people = write_verdicts(tmp_path / "people.jsonl", {1: "A", 3: "B"})
    settings: dict[str, Any] = {"out": tmp_path / "out", "device": "cpu"}
    assert win_rate(a, b, place / "model", calibrate=people, **settings).num_pairs == 2
    assert win_rate(a, b, place / "model", **settings).num_pairs == 4
    assert asked == [1, 1, 3, 3, 0, 0, 2, 2]
    assert win_rate(a, b, place / "model", calibrate=people, **settings).num_pairs == 2 and len(asked) == 8


def test_a_judge_may_say_its_letter_without_a_space_before_it(tmp_path: Path) -> None:
    """SentencePiece puts one before a text; after the line break of a template the letter stands alone."""
    from transformers import LlamaTokenizer

    vocabulary: list[tuple[str, float]] = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(token, -1.0) for token in ("\u2581A", "\u2581B", "\u2581", "A", "B", "C")]
    tokenizer = LlamaTokenizer(
        vocab={token: number for number, (token, _) in enumerate(vocabulary)}, merges=[("\u2581", "A"), ("\u2581", "B")]
    )
    judge = LocalJudge(load(tiny_directory(tmp_path / "model")).model, tokenizer, "tiny")
    assert tokenizer.convert_ids_to_tokens(judge._a) == ["\u2581A", "A"]
    assert tokenizer.convert_ids_to_tokens(judge._b) == ["\u2581B", "B"]


def test_the_same_path_with_another_judge_in_it_is_another_judge(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "_LEAST_MASS", 0.0)
    a = write_answers(tmp_path / "a.jsonl", {1: "a long answer", 2: "x"})
    b = write_answers(tmp_path / "b.jsonl", {1: "short", 2: "longer"})
    judge = tmp_path / "judge"
    tiny_directory(judge, max_position_embeddings=2048, seed=1)
    win_rate(a, b, judge, out=tmp_path / "out", device="cpu")
    shutil.rmtree(judge)
    tiny_directory(judge, max_position_embeddings=2048, seed=2)
    with pytest.raises(UserError, match="another judge"):
        win_rate(a, b, judge, out=tmp_path / "out", device="cpu")
    assert AddressJudge("https://h.example/v1", "m").identity != AddressJudge("https://h.example/v2", "m").identity
    for verdicts, wins in (({1: "A", 2: "B"}, 1), ({1: "A", 2: "A"}, 2)):  # people change their minds: nothing is kept
        file = write_verdicts(tmp_path / "people.jsonl", verdicts)
        assert win_rate(a, b, file, out=tmp_path / "people").wins == wins


def judge_again(folder: Path) -> list[Verdict]:
    """The verdicts that were written."""
    return [Verdict(**json.loads(line)) for line in (folder / "verdicts.jsonl").read_text().splitlines()[1:]]
