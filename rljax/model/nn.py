"""The layers' arithmetic: functions of arrays, float32 where it decides."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jaxtyping import Array, Float, Int

from rljax.mesh import gather, reduced, scatter, shards, spec_of
from rljax.mesh.verbs import axes_of, within, without


def whole(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """x as column-parallel matmuls read it: gathered over tensor where sequence parallelism splits it.

    The cotangents of all its readers are summed before they cross tensor once, by a reduce-scatter or an all-reduce.
    """
    return reduced(gather(x, "tensor"), ("tensor",))


def matmul(x: Float[Array, "B T D"], w: Float[Array, "D F"], out: P | None = None) -> Float[Array, "B T F"]:
    """x @ w over the last dimension. `out` is the placement of a row-parallel result, whose contraction is split.

    That result is all-reduced over tensor, or reduce-scattered where `out` splits T over it.
    Rows are flattened first where that moves nothing (T is whole on every device): for the gradient of w, XLA:CPU
    transposes three-dimensional operands physically, which made a SwiGLU backward 1.5 times slower.
    """
    b, t, d = x.shape
    if out is not None and "tensor" in axes_of(out.partitions[1]):
        if jax.typeof(x).sharding.mesh.shape["tensor"] == 1 or within():
            return jnp.einsum("btd,df->btf", x, w, out_sharding=out)
        partial = P(*without(out, "tensor").partitions, unreduced={"tensor"})
        return scatter(jnp.einsum("btd,df->btf", x, w, out_sharding=partial), "tensor", 1)
    if shards(x, 1) > 1:
        return jnp.einsum("btd,df->btf", x, w, out_sharding=out)
    rows, time, contracted = spec_of(x).partitions
    flat = (*axes_of(rows), *axes_of(time)) or None
    x = jnp.reshape(x, (b * t, d), out_sharding=P(flat, contracted, reduced=spec_of(x).reduced))
    y = jnp.einsum("bd,df->bf", x, w, out_sharding=None if out is None else P(flat, out.partitions[2]))
    return jnp.reshape(y, (b, t, w.shape[1]), out_sharding=P(rows, time, spec_of(y).partitions[1]))


def unfold(x: Float[Array, "..."], dim: int, parts: int) -> Float[Array, "..."]:
    """Dimension `dim` as two, the first of `parts` entries and split over the mesh as the whole was.

    JAX infers as much, but 0.12 not beside another dimension of size 1.
    """
    entries, shape = spec_of(x).partitions, x.shape
    spec = P(*entries[: dim + 1], None, *entries[dim + 1 :], reduced=spec_of(x).reduced)
    return jnp.reshape(x, (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]), out_sharding=spec)


def fold(x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """What `unfold` did, undone."""
    entries, shape = spec_of(x).partitions, x.shape
    spec = P(*entries[: dim + 1], *entries[dim + 2 :], reduced=spec_of(x).reduced)
    return jnp.reshape(x, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]), out_sharding=spec)


def scale(x: Float[Array, "*B D"], w: Float[Array, "D"]) -> Float[Array, "*B D"]:
    """x * w, written as a matmul so that w may be `reduced`: its gradient is summed over microbatches first."""
    return jnp.einsum("...d,d->...d", x, reduced(w, split(x)))


def shift(x: Float[Array, "*B D"], w: Float[Array, "D"]) -> Float[Array, "*B D"]:
    """x + w, where w may be `reduced`, as in `scale`."""
    ones = jnp.ones(x.shape[:-1], x.dtype, out_sharding=P(*spec_of(x).partitions[:-1]))
    return x + jnp.einsum("...,d->...d", ones, reduced(w, split(x)))


def split(x) -> tuple[str, ...]:
    """The mesh axes that split all but the last dimension of x: over which the gradient of a weight of it is a sum."""
    return tuple(axis for entry in spec_of(x).partitions[:-1] for axis in axes_of(entry))


def rms_norm(x: Float[Array, "*B D"], w: Float[Array, "D"], eps: float, offset: bool = False) -> Float[Array, "*B D"]:
    """Root-mean-square normalization over the last dimension (Zhang and Sennrich 2019), in float32.

    With an offset it is multiplied by 1 + w.
    """
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    scaled = scale(y, w.astype(jnp.float32))
    return (scaled + y if offset else scaled).astype(x.dtype)


def turn(
    positions: Int[Array, "B T"], frequency: Float[np.ndarray, "H2"], amplitude: float = 1.0
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
    """Cosines and sines of rotary position embedding (Su et al. 2021): one table for every layer and head.

    The barrier keeps XLA from recomputing them inside each fusion that reads them.
    """
    angle = positions[..., None].astype(jnp.float32) * frequency[None, None]
    return lax.optimization_barrier((jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude))


def rotate(x: Float[Array, "B T N H"], table) -> Float[Array, "B T N H"]:
    """Applies rotary embedding to half-split heads (the Hugging Face convention)."""
    cos, sin = (t[:, :, None] for t in table)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def capped(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """x kept within -cap to cap, softly (Gemma 2, arXiv:2408.00118, section 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=True)}  # what Decoder.activation may name
