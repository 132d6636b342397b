"""Float8 linear layers: the products, what stays zero, what stays stock; on a GPU also against bf16."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_run import RandomBatches, make_trainer, portable_bf16, tiny_llama
from torch import Tensor, nn

from dwindle.anatomy.structure import Group
from dwindle.core.errors import UserError
from dwindle.distributed.precision import autocast_for
from dwindle.pruning.surgery import Prunable
from dwindle.training import compiling
from dwindle.training.callbacks import Callback
from dwindle.training.config import TrainingConfig
from dwindle.training.float8 import Float8Linear, check_float8, use_float8
from dwindle.training.loop import Trainer
from dwindle.training.loss import evaluate_loss

CUDA = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_gpu = pytest.mark.skipif(not CUDA, reason="no GPU with float8")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
pytestmark = pytest.mark.usefixtures("one_thread")


def linear(device: str, *, inputs: int = 32, outputs: int = 48, bias: bool = True) -> Float8Linear:
    torch.manual_seed(1)
    module = nn.Linear(inputs, outputs, bias=bias, device=device)
    module.__class__ = Float8Linear
    return module  # type: ignore[return-value]


def passes(module: nn.Linear, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the gradient of the input and that of the weight."""
    x = x.clone().requires_grad_()
    module.weight.grad = None
    with portable_bf16():
        with autocast_for("fp8", x.device):
            y = module(x)
        y.backward(grad.to(y.dtype))
    assert y.dtype == torch.bfloat16 and x.grad is not None and module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    return y.detach(), x.grad, module.weight.grad


def draw(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Each value replaced by the nearest of the 256 numbers of the format, scaled to the largest magnitude of ``x``."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()] * (x.abs().max().item() / numbers[numbers.isfinite()].max())
    values = x.double().cpu()
    return numbers[(values.unsqueeze(-1) - numbers).abs().argmin(-1)]


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())


@pytest.mark.parametrize("device", DEVICES)
def test_products_are_those_of_the_nearest_float8_numbers(device: str) -> None:
    module = linear(device)
    x, grad = draw(device, 2, 16, 32), draw(device, 2, 16, 48)
    x[0, 0, 0] = grad[0, 0, 0] = 145 / 32  # the largest: so no other value lies halfway between two numbers
    x, grad = x.bfloat16(), grad.bfloat16() * 2.0**-20
    y, grad_x, grad_w = passes(module, x, grad)
    assert module.bias is not None and module.bias.grad is not None
    x8, w8 = (nearest(t.detach(), torch.float8_e4m3fn) for t in (x, module.weight))
    g8 = nearest(grad, torch.float8_e5m2)
    assert error(y, x8 @ w8.T + module.bias.detach().cpu()) < 4e-3, "bf16 rounds twice"
    assert error(grad_x, g8 @ w8) < 3e-3
    assert error(grad_w, g8.flatten(0, 1).T @ x8.flatten(0, 1)) < 1e-3
    assert error(module.bias.grad, grad.flatten(0, 1).double().sum(0)) < 1e-2
    exact = nn.functional.linear(x.float(), module.weight, module.bias)
    assert 0.01 < error(y, exact.detach()) < 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_zero_stays_zero(device: str) -> None:
    """Nothing at all, and pruned channels among others."""
    module = linear(device, bias=False)
    x, grad = draw(device, 16, 32), draw(device, 16, 48)
    y, grad_x, grad_w = passes(module, torch.zeros_like(x), grad)
    assert not y.any() and not grad_w.any() and grad_x.isfinite().all() and grad_x.any()
    assert not any(t.any() for t in passes(module, x, torch.zeros_like(grad))[1:])
    with torch.no_grad():
        module.weight[7], module.weight[:, 5] = 0.0, 0.0
    x[:, 5], grad[:, 7] = 0.0, 0.0
    y, grad_x, grad_w = passes(module, x, grad)
    assert not y[:, 7].any() and not grad_x[:, 5].any() and not grad_w[7].any() and not grad_w[:, 5].any()
    assert y[:, 8].any() and grad_x[:, 6].any() and grad_w[8].any()
    with torch.no_grad():
        module.weight.zero_()
    assert not any(t.any() for t in passes(module, x, grad)[:2])


def test_values_that_are_not_finite_are_not_hidden() -> None:
    """The loop must see and skip the step."""
    for bad in (float("inf"), float("nan")):
        x = draw("cpu", 16, 32)
        x[3, 4] = bad
        assert not passes(linear("cpu"), x, draw("cpu", 16, 48))[0].isfinite().any()


def test_odd_sizes_odd_numbers_of_tokens_and_evaluation_are_stock() -> None:
    model = tiny_llama()
    stock = {name: type(module) for name, module in model.named_modules()}
    names = list(model.state_dict())
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 47)
    use_float8(model)
    changed = {name for name, module in model.named_modules() if type(module) is not stock[name]}
    assert len(changed) == 13 and all(name.endswith("_proj") for name in changed)
    assert type(model.lm_head) is nn.Linear and "model.layers.1.mlp.up_proj" not in changed
    assert [name for name in model.state_dict() if not name.endswith("bias")] == names

    module, x = linear("cpu"), draw("cpu", 3, 16, 32)
    with portable_bf16(), autocast_for("fp8", "cpu"):
        expected = nn.functional.linear(x, module.weight, module.bias)
        assert torch.equal(module(x[:, :5]), expected[:, :5]) and not torch.equal(module(x), expected)
        assert torch.equal(module.eval()(x), expected)


class Same(RandomBatches):
    """The same tokens in every step, so that the loss decreases."""

    def step_tokens(self, step: int) -> Tensor:
        return super().step_tokens(0)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, trainer: Trainer) -> None:
        assert trainer.loss is not None
        self.found.append(trainer.loss)


def trained(device: str, precision: str, *, compile: bool = False, **options: Any) -> tuple[Trainer, list[float]]:
    model, losses = tiny_llama().to(device), Losses()
    if precision == "fp8":
        use_float8(model)
    if compile:
        compiling.compile_blocks(model)
    options = {"num_steps": 20, "batches": Same((4, 4), seq_len=16), "compile": compile, **options}
    trainer = make_trainer(model, [losses], device=device, precision=precision, **options)  # type: ignore[arg-type]
    with portable_bf16():
        assert trainer.run() == "finished"
    compiling.forget_graphs()
    return trainer, losses.found


@pytest.mark.parametrize("device", DEVICES)
def test_training_is_that_of_bf16_with_little_noise(device: str) -> None:
    (ours, losses), (_, expected) = (trained(device, precision) for precision in ("fp8", "bf16"))
    assert expected[-1] < expected[0] - 1 and losses != expected
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 0.1
    windows = Same((4, 4), seq_len=16).step_tokens(0).to(device)
    validated = [evaluate_loss(ours.model, windows, precision=precision) for precision in ("fp8", "bf16")]  # type: ignore[arg-type]
    assert validated[0] == validated[1], "validation is in bf16"


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_close_to_those_of_bf16(device: str) -> None:
    found = []
    for precision in ("bf16", "fp8"):
        trainer, _ = trained(device, precision, num_steps=1)
        with portable_bf16():
            trainer.forward_backward(trainer.batches.next_step())
        found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
    assert 0.001 < error(found[1], found[0]) < 0.15


@pytest.mark.parametrize("device", DEVICES)
def test_pruned_groups_stay_dead(device: str) -> None:
    model = tiny_llama().to(device)
    prunable = Prunable(model)
    for group in (Group("attn", ((0,), (3,))), Group("ffn", ((5,), (47,))), Group("stem", ((2,),))):
        prunable.prune(group)
    use_float8(model)

    class Mask(Callback):
        def edit_gradients(self, trainer: Trainer) -> None:
            prunable.mask_gradients()

    batches = Same((4,), seq_len=16)
    trainer = make_trainer(model, [Mask()], batches=batches, precision="fp8", device=device, num_steps=3)
    with portable_bf16():
        assert trainer.run() == "finished"
    assert sum(int(p.count_nonzero()) for p in model.parameters()) == prunable.num_parameters


def test_layers_are_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced without code generation; the same numbers."""
    monkeypatch.setattr(compiling.torch, "compile", functools.partial(torch.compile, backend="eager"))
    (ours, _), (theirs, _) = (trained("cpu", "fp8", compile=flag, num_steps=2) for flag in (True, False))
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@needs_gpu
def test_compiled_on_a_gpu() -> None:
    (_, losses), (_, expected) = (trained("cuda", "fp8", compile=flag) for flag in (True, False))
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 0.1


@needs_gpu
@pytest.mark.parametrize("compile", [False, True])
def test_graphs_give_the_same_bits(compile: bool) -> None:
    (plain, losses), (graphed, same) = (trained("cuda", "fp8", compile=compile, cuda_graphs=g) for g in (False, True))
    assert graphed._graphs is not None and graphed._graphs.num_recordings == 2
    assert losses == same
    for one, other in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@needs_gpu
def test_nothing_waits_for_the_device() -> None:
    module, x = linear("cuda"), draw("cuda", 16, 32)
    passes(module, x, draw("cuda", 16, 48))
    grad = draw("cuda", 16, 48)
    torch.cuda.set_sync_debug_mode("error")
    try:
        passes(module, x, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^training.precision: fp8 needs a GPU of .* this CPU is not: use bf16"):
        check_float8("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(UserError, match="NVIDIA A100"):
        check_float8("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_float8("cuda")
    with pytest.raises(UserError, match="precision: fp8 does not train adapters: use bf16"):
        TrainingConfig(tokens=1, precision="fp8", lora_rank=4)
