"""Reductions: which weight each token's loss has, so that the reduced loss is the sum of weight times loss.

A weight holds the global denominator of the optimizer step, so microbatches and devices only ever add. A reduction
takes the mask `[B T]` of every row of the step and returns float32 weights `[B T]`; rows without a masked token weigh
nothing and are counted in no denominator.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def token_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """1 / N for each of the N masked tokens (DAPO, arXiv:2503.14476, equation 8)."""
    return mask / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)


def sequence_mean_token_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """The mean over sequences of their token means (GRPO, arXiv:2402.03300, equation 3)."""
    n = jnp.sum(mask, 1, keepdims=True)
    return mask / (jnp.maximum(n, 1) * jnp.maximum(jnp.sum(n > 0), 1)).astype(jnp.float32)


def sequence_mean_token_sum(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """The mean over sequences of their token sums: the objective of a sequence's log-probability."""
    return mask / jnp.maximum(jnp.sum(jnp.any(mask, 1)), 1).astype(jnp.float32)


@dataclass(frozen=True)
class ConstantLength:
    """Token sums over sequences times a constant length (Dr. GRPO, arXiv:2503.20783): no length bias."""

    length: int  # the longest completion, max_new_tokens

    def __call__(self, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
        return mask / (jnp.maximum(jnp.sum(jnp.any(mask, 1)), 1) * self.length).astype(jnp.float32)
