"""Muon: equal to torch.optim.Muon, exact under pruning, part by part for fused projections."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dwindle.training.muon import ALIVE_SIZES, MOMENTUM, Muon, orthogonalise

torch_muon = pytest.importorskip("torch.optim._muon")


def matrices(*shapes: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def make(parameters: list[nn.Parameter], **options: object) -> Muon:
    group = {"params": parameters, "muon": True, "weight_decay": 0.1}
    return Muon([group], parts=options.pop("parts", {}), lr=1e-2, **options)  # type: ignore[arg-type]


def plain_newton_schulz(matrix: Tensor) -> Tensor:
    """The iteration as the papers write it, one matrix, transposed where tall."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_batches_of_equal_shapes_give_what_single_matrices_give() -> None:
    every = [p.detach() for p in matrices((4, 6), (6, 4), (4, 6), (5, 5), (6, 4), dtype=torch.float64)]
    for batched, matrix in zip(orthogonalise(every), every, strict=True):
        torch.testing.assert_close(batched, plain_newton_schulz(matrix), rtol=1e-12, atol=1e-12)


def test_singular_values_come_near_one() -> None:
    [found] = orthogonalise([matrices((16, 40), dtype=torch.float64)[0].detach()])
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.5 and float(values.max()) < 1.4


def test_equal_to_the_optimizer_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own iteration is in bf16; with ours in its place everything around it must agree."""

    def in_full_precision(grad: Tensor, *_: object) -> Tensor:
        return plain_newton_schulz(grad)

    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", in_full_precision)
    ours, theirs = matrices((8, 12), (12, 8)), matrices((8, 12), (12, 8))
    mine = make(ours)
    reference = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for parameters, optimizer in ((ours, mine), (theirs, reference)):
            gradients(parameters, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_bounded_batches_change_nothing(monkeypatch: pytest.MonkeyPatch, moments: str) -> None:
    """Updates of all matrices at once, of a few, and of one after the other, also where their order is another."""
    shapes = [(6, 10), (8, 8), (10, 6), (12, 5), (8, 8), (6, 10), (8, 8)]
    found = []
    for most in (10**6, 128, 1):
        monkeypatch.setattr("dwindle.training.moments.MOST_ELEMENTS", most)
        monkeypatch.setattr("dwindle.training.muon.MOST_ELEMENTS", most)
        parameters = matrices(*shapes, dtype=torch.float64)
        optimizer = make(parameters, parts={parameters[3]: [7, 5]}, moments=moments)
        for step in range(4):
            gradients(parameters, step)
            optimizer.step()
        found.append([*parameters, *(optimizer.state[p][MOMENTUM] for p in parameters)])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_other_groups_are_plain_adamw() -> None:
    ours, theirs = matrices((8, 12), (3, 4)), matrices((8, 12), (3, 4))
    mine = Muon([{"params": ours[:1], "muon": True}, {"params": ours[1:], "weight_decay": 0.0}], parts={}, lr=1e-2)
    reference = torch.optim.AdamW(theirs[1:], lr=1e-2, weight_decay=0.0)
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        mine.step()
        reference.step()
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)
    assert set(mine.state[ours[0]]) == {MOMENTUM, ALIVE_SIZES}


def test_pruned_rows_and_columns_change_nothing() -> None:
    """A masked matrix with its alive size trains as the smaller matrix does."""
    [full] = matrices((10, 14), dtype=torch.float64)
    rows, columns = torch.tensor([0, 2, 3, 5, 6, 9]), torch.tensor([1, 2, 4, 5, 6, 7, 8, 11, 13])
    mask = torch.zeros_like(full)
    mask[rows[:, None], columns] = 1
    small = nn.Parameter(full.detach()[rows][:, columns].clone())
    with torch.no_grad():
        full.mul_(mask)
    big_optimizer, small_optimizer = make([full]), make([small])
    for step in range(6):
        gradients([full], step)
        full.grad.mul_(mask)  # type: ignore[union-attr]
        small.grad = full.grad[rows][:, columns].clone()  # type: ignore[index]
        big_optimizer.state[full].setdefault(MOMENTUM, torch.zeros_like(full))
        big_optimizer.state[full][ALIVE_SIZES] = torch.tensor([float(len(columns))])
        big_optimizer.step()
        small_optimizer.step()
        torch.testing.assert_close(full[rows][:, columns], small, rtol=1e-12, atol=1e-12)
        assert bool((full[mask == 0] == 0).all())


def test_fused_projections_are_orthogonalised_part_by_part() -> None:
    [fused] = matrices((12, 8), dtype=torch.float64)
    parts = [nn.Parameter(part.clone()) for part in fused.detach().split([6, 3, 3])]
    together = make([fused], parts={fused: [6, 3, 3]})
    apart = make(parts)
    for step in range(4):
        gradients([fused], step)
        for part, grad in zip(parts, fused.grad.split([6, 3, 3]), strict=True):  # type: ignore[union-attr]
            part.grad = grad.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(fused, torch.cat(list(parts)), rtol=1e-12, atol=1e-12)
