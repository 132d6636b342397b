"""Prompt files: JSON lines of chats or texts, and how a chat becomes tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwindle.core.errors import UserError, first_line
from dwindle.data.conversations import instruction_text
from dwindle.evaluation.data import json_lines, read_text
from dwindle.evaluation.tasks import BrokenItem

Message = dict[str, str]
Chats = dict[int | str, tuple[Message, ...]]
"""Messages of each chat, by its id."""
_IDS = ("id", "key", "question_id")
_TEXTS = ("prompt", "instruction", "question", "text")
_FORMS = "messages, turns, prompt, instruction (and input), question or text"
CORRECT = "correct its roles, or pass --no-chat"
"""What to do about a file of prompts that a template refuses."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat to be answered: messages up to a user's, and further questions that follow the answers."""

    id: int | str
    where: str
    """File and line, for messages."""
    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()


def read_prompts(path: Path, *, limit: int | None = None, joint: str = "\n\n") -> list[Prompt]:
    """The prompts of a ``.jsonl`` file (also compressed), or of a ``.txt`` file with one per line.

    ``joint`` stands between an instruction and its input: what the model's template was trained with.
    """
    if not path.is_file():
        raise UserError(f"--prompts {path}: does not exist: give a .jsonl or .txt file")
    if path.suffix == ".txt":
        lines = enumerate(read_text(path, "--prompts").replace("\r\n", "\n").split("\n"), 1)
        found = [(f"line {number}", {"prompt": line}) for number, line in lines if line.strip()]
    else:
        found = list(json_lines(path, "--prompts"))
    prompts = [make_prompt(row, number, f"{path}, {label}", joint) for number, (label, row) in enumerate(found[:limit])]
    if not prompts:
        raise UserError(f"--prompts {path}: has no prompt: give one per line")
    seen: dict[int | str, str] = {}
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(
                f"{prompt.where}: the id {prompt.id!r} is also that of {seen[prompt.id]}: give each its own"
            )
        seen[prompt.id] = prompt.where
    return prompts


def make_prompt(row: Any, number: int, where: str, joint: str) -> Prompt:
    """The prompt of a record; without an id its number is taken."""
    if isinstance(row, BrokenItem) or not isinstance(row, Mapping):
        raise UserError(f"{where}: is not a JSON object: correct or remove the line")
    name = next((row[key] for key in _IDS if row.get(key) is not None), number)
    if not is_id(name):
        raise UserError(f"{where}: the id {name!r:.60} is neither a number nor a text: correct it")
    chat = row.get("messages", row.get("prompt"))
    if isinstance(chat, list):
        return Prompt(name, where, _asked(checked_messages(chat, where), where))
    turns = row.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
        return Prompt(name, where, (_user(turns[0]),), tuple(turns[1:]))
    key = next((key for key in _TEXTS if isinstance(row.get(key), str)), "")
    text, extra = row.get(key, ""), row.get("input")
    text = instruction_text(text, extra, joint) if key == "instruction" and isinstance(extra, str) else text
    if not text.strip():
        raise UserError(f"{where}: has no text to answer: give {_FORMS}")
    return Prompt(name, where, (_user(text),))


def is_id(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def checked_messages(chat: Sequence[Any], where: str) -> tuple[Message, ...]:
    """The messages with only their roles and contents; an error if one has another form."""
    messages = []
    for place, message in enumerate(chat, 1):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"{where}: message {place} has no role and content of text: correct it")
        messages.append({"role": role, "content": content})
    return tuple(messages)


def read_chats(path: Path) -> Chats:
    """The messages of every line of a file of ``dwindle generate --prompts``; the last one is the answer."""
    chats: Chats = {}
    for label, row in json_lines(path, "answers"):
        where = f"{path}, {label}"
        if isinstance(row, BrokenItem) or not isinstance(row.get("messages"), list) or not is_id(row.get("id")):
            raise UserError(f"{where}: is not an answer: give a file of `dwindle generate --prompts`")
        messages = checked_messages(row["messages"], where)
        if not messages or messages[-1]["role"] != "assistant":
            raise UserError(f"{where}: the last message is not an answer of the assistant: correct it")
        if row["id"] in chats:
            raise UserError(f"{where}: the id {row['id']!r} is there twice: remove one")
        chats[row["id"]] = messages
    if not chats:
        raise UserError(f"{path}: has no answers: give a file of `dwindle generate --prompts`")
    return chats


def _asked(messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """Up to the last message of a user: answers after it are what is to be generated."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise UserError(f"{where}: no message has the role user: there is nothing to answer")
    return messages[: users[-1] + 1]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def chat_ids(tokenizer: Any, messages: Sequence[Message], where: str, advice: str = CORRECT) -> list[int]:
    """Tokens of a chat in the model's own template, up to where its answer begins; ``advice`` if that refuses it.

    Templates are untrusted code: transformers runs them in jinja's sandbox, and whatever they raise is one line here.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{where}: the model has no chat template: pass --no-chat to continue plain text")
    try:
        ids = tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=False)
    except Exception as error:  # of jinja, or anything that the template's code leads to
        reason = first_line(error)
        raise UserError(f"{where}: the model's chat template refuses this chat ({reason}): {advice}") from error
    return [int(token) for token in ids]


def prompt_ids(
    tokenizer: Any, messages: Sequence[Message], where: str, *, chat: bool, advice: str = CORRECT
) -> list[int]:
    """Tokens of a chat, or without ``chat`` of its last message as plain text."""
    if chat:
        return chat_ids(tokenizer, messages, where, advice)
    ids = [int(token) for token in tokenizer(messages[-1]["content"]).input_ids]
    if not ids:
        raise UserError(f"{where}: the prompt has no tokens: give the beginning of a text")
    return ids
