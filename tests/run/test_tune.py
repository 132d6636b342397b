"""Tuning runs: what they equal (TRL, themselves resumed, one process on two ranks), LoRA, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from chats import CHATML, chat_directory, tiny_chats, turns, write_rows
from distributed.processes import run_ranks
from dwindle.anatomy.positions import can_be_packed
from dwindle.core.errors import UserError
from dwindle.data.token_files import write_token_files
from dwindle.data.training_data import open_training_data
from dwindle.recipe.recipe import Recipe
from dwindle.run.plan import make_plan
from dwindle.run.pretrain import pretrain, resume
from dwindle.run.tune import tuning_recipe
from dwindle.sources.loading import load_config, load_tokenizer
from dwindle.training.callbacks import Callback
from dwindle.training.checkpoint import latest_checkpoint
from dwindle.training.loop import Trainer
from runs import COMPACT_OFTEN, die_at, go_on, metrics, start, tiny_recipe, wait

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tune")
    chat_directory(place / "model")
    write_rows(place / "chat.jsonl", tiny_chats(60))
    return place


def recipe(place: Path, *, steps: int = 8, chat: str = "chat.jsonl", **tables: Any) -> Recipe:
    """Rows of 96 tokens: conversations of 40 to 140 bytes with documentation between them."""
    base: dict[str, Any] = {
        "task": {"kind": "chat", "chat": [str(place / chat)]},
        "data": {"holdout": 0.1},
        "training": {"micro_batch": 2},
        "prune": {"enabled": False},
        "checkpoint": {"every": 3, "keep_last": 9},
    }
    merged = {name: base.get(name, {}) | tables.get(name, {}) for name in base | tables}
    return tiny_recipe(place, steps=steps, sequences=5, seq_len=159, **merged)


PRUNED = {
    "prune": {"enabled": True, "target": "70%", "horizon": 0.7, "warmup_steps": 0, **COMPACT_OFTEN},
    "distill": {"weight": 0.5},
}


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(run / "model" / "model.safetensors")
    return found


def same(run: Path, reference: Path) -> None:
    assert metrics(run) == metrics(reference)
    for path in latest_checkpoint(reference).glob("*.safetensors"):
        assert (latest_checkpoint(run) / path.name).read_bytes() == path.read_bytes(), path.name
    assert (run / "model/model.safetensors").read_bytes() == (reference / "model/model.safetensors").read_bytes()
    assert (run / "quality.json").read_bytes() == (reference / "quality.json").read_bytes()


def test_pruning_goes_on_and_a_killed_run_resumes_to_the_bit(place: Path) -> None:
    settings = recipe(place, **PRUNED)
    whole, run = place / "whole", place / "killed"
    assert wait(start(lambda: pretrain(settings, whole)), 120) == 0
    child = start(lambda: (die_at(Trainer, "update", 5), go_on(settings, run)))
    assert wait(child, 120)
    assert wait(start(lambda: resume(run)), 120) == 0
    same(run, whole)
    lines = metrics(whole)
    assert lines[-1]["parameters"] < lines[0]["parameters"] and "distill_loss" in lines[0]
    assert len({line["learned_tokens"] for line in lines}) > 1
    quality = json.loads((whole / "quality.json").read_text())
    assert quality["source_loss"] and quality["samples"][0]["prompt"].endswith("assistant\n")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    assert tokenizer.chat_template == CHATML
    generation = json.loads((whole / "model/generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation["eos_token_id"]


def plain_step(settings: Recipe, cache: Path, *, packed: bool = True) -> dict[str, float]:
    """The first step, slowly: every example in a pass of its own, sums over all, divided by their learned tokens."""
    sources = [settings.source.model, settings.distill.teacher]
    model, teacher = (AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32) for source in sources)
    tokenizer, seed = load_tokenizer(sources[0]), settings.training.seed
    task = settings.task
    data = open_training_data(settings.data, tokenizer, seed=seed, cache_dir=cache, task=task, packed=packed)
    loss, divergence, counts = torch.zeros(()), torch.zeros(()), []
    for g in range(settings.num_sequences_per_step):
        ids, learned, positions = torch.from_numpy(data.mixture.sample(g))
        counts.append(int(learned.sum() - learned[0]))
        starts = (positions == 0).nonzero().flatten().tolist()
        for first, end in pairwise([*starts, len(ids)]):
            example, mine = ids[first:end], learned[first + 1 : end].bool()
            ours, theirs = (m(input_ids=example[None]).logits[0, :-1][mine] for m in (model, teacher))
            loss = loss + F.cross_entropy(ours, example[1:][mine], reduction="sum")
            pairs = ours.log_softmax(-1), theirs.detach().log_softmax(-1)
            divergence = divergence + F.kl_div(*pairs, reduction="sum", log_target=True)
    assert len(set(counts)) > 2 and sum(counts[:2]) != sum(counts[2:]), "micro-batches and ranks differ"
    count = sum(counts)
    (((1 - settings.distill.weight) * loss + settings.distill.weight * divergence) / count).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    sums = {"loss": loss.item() / count, "distill_loss": divergence.item() / count}
    return sums | {"grad_norm": norm.item(), "learned_tokens": count}


def test_two_ranks_equal_one_process_and_a_plain_computation(place: Path) -> None:
    """Five sequences on two ranks, two at a time: slices and numbers of answers differ."""
    distill = {"weight": 0.5, "teacher": str(chat_directory(place / "other", seed=1))}
    pretrain(recipe(place, steps=4, distill=distill), place / "alone")
    alone = metrics(place / "alone")
    plain = plain_step(recipe(place, steps=4, distill=distill), place / "plain")
    assert {key: alone[0][key] for key in plain} == pytest.approx(plain, abs=1e-5, rel=1e-5)
    for parallel in ("ddp", "fsdp"):
        settings = recipe(place, steps=4, distill=distill, training={"parallel": parallel})
        run = place / parallel
        run_ranks(2, lambda rank, s=settings, r=run: pretrain(s, r))  # type: ignore[misc]
        for key in ("loss", "distill_loss", "grad_norm", "learned_tokens"):
            ours, theirs = ([line[key] for line in lines] for lines in (metrics(run), alone))
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5), (parallel, key)
            assert ours[0] == pytest.approx(plain[key], abs=1e-5, rel=1e-5), (parallel, key)


def test_a_teacher_with_convolutions_sees_one_conversation_at_a_time(place: Path, tmp_path: Path) -> None:
    """They would carry the end of one into the next: then none share a row, although the student could have it."""
    teacher = str(chat_directory(tmp_path / "other", model="lfm2"))
    settings = recipe(place, steps=1, distill={"weight": 0.5, "teacher": teacher})
    pretrain(settings, tmp_path / "run")
    plain = plain_step(settings, tmp_path / "plain", packed=False)
    assert {key: metrics(tmp_path / "run")[0][key] for key in plain} == pytest.approx(plain, abs=1e-5, rel=1e-5)


def test_the_loss_of_a_step_does_not_depend_on_micro_batches(place: Path) -> None:
    losses = []
    for micro in (1, 5):
        run = place / f"micro-{micro}"
        pretrain(recipe(place, steps=2, training={"micro_batch": micro}), run)
        losses.append([line[key] for line in metrics(run) for key in ("loss", "grad_norm")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Order(Callback):
    """Notes which conversations were in each step, in order."""

    def __init__(self) -> None:
        self.documents: list[int] = []

    def after_step(self, trainer: Trainer) -> None:
        batches: Any = trainer.batches
        (chat,) = batches.mixture.sources
        for g in range(batches.next_sample - batches.sequences_per_step, batches.next_sample):
            self.documents += chat.rows[chat.window_index(g)]


def equal_talks(family: str) -> list[dict[str, Any]]:
    """96 conversations of the same length in bytes, so that two fill a row; questions and answers differ in length."""
    rows = []
    for n in range(96):
        question, answer = f"{n:02d}" + "q" * (n % 11), "a" * (10 - n % 11) + f"{97 * n % 89:02d}"
        if family == "llama3":
            said = turns(question, answer)
            rows.append({"prompt": said[:1], "completion": said[1:]})
        else:
            rows.append({"messages": turns(question, answer, "ok?", f"{n % 10} yes")})
    return rows


@pytest.mark.parametrize("family", ["llama3", "chatml"])
def test_losses_equal_those_of_trl(tmp_path: Path, family: str) -> None:
    """Ours packs two conversations into a row, TRL pads each; prompt/completion rows, and messages of four turns."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    chat_directory(tmp_path / "model", family)
    rows = equal_talks(family)
    write_rows(tmp_path / "chat.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    talk = rows[0].get("messages") or [*rows[0]["prompt"], *rows[0]["completion"]]
    length = len(tokenizer.apply_chat_template(talk, return_dict=False))
    tokens = 2 * (2 * length - 1)
    settings = tiny_recipe(
        tmp_path,
        steps=20,
        sequences=2,
        seq_len=2 * length - 1,
        task={"kind": "chat", "chat": [str(tmp_path / "chat.jsonl")]},
        data={"train": []},
        training={"micro_batch": 1, "lr": 1e-3, "schedule": "constant", "warmup": 0, "weight_decay": 0.0},
        prune={"enabled": False},
    )
    assert settings.num_tokens_per_step == tokens
    order = Order()
    pretrain(settings, tmp_path / "run", callbacks=[order])
    ours = [line["loss"] for line in metrics(tmp_path / "run")]

    template = CHATML.replace(
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
        "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
        "{% endif %}{{ '\n' }}",
    )
    if family == "chatml":
        assert template != CHATML
        tokenizer.chat_template = template
    tokenizer.pad_token = tokenizer.eos_token
    options = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=20,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        max_length=4 * length,
        assistant_only_loss=family == "chatml",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
    )
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32),
        args=options,
        train_dataset=datasets.Dataset.from_list([rows[n] for n in order.documents]),
        processing_class=tokenizer,
    )
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(ours) == len(theirs) == 20 and ours[0] - ours[-1] > 0.2
    assert ours == pytest.approx(theirs, abs=1e-4)
    final = dict(trainer.model.named_parameters())
    for name, weight in weights(tmp_path / "run").items():
        torch.testing.assert_close(weight, final[name].detach(), atol=2e-4, rtol=0)


def test_lora_trains_adapters_and_merges_them(place: Path) -> None:
    pytest.importorskip("peft")
    settings = recipe(place, steps=6, training={"lora_rank": 2, "lr": 1e-2})
    whole, run = place / "lora", place / "lora-killed"
    pretrain(settings, whole)
    before, after = load_file(place / "model/model.safetensors"), weights(whole)
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if name.endswith("proj.weight")}
    update = after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(update, rtol=1e-4) == 2
    lines = metrics(whole)
    assert lines[-1]["valid_loss"] < lines[-1]["source_valid_loss"]
    assert wait(start(lambda: (die_at(Trainer, "update", 5), go_on(settings, run))), 120)
    resume(run)
    assert all(torch.equal(after[name], weight) for name, weight in weights(run).items())


def test_a_recipe_from_a_run_tunes_its_model(place: Path) -> None:
    chats, texts = [str(place / "chat.jsonl")], ["pydoc:valid"]
    first = tuning_recipe(place / "model", chats, texts=texts, overrides=["training.tokens=2k", "source.device=cpu"])
    pretrain(first, place / "first")
    second = tuning_recipe(place / "first", chats, overrides=["source.device=cpu"])
    assert second.source.model == str(place / "first" / "model")
    assert make_plan(second).warnings[0].startswith("data.train: no plain text between the conversations")


THREE_TIMES: dict[str, tuple[str, list[str]]] = {
    "packed": ("llama", []),
    "one conversation in a row": ("lfm2", []),
    "another share of text": ("llama", ["task.text_share=0.6"]),
    "another length": ("lfm2", ["data.seq_len=127"]),
    "another part held out": ("llama", ["data.holdout=0.4"]),
    "none held out": ("llama", ["data.holdout=0"]),
    "rendered before": ("llama", []),
}


@pytest.mark.parametrize("case", THREE_TIMES)
def test_conversations_are_read_three_times(place: Path, tmp_path: Path, case: str) -> None:
    """By the rows that the run itself counts; the plan says the same."""
    family, overrides = THREE_TIMES[case]
    model = chat_directory(place / family, model=family)
    chats = [write_rows(tmp_path / "chat.jsonl", tiny_chats(300))]
    if case == "rendered before":
        chats = [write_token_files(chats, load_tokenizer(str(model)), tmp_path / "tokens", chat=True).label]
    settings = tuning_recipe(model, chats, texts=["pydoc:valid"], overrides=overrides)
    packed = can_be_packed(load_config(str(model)))
    assert packed == (family == "llama")
    data = open_training_data(
        settings.data, load_tokenizer(str(model)), seed=0, cache_dir=tmp_path, task=settings.task, packed=packed
    )
    passes = data.mixture.epochs(settings.num_steps * settings.num_sequences_per_step)
    assert passes["chat"] == pytest.approx(3, rel=0.03)
    plan = make_plan(settings)
    assert plan.text_passes == pytest.approx(passes, rel=0.1)
    plan.text_passes = dict.fromkeys(plan.text_tokens, 1076.2)
    assert "read 1,076 times" in plan._text()
    assert (data.valid_windows is None) == (settings.data.holdout == 0)


def test_a_model_without_a_template_gets_the_one_it_was_tuned_with(place: Path) -> None:
    bare = chat_directory(place / "bare", None)
    settings = recipe(place, steps=2, source={"model": str(bare)}, data={"seq_len": 255, "holdout": 0.0})
    settings.training.tokens_per_step, settings.training.tokens = 510, 1020
    pretrain(settings, place / "alpaca")
    tokenizer = AutoTokenizer.from_pretrained(place / "alpaca/model")
    text = tokenizer.apply_chat_template(turns("hi"), tokenize=False, add_generation_prompt=True)
    assert text.startswith("Below is an instruction") and text.endswith("### Instruction:\nhi\n\n### Response:\n")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lora with pruning": ({"training": {"lora_rank": 4}, **PRUNED}, "training.lora_rank: cannot be combined with prun"),
    "no conversations": ({"task": {"chat": []}}, "task.chat: missing: name the conversations"),
    "conversations of text": ({"task": {"kind": "text"}}, 'task.chat: needs task.kind = "chat"'),
    "missing file": ({"task": {"chat": ["nowhere.jsonl"]}}, r"task.chat: \S*nowhere.jsonl does not exist"),
    "plain text": ({"task": {"chat": [__file__.replace(".py", ".txt")]}}, "task.chat: .* does not exist"),
    "trained on": ({"data": {"valid": ["x.jsonl"], "holdout": 0.0}}, r"data.valid: \S*x.jsonl is also trained on"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line_and_writes_nothing(place: Path, case: str) -> None:
    tables, message = REFUSED[case]
    settings = recipe(place, **tables)
    if case == "trained on":
        settings.task.chat = ["x.jsonl"]
    with pytest.raises(UserError, match=message):
        pretrain(settings, place / "refused")
    assert not (place / "refused").exists()


def test_a_tuning_names_its_teacher(place: Path) -> None:
    """Without pruning, the default would be the model's own start; a run that prunes has its source."""
    chats, weight = [str(place / "chat.jsonl")], "distill.weight=0.5"
    with pytest.raises(UserError, match=r"^tune: distill.teacher: missing: .* name the model to learn from"):
        tuning_recipe(place / "model", chats, overrides=[weight])
    teacher = chat_directory(place / "teacher", seed=1)
    named = tuning_recipe(place / "model", chats, overrides=[weight, f"distill.teacher={teacher}"])
    assert make_plan(named).teacher == str(teacher)
    pruned = tuning_recipe(place / "model", chats, overrides=[weight, "prune.enabled=true", "prune.target=80%"])
    assert make_plan(pruned).teacher == str(place / "model")
    assert make_plan(tuning_recipe(place / "model", chats)).teacher is None


def test_no_tokens_are_refused(place: Path) -> None:
    with pytest.raises(UserError, match=r"^tokens: 0 would train nothing: give more"):
        tuning_recipe(place / "model", [str(place / "chat.jsonl")], tokens=0)


def test_a_bad_line_ends_a_run_before_it_begins(place: Path) -> None:
    write_rows(place / "bad.jsonl", [*tiny_chats(3), {"messages": turns("why?")}])
    with pytest.raises(UserError, match=r"^task.chat: \S*bad.jsonl:4 has no assistant turn"):
        pretrain(recipe(place, chat="bad.jsonl"), place / "bad")
    assert not (place / "bad").exists()
