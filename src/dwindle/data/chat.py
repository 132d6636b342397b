"""From conversations to token ids: the tokenizer's own chat template, and which tokens are answers.

An answer is what the template adds to the prompt that ends with its turn: the text of the turn and the token that ends
it, unless the answer was cut. A template whose earlier turns do not change is rendered once for a whole conversation.
Where they do change (some drop earlier reasoning, some move the system text to the last question), every answer becomes
an example of its own, as the model will see it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from dwindle.core.errors import UserError, first_line
from dwindle.data.conversations import Conversation, Message, conversations_in
from dwindle.data.readers import TextInput
from dwindle.data.tokenizing import DocumentEncoder, EncodedPiece, check_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 512
_MARK = "dwindle7mark"
_ALPACA_INPUT = "\n\n### Input:\n"
_ALPACA = """\
{%- if messages[0].role == 'system' -%}
{{ messages[0].content | trim }}
{%- elif '### Input:' in messages[0].content -%}
Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.
{%- else -%}
Below is an instruction that describes a task. Write a response that appropriately completes the request.
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '\\n\\n### Instruction:\\n' + message.content | trim }}
{%- elif message.role == 'assistant' -%}
{{ '\\n\\n### Response:\\n' + message.content | trim + eos_token }}
{%- elif message.role != 'system' or not loop.first -%}
{{ raise_exception('this model has no chat template, and the prompt of Alpaca has no role ' + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\n\\n### Response:\\n' }}{%- endif -%}
"""


def chat_template_of(tokenizer: PreTrainedTokenizerBase, encoder: DocumentEncoder) -> str:
    """The tokenizer's template; the prompt of Alpaca where it has none."""
    if tokenizer.chat_template:
        try:
            return str(tokenizer.get_chat_template())
        except ValueError as error:  # several templates, and none of them is the default
            raise UserError(f"tokenizer: {first_line(error)}: name one of its chat templates default") from error
    if tokenizer.eos_token is None:
        raise UserError("tokenizer: it has neither a chat template nor an eos token to end an answer: set one of them")
    return ("" if encoder.beginning_of_text is None else "{{- bos_token -}}") + _ALPACA


def input_joint(template: Any) -> str:
    """The separator of an instruction and its input: Alpaca's heading in its prompt, else an empty line."""
    is_alpaca = isinstance(template, str) and template.rstrip().endswith(_ALPACA.rstrip())
    return _ALPACA_INPUT if is_alpaca else "\n\n"


@dataclass(slots=True)
class Example:
    """A rendered text and the characters [start, stop) of its answers."""

    text: str
    answers: list[tuple[int, int]] = field(default_factory=list)


class ChatEncoder(DocumentEncoder):
    """Encodes conversations as examples: text in the tokenizer's chat template, and which of its tokens are answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        if self.backend is None:
            raise UserError(f"tokenizer: {type(tokenizer).__name__} does not say where its tokens are in the text")
        self.template = chat_template_of(tokenizer, self)
        self.template_fingerprint = hashlib.sha256(self.template.encode()).hexdigest()
        self.input_joint = input_joint(self.template)
        """The separator of an instruction and its input."""
        self._kept: set[tuple[str | None, ...]] = set()
        """Roles between their neighbours' that the template is known to keep."""
        self._special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]

    def end_of_turn(self, last: Iterable[int]) -> int | None:
        """The token that ends answers: the first of their ``last`` tokens that never occurs inside a text."""
        names = ((token, str(self._tokenizer.convert_ids_to_tokens(token))) for token in last)
        return next((token for token, name in names if name in self._special), None)

    @property
    def identity(self) -> str:
        """Everything that determines the ids of a conversation."""
        return f"{super().identity}/chat-cut/{self.template_fingerprint}"

    def encode_input(self, source: TextInput) -> Iterator[EncodedPiece]:
        """The examples of all conversations of an input."""
        return self.encode_conversations(conversations_in(source, self.input_joint))

    def encode_conversations(self, conversations: Iterable[Conversation]) -> Iterator[EncodedPiece]:
        """The examples of all conversations, in order."""
        examples = (numbered for conversation in conversations for numbered in enumerate(self.examples(conversation)))
        while batch := list(islice(examples, _BATCH)):
            texts = [example.text for _, example in batch]
            encoded = self.backend.encode_batch(texts, add_special_tokens=False)
            for (number, example), encoding in zip(batch, encoded, strict=True):
                check_ids(max(encoding.ids, default=0), self.num_embeddings, "tokenizer: gives")
                answers = _token_spans(np.array(encoding.offsets).reshape(-1, 2), example.answers)
                yield EncodedPiece(np.array(encoding.ids, dtype=self.dtype), True, answers, number == 0)

    def examples(self, conversation: Conversation) -> Iterator[Example]:
        """One example, or several where the template changes earlier turns."""
        current: Example | None = None
        for number in conversation.answers:
            prompt = self._rendered(conversation, number, prompt=True)
            text = self._rendered(conversation, number + 1)
            if not text.startswith(prompt):
                raise conversation.error(
                    f"turn {number + 1}: the chat template renders an answer without the prompt that asks for it: "
                    "use a template for training"
                )
            if current is None or not prompt.startswith(current.text):
                if current is not None:
                    yield current
                current = Example(text)
            current.text = text
            current.answers.append((len(prompt), self._end(text, len(prompt), conversation.is_cut)))
        assert current is not None
        yield current

    def _end(self, text: str, start: int, is_cut: bool) -> int:
        """Where an answer ends: white space after the token that ends a turn is never generated."""
        stripped = text[start:].rstrip()
        if not (end := self._special_end(stripped)):
            return len(text)
        if not is_cut:
            return start + len(stripped)
        while end := self._special_end(stripped.rstrip()):  # some templates end the turn, then the text
            stripped = stripped.rstrip().removesuffix(end)
        return start + len(stripped)

    def _special_end(self, text: str) -> str:
        """The special token that a text ends with, or nothing."""
        return next((token for token in self._special if text.endswith(token)), "")

    def _rendered(self, conversation: Conversation, count: int, *, prompt: bool = False) -> str:
        """The first ``count`` turns as text; a turn that the template refuses or leaves out is an error."""
        messages = conversation.messages[:count]
        try:
            text = render(self._tokenizer, self.template, messages, prompt=prompt)
        except SecurityError as error:
            reason = f"chat template: it runs unsafe code ({first_line(error)}): use another template"
            raise conversation.error(reason) from error
        except TemplateSyntaxError as error:
            raise conversation.error(
                f"chat template: line {error.lineno} is not Jinja ({first_line(error)})"
            ) from error
        except Exception as error:  # a template is a program: whatever it raises is about this conversation
            problem = f"the chat template refuses it ({first_line(error)}): change its turns or remove the line"
            raise conversation.error(problem) from error
        for number, message in enumerate(messages):
            around = tuple(messages[n]["role"] if 0 <= n < count else None for n in range(number - 1, number + 2))
            if message["content"].strip() in text and around in self._kept:
                continue
            if self._leaves_out(messages, number, prompt):
                raise conversation.error(
                    f"turn {number + 1}: the chat template leaves out the role {message['role']!r}: "
                    "remove the turn or use another template"
                )
            self._kept.add(around)
        return text

    def _leaves_out(self, messages: list[Message], number: int, prompt: bool) -> bool:
        """Whether a mark in place of a turn's content disappears; the content itself may also stand elsewhere."""
        marked = [*messages[:number], messages[number] | {"content": _MARK}, *messages[number + 1 :]]
        try:
            return _MARK not in render(self._tokenizer, self.template, marked, prompt=prompt)
        except Exception:  # a template may refuse the mark, which says nothing about the turn
            return False


def render(tokenizer: Any, template: str, messages: Sequence[Message], *, prompt: bool) -> str:
    """The text of a conversation, in the sandbox of transformers; with ``prompt`` up to where an answer begins."""
    text = tokenizer.apply_chat_template(
        list(messages), chat_template=template, tokenize=False, add_generation_prompt=prompt
    )
    return str(text)


def _token_spans(offsets_N2: npt.NDArray[Any], answers: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    """Tokens [start, stop) with a character of an answer; the first token of an example is not predicted."""
    learned = np.zeros(len(offsets_N2) + 2, dtype=np.int8)
    for start, stop in answers:
        learned[1:-1] |= (offsets_N2[:, 0] < stop) & (offsets_N2[:, 1] > start)
    learned[1] = 0
    edges = np.diff(learned)
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], axis=1).astype(np.uint64)
