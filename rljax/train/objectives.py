"""Objectives: an advantage, a loss, a reduction and regularizers joined into the thing that is optimized."""

from collections.abc import Callable
from dataclasses import dataclass

from rljax.assess.advantages import GroupRelative
from rljax.train.losses import Clip, NegativeLogLikelihood
from rljax.train.reductions import token_mean


@dataclass(frozen=True)
class Objective:
    """sum over tokens of weight * (loss + kl * k3(policy, reference) - entropy * H).

    `advantage` is None where the loss needs none. `kl` above 0 needs a reference role.
    """

    loss: Callable
    advantage: Callable | None = None
    reduction: Callable = token_mean
    kl: float = 0.0
    entropy: float = 0.0

    def __post_init__(self):
        if self.kl < 0:
            raise ValueError(f"kl={self.kl} must be 0 (off) or above")


def grpo(low: float = 0.2, high: float = 0.2, kl: float = 0.0) -> Objective:
    """Group relative policy optimization (arXiv:2402.03300), with DAPO's token mean (arXiv:2503.14476)."""
    return Objective(loss=Clip(low, high), advantage=GroupRelative(), kl=kl)


def sft() -> Objective:
    """Supervised fine-tuning: the mean negative log-likelihood of the tokens to imitate."""
    return Objective(loss=NegativeLogLikelihood())
