"""The order of samples: bijective, seeded, in true ratios, and the same for any number of ranks."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dwindle.core.errors import UserError
from dwindle.data.batches import BatchStream
from dwindle.data.mixture import MAX_PERIOD, Mixture, PackedDataset, turn_cycle, whole_shares
from dwindle.data.permutation import Permutation
from dwindle.data.token_stream import MemoryTokens, TokenStream, hold_out


def stream_of(num_tokens: int, first: int = 0, parts: int = 1) -> TokenStream:
    ids = np.arange(first, first + num_tokens, dtype="<u4")
    pieces = np.array_split(ids, parts)
    return TokenStream([MemoryTokens(f"p{i}", piece, np.zeros(1, np.uint64)) for i, piece in enumerate(pieces)])


def mixture_of(weights: dict[str, float], seq_len: int = 4, seed: int = 0, num_windows: int = 25) -> Mixture:
    sources = [
        PackedDataset(name, stream_of(num_windows * seq_len + 1, first=10_000 * i), seq_len, seed)
        for i, name in enumerate(weights)
    ]
    return Mixture(sources, list(weights.values()))


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4096, 4097, 65_537])
def test_permutation_is_a_bijection(n: int) -> None:
    order = Permutation(n, "key")
    assert sorted(map(order, range(n))) == list(range(n))


def test_permutation_shuffles() -> None:
    n = 5000
    first, second = ([Permutation(n, key)(i) for i in range(n)] for key in ("0/a/0", "0/a/1"))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
        quarters = np.histogram2d(np.arange(n), order, bins=4)[0]
        assert np.abs(quarters - n / 16).max() < 6 * (n / 16) ** 0.5


def test_permutation_is_the_same_in_another_process() -> None:
    code = "from dwindle.data.permutation import Permutation as P;print([P(1000, '7/books/3')(i) for i in range(20)])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    order = Permutation(1000, "7/books/3")
    assert result.stdout.strip() == str([order(i) for i in range(20)])


def test_huge_domains_need_no_memory() -> None:
    order = Permutation(10**15, "key")
    assert len({order(i) for i in range(1000)}) == 1000


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_windows_predict_every_token_once(parts: int) -> None:
    seq_len = 6
    dataset = PackedDataset("a", stream_of(100, parts=parts), seq_len, seed=3)
    assert dataset.num_windows == 16
    for epoch in range(3):
        samples = [dataset.sample(epoch * 16 + i) for i in range(16)]
        assert all(len(sample) == seq_len + 1 and sample.dtype == np.int64 for sample in samples)
        assert all((np.diff(sample) == 1).all() for sample in samples)
        predicted = sorted(token for sample in samples for token in sample[1:].tolist())
        assert predicted == list(range(1, 97))
    orders = [[dataset.window_index(epoch * 16 + i) for i in range(16)] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    again = PackedDataset("a", stream_of(100), seq_len, seed=3)
    assert again.sample(40).tolist() == dataset.sample(40).tolist()


def test_short_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.train: only 8 tokens, a sequence needs 9: give more text or a smaller"):
        PackedDataset("a", stream_of(8), 8, seed=0)
    assert PackedDataset("a", stream_of(9), 8, seed=0).num_windows == 1


@pytest.mark.parametrize(
    ("weights", "turns"),
    [
        ([1.0], [1]),
        ([5.0], [1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([0.7, 0.25], [14, 5]),
        ([1.0, 1.0, 1.0], [1, 1, 1]),
        ([1e-3, 0.999], [1, 999]),
    ],
)
def test_weights_become_exact_ratios(weights: list[float], turns: list[int]) -> None:
    assert whole_shares(weights) == turns


def test_awkward_weights_are_rounded_finely() -> None:
    weights = [0.1234567891, 3.14159265, 1e-9]
    turns = whole_shares(weights)
    assert min(turns) >= 1 and sum(turns) <= MAX_PERIOD + 2
    for weight, count in zip(weights, turns, strict=True):
        assert abs(count / sum(turns) - weight / sum(weights)) < 2 / MAX_PERIOD


def test_every_prefix_is_within_one_sample_of_its_share() -> None:
    rng = random.Random(0)
    cases = [[rng.randint(1, 60) for _ in range(rng.randint(1, 8))] for _ in range(150)]
    for turns in [*cases, [1, 1, 1, 1, 1], [97, 1, 1, 1], [50, 49, 1], [1, 2, 4, 8, 16, 32]]:
        source_of, turn_of = turn_cycle(turns)
        period = sum(turns)
        counts = [0] * len(turns)
        for t in range(period):
            assert turn_of[t] == counts[source_of[t]]
            counts[source_of[t]] += 1
            for wanted, count in zip(turns, counts, strict=True):
                assert abs(wanted * (t + 1) - count * period) < period
        assert counts == turns


def test_mixture_follows_its_ratios_over_cycles() -> None:
    mixture = mixture_of({"books": 0.7, "web": 0.2, "code": 0.1})
    counts: Counter[int] = Counter()
    for g in range(537):
        source, sample = mixture.locate(g)
        assert sample == counts[source], "a source's samples come one after the other"
        counts[source] += 1
        assert mixture.sample(g).tolist() == mixture.sources[source].sample(sample).tolist()
        assert list(mixture.counts(g + 1).values()) == [counts[i] for i in range(3)]
        for i, share in enumerate((0.7, 0.2, 0.1)):
            assert abs(counts[i] - share * (g + 1)) < 1
    assert mixture.turns == [7, 2, 1]
    assert mixture.epochs(500)["books"] == 350 / 25
    with pytest.raises(UserError, match=r"data.sources.b.weight: 0.0 must be above 0"):
        mixture_of({"a": 1.0, "b": 0.0})


def reference_step(mixture: Mixture, first: int, size: int) -> list[list[int]]:
    return [mixture.sample(g).tolist() for g in range(first, first + size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 100])
@pytest.mark.parametrize("sequences", [7, 10, 13, 16])
def test_ranks_together_see_each_sample_once(world_size: int, micro_batch: int, sequences: int) -> None:
    mixture = mixture_of({"a": 2.0, "b": 1.0})
    ranks = [
        BatchStream(
            mixture, tokens_per_step=4 * sequences + 3, micro_batch=micro_batch, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    for step in range(3):
        batches = [rank.next_step() for rank in ranks]
        assert len({len(batch) for batch in batches}) == 1, "every rank makes the same number of collective calls"
        assert all(micro.shape[1] == 5 and micro.dtype == torch.int64 for batch in batches for micro in batch)
        sizes = [[len(micro) for micro in batch] for batch in batches]
        assert max(map(max, sizes)) <= micro_batch
        assert all(max(rank) - min(rank) <= 1 for rank in sizes)
        assert max(map(sum, sizes)) - min(map(sum, sizes)) <= 1
        if sequences % world_size == 0:
            assert min(map(min, sizes)) >= 1
        seen = [row for batch in batches for micro in batch for row in micro.tolist()]
        assert seen == reference_step(mixture, step * sequences, sequences)


def test_resumed_stream_continues_on_other_ranks() -> None:
    mixture = mixture_of({"a": 2.0, "b": 1.0})
    whole = BatchStream(mixture, tokens_per_step=40, micro_batch=4)
    for _ in range(3):
        whole.next_step()
    state = whole.state_dict()
    assert state["next_sample"] == 30
    expected = torch.cat(whole.next_step())
    resumed = []
    for rank in range(3):
        stream = BatchStream(
            mixture_of({"a": 2.0, "b": 1.0}), tokens_per_step=40, micro_batch=2, rank=rank, world_size=3
        )
        stream.load_state_dict(state)
        resumed += stream.next_step()
    assert torch.equal(torch.cat(resumed), expected)
    assert mixture.epochs(whole.next_sample) == {"a": 27 / 25, "b": 13 / 25}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"seed": 1}, "data.seed: the saved run used 0, now it is 1"),
        ({"seq_len": 5}, "data.seq_len: the saved run used 4, now it is 5"),
        ({"weights": {"a": 1.0, "b": 1.0}}, "data.sources: the saved run mixed a 2 : b 1, now it is a 1 : b 1"),
        ({"num_windows": 26}, "data.train: the tokens differ"),
    ],
)
def test_position_in_other_data_is_refused(other: dict[str, Any], expected: str) -> None:
    weights = {"a": 2.0, "b": 1.0}
    state = BatchStream(mixture_of(weights), tokens_per_step=40, micro_batch=4).state_dict()
    changed = mixture_of(**{"weights": weights, **other})
    with pytest.raises(UserError, match=expected):
        BatchStream(changed, tokens_per_step=40, micro_batch=4).load_state_dict(state)


def test_steps_too_small_are_refused() -> None:
    mixture = mixture_of({"a": 1.0})
    with pytest.raises(UserError, match=r"training.tokens_per_step: 7 is less than .* use at least 8"):
        BatchStream(mixture, tokens_per_step=7, micro_batch=1, world_size=2)
    with pytest.raises(UserError, match=r"training.micro_batch: 0"):
        BatchStream(mixture, tokens_per_step=8, micro_batch=0)


@pytest.mark.parametrize(("num_tokens", "share"), [(100, 0.2), (1000, 0.02), (5000, 0.1), (64, 0.49)])
def test_held_out_pieces_and_the_rest_are_the_whole_text(num_tokens: int, share: float) -> None:
    stream = stream_of(num_tokens, parts=3)
    kept, held = hold_out(stream, share, 9)
    ours, theirs = (part.read(0, len(part)).tolist() for part in (kept, held))
    assert sorted([*ours, *theirs]) == list(range(num_tokens)) and ours == sorted(ours) and theirs == sorted(theirs)
    assert len(held) == pytest.approx(max(share * num_tokens, 9), abs=32)
    assert min(part.num_tokens for part in held.parts) >= 9
    assert len({part.fingerprint for part in [*kept.parts, *held.parts]}) == len(kept.parts) + len(held.parts)
    if len(held.parts) > 1:  # spread: the pieces are equally far apart
        starts = [part.read(0, 1).item() for part in held.parts]
        assert np.ptp(np.diff(starts)) <= 1


def test_documents_of_a_slice() -> None:
    stream = TokenStream([MemoryTokens("a", np.arange(50, dtype="<u4"), np.array([0, 20, 30], np.uint64))] * 2)
    assert stream.document_starts.tolist() == [0, 20, 30, 50, 70, 80]
    kept, held = hold_out(stream, 0.3, 30)
    assert [part.document_starts.tolist() for part in (*kept.parts, *held.parts)] == [[0, 20, 30, 50], [0, 10]]


def test_a_text_too_short_to_hold_any_out_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.holdout: only 9 tokens"):
        hold_out(stream_of(9), 0.4, 9)
