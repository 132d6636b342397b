"""An Ollama ``Modelfile`` beside a GGUF file: the chat template in Go's syntax, and stop tokens.

The template is found by rendering the model's own (Jinja) template with marks for system message, prompt and answer. It
is written only if it then renders chats of one and two turns as the model's own does; otherwise the line is left out,
and Ollama renders the Jinja template of the GGUF file itself, or takes the nearest of those that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwindle.export.gguf_vocabulary import added_around

_SYSTEM, _PROMPT, _ANSWER = "\x02system\x03", "\x02prompt\x03", "\x02answer\x03"
_GO, _QUOTES = "{{", '"""'


@dataclass(frozen=True, slots=True)
class Turns:
    """What stands around the parts of a chat; ``default`` is the system message of a chat without one."""

    before_system: str
    after_system: str
    before_prompt: str
    after_prompt: str
    after_answer: str
    default: str | None

    def go(self) -> str:
        """The template, which Ollama executes once for every turn."""
        system = f"{{{{ if .System }}}}{self.before_system}{{{{ .System }}}}{self.after_system}{{{{ end }}}}"
        prompt = f"{{{{ if .Prompt }}}}{self.before_prompt}{{{{ .Prompt }}}}{self.after_prompt}{{{{ end }}}}"
        return f"{system}{prompt}{{{{ .Response }}}}{self.after_answer}"

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """A chat as Ollama renders it; the last message is a prompt."""
        text = ""
        if messages[0]["role"] == "system" or self.default:
            first = messages[0]["content"] if messages[0]["role"] == "system" else self.default
            text = f"{self.before_system}{first}{self.after_system}"
        for message in messages:
            if message["role"] == "user":
                text += f"{self.before_prompt}{message['content']}{self.after_prompt}"
            if message["role"] == "assistant":
                text += f"{message['content']}{self.after_answer}"
        return text


def modelfile(file: str, tokenizer: Any, generation: Any) -> str:
    """The text of a ``Modelfile`` in the directory of the GGUF file."""
    lines = [f"FROM ./{file}"]
    turns = turns_of(tokenizer) if getattr(tokenizer, "chat_template", None) else None
    if turns is not None:
        lines.append(f"TEMPLATE {_QUOTES}{turns.go()}{_QUOTES}")
        if turns.default:
            lines.append(f"SYSTEM {_QUOTES}{turns.default}{_QUOTES}")
    elif not getattr(tokenizer, "chat_template", None):
        lines.append(f"TEMPLATE {_QUOTES}{{{{ .Prompt }}}}{_QUOTES}")
    lines += [f'PARAMETER stop "{token}"' for token in stop_tokens(tokenizer, generation, turns)]
    return "\n".join(lines) + "\n"


def turns_of(tokenizer: Any) -> Turns | None:
    """The model's own template taken apart; None if Go's syntax of one turn cannot express it."""
    try:
        whole = _rendered(tokenizer, [_message("system"), _message("user"), _message("assistant"), _message("user")])
        alone = _rendered(tokenizer, [_message("user")])
        done = _rendered(tokenizer, [_message("user"), _message("assistant")], answer=False)
    except Exception:  # a template may refuse a system message, or anything else
        return None
    parts = whole.split(_PROMPT)
    if len(parts) != 3 or whole.count(_SYSTEM) != 1 or whole.count(_ANSWER) != 1 or alone.count(_PROMPT) != 1:
        return None
    before, middle, after_prompt = parts
    started = alone.partition(_PROMPT)[0]
    after_answer = done.partition(_ANSWER)[2]
    answered = f"{after_prompt}{_ANSWER}{after_answer}"
    before_prompt = middle.removeprefix(answered)
    if not (middle.startswith(answered) and before.endswith(before_prompt) and started.endswith(before_prompt)):
        return None
    before_system, _, after_system = before.removesuffix(before_prompt).partition(_SYSTEM)
    rest = started.removesuffix(before_prompt)
    default = None
    if rest.startswith(before_system) and rest.endswith(after_system) and rest:
        default = rest.removeprefix(before_system).removesuffix(after_system)
    turns = Turns(before_system, after_system, before_prompt, after_prompt, after_answer, default)
    return turns if _is_faithful(turns, tokenizer) else None


def _message(role: str) -> dict[str, str]:
    return {"role": role, "content": {"system": _SYSTEM, "user": _PROMPT, "assistant": _ANSWER}[role]}


def _rendered(tokenizer: Any, messages: Sequence[dict[str, str]], *, answer: bool = True) -> str:
    """The chat as text, up to where an answer starts; without a begin token that runtimes add themselves."""
    text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer))
    return text.removeprefix(tokenizer.bos_token) if added_around(tokenizer)[0] else text


def _is_faithful(turns: Turns, tokenizer: Any) -> bool:
    pieces = (turns.before_system, turns.after_system, turns.before_prompt, turns.after_prompt, turns.after_answer)
    if any(mark in piece for piece in (*pieces, turns.default or "") for mark in (_GO, _QUOTES)):
        return False
    system = {"role": "system", "content": "Be brief."}
    first = [{"role": "user", "content": "Hello."}]
    second = [*first, {"role": "assistant", "content": "Good day."}, {"role": "user", "content": "1 + 1?"}]
    chats = [first, second, [system, *first], [system, *second]]
    return all(turns.render(chat) == _rendered(tokenizer, chat) for chat in chats)


def stop_tokens(tokenizer: Any, generation: Any, turns: Turns | None) -> list[str]:
    """The tokens that end an answer: of the tokenizer, of the generation settings, and of the template."""
    ids = [tokenizer.eos_token_id]
    stops = getattr(generation, "eos_token_id", None)
    ids += stops if isinstance(stops, list) else [stops]
    found = [tokenizer.convert_ids_to_tokens(int(number)) for number in ids if number is not None]
    if turns is not None:
        found += [token for token in tokenizer.all_special_tokens if token in turns.after_answer]
    return list(dict.fromkeys(token for token in found if token and '"' not in token))


def place_of(gguf: Path) -> Path:
    return gguf.with_name(f"{gguf.stem}.Modelfile")
