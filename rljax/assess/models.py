"""Rewards that a model gives: a role scores every token, and these say which scores count."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from rljax.assess.experience import placed
from rljax.types import Rollout


@dataclass(frozen=True)
class ModelReward:
    """A reward model's score of a completion, read at its last token (Ouyang et al. 2022, arXiv:2203.02155)."""

    role: str = "reward"
    weight: float = 1.0

    def __call__(self, scores: Float[np.ndarray, "B T"], rollout: Rollout):
        """(the reward of each completion [B], None): the rewards of tokens are those of steps."""
        at = np.maximum(rollout.length - 1, 0)
        return self.weight * scores[np.arange(len(at)), at], None


@dataclass(frozen=True)
class StepReward:
    """A process reward model's probability that a step is right, read at the token that ends each step.

    "sum" rewards every step where it ends; "min" and "last" reward the completion, by its worst step (Lightman et al.
    2023, arXiv:2305.20050, appendix F) or its last. A completion without a step has reward 0.
    """

    separator: int  # the id that ends a step
    reduce: str = "min"
    role: str = "reward"
    weight: float = 1.0

    def __post_init__(self):
        if self.reduce not in ("min", "last", "sum"):
            raise ValueError(f"reduce={self.reduce!r} must be 'min', 'last' or 'sum'")

    def __call__(self, scores: Float[np.ndarray, "B T"], rollout: Rollout):
        """(the reward of each completion [B], of its tokens [B T] or None). With both, the first only reports."""
        steps = rollout.mask & (rollout.tokens.ids == self.separator)
        right = np.where(steps, self.weight / (1 + np.exp(-np.where(steps, scores, 0.0).astype(np.float64))), 0.0)
        if self.reduce == "sum":
            return right.sum(1), right
        if self.reduce == "min":
            worst = np.min(np.where(steps, right, np.inf), 1)
            return np.where(steps.any(1), worst, 0.0), None
        last = placed(np.ones(len(steps)), steps) > 0
        return np.sum(np.where(last, right, 0.0), 1), None
