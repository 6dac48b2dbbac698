"""Per-token losses: functions of log-probabilities and advantages alone. No models, no meshes, no reductions.

A loss takes `logp` of the policy being trained, `old` of the policy that the trust region is centered on and
`advantages`, all float32 `[B T]`, and returns the loss of each token and a dict of per-token values worth averaging.
Values off the mask are finite and ignored.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

LOG_RATIO = 20.0  # |log ratio| beyond which exp would overflow to nothing useful


@dataclass(frozen=True)
class Clip:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7) with separate lower and upper clips.

    -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logp - old). `dual`, if set, bounds the loss of tokens of
    negative advantage by -dual A (Ye et al. 2020, equation 5).
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self):
        if not 0 <= self.low < 1 or self.high < 0:
            raise ValueError(f"low={self.low} high={self.high}: the clip range 1 - low .. 1 + high must hold 1")
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"dual={self.dual} must be above 1")

    def __call__(self, logp, old, advantages):
        ratio = jnp.exp(jnp.clip(logp - old, -LOG_RATIO, LOG_RATIO))
        free = -ratio * advantages
        held = -jnp.clip(ratio, 1 - self.low, 1 + self.high) * advantages
        loss = jnp.maximum(free, held)
        clipped = held > free
        seen = {
            "ratio": ratio,
            "clip_fraction/low": clipped & (ratio < 1 - self.low),
            "clip_fraction/high": clipped & (ratio > 1 + self.high),
        }
        if self.dual is not None:
            bound = -self.dual * advantages
            seen["clip_fraction/dual"] = (advantages < 0) & (loss > bound)
            loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
        return loss, seen


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """-logp: supervised fine-tuning."""

    def __call__(self, logp, old, advantages):
        return -logp, {}


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Schulman's third estimator of KL(policy || reference) at sampled tokens: e^-d - 1 + d with d = logp - ref_logp.

    Not negative, and unbiased in value. Its gradient on policy is that of KL(reference || policy).
    """
    d = jnp.clip(logp - ref_logp, -LOG_RATIO, LOG_RATIO)
    return jnp.expm1(-d) + d
