"""Which window of which source is sample g: a pure function of the seed and one integer.

Legend: g = global sample index; L = seq_len; a window holds L + 1 tokens, so that it yields L predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError
from dwindle.data.permutation import Permutation
from dwindle.data.token_stream import TokenStream

MAX_PERIOD = 1 << 16


class PackedDataset:
    """One named source: its token stream cut into windows, in a new order every epoch.

    Window i holds tokens [i·L, i·L + L]: neighbours share one token, so every token but the very first is predicted
    exactly once per epoch. Fewer than L tokens at the end of the stream are left out.
    """

    def __init__(self, name: str, stream: TokenStream, seq_len: int, seed: int, option: str = "data.train") -> None:
        self.name = name
        self.stream = stream
        self.seq_len = seq_len
        self.seed = seed
        self.num_windows = num_windows(stream, seq_len, option)
        self._epoch = -1
        self._order = Permutation(1, "")

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Window ``index`` in the order of the text."""
        start = index * self.seq_len
        return self.stream.read(start, start + self.seq_len + 1)

    def window_index(self, sample: int) -> int:
        """The window that this source's sample number ``sample`` is, in any epoch."""
        epoch, index = divmod(sample, self.num_windows)
        if epoch != self._epoch:
            self._order = Permutation(self.num_windows, f"{self.seed}/{self.name}/{epoch}")
            self._epoch = epoch
        return self._order(index)

    def sample(self, sample: int) -> npt.NDArray[np.int64]:
        """Sample number ``sample`` of this source: token ids [L + 1]; epochs follow each other without end."""
        return self.window(self.window_index(sample))


class Mixture:
    """Weighted sources whose shares of the tokens are the weights, over any stretch of the run.

    All windows are equally long, so shares of samples are shares of tokens. The sources take turns in a fixed
    cycle (see ``turn_cycle``): after any number of samples each source is within one sample of its exact
    share. Sample g, and how far each source has come by then, follow from g alone.
    """

    def __init__(
        self, sources: Sequence[PackedDataset], weights: Sequence[float], option: str = "data.sources"
    ) -> None:
        assert sources and len(sources) == len(weights)
        self.sources = list(sources)
        self.seq_len = sources[0].seq_len
        self.seed = sources[0].seed
        assert all((s.seq_len, s.seed) == (self.seq_len, self.seed) for s in sources)
        names = [source.name for source in sources]
        assert len(set(names)) == len(names)
        for name, weight in zip(names, weights, strict=True):
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(f"{option}.{name}.weight: {weight} must be above 0: remove the source instead")
        self.turns = whole_shares(weights)
        self.period = sum(self.turns)
        self._source_of, self._turn_of = turn_cycle(self.turns)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each source, as used (weights normalised; exact up to 1/65536)."""
        return {s.name: turns / self.period for s, turns in zip(self.sources, self.turns, strict=True)}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Content of each source."""
        return {source.name: source.stream.fingerprint for source in self.sources}

    def locate(self, g: int) -> tuple[int, int]:
        """(which source, which of that source's samples) global sample ``g`` is."""
        assert g >= 0
        cycle, turn = divmod(g, self.period)
        source = int(self._source_of[turn])
        return source, cycle * self.turns[source] + int(self._turn_of[turn])

    def sample(self, g: int) -> npt.NDArray[np.int64]:
        """Token ids [L + 1] of global sample ``g``."""
        source, sample = self.locate(g)
        return self.sources[source].sample(sample)

    def counts(self, g: int) -> dict[str, int]:
        """How many of the first ``g`` samples came from each source."""
        cycles, rest = divmod(g, self.period)
        partial = np.bincount(self._source_of[:rest], minlength=len(self.sources))
        return {
            source.name: cycles * turns + int(more)
            for source, turns, more in zip(self.sources, self.turns, partial, strict=True)
        }

    def epochs(self, g: int) -> dict[str, float]:
        """How often each source has been seen after ``g`` samples."""
        counts = self.counts(g)
        return {source.name: counts[source.name] / source.num_windows for source in self.sources}

    def verify(self) -> None:
        """Check the content of every token file; raises UserError naming the damaged one."""
        for source in self.sources:
            source.stream.verify()


def num_windows(stream: TokenStream, seq_len: int, option: str) -> int:
    """Windows of ``seq_len`` + 1 tokens in a stream; refuses a stream without a single one."""
    count = (len(stream) - 1) // seq_len
    if count < 1:
        raise UserError(
            f"{option}: only {len(stream)} tokens, a sequence needs {seq_len + 1}: "
            "give more text or a smaller data.seq_len"
        )
    return count


def whole_shares(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratio of the weights: 0.7, 0.2, 0.1 become 7, 2, 1.

    Weights whose ratio needs a sum above 65536 are rounded to that sum (largest remainders, at least 1 each).
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
    """The cycle in which sources take turns: (source of each turn, how often that source had a turn before).

    Tijdeman's rule ("The chairman assignment problem", 1980): with k sources of shares w, turn t goes to the source
    with the earliest deadline among those whose deficit w·t - count has reached 1/(2k - 2). Every count then
    stays within 1 - 1/(2k - 2) of its share at all times. Taking the largest deficit instead does not
    guarantee that for more than two sources. All quantities are kept whole by the factor period·(2k - 2).
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
