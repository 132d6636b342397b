"""Fixed sets of windows: in text order for validation, random by seed for calibration."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.data.mixture import num_windows
from dwindle.data.permutation import Permutation
from dwindle.data.token_stream import TokenStream


def spread_windows(stream: TokenStream, seq_len: int, max_tokens: int, option: str) -> Tensor:
    """int64 [n, seq_len + 1]: all windows in order, or evenly spaced ones with at most ``max_tokens`` in total."""
    available = num_windows(stream, seq_len, option)
    wanted = min(available, max_tokens // seq_len)
    if wanted < 1:
        raise UserError(f"{option}: {max_tokens} tokens are less than one sequence of {seq_len}: allow more")
    windows = np.empty((wanted, seq_len + 1), dtype=np.int64)
    for row in range(wanted):
        start = row * available // wanted * seq_len
        windows[row] = stream.read(start, start + seq_len + 1)
    return torch.from_numpy(windows)


def random_windows(
    stream: TokenStream, num_sequences: int, seq_len: int, seed: int, num_held_out: int, option: str
) -> tuple[Tensor, Tensor]:
    """int64 [num_sequences, seq_len]: disjoint windows in random order; of a short text, overlapping ones. And at most
    ``num_held_out`` further windows, none of a short text.
    """
    available = len(stream) // seq_len
    if available < 1:
        raise UserError(
            f"{option}: only {len(stream)} tokens, a sequence needs {seq_len}: give more text or a smaller seq_len"
        )
    order = Permutation(max(available, num_sequences), f"{seed}/calibration")
    starts = [order(row) * seq_len for row in range(max(min(num_sequences + num_held_out, available), num_sequences))]
    if available < num_sequences:
        last_start = len(stream) - seq_len
        starts = [order(row) * last_start // (num_sequences - 1) for row in range(num_sequences)]
    windows = torch.from_numpy(np.stack([stream.read(start, start + seq_len) for start in starts]))
    return windows[:num_sequences], windows[num_sequences:]
