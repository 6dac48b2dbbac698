"""What advantages are made of: a step's rewards, values and log-probabilities, on the host."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class Experience(NamedTuple):
    """What an advantage may read of a step: N rows of one completion each, float64, entry t of `[B T]` being token t's.

    What lies off the mask is never read, whatever it is. The reward of a completion belongs to its last token of the
    mask. A row whose reward is NaN has no part in any statistic and advantage 0; a run whose only rewards are per token
    says so by rewards of 0.
    """

    rewards: Float[np.ndarray, "B"]  # total of those that apply; NaN: none did
    scores: Float[np.ndarray, "B R"]  # each by itself, NaN where it does not apply
    groups: Int[np.ndarray, "B"]  # number of the prompt; rows of one need not be adjacent
    mask: Bool[np.ndarray, "B T"]  # tokens that the actor chose
    truncated: Bool[np.ndarray, "B"]  # ended by length rather than by a stop token
    token_rewards: Float[np.ndarray, "B T"] | None = None  # besides: of steps, or minus beta times KL to the reference
    values: Float[np.ndarray, "B T"] | None = None  # critic's, of the state before each token
    bootstrap: Float[np.ndarray, "B"] | None = None  # critic's, of the state after the last token
    greedy: Float[np.ndarray, "B"] | None = None  # reward of the prompt's greedy completion
    sampled: Float[np.ndarray, "B T"] | None = None  # log-probabilities of the tokens, as sampled
    teacher: Float[np.ndarray, "B T"] | None = None  # and under the teacher

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        """Tokens that the actor chose."""
        return self.mask.sum(1)

    @property
    def token_sums(self) -> Float[np.ndarray, "B"]:
        """Sum of a row's token rewards."""
        return np.zeros(len(self.mask)) if self.token_rewards is None else masked(self.token_rewards, self.mask).sum(1)

    @property
    def totals(self) -> Float[np.ndarray, "B"]:
        """All that a row has earned: what an estimator of one number per row compares."""
        return np.float64(self.rewards) + self.token_sums


def masked(x: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    """float64, 0 off the mask: before any arithmetic, so that no NaN or infinity out there can leak."""
    return np.where(mask, x, 0.0).astype(np.float64)


def applies(x: Float[np.ndarray, "B"], mask: Bool[np.ndarray, "B T"]) -> Bool[np.ndarray, "B T"]:
    """The mask without the rows in which x is NaN."""
    return mask & ~np.isnan(x)[:, None]


def spread(x: Float[np.ndarray, "B"], mask: Bool[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    """Each row's number on all of its tokens; 0 in the rows where it is NaN."""
    return masked(x[:, None], applies(x, mask))


def placed(x: Float[np.ndarray, "B"], mask: Bool[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    """Each row's number on its last token of the mask, 0 elsewhere; a row without tokens has nowhere to put it."""
    last = mask & (np.cumsum(mask[:, ::-1], 1)[:, ::-1] == 1)
    return spread(x, last)


def kl_rewards(
    logp: Float[np.ndarray, "B T"], ref_logp: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"], beta: float
) -> Float[np.ndarray, "B T"]:
    """Token rewards that keep the actor near the reference: -beta (log p - log ref), k1 of each token.

    In expectation over the actor's tokens -beta KL(actor || reference) (Ziegler et al. 2019, arXiv:1909.08593, eq. 2).
    """
    return -beta * (masked(logp, mask) - masked(ref_logp, mask))
