"""Rows as microbatches."""

import jax
import jax.numpy as jnp
from jax import P

from rljax.mesh import BATCH, spec_of


def cut(tree, microbatches: int):
    """Rows [B ...] as [M B/M ...], each microbatch with rows of every device: nothing moves."""

    def one(x):
        rest = spec_of(x).partitions[1:]
        shape = x.shape[0] // microbatches, microbatches, *x.shape[1:]
        x = jax.reshard(x, P(BATCH, *rest))
        return jnp.moveaxis(jnp.reshape(x, shape, out_sharding=P(BATCH, None, *rest)), 1, 0)

    return jax.tree.map(one, tree)


def join(tree):
    """What `cut` did, undone."""

    def one(x):
        _, split, *rest = spec_of(x).partitions
        return jnp.reshape(jnp.moveaxis(x, 0, 1), (-1, *x.shape[2:]), out_sharding=P(split, *rest))

    return jax.tree.map(one, tree)
