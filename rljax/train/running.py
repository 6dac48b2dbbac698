"""Running mean and deviation of returns, by which a critic's outputs are scaled (Mei et al. 2024, ReaL).

Moments are decayed sums of 1, x and x², float32 `[3]`: dividing by the first corrects their bias. All zero, nothing was
seen yet and nothing is scaled.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

DECAY = 0.99995
EPS = 1e-5  # of the variance


def add(moments: Float[Array, "3"], x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "3"]:
    """The moments after one more batch, whose masked entries count together once."""
    n = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    x = jnp.where(mask, x, 0.0)
    batch = jnp.stack([jnp.float32(1.0), jnp.sum(x) / n, jnp.sum(x * x) / n])
    return DECAY * moments + (1 - DECAY) * batch


def _scale(moments):
    """Mean and standard deviation."""
    weight, mean, square = moments[0], *(moments[1:] / jnp.maximum(moments[0], 1e-30))
    std = jnp.sqrt(jnp.maximum(square - mean * mean, 0.0) + EPS)
    return jnp.where(weight > 0, mean, 0.0), jnp.where(weight > 0, std, 1.0)


def normalized(moments: Float[Array, "3"], x):
    """What a critic predicts instead of x."""
    mean, std = _scale(moments)
    return (x - mean) / std


def restored(moments: Float[Array, "3"], x):
    """The value that a critic means by x."""
    mean, std = _scale(moments)
    return x * std + mean
