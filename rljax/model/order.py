"""The order of tokens over the seq axis.

Ring attention deals them out in stripes (Brandon et al. 2023, arXiv:2311.09431): of n devices, device r has positions
r, r + n, r + 2n, ... So under a causal mask all have the same work, and a cache that keeps tokens in stripes grows
evenly. The other forms leave them in contiguous parts.
"""

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Float, Int

from rljax.mesh import BATCH, Strategy, shards, spec_of

STRIPES = P(BATCH, "seq", None, "tensor", None)  # of keys and values [B C T K H]


def deal(tree, strategy: Strategy):
    """Arrays `[B T ...]`, whole over seq, in the order in which `strategy` splits T over it."""
    n = _ways(strategy)
    return jax.tree.map(lambda x: _turn(x, x.shape[1] // n, n), tree)


def collect(tree, strategy: Strategy):
    """What `deal` did, undone."""
    n = _ways(strategy)
    return jax.tree.map(lambda x: _turn(x, n, x.shape[1] // n), tree)


def _ways(strategy: Strategy) -> int:
    return jax.sharding.get_abstract_mesh().shape["seq"] if strategy.context == "ring" else 1


def _turn(x: Array, rows: int, columns: int) -> Array:
    """T as a table of rows and columns, read column by column."""
    if 1 in (rows, columns):
        return x
    row, _, *rest = spec_of(x).partitions
    table = jnp.reshape(x, (len(x), rows, columns, *x.shape[2:]), out_sharding=P(row, None, None, *rest))
    return jnp.reshape(jnp.swapaxes(table, 1, 2), x.shape, out_sharding=spec_of(x))


def columns(strategy: Strategy) -> int:
    """What the length of a prompt must be a multiple of, so that its keys fall into equal stripes."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return strategy.columns(sizes) * sizes["seq"] // _ways(strategy)


def stripes(x: Float[Array, "B T K H"], strategy: Strategy) -> Float[Array, "B C T/C K H"]:
    """Keys, values or routes of whole sequences as a cache keeps them. Parts not dealt go all-to-all over seq."""
    (b, t, *heads), n, spec = x.shape, shards(x, 1), spec_of(x).partitions
    if _ways(strategy) == n:
        return jnp.reshape(x, (b, n, t // n, *heads), out_sharding=P(spec[0], "seq", None, *spec[2:]))
    x = jnp.reshape(x, (b, t // n, n, *heads), out_sharding=P(spec[0], "seq", None, *spec[2:]))
    return jax.reshard(jnp.swapaxes(x, 1, 2), P(spec[0], "seq", None, *spec[2:]))


def by_token(routes: Int[Array, "L B C T 1 k"], length: int) -> Int[Array, "B T L k"]:
    """What a cache holds for the first `length` positions of each row, as little as it takes to travel."""
    x = jax.reshard(routes.astype(jnp.int16), P(None, BATCH, None, None, None, None))
    layers, b, stripes, slots, _, k = x.shape
    x = jnp.reshape(jnp.moveaxis(x, (3, 2, 0), (1, 2, 3)), (b, slots * stripes, layers, k), out_sharding=P(BATCH))
    return x[:, :length]


def positions(stripes: int, slots: int) -> Int[Array, "C T"]:
    """The position of the token in each slot of a cache."""
    first = jax.reshard(jnp.arange(stripes), P("seq"))
    return first[:, None] + stripes * jnp.arange(slots)[None]


def append(
    cache: Float[Array, "L B C T K H"], new: Float[Array, "B S K H"], layer: Int[Array, ""], lengths: Int[Array, "B"]
) -> Float[Array, "L B C T K H"]:
    """Writes S tokens into one layer, each row at its own length, in place and without a branch."""
    stripes, slots, s = *cache.shape[2:4], new.shape[1]
    width = min(slots, (s - 1 + stripes - 1) // stripes + 1)  # slots that S tokens may touch
    at = positions(stripes, width)

    def write(row, new, length):
        start = jnp.minimum(length // stripes, slots - width)
        if stripes == 1:
            new = jax.reshard(new[None, None], spec_of(row))
            return lax.dynamic_update_slice(row, new, (layer, 0, start, 0, 0))
        old = lax.dynamic_slice(row, (layer, 0, start, 0, 0), (1, stripes, width, *row.shape[3:]))
        which = at + stripes * start - length
        fresh = new[None] if s == 1 else new.at[which].get(out_sharding=P("seq", None, *spec_of(new).partitions[1:]))
        value = jnp.where(((0 <= which) & (which < s))[None, :, :, None, None], fresh[None], old)
        return lax.dynamic_update_slice(row, value, (layer, 0, start, 0, 0))

    return jax.vmap(write, in_axes=(1, 0, 0), out_axes=1)(cache, new, lengths)
