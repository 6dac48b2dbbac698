"""Products of activations with matrices that are split over tensor, and with what an adapter adds to them.

Where a table has a `LowRank` in a matrix's place, x W becomes x W + scale * (dropout(x) A) B, of rank r (Hu et al.
2021, arXiv:2106.09685). A lies split as the rows of W do, and B as its columns, so what crosses tensor for it is r
numbers a token.
"""

from collections.abc import Callable
from zlib import crc32

import jax
import jax.numpy as jnp
from flax import struct
from jax import P, lax
from jaxtyping import Array, Float, UInt

from rljax.mesh import reduced, spec_of
from rljax.model import nn


@struct.dataclass
class LowRank:
    """A matrix and the two that add to it."""

    base: Float[Array, "*L D F"]
    down: Float[Array, "*L D r"]  # A, which is A transposed in its paper
    up: Float[Array, "*L r F"]  # B
    noise: UInt[Array, "B T"] | None = None  # not a weight: bits of each token, where what A reads is dropped
    name: str = struct.field(pytree_node=False, default="")  # of the base
    scale: float = struct.field(pytree_node=False, default=1.0)
    dropout: float = struct.field(pytree_node=False, default=0.0)


def is_low_rank(w) -> bool:
    return isinstance(w, LowRank)


def each(f: Callable, w):
    """`f` of a matrix, or of all three."""
    return w.replace(base=f(w.base), down=f(w.down), up=f(w.up)) if is_low_rank(w) else f(w)


def added(w) -> Float[Array, "D F"]:
    """A matrix with what an adapter adds to it."""
    return w.base + _low(jnp.einsum("dr,rf->df", w.down, w.up), w) if is_low_rank(w) else w


def column(x: Float[Array, "B T D"], *ws) -> list[Float[Array, "B T F"]]:
    """x @ w of column-parallel matrices: x is gathered over tensor once where sequence parallelism splits it."""
    read = nn.whole(x)

    def one(w):
        if not is_low_rank(w):
            return nn.matmul(read, w)
        return nn.matmul(read, w.base) + nn.matmul(nn.whole(_low(once(_dropped(x, w), w.down), w)), w.up)

    return [one(w) for w in ws]


def row(x: Float[Array, "B T F"], w, out: P) -> Float[Array, "B T D"]:
    """x @ w of a row-parallel matrix, its result placed as `out`."""
    if not is_low_rank(w):
        return nn.matmul(x, w, out)
    return nn.matmul(x, w.base, out) + once(_low(nn.matmul(_dropped(x, w), w.down, out), w), w.up)


def once(x: Float[Array, "B T D"], w) -> Float[Array, "B T A"]:
    """x @ w of a matrix that is whole on every device, where x lies."""
    if not is_low_rank(w):
        return jnp.einsum("btd,da->bta", x, reduced(w, nn.split(x)))
    return once(x, w.base) + once(_low(once(_dropped(x, w), w.down), w), w.up)


def gated(x, gate, up, down, activation: str = "silu"):
    """Feed-forward of Shazeer 2020: (activation(x gate) * (x up)) down; the result is placed like x."""
    gate, up = column(x, gate, up)
    return row(nn.ACTIVATIONS[activation](gate) * up, down, spec_of(x))


def _low(z: Float[Array, "B T r"], w: LowRank) -> Float[Array, "B T r"]:
    return z * jnp.asarray(w.scale, z.dtype)


def sown(layer, noise: UInt[Array, "B T"] | None):
    """A layer's weights, each adapter with bits of its own for every token, made of these and the layer's number."""
    if noise is None:
        return layer
    number = layer.number.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    sow = lambda w: w.replace(noise=mixed(noise ^ mixed(number ^ jnp.uint32(crc32(w.name.encode())))))
    return jax.tree.map(lambda w: sow(w) if is_low_rank(w) else w, layer, is_leaf=is_low_rank)


def _dropped(x: Float[Array, "B T D"], w: LowRank) -> Float[Array, "B T D"]:
    """x with each number 0 with probability `dropout`, and the others as much larger (Srivastava et al. 2014).

    Which are 0 is a function of the token's noise and of where in its vector they are, so it is so on every layout.
    """
    if w.noise is None or not w.dropout:
        return x
    rows, time, width = spec_of(x).partitions
    at = mixed(lax.broadcasted_iota(jnp.uint32, x.shape[2:], 0, out_sharding=P(width)))
    token = jax.reshard(w.noise, P(rows, time))
    bits = mixed(token[..., None] ^ at[None, None])
    keep = bits >= jnp.uint32(round(w.dropout * 2**32))
    return jnp.where(keep, x / jnp.asarray(1 - w.dropout, x.dtype), 0)


def mixed(x: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """Bits that each depend on all of those of x: the finalizer of MurmurHash3 (Appleby 2016), a permutation."""
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return x ^ x >> 16
