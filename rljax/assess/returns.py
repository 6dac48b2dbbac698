"""Sums over the tokens to come, and how critics and batches are measured against them.

A token off the mask (an observation, padding) is no step of the decision process: what is carried from the tokens
after it passes it unchanged, neither discounted nor reset.
"""

import numpy as np
from jaxtyping import Bool, Float

from rljax.assess.experience import masked


def discounted(
    x: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"], decay: float | Float[np.ndarray, "B"]
) -> Float[np.ndarray, "B T"]:
    """y_t = x_t + decay y_next, `next` being the row's next token of the mask; 0 off the mask."""
    columns, chosen = np.ascontiguousarray(masked(x, mask).T), np.ascontiguousarray(mask.T)  # a step reads one stretch
    carry = np.zeros(len(x))
    for t in reversed(range(len(columns))):
        carry = np.where(chosen[t], columns[t] + decay * carry, carry)
        columns[t] = carry
    return masked(columns.T, mask)


def following(
    x: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"], last: Float[np.ndarray, "B"]
) -> Float[np.ndarray, "B T"]:
    """x at the row's next token of the mask; `last` where there is none."""
    end = x.shape[1]
    at = np.where(mask, np.arange(end)[None], end)
    after = np.full_like(at, end)
    after[:, :-1] = np.minimum.accumulate(at[:, :0:-1], 1)[:, ::-1]
    return np.take_along_axis(np.concatenate([x, last[:, None]], 1), after, 1)


def whiten(x: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the mask, the variance unbiased; 0 off it.

    0 too where there is but one token, which has no variance.
    """
    x, n = masked(x, mask), mask.sum()
    if n < 2:
        return np.zeros_like(x)
    centered = masked(x - x.sum() / n, mask)
    return centered / np.sqrt((centered**2).sum() / (n - 1) + 1e-8)


def explained_variance(
    values: Float[np.ndarray, "B T"], returns: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]
) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 for a perfect critic, 0 for a constant.

    NaN where the returns do not vary.
    """
    values, returns = (np.float64(x)[mask] for x in (values, returns))
    if not len(returns) or np.ptp(returns) == 0:
        return float("nan")
    return float(1 - np.var(returns - values) / np.var(returns))
