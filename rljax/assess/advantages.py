"""Advantages of scalar rewards: functions of (rewards [B], groups [B]) that know no model and no mesh.

`groups` numbers the prompt that a row answers; rows of one group need not be adjacent. A NaN reward did not apply: its
row is left out of its group's statistics and has advantage 0. These run on the host, in float64.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class GroupRelative:
    """GRPO (arXiv:2402.03300, equation in section 4.1.2): (r - mean) / (std + eps) within the group, std with ddof 1.

    `scale = False` leaves out the division (Dr. GRPO, arXiv:2503.20783). Exactly 0 where all of a group's rewards are
    equal, and where a group has but one.
    """

    scale: bool = True
    eps: float = 1e-6

    def __call__(self, rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B"]:
        rewards = np.asarray(rewards, np.float64)
        out = np.zeros_like(rewards)
        for rows in _members(groups, ~np.isnan(rewards)):
            r = rewards[rows]
            if len(r) > 1 and np.ptp(r) > 0:
                out[rows] = (r - r.mean()) / (r.std(ddof=1) + self.eps if self.scale else 1.0)
        return out


@dataclass(frozen=True)
class Shuffled:
    """A control: another estimator's advantages, dealt at random to the rows: nothing is learned from reward."""

    of: GroupRelative = GroupRelative()
    seed: int = 0

    def __call__(self, rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B"]:
        dealt = np.random.default_rng([self.seed, len(rewards), int(np.nansum(rewards) * 1e6)])
        return dealt.permutation(self.of(rewards, groups))


def _members(groups: Int[np.ndarray, "B"], valid: np.ndarray) -> list[np.ndarray]:
    """Indices of each group's valid rows."""
    index = np.flatnonzero(valid)
    index = index[np.argsort(np.asarray(groups)[index], kind="stable")]
    if not len(index):
        return []
    return np.split(index, np.flatnonzero(np.diff(np.asarray(groups)[index])) + 1)
