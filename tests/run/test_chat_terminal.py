"""Chats in the terminal, with models in transformers and in llama.cpp."""

from __future__ import annotations

import io
import json
import shutil
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dwindle.core.errors import UserError
from dwindle.evaluation.config import GenerateConfig, SamplingConfig
from dwindle.evaluation.generation import TransformersAnswerer, is_for_llamacpp
from dwindle.evaluation.prompts import chat_ids
from dwindle.run.chat import Conversation, Facts, Piece, open_chat_models
from dwindle.sources.loading import load
from edge_models import tiny_loaded
from hostile import shell
from tiny import tiny_directory, tiny_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chat") / "model"
    tiny_directory(place, max_position_embeddings=200)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(text: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return shell("chat", *arguments)

    return run


def test_a_stream_is_the_answer(model: Path) -> None:
    """Pieces together equal the answer of a batch; the second turn sees the first."""
    loaded = load(model)
    tokenizer: Any = loaded.tokenizer
    with open_chat_models([str(model)], GenerateConfig(), device="cpu") as (chat,):
        talk = Conversation([chat], SamplingConfig(tokens=12, temperature=0.8, seed=5), system="Be brief.")
        for question in ("Hello?", "Again!"):
            said: list[str] = []
            talk.ask(question, said.append)
            before = talk.chats[0][:-1]
            answerer = TransformersAnswerer(loaded.model, tokenizer, talk.config)
            want = answerer.answer([chat_ids(tokenizer, before, "chat")], [(len(before),)], 12)[0]
            assert talk.chats[0][-1] == {"role": "assistant", "content": want.text}
            assert "".join(said[:-1]) == want.text and "tokens/s" in said[-1]
        assert [message["role"] for message in talk.chats[0]] == ["system", *["user", "assistant"] * 2]
        last = list(chat.stream(talk.chats[0][:2], talk.config))[-1]
        assert last.is_last and last.memory_bytes > sum(p.nbytes for p in loaded.model.parameters())
        assert chat.facts.parameters == sum(p.numel() for p in loaded.model.parameters())
        assert chat.facts.size_bytes == (model / "model.safetensors").stat().st_size
        with pytest.raises(UserError, match=r"chat: the prompt has \d+ tokens"):
            talk.ask("x" * 200, said.append)
        assert talk.chats[0][-1]["role"] == "assistant"  # what was refused is not part of the chat


def test_an_interrupted_answer_is_kept_as_far_as_it_came(model: Path) -> None:
    with open_chat_models([str(model)], GenerateConfig(), device="cpu") as (chat,):
        talk = Conversation([chat], SamplingConfig(tokens=30, temperature=1.0))
        whole = "".join(piece.text for piece in chat.stream([{"role": "user", "content": "Hi"}], talk.config))
        real = chat.stream

        def interrupted(*arguments: Any) -> Any:
            for number, piece in enumerate(real(*arguments)):
                if number == 3:
                    raise KeyboardInterrupt
                yield piece

        chat.stream = interrupted  # type: ignore[method-assign]
        said: list[str] = []
        talk.ask("Hi", said.append)
        assert " [stopped]" in said and whole.startswith(talk.chats[0][-1]["content"])


class Said:
    """A stand-in: says what it is told to, or raises it."""

    def __init__(self, *pieces: str | BaseException) -> None:
        self.facts, self.pieces = Facts("said", 1, 1, "transformers", True, "weights and cache"), pieces

    def stream(self, messages: Any, config: Any) -> Any:
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield Piece(piece, 1, 0.1, 1)


def test_a_model_that_fails_keeps_no_other_from_answering() -> None:
    """And a question without an answer is no part of a chat."""
    talk = Conversation([Said("a"), Said(UserError("broken")), Said(KeyboardInterrupt()), Said("b")], SamplingConfig())
    said: list[str] = []
    with pytest.raises(UserError, match="broken"):
        talk.ask("Hi", said.append)
    assert [[one["content"] for one in chat] for chat in talk.chats] == [["Hi", "a"], [], [], ["Hi", "b"]]
    assert "[failed: broken]\n" in said and "".join(said).count(" [stopped]\n") == 1


def test_what_was_not_answered_is_not_saved(tmp_path: Path) -> None:
    """A line without an answer would end the tuning that reads it."""
    talk = Conversation([Said("a"), Said(UserError("broken"))], SamplingConfig())
    with pytest.raises(UserError, match=r"/save: nothing was answered yet: ask something first"):
        talk.command(f"/save {tmp_path / 'a.jsonl'}")
    with pytest.raises(UserError, match="broken"):
        talk.ask("Hi", lambda text: None)
    talk.command(f"/save {tmp_path / 'a.jsonl'}")
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1


def test_a_refused_system_prompt_says_what_to_change(model: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    shutil.copytree(model, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with open_chat_models([str(tmp_path / "model")], GenerateConfig(), device="cpu") as models:
        with pytest.raises(UserError, match=r"\(no system role\): remove the system prompt, or give the model another"):
            Conversation(models, SamplingConfig(tokens=2), system="x").ask("Hi", lambda text: None)
        talk = Conversation(models, SamplingConfig(tokens=2))
        talk.ask("a\udc80", lambda text: None)  # a terminal's byte that is not UTF-8
        assert talk.chats[0][0]["content"] == "a\ufffd"


def test_a_gguf_file_has_one_runtime_for_chats_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    found = [
        is_for_llamacpp(str(file), GenerateConfig(runtime=runtime), device)  # type: ignore[arg-type]
        for runtime in ("auto", "llama.cpp", "transformers")
        for device in ("cpu", "cuda")
    ]
    assert found == [True, False, True, True, False, False]


def test_commands_in_the_terminal(model: Path, tmp_path: Path, terminal: Callable[..., Any]) -> None:
    file = tmp_path / "chat.jsonl"
    lines = ["Hello", "/set tokens=3", "/system Be kind.", "Hi", f"/save {file}", f"/save {file}", "/nonsense",
             "/set colour=1", "/set", "/save", "/help", "", "/reset", "/quit", "never"]  # fmt: skip
    code, said, errors = terminal("\n".join(lines) + "\n", str(model), "--tokens", "5", "--device", "cpu")
    assert code == 0 and said.count("tokens/s") == 2 and "tokens 3" in said and "/reset         forget" in said
    for message in (
        "already exists",
        "/nonsense: is not a command",
        "colour",
        "/set: name a setting",
        "/save: name a file",
    ):
        assert message in errors
    row = json.loads(file.read_text())
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
    assert "never" not in said


def test_several_models_answer_in_turn(model: Path, terminal: Callable[..., Any]) -> None:
    code, said, _ = terminal("Hello\n", str(model), str(model), "--tokens", "4", "--device", "cpu")
    assert code == 0 and said.count(f"[{model}]") == 2 and said.count("tokens/s") == 2


def test_bad_options(model: Path, terminal: Callable[..., Any]) -> None:
    for arguments, message in {
        ("nowhere/at/all",): "source",
        (str(model), "--open"): "belong to --page",
        (str(model), "--runtime", "llama.cpp"): "is not a .gguf file",
        (str(model), "--temperature", "-1"): "temperature",
        (str(model), "--page", "--port", "99999"): "--port 99999: cannot be used",
    }.items():
        code, _, error = terminal("", *arguments, "--device", "cpu")
        assert code == 2 and message in error and error.count("\n") == 1, (arguments, error)


def test_a_gguf_file_streams_from_llama_cpp(tmp_path: Path, terminal: Callable[..., Any]) -> None:
    pytest.importorskip("xllamacpp")
    from dwindle.export.exporting import export

    file = tmp_path / "model.gguf"
    loaded = tiny_loaded(vocab_size=300)
    export(loaded, "gguf", file, type="f32")
    message = [{"role": "user", "content": "The quick"}]
    config = SamplingConfig(tokens=6)
    with open_chat_models([str(file)], GenerateConfig(), device="cpu") as (chat,):
        pieces: list[Piece] = list(chat.stream(message, config))
        tokenizer: Any = loaded.tokenizer
        ids = chat_ids(tokenizer, message, "chat")
        want = TransformersAnswerer(loaded.model, tokenizer, config).answer([ids], [(1,)], 6)[0]
        assert "".join(piece.text for piece in pieces) == want.text and pieces[-1].is_last
        assert pieces[-1].tokens in (want.num_tokens, want.num_tokens + 1) and pieces[-1].memory_bytes > 1e6
        assert chat.facts.runtime == "llama.cpp" and chat.facts.size_bytes == file.stat().st_size
        half = chat.stream(message, SamplingConfig(tokens=100))
        next(half)
        half.close()  # llama.cpp is told to stop, and answers the next
        assert "".join(piece.text for piece in chat.stream(message, config)) == want.text
        half = chat.stream(message, SamplingConfig(tokens=100))
        next(half)
        chat._process._child.kill()  # type: ignore[attr-defined]
        chat._process._child.wait()  # type: ignore[attr-defined]
        for pieces_left in (half, chat.stream(message, config)):  # while it answers, and before
            with pytest.raises(UserError, match=r"llama\.cpp stopped \(.*\): start the command again"):
                list(pieces_left)


def test_a_proxy_of_the_environment_hears_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    from dwindle.export.exporting import export

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # which keeps the environment of its first use
    export(tiny_loaded(vocab_size=300), "gguf", tmp_path / "model.gguf", type="f32")
    with open_chat_models([str(tmp_path / "model.gguf")], GenerateConfig(), device="cpu") as (chat,):
        assert list(chat.stream([{"role": "user", "content": "Hi"}], SamplingConfig(tokens=3)))[-1].is_last


def test_a_model_without_a_template_continues_text(tmp_path: Path, terminal: Callable[..., Any]) -> None:
    place = tiny_directory(tmp_path / "base")
    code, said, errors = terminal("Once\n", str(place), "--tokens", "3", "--device", "cpu")
    assert code == 0 and "tokens/s" in said and "has no chat template" in errors
