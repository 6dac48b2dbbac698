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
    """Writes S tokens into one layer, each row at its own length, in place and without a branch.

    Each stripe drops what belongs to others by pointing it beyond its slots. One scatter says all this, with rows and
    stripes as its batch: mapped over rows it has them in front, and XLA:CPU transposed the whole cache at every layer.
    """
    _, _, stripes, slots, _, _ = cache.shape
    s, spec = new.shape[1], spec_of(cache).partitions
    width = (s - 1 + stripes - 1) // stripes + 1  # slots that S tokens may touch
    every = lambda x: jax.reshard(jnp.broadcast_to(x, (len(new), stripes, width)), P(*spec[1:3]))
    start, offset = lengths[:, None, None], jnp.arange(width)[None, None]
    slot = every(start // stripes + offset)
    which = every(positions(stripes, 1)[None] - start) + stripes * slot
    slot = jnp.where((0 <= which) & (which < s), slot, slots + every(offset))
    if stripes > 1 and s > 1:
        take = lambda new, which: new.at[which].get(out_sharding=P("seq", None, *spec[4:]))
        new = jax.vmap(take)(new, which)
    else:
        new = jnp.broadcast_to(new[:, None], (len(new), stripes, width, *new.shape[2:]))
    return lax.scatter(
        cache,
        jnp.stack([jnp.full_like(slot, layer), slot], -1),
        jax.reshard(new, P(*spec[1:])),
        lax.ScatterDimensionNumbers(
            update_window_dims=(3, 4),
            inserted_window_dims=(0, 3),
            scatter_dims_to_operand_dims=(0, 3),
            operand_batching_dims=(1, 2),
            scatter_indices_batching_dims=(0, 1),
        ),
        unique_indices=True,
        mode="drop",
    )
