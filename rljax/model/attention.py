"""Causal attention with segments and grouped queries: a reference, and the fused kernels that JAX ships.

A query sees the keys of its own segment up to its own index. Padding is a segment (0) like the others, so that every
query sees itself and stays finite; no other segment reads it.
"""

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import gather, shards, spec_of

MASKED = -1e30  # not -inf: a row with nothing to see stays finite


class Segments(NamedTuple):
    """The segment of each query, split as queries are, and of each key, whole over seq; 0 is padding."""

    q: Int[Array, "B S"]
    k: Int[Array, "B T"]


def dense(
    q: Float[Array, "B S N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], mask: Bool[Array, "B S T"]
) -> Float[Array, "B S N H"]:
    """The reference form, which every backend runs. Scores and softmax in float32; mask is True where q sees k."""
    b, s, n, h = q.shape
    q = q.reshape(b, s, k.shape[2], -1, h)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) / sqrt(h)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), -1).astype(v.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weights, v).reshape(b, s, n, h)


def causal(
    q: Float[Array, "B S N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], segments: Segments
) -> Float[Array, "B S N H"]:
    """Attention on whole sequences, by the kernel that suits the devices of q's mesh.

    S may be split over seq; k and v are whole over it. The choice is made while tracing, from types alone, so a program
    compiled ahead of time for TPUs on a CPU has the TPU's kernel.
    """
    return choose(q, k)(q, k, v, segments)


def choose(q: Float[Array, "B S N H"], k: Float[Array, "B T K H"]) -> Callable:
    mesh = jax.typeof(q).sharding.mesh
    platform = getattr(mesh.abstract_device, "platform", None)
    return splash if platform == "tpu" else reference


def reference(q, k, v, segments: Segments):
    """`dense` under the mask of `causal`."""
    k, v = gather(k, "seq"), gather(v, "seq")
    index = jnp.arange(k.shape[1])
    past = jax.reshard(index, P(spec_of(q).partitions[1]))[:, None] >= index[None]
    return dense(q, k, v, (segments.q[:, :, None] == segments.k[:, None]) & past[None])


def splash(q, k, v, segments: Segments, interpret: bool = False):
    from jax.experimental.pallas.ops.tpu import splash_attention as sa

    (_, t, n, h), seq = q.shape, shards(q, 1)
    b = max(b for b in (512, 256, 128) if t // seq % b == 0)
    mask = sa.MultiHeadMask([sa.CausalMask((t, t))] * (n // shards(q, 2)))
    sizes = sa.BlockSizes(b, b, b, b, b, b, b, b)
    kernel = sa.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=seq, interpret=interpret)
    kernel = jax.tree.map(lambda x: jax.reshard(x, P("seq") if x.ndim == 1 else P(None, "seq", None)), kernel)

    def body(kernel, q, k, v, segments):
        k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        return jnp.swapaxes(jax.vmap(kernel)(q, k, v, sa.SegmentIds(*segments)), 1, 2)

    q = (q.astype(jnp.float32) / sqrt(h)).astype(q.dtype)
    return jax.shard_map(body, out_specs=spec_of(q), check_vma=False)(kernel, q, k, v, segments)


def fused(q, k, v, segments: Segments, implementation: str = "cudnn"):
    def body(q, k, v, segments):
        k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        s, t = q.shape[1], k.shape[1]
        past = (lax.axis_index("seq") * s + jnp.arange(s))[:, None] >= jnp.arange(t)[None]
        mask = (segments.q[:, :, None] == segments.k[:, None]) & past[None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], is_causal=s == t, implementation=implementation)

    return jax.shard_map(body, out_specs=spec_of(q), check_vma=False)(q, k, v, segments)
