"""Entries of stacked arrays, in every leaf of a tree."""

import jax
from jax import lax


def at(tree, i):
    """Entry i of every array."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def put(tree, new, i):
    """The arrays with entry i replaced."""
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), i, 0), tree, new)


def add_at(tree, new, i):
    """The arrays with something added to entry i."""
    return put(tree, add(at(tree, i), new), i)


def add(tree, new):
    """The sum, in the dtype of the first."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, new)
