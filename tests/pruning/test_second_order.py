"""The second-order update on whole models: every family and type, tied or not, masked or compacted, in training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_steps import adamw, train
from safetensors.torch import load_file
from torch import Tensor

from dwindle.anatomy.structure import Structure
from dwindle.pruning.calibration import calibrate
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.gram import Gram, damping_for
from dwindle.pruning.ledger import read_ledger
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.second_order import InputStatistics, InputTaps, norm_factor, repair, taps_of
from dwindle.pruning.surgery import Prunable
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain, resume
from runs import COMPACT_OFTEN, tiny_recipe
from tiny import FAMILIES, random_group, tiny_model, tokens

KINDS = ("attn", "ffn", "stem")


def watched(prunable: Prunable, windows: Tensor) -> InputStatistics:
    found = calibrate(prunable, windows, metric_named("random"), PruneConfig(second_order=True)).inputs
    assert found is not None
    return found


def seen_by_hand(model: Any, windows: Tensor, modules: dict[str, bool]) -> dict[str, Tensor]:
    """All inputs (outputs, where true) of some modules, as plain hooks see them, one window at a time."""
    seen: dict[str, list[Tensor]] = {module: [] for module in modules}

    def keep(module: str, x: Tensor) -> None:
        seen[module].append(x.detach().flatten(0, -2))

    handles = []
    for name, output in modules.items():
        found = model.get_submodule(name)
        if output:
            handles.append(found.register_forward_hook(lambda m, args, out, name=name: keep(name, out)))
        else:
            handles.append(found.register_forward_pre_hook(lambda m, args, name=name: keep(name, args[0])))
    with torch.no_grad():
        for window in windows:
            model(input_ids=window[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def inputs_by_hand(model: Any, windows: Tensor, module: str) -> Tensor:
    return seen_by_hand(model, windows, {module: False})[module]


def pruned_keep(prunable: Prunable, kinds: list[str]) -> Structure:
    keep = prunable.alive
    for seed, kind in enumerate(kinds):
        keep = keep.without(random_group(kind, keep, seed))
    return keep


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_watch_what_the_readers_read(family: str) -> None:
    prunable = Prunable(tiny_model(family))
    windows = tokens(6, 20)
    found = watched(prunable, windows)
    taps = taps_of(prunable.anatomy)
    assert {tap.key for tap in taps} == set(found)
    readers = {row.name for tap in taps for row in tap.rows}
    matrices = [row for row in prunable.anatomy.rows if len(row.axes) == 2 and row.name != "model.embed_tokens.weight"]
    assert readers == {row.name for row in matrices if row.axes[1] != ("dim",)}  # columns that are kept whole
    by_hand = seen_by_hand(prunable.model, windows, {tap.key: tap.at_output for tap in taps})
    read = [row.module for tap in taps for row in tap.rows if row.name != "lm_head.weight"]
    inputs = seen_by_hand(prunable.model, windows, dict.fromkeys(read, False))
    for tap in taps:
        x = by_hand[tap.key]
        for row in tap.rows:
            if row.name != "lm_head.weight":
                assert torch.equal(x, inputs[row.module]), row.name
        assert torch.allclose(found[tap.key].mean_square(), x.square().mean(0), rtol=1e-9)
        seen = found[tap.key]
        if isinstance(seen, Gram):
            assert torch.allclose(seen.matrix_NN, x.T @ x, rtol=1e-9)
    assert not any(hasattr(module, "tapped") for module in prunable.model.modules())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_reader_gets_the_ridge_solution(family: str, kind: str) -> None:
    """By hand from the recorded inputs: what is removed is regressed on what is kept, and added to it."""
    prunable = Prunable(tiny_model(family))
    prunable.prune(random_group("ffn", prunable.alive, 5))  # something is pruned already
    windows = tokens(8, 25)
    found = watched(prunable, windows)
    by_hand = seen_by_hand(prunable.model, windows, {tap.key: tap.at_output for tap in taps_of(prunable.anatomy)})
    before = {name: p.detach().clone() for name, p in prunable.model.named_parameters()}
    keep = pruned_keep(prunable, [kind, kind])
    repair(prunable, keep, found, damping=0.02)
    after = dict(prunable.model.named_parameters())
    touched = set()
    for tap in taps_of(prunable.anatomy):
        row, axis = (tap.rows[0], 1) if tap.rows else (prunable.anatomy[tap.norm or ""], 0)
        alive, kept = (prunable.anatomy.positions(row, axis, s, prunable.physical) for s in (prunable.alive, keep))
        assert alive is not None and kept is not None
        removed = torch.tensor(sorted(set(alive.tolist()) - set(kept.tolist())), dtype=torch.long)
        if not len(removed):
            continue
        x = by_hand[tap.key]
        ridge = damping_for(0.02, len(removed) + len(kept), len(x)) * x[:, [*removed, *kept]].square().sum(0).mean()
        square = x[:, kept].T @ x[:, kept] + ridge * torch.eye(len(kept), dtype=x.dtype)
        a = torch.linalg.solve(square, x[:, kept].T @ x[:, removed]).T
        for row in tap.rows:
            weight = before[row.name]
            assert torch.allclose(after[row.name][:, kept], weight[:, kept] + weight[:, removed] @ a, atol=1e-9), (
                row.name
            )
            error = (x[:, removed] @ weight[:, removed].T).square().sum()
            repaired = ((x[:, removed] - x[:, kept] @ a.T) @ weight[:, removed].T).square().sum()
            assert repaired <= error
            touched.add(row.name)
        if tap.norm is not None:
            touched.add(tap.norm)
    for name, parameter in after.items():
        assert (name in touched) or torch.equal(parameter, before[name]), name
    if prunable.model.config.tie_word_embeddings and kind == "stem":
        assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "granite", "olmo2"])
def test_stem_readers_come_closer_to_what_they_put_out(family: str) -> None:
    """With the norm's real output after the removal of channels: the divisor has changed too."""
    windows = tokens(12, 30)
    source, plain, repaired = (Prunable(tiny_model(family)) for _ in range(3))
    found = watched(source, windows)
    keep = pruned_keep(source, ["stem"] * 4)
    repair(repaired, keep, found, damping=0.01)
    taps = [tap for tap in taps_of(source.anatomy) if tap.unit == "hidden" and tap.rows]
    wanted = seen_by_hand(source.model, windows, {tap.key: tap.at_output for tap in taps})
    norms = {tap.key: tap.norm.removesuffix(".weight") for tap in taps if tap.norm is not None}
    before_norms = seen_by_hand(source.model, windows, dict.fromkeys(norms.values(), False))
    streams = {key: before_norms[norm] for key, norm in norms.items()}
    plain.prune_to(keep)
    repaired.prune_to(keep)
    removed = [i for i in source.alive.hidden if i not in keep.hidden]
    for tap in taps:
        errors = []
        for pruned in (plain, repaired):
            stream = streams.get(tap.key, wanted[tap.key]).clone()
            stream[:, removed] = 0
            if tap.norm is not None:
                stream = pruned.model.get_submodule(tap.norm.removesuffix(".weight"))(stream).detach()
            total = 0.0
            for row in tap.rows:
                before = source.model.get_parameter(row.name).detach()
                after = pruned.model.get_parameter(row.name).detach()
                total += float((wanted[tap.key] @ before.T - stream @ after.T).square().sum())
            errors.append(total)
        assert errors[1] < errors[0], (tap.key, errors)


def test_the_norm_factor_is_the_real_one() -> None:
    """Removing channels of equal strength changes nothing; removing zero ones: √(kept/all)."""
    gain = torch.full((10,), 2.0)
    assert norm_factor(torch.full((10,), 4.0), gain, torch.tensor([1, 2]), 8) == pytest.approx(1.0)
    silent = torch.full((10,), 5.0)
    silent[:2] = 0
    assert norm_factor(silent, gain, torch.tensor([0, 1]), 8) == pytest.approx(0.8**0.5)
    assert norm_factor(silent, gain * 0, torch.tensor([0, 1]), 8).isfinite()


@pytest.mark.parity
@pytest.mark.parametrize(
    ("family", "tied"),
    [*((family, number % 2 == 0) for number, family in enumerate(FAMILIES)), ("llama", False)],
)
def test_masked_equals_compacted_after_updates(family: str, tied: bool) -> None:
    """Zeroed parts remain zero under training, also after second-order updates."""
    pair = []
    for _ in range(2):
        prunable = Prunable(tiny_model(family, tie_word_embeddings=tied))
        optimizer = adamw(prunable.model)
        train(prunable, optimizer, 2, seed=100)
        for kinds in (["attn", "ffn", "stem"], ["stem", "attn"]):
            keep = pruned_keep(prunable, kinds)
            repair(prunable, keep, watched(prunable, tokens(4, 16)), damping=0.01)
            prunable.prune_to(keep, optimizer)
        pair.append((prunable, optimizer))
    (masked, masked_optimizer), (sliced, sliced_optimizer) = pair
    moved = sliced.compact(optimizer=sliced_optimizer, rebuild=adamw)
    assert moved is not None
    batch = tokens(2, 16, seed=7)
    with torch.no_grad():
        difference = masked.model(input_ids=batch).logits - sliced.model(input_ids=batch).logits
    assert difference.abs().max() < 1e-10
    assert train(masked, masked_optimizer, 6, 200) == pytest.approx(train(sliced, moved, 6, 200), abs=1e-10, rel=0)
    for name, before in masked.model.named_parameters():
        kept = masked.anatomy.slice(masked.anatomy[name], before, masked.alive, masked.physical)
        assert before.count_nonzero() == kept.count_nonzero(), f"{name}: pruned entries moved"


def test_moments_of_what_stays_are_left_alone() -> None:
    prunable = Prunable(tiny_model("llama"))
    optimizer = adamw(prunable.model)
    train(prunable, optimizer, 2, seed=1)
    weight = prunable.model.get_parameter("model.layers.0.mlp.down_proj.weight")
    before, moment = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    keep = pruned_keep(prunable, ["ffn"])
    repair(prunable, keep, watched(prunable, tokens(4, 16)), damping=0.01)
    prunable.prune_to(keep, optimizer)
    kept = list(keep.layers[0].ffn)
    assert torch.equal(optimizer.state[weight]["exp_avg"][:, kept], moment[:, kept])
    assert not torch.allclose(weight[:, kept], before[:, kept])


def test_the_sample_has_as_many_tokens_as_wanted() -> None:
    prunable = Prunable(tiny_model("llama"))
    seen: list[int] = []
    taps = InputTaps(prunable.model, taps_of(prunable.anatomy, ("ffn",)), lambda key, x: seen.append(len(x)))
    for wanted, batches in ((10, [(2, 16)]), (40, [(2, 16), (2, 16)]), (1000, [(2, 16), (1, 16)])):
        seen.clear()
        taps.open(wanted)
        for shape in batches:
            prunable.model(input_ids=tokens(*shape))
        taps.close()
        available = sum(a * b for a, b in batches)
        assert min(wanted, available) / 2 < sum(seen) / 3 <= min(wanted, available)
    seen.clear()
    prunable.model(input_ids=tokens(2, 16))
    assert not seen  # closed


@pytest.mark.parametrize(
    ("wanted", "stride"),
    [(64, 4), (70, 4), (3, 16), (1, 16), (16, 16), (256, 1), (200, 2), (10_000, 1)],
)
def test_every_sequence_of_a_step_gives_the_same_tokens(wanted: int, stride: int) -> None:
    """Of 16 sequences of 16 tokens: however they are divided into passes."""
    prunable = Prunable(tiny_model("llama"))
    key, seen, batch = "model.layers.1.mlp.down_proj", list[Tensor](), tokens(16, 16, seed=3)
    x = inputs_by_hand(tiny_model("llama"), batch, key).view(16, 16, -1)[:, ::stride].flatten(0, 1)
    keep = lambda name, x: seen.append(x) if name == key else None  # noqa: E731
    taps = InputTaps(prunable.model, taps_of(prunable.anatomy, ("ffn",)), keep)
    for sizes in ([16], [1, 5, 10], [1] * 16):
        seen.clear()
        taps.open(wanted, 16)
        for part in batch.split(sizes):
            prunable.model(input_ids=part)
        taps.close()
        assert torch.allclose(torch.cat(seen), x, atol=1e-5)  # its norms are in fp32


def test_a_step_gives_tokens_from_all_its_micro_batches(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Two micro-batches of 4 × 24 tokens in a step: as many from each sequence; all, where all are wanted."""
    real = InputStatistics.add
    for wanted, each in ((24, 12), (1, 4), (191, 48), (192, 96), (10_000, 96)):
        taken: list[int] = []

        def add(self: InputStatistics, key: str, x_TN: Tensor, taken: list[int] = taken) -> None:
            if key.endswith("layers.0.mlp.down_proj"):
                taken.append(len(x_TN))
            real(self, key, x_TN)

        monkeypatch.setattr(InputStatistics, "add", add)
        options = {"second_order": True, "groups": ["ffn"], "target": "85%", "gram_tokens": wanted}
        pretrain(recipe(place, steps=4, **options), tmp_path / str(wanted))
        monkeypatch.undo()
        assert set(taken) == {each}


def test_taps_see_embeddings_that_are_given_instead_of_tokens() -> None:
    """A bf16 residual stream starts from embeddings; the same tokens are taken either way."""
    model, batch = tiny_model("llama"), tokens(3, 8, seed=2)
    seen: list[dict[str, Tensor]] = []
    for inputs in ({"input_ids": batch}, {"inputs_embeds": model.get_input_embeddings()(batch)}):
        found: dict[str, Tensor] = {}
        taps = InputTaps(model, taps_of(Prunable(model).anatomy), found.__setitem__)
        taps.open(10)
        with torch.no_grad():
            model.model(**inputs)
        taps.remove()
        seen.append(found)
    assert seen[0].keys() == seen[1].keys() and all(torch.equal(seen[0][key], seen[1][key]) for key in seen[0])
    assert {len(x) for x in seen[1].values()} == {9}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_taps_in_training(checkpointing: bool) -> None:
    """Recomputed activations are not counted twice, and passes without training are not watched."""
    prunable = Prunable(tiny_model("llama"))
    if checkpointing:
        prunable.model.gradient_checkpointing_enable({"use_reentrant": False})
    statistics = InputStatistics(10**6)
    taps = InputTaps(prunable.model, taps_of(prunable.anatomy), statistics.add, only_in_training=True)
    taps.open(10**6)
    prunable.model.eval()
    prunable.model(input_ids=tokens(2, 16, seed=3))
    assert not statistics
    prunable.model.train()
    batch = tokens(2, 16)
    prunable.model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    taps.close()
    assert {seen.num_tokens for seen in statistics.values() if isinstance(seen, Gram)} == {32}
    assert all(module.tapped is None for module in prunable.model.modules() if hasattr(module, "tapped"))


def test_taps_in_compiled_layers() -> None:
    """Opening and closing is seen by layers that are compiled already, and equal layers share their graphs."""
    prunable = Prunable(tiny_model("llama"))
    torch.compiler.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for layer in prunable.model.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend="eager")
    statistics = InputStatistics(10**6)
    taps = InputTaps(prunable.model, taps_of(prunable.anatomy), statistics.add, only_in_training=True)
    prunable.model.train()
    batch = tokens(2, 16)
    for wanted in (0, 10**6, 0, 32, 0):
        taps.open(wanted)
        prunable.model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    taps.close()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2  # open and closed
    torch.compiler.reset()
    assert set(statistics) == {tap.key for tap in taps_of(prunable.anatomy)}
    assert {seen.num_tokens for seen in statistics.values() if isinstance(seen, Gram)} == {64}
    x = inputs_by_hand(tiny_model("llama"), batch, "model.layers.1.mlp.down_proj")
    assert torch.allclose(statistics["model.layers.1.mlp.down_proj"].mean_square(), x.square().mean(0))


def test_passes_of_a_step_share_one_graph() -> None:
    prunable = Prunable(tiny_model("llama"))
    torch.compiler.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for layer in prunable.model.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend="eager")
    taps = InputTaps(prunable.model, taps_of(prunable.anatomy), InputStatistics(41).add)
    for _ in range(2):
        taps.open(41, 10)  # 4 of 16 tokens of each sequence, and one that is not used
        for number in range(5):
            prunable.model(input_ids=tokens(2, 16, seed=number), use_cache=False)
        taps.close()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1
    torch.compiler.reset()


def recipe(place: Path, *, steps: int = 16, **prune: Any) -> Recipe:
    return tiny_recipe(
        place,
        steps=steps,
        training={"micro_batch": 4},
        prune={"target": "60%", "horizon": 0.6, **COMPACT_OFTEN} | prune,
        checkpoint={"every": 4, "keep_last": 10},
    )


@pytest.mark.parametrize(
    "options",
    [
        {"second_order": True},
        {"second_order": True, "attention": "cluster", "gram_tokens": 20},
        {"metric": "wanda", "smoothing": 0.5},
        {"metric": "obc", "second_order": True, "ratio": "2:1", "horizon": None, "target": "80%"},
        {"metric": "obd", "fisher": "adam"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_pretraining_with_inputs_resumes_to_the_bit(place: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    whole = pretrain(recipe(place, **options), tmp_path / "whole")
    assert whole.target_reached and whole.model is not None and whole.loss is not None
    assert read_ledger(tmp_path / "whole")[0]["options"]["second_order"] == options.get("second_order", False)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "model")
    checkpoints = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    for later in checkpoints[1:]:
        shutil.rmtree(later)
    resume(tmp_path / "cut")
    expected, found = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("whole", "cut"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_pretraining_with_the_update_differs_from_without(place: Path, tmp_path: Path) -> None:
    runs = {}
    for second_order in (False, True):
        run = tmp_path / str(second_order)
        pretrain(recipe(place, steps=8, second_order=second_order, groups=["ffn"], target="85%"), run)
        runs[second_order] = read_ledger(run)
    first = {order: next(e for e in events if e["event"] == "prune") for order, events in runs.items()}
    assert first[False] == first[True]  # the same group is removed first; what is kept is then updated


def test_better_than_without_on_a_real_model(shared_data: Path, tmp_path: Path) -> None:
    """stories260K, 10 and 30 % removed without training: B below A, and every metric with data below random."""
    from dwindle.run.compare import compare

    text = (shared_data / "corpus" / "tinystories-sample.txt").read_text()
    cut = text.index(chr(10), len(text) * 4 // 5)
    (tmp_path / "seen.txt").write_text(text[:cut])
    (tmp_path / "unseen.txt").write_text(text[cut:])
    result = compare(
        shared_data / "models" / "stories260K" / "stories260K.bin",
        metrics=["taylor", "obd", "wanda", "obc", "random"],
        to=["10%nonemb", "30%nonemb"],
        second_order=True,
        data=[str(tmp_path / "seen.txt")],
        valid=[str(tmp_path / "unseen.txt")],
        sequences=64,
        seq_len=128,
        valid_tokens=4096,
    )
    losses = {(cell.metric, cell.second_order, cell.ratio): cell.loss for cell in result.cells}
    for ratio in ("10%nonemb", "30%nonemb"):
        print(ratio, {key[:2]: round(loss, 3) for key, loss in losses.items() if key[2] == ratio})
        for metric in ("taylor", "obd", "wanda", "obc"):
            assert losses[metric, True, ratio] < losses[metric, False, ratio]
            assert losses[metric, False, ratio] < losses["random", False, ratio]
