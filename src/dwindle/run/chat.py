"""``dwindle chat``: models that answer token by token, and a conversation in the terminal."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.request import Request

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.config import apply_overrides, from_dict
from dwindle.core.errors import UserError, first_line
from dwindle.core.files import refuse_file, write_text_atomic
from dwindle.core.jsonl import json_line
from dwindle.core.reading import parse_json
from dwindle.data.readers import without_lone_surrogates
from dwindle.evaluation.config import LONG_ANSWER, GenerateConfig, SamplingConfig
from dwindle.evaluation.encoding import max_length_of
from dwindle.evaluation.generation import is_for_llamacpp, room_for, sampling_request
from dwindle.evaluation.in_memory import load_with_tokenizer
from dwindle.evaluation.prompts import Message, prompt_ids
from dwindle.evaluation.sampling import end_tokens, stream
from dwindle.export.llamacpp import open_here, require_xllamacpp
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.sources.loading import check_source, chosen_device, load_config, load_tokenizer, locate, model_in
from dwindle.training.sampling import continuation_text

_ADVICE = "remove the system prompt, or give the model another template"
"""Where a template refuses a chat: roles alternate, so nothing else can be at fault."""
_TAIL = 8
"""Tokens of the prompt that are decoded with the answer, so that its first space is kept."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer, and what it has cost so far."""

    text: str
    tokens: int
    seconds: float
    """Time to compute this answer, without waiting for others."""
    memory_bytes: int
    is_last: bool = False
    is_finished: bool = False
    """The model ended it; False: cut at the maximum number of tokens."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about a model before it answers."""

    name: str
    parameters: int
    size_bytes: int
    """Size of its weights on disk."""
    runtime: str
    is_chat: bool
    """Has a chat template; otherwise the last message is continued as plain text."""
    memory_is: str
    """What ``Piece.memory_bytes`` counts."""


Answering = Generator[Piece, None, None]


class ChatModel(Protocol):
    facts: Facts

    def stream(self, messages: Sequence[Message], config: SamplingConfig) -> Answering:
        """The answer, piece by piece; closing the iterator stops it. One at a time."""


class TransformersChat:
    """A model in this process. Models take turns token by token, so each is timed alone."""

    _turn = threading.Lock()

    def __init__(self, name: str, source: str, dtype: str, device: str) -> None:
        self._model, self._tokenizer = load_with_tokenizer(source, dtype, device)
        self._weights = sum(part.nbytes for part in (*self._model.parameters(), *self._model.buffers()))
        self._max_length = max_length_of(self._model.config, self._tokenizer)
        is_chat = bool(getattr(self._tokenizer, "chat_template", None))
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.facts = Facts(name, parameters, size_on_disk(source), "transformers", is_chat, "weights and cache")

    def stream(self, messages: Sequence[Message], config: SamplingConfig) -> Answering:
        ids = prompt_ids(self._tokenizer, messages, "chat", chat=self.facts.is_chat, advice=_ADVICE)
        wanted = config.tokens or LONG_ANSWER
        room = room_for(len(ids), wanted, self._max_length, "chat")
        ends = end_tokens(self._model, self._tokenizer)
        steps = stream(self._model, ids, config, count=room, ends=ends, keys=(len(messages),))
        found: list[int] = []
        sent, seconds, memory = 0, 0.0, self._weights
        while True:
            with self._turn:
                started = time.perf_counter()
                step = next(steps, None)
                seconds += time.perf_counter() - started
            if step is not None:
                found.append(step[0])
                memory = self._weights + step[1]
            text = continuation_text(self._tokenizer, ids[-_TAIL:], found)
            if step is None:
                yield Piece(text[sent:], len(found), seconds, memory, is_last=True, is_finished=len(found) < room)
                return
            if not text.endswith("\ufffd"):  # the rest of a character comes with the next token
                yield Piece(text[sent:], len(found), seconds, memory)
                sent = len(text)


class LlamaCppChat:
    """A GGUF file in a process of llama.cpp's, which streams over the loopback interface to the holder of its key."""

    def __init__(self, name: str, source: str, threads: int) -> None:
        require_xllamacpp()
        self._tokenizer, config = load_tokenizer(source), load_config(source)
        self._max_length = min(max_length_of(config, self._tokenizer), 8192)
        try:
            self._process = RuntimeProcess("llamacpp-default", source, threads=threads, context=self._max_length)
            self._address, self._key = self._process.call("address")
        except RuntimeFailure as error:
            raise UserError(f"{source}: {error}") from error
        anatomy = Anatomy.of_config(config)
        is_chat = bool(getattr(self._tokenizer, "chat_template", None))
        parameters = anatomy.count(anatomy.source).total
        self.facts = Facts(name, parameters, size_on_disk(source), "llama.cpp", is_chat, "process, at most")

    def stream(self, messages: Sequence[Message], config: SamplingConfig) -> Answering:
        ids = prompt_ids(self._tokenizer, messages, "chat", chat=self.facts.is_chat, advice=_ADVICE)
        room = room_for(len(ids), config.tokens or LONG_ANSWER, self._max_length, "chat")
        body = sampling_request(config, (len(messages),)) | {"prompt": ids, "n_predict": room, "stream": True}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        request = Request(f"{self._address}/completion", json.dumps(body).encode(), headers)
        tokens, is_last = 0, False
        try:
            memory, started = self._process.call("peak_memory"), time.perf_counter()
            with open_here(request, timeout=600) as reply:
                for line in reply:
                    if not line.startswith(b"data: {"):
                        continue
                    found = parse_json(line[6:])
                    if "error" in found:
                        raise UserError(f"{self.facts.name}: {found['error'].get('message', 'failed')}")
                    is_last = bool(found.get("stop"))
                    tokens = int(found["tokens_predicted"]) if is_last else tokens + len(found.get("tokens") or [0])
                    seconds = time.perf_counter() - started
                    if is_last:
                        timings = found.get("timings") or {}
                        seconds = (timings.get("prompt_ms", 0) + timings.get("predicted_ms", 0)) / 1000 or seconds
                        memory = self._process.call("peak_memory")
                    is_finished = is_last and found.get("stop_type") != "limit"
                    yield Piece(str(found["content"]), tokens, seconds, memory, is_last, is_finished)
            if not is_last:
                raise http.client.HTTPException("its answer broke off")  # which reading by lines takes for the end
        except (OSError, http.client.HTTPException, RuntimeFailure) as error:
            raise UserError(
                f"{self.facts.name}: llama.cpp stopped ({first_line(error)}): start the command again"
            ) from error

    def close(self) -> None:
        self._process.close()


def size_on_disk(source: str) -> int:
    """Bytes of a model's weights."""
    _, path = locate(source, weights=True)
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return sum(file.stat().st_size for file in files)


@contextmanager
def open_chat_models(
    models: Sequence[str], config: GenerateConfig, *, device: str = "auto", threads: int = 1
) -> Iterator[list[ChatModel]]:
    """The models, loaded; those of llama.cpp run in processes that end with the context."""
    sources = [model_in(model) for model in models]
    for source in sources:
        check_source(source)
    place = chosen_device(device)
    with ExitStack() as stack:
        found: list[ChatModel] = []
        for name, source in zip(models, sources, strict=True):
            if is_for_llamacpp(source, config, place):
                found.append(stack.enter_context(closing(LlamaCppChat(name, source, threads))))
            else:
                found.append(TransformersChat(name, source, config.dtype or "float32", place))
        yield found


# The terminal -------------------------------------------------------------------------------------------------

HELP = """\
/reset         forget the conversation
/system TEXT   set the system prompt and start again; without TEXT: remove it
/set KEY=VALUE change tokens, temperature, top_k, top_p or seed
/save FILE     write the conversation as JSON lines, one per model that answered, ready to be tuned on
/help          this
/quit          end (also Ctrl-D); Ctrl-C stops an answer"""


class Conversation:
    """The same questions to every model, each with its own answers."""

    def __init__(self, models: Sequence[ChatModel], config: SamplingConfig, *, system: str = "") -> None:
        self.models, self.config, self.system = models, config, system
        self.chats: list[list[Message]] = []
        self.reset()

    def reset(self) -> None:
        start = [{"role": "system", "content": without_lone_surrogates(self.system)}] if self.system else []
        self.chats = [[*start] for _ in self.models]

    def ask(self, text: str, write: Callable[[str], None]) -> None:
        """Stream every model's answer to ``write``; an interrupted answer is kept as far as it came.

        A model that fails does not keep others from answering; the first failure is raised at the end. A question
        without an answer is not part of a chat.
        """
        failures: list[UserError] = []
        for model, chat in zip(self.models, self.chats, strict=True):
            if len(self.models) > 1:
                write(f"\n[{model.facts.name}]\n")
            try:
                self._ask_one(model, chat, text, write)
            except UserError as error:
                failures.append(error)
                if len(self.models) > 1:
                    write(f"[failed: {error}]\n")
        if failures:
            raise failures[0]

    def _ask_one(self, model: ChatModel, chat: list[Message], text: str, write: Callable[[str], None]) -> None:
        asked: Message = {"role": "user", "content": without_lone_surrogates(text)}
        answer, last = "", None
        try:
            for last in model.stream([*chat, asked], self.config):
                answer += last.text
                write(last.text)
        except KeyboardInterrupt:
            write(" [stopped]")
            if not answer:
                write("\n")
                return
        chat += [asked, {"role": "assistant", "content": answer}]
        if last is not None:
            write(f"\n({speed(last)})\n")

    def command(self, line: str) -> str:
        """Carry out a command and return the reply to print."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.reset()
            return "forgotten"
        if name == "/system":
            self.system = rest
            self.reset()
            return "system prompt set" if rest else "system prompt removed"
        if name == "/set":
            if "=" not in rest:
                raise UserError("/set: name a setting and its value, such as /set temperature=0.7")
            now = apply_overrides(self.config.model_dump(exclude_none=True), [rest], SamplingConfig)
            self.config = from_dict(SamplingConfig, now)
            return ", ".join(f"{key} {value}" for key, value in self.config.model_dump().items())
        if name == "/save":
            return self._save(rest)
        if name == "/help":
            return HELP
        raise UserError(f"{name}: is not a command: type /help")

    def _save(self, name: str) -> str:
        if not name:
            raise UserError("/save: name a file, such as /save chat.jsonl")
        refuse_file(Path(name), "/save", overwrite=False)
        talks = zip(self.models, self.chats, strict=True)
        rows = [
            {"id": model.facts.name, "messages": chat}
            for model, chat in talks
            if any(message["role"] == "assistant" for message in chat)
        ]
        if not rows:
            raise UserError("/save: nothing was answered yet: ask something first")
        write_text_atomic(Path(name), "".join(map(json_line, rows)), option="/save")
        return f"{name} written"


def speed(piece: Piece) -> str:
    rate = piece.tokens / piece.seconds if piece.seconds else 0.0
    return f"{piece.tokens} tokens, {rate:.1f} tokens/s"
