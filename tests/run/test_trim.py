"""Fewer tokens: the written model, runs that trim before they prune, and what is refused."""

from __future__ import annotations

import io
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import kl_div, log_softmax

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.commands import main as cli
from dwindle.core.errors import UserError
from dwindle.core.quality import read_quality
from dwindle.core.run_directory import RunDirectory
from dwindle.core.sizes import format_count
from dwindle.core.terminal import PlainConsole
from dwindle.data.text_windows import validation_windows
from dwindle.data.tokenizing import split_text
from dwindle.data.vocabulary import HeldOut
from dwindle.pruning.ledger import read_ledger
from dwindle.run.judging import source_bits_per_byte
from dwindle.run.plan import make_plan
from dwindle.run.pretrain import begin_run, pretrain, resume
from dwindle.run.start import Start, file_sizes, start_of
from dwindle.training.distill import Distillation, HiddenStates, Teacher
from dwindle.training.loss import language_model_loss
from runs import COMPACT_OFTEN, metrics, tiny_recipe
from tiny import merged_directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trim")
    merged_directory(place / "model", 640)
    return place


def recipe(place: Path, **tables: Any) -> Any:
    given: dict[str, Any] = {
        "vocabulary": {"size": 384, "text": ["pydoc:valid"]},
        "data": {"valid": ["pydoc:valid"], "valid_tokens": 480},
        "training": {"micro_batch": 4},
        "prune": {"target": "80%", "horizon": 0.9, **COMPACT_OFTEN},
        "distill": {"weight": 0.5},
        "checkpoint": {"every": 4, "keep_last": 9},
    }
    return tiny_recipe(place, steps=8, sequences=4, **given | tables)


def shown(result: Any) -> str:
    out = io.StringIO()
    PlainConsole(width=200, file=out).print(result.render())
    return out.getvalue()


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    pretrain(recipe(place), place / "run")
    return place / "run"


def test_the_written_model(place: Path) -> None:
    """Rows, tokenizer, ids in configuration and generation settings, structure and ledger."""
    out = place / "trimmed"
    result = dwindle.trim(place / "model", "400", out=out)
    source, smaller = dwindle.load(place / "model"), dwindle.load(out)
    kept = torch.tensor(result.vocabulary.kept)
    assert len(kept) == 384 == smaller.model.config.vocab_size == len(smaller.tokenizer)
    for name, weight in smaller.model.named_parameters():
        before = source.model.get_parameter(name)
        assert torch.equal(weight, before[kept] if before.shape[0] == 640 else before), name
    eos = smaller.tokenizer.eos_token_id
    assert kept[eos] == 639 and smaller.model.config.eos_token_id == smaller.model.generation_config.eos_token_id == eos
    recorded = json.loads((out / "structure.json").read_text())["vocabulary"]
    ledger = read_ledger(out)
    assert [event["event"] for event in ledger] == ["source", "vocabulary"]
    assert recorded == result.vocabulary.to_json() == {key: ledger[1][key] for key in ("rows", "kept")}
    assert [event["parameters"] for event in ledger] == [result.before.total, result.after.total]
    assert result.quality is not None and "bits per byte" in result.quality.bits()
    chat = [{"role": "user", "content": "def f(x):"}]
    texts = [tok.apply_chat_template(chat, tokenize=False) for _, tok in (source, smaller)]
    assert texts[0] == texts[1] == smaller.tokenizer.decode(smaller.tokenizer(texts[1]).input_ids)
    card = (out / "README.md").read_text()
    sizes = " of ".join(format_count(count.total) for count in (result.after, result.before))
    assert "trimmed from 640 to 384 tokens" in card and sizes in card
    assert "- trimmed\n" in card and "- pruned\n" not in card
    settings = recipe(place, source={"model": str(out), "device": "cpu"}, vocabulary={})
    settings.distill.teacher = str(place / "model")
    with pytest.raises(UserError, match=r"or start at a model with all tokens and give vocabulary.size"):
        make_plan(settings)
    again = dwindle.replay(place / "model", out)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), smaller.model.parameters(), strict=True))


def test_it_is_measured_on_parts_of_its_text_that_are_not_counted(place: Path, tmp_path: Path) -> None:
    """Every eighth passage of 2,000 characters: bits per byte by a plain loop, tokens as counted on the rest."""
    lines = [
        f"{number:04d} {'abcdefgh'[number // 20 % 8] * 8} for f in range(x): return".ljust(99) for number in range(640)
    ]
    passages = ["\n".join(lines[at : at + 20]) + "\n" for at in range(0, 640, 20)]
    held = passages[7::8]
    text, rest = tmp_path / "books.txt", tmp_path / "rest.txt"
    text.write_text("".join(passages))
    rest.write_text("".join(passage for passage in passages if passage not in held))
    result = dwindle.trim(place / "model", 384, text=[str(text)])
    kept = dwindle.trim(place / "model", 384, text=[str(rest)], measure=False).vocabulary.kept
    whole = dwindle.trim(place / "model", 384, text=[str(text)], data=["pydoc:valid"])
    assert list(result.vocabulary.kept) == list(kept)
    found = result.quality
    assert found is not None and (found.text, found.bytes, found.held_out) == (["books.txt"], 4 * 2000, True)
    assert whole.quality is not None and whole.quality.text == ["pydoc:valid"]
    for (model, tokenizer), bits in ((dwindle.load(place / "model"), found.source_bits), (result, found.result_bits)):
        nats = 0.0
        for passage in held:
            ids = [tokenizer.bos_token_id or tokenizer.eos_token_id, *tokenizer(passage).input_ids]
            length = model.config.max_position_embeddings
            for at in range(0, len(ids) - 1, length):
                end = min(at + length, len(ids) - 1)
                start = max(end - length, 0) if at else 0
                with torch.no_grad():
                    logits = model(torch.tensor([ids[start:end]])).logits[0, at - end :].double()
                nats -= float(log_softmax(logits, -1)[range(end - at), ids[at + 1 : end + 1]].sum())
        assert bits == pytest.approx(nats / 8000 / math.log(2), abs=1e-5)
    again = dwindle.trim(place / "model", 384, text=[str(text)], data=[str(text)])
    assert again.quality == found  # a text is never measured on what was counted
    assert "(on 8,000 held-out bytes of books.txt)" in str(shown(result))
    text.write_text("def f(x): return x\n" * 9)
    short = dwindle.trim(place / "model", 384, text=[str(text)]).quality
    assert short is not None and (short.bytes, short.held_out) == (9 * 19, False)


def test_held_out_passages_are_spread_evenly() -> None:
    """Every n-th passage, n a power of two times eight, as few as needed; the documents pass through."""
    chance = random.Random(0)
    for _ in range(200):
        sizes = [chance.choice([1, 10, 500, 2500, 9000]) for _ in range(chance.randrange(60))]
        documents = ["".join(chance.choices("ab \n", k=size)) for size in sizes]
        held = HeldOut(6000)
        assert list(held.watched(documents)) == documents
        passages, every = [passage for text in documents for passage in split_text(text, 2000)], 8
        while sum(map(len, passages[every - 1 :: every])) > 6000:
            every *= 2
        assert held.passages == passages[every - 1 :: every]


def test_the_teacher_is_restricted_and_renormalised(place: Path) -> None:
    """Its divergence against a plain one: the whole model's probabilities of the kept tokens over their sum."""
    vocabulary = start_of(recipe(place)).vocabulary
    assert vocabulary is not None
    start = Start(str(place / "model"), vocabulary)
    whole, teacher, student = (s.model(torch.float64) for s in (Start(start.source), start, start))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.05 * torch.randn(
                parameter.shape, dtype=parameter.dtype, generator=torch.Generator().manual_seed(1)
            )
    tokens = torch.randint(384, (2, 13), generator=torch.Generator().manual_seed(0))
    how = Distillation(0.5, 2.0)
    found = language_model_loss(
        student, tokens, chunk_tokens=7, teacher=Teacher.of(HiddenStates(teacher), how)
    ).distillation
    kept = torch.tensor(vocabulary.kept)
    with torch.no_grad():
        probabilities = torch.softmax(whole(kept[tokens[:, :-1]]).logits / 2, -1)[..., kept]
        renormalised = probabilities / probabilities.sum(-1, keepdim=True)
        ours = log_softmax(student(tokens[:, :-1]).logits / 2, -1)
    assert found is not None
    torch.testing.assert_close(found, 4 * kl_div(ours, renormalised, reduction="sum"), rtol=1e-10, atol=0)


def test_a_run_trims_then_prunes(place: Path, run: Path) -> None:
    model, tokenizer = dwindle.load(run / "model")
    assert model.config.vocab_size == len(tokenizer) == 384
    ledger = read_ledger(run)
    assert [event["event"] for event in ledger[:3]] == ["source", "vocabulary", "prune"]
    assert read_ledger(run / "model") == ledger
    assert ledger[0]["parameters"] > ledger[1]["parameters"] > ledger[2]["parameters"]
    text = "def f(x):\n    return 'Zürich' + x  # 你好 🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    again = dwindle.replay(place / "model", run / "ledger.jsonl")
    shapes = [{name: parameter.shape for name, parameter in one.named_parameters()} for one in (again.model, model)]
    assert shapes[0] == shapes[1] and again.tokenizer.get_vocab() == tokenizer.get_vocab()
    plan = make_plan(recipe(place))
    assert plan.parameters_before == ledger[1]["parameters"]
    assert metrics(run)[-1]["parameters"] <= plan.parameters_target


def test_bits_per_byte_against_the_whole_source(place: Path, run: Path) -> None:
    """Of source and result, by plain transformers, on the text of the validation windows and its bytes."""
    settings = recipe(place)
    model, tokenizer = dwindle.load(run / "model")
    windows = validation_windows(["pydoc:valid"], tokenizer, settings.data.seq_len, 480)
    quality = read_quality(run / "quality.json")
    assert quality is not None and quality.source_bits is not None and quality.result_bits is not None
    whole, own = dwindle.load(place / "model")
    nats, size = [0.0, 0.0], [0, 0]
    for window in windows.tolist():
        text = tokenizer.decode(window)
        for side, (m, tok, ids) in enumerate(((whole, own, own(text).input_ids), (model, tokenizer, window))):
            with torch.no_grad():
                logits = m(torch.tensor([ids])).logits[0, :-1].double()
            nats[side] -= float(log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].sum())
            ends = ("<|endoftext|>", "<|im_end|>")
            plain = [token for token in tok.convert_ids_to_tokens(ids[1:]) if token not in ends]
            size[side] += sum(len(tok.convert_tokens_to_string([t]).encode()) if t.isascii() else len(t) for t in plain)
    for bits, total, num_bytes in zip((quality.source_bits, quality.result_bits), nats, size, strict=True):
        assert bits == pytest.approx(total / num_bytes / math.log(2), rel=1e-4)
    assert quality.bytes == size[1] and "bits per byte" in quality.losses()
    assert "bits per byte" in (run / "model" / "README.md").read_text()


def test_a_trimmed_run_resumes_bit_equal(place: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the middle; the tokens are those that were chosen at the beginning, and nothing is counted again."""
    copy = place / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    shutil.rmtree(RunDirectory(copy).checkpoint(8))
    monkeypatch.setattr("dwindle.data.vocabulary.token_counts", lambda *_: pytest.fail("counted again"))
    resume(copy)
    for name, weight in load_file(copy / "model" / "model.safetensors").items():
        assert torch.equal(weight, load_file(run / "model" / "model.safetensors")[name]), name
    assert metrics(copy) == metrics(run) and (copy / "ledger.jsonl").read_bytes() == (run / "ledger.jsonl").read_bytes()
    assert (copy / "quality.json").read_bytes() == (run / "quality.json").read_bytes()
    assert (copy / "model" / "tokenizer.json").read_bytes() == (run / "model" / "tokenizer.json").read_bytes()


def test_a_resumed_file_target_needs_no_text(place: Path, tmp_path: Path) -> None:
    """The tokens of the run are on disk: the text that they were counted on may be gone."""
    pytest.importorskip("gguf")
    merged_directory(tmp_path / "model", 640, hidden_size=64, intermediate_size=512, num_attention_heads=4, head_dim=16)
    text = tmp_path / "words.txt"
    text.write_text("def f(x): return x\n" * 200)
    settings: dict[str, Any] = {"vocabulary": {"size": 384, "text": [str(text)]}, "training": {"micro_batch": 4}}
    start = start_of(tiny_recipe(tmp_path, steps=2, sequences=4, **settings))
    limit = int(0.8 * file_sizes(start, "it")("q8_0")(Anatomy.of_config(start.config()).source))
    settings["prune"] = {"target": f"{limit}B@q8_0", "horizon": 0.9, "selection": "global", **COMPACT_OFTEN}
    begin_run(tiny_recipe(tmp_path, steps=2, sequences=4, **settings), RunDirectory(tmp_path / "run"), overwrite=False)
    text.unlink()
    assert resume(tmp_path / "run").target_reached


def test_a_source_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    for size in (640, 512):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        merged_directory(tmp_path / "s", size)
        assert dwindle.trim(tmp_path / "s", 384, measure=False).vocabulary.num_rows == size


def test_a_share_of_a_replay_is_one_of_the_trimmed_source(place: Path, run: Path) -> None:
    trimmed_count = read_ledger(run)[1]["parameters"]
    found = dwindle.replay(place / "model", run / "ledger.jsonl", at="90%")
    first = next(e for e in read_ledger(run)[2:] if e["event"] == "prune" and e["parameters"] <= 0.9 * trimmed_count)
    assert found.after.total == first["parameters"]


def test_a_replay_without_events_is_the_trimmed_source(place: Path, run: Path) -> None:
    """What the run began with; a size that the whole source does not exceed is the source."""
    events = read_ledger(run)
    found = dwindle.replay(place / "model", run / "ledger.jsonl", at=0)
    assert found.after.total == events[1]["parameters"] and found.model.config.vocab_size == 384
    assert [event["event"] for event in found.ledger] == ["source", "vocabulary"]
    one = dwindle.replay(place / "model", run / "ledger.jsonl", at=1)
    assert one.after.total == next(event["parameters"] for event in events if event["event"] == "prune")
    whole = dwindle.replay(place / "model", run / "ledger.jsonl", at=str(events[0]["parameters"]))
    assert whole.after.total == events[0]["parameters"]
    with pytest.raises(UserError, match="the ledger has only"):
        dwindle.replay(place / "model", run / "ledger.jsonl", at=10_000)


def test_other_tokens_are_another_run(place: Path, run: Path) -> None:
    copy = place / "other"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    shutil.rmtree(RunDirectory(copy).checkpoint(8))
    record = json.loads((copy / "vocabulary.json").read_text())
    record["kept"] = [[0, 381], [638, 639]]
    (copy / "vocabulary.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"data.valid|vocabulary.text: its content is not"):
        resume(copy)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"size": 100}, r"^vocabulary.size 100: \d+ tokens must stay .*: choose at least \d+$"),
        ({"size": "50k"}, r"^vocabulary.size 50,000: the source has 640 tokens: choose fewer$"),
        ({"size": "many"}, "vocabulary.size: 'many' is not a number"),
        ({"size": 384, "text": ["missing.txt"]}, "vocabulary.text: .*missing.txt does not exist"),
        ({"text": ["pydoc:valid"]}, "vocabulary.size: missing"),
    ],
)
def test_bad_vocabularies_are_refused(place: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        pretrain(recipe(place, vocabulary=settings), place / "refused")
    assert not (place / "refused").exists()


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    tokenizer = dwindle.load(merged_directory(tmp_path / "s", 512)).tokenizer
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "s")
    with pytest.raises(UserError, match=r"its tokenizer has ids up to 512, its embedding only 512 rows: remove"):
        dwindle.trim(tmp_path / "s", 384, measure=False)


def test_bits_per_byte_of_whole_characters(place: Path) -> None:
    """A window may begin and end within a character: its bytes there are no text of the source."""
    tokenizer: Any = dwindle.load(place / "model").tokenizer
    ids = [tokenizer(text).input_ids for text in ("你", " def f(x): return x", "好")]
    assert len(ids[0]) > 1 < len(ids[2])
    windows = (torch.tensor([found]) for found in (ids[1], [*ids[0][1:], *ids[1], *ids[2][:-1]]))
    bits = [source_bits_per_byte(str(place / "model"), one, tokenizer, "cpu", "fp32") for one in windows]
    assert bits[0] == bits[1]


def test_other_formats_agree(place: Path, tmp_path: Path) -> None:
    """Each is verified against the trimmed model as it is written; llama.cpp gives the same ids, also for odd text."""
    pytest.importorskip("xllamacpp")
    pytest.importorskip("onnxruntime")
    out = tmp_path / "trimmed"
    dwindle.trim(place / "model", 384, text=["pydoc:valid"], out=out, measure=False)
    for format_ in ("gguf", "onnx", "hf"):
        target = tmp_path / f"it.{format_}"
        exported = dwindle.export_model(out, format_, target, type="f32" if format_ != "onnx" else None)
        assert exported.verified is not None
    again = dwindle.load(tmp_path / "it.gguf")
    ours = dwindle.load(out)
    for text in ("Zürich 你好 🙂\n\n1.  two", "def f(x):\n    return x"):
        assert again.tokenizer(text).input_ids == ours.tokenizer(text).input_ids
        assert again.tokenizer.decode(again.tokenizer(text).input_ids) == text


@pytest.mark.parametrize(("vocab", "problem"), [("50k", "640 tokens: choose fewer"), ("64", "choose at least")])
def test_the_command_refuses_in_one_line(
    place: Path, tmp_path: Path, vocab: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    command = ["dwindle", "trim", str(place / "model"), "--vocab", vocab, "--out", str(out)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as done:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert done.value.code == 2 and problem in said and said.count("\n") == 0 and "--vocab" in said
    assert not out.exists()
