"""Conversations to rows: templates, loss masks and packing, against plain loops over characters and turns."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chats import ENDS, chat_tokenizer, tiny_chats, turns, write_rows
from dwindle.core.errors import UserError
from dwindle.data.chat import ChatEncoder
from dwindle.data.config import DataConfig, TaskConfig
from dwindle.data.conversations import conversation_of, conversations_in
from dwindle.data.packing import PackedChat, best_fit
from dwindle.data.readers import open_input
from dwindle.data.token_files import open_token_files
from dwindle.data.training_data import TrainingData, open_chat, open_training_data

TALK = turns("hi there", "hello you", "and ‘now’ 🐦?", "a second answer\nof two lines", system="be nice")


def plain_text(family: str, talk: list[dict[str, str]]) -> list[tuple[str, bool]]:
    """The text of a conversation by hand: (piece, whether it is learned)."""
    system = talk[0]["content"] if talk[0]["role"] == "system" else ""
    said = talk[1:] if system else talk
    pieces: list[tuple[str, bool]] = [] if family == "chatml" else [("<s>", False)]
    if family == "chatml":
        pieces += [(f"<|im_start|>system\n{system}<|im_end|>\n", False)] if system else []
    if family == "llama3":
        pieces += [(f"<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>", False)] if system else []
    for number, turn in enumerate(said):
        mine, text = turn["role"] == "assistant", turn["content"]
        if family == "gemma" and system and number == 0:
            text = f"{system}\n\n{text}"
        if family == "mistral" and system and number == len(said) - 2:
            text = f"{system}\n\n{text}"
        head, end, rest = {
            "chatml": (f"<|im_start|>{turn['role']}\n", "<|im_end|>", "\n"),
            "llama3": (f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n", "<|eot_id|>", ""),
            "gemma": (f"<start_of_turn>{'model' if mine else 'user'}\n", "<end_of_turn>", "\n"),
            "mistral": ("" if mine else "[INST] ", "</s>" if mine else "[/INST]", ""),
        }[family]
        if family == "mistral" and mine:
            text = f" {text}"
        pieces += [(head, False), (text + end, mine), (rest, False)]
    return pieces


def plain_tokens(tokenizer: Any, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    """Piece by piece: the tokens are bytes, so pieces and whole text have the same."""
    ids: list[int] = []
    learned: list[bool] = []
    for text, mine in pieces:
        found = tokenizer(text, add_special_tokens=False).input_ids
        ids += found
        learned += [mine] * len(found)
    return ids, learned


def encoded(tokenizer: Any, *rows: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    encoder = ChatEncoder(tokenizer)
    found = []
    for piece in encoder.encode_conversations(conversation_of(row, "file:1", encoder.input_joint) for row in rows):
        learned = [False] * len(piece.ids)
        assert piece.answers is not None
        for start, stop in piece.answers.tolist():
            learned[start:stop] = [True] * (stop - start)
        found.append((piece.ids.tolist(), learned))
    return found


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma"])
@pytest.mark.parametrize("system", [True, False])
def test_tokens_and_loss_mask_equal_a_plain_computation(family: str, system: bool) -> None:
    tokenizer, talk = chat_tokenizer(family), TALK if system else TALK[1:]
    (ids, learned), *others = encoded(tokenizer, {"messages": talk})
    assert not others, "one example: earlier turns do not change"
    assert (ids, learned) == plain_tokens(tokenizer, plain_text(family, talk))
    assert tokenizer.apply_chat_template(talk, return_dict=False) == ids
    end = tokenizer.convert_tokens_to_ids(ENDS[family])
    ends = [n for n, token in enumerate(ids) if token == end and learned[n]]
    assert len(ends) == 2, "the token that ends a turn is learned"
    assert not any(learned[: ids.index(tokenizer.convert_tokens_to_ids("h"))])


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral"])
def test_a_cut_answer_does_not_teach_to_stop(family: str, tmp_path: Path) -> None:
    tokenizer, talk = chat_tokenizer(family), turns("hi there", "hello you")
    end = tokenizer.convert_tokens_to_ids(ENDS[family])
    (ids, learned), (same_ids, without_end) = encoded(
        tokenizer, {"messages": talk, "finished": True}, {"messages": talk, "finished": False}
    )
    assert same_ids == ids
    assert [n for n in range(len(ids)) if learned[n] != without_end[n]] == [
        n for n, token in enumerate(ids) if token == end and learned[n]
    ]
    rows = [{"messages": talk, "finished": False}, {"messages": talk}]
    stream = open_chat([write_rows(tmp_path / "rows.jsonl", rows)], ChatEncoder(tokenizer), cache_dir=tmp_path)
    assert ChatEncoder(tokenizer).end_of_turn(stream.last_of_answers()) == end, "found behind a cut answer"


def test_a_cut_answer_does_not_teach_any_of_several_ends() -> None:
    """As with Phi-3, whose template ends the turn, and then the text."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template += "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    for text in ("hello you", "a line \n"):
        found = encoded(tokenizer, *({"messages": turns("hi", text), "finished": one} for one in (True, False)))
        whole, cut = (tokenizer.decode([n for n, mine in zip(*one, strict=True) if mine]) for one in found)
        assert (whole, cut) == (f"{text}<|im_end|>\n</s>", text)


def test_a_template_that_changes_earlier_turns_gives_one_example_for_each_answer() -> None:
    tokenizer = chat_tokenizer("mistral")
    first, second = encoded(tokenizer, {"messages": TALK})
    assert first == plain_tokens(tokenizer, plain_text("mistral", TALK[:3]))
    ids, learned = plain_tokens(tokenizer, plain_text("mistral", TALK))
    only_last = [mine and n > len(first[0]) - 10 for n, mine in enumerate(learned)]
    assert second == (ids, only_last) and sum(only_last) < sum(learned)
    (ids, learned), *others = encoded(tokenizer, {"messages": TALK[1:]})
    assert not others, "without a system text nothing changes"
    assert (ids, learned) == plain_tokens(tokenizer, plain_text("mistral", TALK[1:]))


def test_rows_of_every_form_and_the_prompt_of_alpaca() -> None:
    tokenizer = chat_tokenizer("chatml")
    question = {"role": "user", "content": "add\n\n1 and 2"}
    same = [
        {"messages": turns("add\n\n1 and 2", "3")},
        {"instruction": "add", "input": "1 and 2", "output": "3"},
        {"prompt": "add\n\n1 and 2", "completion": "3"},
        {"prompt": [question], "completion": [{"role": "assistant", "content": "3"}]},
    ]
    found = encoded(tokenizer, *same)
    assert all(one == found[0] for one in found)
    [(_, learned)] = encoded(tokenizer, {"prompt": TALK[:3], "completion": TALK[3:]})
    assert learned == [
        mine and n > 60 for n, mine in enumerate(plain_tokens(tokenizer, plain_text("chatml", TALK))[1])
    ], "assistant turns of a prompt are read, not learned"
    plain = chat_tokenizer(None)
    [(ids, learned)] = encoded(plain, same[1])
    prompt = (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nadd\n\n### Input:\n1 and 2\n\n"
        "### Response:\n"
    )
    assert (ids, learned) == plain_tokens(plain, [(prompt, False), ("3</s>", True)])


def opened(
    tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], *, packed: bool = True, **data: Any
) -> TrainingData:
    task = TaskConfig(kind="chat", chat=[write_rows(tmp_path / "chat.jsonl", rows)])
    config = DataConfig(**{"seq_len": 127} | data)
    return open_training_data(config, tokenizer, seed=3, cache_dir=tmp_path / "cache", task=task, packed=packed)


@pytest.mark.parametrize("packed", [True, False])
def test_packed_rows_hold_every_example_once_and_whole(tmp_path: Path, packed: bool) -> None:
    tokenizer, rows = chat_tokenizer("chatml"), tiny_chats(60)
    data = opened(tmp_path, tokenizer, rows, packed=packed, seq_len=199)
    (chat,) = data.mixture.sources
    wanted = sorted(encoded(tokenizer, *rows))
    found = []
    filled = 0
    for index in range(chat.num_windows):
        ids, learned, positions = data.mixture.sample(index)
        starts = [n for n, place in enumerate(positions) if place == 0]
        examples = [(ids[a:b], learned[a:b], positions[a:b]) for a, b in zip(starts, [*starts[1:], 200], strict=True)]
        if not examples[-1][1].any():
            assert set(examples.pop()[0].tolist()) == {tokenizer.convert_tokens_to_ids("</s>")}
        assert len(examples) == 1 or packed
        for one, mine, places in examples:
            assert places.tolist() == list(range(len(places)))
            found.append((one.tolist(), mine.astype(bool).tolist()))
            filled += len(one)
        assert chat.num_predictions(index) == learned[1:].sum() == data.mixture.num_predictions(index, index + 1)
    assert sorted(found) == wanted
    assert not packed or filled / (200 * chat.num_windows) > 0.9


def test_best_fit_equals_a_search_over_all_rows() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 50, 400)
    rows = best_fit(sizes, np.arange(400), 64, "seed")
    left: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [room for room in left if room >= size]
        if fitting:
            left.remove(min(fitting))
        left.append((min(fitting) if fitting else 64) - size)
    assert sorted(64 - sizes[row].sum() for row in rows) == sorted(left)
    assert sorted(n for row in rows for n in row) == list(range(400))
    assert rows != best_fit(sizes, np.arange(400), 64, "other")


def test_long_conversations_lose_whole_turns_and_are_counted(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    long = turns("one", "first answer", "two", "second " * 20, "three", "third")
    short, hopeless = turns("hi", "ho"), turns("why?", "because " * 30)
    rows = [{"messages": talk} for talk in (long, short, hopeless)]
    data = opened(tmp_path, tokenizer, rows)
    cuts = "1 lose turns from their end, 1 are left out: they are longer than data.seq_len = 127"
    assert data.warning == f"task.chat: of 3 conversations {cuts}"
    (chat,) = data.mixture.sources
    assert isinstance(chat, PackedChat)
    ids, learned = plain_tokens(tokenizer, plain_text("chatml", long[:2]))
    cut = len(ids) - ids[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    whole = plain_tokens(tokenizer, plain_text("chatml", short))
    row = data.mixture.sample(0)
    assert row[0, :cut].tolist() == ids[:cut] and row[1, :cut].astype(bool).tolist() == learned[:cut]
    assert row[0, cut : cut + len(whole[0])].tolist() == whole[0]
    with pytest.raises(UserError, match=r"no conversation fits into data.seq_len = 20 tokens"):
        opened(tmp_path, tokenizer, rows, seq_len=20)


def test_conversations_to_validate_on_are_not_cut_silently(tmp_path: Path) -> None:
    tokenizer, short = chat_tokenizer("chatml"), [{"messages": turns("hi", f"ho {n}")} for n in range(4)]
    long = {"messages": turns("one", "first", "two", "second " * 20)}
    valid = write_rows(tmp_path / "valid.jsonl", [long])
    cut = "of 1 conversations 1 lose turns from their end: they are longer than data.seq_len = 127"
    assert opened(tmp_path, tokenizer, short, valid=[valid]).warning == f"data.valid: {cut}"
    assert opened(tmp_path, tokenizer, [*short, long], holdout=0.2).warning == f"data.holdout: {cut}"
    both = opened(
        tmp_path, tokenizer, [{"messages": turns("1", "first", *["second " * 20] * 2)}, *short], valid=[valid]
    ).warning
    assert both.split("; ") == [f"task.chat: {cut.replace('of 1', 'of 5')}", f"data.valid: {cut}"]


def test_text_has_its_share_of_the_learned_tokens(tmp_path: Path) -> None:
    data = opened(tmp_path, chat_tokenizer("chatml"), tiny_chats(90), train=["pydoc:valid"], seq_len=199)
    assert {source.name for source in data.mixture.sources} == {"chat", "train"}
    count, learned = 4000, {"chat": 0, "train": 0}
    for g in range(count):
        source, sample = data.mixture.locate(g)
        learned[data.mixture.sources[source].name] += data.mixture.sources[source].num_predictions(sample)
    assert learned["train"] / sum(learned.values()) == pytest.approx(0.3, abs=0.005)
    text = next(s for s in data.mixture.sources if s.name == "train")
    ids, mine, positions = text.sample(0)
    assert mine.all() and positions.tolist() == list(range(200)) and ids.shape == (200,)


def test_held_out_conversations_are_not_trained_on(tmp_path: Path) -> None:
    rows = tiny_chats(40)
    data = opened(tmp_path, chat_tokenizer("chatml"), rows, holdout=0.1, seq_len=199)
    assert data.valid_windows is not None and data.valid_windows.shape[1:] == (3, 200)
    chat = data.mixture.sources[0]
    assert isinstance(chat, PackedChat) and len(chat.sizes) == 36
    valid = write_rows(tmp_path / "valid.jsonl", rows[:10])
    with pytest.raises(UserError, match=r"data.valid: .* of its tokens are documents that task.chat also contains"):
        opened(tmp_path, chat_tokenizer("chatml"), rows, valid=[valid], seq_len=199)


def test_one_conversation_cannot_be_held_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data.holdout: too few conversations \(1\) .*: give more, or set it to 0$"):
        opened(tmp_path, chat_tokenizer("chatml"), tiny_chats(1), holdout=0.1, seq_len=199)


def test_a_conversation_of_several_examples_is_held_out_whole(tmp_path: Path) -> None:
    """This template moves the system text, so every answer is an example, and later ones repeat earlier ones."""
    tokenizer, names = chat_tokenizer("mistral"), [f"<{n:02d}>" for n in range(30)]
    rows = [{"messages": turns(name, "one", "go on", "two", "more", "three", system="be brief")} for name in names]
    data = opened(tmp_path, tokenizer, rows, holdout=0.1, seq_len=199)
    (chat,) = data.mixture.sources
    assert isinstance(chat, PackedChat) and len(chat.sizes) == 3 * 27 and data.valid_windows is not None
    trained = tokenizer.decode(np.concatenate([chat.window(n)[0] for n in range(chat.num_windows)]))
    held = tokenizer.decode(data.valid_windows[:, 0].flatten())
    assert [held.count(name) for name in names if name in held] == [3, 3, 3]
    assert not [name for name in names if name in held and name in trained]


def test_written_files_are_mapped_again_and_belong_to_one_template(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    opened(tmp_path, tokenizer, tiny_chats(20))
    (folder,) = (tmp_path / "cache").iterdir()
    files = open_token_files(folder)
    assert files.num_documents == 20 and files.answers is not None
    again = open_chat([str(folder)], ChatEncoder(tokenizer), cache_dir=tmp_path / "none")
    assert again.fingerprint == files.fingerprint
    with pytest.raises(UserError, match=r"holds conversations: name it in task.chat"):
        open_training_data(DataConfig(train=[str(folder)], seq_len=8), tokenizer, seed=0, cache_dir=tmp_path)
    other = chat_tokenizer("chatml")
    other.chat_template = "{# other #}" + other.chat_template
    with pytest.raises(UserError, match="was written with another chat template"):
        open_chat([str(folder)], ChatEncoder(other), cache_dir=tmp_path / "none")
    (folder / "answers.bin").write_bytes(b"\0" * (folder / "answers.bin").stat().st_size)
    with pytest.raises(UserError, match=r"answers.bin is damaged \(its content differs from its checksum\)"):
        open_token_files(folder).verify()


def test_parquet_rows_are_read_like_lines(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [{"messages": turns(f"q{n}", f"a{n}")} for n in range(5)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    lines = open_input(write_rows(tmp_path / "chat.jsonl", rows), option="task.chat")
    table = open_input(str(tmp_path / "chat.parquet"), option="task.chat")
    assert [c.messages for c in conversations_in(table)] == [c.messages for c in conversations_in(lines)]


def test_datasets_of_the_hub_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": turns(f"q{n}", f"a{n}")} for n in range(3)] + [{"messages": turns("q")}]

    class Stream:
        info = types.SimpleNamespace(splits={})

        def __iter__(self) -> Any:
            return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: Stream()))
    found = conversations_in(open_input("hf:org/chats", option="task.chat"))
    assert [next(found).messages for _ in range(3)] == [row["messages"] for row in rows[:3]]
    with pytest.raises(UserError, match=r"task.chat: hf:org/chats:4 has no assistant turn"):
        next(found)


GOOD = {"messages": turns("a", "b")}
BAD: dict[str, tuple[str, Any, str]] = {
    "no answer": ("chatml", {"messages": turns("a")}, "has no assistant turn"),
    "empty answer": ("chatml", {"messages": turns("a", " \n")}, "turn 2: the assistant's answer is empty"),
    "empty output": ("chatml", {"instruction": "a", "output": ""}, "turn 2: the assistant's answer is empty"),
    "unknown role": ("chatml", {"messages": [{"role": "bird", "content": "x"}]}, "turn 1: the role 'bird' is unknown"),
    "refused role": ("gemma", {"messages": turns("a", "b", "c", "d")[1:]}, r"refuses it \(roles must alternate"),
    "content": ("chatml", {"messages": [{"role": "user", "content": [1]}]}, "turn 1: its content is not text"),
    "form": ("chatml", {"messages": ["x"]}, "turn 1: is not of the form"),
    "keys": ("chatml", {"text": "x"}, r"is not a conversation \(it has: text\)"),
    "json": ("chatml", None, "is not valid JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_one_line_with_their_number_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    family, row, message = BAD[case]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + ("{" if row is None else json.dumps(row)) + "\n")
    encoder = ChatEncoder(chat_tokenizer(family))
    with pytest.raises(UserError, match=rf"^task.chat: {path}:3 .*{message}") as caught:
        open_chat([str(path)], encoder, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


NO_TOOL = (
    "{% for m in messages %}{% if m.role != 'tool' and m.content %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("said", ["4", ""])
def test_turns_that_a_template_drops_are_found_although_their_text_is_elsewhere(said: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = NO_TOOL
    encoder = ChatEncoder(tokenizer)
    plain = {"messages": [{"role": "system", "content": ""}, *turns("2+2=4?", "yes", "1+1?", "2")]}
    assert list(encoder.encode_conversations([conversation_of(plain, "file:1")])), "an empty system text is no loss"
    called = turns("2+2=4?", "look it up")
    called += [{"role": "tool", "content": said}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(UserError, match=r"^file:2 turn 3: the chat template leaves out the role 'tool'"):
        list(encoder.encode_conversations([conversation_of({"messages": called}, "file:2")]))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "chat template: it runs unsafe code .*: use another template$",
        ),
        ("{{ messages.append(1) }}", "chat template: it runs unsafe code"),
        ("{% for x in range(999999999) %}{% endfor %}", "the chat template refuses it"),
        ("{% if %}", "chat template: line 1 is not Jinja"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}",
            "turn 3: the chat template renders an answer without the prompt",
        ),
        (
            "{% for m in messages %}{% if m.role != 'system' %}{{ m.role + m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}assistant{% endif %}",
            "turn 1: the chat template leaves out the role 'system'",
        ),
    ],
)
def test_templates_that_cannot_be_used_are_refused(template: str, message: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = template
    encoder = ChatEncoder(tokenizer)
    with pytest.raises(UserError, match=f"^file:7 .*({message})") as caught:
        list(encoder.encode_conversations([conversation_of({"messages": TALK}, "file:7")]))
    assert "\n" not in str(caught.value)
