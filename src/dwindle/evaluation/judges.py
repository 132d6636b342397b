"""Judges of two answers: a local model by the logits of A and B, an OpenAI-compatible address, or people's verdicts."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from dwindle.core.errors import UserError
from dwindle.core.reading import parse_json
from dwindle.evaluation.config import SamplingConfig
from dwindle.evaluation.data import json_lines
from dwindle.evaluation.encoding import max_length_of
from dwindle.evaluation.in_memory import load_with_tokenizer
from dwindle.evaluation.preferences import Outcome
from dwindle.evaluation.prompts import Message, chat_ids, is_id
from dwindle.evaluation.sampling import BatchDecoder
from dwindle.evaluation.tasks import BrokenItem
from dwindle.sources.fingerprint import source_fingerprint
from dwindle.sources.loading import check_source, model_in
from dwindle.training.sampling import evaluating

_MARKS = " \t\r\n*_`\"'.,:;!()[]{}"
_LETTER = re.compile(r"\b([AB])\b(?=[*_`\"')\]}]*\s*(?:$|[.,;:!\n–—]|is (?:the )?(?:(?!not\b)\w+ )?better\b))")
_COMPARED = re.compile(r"\b(?:than|over|to) (?:answer )?[AB]\b")
"""The answer that another one is better than."""
_TIE = re.compile(r"\b(?:tie|tied|equal|equally)\b", re.IGNORECASE)
_UNDECIDED = re.compile(
    r"\b(?:neither|nor|cannot|can't)\b|(?:\bnot|n't) (?:a tie|think|sure|clear|say)\b", re.IGNORECASE
)
KEY_VARIABLE = "DWINDLE_JUDGE_KEY"
_QUESTION = """Two assistants answered the same request. Decide which answer is better: correct, helpful, and to the \
point. A longer answer is not better for its length.

[Request]
{request}

[Answer A]
{first}
[End of answer A]

[Answer B]
{second}
[End of answer B]

Which answer is better? Reply with one letter, A or B."""
_LEAST_MASS = 0.01
"""Below this probability of A and B together, a model has not given a verdict."""
_MOST_ANSWER_BYTES = 1 << 20
_TRIES, _TIMEOUT_S = 4, 120.0
_LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to the same request."""

    id: int | str
    request: str
    a: str
    b: str

    def question(self, *, a_first: bool) -> str:
        first, second = (self.a, self.b) if a_first else (self.b, self.a)
        return _QUESTION.format(request=self.request, first=first, second=second)


class Judge(Protocol):
    name: str
    sees_order: bool
    """Whether both orders are asked; verdicts of people are taken as they are."""
    identity: dict[str, str] | None
    """What decides its verdicts: with another one, those of an interrupted command are not continued. None: asking it
    again costs nothing."""

    def judge(self, pair: Pair, *, a_first: bool) -> float | None:
        """Probability that the answer shown first is better; None without a verdict."""


class LocalJudge:
    """A causal language model: its probability of A against B as the next token."""

    sees_order = True

    def __init__(self, model: Any, tokenizer: Any, name: str, fingerprint: str = "") -> None:
        self.name, self._model, self._tokenizer = name, model, tokenizer
        first = next(model.parameters())
        self.identity: dict[str, str] | None = {
            "model": fingerprint,
            "dtype": str(first.dtype),
            "device": first.device.type,
        }
        self._max_length = max_length_of(model.config, tokenizer)
        letters = [self._first_tokens(letter) for letter in "AB"]
        self._a, self._b = (sorted(own - other) for own, other in (letters, letters[::-1]))
        if not self._a or not self._b:
            raise UserError(f"--judge {name}: its tokenizer has no tokens for A and B: choose another judge")

    def _first_tokens(self, letter: str) -> set[int]:
        """The letter alone, at the start of a text (where some tokenizers put a space before it), or after a space."""
        found = [self._tokenizer(text, add_special_tokens=False).input_ids for text in (letter, f" {letter}")]
        alone = self._tokenizer.convert_tokens_to_ids(letter)  # of an unknown one, the same for all letters
        return {int(ids[0]) for ids in found if len(ids) == 1} | ({int(alone)} if alone is not None else set())

    def judge(self, pair: Pair, *, a_first: bool) -> float | None:
        question = pair.question(a_first=a_first)
        if getattr(self._tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": question}]
            ids = chat_ids(self._tokenizer, chat, f"--judge {self.name}", "choose another judge")
        else:
            ids = [int(token) for token in self._tokenizer(f"{question}\n\nThe better answer is").input_ids]
        if len(ids) > self._max_length:
            return None
        with evaluating(self._model):
            logits_V = BatchDecoder(self._model, [ids], SamplingConfig(), None).logits()[0].double()
        p_V = logits_V.softmax(dim=-1)
        first, second = float(p_V[self._a].sum()), float(p_V[self._b].sum())
        return first / (first + second) if first + second >= _LEAST_MASS else None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


class AddressJudge:
    """An OpenAI-compatible server: ``<address>/chat/completions``; its key comes from the environment only."""

    sees_order = True

    def __init__(self, address: str, model: str) -> None:
        try:
            parts = urlsplit(address)
        except ValueError as error:
            raise UserError(f"--judge: is not an address ({error}): give one such as https://host/v1") from error
        if parts.username or parts.password or parts.query:
            raise UserError(f"--judge: an address holds no key: put it into the environment as {KEY_VARIABLE}")
        self._key = os.environ.get(KEY_VARIABLE, "")
        if self._key and parts.scheme != "https" and parts.hostname not in _LOCAL_NAMES:
            raise UserError(f"--judge {address}: the key of {KEY_VARIABLE} is sent by https only: use https")
        self.name = f"{model} at {parts.netloc}"
        self._url, self._model = address.rstrip("/") + "/chat/completions", model
        self.identity: dict[str, str] | None = {"address": self._url, "model": model}
        direct = [urllib.request.ProxyHandler({})] if parts.hostname in _LOCAL_NAMES else []  # no proxy gets the key
        self._open = urllib.request.build_opener(_NoRedirects, *direct).open

    def judge(self, pair: Pair, *, a_first: bool) -> float | None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": pair.question(a_first=a_first)}],
            "temperature": 0,
            "max_tokens": 16,
        }
        return verdict_in(self._ask(json.dumps(body).encode()))

    def _ask(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        reason, wait = "", 0.0
        for number in range(_TRIES):
            if number:
                time.sleep(wait)
            try:
                with self._open(urllib.request.Request(self._url, body, headers), timeout=_TIMEOUT_S) as reply:
                    answer = parse_json(reply.read(_MOST_ANSWER_BYTES))
                return str(answer["choices"][0]["message"]["content"] or "")
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}"
                if error.code != 429 and error.code < 500:
                    break
                asked = error.headers.get("Retry-After", "")
                wait = min(float(asked) if asked.isdecimal() else 2.0**number, 60.0)
            except (OSError, http.client.HTTPException) as error:
                reason = " ".join(str(getattr(error, "reason", error)).split())
                wait = min(2.0**number, 60.0) / 4
            except (ValueError, LookupError, TypeError):
                reason = "not an answer of an OpenAI-compatible server"
                break
        raise UserError(f"--judge {self.name}: cannot be asked ({reason}): check the address, the model and the key")


def verdict_in(answer: str) -> float | None:
    """1 for A, 0 for B, 0.5 for a tie; None if an answer names none of them, or several.

    A letter counts in upper case and before punctuation, the end or "is better": "A close call" is not a verdict.
    """
    whole = answer.strip(_MARKS)
    if whole in ("A", "B") or whole.lower() in ("tie", "both"):
        return {"A": 1.0, "B": 0.0}.get(whole, 0.5)
    if _UNDECIDED.search(answer):
        return None
    rest = _COMPARED.sub("", answer)
    found = {1.0 if letter == "A" else 0.0 for letter in _LETTER.findall(rest)}
    found |= {0.5} if _TIE.search(rest) else set()
    return found.pop() if len(found) == 1 else None


class FileJudge:
    """Verdicts of people: ``{"id": 81, "verdict": "A"}``, also ``B`` and ``tie``."""

    sees_order = False
    identity: dict[str, str] | None = None

    def __init__(self, path: Path) -> None:
        self.name, self.verdicts = str(path), read_verdicts(path)

    def judge(self, pair: Pair, *, a_first: bool) -> float | None:
        found = self.verdicts.get(pair.id)
        return None if found is None else {"A": 1.0, "B": 0.0, "tie": 0.5}[found]


def read_verdicts(path: Path) -> dict[int | str, Outcome]:
    """The outcome of every pair by its id."""
    found: dict[int | str, Outcome] = {}
    names: Mapping[str, Outcome] = {"a": "A", "b": "B", "tie": "tie"}
    for label, row in json_lines(path, "verdicts"):
        verdict = None if isinstance(row, BrokenItem) else names.get(str(row.get("verdict")).lower())
        if verdict is None or not is_id(row.get("id")):
            raise UserError(f"{path}, {label}: needs an id and a verdict, A, B or tie: correct the line")
        if row["id"] in found:
            raise UserError(f"{path}, {label}: the id {row['id']!r} is there twice: remove one")
        found[row["id"]] = verdict
    if not found:
        raise UserError(f"{path}: has no verdicts: give a line with id and verdict for each")
    return found


def open_judge(spec: str, *, model: str | None, allow_network: bool) -> Judge | None:
    """An address or a file of verdicts; None: a model, which is loaded by ``load_judge`` when it is needed."""
    if spec.startswith(("http://", "https://")):
        if not allow_network:
            raise UserError(f"--judge {spec}: prompts and answers would be sent there: pass --allow-network to agree")
        if not model:
            raise UserError("--judge-model: is missing: name the model that the address serves")
        return AddressJudge(spec, model)
    if Path(spec).suffix == ".jsonl":
        if not Path(spec).is_file():
            raise UserError(f"--judge {spec}: does not exist: give a file of verdicts, a model or an address")
        return FileJudge(Path(spec))
    check_source(model_in(spec))
    return None


def load_judge(spec: str, *, device: str, dtype: str) -> Judge:
    """A model as a judge."""
    source = model_in(spec)
    loaded, tokenizer = load_with_tokenizer(source, dtype, device)
    return LocalJudge(loaded, tokenizer, spec, source_fingerprint(source))


def request_text(messages: Sequence[Message]) -> str:
    """The question: a single message as it is, a longer chat with its roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
