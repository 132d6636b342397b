"""The update is the least-squares optimum, downdates equal blocks, and singular Grams do no harm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dwindle.pruning.gram import (
    Downdate,
    Gram,
    Sample,
    accumulate_gram,
    cholesky,
    damping_for,
    regression_from_gram,
    regression_from_inputs,
    removal_update,
    spread,
)

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


def removed(w: Tensor, gone: Tensor, kept: Tensor, a: Tensor | None) -> Tensor:
    after = w.clone()
    if a is not None:
        removal_update(after, gone, spread(a, kept, w.shape[1]))
    after[:, gone] = 0
    return after


@pytest.mark.parametrize("name", COLUMNS)
def test_the_update_is_the_least_squares_optimum(name: str) -> None:
    x, w = layer()
    gone, kept = split(COLUMNS[name])
    gram = accumulate_gram(torch.zeros(24, 24, dtype=torch.float64), x)
    after = removed(w, gone, kept, regression_from_gram(gram, gone, kept, damping=0.0).result())
    best = torch.zeros_like(w)
    best[:, kept] = torch.linalg.lstsq(x[:, kept], x @ w.T).solution.T
    assert error(x, w, after) == pytest.approx(error(x, w, best), rel=1e-8)
    assert torch.allclose(after, best, atol=1e-8)
    assert error(x, w, after) < error(x, w, removed(w, gone, kept, None))


def test_the_update_equals_the_formula_with_columns_of_the_inverse() -> None:
    """W_R −= W_P (Z_P)⁻¹ Z_Rᵀ with Z = columns P of (H + λI)⁻¹, as the design writes it."""
    x, w = layer()
    gone, kept = split(COLUMNS["a head"])
    gram = x.T @ x
    ridge = 0.01 * gram.diagonal().mean()
    z = torch.linalg.solve(gram + ridge * torch.eye(24, dtype=torch.float64), torch.eye(24, dtype=torch.float64))[
        :, gone
    ]
    expected = w[:, kept] - w[:, gone] @ torch.linalg.solve(z[gone], z[kept].T)
    after = removed(w, gone, kept, regression_from_gram(gram, gone, kept, damping=0.01).result())
    assert torch.allclose(after[:, kept], expected, atol=1e-10)


def test_one_after_the_other_equals_a_block() -> None:
    x, w = layer()
    gram = x.T @ x
    gone, kept = split([2, 9, 10, 11, 20])
    block = removed(w, gone, kept, regression_from_gram(gram, gone, kept, damping=0.01).result())
    downdate, stepwise = Downdate(gram, damping=0.01), w.clone()
    for columns in ([10], [2, 20], [9], [11]):
        downdate.remove(stepwise, torch.tensor(columns))
    assert torch.allclose(stepwise, block, atol=1e-8)


@pytest.mark.parametrize("num_tokens", [5, 12, 40])
def test_inputs_and_gram_give_the_same(num_tokens: int) -> None:
    x, _ = layer(num_tokens)
    gone, kept = split(COLUMNS["a head"])
    gram, sample = Gram(), Sample()
    for part in x.split(7):
        gram.add(part)
        sample.add(part)
    direct = regression_from_inputs(x, gone, kept, damping=0.1).result()
    assert torch.allclose(regression_from_gram(x.T @ x, gone, kept, damping=0.1).result(), direct, atol=1e-9)
    assert torch.allclose(
        gram.regression(gone, kept, 0.01).result(), sample.regression(gone, kept, 0.01).result(), atol=1e-9
    )
    assert torch.allclose(gram.mean_square(), sample.mean_square())
    living = torch.cat([gone, kept]).sort().values[1:]
    h = (x.T @ x / num_tokens)[living][:, living]
    inverse = torch.linalg.inv(h + 0.01 * h.diagonal().mean() * torch.eye(23, dtype=torch.float64)).diagonal()
    assert torch.allclose(gram.inverse_diagonal(living, 0.01), inverse, rtol=1e-6)
    assert torch.allclose(sample.inverse_diagonal(living, 0.01), inverse, rtol=1e-6)


def singular(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, w = layer(num_tokens=6 if kind == "fewer tokens than inputs" else 100, seed=3)
    if kind == "dead inputs":
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
    "kind", ["fewer tokens than inputs", "dead inputs", "equal inputs", "no inputs at all", "huge and tiny"]
)
def test_singular_grams_do_no_harm(kind: str, damping: float, dtype: torch.dtype) -> None:
    if kind == "huge and tiny" and not damping:
        damping = 1e-6  # eighteen orders of magnitude need some damping, which pruning always has
    x, w = singular(kind, dtype)
    for columns in COLUMNS.values():
        gone, kept = split(columns)
        without = error(x, w, removed(w, gone, kept, None))
        ways = {
            "gram": regression_from_gram(x.T @ x, gone, kept, damping).result(),
            "inputs": regression_from_inputs(x, gone, kept, damping).result(),
            "as pruning calls it": Sample([x]).regression(gone, kept, damping).result(),
        }
        for way, a in ways.items():
            assert a.isfinite().all(), way
            slack = 1e-3 if dtype == torch.float32 else 1e-7
            assert error(x, w, removed(w, gone, kept, a)) <= without * (1 + slack), way
        living = torch.arange(24)
        for seen in (Sample([x]), Gram(x.T @ x, len(x))):
            assert (1 / seen.inverse_diagonal(living, 0.01)).isfinite().all()  # the score that obc makes of it


def test_fp64_helps_when_fp32_cannot_factorise() -> None:
    x, w = layer(400, seed=5)
    x[:, 23] = x[:, 22] + 1e-5 * x[:, 23]
    gram = (x.T @ x).float()
    assert not cholesky(gram * 0 - torch.eye(24), torch.tensor(0.0))[1]
    gone, kept = split([0])
    a = regression_from_gram(gram, gone, kept, damping=0.0).result()
    assert a.isfinite().all()
    assert error(x, w, removed(w, gone, kept, a.double())) <= error(x, w, removed(w, gone, kept, None)) * 1.001


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
        gone, kept = split([column], inputs)
        without = error(unseen, w, removed(w, gone, kept, None))
        plain = regression_from_gram(seen.T @ seen, gone, kept, damping=0.01).result()
        naive.append(error(unseen, w, removed(w, gone, kept, plain)) / without)
        ours.append(
            error(unseen, w, removed(w, gone, kept, Sample([seen]).regression(gone, kept, 0.01).result())) / without
        )
    assert sum(naive) / 16 > 1.0 > sum(ours) / 16
    assert damping_for(0.01, inputs, 10**9) == pytest.approx(0.01, rel=1e-4)
