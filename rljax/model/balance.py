"""What a decoder with experts does to keep them evenly loaded: functions of the sums that its blocks return.

`m` is the decoder's settings, a `decoder.Decoder`. Without experts there are no sums, and nothing to do.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.model import moe


def penalty(m, sums) -> Float[Array, ""]:
    """The mean over layers of the experts' auxiliary losses, to be divided by the real tokens of an update."""
    return jnp.sum(moe.penalty(m.experts, sums)) / (m.layers - m.dense) if m.experts else jnp.zeros(())


def settle(m, p, sums):
    """Loss-free balancing moves the routers' biases, unless they are frozen, by the load of the update just made."""
    if not (m.experts and m.experts.bias_rate) or p.layers.router_bias is None:
        return p
    bias = moe.rebalance(m.experts, p.layers.router_bias, sums.load)
    return p.replace(layers=p.layers.replace(router_bias=bias))


def observe(m, sums) -> dict[str, Float[Array, ""]]:
    """How evenly the experts of each layer were loaded, and the auxiliary losses per token and layer."""
    if not m.experts:
        return {}
    seen = {
        f"{name}/layer_{m.dense + i}": value[i]
        for name, value in moe.imbalance(sums.load).items()
        for i in range(m.layers - m.dense)
    }
    pairs = jnp.maximum(jnp.sum(sums.load), 1.0)
    return seen | {
        "experts/balance": jnp.sum(sums.balance) / pairs * m.experts.top_k,
        "experts/z": jnp.sum(sums.z) / pairs * m.experts.top_k,
        "experts/dropped": jnp.sum(sums.dropped) / pairs,
    }
