"""Estimators of KL(policy || reference) at tokens of the policy, and forms of them whose gradient is right too.

A form takes float32 log-probabilities `[B T]` of the policy, of the reference and, where it needs them, `old` ones of
the policy that chose the tokens; it returns float32 `[B T]`, in nats. With d = logp - ref_logp Schulman's estimators
(http://joschu.net/blog/kl-approx.html) have the values k1 = d, k2 = d^2 / 2 and k3 = e^-d - 1 + d, of which k1 and k3
are unbiased. Differentiated at the policy's own tokens, k1 gives 0 in expectation, k2 the gradient of KL(policy ||
reference), and k3 that of KL(reference || policy) (Tang and Munos 2025, arXiv:2506.09477).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LOG_RATIO = 20.0  # |log ratio| beyond which exp would overflow to nothing useful


def k1(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], old=None) -> Float[Array, "B T"]:
    """d: of either sign, and no regularizer when differentiated."""
    return logp - ref_logp


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], old=None) -> Float[Array, "B T"]:
    """d^2 / 2: biased in value, right in gradient."""
    return jnp.square(logp - ref_logp) / 2


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], old=None) -> Float[Array, "B T"]:
    """e^-d - 1 + d, d held to LOG_RATIO: not negative, unbiased in value; its gradient is of the other direction."""
    d = jnp.clip(logp - ref_logp, -LOG_RATIO, LOG_RATIO)
    return jnp.expm1(-d) + d


def _estimates_kl(of: Callable):
    if of not in (k1, k3):
        raise ValueError(f"of={getattr(of, '__name__', of)} must be k1 or k3, whose expectation is the KL divergence")


@dataclass(frozen=True)
class StraightThrough:
    """The value of one estimator with the gradient of k2, that of KL(policy || reference)."""

    of: Callable = k3

    def __call__(self, logp, ref_logp, old=None):
        through = k2(logp, ref_logp)
        return jax.lax.stop_gradient(self.of(logp, ref_logp)) + (through - jax.lax.stop_gradient(through))


@dataclass(frozen=True)
class Weighted:
    """An unbiased estimator k times exp(logp - sg(logp)), which is 1 and adds k grad logp, the score-function term.

    E[k grad logp + grad k] is the gradient of E[k] = KL(policy || reference), at the policy's own tokens. Where d is
    beyond LOG_RATIO, and k3 constant, the weight has no gradient either.
    """

    of: Callable = k3

    def __post_init__(self):
        _estimates_kl(self.of)

    def __call__(self, logp, ref_logp, old=None):
        return Unbiased(self.of)(logp, ref_logp, jax.lax.stop_gradient(logp))


@dataclass(frozen=True)
class Unbiased:
    """An unbiased estimator times policy / old (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    E over tokens of `old` of ratio k is KL(policy || reference), in value and in gradient, so this holds after the
    first update too. Where either log ratio is beyond LOG_RATIO, the ratio has no gradient.
    """

    of: Callable = k3

    def __post_init__(self):
        _estimates_kl(self.of)

    def __call__(self, logp, ref_logp, old):
        ratio = jnp.exp(jnp.clip(logp - old, -LOG_RATIO, LOG_RATIO))
        ratio = jnp.where(jnp.abs(logp - ref_logp) < LOG_RATIO, ratio, jax.lax.stop_gradient(ratio))
        return ratio * self.of(logp, ref_logp)


@dataclass(frozen=True)
class AdaptiveKL:
    """The coefficient that holds the KL divergence near a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), after n sequences of which `kl` was the mean, in nats.
    """

    target: float = 0.1
    horizon: float = 10_000

    def __post_init__(self):
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target={self.target} horizon={self.horizon} must both be above 0")

    def __call__(self, beta, kl, n):
        return beta * (1 + jnp.clip(kl / self.target - 1, -0.2, 0.2) * n / self.horizon)
