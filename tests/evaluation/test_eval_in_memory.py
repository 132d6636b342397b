"""Models in memory are measured like those on disk, of any family, and their results fit into a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_sets import write_sets
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPTNeoConfig, LlamaConfig, MambaConfig, T5Config
from transformers import T5ForConditionalGeneration as T5

import dwindle
from dwindle.core.errors import UserError
from dwindle.evaluation.scoring import Scorer
from dwindle.evaluation.table import model_table
from dwindle.pruning.surgery import Prunable
from tiny import random_group, tiny_directory, tiny_model, tiny_tokenizer

TASKS = ["piqa", "arc_easy"]
SIZES = {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0}
STRANGERS = {
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=256, **SIZES),
    "gpt_neo": GPTNeoConfig(
        hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], **SIZES
    ),
    "mamba": MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=4, **SIZES),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("live")
    tiny_directory(place / "model", max_position_embeddings=256)
    write_sets(place / "sets")
    return place


def stranger(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(STRANGERS[name]).eval()


def values(result: Any) -> list[tuple[str, float, float]]:
    return [(task.task, task.acc, task.acc_norm) for task in result.tasks]


def test_a_loaded_model_and_a_pair_equal_the_path(place: Path) -> None:
    data: dict[str, Any] = {"data": [str(place / "sets")], "text": [str(place / "sets" / "wikitext-2-raw.test.txt")]}
    expected = dwindle.evaluate(place / "model", TASKS, **data)
    loaded = dwindle.load(place / "model")
    model, tokenizer = loaded
    for given in (loaded, (model, tokenizer), [model, tokenizer]):
        found = dwindle.evaluate(given, TASKS, **data)  # type: ignore[arg-type]
        assert values(found) == values(expected) and found.parameters == expected.parameters
        assert found.texts[0].bits_per_byte == expected.texts[0].bits_per_byte
    assert dwindle.evaluate(loaded, TASKS, data=data["data"]).model == str(place / "model")
    assert dwindle.evaluate((model, tokenizer), TASKS, data=data["data"], name="mine").model == "mine"
    pruned = dwindle.prune(loaded, "80%", metric="magnitude")
    assert dwindle.evaluate(pruned, TASKS, data=data["data"]).parameters == pruned.after.total  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STRANGERS)
def test_families_without_a_table(place: Path, tmp_path: Path, name: str) -> None:
    """Accuracies by one plain pass for each choice, and the number of parameters, of a model nobody here knows."""
    model, tokenizer = stranger(name).train(), tiny_tokenizer()
    items = tmp_path / "items.jsonl"
    found = dwindle.evaluate((model, tokenizer), ["piqa"], data=[str(place / "sets")], items=items)
    assert model.training and found.parameters == sum(parameter.numel() for parameter in model.parameters())
    first = json.loads(items.read_text().splitlines()[0])["loglikelihoods"]
    context = tokenizer("Question: to cut\nAnswer:")["input_ids"]
    for score, choice in zip(first, (" use a knife's edge", ' use "water"'), strict=True):
        answer = tokenizer(choice)["input_ids"]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([context + answer])).logits[0].log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(answer) - 1)
        expected = sum(float(logits[at, token]) for at, token in zip(places, answer, strict=True))
        assert score == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("engine", ["dwindle", "harness"])
def test_items_whose_scores_are_no_numbers_are_skipped(place: Path, tmp_path: Path, engine: str) -> None:
    """Not answered by the first choice, which is where NaN is the largest. Their lines of --items are JSON."""
    if engine == "harness":
        pytest.importorskip("lm_eval")
    sets, items, tokenizer = str(place / "sets"), tmp_path / "items.jsonl", tiny_tokenizer()
    model = tiny_model("llama", vocab_size=257, dtype=torch.float32, max_position_embeddings=256)

    def measured() -> tuple[Any, list[dict[str, Any]]]:
        found = dwindle.evaluate((model, tokenizer), ["arc_easy"], data=[sets], engine=engine, items=items)
        lines = items.read_text().splitlines()
        return found.tasks[0], [json.loads(line, parse_constant=pytest.fail) for line in lines]

    _, before = measured()
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids("[")] = torch.nan  # only the second item has it
    task, rows = measured()
    assert [set(row["loglikelihoods"]) == {None} for row in rows] == [False, True, False]
    right = [row["loglikelihoods"].index(max(row["loglikelihoods"])) == row["gold"] for row in (before[0], before[2])]
    assert (task.acc, task.num_items, task.num_skipped) == (sum(right) / 2, 2, 1)
    assert task.skipped == ["item 1: a log-likelihood is not a number (NaN)"]
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    for tasks, text in ((["piqa"], []), ([], [str(place / "sets" / "wikitext-2-raw.test.txt")])):
        with pytest.raises(UserError, match=r"not a number \(NaN\)\): the model is damaged, or overflows in its dtype"):
            dwindle.evaluate((model, tokenizer), tasks, data=[sets], text=text, engine=engine)


class Loud(torch.nn.Module):
    """A layer of one's own."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return 2 * self.inner(x)


def test_models_with_parts_of_ones_own_are_called_whole() -> None:
    model = tiny_model("llama")
    custom = Prunable(model)
    custom.prune(random_group("attn", custom.alive))
    assert Scorer(model, max_length=64)._takes_masks and Scorer(custom.compacted(), max_length=64)._takes_masks
    model.model.layers[1].mlp = Loud(model.model.layers[1].mlp)
    scorer = Scorer(model, max_length=64)
    assert not scorer._known and not scorer._takes_masks


def test_results_are_saved_for_the_table(place: Path, tmp_path: Path) -> None:
    result = dwindle.evaluate(
        (stranger("gpt2"), tiny_tokenizer()), TASKS, data=[str(place / "sets")], name="my gpt2", limit=2
    )
    result.tokens = 3_000_000
    assert result.save(tmp_path / "deep" / "mine.json") == tmp_path / "deep" / "mine.json"
    (row,) = model_table([str(tmp_path / "deep" / "mine.json")]).rows
    assert (row.model, row.tokens, row.values["PIQA"]) == ("my gpt2", "3M", 100 * result.tasks[0].acc)
    with pytest.raises(UserError, match=r"mine.json: already exists: choose another file or pass overwrite=True"):
        result.save(tmp_path / "deep" / "mine.json")
    result.save(tmp_path / "deep" / "mine.json", overwrite=True)


T5_SIZES = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}


def t5() -> Any:
    return T5(T5Config(vocab_size=257, decoder_start_token_id=0, **T5_SIZES))


def body() -> Any:
    return AutoModel.from_config(LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, **SIZES))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: 3, "model: cannot be int: give a path, the result of dwindle.load, or (model"),
        (lambda: None, "model: cannot be NoneType"),
        (lambda: stranger("gpt2"), "model: GPT2LMHeadModel has no tokenizer: pass (model, tokenizer)"),
        (lambda: (stranger("gpt2"), None), "tokenizer: the model has none: pass (model, tokenizer)"),
        (lambda: (stranger("gpt2"), "gpt2"), "tokenizer: cannot be str: give a transformers tokenizer"),
        (lambda: (stranger("gpt2"), tiny_tokenizer(), 1), "model: cannot be tuple"),
        (lambda: (tiny_tokenizer(), stranger("gpt2")), "give a transformers causal language model"),
        (lambda: (torch.nn.Linear(2, 2), tiny_tokenizer()), "model: cannot be Linear"),
        (lambda: (t5(), tiny_tokenizer()), "is an encoder-decoder"),
        (lambda: (body(), tiny_tokenizer()), "model: LlamaModel returns no logits: give a causal language model"),
        (lambda: (tiny_model(), tiny_tokenizer()), "the embedding 61 rows: use the model's own tokenizer"),
    ],
)
def test_wrong_things_are_refused(place: Path, given: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        dwindle.evaluate(given(), ["piqa"], data=[str(place / "sets")])
    assert message in str(error.value)


def test_a_model_in_memory_stays_where_it_is(place: Path) -> None:
    pair = (stranger("gpt2"), tiny_tokenizer())
    for option in ({"device": "cpu"}, {"dtype": "float64"}):
        with pytest.raises(UserError, match="device, dtype: not allowed for a model in memory"):
            dwindle.evaluate(pair, ["piqa"], data=[str(place / "sets")], **option)  # type: ignore[arg-type]
