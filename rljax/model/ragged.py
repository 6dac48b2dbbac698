"""Rows of a buffer for what is routed: packing (token, choice) pairs by expert, and moving tokens in and out.

N tokens have k choices each, N k pairs in all; a buffer has R rows for each of P devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Packing(NamedTuple):
    """Pairs laid out in a buffer of R rows for each device."""

    pair: Int[Array, "P*R"]  # in a row; pair // k is its token. N k where the row is unused
    slot: Int[Array, "N k"]  # the row of a pair; P R where it has none
    sizes: Int[Array, "P E/P"]  # rows that each expert has


def pack(ids: Int[Array, "N k"], ways: int, per: int, rows: int) -> Packing:
    """A row for every pair with an id in 0 .. ways*per-1, for `ways` devices of `per` experts and `rows` rows each.

    A device's rows are sorted by expert, then by token. Pairs beyond `rows` have none.
    """
    count, pairs = ways * per, ids.size
    key = jnp.where((ids >= 0) & (ids < count), ids, count).reshape(-1)
    order = jnp.argsort(key, stable=True)
    sizes = jnp.bincount(key, length=count + 1)[:-1].reshape(ways, per)
    total = jnp.sum(sizes, 1)
    start = jnp.cumsum(total) - total
    row = jnp.arange(rows)[None]
    pair = jnp.where(row < total[:, None], order.at[start[:, None] + row].get(mode="clip"), pairs)
    place = jnp.argsort(order) - start.at[key // per].get(mode="clip")
    slot = jnp.where((key < count) & (place < rows), key // per * rows + place, ways * rows)
    return Packing(pair.reshape(-1), slot.reshape(ids.shape), sizes)


@jax.custom_vjp
def spread(x: Float[Array, "N *D"], source: Int[Array, "R"], slot: Int[Array, "N k"]) -> Float[Array, "R *D"]:
    """Row r is x[source[r]], or 0 where source is N.

    `spread` and `collect` are each other's transpose, and said to be: derived, they would scatter, slowly on TPU and
    in no fixed order on GPU. Unused rows go in as 0 and are not read when they come out, forward and backward, so it
    does not matter what a ragged product leaves there.
    """
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows: Float[Array, "R *D"], source: Int[Array, "R"], slot: Int[Array, "N k"]) -> Float[Array, "N *D"]:
    """The sum in float32 of the rows that each token has."""
    return jnp.sum(rows.at[slot].get(mode="fill", fill_value=0), 1, dtype=jnp.float32).astype(rows.dtype)


spread.defvjp(lambda x, *at: (spread(x, *at), at), lambda at, g: (collect(g, *at), None, None))
collect.defvjp(lambda rows, *at: (collect(rows, *at), at), lambda at, g: (spread(g, *at), None, None))
