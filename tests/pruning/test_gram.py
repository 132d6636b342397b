"""The update is the least-squares optimum, downdates equal blocks, and singular Grams do no harm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dwindle.pruning.gram import (
    Gram,
    Regression,
    Sample,
    accumulate_gram,
    cholesky,
    damping_for,
    finished,
    regression_from_gram,
    regression_from_inputs,
    removal_update,
    spread,
)
from studies.second_order import Downdate

COLUMNS = {"one column": [7], "a head": [4, 5, 6, 7], "two heads": [0, 1, 2, 3, 16, 17, 18, 19]}


def layer(num_tokens: int = 200, inputs: int = 24, outputs: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated inputs X [T, N] and weights W [O, N], in fp64."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    x = torch.randn(num_tokens, inputs, generator=generator, dtype=torch.float64) @ mixing
    return x, torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)


def split(columns: list[int], inputs: int = 24) -> tuple[Tensor, Tensor]:
    return torch.tensor(columns), torch.tensor([i for i in range(inputs) if i not in columns])


def error(x: Tensor, before: Tensor, after: Tensor) -> float:
    return float((x @ (before - after).T).square().sum())


def solved(regression: Regression) -> Tensor:
    return finished([regression])[0]


def without_columns(w: Tensor, removed: Tensor, kept: Tensor, a: Tensor | None) -> Tensor:
    after = w.clone()
    if a is not None:
        removal_update(after, removed, spread(a, kept, w.shape[1]))
    after[:, removed] = 0
    return after


@pytest.mark.parametrize("name", COLUMNS)
def test_the_update_is_the_least_squares_optimum(name: str) -> None:
    x, w = layer()
    removed, kept = split(COLUMNS[name])
    gram = accumulate_gram(torch.zeros(24, 24, dtype=torch.float64), x)
    after = without_columns(w, removed, kept, solved(regression_from_gram(gram, removed, kept, damping=0.0)))
    best = torch.zeros_like(w)
    best[:, kept] = torch.linalg.lstsq(x[:, kept], x @ w.T).solution.T
    assert error(x, w, after) == pytest.approx(error(x, w, best), rel=1e-8)
    assert torch.allclose(after, best, atol=1e-8)
    assert error(x, w, after) < error(x, w, without_columns(w, removed, kept, None))


def test_the_update_equals_the_formula_with_columns_of_the_inverse() -> None:
    """W_R −= W_P (Z_P)⁻¹ Z_Rᵀ with Z = columns P of (H + λI)⁻¹, as the design writes it."""
    x, w = layer()
    removed, kept = split(COLUMNS["a head"])
    gram = x.T @ x
    ridge = 0.01 * gram.diagonal().mean()
    z = torch.linalg.solve(gram + ridge * torch.eye(24, dtype=torch.float64), torch.eye(24, dtype=torch.float64))[
        :, removed
    ]
    expected = w[:, kept] - w[:, removed] @ torch.linalg.solve(z[removed], z[kept].T)
    after = without_columns(w, removed, kept, solved(regression_from_gram(gram, removed, kept, damping=0.01)))
    assert torch.allclose(after[:, kept], expected, atol=1e-10)


def test_one_after_the_other_equals_a_block() -> None:
    x, w = layer()
    gram = x.T @ x
    removed, kept = split([2, 9, 10, 11, 20])
    block = without_columns(w, removed, kept, solved(regression_from_gram(gram, removed, kept, damping=0.01)))
    downdate, stepwise = Downdate(gram, damping=0.01), w.clone()
    for columns in ([10], [2, 20], [9], [11]):
        downdate.remove(stepwise, torch.tensor(columns))
    assert torch.allclose(stepwise, block, atol=1e-8)


@pytest.mark.parametrize("num_tokens", [5, 12, 40])
def test_inputs_and_gram_give_the_same(num_tokens: int) -> None:
    x, _ = layer(num_tokens)
    removed, kept = split(COLUMNS["a head"])
    gram, sample = Gram(), Sample()
    for part in x.split(7):
        gram.add(part)
        sample.add(part)
    direct = solved(regression_from_inputs(x, removed, kept, damping=0.1))
    assert torch.allclose(solved(regression_from_gram(x.T @ x, removed, kept, damping=0.1)), direct, atol=1e-9)
    assert torch.allclose(
        solved(gram.regression(removed, kept, 0.01)), solved(sample.regression(removed, kept, 0.01)), atol=1e-9
    )
    assert torch.allclose(gram.mean_square(), sample.mean_square())
    alive = torch.cat([removed, kept]).sort().values[1:]
    h = (x.T @ x / num_tokens)[alive][:, alive]
    inverse = torch.linalg.inv(h + 0.01 * h.diagonal().mean() * torch.eye(23, dtype=torch.float64)).diagonal()
    assert torch.allclose(gram.inverse_diagonal(alive, 0.01), inverse, rtol=1e-6)
    assert torch.allclose(sample.inverse_diagonal(alive, 0.01), inverse, rtol=1e-6)


def singular(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, w = layer(num_tokens=6 if kind == "fewer tokens than inputs" else 100, seed=3)
    if kind == "zero inputs":
        x[:, ::2] = 0
    if kind == "equal inputs":
        x[:, 12:] = x[:, :12]
    if kind == "no inputs at all":
        x[:] = 0
    if kind == "huge and tiny":
        x *= 10.0 ** torch.linspace(-9, 9, 24, dtype=torch.float64)
    return x.to(dtype), w.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize(
    "kind", ["fewer tokens than inputs", "zero inputs", "equal inputs", "no inputs at all", "huge and tiny"]
)
def test_singular_grams_do_no_harm(kind: str, damping: float, dtype: torch.dtype) -> None:
    if kind == "huge and tiny" and not damping:
        damping = 1e-6  # eighteen orders of magnitude need some damping, which pruning always has
    x, w = singular(kind, dtype)
    for columns in COLUMNS.values():
        removed, kept = split(columns)
        without = error(x, w, without_columns(w, removed, kept, None))
        ways = {
            "gram": solved(regression_from_gram(x.T @ x, removed, kept, damping)),
            "inputs": solved(regression_from_inputs(x, removed, kept, damping)),
            "as pruning calls it": solved(Sample([x]).regression(removed, kept, damping)),
        }
        for way, a in ways.items():
            assert a.isfinite().all(), way
            slack = 1e-3 if dtype == torch.float32 else 1e-7
            assert error(x, w, without_columns(w, removed, kept, a)) <= without * (1 + slack), way
        alive = torch.arange(24)
        for seen in (Sample([x]), Gram(x.T @ x, len(x))):
            assert (1 / seen.inverse_diagonal(alive, 0.01)).isfinite().all()  # the score that obc makes of it


def test_fp64_helps_when_fp32_cannot_factorise() -> None:
    x, w = layer(400, seed=5)
    x[:, 23] = x[:, 22] + 1e-5 * x[:, 23]
    gram = (x.T @ x).float()
    assert not cholesky(gram * 0 - torch.eye(24), torch.tensor(0.0))[1]
    removed, kept = split([0])
    a = solved(regression_from_gram(gram, removed, kept, damping=0.0))
    assert a.isfinite().all()
    without = error(x, w, without_columns(w, removed, kept, None))
    assert error(x, w, without_columns(w, removed, kept, a.double())) <= without * 1.001


def test_few_tokens_do_no_harm_on_other_text() -> None:
    """1 % damping alone fits the noise of few tokens; the damping that grows with inputs over tokens does not."""
    inputs, tokens = 64, 80
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64) / 8
    mixing += 2 * torch.eye(inputs, dtype=torch.float64)

    def draw(count: int) -> Tensor:
        return torch.randn(count, inputs, generator=generator, dtype=torch.float64) @ mixing

    seen, unseen = draw(tokens), draw(4000)
    w = torch.randn(16, inputs, generator=generator, dtype=torch.float64)
    naive, ours = [], []
    for column in range(16):
        removed, kept = split([column], inputs)
        without = error(unseen, w, without_columns(w, removed, kept, None))
        plain = solved(regression_from_gram(seen.T @ seen, removed, kept, damping=0.01))
        naive.append(error(unseen, w, without_columns(w, removed, kept, plain)) / without)
        damped = solved(Sample([seen]).regression(removed, kept, 0.01))
        ours.append(error(unseen, w, without_columns(w, removed, kept, damped)) / without)
    assert sum(naive) / 16 > 1.0 > sum(ours) / 16
    assert damping_for(0.01, inputs, 10**9) == pytest.approx(0.01, rel=1e-4)
