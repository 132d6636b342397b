"""``dwindle winrate``: how often one model's answers are preferred to another's, by a judge that sees both orders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from dwindle.core.config import takes
from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic
from dwindle.core.json_safe import finite
from dwindle.core.jsonl import json_line
from dwindle.core.progress import Bar
from dwindle.core.terminal import plain, right
from dwindle.evaluation.config import GenerateConfig
from dwindle.evaluation.judges import FileJudge, Judge, Pair, load_judge, open_judge, read_verdicts, request_text
from dwindle.evaluation.preferences import VALUES, Agreement, Outcome, Rate, agreement, combined, outcome, rates
from dwindle.evaluation.prompts import Chats, Message, read_chats
from dwindle.run.answers import answers_header, generate_answers
from dwindle.run.journal import Journal, check_header
from dwindle.sources.loading import check_source, chosen_device, model_in

FORMAT = "dwindle-verdicts-2"
TIE_MARGIN = 0.0
_SHOWN_IDS = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """For one pair, the probabilities that the answer shown first is better, in both orders.

    A human verdict counts for both orders.
    """

    id: int | str
    a_first: float | None
    b_first: float | None

    @property
    def preference(self) -> float | None:
        """For A; None unless there is a verdict in both orders."""
        return combined(self.a_first, self.b_first)


@dataclass(slots=True)
class WinRate:
    """A against B."""

    a: str
    b: str
    judge: str
    num_pairs: int
    num_without_verdict: int
    wins: int
    ties: int
    losses: int
    win_rate: Rate
    """Ties count half."""
    length_controlled: Rate | None
    """None if it cannot be separated from length, because all pairs differ by the same length."""
    mean_length: tuple[float, float]
    """Characters of A's and B's answers."""
    first_share: float | None
    """How often the answer shown first is preferred; 0.5 without a position bias. None for verdicts of people."""
    consistency: float | None
    """Share of pairs with the same outcome in both orders."""
    calibration: Agreement | None = None
    num_unpaired: tuple[int, int] = (0, 0)
    """Answers of A and of B to prompts that the other did not answer."""
    unknown_ids: list[int | str] = field(default_factory=list)
    """Ids that people judged and that have no answers of both; not known with a limit."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = finite(asdict(self))
        return found

    def render(self) -> RenderableType:
        table = Table("A against B", *right("percent", "95 % interval"), box=None, padding=(0, 2, 0, 0))
        for name, rate in (("win rate, ties half", self.win_rate), ("length-controlled", self.length_controlled)):
            if rate is None:
                table.add_row(name, "–", "not identifiable: all lengths differ by the same")
            else:
                table.add_row(name, f"{100 * rate.value:.1f}", f"{100 * rate.low:.1f} to {100 * rate.high:.1f}")
        judged = self.num_pairs - self.num_without_verdict
        lines: list[RenderableType] = [
            f"A: {self.a}",
            f"B: {self.b}",
            f"judge: {self.judge}",
            "",
            table,
            "",
            f"{judged} pairs: wins {self.wins}, ties {self.ties}, losses {self.losses}; mean length "
            f"{self.mean_length[0]:.0f} and {self.mean_length[1]:.0f} characters",
        ]
        if self.num_without_verdict:
            lines.append(f"without a verdict: {self.num_without_verdict} more")
        if any(self.num_unpaired):
            lines.append(f"left out: {self.num_unpaired[0]} answers of A alone, {self.num_unpaired[1]} of B alone")
        if self.unknown_ids:
            some = ", ".join(map(repr, self.unknown_ids[:_SHOWN_IDS])) + " …" * (len(self.unknown_ids) > _SHOWN_IDS)
            lines.append(plain(f"verdicts without answers of both: {len(self.unknown_ids)}, of the ids {some}"))
        if self.first_share is not None and self.consistency is not None:
            lines.append(
                f"the answer shown first is preferred in {100 * self.first_share:.0f} % (50 without a position bias); "
                f"same verdict in both orders: {100 * self.consistency:.0f} %"
            )
            if self.consistency < 0.5:
                lines.append("this judge follows the position more than the answers: do not rely on it")
        if self.calibration is not None:
            lines.append(_calibration_line(self.calibration))
        return Stack(*lines)


def _calibration_line(found: Agreement) -> str:
    line = f"agrees with the given verdicts in {100 * found.agreement:.0f} % of {found.num_pairs} pairs"
    if found.agreement_without_ties is not None:
        line += f", {100 * found.agreement_without_ties:.0f} % without ties"
    return line + ("" if found.kappa is None else f"; Cohen's kappa {found.kappa:.2f}")


@takes(GenerateConfig)
def win_rate(
    a: str | PathLike[str],
    b: str | PathLike[str],
    judge: str | PathLike[str],
    *,
    config: GenerateConfig,
    prompts: str | PathLike[str] | None = None,
    out: str | PathLike[str] | None = None,
    judge_model: str | None = None,
    allow_network: bool = False,
    calibrate: str | PathLike[str] | None = None,
    tie_margin: float = TIE_MARGIN,
    limit: int | None = None,
    device: str = "auto",
    threads: int = 1,
    overwrite: bool = False,
) -> WinRate:
    """Judge the answers of A and B, each a ``.jsonl`` file of ``generate_answers`` or a model that answers ``prompts``.

    ``out`` is a directory for answers and verdicts, with which an interrupted call continues. ``calibrate`` is a file
    of verdicts by people: only its pairs are judged, and how often the judge agrees is reported.
    """
    folder = None if out is None else Path(out)
    common: dict[str, Any] = {"config": config, "limit": limit, "device": device, "threads": threads}
    for source in (a, b):  # what cannot be used is refused before anything is answered
        _check_side(source, prompts, folder)
    opened = open_judge(fspath(judge), model=judge_model, allow_network=allow_network)
    given = None if calibrate is None else _given(Path(calibrate))
    chats = [_answers(source, side, prompts, folder, overwrite, common) for side, source in (("a", a), ("b", b))]
    every = make_pairs(*chats, names=(fspath(a), fspath(b)), limit=limit)
    pairs, ids = every, {pair.id for pair in every}
    people = {f"--judge {judge}": opened.verdicts} if isinstance(opened, FileJudge) else {}
    if given is not None:
        pairs = [pair for pair in every if pair.id in given]
        people[f"--calibrate {calibrate}"] = given
    for option, named in people.items():
        _check_ids(option, named, ids)
    judged_by = opened or load_judge(fspath(judge), device=chosen_device(device), dtype=config.dtype or "float32")
    journal = None if folder is None else _journal(folder, judged_by, every, overwrite)
    verdicts = judge_pairs(judged_by, pairs, journal)
    result = summarise(
        pairs, verdicts, names=(fspath(a), fspath(b)), judge=judged_by, tie_margin=tie_margin, seed=config.seed
    )
    num_common = len(chats[0].keys() & chats[1].keys())
    result.num_unpaired = (len(chats[0]) - num_common, len(chats[1]) - num_common)
    result.unknown_ids = [] if limit else [one for one in dict.fromkeys(chain(*people.values())) if one not in ids]
    if given is not None:
        judged = {v.id: outcome(v.preference, tie_margin) for v in verdicts if v.preference is not None}
        result.calibration = agreement(list(judged.values()), [given[name] for name in judged])
    return result


def _given(path: Path) -> dict[int | str, Outcome]:
    if not path.is_file():
        raise UserError(f"--calibrate {path}: does not exist: give a file of verdicts")
    return read_verdicts(path)


def _check_ids(option: str, judged: Collection[int | str], ids: Collection[int | str]) -> None:
    if not set(judged) & set(ids):
        example = next(iter(judged))
        raise UserError(f"{option}: none of its ids has answers of both: check the ids, such as {example!r}")


def _check_side(source: str | PathLike[str], prompts: str | PathLike[str] | None, folder: Path | None) -> None:
    """Raise UserError for what is neither a file of answers nor a model that can answer."""
    path = Path(source)
    if path.suffix != ".jsonl":
        if prompts is None or folder is None:
            raise UserError(f"{fspath(source)}: a model needs --prompts FILE to answer, and --out DIR for its answers")
        check_source(model_in(source))
    elif not path.is_file():
        raise UserError(f"{path}: does not exist: give a file of `dwindle generate --prompts`, or a model")


def _answers(
    source: str | PathLike[str],
    side: str,
    prompts: str | PathLike[str] | None,
    folder: Path | None,
    overwrite: bool,
    common: dict[str, Any],
) -> Chats:
    """The chats of a file of answers; a model answers the prompts first.

    Its existing answers are kept if the same model, prompts and settings produced them, and refused otherwise.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        return read_chats(path)
    assert prompts is not None and folder is not None
    path = folder / f"{side}.answers.jsonl"
    beside = path.with_name(f"{path.name}.header")
    header = answers_header(source, prompts, common["config"], limit=common["limit"], device=common["device"])
    if path.is_file() and not overwrite:
        if not beside.is_file():
            raise UserError(f"--out {path}: {beside.name} is missing, which says what gave it: pass --overwrite")
        check_header(beside.read_bytes(), header, path)
    else:
        path.unlink(missing_ok=True)  # before its header changes: old answers never stand beside a new one
        write_text_atomic(beside, json_line(header), option="--out")
        generate_answers(source, prompts, path, overwrite=overwrite, **common)
    return read_chats(path)


def make_pairs(first: Chats, second: Chats, *, names: tuple[str, str], limit: int | None = None) -> list[Pair]:
    """Pairs of the ids that both have; an error if they answer different questions.

    A chat of several turns has common questions; each side's answers are shown together.
    """
    pairs = []
    for name, ours in first.items():
        theirs = second.get(name)
        if theirs is None:
            continue
        questions = [[m for m in chat if m["role"] != "assistant"] for chat in (ours, theirs)]
        if questions[0] != questions[1]:
            raise UserError(
                f"{names[1]}: id {name!r} answers another question than in {names[0]}: use the same prompts"
            )
        pairs.append(Pair(name, request_text(questions[0]), *(_answer_text(chat) for chat in (ours, theirs))))
    if not pairs:
        raise UserError(f"{names[0]}, {names[1]}: have no id in common: answer the same prompts")
    return pairs[:limit]


def _answer_text(chat: Sequence[Message]) -> str:
    answers = [message["content"] for message in chat if message["role"] == "assistant"]
    if len(answers) == 1:
        return answers[0]
    return "\n\n".join(f"(turn {number}) {text}" for number, text in enumerate(answers, 1))


def _journal(folder: Path, judge: Judge, pairs: Sequence[Pair], overwrite: bool) -> Journal | None:
    """None for a judge that costs nothing to ask again. A calibration may judge some ``pairs``, a later call the
    others."""
    if judge.identity is None:
        return None
    asked = json.dumps([[pair.id, pair.request, pair.a, pair.b] for pair in pairs])
    header = {"format": FORMAT, "judge": judge.identity, "pairs": hashlib.sha256(asked.encode()).hexdigest()}
    return Journal(folder / "verdicts.jsonl", header, overwrite=overwrite)


def judge_pairs(judge: Judge, pairs: Sequence[Pair], journal: Journal | None = None) -> list[Verdict]:
    """Both orders of every pair; those in the journal are not asked again."""
    known = {row["id"]: Verdict(**row) for row in (journal.rows if journal is not None else ())}
    verdicts = []
    with Bar("judging", len(pairs)) as bar:
        for pair in pairs:
            found = known.get(pair.id)
            if found is None:
                a_first = judge.judge(pair, a_first=True)
                other = None if a_first is None else 1 - a_first
                found = Verdict(pair.id, a_first, judge.judge(pair, a_first=False) if judge.sees_order else other)
                if journal is not None:
                    journal.append(asdict(found))
            verdicts.append(found)
            bar.advance()
    return verdicts


def summarise(
    pairs: Sequence[Pair],
    verdicts: Sequence[Verdict],
    *,
    names: tuple[str, str],
    judge: Judge,
    tie_margin: float = TIE_MARGIN,
    seed: int = 0,
) -> WinRate:
    """Rates over the pairs that have a verdict."""
    found = [(pair, p) for pair, v in zip(pairs, verdicts, strict=True) if (p := v.preference) is not None]
    if not found:
        said = f"said neither A nor B for any of {len(pairs)} pairs: choose a judge that follows instructions"
        raise UserError(f"--judge {judge.name}: {said}")
    outcomes: list[Outcome] = [outcome(preference, tie_margin) for _, preference in found]
    lengths = [(len(pair.a), len(pair.b)) for pair, _ in found]
    plain, controlled = rates([VALUES[one] for one in outcomes], [a - b for a, b in lengths], seed=seed)
    asked = verdicts if judge.sees_order else ()
    both = [(v.a_first, v.b_first) for v in asked if v.a_first is not None and v.b_first is not None]
    shown = [VALUES[outcome(p)] for pair in both for p in pair]
    same = [outcome(first) == outcome(1 - second) for first, second in both]
    return WinRate(
        a=names[0],
        b=names[1],
        judge=judge.name,
        num_pairs=len(pairs),
        num_without_verdict=len(pairs) - len(found),
        wins=outcomes.count("A"),
        ties=outcomes.count("tie"),
        losses=outcomes.count("B"),
        win_rate=plain,
        length_controlled=controlled,
        mean_length=(sum(a for a, _ in lengths) / len(lengths), sum(b for _, b in lengths) / len(lengths)),
        first_share=sum(shown) / len(shown) if shown else None,
        consistency=sum(same) / len(same) if same else None,
    )
