"""Completions of one prompt compared. A group is known by its number, wherever in the batch its rows lie."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int


def relative(
    f: Callable, groups: Int[np.ndarray, "B"], x: Float[np.ndarray, "B"], *more: np.ndarray
) -> Float[np.ndarray, "B"]:
    """f(x, *more) of each group's rows, back in their rows; where x is NaN, it stays NaN and f does not see the row.

    Exactly 0 in a group whose x are all equal, and in one of a single row: there is nothing to compare.
    """
    x = np.asarray(x, np.float64)
    out = np.where(np.isnan(x), np.nan, 0.0)
    for rows in _members(np.asarray(groups), ~np.isnan(x)):
        if np.ptp(x[rows]) > 0:
            out[rows] = f(x[rows], *(a[rows] for a in more))
    return out


def less_mean(x: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    return x - x.mean()


def varied(correct: Bool[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> Bool[np.ndarray, "B"]:
    """Rows of the groups that dynamic sampling keeps: 0 < correct completions < all (DAPO, arXiv:2503.14476, eq. 11).

    `correct` is what the verifier said, not a shaped reward, by whose length penalty every group would differ.
    """
    _, group, n = np.unique(groups, return_inverse=True, return_counts=True)
    right = np.bincount(group, np.asarray(correct, np.float64))
    return ((right > 0) & (right < n))[group]


def _members(groups: Int[np.ndarray, "B"], valid: Bool[np.ndarray, "B"]) -> list[Int[np.ndarray, "n"]]:
    """Indices of each group's valid rows."""
    index = np.flatnonzero(valid)
    index = index[np.argsort(groups[index], kind="stable")]
    if not len(index):
        return []
    return np.split(index, np.flatnonzero(np.diff(groups[index])) + 1)
