"""A pseudorandom permutation in constant time and memory per position."""

from __future__ import annotations

import hashlib
from struct import unpack

_MASK = (1 << 64) - 1
_NUM_ROUNDS = 6


class Permutation:
    """A bijection of [0, n) that depends only on ``n`` and ``key``.

    A Feistel network permutes all numbers of an even number of bits; a value outside [0, n) is encrypted again (cycle
    walking, under four passes on average) until it is inside. There is no table to save: a resumed run computes
    position i directly.
    """

    def __init__(self, n: int, key: str) -> None:
        assert n >= 1
        self.n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = unpack(f"<{_NUM_ROUNDS}Q", hashlib.shake_256(key.encode()).digest(8 * _NUM_ROUNDS))

    def __call__(self, index: int) -> int:
        assert 0 <= index < self.n, (index, self.n)
        value = self._encrypt(index)
        while value >= self.n:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right


def _mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
