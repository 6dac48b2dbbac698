"""What an update reports, so that parts of a step add up: a mean is a sum and what it is over."""

from typing import NamedTuple

import numpy as np


class Mean(NamedTuple):
    """A sum over a sum."""

    total: float
    weight: float

    def value(self) -> float:
        return float(self.total) / max(float(self.weight), 1e-30) if self.weight else float("nan")


class Correlation(NamedTuple):
    """Pearson's, from sums over the same entries of 1, x, y, x², y² and x y."""

    n: float
    x: float
    y: float
    xx: float
    yy: float
    xy: float

    def value(self) -> float:
        n, x, y, xx, yy, xy = map(float, self)
        spread = (n * xx - x * x) * (n * yy - y * y)
        return (n * xy - x * y) / spread**0.5 if spread > 0 else float("nan")


def combine(seen: list[dict]) -> dict[str, float]:
    """The metrics of several updates as one: sums of means, the largest of maxima, the last count of skipped updates.

    What an update reports as a number (its loss, norms of its gradient) is averaged over updates by their tokens.
    """
    tokens = np.array([float(metrics["tokens"]) for metrics in seen])
    out = {}
    for name, first in seen[0].items():
        values = [metrics[name] for metrics in seen]
        if isinstance(first, Mean | Correlation):
            out[name] = type(first)(*np.sum(np.asarray(values, np.float64), 0)).value()
        elif name == "tokens":
            out[name] = float(tokens.sum())
        elif name == "skipped":
            out[name] = float(values[-1])
        elif name.endswith("/max"):
            out[name] = float(max(values))
        else:
            out[name] = float(np.average(np.asarray(values, np.float64), weights=np.maximum(tokens, 1)))
    return out
