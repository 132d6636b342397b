"""Batches of one rank. The samples of a step do not depend on the number of ranks or on the micro-batch size."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.core.sizes import at_least
from dwindle.data.mixture import Mixture


class BatchStream:
    """The micro-batches of one rank; the position is one integer, the next global sample.

    A step consists of the samples [g, g + S), S = tokens_per_step // seq_len. Each rank takes a contiguous slice;
    slices differ by at most one sequence. Every rank gets the same number of micro-batches, because sharded training
    needs the same number of collectives on all ranks. No micro-batch exceeds ``micro_batch`` sequences, and sizes
    within a rank differ by at most one. A micro-batch can be smaller than the others, or even empty (only if S is not a
    multiple of ``world_size``), so losses must be weighted by their tokens.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        tokens_per_step: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        first_sample: int = 0,
    ) -> None:
        assert 0 <= rank < world_size
        self.mixture = mixture
        self.seq_len = mixture.seq_len
        self.sequences_per_step = tokens_per_step // self.seq_len
        self.rank = rank
        self.world_size = world_size
        self.next_sample = first_sample
        self.num_predictions = 0
        """Tokens that are learned in the step that ``next_step`` returned last, over all ranks."""
        at_least(1, **{"training.micro_batch": micro_batch})
        if self.sequences_per_step < world_size:
            raise UserError(
                f"training.tokens_per_step: {tokens_per_step} is less than one sequence of {self.seq_len} tokens "
                f"per process ({world_size}): use at least {self.seq_len * world_size}"
            )
        largest_slice = -(-self.sequences_per_step // world_size)
        self.num_micro_batches = -(-largest_slice // micro_batch)

    @property
    def num_tokens_per_step(self) -> int:
        """Tokens per step over all ranks (the requested number, rounded down to whole sequences)."""
        return self.sequences_per_step * self.seq_len

    def next_step(self) -> list[Tensor]:
        """This rank's micro-batches of the next step: int64 [sequences, seq_len + 1] each (see ``data.packing``)."""
        first, last = _slice(self.sequences_per_step, self.rank, self.world_size)
        step = []
        for number in range(self.num_micro_batches):
            start, stop = _slice(last - first, number, self.num_micro_batches)
            begin = self.next_sample + first
            step.append(self._batch(begin + start, begin + stop))
        next_step = self.next_sample + self.sequences_per_step
        self.num_predictions = self.mixture.num_predictions(self.next_sample, next_step)
        self.next_sample = next_step
        return step

    def state_dict(self) -> dict[str, Any]:
        """The position and the identity of the data, as JSON; the same on every rank."""
        return {"next_sample": self.next_sample, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; other data is an error. The number of ranks and the step size may change."""
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise UserError(_MISMATCH[key].format(was=_brief(state.get(key)), now=_brief(value)))
        self.next_sample = int(state["next_sample"])

    def _identity(self) -> dict[str, Any]:
        mixture = self.mixture
        return {
            "seed": mixture.seed,
            "seq_len": mixture.seq_len,
            "turns": {source.name: t for source, t in zip(mixture.sources, mixture.turns, strict=True)},
            "fingerprints": mixture.fingerprints,
        }

    def _batch(self, start: int, stop: int) -> Tensor:
        batch = np.empty((stop - start, *self.mixture.sample_shape), dtype=np.int64)
        for row, g in enumerate(range(start, stop)):
            batch[row] = self.mixture.sample(g)
        return torch.from_numpy(batch)


_MISMATCH = {
    "seed": "data.seed: the saved run used {was}, now it is {now}: use the same seed to resume",
    "seq_len": "data.seq_len: the saved run used {was}, now it is {now}: use the same length to resume",
    "turns": "data.sources: the saved run mixed {was}, now it is {now}: use the same sources and weights to resume",
    "fingerprints": "data.train: the tokens differ from those of the saved run: use the same files to resume",
}


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return " : ".join(f"{name} {count}" for name, count in value.items())
    return str(value)


def _slice(total: int, number: int, count: int) -> tuple[int, int]:
    """Bounds of slice ``number`` of ``count`` contiguous slices whose sizes differ by at most one."""
    return total * number // count, total * (number + 1) // count
