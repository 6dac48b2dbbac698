"""Objectives: an advantage, a loss, a reduction and regularizers joined into the thing that is optimized."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxtyping import Array, Float

from rljax.assess.advantages import GAE
from rljax.train.kl import AdaptiveKL, k3
from rljax.train.losses import ValueLoss
from rljax.train.reductions import token_mean
from rljax.types import Assessed


@dataclass(frozen=True)
class Term:
    """One more loss that is added: its coefficient, its reduction, and which tokens it is a mean over, if not all."""

    loss: Callable
    weight: float
    reduction: Callable = token_mean
    over: Callable | None = None  # Assessed -> bool [B T], of which those that the mask excludes do not count


@dataclass(frozen=True)
class Critic:
    """How values are learned.

    `returns` makes the targets (`GAE.returns`); None: those of the objective's own advantage. A shared critic's loss
    is added with `weight`; one with a backbone of its own has an optimizer of its own instead, and learns alone for the
    first `warmup` steps. With `normalize`, it predicts returns less their running mean over their running deviation.
    """

    loss: ValueLoss = ValueLoss()
    returns: GAE | None = None
    weight: float = 0.1
    warmup: int = 0
    normalize: bool = False

    def __post_init__(self):
        if self.weight < 0 or self.warmup < 0:
            raise ValueError(f"weight={self.weight} warmup={self.warmup}: neither may be below 0")


class Weights(NamedTuple):
    """What the loss of each token counts, by term."""

    loss: Float[Array, "B T"]
    kl: Float[Array, "B T"] | None
    extra: tuple[Float[Array, "B T"], ...]


@dataclass(frozen=True)
class Objective:
    """sum over tokens of weight * (correction * loss + kl * D(policy, reference) - entropy * H), and of extra terms.

    `advantage` is None where the loss needs none. A KL coefficient above 0 needs a reference role: `kl` is that of the
    loss, in the form `divergence`, and `kl_in_reward` that of k1, subtracted from each token's reward. `adaptive` moves
    whichever of the two is set.

    The trust region is centered on the policy itself where each completion is trained once; else on the sampler's
    log-probabilities or, if `proximal`, on the actor as the step began, whose are computed once more (decoupled PPO,
    arXiv:2505.24298). `correction` weighs tokens by how far that center is from the sampler.
    """

    loss: Callable  # View -> loss of each token, what to report
    advantage: Callable | None = None
    reduction: Callable = token_mean
    kl: float = 0.0
    divergence: Callable = k3
    kl_in_reward: float = 0.0
    adaptive: AdaptiveKL | None = None
    entropy: float = 0.0
    correction: Callable | None = None
    proximal: bool = False
    drop_truncated: bool = False  # completions cut off by max_new are not trained, but count in their group
    critic: Critic | None = None
    extra: tuple[Term, ...] = ()

    def __post_init__(self):
        for name in ("kl", "kl_in_reward"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 (off) or above")
        if self.adaptive and not self.kl and not self.kl_in_reward:
            raise ValueError("adaptive needs a coefficient to start from: set kl or kl_in_reward above 0")

    @property
    def needs_reference(self) -> bool:
        losses = (self.loss, *(term.loss for term in self.extra))
        return self.kl > 0 or self.kl_in_reward > 0 or any(getattr(loss, "needs_reference", False) for loss in losses)

    def weights(self, batch: Assessed, kl) -> Weights:
        """Of all rows of an update; `kl` is the coefficient now."""
        mask, segments = batch.rollout.mask, batch.rollout.tokens.segments
        each = self.reduction(mask, segments)

        def of(term: Term):
            part = mask if term.over is None else mask & term.over(batch)
            return term.weight * term.reduction(part, segments)

        return Weights(each, each * kl if self.kl else None, tuple(of(term) for term in self.extra))

    def with_critic(self) -> "Objective":
        """For a policy that shares its backbone with its critic."""
        return replace(self, extra=(*self.extra, Term(self.critic.loss, self.critic.weight, self.reduction)))

    def of_critic(self) -> "Objective":
        """For a critic with a backbone of its own."""
        return Objective(self.critic.loss, reduction=self.reduction, critic=self.critic)
