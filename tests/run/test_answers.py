"""Answers to a file of prompts: equal to a plain computation, and to themselves after a kill."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from dwindle.core.errors import UserError
from dwindle.data.chat import ChatEncoder
from dwindle.data.conversations import conversation_of
from dwindle.evaluation import sampling
from dwindle.evaluation.config import GenerateConfig, SamplingConfig
from dwindle.evaluation.generation import LlamaCppAnswerer, TransformersAnswerer
from dwindle.evaluation.sampling import stream, uniforms
from dwindle.run import answers
from dwindle.run.answers import generate_answers
from dwindle.run.generation import generate
from dwindle.sources.loading import load
from edge_models import greedy, tiny_loaded
from hostile import shell
from runs import die_at, start, wait
from tiny import tiny_directory, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("answers") / "model"
    tiny_directory(place, max_position_embeddings=256)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows: list[dict[str, Any]] = [
        {"id": f"p{number}", "prompt": "Why is the sky blue? "[: 3 + 2 * number]} for number in range(6)
    ]
    rows.append({"question_id": 70, "turns": ["Name a colour.", "And another?"]})
    rows.append(
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                      {"role": "assistant", "content": "left out"}]}
    )  # fmt: skip
    rows.append({"instruction": "Add.", "input": "1 2"})
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain_answer(model: Any, ids: list[int], count: int, config: SamplingConfig, key: tuple[int, ...]) -> list[int]:
    """One prompt without a cache or a batch; sampling in plain Python."""
    draws, found = uniforms(config.seed, key, count).tolist(), list[int]()
    for draw in draws:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *found]]), use_cache=False).logits[0, -1].double().tolist()
        token = max(range(len(logits)), key=lambda token: logits[token])
        if config.temperature:
            order = sorted(range(len(logits)), key=lambda token: -logits[token])[: config.top_k or None]
            weights = [math.exp((logits[token] - logits[order[0]]) / config.temperature) for token in order]
            kept, mass = [], 0.0
            for one, weight in zip(order, weights, strict=True):
                if mass >= config.top_p * sum(weights) and kept:
                    break
                kept.append((one, weight))
                mass += weight
            left = draw * mass
            for one, weight in kept:
                token, left = one, left - weight
                if left < 0:
                    break
        if token == 0:
            break
        found.append(token)
    return found


@pytest.mark.parametrize("family", ["llama", "olmo3", "lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("settings", [{}, SAMPLED])
def test_batches_equal_a_plain_loop(family: str, settings: dict[str, Any]) -> None:
    """Padded batches, batches of equal length (layers that are not attention), rows that end early."""
    model, tokenizer = tiny_model(family, vocab_size=257), tiny_tokenizer()
    model.generation_config.eos_token_id = 0
    config = SamplingConfig(**settings, seed=3)
    answerer = TransformersAnswerer(model, tokenizer, config, batch=4)
    rows = [tokenizer(text).input_ids for text in ("once", "upon a", "time there", "was a king", "and", "or a queen!")]
    for group in answerer.groups([len(row) for row in rows]):
        lengths = {len(rows[index]) for index in group}
        assert len(group) <= 4 and (answerer._padded or len(lengths) == 1)
        found = answerer.answer([rows[index] for index in group], [(index, 0) for index in group], 12)
        for index, answer in zip(group, found, strict=True):
            plain = plain_answer(model, rows[index], 12, config, (index, 0))
            assert answer.text == tokenizer.decode(plain, skip_special_tokens=True)
            assert answer.is_finished == (len(plain) < 12)
    streamed = stream(model, rows[0], config, count=12, ends={0}, keys=(0, 0))
    assert [token for token, _ in streamed] == plain_answer(model, rows[0], 12, config, (0, 0))


def test_the_lowest_of_equally_likely_tokens_are_kept() -> None:
    """Also where ``top_k`` ends between them, whatever the number of rows."""
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).round()
    for top_k in (1, 2, 7, 49):
        values, order = sampling._likeliest_first(logits, top_k)
        expected = logits.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values, expected.values[:, :top_k]) and torch.equal(order, expected.indices[:, :top_k])


def test_answers_do_not_choose_the_frequencies_of_others() -> None:
    """Phi's longer rows would switch those of a shorter one, too."""
    model, tokenizer = tiny_model("Phi-4-mini", vocab_size=257), tiny_tokenizer()  # switches at 16 positions
    rows = [tokenizer(text).input_ids for text in ("once upon a ti", "time there", "was")]
    answerer = TransformersAnswerer(model, tokenizer, SamplingConfig())
    groups = answerer.groups([len(row) for row in rows])
    found = [answerer.answer([rows[index] for index in group], [()] * len(group), 12) for group in groups]
    for index, answer in zip(chain(*groups), chain(*found), strict=True):
        ids = greedy(model, rows[index], 12)
        end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else 12
        assert answer.text == tokenizer.decode(ids[:end], skip_special_tokens=True)


def test_rows_that_end_leave_the_batch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every second token an end, most rows end early; what is left is as it would be alone."""
    loaded = load(model)
    config = SamplingConfig(temperature=1.5, seed=1)
    ends = list(range(0, 257, 4))
    loaded.model.generation_config.eos_token_id = ends
    answerer = TransformersAnswerer(loaded.model, loaded.tokenizer, config)
    rows = [[5 + index, 9, 12] for index in range(12)]
    together = answerer.answer(rows, [(index,) for index in range(12)], 30)
    alone = [answerer.answer([row], [(index,)], 30)[0] for index, row in enumerate(rows)]
    monkeypatch.setattr(sampling, "check_every", lambda device: 7)  # as on a GPU, where rows are looked at seldom
    assert answerer.answer(rows, [(index,) for index in range(12)], 30) == alone
    assert together == alone and len({answer.num_tokens for answer in alone}) > 3
    assert all(answer.is_finished for answer in alone)


def test_an_instruction_is_asked_as_it_was_trained(tmp_path: Path) -> None:
    """A tuned model without a template of its own has Alpaca's, which has a heading for inputs."""
    place, tokenizer = tiny_directory(tmp_path / "model", max_position_embeddings=512), tiny_tokenizer()
    encoder = ChatEncoder(tokenizer)
    tokenizer.chat_template = encoder.template
    tokenizer.save_pretrained(place)
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": "x"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generate_answers(place, tmp_path / "p.jsonl", tmp_path / "a.jsonl", tokens=2, device="cpu")
    asked = [json.loads(line)["messages"][:-1] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    trained = [conversation_of(row, "row", encoder.input_joint).messages[:-1] for row in rows]
    assert asked == trained and asked[0][0]["content"] == "Add.\n\n### Input:\n1 2"


@pytest.mark.parametrize("settings", [{}, SAMPLED])
@pytest.mark.parametrize("died", [1, 3])
def test_a_killed_file_is_resumed_to_the_byte(
    model: Path, prompts: Path, tmp_path: Path, settings: dict[str, Any], died: int
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"

    def ask(out: Path) -> answers.GenerationSummary:
        return generate_answers(model, prompts, out, tokens=10, batch=3, device="cpu", **settings)

    def killed() -> None:
        torch.set_num_threads(1)
        die_at(answers.Journal, "append", died)
        ask(broken)

    summary = ask(whole)
    assert (summary.num_prompts, summary.num_answers, summary.num_resumed) == (9, 10, 0)
    assert wait(start(killed), 60) == 9
    partial = broken.with_name("broken.jsonl.partial")
    assert partial.is_file() and not broken.exists()
    with partial.open("ab") as file:  # a line that was being written
        file.write(b'{"turn": 0, "group"')
    resumed = ask(broken)
    assert resumed.num_resumed == 3 * died if died < 3 else resumed.num_resumed > 6
    assert broken.read_bytes() == whole.read_bytes() and not partial.exists()
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [row["id"] for row in rows] == [*(f"p{number}" for number in range(6)), 70, 7, 8]
    roles = [[message["role"] for message in row["messages"]] for row in rows]
    assert roles[6] == ["user", "assistant"] * 2 and roles[7] == ["system", "user", "assistant"]
    assert rows[8]["messages"][0]["content"] == "Add.\n\n1 2"


def test_other_settings_do_not_continue_a_file(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"

    def killed() -> None:
        die_at(answers.Journal, "append", 1)
        generate_answers(model, prompts, out, tokens=4, device="cpu")

    assert wait(start(killed), 60) == 9
    with pytest.raises(UserError, match=r"begun with another tokens, seed: repeat that command"):
        generate_answers(model, prompts, out, tokens=5, seed=1, device="cpu")
    generate_answers(model, prompts, out, tokens=5, device="cpu", overwrite=True)
    with pytest.raises(UserError, match="already exists"):
        generate_answers(model, prompts, out, tokens=5, device="cpu")
    (tmp_path / "b.jsonl.partial").write_text("mine\n")
    with pytest.raises(UserError, match="was not begun by this command"):
        generate_answers(model, prompts, tmp_path / "b.jsonl", device="cpu")
    assert (tmp_path / "b.jsonl.partial").read_text() == "mine\n"


UNSAFE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
BAD = {
    "a role that the template does not know": (
        {"messages": [{"role": "critic", "content": "x"}, {"role": "user", "content": "y"}]},
        r"line 2: the model's chat template refuses this chat \(unknown role critic\)",
    ),
    "no message of a user": ({"messages": [{"role": "assistant", "content": "x"}]}, r"line 2: no message has the role"),
    "no text": ({"prompt": "  "}, "line 2: has no text to answer"),
    "content that is not text": ({"messages": [{"role": "user", "content": 3}]}, "line 2: message 1 has no role"),
    "not an object": ([], "line 2: is not a JSON object"),
    "an id twice": ({"id": 0, "prompt": "x"}, r"line 2: the id 0 is also that of .*line 1"),
    "a prompt longer than the context": ({"prompt": "x" * 300}, r"line 2: the prompt has 3\d\d tokens, the model's"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_prompts_are_one_line_with_their_number(model: Path, tmp_path: Path, case: str) -> None:
    row, message = BAD[case]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message) as error:
        generate_answers(model, path, tmp_path / "out.jsonl", device="cpu")
    assert "\n" not in str(error.value) and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("chat", [True, False])
def test_lone_surrogates_are_replaced(model: Path, tmp_path: Path, chat: bool) -> None:
    """JSON can escape them, but no tokenizer takes them, and no file."""
    (tmp_path / "p.jsonl").write_text(
        '{"id": "\\ud800", "prompt": "x\\udc00"}\n'
        '{"messages": [{"role": "user", "content": "\\ud83d\\ude00 \\ud800"}]}\n'
    )
    generate_answers(model, tmp_path / "p.jsonl", tmp_path / "a.jsonl", tokens=2, device="cpu", chat=chat)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == ["x\ufffd", "\U0001f600 \ufffd"]
    assert rows[0]["id"] == "\ufffd"
    assert generate(model, "x\udc00", tokens=2, device="cpu", chat=chat)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("p.txt", "is not UTF-8 text but UTF-16: convert it with iconv -f utf-16 .*"),
        ("p.jsonl", "is not UTF-8 text but UTF-16: convert it with iconv -f utf-16 .*"),
        ("p.jsonl.xz", r"is damaged or truncated \(.*\): fetch it again"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_as_it_was_given(
    model: Path, tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=rf"^--prompts: {tmp_path / name} {problem}$"):
        generate_answers(model, tmp_path / name, tmp_path / "a.jsonl", device="cpu")


def test_a_template_with_unsafe_code_is_one_line(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "unsafe"
    tiny_directory(place)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = UNSAFE
    tokenizer.save_pretrained(place)
    (tmp_path / "p.txt").write_text("Hello\n")
    with pytest.raises(UserError, match=r"p.txt, line 1: .*refuses this chat \(.*unsafe.*\): correct") as error:
        generate_answers(place, tmp_path / "p.txt", tmp_path / "out.jsonl", device="cpu")
    assert "\n" not in str(error.value)
    summary = generate_answers(place, tmp_path / "p.txt", tmp_path / "out.jsonl", tokens=3, device="cpu", chat=False)
    assert summary.num_answers == 1 and json.loads((tmp_path / "out.jsonl").read_text())["messages"][0] == {
        "role": "user",
        "content": "Hello",
    }


def test_answers_near_the_end_of_the_context_cut_no_others(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n" for length in (200, 20, 230, 30)))
    generate_answers(model, path, tmp_path / "a.jsonl", tokens=40, device="cpu", temperature=1.0, top_k=3)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert all(sum(row["tokens"]) <= 40 for row in rows) and rows[2]["tokens"][0] <= 256 - 230


def test_the_command(model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(shell, "generate", model)
    out = tmp_path / "a.jsonl"
    code, said, _ = run("--prompts", str(prompts), "--out", str(out), "--tokens", "4", "--limit", "3", "--json")
    found = json.loads(said)
    assert code == 0 and found["num_answers"] == 3 == len(out.read_text().splitlines()) and found["tokens"] <= 12
    code, said, _ = run("--prompts", str(prompts), "--out", str(out), "--overwrite", "--tokens", "4")
    assert code == 0 and "10 answers to 9 prompts" in said and "tokens/s" in said
    assert run("Once", "--tokens", "4")[1].startswith("Once")
    assert run("Once", "--tokens", "4", "--temperature", "1", "--seed", "4")[1] != run("Once", "--tokens", "4")[1]
    for arguments, message in {
        (): "prompt: give either a text or --prompts FILE",
        ("x", "--prompts", "y"): "prompt: give either",
        ("--prompts", str(prompts)): "--out: is missing",
        ("x", "--out", "y"): "belong to --prompts",
        ("--prompts", "nowhere.jsonl", "--out", "y"): "--prompts nowhere.jsonl: does not exist",
        ("x", "--runtime", "llama.cpp"): "is not a .gguf file",
    }.items():
        code, _, error = run(*arguments)
        assert code == 2 and message in error and error.count("\n") == 1, (arguments, error)


def test_llama_cpp_answers_like_transformers(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from dwindle.export.exporting import export

    file = tmp_path / "model.gguf"
    export(tiny_loaded(vocab_size=300), "gguf", file, type="f32")
    (tmp_path / "p.jsonl").write_text('{"prompt": "Tell"}\n{"prompt": "Why is it so?"}\n')
    found = {}
    for runtime in ("llama.cpp", "transformers"):
        out = tmp_path / f"{runtime}.jsonl"
        done = generate_answers(file, tmp_path / "p.jsonl", out, tokens=6, runtime=runtime, device="cpu", chat=False)
        assert done.runtime == runtime
        found[runtime] = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert found["llama.cpp"] == found["transformers"]


def test_the_second_turn_fits_into_llama_cpp(tmp_path: Path) -> None:
    """Its prompt has the first question and answer in it; a resumed file has the same answers."""
    pytest.importorskip("xllamacpp")
    from dwindle.export.exporting import export

    file = tmp_path / "model.gguf"
    export(tiny_loaded(vocab_size=300, max_position_embeddings=1024), "gguf", file, type="f32")
    turns = {"turns": ["Hi", "What about these words, and many more? " * 10]}  # llama.cpp rounds up to 256 tokens
    (tmp_path / "p.jsonl").write_text(json.dumps(turns) + '\n{"prompt": "Tell"}\n')
    found = {}
    for runtime in ("llama.cpp", "transformers"):
        out = tmp_path / f"{runtime}.jsonl"
        generate_answers(file, tmp_path / "p.jsonl", out, tokens=12, runtime=runtime, device="cpu")
        found[runtime] = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert found["llama.cpp"] == found["transformers"] and len(found["llama.cpp"][0]) == 4
    contexts, asked = [], []
    real = LlamaCppAnswerer._call

    def call(self: LlamaCppAnswerer, method: str, context: int, **arguments: Any) -> Any:
        contexts.append(context)
        asked.append(len(arguments["request"]["prompt"]) + arguments["request"]["max_tokens"])
        if len(asked) == stop:
            raise KeyboardInterrupt
        return real(self, method, context, **arguments)

    def again() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LlamaCppAnswerer, "_call", call)
            generate_answers(file, tmp_path / "p.jsonl", broken, tokens=12, runtime="llama.cpp", device="cpu")

    stop, broken = 3, tmp_path / "broken.jsonl"
    with pytest.raises(KeyboardInterrupt):
        again()
    again()
    assert len(contexts) == 4 and contexts[2] == contexts[3]  # of the second turn, after what came before and alone
    assert all(tokens < context for tokens, context in zip(asked, contexts, strict=True))
    assert broken.read_bytes() == (tmp_path / "llama.cpp.jsonl").read_bytes()


def test_a_context_that_is_too_small_grows_by_the_prompt_alone(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from dwindle.export.exporting import export

    file = tmp_path / "model.gguf"
    loaded = tiny_loaded(vocab_size=300)
    export(loaded, "gguf", file, type="f32")
    rows = [[5, 9, 12], [7] * 60, [5, 9, 12]]
    config = GenerateConfig()
    with LlamaCppAnswerer(str(file), config) as answerer:
        answerer.reserve(16)
        assert answerer.groups([9, 99]) == [[0], [1]] and answerer._context_for(11) == 24
        found = [answerer.answer([row], [(0,)], 8)[0] for row in rows]
    assert found[0] == found[2]
    plain = TransformersAnswerer(loaded.model, loaded.tokenizer, config)
    assert [one.text for one in found] == [plain.answer([row], [(0,)], 8)[0].text for row in rows]


def test_llama_cpp_samples_by_the_seed(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from dwindle.export.exporting import export

    file = tmp_path / "model.gguf"
    export(tiny_loaded(vocab_size=300), "gguf", file, type="f32")
    sampled = [
        generate(file, "Tell", tokens=8, temperature=1.0, seed=seed, device="cpu", runtime="llama.cpp")
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
