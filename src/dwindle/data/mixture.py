"""Sample g of a weighted mixture: a pure function of the seed and one integer.

Legend: g = global sample index; L = seq_len; a window has L + 1 tokens, which give L predictions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError
from dwindle.data.permutation import Permutation
from dwindle.data.token_stream import TokenStream

MAX_PERIOD = 1 << 16


class Windows(ABC):
    """One named source of equally long windows, reshuffled every epoch."""

    def __init__(self, name: str, stream: TokenStream, seq_len: int, seed: int, num_windows: int) -> None:
        self.name = name
        self.stream = stream
        self.seq_len = seq_len
        self.seed = seed
        self.num_windows = num_windows
        self._epoch = -1
        self._order = Permutation(1, "")

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one window."""
        return (self.seq_len + 1,)

    @abstractmethod
    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Window ``index``, in the order of the source."""

    def num_predictions(self, sample: int) -> int:
        """Tokens of a sample that are learned."""
        return self.seq_len

    def window_index(self, sample: int) -> int:
        """The window of this source's sample number ``sample``, in any epoch."""
        epoch, index = divmod(sample, self.num_windows)
        if epoch != self._epoch:
            self._order = Permutation(self.num_windows, f"{self.seed}/{self.name}/{epoch}")
            self._epoch = epoch
        return self._order(index)

    def sample(self, sample: int) -> npt.NDArray[np.int64]:
        """Sample number ``sample`` of this source; there is no last epoch."""
        return self.window(self.window_index(sample))


class PackedDataset(Windows):
    """A text: its token stream split into windows.

    Window i has the tokens [i·L, i·L + L]: adjacent windows share one token, so every token except the first is
    predicted exactly once per epoch. An incomplete window at the end of the stream is dropped.
    """

    def __init__(self, name: str, stream: TokenStream, seq_len: int, seed: int, option: str = "data.train") -> None:
        super().__init__(name, stream, seq_len, seed, num_windows(stream, seq_len, option))

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Window ``index``, in text order."""
        start = index * self.seq_len
        return self.stream.read(start, start + self.seq_len + 1)


class Mixture:
    """Weighted sources; the weights are exact ratios of tokens at any point of the run.

    All windows have the same length, so ratios of samples are ratios of tokens. The sources alternate in a fixed cycle
    (see ``turn_cycle``): after any number of samples each source is within one sample of its exact share. Sample g, and
    the position in each source, are functions of g alone.
    """

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float], option: str = "data.sources") -> None:
        assert sources and len(sources) == len(weights)
        self.sources = list(sources)
        self.seq_len = sources[0].seq_len
        self.seed = sources[0].seed
        self.sample_shape = sources[0].sample_shape
        alike = (self.seq_len, self.seed, self.sample_shape)
        assert all((s.seq_len, s.seed, s.sample_shape) == alike for s in sources)
        names = [source.name for source in sources]
        assert len(set(names)) == len(names)
        for name, weight in zip(names, weights, strict=True):
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(f"{option}.{name}.weight: {weight} must be above 0: remove the source instead")
        self.turns = whole_shares(weights)
        self.period = sum(self.turns)
        self._source_of, self._turn_of = turn_cycle(self.turns)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Content hash of each source."""
        return {source.name: source.stream.fingerprint for source in self.sources}

    def locate(self, g: int) -> tuple[int, int]:
        """(source, sample number within that source) of global sample ``g``."""
        assert g >= 0
        cycle, turn = divmod(g, self.period)
        source = int(self._source_of[turn])
        return source, cycle * self.turns[source] + int(self._turn_of[turn])

    def num_predictions(self, start: int, stop: int) -> int:
        """Tokens that are learned in the global samples [start, stop)."""
        found = (self.locate(g) for g in range(start, stop))
        return sum(self.sources[source].num_predictions(sample) for source, sample in found)

    def sample(self, g: int) -> npt.NDArray[np.int64]:
        """Global sample ``g``: token ids [L + 1], or planes of packed conversations."""
        source, sample = self.locate(g)
        return self.sources[source].sample(sample)

    def counts(self, g: int) -> dict[str, int]:
        """Number of samples from each source among the first ``g``."""
        cycles, rest = divmod(g, self.period)
        partial = np.bincount(self._source_of[:rest], minlength=len(self.sources))
        return {
            source.name: cycles * turns + int(more)
            for source, turns, more in zip(self.sources, self.turns, partial, strict=True)
        }

    def epochs(self, g: int) -> dict[str, float]:
        """Epochs of each source after ``g`` samples."""
        counts = self.counts(g)
        return {source.name: counts[source.name] / source.num_windows for source in self.sources}


def num_windows(stream: TokenStream, seq_len: int, option: str) -> int:
    """Number of windows of ``seq_len`` + 1 tokens in a stream; an error if there is none."""
    count = (len(stream) - 1) // seq_len
    if count < 1:
        raise UserError(
            f"{option}: only {len(stream)} tokens, a sequence needs {seq_len + 1}: "
            "give more text or a smaller data.seq_len"
        )
    return count


def whole_shares(weights: Sequence[float]) -> list[int]:
    """The smallest integers in the ratio of the weights: 0.7, 0.2, 0.1 become 7, 2, 1.

    If their sum would exceed 65536, they are rounded to that sum (largest remainders, at least 1 each).
    """
    exact = [Fraction(str(float(weight))) for weight in weights]
    total = sum(exact)
    denominator = math.lcm(*((share / total).denominator for share in exact))
    if denominator <= MAX_PERIOD:
        return [int(share / total * denominator) for share in exact]
    quotas = [share / total * MAX_PERIOD for share in exact]
    turns = [max(1, math.floor(quota)) for quota in quotas]
    by_need = sorted(range(len(turns)), key=lambda i: (turns[i] - quotas[i], i))
    missing = MAX_PERIOD - sum(turns)
    for i in by_need[: max(missing, 0)]:
        turns[i] += 1
    common = math.gcd(*turns)
    return [count // common for count in turns]


def turn_cycle(turns: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The cycle in which sources alternate: (source of each turn, earlier turns of that source in the cycle).

    Tijdeman's rule ("The chairman assignment problem", 1980): with k sources of shares w, turn t goes to the source
    with the earliest deadline among those whose deficit w·t - count has reached 1/(2k - 2). Every count then stays
    within 1 - 1/(2k - 2) of its share at all times. Choosing the largest deficit instead does not guarantee that for
    more than two sources. The factor period·(2k - 2) keeps all quantities integer.
    """
    period, k = sum(turns), len(turns)
    margin = max(2 * k - 2, 1)
    counts = [0] * k
    source_of = np.empty(period, dtype=np.int64)
    turn_of = np.empty(period, dtype=np.int64)
    for t in range(1, period + 1):
        chosen, least_slack = -1, 0
        for i, wanted in enumerate(turns):
            deficit = (wanted * t - counts[i] * period) * margin
            if deficit < period:
                continue
            slack = period * (margin - 1) - deficit  # deadline of i = slack / wanted
            if chosen < 0 or slack * turns[chosen] < least_slack * wanted:
                chosen, least_slack = i, slack
        assert chosen >= 0
        source_of[t - 1] = chosen
        turn_of[t - 1] = counts[chosen]
        counts[chosen] += 1
    return source_of, turn_of
