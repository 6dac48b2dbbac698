"""Corrections of what the sampler did otherwise than the trainer: weights of tokens, on w = prox / sampled.

`prox` are log-probabilities of the policy before the step's first update as the trainer computes them, `sampled` those
that the sampler chose tokens with: the same parameters in another program, or older parameters (decoupled PPO,
arXiv:2505.24298, equation 5). A correction takes both, the mask and the segments, each `[B T]`, and returns float32
weights `[B T]`, without gradient and 0 off the mask, that multiply the loss of each token. What is rejected has weight
0 and stays in every denominator.

Bounds hold for w itself. At level "sequence" w is the geometric mean over the sequence, or with `product` the ratio of
its probability. A log ratio that is not finite counts as 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rljax.train.kl import LOG_RATIO
from rljax.train.losses import Clip
from rljax.train.sequences import means, totals
from rljax.train.view import View

LEVELS = ("token", "sequence")


def ratios(prox, sampled, mask, segments, level: str = "token", product: bool = False):
    """w of each token `[B T]`, or at level "sequence" the w of its sequence."""
    gap = jnp.where(mask, jax.lax.stop_gradient(prox) - jax.lax.stop_gradient(sampled), 0.0)
    gap = _held(jnp.where(jnp.isfinite(gap), gap, 0.0))
    if level == "sequence":
        gap = _held(totals(gap, segments) if product else means(gap, mask, segments))
    return jnp.exp(gap)


def _held(gap):
    return jnp.clip(gap, -LOG_RATIO, LOG_RATIO)


def _check(low: float, high: float, level: str = "sequence", product: bool = False):
    if not 0 <= low < high:
        raise ValueError(f"low={low} high={high}: the range of w must have 0 <= low < high")
    if level not in LEVELS:
        raise ValueError(f"level={level!r} must be one of {', '.join(LEVELS)}")
    if product and level == "token":
        raise ValueError(f"product={product} needs level='sequence': a token has no product")


@dataclass(frozen=True)
class AtLevel:
    """A range of w, which is each token's or its sequence's."""

    low: float
    high: float
    level: str = "token"
    product: bool = False

    def __post_init__(self):
        _check(self.low, self.high, self.level, self.product)


@dataclass(frozen=True)
class Truncate(AtLevel):
    """clip(w, low, high): truncated importance sampling (TIS; Yao et al. 2025, Your efficient RL
    framework secretly brings you off-policy RL training)."""

    low: float = 0.0
    high: float = 2.0

    def __call__(self, prox, sampled, mask, segments):
        w = ratios(prox, sampled, mask, segments, self.level, self.product)
        return jnp.where(mask, jnp.clip(w, self.low, self.high), 0.0)


@dataclass(frozen=True)
class Mask(AtLevel):
    """w where low <= w <= high, else 0: IcePop at level "token" (Ling team 2025, arXiv:2510.18855)."""

    low: float = 0.5
    high: float = 5.0

    def __call__(self, prox, sampled, mask, segments):
        w = ratios(prox, sampled, mask, segments, self.level, self.product)
        return jnp.where(mask & (self.low <= w) & (w <= self.high), w, 0.0)


@dataclass(frozen=True)
class SequenceMask:
    """Each token's own w where low <= w <= high for its sequence's geometric mean, else 0: masked importance sampling.

    (MIS, as in NeMo-RL.) The weights that are kept are not truncated.
    """

    low: float = 0.999
    high: float = 1.002

    def __post_init__(self):
        _check(self.low, self.high)

    def __call__(self, prox, sampled, mask, segments):
        of = ratios(prox, sampled, mask, segments, "sequence")
        return jnp.where(mask & (self.low <= of) & (of <= self.high), ratios(prox, sampled, mask, segments), 0.0)


@dataclass(frozen=True)
class OffPolicyMask:
    """The loss `of`, but 0 where A < 0 in sequences that the policy has left: mean(sampled - logp) > delta.

    OPSM of DeepSeek-V3.2 (arXiv:2512.02556, section 3.1). It compares with the policy being trained, not with `prox`,
    and reads advantages, so it is a loss around a loss.
    """

    of: Callable[[View], tuple] = Clip()
    delta: float = 0.5

    def __post_init__(self):
        if self.delta < 0:
            raise ValueError(f"delta={self.delta} must be 0 or above")

    def __call__(self, view: View):
        loss, seen = self.of(view)
        left = means(view.sampled - jax.lax.stop_gradient(view.logp), view.mask, view.segments) > self.delta
        drop = left & (view.advantages < 0)
        return jnp.where(drop, 0.0, loss), {**seen, "off_policy_fraction": drop}
