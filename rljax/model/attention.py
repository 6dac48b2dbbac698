"""Causal attention with segments and grouped queries."""

from math import sqrt

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e30  # not -inf: a row with nothing to see stays finite


def dense(
    q: Float[Array, "B S N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], mask: Bool[Array, "B S T"]
) -> Float[Array, "B S N H"]:
    """The reference form, which every backend runs. Scores and softmax in float32; mask is True where q sees k."""
    b, s, n, h = q.shape
    q = q.reshape(b, s, k.shape[2], -1, h)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) / sqrt(h)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), -1).astype(v.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weights, v).reshape(b, s, n, h)
