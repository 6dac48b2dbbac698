"""Reductions: which weight each token's loss has, so that the reduced loss is the sum of weight times loss.

A weight holds the global denominator of the optimizer step, so microbatches and devices only ever add. A reduction
takes the mask and the segments `[B T]` of every row of the step and returns float32 weights `[B T]`; a row may hold
several sequences, and sequences without a masked token weigh nothing and are counted in no denominator.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rljax.train.sequences import chosen, first, lengths


def token_mean(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """1 / N for each of the N masked tokens (DAPO, arXiv:2503.14476, equation 8)."""
    return mask / _count(mask)


def sequence_mean_token_mean(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The mean over sequences of their token means (GRPO, arXiv:2402.03300, equation 3).

    A loss of whole sequences, which gives each token the loss of its sequence, becomes the mean of those.
    """
    return mask / (jnp.maximum(lengths(mask, segments), 1) * _count(first(mask, segments)))


def sequence_mean_token_sum(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The mean over sequences of their token sums: the objective of a sequence's log-probability."""
    return mask / _count(first(mask, segments))


luspo = sequence_mean_token_sum  # a loss of whole sequences becomes the mean of length times loss (arXiv:2602.05261)


@dataclass(frozen=True)
class ConstantLength:
    """Token sums over sequences times a constant length (Dr. GRPO, arXiv:2503.20783): no length bias."""

    length: int  # the longest completion, max_new_tokens

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length={self.length} must be 1 or above: the longest completion")

    def __call__(self, mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
        return mask / (_count(first(mask, segments)) * self.length)


def pair_mean(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The mean over pairs of a loss at the first masked token of each pair's chosen sequence.

    Pairs of which a sequence has no masked token weigh nothing and are not counted.
    """
    pair = chosen(mask, segments)
    return pair / _count(pair)


def _count(where):
    """How many, at least 1, as float32."""
    return jnp.maximum(jnp.sum(where), 1).astype(jnp.float32)
