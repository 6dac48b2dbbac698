"""Losses of single tokens and of whole sequences: functions of a `View` alone. No models, no meshes, no reductions.

r = exp(logp - old) is a token's ratio, A its advantage. A loss of whole sequences (`unit = "sequence"`) gives each
token the loss of its sequence, and suits reductions that count sequences.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from rljax.train.kl import LOG_RATIO
from rljax.train.sequences import first, means, totals
from rljax.train.view import View


def _ratio(log_ratio):
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO, LOG_RATIO))


def _surrogate(ratio, advantages, low: float, high: float):
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where clipping decides."""
    free = -ratio * advantages
    held = -jnp.clip(ratio, 1 - low, 1 + high) * advantages
    clipped = held > free
    seen = {
        "ratio": ratio,
        "clip_fraction/low": clipped & (ratio < 1 - low),
        "clip_fraction/high": clipped & (ratio > 1 + high),
    }
    return jnp.maximum(free, held), seen


def _by_sequence(seen: dict, view: View) -> dict:
    """What is one value per sequence is averaged over sequences."""
    weights = first(view.mask, view.segments).astype(jnp.float32)
    return {name: (values, weights) for name, values in seen.items()}


def _check_range(low: float, high: float):
    if not 0 <= low < 1 or high < 0:
        raise ValueError(f"low={low} high={high}: the clip range 1 - low .. 1 + high must hold 1")


@dataclass(frozen=True)
class Clip:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7) with separate lower and upper clips.

    -min(r A, clip(r, 1 - low, 1 + high) A). `dual`, if set, bounds the loss of tokens of negative advantage by -dual A
    (Ye et al. 2020, equation 5). A bound delta >= 1 + high on the ratio itself before the minimum is taken (two-sided
    clipping: INTELLECT-2, arXiv:2505.07291) is the same thing as dual = delta.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self):
        _check_range(self.low, self.high)
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"dual={self.dual} must be above 1")

    def __call__(self, view: View):
        loss, seen = _surrogate(_ratio(view.logp - view.old), view.advantages, self.low, self.high)
        if self.dual is not None:
            bound = -self.dual * view.advantages
            seen["clip_fraction/dual"] = (view.advantages < 0) & (loss > bound)
            loss = jnp.where(view.advantages < 0, jnp.minimum(loss, bound), loss)
        return loss, seen


@dataclass(frozen=True)
class SequenceClip:
    """GSPO (arXiv:2507.18071, equation 5): the clipped surrogate of s, the geometric mean of a sequence's ratios.

    With `per_token` GSPO-token (section 4.3): each token's ratio is sg(s) exp(logp - sg(logp)). Its value is the same,
    and so is its gradient where all tokens of a sequence have one advantage.
    """

    low: float = 3e-4
    high: float = 4e-4
    per_token: bool = False
    unit: ClassVar[str] = "sequence"

    def __post_init__(self):
        _check_range(self.low, self.high)

    def __call__(self, view: View):
        ratio = _ratio(means(view.logp - view.old, view.mask, view.segments))
        if self.per_token:
            ratio = jax.lax.stop_gradient(ratio) * jnp.exp(view.logp - jax.lax.stop_gradient(view.logp))
        loss, seen = _surrogate(ratio, view.advantages, self.low, self.high)
        return loss, _by_sequence(seen, view)


@dataclass(frozen=True)
class GMPO:
    """-A times the geometric mean of a sequence's clipped ratios (arXiv:2507.20673, section 3).

    Each log ratio is held pessimistically: at most `high` where A > 0, at least -`low` where A < 0.
    """

    low: float = 0.4
    high: float = 0.4
    unit: ClassVar[str] = "sequence"

    def __post_init__(self):
        if self.low <= 0 or self.high <= 0:
            raise ValueError(f"low={self.low} high={self.high}: both bounds of the log ratio must be above 0")

    def __call__(self, view: View):
        d, rises = view.logp - view.old, view.advantages > 0
        held = jnp.where(rises, jnp.minimum(d, self.high), jnp.maximum(d, -self.low))
        ratio = _ratio(means(held, view.mask, view.segments))
        seen = {
            "clip_fraction/low": ~rises & (d < -self.low),
            "clip_fraction/high": rises & (d > self.high),
        }
        return -ratio * view.advantages, seen | _by_sequence({"ratio": ratio}, view)


@dataclass(frozen=True)
class PolicyGradient:
    """-A logp: REINFORCE (Williams 1992)."""

    def __call__(self, view: View):
        return -view.advantages * view.logp, {}


@dataclass(frozen=True)
class CISPO:
    """-sg(clip(r, 1 - low, 1 + high)) A logp (MiniMax-M1, arXiv:2506.13585, section 3.1): no token loses its gradient.

    `low` None leaves r without a lower bound. ScaleRL (arXiv:2510.13786) states the upper bound itself, 1 + high = 5.
    """

    low: float | None = None
    high: float = 4.0

    def __post_init__(self):
        _check_range(self.low or 0, self.high)

    def __call__(self, view: View):
        ratio = jax.lax.stop_gradient(_ratio(view.logp - view.old))
        low = 0.0 if self.low is None else 1 - self.low
        seen = {"ratio": ratio, "clip_fraction/low": ratio < low, "clip_fraction/high": ratio > 1 + self.high}
        return -jnp.clip(ratio, low, 1 + self.high) * view.advantages * view.logp, seen


@dataclass(frozen=True)
class SAPO:
    """-(4 / tau) sigmoid(tau (r - 1)) A, a soft gate instead of a clip (arXiv:2511.20347, section 3).

    tau is `positive` where A > 0 and `negative` elsewhere. The gate's slope at r = 1 is 1.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self):
        if self.positive <= 0 or self.negative <= 0:
            raise ValueError(f"positive={self.positive} negative={self.negative}: both temperatures must be above 0")

    def __call__(self, view: View):
        ratio = _ratio(view.logp - view.old)
        tau = jnp.where(view.advantages > 0, self.positive, self.negative)
        return -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * view.advantages, {"ratio": ratio}


@dataclass(frozen=True)
class VESPO:
    """-sg(phi(w)) A logp with phi(w) = w^k e^(rate (1 - w)), w the ratio of the sequence's probability, not its mean.

    (arXiv:2602.10693.) phi(1) = 1; k and rate are `positive` where A >= 0 and `negative` elsewhere.
    """

    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)

    def __post_init__(self):
        for name in ("positive", "negative"):
            if min(getattr(self, name)) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: both k and rate must be above 0")

    def __call__(self, view: View):
        gap = jnp.where(view.mask, jax.lax.stop_gradient(view.logp) - view.old, 0.0)
        log_w = jnp.clip(totals(gap, view.segments), -LOG_RATIO, LOG_RATIO)
        k, rate = (jnp.where(view.advantages >= 0, p, n) for p, n in zip(self.positive, self.negative))
        phi = jnp.exp(k * log_w - rate * jnp.expm1(log_w))
        return -phi * view.advantages * view.logp, {"ratio": _ratio(gap), "vespo_weight": phi}


@dataclass(frozen=True)
class DPPO:
    """-r A where the token's probability has not yet moved too far, plus tau (logp - old)^2 everywhere.

    Divergence PPO with the binary total variation (arXiv:2602.04879), as prime-rl has it: the first term is left out
    where A > 0 and the probability has risen by more than `high`, and where A < 0 and it has fallen by more than `low`.
    The second is the squared log ratio of Kimi k1.5 (arXiv:2501.12599, section 2.3).
    """

    low: float = 0.2
    high: float = 0.2
    tau: float = 1e-3

    def __post_init__(self):
        if not (0 < self.low <= 1 and 0 < self.high <= 1):
            raise ValueError(f"low={self.low} high={self.high}: differences of probability must be in 0 .. 1, above 0")
        if self.tau < 0:
            raise ValueError(f"tau={self.tau} must be 0 (off) or above")

    def __call__(self, view: View):
        ratio = _ratio(view.logp - view.old)
        moved = jnp.exp(view.logp) - jnp.exp(view.old)
        fallen = (view.advantages < 0) & (moved < -self.low)
        risen = (view.advantages > 0) & (moved > self.high)
        loss = jnp.where(fallen | risen, 0.0, -ratio * view.advantages) + self.tau * jnp.square(view.logp - view.old)
        return loss, {"ratio": ratio, "clip_fraction/low": fallen, "clip_fraction/high": risen}


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """-logp: supervised fine-tuning."""

    def __call__(self, view: View):
        return -view.logp, {}


@dataclass(frozen=True)
class ValueLoss:
    """max(f(V - R), f(clip(V, V_old - clip, V_old + clip) - R)) with f(x) = x^2 / 2: a critic's loss.

    (Schulman et al.'s PPO code; Engstrom et al. 2020, arXiv:2005.12729.) `clip` None leaves out the second term.
    `huber`, if set, makes f linear beyond it (Huber 1964). Of values, not log-probabilities.
    """

    clip: float | None = 0.5
    huber: float | None = None

    def __post_init__(self):
        for name in ("clip", "huber"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0, or None for off")

    def __call__(self, view: View):
        free = self._error(view.values - view.returns)
        if self.clip is None:
            return free, {}
        near = jnp.clip(view.values, view.old_values - self.clip, view.old_values + self.clip)
        held = self._error(near - view.returns)
        return jnp.maximum(free, held), {"clip_fraction/value": held > free}

    def _error(self, x):
        if self.huber is None:
            return jnp.square(x) / 2
        inside = jnp.clip(x, -self.huber, self.huber)
        return inside * (x - inside / 2)
