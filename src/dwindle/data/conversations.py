"""Conversations from the rows of JSON lines, Parquet or a Hugging Face dataset; the form of a row is known by its keys.

{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
{"instruction": "…", "input": "…", "output": "…"}           input may be missing or empty
{"prompt": "…", "completion": "…"}                          each a text or a list of messages

With ``"finished": false``, as ``dwindle generate`` writes it, answers were cut: where they stop is not learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dwindle.core.errors import UserError
from dwindle.data.readers import TextInput, without_lone_surrogates

Message = dict[str, str]

ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMS = '"messages", "instruction" with "output", or "prompt" with "completion"'


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order; those of the assistant are learned."""

    messages: list[Message]
    place: str
    """File and line, for messages."""
    first_answer: int = 0
    """Assistant turns before this one are only read: the prompt of a prompt/completion row."""
    is_cut: bool = False
    """Whether answers were cut at a number of tokens, so that their ends say nothing."""

    @property
    def answers(self) -> list[int]:
        """Places of the turns that are learned; a conversation that begins with one has no question for it."""
        first = max(self.first_answer, 1)
        return [i for i, turn in enumerate(self.messages) if turn["role"] == "assistant" and i >= first]

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.place} {problem}")


def conversations_in(rows: TextInput, input_joint: str = "\n\n") -> Iterator[Conversation]:
    """Every conversation of an input, an error if it has none; the joint stands between instruction and input."""
    empty = True
    for number, record in rows.records():
        empty = False
        yield conversation_of(record, f"{rows.option}: {rows.name}:{number}", input_joint)
    if empty:
        raise UserError(f"{rows.option}: {rows.name} contains no conversations: give a file with some")


def conversation_of(record: dict[str, Any], place: str, input_joint: str = "\n\n") -> Conversation:
    """The conversation of one row; one that cannot be learned from is an error that names its line."""
    messages, first = _turns(record, place, input_joint)
    turns = [_message(turn, number, place) for number, turn in enumerate(messages, 1)]
    found = Conversation(turns, place, first, is_cut=record.get("finished") is False)
    if not found.answers:
        raise found.error("has no assistant turn, so there is nothing to learn: add an answer or remove the line")
    for number in found.answers:
        if not found.messages[number]["content"].strip():
            raise found.error(f"turn {number + 1}: the assistant's answer is empty: write one or remove the line")
    return found


def _turns(record: dict[str, Any], place: str, input_joint: str) -> tuple[list[Any], int]:
    """(Turns, number of those that are a prompt)."""
    if isinstance(turns := record.get("messages"), list):
        return turns, 0
    if "prompt" in record and "completion" in record:
        prompt, completion = _as_turns(record["prompt"], "user"), _as_turns(record["completion"], "assistant")
        return [*prompt, *completion], len(prompt)
    if "instruction" in record and "output" in record:
        parts = [record["instruction"], record.get("input") or ""]
        if not all(isinstance(part, str) for part in parts):
            raise UserError(f"{place} has an instruction or input that is not text: correct or remove the line")
        question = instruction_text(parts[0], parts[1], input_joint)
        return [*_as_turns(question, "user"), *_as_turns(record["output"], "assistant")], 0
    known = ", ".join(map(str, record)) or "none"
    raise UserError(f"{place} is not a conversation (it has: {known}): each row needs {_FORMS}")


def instruction_text(instruction: str, extra: str, input_joint: str) -> str:
    """The question of an ``instruction`` with its ``input``, which may be empty."""
    return input_joint.join(part for part in (instruction, extra) if part.strip())


def _as_turns(value: Any, role: str) -> list[Any]:
    """A list of messages as it is; anything else becomes one turn."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _message(turn: Any, number: int, place: str) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise UserError(f'{place} turn {number}: is not of the form {{"role": …, "content": …}}: correct it')
    if turn["role"] not in ROLES:
        raise UserError(f"{place} turn {number}: the role {turn['role']!r} is unknown: use one of {', '.join(ROLES)}")
    if not isinstance(turn.get("content"), str):
        problem = "its content is not text (tool calls and images cannot be trained on): remove the line"
        raise UserError(f"{place} turn {number}: {problem}")
    return {"role": turn["role"], "content": without_lone_surrogates(turn["content"])}
