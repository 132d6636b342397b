"""How many graphs are compiled: at most three for layers of any sizes, and none twice."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dwindle.anatomy.modeling_dwindle import classes_for
from dwindle.training import compiling

Shape = tuple[int, list[int], list[str]]
"""FFN channels, query heads of each key/value head, absent blocks."""

NO_ATTENTION, NO_FFN = ["self_attn", "input_layernorm"], ["mlp", "post_attention_layernorm"]
STRUCTURES: dict[str, list[Shape]] = {
    "ffn": [(40, [2, 2], []), (24, [2, 2], []), (33, [2, 2], [])],
    "absent blocks": [(40, [2, 2], []), (24, [2, 2], NO_ATTENTION), (0, [2, 2], NO_FFN), (33, [2, 2], [])],
    "heads": [(40, [2, 2], []), (24, [3, 3], []), (33, [2, 2, 2], [])],
    "uneven groups": [(40, [1, 2], []), (24, [2, 2, 1], []), (24, [3, 1], [])],
}
KINDS = {"ffn": 1, "absent blocks": 3, "heads": 1, "uneven groups": 1}


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiling.torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiling.forget_graphs()
    torch._dynamo.utils.counters.clear()
    yield
    compiling.forget_graphs()


def model_of(shapes: Sequence[Shape], *, compiled: bool = True) -> torch.nn.Module:
    config_class, model_class = classes_for("dwindle_llama")
    torch.manual_seed(0)
    config = config_class(
        hidden_size=8,
        intermediate_size=max(width for width, _, _ in shapes),
        num_attention_heads=sum(shapes[0][1]),
        num_key_value_heads=len(shapes[0][1]),
        head_dim=4,
        num_hidden_layers=len(shapes),
        vocab_size=16,
        layer_shapes=[{"intermediate_size": n, "queries_per_kv": heads, "skip": skip} for n, heads, skip in shapes],
    )
    model: torch.nn.Module = model_class(config)
    if compiled:
        compiling.compile_blocks(model)
    return model


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def ids(batch: int) -> torch.Tensor:
    return torch.randint(0, 16, (batch, 4), generator=torch.Generator().manual_seed(batch))


def train(model: torch.nn.Module, *batches: int) -> int:
    """The number of graphs after passes over micro-batches of these sizes."""
    for batch in batches:
        model(input_ids=ids(batch), use_cache=False).logits.square().sum().backward()
    return graphs()


def use(model: torch.nn.Module) -> int:
    """Train on micro-batches of two sizes, and validate on others; the number of graphs so far."""
    train(model, 3, 2)
    with torch.no_grad():
        for batch in (5, 2):
            model(input_ids=ids(batch), use_cache=False)
    return graphs()


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_graph_for_each_kind_of_layer_and_the_same_numbers(name: str) -> None:
    ours, plain = model_of(STRUCTURES[name]), model_of(STRUCTURES[name], compiled=False)
    assert train(ours, 3) == len(compiling._compiled) == KINDS[name]
    train(plain, 3)
    for (parameter, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None, parameter
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ffn", "absent blocks"])
def test_at_most_three_graphs_with_validation(name: str) -> None:
    """Of one kind of layer: two sizes of micro-batches, and validation. Of more, only training is compiled."""
    ours, plain = model_of(STRUCTURES[name]), model_of(STRUCTURES[name], compiled=False)
    assert use(ours) == compiling.MAX_GRAPHS
    with torch.no_grad():
        found, expected = (model(input_ids=ids(5), use_cache=False).logits for model in (ours, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert graphs() == compiling.MAX_GRAPHS


@pytest.mark.parametrize("name", ["heads", "uneven groups"])
def test_validation_of_symbolic_heads_is_not_compiled_but_a_teacher_is(name: str) -> None:
    ours, plain = model_of(STRUCTURES[name]), model_of(STRUCTURES[name], compiled=False)
    assert use(ours) == 2, "two sizes of micro-batches"
    teacher = model_of(STRUCTURES[name]).requires_grad_(False)
    with torch.no_grad():
        for batch in (5, 3):
            expected = plain(input_ids=ids(batch), use_cache=False).logits
            for model in (ours, teacher):
                found = model(input_ids=ids(batch), use_cache=False).logits
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert graphs() == 3, "and the teacher's"


def test_layers_of_rare_kinds_are_not_compiled() -> None:
    """Five kinds: several and uneven query heads per key/value head, a single one of both, no attention."""
    common: Shape = (40, [2, 2], [])
    rare: list[Shape] = [(24, [1, 2], []), (24, [2], []), (24, [1], []), (24, [2, 2], NO_ATTENTION)]
    layers: Any = model_of([*rare, common, common]).model.layers
    blocks = [layer.forward if isinstance(layer.forward, compiling._Block) else None for layer in layers]
    assert [bool(block and block._chosen[False]) for block in blocks] == [True, True, False, False, True, True]
    assert [bool(block and block._chosen[True]) for block in blocks] == [True, True, True, False, True, True]


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of a pass over a masked batch, in fp64."""
    model.double()(input_ids=ids(2), attention_mask=MASK, use_cache=False).logits.square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[2, 2], [3, 3], [4, 4], [5, 5, 5]], 1),
        ([[1, 1], [2, 2], [3, 1], [1, 2, 2], [3, 3, 3]], 1),
        ([[1, 1], [2, 2], [3, 1], [2], [3], [1, 1, 1]], 2),
        ([[2, 2], [2, 2, 2]], 1),
    ],
    ids=["regular", "and irregular", "and a single key/value head", "of equal size"],
)
def test_with_a_mask_all_groups_of_heads_are_one_kind(groups: list[list[int]], expected: int) -> None:
    shapes: list[Shape] = [(24, own, []) for own in groups]
    ours, plain = model_of(shapes), model_of(shapes, compiled=False)
    found, wanted = gradients(ours), gradients(plain)
    assert graphs() == expected
    assert found.keys() == wanted.keys()
    for name, mine in found.items():
        torch.testing.assert_close(mine, wanted[name], rtol=1e-12, atol=1e-12)
    layers: Any = ours.model.layers
    assert all(isinstance(layer.forward, compiling._Block) for layer in layers)


def test_with_a_mask_layers_without_attention_are_a_kind_of_their_own() -> None:
    shapes: list[Shape] = [(24, [2, 2], []), (32, [3, 3], NO_ATTENTION), (24, [2, 1], [])]
    ours, plain = model_of(shapes), model_of(shapes, compiled=False)
    found, wanted = gradients(ours), gradients(plain)
    assert graphs() == 2
    for name, mine in found.items():
        torch.testing.assert_close(mine, wanted[name], rtol=1e-12, atol=1e-12)
    assert compiling._per_kv(torch.nn.Module()) is None, "a convolution"


def test_after_a_masked_pass_the_layers_are_what_they_were() -> None:
    """What was shown to the graph is gone: without compiling, the model computes as before."""
    shapes: list[Shape] = [(24, own, []) for own in ([2, 2], [3, 3], [2, 1])]
    ours, plain = model_of(shapes), model_of(shapes, compiled=False)
    gradients(ours)
    layers: Any = ours.model.layers
    for layer in layers:
        layer.forward = layer.forward._plain
    found, wanted = (model.double().generate(ids(2), max_new_tokens=3, do_sample=False) for model in (ours, plain))
    assert torch.equal(found, wanted)


def test_one_query_head_per_key_value_head_is_of_the_kind_of_irregular_groups() -> None:
    shapes: list[Shape] = [(24, own, []) for own in ([1, 1], [2, 1], [1, 1, 1], [2, 2])]
    ours, plain = model_of(shapes), model_of(shapes, compiled=False)
    assert train(ours, 3) == 2
    train(plain, 3)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_graphs_of_an_earlier_model_are_used_again() -> None:
    equal: list[Shape] = [(16, [2, 2], [])] * 3
    teacher = model_of(equal)
    first = use(teacher)
    second = use(model_of([(12, [2, 2], [])] * 3))
    assert use(teacher) == second == 2 * first == 6
    assert use(model_of(equal)) == second


def test_graphs_of_symbolic_sizes_are_made_again() -> None:
    """They are optimised for the sizes that came first, which a resumed run does not know."""
    for number in (1, 2):
        shapes: list[Shape] = [(width * number, [2, 2], []) for width in (16, 24)]
        assert use(model_of(shapes)) == 3 * number


def test_after_too_many_kinds_the_graphs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_MOST_KINDS", 3)
    models = [model_of([(width, [2, 2], [])] * 2) for width in (16, 14, 12, 10)]
    assert len(compiling._compiled) == 1
    assert use(models[-1]) == 3
