"""Causal attention with segments and grouped queries: a reference, and the fused kernels that ship with JAX.

On whole sequences a query sees the keys of its own segment up to its own index. Padding is a segment (0) like the
others: no other reads it, and every query sees at least itself, so that every row of every form is finite.
The forms take q, k and v alike split over seq, each gathering the keys in its own way; where T is whole, none does.
"""

from collections.abc import Callable
from functools import cache, partial
from math import sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import gather, island, shards, spec_of
from rljax.model import nn

MASKED = -1e30  # not -inf: a row with nothing to see stays finite
BLOCKS = 512, 256, 128  # tiles of the TPU kernel, the first that divides the queries of a device


class Segments(NamedTuple):
    """The segment of every query, split over seq as queries are, and of every key, whole over seq. 0 is padding."""

    q: Int[Array, "B S"]
    k: Int[Array, "B T"]


def dense(
    q: Float[Array, "B S N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], mask: Bool[Array, "B S T"]
) -> Float[Array, "B S N H"]:
    """The reference form, which every backend runs. Scores and softmax in float32; mask is True where q sees k."""
    q = nn.unfold(q, 2, k.shape[2])
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) / sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), -1).astype(v.dtype)
    return nn.fold(jnp.einsum("bkgst,btkh->bskgh", weights, v), 2)


def striped(
    q: Float[Array, "B S N H"], k: Float[Array, "B C T K H"], v: Float[Array, "B C T K H"], mask: Bool[Array, "B S C T"]
) -> Float[Array, "B S N H"]:
    """Queries that every device of seq has, on keys and values of which each has a stripe (of a cache).

    Each sums what its stripe contributes, relative to the largest score of all (as Flash-Decoding does).
    """
    q = nn.unfold(q, 2, k.shape[3])
    scores = jnp.einsum("bskgh,bctkh->bkgsct", q, k, preferred_element_type=jnp.float32) / sqrt(q.shape[-1])
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - jnp.max(scores, (-2, -1), keepdims=True))
    total = jnp.sum(weights, (-2, -1))
    out = jnp.einsum(
        "bkgsct,bctkh->bkgsh", weights.astype(v.dtype), v, out_sharding=P(*spec_of(total).partitions, None)
    )
    return nn.fold(jnp.moveaxis((out / total[..., None]).astype(v.dtype), 3, 1), 2)


def causal(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], segments: Segments
) -> Float[Array, "B T N H"]:
    """Attention on whole sequences, in the form that suits the devices of the mesh in q's type.

    So the choice is made while tracing, by what is compiled for: ahead of time on a CPU, TPUs get the TPU kernel.
    `lax.platform_dependent` would trace every form everywhere, and cuDNN's cannot be traced without its library.
    """
    device = jax.typeof(q).sharding.mesh.abstract_device  # None on an AbstractMesh
    _, t, _, h = q.shape
    return choose(device and device.platform, t // shards(q, 1), h, q.dtype)(q, k, v, segments)


def choose(platform: str | None, queries: int, head: int, dtype) -> Callable:
    """The form for a platform, the queries per device and row, the head width and the dtype."""
    if platform == "tpu" and queries % BLOCKS[-1] == 0:
        return splash
    half = dtype in (jnp.bfloat16, jnp.float16)
    if platform == "gpu" and half and head % 8 == 0 and head <= 128 and queries % 2 == 0 and has_cudnn():
        return cudnn
    return masked


def masked(q, k, v, segments: Segments) -> Float[Array, "B T N H"]:
    """`dense` under the mask of `causal`."""
    if spec_of(q).partitions[1]:
        k, v = gather(k, "seq"), gather(v, "seq")
    index = jnp.arange(k.shape[1])
    past = jax.reshard(index, P(spec_of(q).partitions[1]))[:, None] >= index[None]
    return dense(q, k, v, (segments.q[:, :, None] == segments.k[:, None]) & past[None])


FORMS = {"auto": causal, "dense": masked}  # what Decoder.attention may name


def splash(q, k, v, segments: Segments, interpret: bool = False) -> Float[Array, "B T N H"]:
    """JAX's Pallas kernel for TPU, after FlashAttention-2 (Dao 2023): no scores in memory, no tile above the diagonal.

    Its table of tiles is split over seq, so every shard has its own offset of the causal mask.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as sa

    (_, t, n, h), seq = q.shape, shards(q, 1)
    block = next(b for b in BLOCKS if t // seq % b == 0)
    mask = sa.MultiHeadMask([sa.CausalMask((t, t))] * (n // shards(q, 2)))
    tiles = sa.BlockSizes(*(block,) * 8)
    kernel = sa.make_splash_mha(mask, block_sizes=tiles, head_shards=1, q_seq_shards=seq, interpret=interpret)
    split = spec_of(q).partitions[1]
    kernel = jax.tree.map(lambda x: jax.reshard(x, P(split) if x.ndim == 1 else P(None, split, None)), kernel)

    def local(q, k, v, segments, kernel):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        return jnp.swapaxes(jax.vmap(kernel)(q, k, v, sa.SegmentIds(*segments)), 1, 2)

    q = (q.astype(jnp.float32) / sqrt(h)).astype(q.dtype)  # the kernel does not scale
    return _by_device(local, q, k, v, segments, kernel)


def cudnn(q, k, v, segments: Segments, implementation: str = "cudnn") -> Float[Array, "B T N H"]:
    """cuDNN's flash attention for GPU. JAX gives it no segments: a `[B 1 S T]` bias of q's dtype is made in each block.

    Tiles above the diagonal are skipped where seq = 1; a shard's offset cannot be told to it.
    """

    def local(q, k, v, segments):
        s, t = q.shape[1], k.shape[1]
        first = lax.axis_index("seq") * s if s < t else 0
        past = (first + jnp.arange(s))[:, None] >= jnp.arange(t)[None]
        mask = (segments.q[:, :, None] == segments.k[:, None]) & past[None]
        attend = partial(jax.nn.dot_product_attention, is_causal=s == t, implementation=implementation)
        return attend(q, k, v, mask=mask[:, None])

    return _by_device(local, q, k, v, segments)


@cache
def has_cudnn() -> bool:
    """Whether this process finds the cuDNN library, whose version JAX asks for while tracing, even ahead of time."""
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x)
    except RuntimeError:
        return False
    return True


def _by_device(local: Callable, q, k, v, *rest):
    """`local` on the rows, queries and heads of each device, keys and values gathered over seq.

    Kernels need check_vma=False, under which JAX cannot transpose an input that is `reduced` over seq, as `gather`
    makes it; an all_gather inside transposes to the one reduce-scatter.
    """
    split = shards(q, 1) > 1

    def body(q, k, v, *rest):
        if split:
            k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        return local(q, k, v, *rest)

    return island(body, spec_of(q), check_vma=False)(q, k, v, *rest)
