"""Resharding: a pytree from one mesh to another, with the bytes that must travel."""

import weakref
from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding


def move(tree, shardings, share: bool = False):
    """Copies every array to its target sharding, on the same devices or others, and verifies where it arrived.

    `shardings` is a pytree of `NamedSharding` like `tree`. With `share`, an array that is in place already is not
    copied: donating the source then takes it away. Asynchronous, like every JAX computation.
    """
    moved = jax.device_put(tree, shardings, may_alias=share)
    for (path, x), target in zip(jax.tree.leaves_with_path(moved), jax.tree.leaves(shardings), strict=True):
        if not x.sharding.is_equivalent_to(target, x.ndim):
            raise RuntimeError(f"{jax.tree_util.keystr(path)} arrived as {x.sharding}, not {target}")
    return moved if share else jax.tree.map(_own, tree, moved)


class Kept:
    """Arrays that never change, as other shardings have them: each is sent there once, while it lives.

    Where it lies so already nothing is copied, so none of them may be donated.
    """

    def __init__(self):
        self.held: dict[int, dict[Sharding, jax.Array]] = {}

    def __call__(self, tree, shardings):
        """The tree in its target shardings, and the bytes that had to travel."""
        new = [(x, s) for x, s in self._pairs(tree, shardings) if s not in self.held.get(id(x), {})]
        for x, sharding in new:
            if id(x) not in self.held:
                weakref.finalize(x, self.held.pop, id(x), None)
                self.held[id(x)] = {}
            if not x.sharding.is_equivalent_to(sharding, x.ndim):  # or it would keep itself alive
                self.held[id(x)][sharding] = move(x, sharding)
        there = lambda x, sharding: self.held[id(x)].get(sharding, x)
        return jax.tree.map(there, tree, shardings), sum(bytes_to_move(x, sharding) for x, sharding in new)

    def _pairs(self, tree, shardings):
        return zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)


def _own(old, new):
    """`new` with buffers of its own: where a mesh orders devices otherwise, JAX shares those shards that stay."""
    stay = isinstance(old, jax.Array) and _some_stay(new.shape, old.sharding, new.sharding)
    return jnp.copy(new) if stay else new


@lru_cache(maxsize=4096)
def _some_stay(shape: tuple[int, ...], source: Sharding, target: Sharding) -> bool:
    """Whether some device has the very shard that it needs, among others that have not."""
    held, needed = (s.devices_indices_map(shape) for s in (source, target))
    same = [held.get(device) == index for device, index in needed.items()]
    return any(same) and not source.is_equivalent_to(target, len(shape))


def bytes_to_move(tree, shardings) -> int:
    """The least bytes that all devices together must receive to turn `tree` into `shardings`.

    Per device: the bytes of the shard it needs, less the part of it that it already holds.
    """
    leaves = zip(
        jax.tree.leaves(tree), jax.tree.leaves(shardings, is_leaf=lambda s: isinstance(s, Sharding)), strict=True
    )
    return sum(_elements(x.shape, x.sharding, target) * x.dtype.itemsize for x, target in leaves)


@lru_cache(maxsize=4096)
def _elements(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> int:
    held = source.devices_indices_map(shape)
    total = 0
    for device, needed in target.devices_indices_map(shape).items():
        need = [s.indices(n)[:2] for s, n in zip(needed, shape)]
        have = [s.indices(n)[:2] for s, n in zip(held[device], shape)] if device in held else [(0, 0)] * len(shape)
        overlap = prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(need, have))
        total += prod(b - a for a, b in need) - (overlap if device in held else 0)
    return total
