"""Win rates from verdicts on pairs of answers: order swapped, length-controlled, with bootstrap intervals.

N pairs, R resamples. A verdict is the probability that the answer shown first is better; 0.5 is a tie.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Outcome = Literal["A", "B", "tie"]
_RESAMPLES = 1000
_RIDGE = 1e-2
"""Keeps the coefficients finite when one side wins every pair."""
_MOST_LOGIT = 14.0


def combined(a_first: float | None, b_first: float | None) -> float | None:
    """The preference for A from both orders: the mean of log-odds, in which a constant position bias cancels.

    Verdicts that contradict each other give 0.5. None if one is missing, because the other includes the bias for its
    position.
    """
    if a_first is None or b_first is None:
        return None
    return 1 / (1 + math.exp(-(_logit(a_first) - _logit(b_first)) / 2))


def _logit(p: float) -> float:
    if not 0 < p < 1:
        return math.copysign(_MOST_LOGIT, p - 0.5)
    return max(-_MOST_LOGIT, min(_MOST_LOGIT, math.log(p / (1 - p))))


def outcome(preference: float, margin: float = 0.0) -> Outcome:
    """A wins above 0.5 by more than the margin, B below; a tie otherwise."""
    distance = preference - 0.5
    if abs(distance) <= max(margin, 1e-9):
        return "tie"
    return "A" if distance > 0 else "B"


VALUES: dict[Outcome, float] = {"A": 1.0, "tie": 0.5, "B": 0.0}


def length_controlled(values_RN: Array, differences_RN: Array) -> Array:
    """The rate at which A would win at equal lengths, as AlpacaEval 2 controls for it.

    logit P(A wins) = θ + φ·tanh(Δ/σ), with Δ the length of A's answer minus that of B's and σ the standard deviation
    of Δ; fitted by Newton's method with a ridge of 0.01, evaluated at Δ = 0: sigmoid(θ). NaN where Δ is the same
    for all pairs and not 0: length then cannot be separated from quality.
    """
    is_same_R = (differences_RN == differences_RN[:, :1]).all(axis=1) & (differences_RN[:, 0] != 0)
    spread_R1 = differences_RN.std(axis=1, keepdims=True)
    x_RN = np.tanh(differences_RN / np.where(spread_R1 > 0, spread_R1, 1.0))
    theta_R, phi_R = np.zeros(len(values_RN)), np.zeros(len(values_RN))
    for _ in range(60):
        p_RN = 1 / (1 + np.exp(-(theta_R[:, None] + phi_R[:, None] * x_RN)))
        error_RN, weight_RN = values_RN - p_RN, p_RN * (1 - p_RN)
        g0, g1 = error_RN.sum(axis=1) - _RIDGE * theta_R, (error_RN * x_RN).sum(axis=1) - _RIDGE * phi_R
        h00, h11 = weight_RN.sum(axis=1) + _RIDGE, (weight_RN * x_RN**2).sum(axis=1) + _RIDGE
        h01 = (weight_RN * x_RN).sum(axis=1)
        determinant = h00 * h11 - h01**2
        step_theta, step_phi = (h11 * g0 - h01 * g1) / determinant, (h00 * g1 - h01 * g0) / determinant
        theta_R, phi_R = theta_R + step_theta.clip(-2, 2), phi_R + step_phi.clip(-2, 2)
        if max(abs(step_theta).max(), abs(step_phi).max()) < 1e-10:
            break
    return np.where(is_same_R, np.nan, 1 / (1 + np.exp(-theta_R)))


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate with its 95 % bootstrap interval over prompts; Wilson's where all outcomes are the same."""

    value: float
    low: float
    high: float


def rates(values: Sequence[float], differences: Sequence[float], *, seed: int = 0) -> tuple[Rate, Rate | None]:
    """The plain win rate (ties count half) and the length-controlled one, None where it is not identifiable."""
    values_N, differences_N = np.array(values, float), np.array(differences, float)
    plain, controlled = float(values_N.mean()), float(length_controlled(values_N[None], differences_N[None])[0])
    index_RN = np.random.default_rng(seed).integers(len(values_N), size=(_RESAMPLES, len(values_N)))
    plain_R = values_N[index_RN].mean(axis=1)
    controlled_R = np.concatenate(
        [length_controlled(values_N[part], differences_N[part]) for part in np.array_split(index_RN, 10)]
    )
    if (values_N == values_N[0]).all():  # resamples are all alike, which says nothing about other prompts
        low, high = _wilson(plain, len(values_N))
        found = [Rate(value, min(low, value), max(high, value)) for value in (plain, controlled)]
    else:
        found = [_rate(plain, plain_R), _rate(controlled, controlled_R)]
    return found[0], None if math.isnan(controlled) else found[1]


def _rate(value: float, samples_R: Array) -> Rate:
    low, high = np.nanquantile(samples_R, [0.025, 0.975]) if not np.isnan(value) else (value, value)
    return Rate(value, float(low), float(high))


def _wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of ``count`` independent outcomes."""
    z = 1.959964
    middle, scale = share + z**2 / (2 * count), 1 + z**2 / count
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often a judge agrees with people."""

    num_pairs: int
    agreement: float
    """Share of pairs with the same outcome (A, B or tie)."""
    agreement_without_ties: float | None
    """The same among pairs that neither side called a tie."""
    kappa: float | None
    """Cohen's: 0 is chance at these shares of outcomes, 1 is full agreement; None if both are constant."""


def agreement(judged: Sequence[Outcome], given: Sequence[Outcome]) -> Agreement:
    pairs = list(zip(judged, given, strict=True))
    same = sum(mine == other for mine, other in pairs) / len(pairs)
    decided = [mine == other for mine, other in pairs if "tie" not in (mine, other)]
    ours, theirs = Counter(judged), Counter(given)
    chance = sum(ours[name] * theirs[name] for name in VALUES) / len(pairs) ** 2
    kappa = (same - chance) / (1 - chance) if chance < 1 else None
    return Agreement(len(pairs), same, sum(decided) / len(decided) if decided else None, kappa)
