"""Scores of trees of choices equal one plain forward pass per choice, for every family and shape of model."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import config_for
from dwindle.anatomy.shrink import Float64Throughout
from dwindle.core.errors import UserError
from dwindle.evaluation.encoding import Pair
from dwindle.evaluation.scoring import Scorer, tree_row
from dwindle.pruning.surgery import Prunable
from tiny import FAMILIES, random_group, tiny_model, tokens

TOLERANCE = 1e-9


def brute_force(model: Any, pair: Pair, max_length: int = 128) -> float:
    context, continuation = pair
    whole = (context + continuation)[-(max_length + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(-1)
    places = range(len(whole) - 1 - len(continuation), len(whole) - 1)
    return sum(float(logits[at, token]) for at, token in zip(places, continuation, strict=True))


def text(length: int, seed: int) -> list[int]:
    return [int(token) for token in tokens(length, seed=seed)]


def questions() -> list[list[Pair]]:
    """One context for all, one-token answers, different contexts before one ending, equal and nested answers."""
    shared = text(9, 0)
    return [
        [(shared, text(n, n)) for n in (3, 1, 5, 2)],
        [(shared, [7]), (shared, [8])],
        [([*shared, 3, 4], [5, 6, 7]), ([*shared, 9], [5, 6, 7])],
        [(shared, [5, 6]), (shared, [5, 6]), (shared, [5, 6, 7]), (shared, [5])],
        [(text(4, 1), text(6, 2)), (text(3, 3), text(2, 4))],
        [([1], [2, 3]), ([1], [2, 4])],
    ]


def check(model: Any, max_length: int = 128, batch: int = 5, tolerance: float = TOLERANCE) -> None:
    found = Scorer(model, max_length=max_length, batch=batch).choices(questions())
    for pairs, scores in zip(questions(), found, strict=True):
        expected = [brute_force(model, pair, max_length) for pair in pairs]
        assert scores == pytest.approx(expected, abs=tolerance)


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_one_pass_per_choice(family: str) -> None:
    with Float64Throughout() if family == "granite_swa" else nullcontext():  # its sinks are float32, by their place
        check(tiny_model(family))


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_batches_change_nothing(batch: int) -> None:
    check(tiny_model("llama"), batch=batch)


def test_a_batch_is_read_when_the_next_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a GPU never waits for the host; every batch is read once."""
    steps: list[str] = []
    queue = Scorer._queue

    def queued(scorer: Scorer, rows: Any) -> torch.Tensor:
        steps.append("queue")
        return queue(scorer, rows)

    monkeypatch.setattr(Scorer, "_queue", queued)
    progress = SimpleNamespace(advance=lambda count: steps.append("read"))
    scorer = Scorer(tiny_model("llama"), max_length=128, batch=6)
    assert scorer.choices([], progress) == [] and not steps
    scorer.choices(questions(), progress)
    assert steps == ["queue", *["queue", "read"] * (len(steps) // 2 - 1), "read"] and len(steps) > 4


def test_too_long_requests_lose_their_beginning() -> None:
    check(tiny_model("llama"), max_length=8)


def test_cluster_and_masked_models() -> None:
    model = tiny_model("llama")
    anatomy = Anatomy.of_config(model.config)
    prunable = Prunable(model, anatomy, anatomy.source)
    for seed, kind in enumerate(("attn", "ffn", "attn", "stem", "attn")):
        prunable.prune(random_group(kind, prunable.alive, seed=seed))
    check(model)
    small = prunable.compacted()
    assert config_for(model.config, prunable.alive).model_type.startswith("dwindle_")
    check(small.eval())


def test_sliding_windows_are_kept() -> None:
    """Also where questions beyond the window and others, which share their beginning, would fit into one batch."""
    check(tiny_model("mistral", sliding_window=10), batch=100)
    check(tiny_model("mistral", sliding_window=6))
    check(tiny_model("mistral", sliding_window=64))


@pytest.mark.parametrize("switch", [9, 11, 13, 14])
def test_frequencies_follow_each_sequence(switch: int) -> None:
    """Phi's choice between short and long factors is made for a whole forward pass."""
    model = tiny_model("Phi-4-mini", original_max_position_embeddings=switch)
    model.config.rope_parameters["original_max_position_embeddings"] = switch
    check(model, batch=100)
    check(model, batch=2)
    check(model, max_length=10)


def test_eager_attention_and_unknown_families() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    check(model, tolerance=1e-5)  # its softmax is in fp32
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2)
    check(AutoModelForCausalLM.from_config(config).double().eval())


def test_beginnings_are_computed_once_and_equal_choices_tie() -> None:
    shared = text(50, 0)
    row = tree_row([(shared, text(5, n)) for n in range(1, 5)], 128)
    assert len(row.tokens) == 50 + 4 * 4
    pairs = [(shared, [5, 6, 7]), (shared, [5, 6, 7]), (shared, [5, 6, 8])]
    assert len(tree_row(pairs, 128).tokens) == 52
    first, second, _ = Scorer(tiny_model("llama", dtype=torch.float32), max_length=128).choices([pairs])[0]
    assert first == second


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama").train()
    state = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Scorer(model, max_length=128).choices(questions())
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("allowed", [True, False])
def test_no_cudnn_attention_while_scoring(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would build a plan for every batch; the setting is restored, after errors too."""
    cuda: Any = torch.backends.cuda
    seen: list[bool] = []
    model, before = tiny_model("llama"), cuda.cudnn_sdp_enabled()
    model.base_model.register_forward_pre_hook(lambda *_: seen.append(cuda.cudnn_sdp_enabled()))
    try:
        cuda.enable_cudnn_sdp(allowed)
        Scorer(model, max_length=128).choices(questions())
        assert seen and not any(seen) and cuda.cudnn_sdp_enabled() == allowed
        monkeypatch.setattr(model.base_model, "forward", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Scorer(model, max_length=128).choices(questions())
        assert cuda.cudnn_sdp_enabled() == allowed
    finally:
        cuda.enable_cudnn_sdp(before)


def test_windows_of_texts() -> None:
    model = tiny_model("llama")
    windows = [([1], text(n, n)) for n in (20, 3, 11)]
    found = [score for [score] in Scorer(model, max_length=128, batch=2).choices([[window] for window in windows])]
    assert found == pytest.approx([brute_force(model, window) for window in windows], abs=TOLERANCE)


@pytest.mark.parametrize("said", ["could not create a primitive", "something else"])
def test_a_type_without_kernels_is_one_message(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16).train()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(model.base_model, "forward", fail)
    kind, message = (UserError, r"^dtype bfloat16: .*: use float32$") if "primitive" in said else (RuntimeError, said)
    with pytest.raises(kind, match=message):
        Scorer(model, max_length=128).choices(questions())
    assert model.training
