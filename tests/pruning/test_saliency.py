"""Scores equal brute-force loops, and mean something on a trained model."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dwindle.anatomy.structure import Group
from dwindle.core.errors import UserError
from dwindle.pruning import calibration
from dwindle.pruning.calibration import calibrate
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.metrics import METRICS, metric_named
from dwindle.pruning.saliency import ElementScores, Scores, score_model
from dwindle.pruning.surgery import Prunable
from tiny import random_group, tiny_model, tokens


def by_hand(prunable: Prunable, windows: torch.Tensor, name: str) -> tuple[Any, Any, Any]:
    """Element by element in plain Python, from one backward pass per example over all parameters."""
    model, anatomy = prunable.model, prunable.anatomy
    weights = {n: p for n, p in model.named_parameters() if n.endswith(("o_proj.weight", "down_proj.weight"))}
    per_example = []
    for window in windows:
        model.zero_grad()
        model(input_ids=window[None], labels=window[None]).loss.backward()
        per_example.append({n: p.grad.clone() for n, p in weights.items() if p.grad is not None})
    model.zero_grad()
    attn = [[0.0] * len(la.query_heads) for la in prunable.physical.layers]
    ffn = [[0.0] * len(la.ffn) for la in prunable.physical.layers]
    stem = [0.0] * len(prunable.physical.hidden)
    for n, weight in weights.items():
        layer = int(n.split(".")[2])
        for row in range(weight.shape[0]):
            for column in range(weight.shape[1]):
                w = weight[row, column].item()
                grads = [example[n][row, column].item() for example in per_example]
                g, f = sum(grads) / len(grads), sum(x * x for x in grads) / len(grads)
                score = {"taylor": abs(w * g - 0.5 * w * w * f), "taylor1": abs(w * g), "magnitude": w * w}[name]
                stem[row] += score
                if n.endswith("o_proj.weight"):
                    attn[layer][column // anatomy.head_dim] += score
                else:
                    ffn[layer][column] += score
    return attn, ffn, stem


@pytest.mark.parametrize("name", ["taylor", "taylor1", "magnitude"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_scores_equal_a_loop(family: str, name: str) -> None:
    prunable = Prunable(tiny_model(family, intermediate_size=12, num_hidden_layers=2))
    windows = tokens(3, 9, seed=4)
    metric = metric_named(name)
    found = calibrate(prunable, windows, metric, PruneConfig())
    scores = score_model(prunable, found.gradients, found.fishers, metric)
    attn, ffn, stem = by_hand(prunable, windows, name)
    for ours, theirs in ((scores.attn, attn), (scores.ffn, ffn), ([scores.stem], [stem])):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.tolist() == pytest.approx(other, rel=1e-6)  # transformers computes the loss in float32
    frozen = ElementScores(prunable, found.gradients, found.fishers, metric).current
    assert torch.allclose(frozen.stem, scores.stem, rtol=1e-12)


@pytest.mark.parametrize("every_matrix", [False, True])
@pytest.mark.parametrize("name", ["taylor", "obd"])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2"])
def test_gradients_of_single_examples_from_passes_over_several(
    family: str, name: str, every_matrix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to autograd's, one example at a time; of a pruned query head they are zero."""
    prunable = Prunable(tiny_model(family))
    prunable.prune(Group("attn", ((0,), (5,), (0,))))
    windows, model = tokens(5, 9, seed=4), prunable.model
    wanted = {row.name for row in prunable.anatomy.rows if row.layer is not None and len(row.axes) == 2}
    if not every_matrix:
        wanted = {row.name for _, row in prunable.outputs}
    means: dict[str, torch.Tensor] = {}
    squares: dict[str, torch.Tensor] = {}
    for window in windows:
        model.zero_grad()
        model(input_ids=window[None], labels=window[None]).loss.backward()
        prunable.mask_gradients()
        for key in wanted:
            gradient = prunable.parameters[key].grad
            assert gradient is not None
            means[key] = means.get(key, 0) + gradient / len(windows)
            squares[key] = squares.get(key, 0) + gradient.square() / len(windows)
    model.zero_grad()
    monkeypatch.setattr(calibration, "_SHARING", {"cpu"})
    monkeypatch.setitem(calibration._PASS_TOKENS, "cpu", 2 * 9)
    monkeypatch.setattr(calibration, "_EXAMPLE_ELEMENTS", 1)
    passes: list[int] = []
    handle = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = calibrate(prunable, windows, metric_named(name), PruneConfig(), names=wanted if every_matrix else None)
    handle.remove()
    assert passes == [2, 2, 1] and found.fishers.keys() == wanted
    assert found.loss == pytest.approx(model(input_ids=windows, labels=windows).loss.item())
    for key in wanted:
        torch.testing.assert_close(found.fishers[key], squares[key], rtol=1e-6, atol=1e-18)  # the loss is in float32
        if name == "taylor":
            torch.testing.assert_close(found.gradients[key], means[key], rtol=1e-6, atol=1e-10)


def test_a_gpu_passes_as_many_windows_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One window holds 3 MB; there are 90 MB free and 10 MB in the allocator's cache, half of which may be used."""
    found = {"mem_get_info": (90, 200), "memory_reserved": 30, "memory_allocated": 20}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert calibration._fitting(torch.device("cuda"), 3) == 100 // 12
    assert calibration._fitting(torch.device("cuda"), 300) == 1


def test_gradients_of_other_things_than_matrices_take_a_pass_for_each_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo 2 has norms behind blocks, whose gains are scored with whole blocks."""
    monkeypatch.setattr(calibration, "_SHARING", {"cpu"})
    model, passes = tiny_model("olmo2"), list[int]()
    prunable = Prunable(model)
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    config = PruneConfig(metric="group", groups=["ffn", "layer"])
    assert calibrate(prunable, tokens(3, 9), metric_named("group"), config).groups is not None
    assert passes == [1, 1, 1]


def test_grouped_query_scores_are_those_of_the_removed_queries() -> None:
    """Only the columns of query head 5 in layer 1 carry weight: it scores, its key/value neighbour does not."""
    prunable = Prunable(tiny_model("llama"))
    with torch.no_grad():
        for layer in range(3):
            weight = prunable.model.get_parameter(f"model.layers.{layer}.self_attn.o_proj.weight")
            keep = weight[:, 5 * 4 : 6 * 4].clone()
            weight.zero_()
            if layer == 1:
                weight[:, 5 * 4 : 6 * 4] = keep
    scores = score_model(prunable, {}, {}, metric_named("magnitude"))
    assert [head for head in range(8) if scores.attn[1][head] > 0] == [5]
    prunable.prune(Group("attn", ((0,), (5,), (0,))))
    assert prunable.model.get_parameter("model.layers.1.self_attn.o_proj.weight").count_nonzero() == 0
    rows = prunable.model.get_parameter("model.layers.1.self_attn.q_proj.weight")
    assert rows[20:24].count_nonzero() == 0 and rows[16:20].count_nonzero() > 0
    assert prunable.model.get_parameter("model.layers.1.self_attn.k_proj.weight").count_nonzero() > 0


@pytest.mark.parametrize("name", [name for name in METRICS if name != "group"])  # not a sum of element scores
def test_frozen_scores_after_removal_equal_new_sums(name: str) -> None:
    """Updating the sums as groups are removed equals summing the element scores of the remaining groups."""
    windows = tokens(3, 9, seed=4)
    kept, removed = Prunable(tiny_model("llama")), Prunable(tiny_model("llama"))
    metric = metric_named(name, seed=1)
    found = calibrate(kept, windows, metric, PruneConfig())
    frozen = ElementScores(kept, found.gradients, found.fishers, metric)
    for seed, kind in enumerate(["attn", "ffn", "stem", "ffn", "stem"]):
        group = random_group(kind, removed.alive, seed)
        frozen.remove(group)
        removed.prune(group)
    # The weights of ``removed`` are those of ``kept`` with the groups zeroed; the gradients are the old ones.
    fresh = score_model(removed, found.gradients, found.fishers, metric_named(name, seed=1))
    assert_equal_scores(frozen.current, fresh)


def assert_equal_scores(a: Scores, b: Scores) -> None:
    for mine, other in zip([*a.attn, *a.ffn, a.stem], [*b.attn, *b.ffn, b.stem], strict=True):
        assert torch.equal(mine.isinf(), other.isinf())
        assert torch.allclose(mine, other, rtol=1e-9, atol=1e-15)


def test_calibration_leaves_the_model_as_it_was() -> None:
    prunable = Prunable(tiny_model("llama"))
    calibrate(prunable, tokens(2, 8), metric_named("taylor"), PruneConfig())
    assert all(p.requires_grad and p.grad is None for p in prunable.model.parameters())


def test_unknown_metric_is_named() -> None:
    with pytest.raises(UserError, match="'wonder' is unknown: choose one of taylor"):
        metric_named("wonder")


class Trained:
    """A byte-level Llama trained for a few hundred steps on the prose that every Python carries."""

    def __init__(self, seed: int) -> None:
        self.text = torch.tensor([min(byte, 127) for byte in "\n".join(topics.values()).encode()])
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
        config = AutoConfig.for_model("llama", tie_word_embeddings=True, **sizes, **heads)
        self.model = AutoModelForCausalLM.from_config(config)
        steps, rate = 200, 3e-3
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        for step in range(steps):
            batch = self.windows(8)
            optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
            optimizer.zero_grad()
            self.model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()

    def windows(self, count: int, length: int = 32) -> torch.Tensor:
        starts = torch.randint(len(self.text) - length, (count,), generator=self.generator)
        return torch.stack([self.text[start : start + length] for start in starts.tolist()])


def rank_correlation(a: list[float], b: list[float]) -> float:
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def correlations(seed: int) -> dict[str, float]:
    """Between a group's score and what really removing it does to the loss: mean of heads and of some channels."""
    trained = Trained(seed)
    windows = trained.windows(24)
    prunable = Prunable(trained.model)
    heads = [("attn", layer, head) for layer in range(2) for head in range(8)]
    sample = torch.randperm(128, generator=trained.generator)[:16].tolist()
    groups = [*heads, *(("ffn", layer, channel) for layer in range(2) for channel in sample)]

    @torch.no_grad()
    def loss() -> float:
        return float(trained.model(input_ids=windows, labels=windows).loss)

    increases, base = [], loss()
    for kind, layer, index in groups:
        weight = trained.model.get_parameter(prunable.anatomy.output_row(layer, kind).name)
        width = 8 if kind == "attn" else 1
        with torch.no_grad():
            columns = weight[:, index * width : (index + 1) * width]
            before = columns.clone()
            columns.zero_()
            increases.append(loss() - base)
            columns.copy_(before)
    result = {}
    for name in ("taylor", "magnitude", "random"):
        metric = metric_named(name, seed)
        found = calibrate(prunable, windows, metric, PruneConfig())
        scores = score_model(prunable, found.gradients, found.fishers, metric)
        values = [float((scores.attn if kind == "attn" else scores.ffn)[layer][i]) for kind, layer, i in groups]
        kinds = (slice(len(heads)), slice(len(heads), None))
        result[name] = sum(rank_correlation(values[kind], increases[kind]) for kind in kinds) / len(kinds)
    return result


@pytest.mark.slow
def test_taylor_predicts_the_damage_of_removal() -> None:
    found = [correlations(seed) for seed in range(3)]
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    print(f"rank correlation with the real loss increase, mean of 3 seeds: {mean}")
    assert mean["taylor"] > 0.45
    assert mean["taylor"] > mean["magnitude"] and mean["taylor"] > mean["random"] + 0.4
