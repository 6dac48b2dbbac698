"""Preference losses: which of two sequences is better, or whether one is good.

Pairs lie in one row: of its sequences 1, 2, 3, ... the odd are chosen, and the even rejected, each beside its chosen
one. A loss of pairs (`unit = "pair"`) puts the loss of a pair on the first masked token of its chosen sequence, 0
elsewhere, for `pair_mean`. A score of a sequence is what the loss compares, by which its implicit reward is beta times
the score.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

from rljax.train.sequences import chosen, first, lengths, pairs, totals
from rljax.train.view import View


def sides(x, segments):
    """(sums of x over the chosen, sums over the rejected sequence) of a token's pair, at each of its tokens `[B T]`."""
    odd = segments % 2 == 1
    return totals(jnp.where(odd, x, 0.0), pairs(segments)), totals(jnp.where(odd, 0.0, x), pairs(segments))


def averaged(x, view: View):
    """x over the number of its sequence's masked tokens, so that sums are means."""
    return x / jnp.maximum(lengths(view.mask, view.segments), 1)


def judged(loss, won, lost, view: View, beta: float = 1.0) -> tuple:
    """The loss of each pair put where a pair's is, and what is seen of pairs, given the scores of their two sides."""
    at = chosen(view.mask, view.segments)
    weights = at.astype(jnp.float32)
    seen = {
        "preference/accuracy": won > lost,
        "preference/margin": beta * (won - lost),
        "preference/chosen": beta * won,
        "preference/rejected": beta * lost,
    }
    return jnp.where(at, loss, 0.0), {name: (values, weights) for name, values in seen.items()}


def _log_ratio(view: View):
    """log policy / reference of each masked token, else 0."""
    return jnp.where(view.mask, view.logp - view.ref_logp, 0.0)


def _logp(view: View):
    """The policy's log-probability of each masked token, averaged over the sequence when summed."""
    return averaged(jnp.where(view.mask, view.logp, 0.0), view)


def _check_beta(beta: float):
    if beta <= 0:
        raise ValueError(f"beta={beta} must be above 0")


@dataclass(frozen=True)
class DPO:
    """-log sigmoid(beta delta), delta the chosen less the rejected log ratio (arXiv:2305.18290, equation 7).

    `smoothing` is the probability e that a label is wrong: -(1 - e) log sigmoid(beta delta) - e log sigmoid(-beta
    delta) (cDPO), and with `robust` that loss unbiased, with the second term subtracted and all divided by 1 - 2 e
    (arXiv:2403.00409, section 3). Step-DPO (arXiv:2406.18629) is this loss where the sequences of a pair share a
    problem and its correct steps, and the mask holds the tokens of one more step.
    """

    beta: float = 0.1
    smoothing: float = 0.0
    robust: bool = False
    unit: ClassVar[str] = "pair"
    needs_reference: ClassVar[bool] = True

    def __post_init__(self):
        _check_beta(self.beta)
        if not 0 <= self.smoothing < 0.5:
            raise ValueError(f"smoothing={self.smoothing} must be from 0 to below 0.5: labels are mostly right")

    def __call__(self, view: View):
        won, lost = sides(_log_ratio(view), view.segments)
        z, e = self.beta * (won - lost), self.smoothing
        right, wrong = -(1 - e) * log_sigmoid(z), -e * log_sigmoid(-z)
        loss = (right - wrong) / (1 - 2 * e) if self.robust else right + wrong
        return judged(loss, won, lost, view, self.beta)


@dataclass(frozen=True)
class IPO:
    """(delta - 1 / (2 beta))^2 (arXiv:2310.12036, equation 17); `averaged` log ratios are over the tokens' number."""

    beta: float = 0.1
    averaged: bool = True
    unit: ClassVar[str] = "pair"
    needs_reference: ClassVar[bool] = True

    def __post_init__(self):
        _check_beta(self.beta)

    def __call__(self, view: View):
        x = _log_ratio(view)
        won, lost = sides(averaged(x, view) if self.averaged else x, view.segments)
        return judged(jnp.square(won - lost - 1 / (2 * self.beta)), won, lost, view, self.beta)


@dataclass(frozen=True)
class Hinge:
    """max(0, 1 - beta delta) (SLiC-HF, arXiv:2305.10425, in the form of arXiv:2309.06657)."""

    beta: float = 0.1
    unit: ClassVar[str] = "pair"
    needs_reference: ClassVar[bool] = True

    def __post_init__(self):
        _check_beta(self.beta)

    def __call__(self, view: View):
        won, lost = sides(_log_ratio(view), view.segments)
        return judged(jnp.maximum(1 - self.beta * (won - lost), 0.0), won, lost, view, self.beta)


@dataclass(frozen=True)
class IRPO:
    """DPO plus alpha times the chosen's negative log-likelihood per token (arXiv:2404.19733, section 3)."""

    beta: float = 0.1
    alpha: float = 1.0
    unit: ClassVar[str] = "pair"
    needs_reference: ClassVar[bool] = True

    def __post_init__(self):
        _check_beta(self.beta)
        if self.alpha < 0:
            raise ValueError(f"alpha={self.alpha} must be 0 (off) or above")

    def __call__(self, view: View):
        loss, seen = DPO(self.beta)(view)
        likely, _ = sides(_logp(view), view.segments)
        at = chosen(view.mask, view.segments)
        nll = jnp.where(at, -likely, 0.0)
        return loss + self.alpha * nll, seen | {"preference/nll": (nll, at.astype(jnp.float32))}


@dataclass(frozen=True)
class ORPO:
    """-p_w - beta log sigmoid(odds_w - odds_l), p a sequence's mean log-probability, odds = p - log(1 - e^p).

    (arXiv:2403.07691, section 4.) No reference.
    """

    beta: float = 0.1
    unit: ClassVar[str] = "pair"

    def __post_init__(self):
        _check_beta(self.beta)

    def __call__(self, view: View):
        won, lost = sides(_logp(view), view.segments)
        odds = lambda p: p - jnp.log(-jnp.expm1(jnp.minimum(p, -1e-6)))  # at p = 0 the odds are infinite
        return judged(-won - self.beta * log_sigmoid(odds(won) - odds(lost)), won, lost, view, self.beta)


@dataclass(frozen=True)
class SimPO:
    """-log sigmoid(beta (p_w - p_l) - gamma), p a sequence's mean log-probability (arXiv:2405.14734, equation 6)."""

    beta: float = 2.0
    gamma: float = 1.0
    unit: ClassVar[str] = "pair"

    def __post_init__(self):
        _check_beta(self.beta)
        if self.gamma < 0:
            raise ValueError(f"gamma={self.gamma} must be 0 or above: the margin by which the chosen shall win")

    def __call__(self, view: View):
        won, lost = sides(_logp(view), view.segments)
        return judged(-log_sigmoid(self.beta * (won - lost) - self.gamma), won, lost, view, self.beta)


@dataclass(frozen=True)
class KTO:
    """desirable (1 - sigmoid(beta (d - z0))) and undesirable (1 - sigmoid(beta (z0 - d))) of sequences without pairs.

    (arXiv:2402.01306, section 4.) d is the sequence's log ratio. Advantages are 1 on the tokens of a desirable
    sequence and -1 on those of an undesirable one; `target` is z0, the mean of KL(policy || reference) on mismatched
    prompts and completions, 0 at least, on every token. The loss is of whole sequences.
    """

    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0
    unit: ClassVar[str] = "sequence"
    needs_reference: ClassVar[bool] = True
    needs_baseline: ClassVar[bool] = True  # z0

    def __post_init__(self):
        _check_beta(self.beta)
        if self.desirable < 0 or self.undesirable < 0:
            raise ValueError(f"desirable={self.desirable} undesirable={self.undesirable} must be 0 or above")

    def __call__(self, view: View):
        d = totals(_log_ratio(view), view.segments)
        good = view.advantages > 0
        z = self.beta * (d - view.target)
        loss = jnp.where(good, self.desirable * sigmoid(-z), self.undesirable * sigmoid(z))
        heads = first(view.mask, view.segments)
        weigh = lambda where: (heads & where).astype(jnp.float32)
        return loss, {
            "preference/accuracy": ((z > 0) == good, weigh(heads)),
            "preference/chosen": (self.beta * d, weigh(good)),
            "preference/rejected": (self.beta * d, weigh(~good)),
        }
