"""Rotary position embedding: the angular frequencies of a head, and how models stretch them to longer contexts.

A scaling turns frequencies, of which each head has half its width, from the fastest on, into others. Frequencies are
NumPy: sizes and settings decide them, so that programs have them as constants.
"""

from dataclasses import dataclass
from math import log, pi

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    amplitude = 1.0

    def __post_init__(self):
        _at_least_one(self, "factor")

    def __call__(self, frequency: Float[np.ndarray, "H2"], theta: float) -> Float[np.ndarray, "H2"]:
        return frequency / self.factor


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's: frequencies that turn less than `low` times within the `original` context are divided by `factor`,
    those that turn more than `high` times stay, and what lies between is interpolated (arXiv:2407.21783)."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    amplitude = 1.0

    def __post_init__(self):
        _at_least_one(self, "factor", "original")
        if not 0 < self.low < self.high:
            raise ValueError(f"low={self.low} high={self.high}: 0 < low < high must hold")

    def __call__(self, frequency: Float[np.ndarray, "H2"], theta: float) -> Float[np.ndarray, "H2"]:
        turns = self.original * frequency / (2 * pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): divided by `factor` where a dimension turns less than `slow` times
    within the `original` context, kept where more than `fast` times, and linear in the dimension between.

    Cosines and sines are multiplied by `amplitude`. The temperature that goes with it is the decoder's `query_scale`.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    amplitude: float = 1.0
    rounded: bool = True  # the bounds of what is interpolated, to whole dimensions

    def __post_init__(self):
        _at_least_one(self, "factor", "original")
        if not 0 < self.slow < self.fast:
            raise ValueError(f"slow={self.slow} fast={self.fast}: 0 < slow < fast must hold")

    def __call__(self, frequency: Float[np.ndarray, "H2"], theta: float) -> Float[np.ndarray, "H2"]:
        half = len(frequency)
        turning = lambda times: half * log(self.original / (times * 2 * pi)) / log(theta)  # the dimension that does
        first, last = turning(self.fast), turning(self.slow)
        if self.rounded:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        kept = 1 - np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


def magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN scales queries and keys by where positions are stretched by a factor (equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


def frequencies(head: int, theta: float, scaling=None) -> tuple[Float[np.ndarray, "H2"], float]:
    """The angle that a position adds in each pair of dimensions, and what cosines and sines are multiplied by."""
    frequency = theta ** (-np.arange(head // 2) / (head // 2))
    if scaling is None:
        return frequency.astype(np.float32), 1.0
    return scaling(frequency, theta).astype(np.float32), scaling.amplitude


def _at_least_one(scaling, *fields: str) -> None:
    for field in fields:
        if getattr(scaling, field) < 1:
            raise ValueError(f"{field}={getattr(scaling, field)} must be at least 1")
