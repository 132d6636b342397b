"""An event is a handful of batched operations, and nothing in it waits for the device. (Counted, never timed.)"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from masked_steps import adamw, adamw_bf16, train
from torch.utils._python_dispatch import TorchDispatchMode

from dwindle.anatomy.structure import Group, Layer, Structure
from dwindle.distributed.async_copy import Fetched, sent
from dwindle.pruning import saliency
from dwindle.pruning.curvature import AdamFisher
from dwindle.pruning.gram import finished, regression_from_gram
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.saliency import Scores, begin_scores
from dwindle.pruning.second_order import InputStatistics, InputTaps, repair, taps_of
from dwindle.pruning.surgery import Prunable
from tiny import random_group, tiny_model, tokens

WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item"}
KINDS = ("attn", "ffn", "stem")


class Operations(TorchDispatchMode):
    """Counts calls by name; remembers the lists that were zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.zeroed: list[list[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.counts[name] += 1
        if name == "aten::_foreach_zero_":
            self.zeroed.append(list(args[0]))
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return sum(self.counts[name] for name in WAITS)


def trained(make: Any = adamw) -> tuple[Prunable, torch.optim.Optimizer]:
    prunable = Prunable(tiny_model("llama", num_hidden_layers=3))
    optimizer = make(prunable.model)
    train(prunable, optimizer, 2, seed=1)
    return prunable, optimizer


def gradients(prunable: Prunable) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in prunable.parameters.items()}


@pytest.mark.parametrize(("kind", "make"), [*((kind, adamw) for kind in KINDS), ("ffn", adamw_bf16)])
def test_rows_and_columns_are_zeroed_in_two_batches(kind: str, make: Any) -> None:
    """For each dtype."""
    prunable, optimizer = trained(make)
    group = random_group(kind, prunable.alive, 2)
    with Operations() as operations:
        prunable.prune(group, optimizer)
    lists = [batch for batch in operations.zeroed if batch[0].ndim]  # the widths of norms have no dimension
    count = 1 if make is adamw else 2
    assert len(lists) == 2 * count
    assert all(t.is_contiguous() for some in lists[:count] for t in some)
    assert not any(t.is_contiguous() for some in lists[count:] for t in some)
    assert operations.waits == 0
    for name, parameter in prunable.parameters.items():
        held = [parameter, *(optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))]
        for tensor in held:
            kept = prunable.anatomy.slice(prunable.anatomy[name], tensor, prunable.alive, prunable.physical)
            assert tensor.count_nonzero() == kept.count_nonzero(), name


def test_scores_do_not_wait_and_add_few_operations() -> None:
    prunable, _ = trained()
    found = gradients(prunable)
    with Operations() as operations:
        begin_scores(prunable, found, None, metric_named("taylor"))
    assert operations.waits == 0
    assert operations.counts["aten::sum"] == 2 * 2 * 3 + 2  # rows and columns of both projections, heads, the stem


def parts(scores: Scores) -> list[torch.Tensor]:
    return [*scores.attn, *scores.ffn, scores.stem]


def test_compiled_scores_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced into one graph, without making machine code of it."""
    torch.compiler.reset()
    compiled = torch.compile(saliency._sums, dynamic=True, backend="eager", fullgraph=True)
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return compiled(*args)

    monkeypatch.setattr(saliency, "_fused_sums", lambda: counted)
    prunable, _ = trained()
    found = gradients(prunable)
    for fishers in (None, {name: g.square() for name, g in found.items()}):
        plain = begin_scores(prunable, found, fishers, metric_named("taylor"))()
        fused = begin_scores(prunable, found, fishers, metric_named("taylor"), fused=True)()
        for ours, theirs in zip(parts(fused), parts(plain), strict=True):
            assert torch.equal(ours, theirs)
    assert len(calls) == 2 * 6
    drawn = begin_scores(prunable, found, None, metric_named("random", 4), fused=True)()  # draws are not compiled
    again = begin_scores(prunable, found, None, metric_named("random", 4))()
    assert all(torch.equal(a, b) for a, b in zip(parts(drawn), parts(again), strict=True)) and len(calls) == 12


def test_adams_second_moment_as_fisher() -> None:
    prunable, optimizer = trained()
    names = ["model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"]
    fisher = AdamFisher(optimizer, {name: prunable.parameters[name] for name in names})
    assert list(fisher) == names
    for name in names:
        state = optimizer.state[prunable.parameters[name]]
        beta = optimizer.param_groups[0]["betas"][1]
        expected = state["exp_avg_sq"] / (1 - beta ** float(state["step"]))
        assert torch.allclose(fisher[name], expected, rtol=1e-12)
    fresh = AdamFisher(adamw(prunable.model), {name: prunable.parameters[name] for name in names})
    assert not fresh  # before the first step there is only the gradient


@pytest.mark.parametrize("kind", KINDS)
def test_all_layers_are_repaired_before_anything_is_waited_for(kind: str) -> None:
    prunable, _ = trained()
    statistics = InputStatistics(40)
    taps = InputTaps(prunable.model, taps_of(prunable.anatomy), statistics.add)
    taps.open(40)
    with Operations() as watching, torch.no_grad():
        prunable.model(input_ids=tokens(4, 10))
    taps.remove()
    keep = prunable.alive.without(random_group(kind, prunable.alive, 1))
    with Operations() as operations:
        repair(prunable, keep, statistics, damping=0.01)
    assert watching.waits == operations.waits == 0
    factors = {"attn": 3, "ffn": 3, "stem": 7}[kind]  # one for each input that has readers, the head among them
    assert operations.counts["aten::linalg_cholesky_ex"] == factors


def test_only_what_fp32_cannot_factorise_is_done_again() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 12, generator=generator)
    good, bad = x.T @ x, x.T @ x - 200 * torch.eye(12)
    removed, kept = torch.tensor([3]), torch.tensor([i for i in range(12) if i != 3])
    regressions = [regression_from_gram(gram, removed, kept, 0.01) for gram in (good, bad, good)]
    with Operations() as operations:
        results = finished(regressions)
    assert operations.counts["aten::linalg_cholesky_ex"] == 1
    expected = torch.linalg.solve(
        good[kept][:, kept] + 0.01 * good.diagonal().mean() * torch.eye(11), good[kept][:, removed]
    )
    for result in (results[0], results[2]):
        assert torch.allclose(result, expected.T, atol=1e-5)
    assert torch.equal(results[1], torch.zeros(1, 11))  # no factor in fp64 either: no update


def test_containment_equals_that_of_sets() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        of = sorted(draw.sample(range(300), draw.randint(33, 120)))
        some = sorted(draw.sample(of, len(of) - draw.randint(0, 4)))
        if draw.random() < 0.5:
            some[draw.randrange(len(some))] = draw.randrange(300)
            some = sorted(set(some))
        whole, part = (Structure((0,), (Layer((0,), (0,), tuple(ffn)),)) for ffn in (of, some))
        assert whole.contains(part) == (set(some) <= set(of)), (of, some)


def test_neighbours_leave_as_one_span() -> None:
    anatomy = Prunable(tiny_model("llama", num_hidden_layers=2)).anatomy
    source = anatomy.source
    rest = source.without(Group("ffn", ((2, 3, 4, 9), ())))
    assert rest.layers[1] is source.layers[1]
    removed = anatomy.removed(source, rest, source)
    assert removed == {("ffn", 0): [2, 3, 4, 9]}
    assert list(anatomy.spans(anatomy["model.layers.0.mlp.down_proj.weight"], removed, source)) == [
        (1, 2, 3),
        (1, 9, 1),
    ]
    assert not list(anatomy.spans(anatomy["model.layers.1.mlp.down_proj.weight"], removed, source))


def test_small_tensors_there_and_back() -> None:
    there = sent([torch.arange(3), torch.arange(4).view(2, 2)], torch.device("cpu"))
    assert [Fetched(tensor).result().tolist() for tensor in there] == [[0, 1, 2], [[0, 1], [2, 3]]]
