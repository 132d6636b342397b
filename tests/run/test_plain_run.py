"""Whole runs against plain tensors: forward pass, loss, teacher, optimizers, schedule, clipping, slicing, second order.

Only the data and the choice of groups are the run's own; everything else is computed here again, for a Llama whose
tensors are sliced after each event. The source pads with a letter: as in every model of transformers, its embedding
then gets no gradient from where it is read.

Shapes: B sequences, T tokens, D hidden size, N inputs of a matrix, P removed and R kept inputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from dwindle.anatomy.shrink import Float64Throughout
from dwindle.data.batches import BatchStream
from dwindle.pruning.gram import NOISE_TO_SIGNAL
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain
from dwindle.training.config import TrainingConfig
from dwindle.training.muon import NEWTON_SCHULZ
from runs import COMPACT_OFTEN, events, metrics, tiny_recipe
from tiny import tiny_directory, tiny_tokenizer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parity]

Weights = dict[str, Tensor]
Axis = tuple[str, int] | None
"""Kind of index (hidden, query, kv, ffn) and layer; None for tokens."""
Kept = dict[tuple[str, int], list[int]]
"""The indices of the source that are left along each axis."""

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 8, 4, 4
HIDDEN: Axis = ("hidden", 0)
PADDING: int = tiny_tokenizer()("e")["input_ids"][0]
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {
        "training": {"optimizer": "adamw", "schedule": "cosine", "warmup": 2, "clip": 0.1, "z_loss": 0.01},
        "prune": {"selection": "coupled", "metric": "taylor", "horizon": 0.7},
    },
    "muon": {
        "training": {"optimizer": "muon", "schedule": "wsd", "warmup": 0, "decay": 0.3, "embedding_lr_ratio": 0.3},
        "prune": {"selection": "global", "metric": "group", "ratio": "9:1", "horizon": None, "attention": "cluster"},
    },
    "teacher": {
        "training": {"optimizer": "adamw", "schedule": "constant", "warmup": 0.2, "clip": 0.0, "ce_chunk_tokens": 7},
        "prune": {"selection": "global", "metric": "random", "second_order": True, "gram_tokens": 30, "horizon": 1.0},
        "distill": {"weight": 0.5, "temperature": 2.0, "top_k": 5},
    },
    "second order": {
        "training": {"optimizer": "muon", "schedule": "cosine", "warmup": 1, "activation_checkpointing": True},
        "prune": {"selection": "coupled", "metric": "obc", "second_order": True, "damping": 0.1, "horizon": 0.6},
    },
}


def axes_of(name: str) -> list[Axis]:
    if name.startswith(("model.embed", "lm_head")):
        return [None, HIDDEN]
    if name.endswith("norm.weight"):
        return [HIDDEN]
    layer, part = int(name.split(".")[2]), name.split(".")[4]
    kind = {"q_proj": "query", "o_proj": "query", "k_proj": "kv", "v_proj": "kv"}.get(part, "ffn")
    return [HIDDEN, (kind, layer)] if part in ("o_proj", "down_proj") else [(kind, layer), HIDDEN]


def positions(axis: Axis, keep: Kept, now: Kept) -> Tensor:
    assert axis is not None
    stretch = HEAD_DIM if axis[0] in ("query", "kv") else 1
    return torch.tensor([now[axis].index(i) * stretch + n for i in keep[axis] for n in range(stretch)])


def cut(name: str, tensor: Tensor, keep: Kept, now: Kept) -> Tensor:
    for number, axis in enumerate(axes_of(name)):
        tensor = tensor if axis is None else tensor.index_select(number, positions(axis, keep, now))
    return tensor


def after(removed: Sequence[dict[str, Any]], now: Kept) -> Kept:
    keep = {axis: list(indices) for axis, indices in now.items()}
    for event in removed:
        kind = {"attn": "query", "ffn": "ffn", "stem": "hidden"}[event["type"]]
        for layer, members in enumerate(event["indices"]):
            keep[kind, layer] = [i for i in keep[kind, layer] if i not in members]
    for layer in range(LAYERS):
        keep["kv", layer] = sorted({query * KV_HEADS // HEADS for query in keep["query", layer]})
    return keep


def logits_of(weights: Weights, kept: Kept, tokens_BT: Tensor, inputs: Weights | None = None) -> Tensor:
    """A Llama; ``inputs`` gets what every matrix of a layer and the head read."""
    length = tokens_BT.shape[1]
    angles = torch.arange(length).double()[:, None] / 10000.0 ** (torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    future = torch.full((length, length), -torch.inf).double().triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights[name]

    def linear(x: Tensor, name: str) -> Tensor:
        if inputs is not None:
            inputs[name] = x.detach()
        return x @ weights[name].T

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    embedding = weights["model.embed_tokens.weight"]
    x = torch.where(tokens_BT[..., None] == PADDING, embedding.detach()[tokens_BT], embedding[tokens_BT])
    for layer in range(LAYERS):
        attn, mlp = (f"model.layers.{layer}.{block}" for block in ("self_attn", "mlp"))
        h = norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (heads(linear(h, f"{attn}.{name}_proj.weight")) for name in "qkv")
        read = [kept["kv", layer].index(query * KV_HEADS // HEADS) for query in kept["query", layer]]
        scores = (rotated(q) @ rotated(k)[:, read].transpose(-1, -2) / HEAD_DIM**0.5 + future).softmax(-1)
        x = x + linear((scores @ v[:, read]).transpose(1, 2).flatten(2), f"{attn}.o_proj.weight")
        h = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        h = F.silu(linear(h, f"{mlp}.gate_proj.weight")) * linear(h, f"{mlp}.up_proj.weight")
        x = x + linear(h, f"{mlp}.down_proj.weight")
    return linear(norm(x, "model.norm.weight"), "lm_head.weight")


def divergence(student: Tensor, teacher: Tensor, temperature: float, top_k: int) -> Tensor:
    """T² · KL over the teacher's k likeliest tokens and the rest."""
    p, q = ((x / temperature).softmax(-1) for x in (teacher, student))
    likely = teacher.topk(top_k, -1).indices
    p, q = (torch.cat([own := x.gather(-1, likely), 1 - own.sum(-1, keepdim=True)], -1) for x in (p, q))
    return (p * (p / q).log()).sum(-1).mean() * temperature**2


def rate(config: TrainingConfig, num_steps: int, step: int) -> float:
    warmup, floor = config.warmup_steps(num_steps), config.min_lr_ratio
    if step < warmup:
        return config.lr * (step + 1) / warmup
    decay = num_steps * config.decay if config.schedule == "wsd" else 1.0
    done = max(step - (num_steps - round(decay)), 0) / round(decay)
    cosine = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (num_steps - warmup))
    share = {"constant": 1.0, "cosine": cosine, "wsd": 1 - done}[config.schedule]
    return config.lr * (floor + (1 - floor) * share)


def orthogonalised(matrix: Tensor) -> Tensor:
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x, (a, b, c) = x / x.norm(), NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def update(weights: Weights, grads: Weights, state: dict[str, Weights], config: TrainingConfig, lr: float) -> None:
    for name, weight in weights.items():
        own, grad = state.setdefault(name, {}), grads[name]
        decay = config.weight_decay if weight.ndim == 2 else 0.0
        lr_of = lr * (config.embedding_lr_ratio if axes_of(name)[0] is None else 1.0)
        if config.optimizer == "muon" and "proj" in name:
            own["m"] = own.get("m", 0 * grad) * config.momentum + (1 - config.momentum) * grad
            step = orthogonalised(grad + config.momentum * (own["m"] - grad)) * 0.2 * max(grad.shape) ** 0.5
        else:
            first, second = config.betas
            own["t"] = own.get("t", torch.zeros(())) + 1
            own["m"] = own.get("m", 0 * grad) * first + (1 - first) * grad
            own["v"] = own.get("v", 0 * grad) * second + (1 - second) * grad.square()
            root = (own["v"] / (1 - second ** own["t"])).sqrt() + config.eps
            step = own["m"] / (1 - first ** own["t"]) / root
        weights[name] = weight * (1 - lr_of * decay) - lr_of * step


def regression(x_TN: Tensor, removed_P: Tensor, kept_R: Tensor, damping: float) -> Tensor:
    """A = H_PR (H_RR + λI)⁻¹."""
    h, size = x_TN.T @ x_TN, x_TN.shape[1]
    ridge = (damping + NOISE_TO_SIGNAL * size / len(x_TN)) * h.diagonal().mean() * torch.eye(len(kept_R)).double()
    return torch.linalg.solve(h[kept_R][:, kept_R] + ridge, h[kept_R][:, removed_P]).T


def repaired(weights: Weights, inputs: Weights, keep: Kept, now: Kept, damping: float) -> Weights:
    """W_R + W_P A of every matrix that loses inputs; gains of the norms before them by √((kept/all) / (1 − e))."""
    found = dict(weights)
    for name, x_TN in inputs.items():
        kept_R = positions(axes_of(name)[1], keep, now)
        removed_P = torch.tensor(sorted(set(range(x_TN.shape[1])) - set(kept_R.tolist())), dtype=torch.long)
        if not len(removed_P):
            continue
        found[name] = weights[name].clone()
        found[name][:, kept_R] += weights[name][:, removed_P] @ regression(x_TN, removed_P, kept_R, damping)
        norm = {"q": "input_layernorm", "gate": "post_attention_layernorm"}.get(
            name.split(".")[-2].removesuffix("_proj")
        )
        norm = (
            "model.norm.weight"
            if name == "lm_head.weight"
            else norm and f"{'.'.join(name.split('.')[:3])}.{norm}.weight"
        )
        if norm:
            gain, size = weights[norm], x_TN.shape[1]
            share = (x_TN.square().mean(0) / gain.square())[removed_P].sum() / size
            found[norm] = gain / (len(kept_R) / size / (1 - share.clamp(0, 0.9))).sqrt()
    return found


def plain(recipe: Recipe, batches: list[Tensor], removed: list[dict[str, Any]], source: Weights) -> Any:
    """(loss, gradient norm, learning rate) of every step, and the weights at the end."""
    config, prune, distill = recipe.training, recipe.prune, recipe.distill
    sizes = {"query": HEADS, "kv": KV_HEADS, "ffn": 40}
    kept: Kept = {(kind, layer): list(range(n)) for kind, n in sizes.items() for layer in range(LAYERS)}
    kept["hidden", 0] = list(range(32))
    whole, weights, state = kept, dict(source), dict[str, Weights]()
    steps = []
    for step, batch in enumerate(batches):
        tokens, targets, inputs = batch[:, :-1], batch[:, 1:].flatten(), Weights()
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        logits = logits_of(leaves, kept, tokens, inputs).flatten(0, 1)
        loss = F.cross_entropy(logits, targets)
        objective = loss + config.z_loss * logits.logsumexp(-1).square().mean()
        if distill.weight:
            taught = logits_of(source, whole, tokens).flatten(0, 1).detach()
            pull = divergence(logits, taught, distill.temperature, distill.top_k)
            objective = objective + distill.weight * (pull - loss)
        grads = dict(zip(leaves, torch.autograd.grad(objective, list(leaves.values())), strict=True))
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        factor = min(1.0, config.clip / (float(norm) + 1e-6)) if config.clip else 1.0
        grads = {name: grad * factor for name, grad in grads.items()}
        weights = {name: weight.detach() for name, weight in weights.items()}
        lr = rate(config, recipe.num_steps, step)
        update(weights, grads, state, config, lr)
        steps.append((loss.item(), norm.item(), lr))
        due = [event for event in removed if event["step"] == step + 1]
        keep = after(due, kept)
        if prune.second_order:
            each = (prune.num_gram_tokens or 4096) // len(tokens)
            seen = {name: x[:, :: -(-tokens.shape[1] // each)].flatten(0, 1) for name, x in inputs.items()}
            weights = repaired(weights, seen, keep, kept, prune.damping)
        weights = {name: cut(name, weight, keep, kept) for name, weight in weights.items()}
        for name, own in state.items():
            own.update({key: cut(name, moment, keep, kept) for key, moment in own.items() if key != "t"})
        kept = keep
        assert not due or due[-1]["parameters"] == sum(weight.numel() for weight in weights.values())
    return steps, weights


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plain")
    tiny_directory(place / "model", pad_token_id=PADDING)
    assert json.loads((place / "model" / "config.json").read_text())["rms_norm_eps"] == 1e-6
    return place


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_is_what_plain_tensors_compute(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {key: dict(table) for key, table in OPTIONS[name].items()}
    tables["training"] |= {"precision": "fp64", "micro_batch": 2, "lr": 1e-3}
    tables["prune"] |= {"target": "70%", **COMPACT_OFTEN}
    settings, read = tiny_recipe(place, steps=8, sequences=5, seq_len=23, **tables), list[Tensor]()
    next_step = BatchStream.next_step

    def kept(stream: BatchStream) -> list[Tensor]:
        found = next_step(stream)
        read.append(torch.cat(found))
        return found

    monkeypatch.setattr(BatchStream, "next_step", kept)
    with Float64Throughout():
        pretrain(settings, place / name)
    source = {key: weight.double() for key, weight in load_file(place / "model" / "model.safetensors").items()}
    steps, weights = plain(settings, read, events(place / name, "prune"), source)
    for line, expected in zip(metrics(place / name), steps, strict=True):
        assert (line["loss"], line["grad_norm"], line["lr"]) == pytest.approx(expected, rel=1e-5), line["step"]
    final = load_file(place / name / "model" / "model.safetensors")
    assert final.keys() == weights.keys() and len(events(place / name, "compact")) > 1
    for key, weight in weights.items():
        torch.testing.assert_close(final[key].double(), weight, atol=2e-5, rtol=0)
