"""How many compiled graphs stay: enough for every layer of a model, however the ones before it differed."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from dwindle.anatomy.modeling_dwindle import classes_for
from dwindle.training import compiling


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiling.torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiling.forget_graphs()
    torch._dynamo.utils.counters.clear()
    yield
    compiling.forget_graphs()


def model_of(width: int, groups: list[list[int]]) -> torch.nn.Module:
    config_class, model_class = classes_for("dwindle_llama")
    config = config_class(
        hidden_size=8,
        intermediate_size=width,
        num_attention_heads=sum(groups[0]),
        num_key_value_heads=len(groups[0]),
        head_dim=2,
        num_hidden_layers=len(groups),
        vocab_size=16,
        layer_shapes=[{"intermediate_size": width, "queries_per_kv": group} for group in groups],
    )
    model: torch.nn.Module = model_class(config)
    compiling.compile_blocks(model)
    return model


def use(model: torch.nn.Module) -> int:
    """Train on two sizes of batches and measure; the number of graphs so far."""
    for batch in (3, 1):
        model(input_ids=torch.zeros(batch, 4, dtype=torch.long), use_cache=False).logits.sum().backward()
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 4, dtype=torch.long), use_cache=False)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_layers_of_one_shape_and_many_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 3 layers needs graphs of its own, again at every width: the limit of dynamo must not be reached.

    Dynamo's limits on the graphs of one function and of all (8 and 256) and ours are lowered: few layers are enough.
    """
    monkeypatch.setattr(compiling, "_MOST_LAYERS", 3)
    groups = [[1, 1, 6], [1, 2, 5], [2, 2, 4]]
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=16):
        assert [use(model_of(width, groups)) for width in (16, 14)] == [9, 18]


def test_graphs_of_an_earlier_model_are_used_again() -> None:
    teacher = model_of(16, [[2, 2]] * 3)
    first = use(teacher)
    second = use(model_of(12, [[2, 2]] * 3))
    assert use(teacher) == second == 2 * first == 6
    assert use(model_of(16, [[2, 2]] * 3)) == second


def test_after_too_many_kinds_the_graphs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_MOST_LAYERS", 3)
    widths = (16, 14, 12, 10)
    models = [model_of(width, [[2, 2]] * 2) for width in widths]
    assert len(compiling._compiled) == 1
    assert use(models[-1]) == 3
