"""Causal attention with segments and grouped queries: a reference, and the fused kernels that ship with JAX.

A `Rule` says how scores are made and how far a query sees. On whole sequences it sees the keys of its own segment up to
its own index. Padding is a segment (0) like the others: no other reads it, and every query sees at least itself, so
that every row of every form is finite.
The forms take q, k and v alike split over seq, each gathering the keys in its own way; where T is whole, none does.
"""

from collections.abc import Callable
from functools import cache, partial
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


class Rule(NamedTuple):
    """What is the same for all heads of a layer."""

    scale: float  # of the products of queries and keys
    cap: float | None = None  # soft, of the scores
    window: int | None = None  # positions that a query sees, its own the last; None: all
    near: Bool[Array, ""] | None = None  # whether this layer has the window; None: it does

    def score(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        return nn.capped(products * self.scale, self.cap)

    def reaches(self, distance: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether a query sees a key so many positions before its own."""
        seen = distance >= 0
        if self.window is None:
            return seen
        within = distance < self.window
        return seen & (within if self.near is None else within | ~self.near)


def dense(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K U"],
    mask: Bool[Array, "B S T"],
    rule: Rule,
) -> Float[Array, "B S N U"]:
    """The reference form, which every backend runs. Scores and softmax in float32; mask is True where q sees k."""
    q = nn.unfold(q, 2, k.shape[2])
    scores = rule.score(jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32))
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), -1).astype(v.dtype)
    return nn.fold(jnp.einsum("bkgst,btku->bskgu", weights, v), 2)


def striped(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B C T K H"],
    v: Float[Array, "B C T K U"],
    mask: Bool[Array, "B S C T"],
    rule: Rule,
) -> Float[Array, "B S N U"]:
    """Queries that every device of seq has, on keys and values of which each has a stripe (of a cache).

    Each sums what its stripe contributes, relative to the largest score of all (as Flash-Decoding does).
    """
    q = nn.unfold(q, 2, k.shape[3])
    scores = rule.score(jnp.einsum("bskgh,bctkh->bkgsct", q, k, preferred_element_type=jnp.float32))
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - jnp.max(scores, (-2, -1), keepdims=True))
    total = jnp.sum(weights, (-2, -1))
    out = jnp.einsum(
        "bkgsct,bctku->bkgsu", weights.astype(v.dtype), v, out_sharding=P(*spec_of(total).partitions, None)
    )
    return nn.fold(jnp.moveaxis((out / total[..., None]).astype(v.dtype), 3, 1), 2)


def causal(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K U"], segments: Segments, rule: Rule
) -> Float[Array, "B T N U"]:
    """Attention on whole sequences, in the form that suits the devices of the mesh in q's type.

    So the choice is made while tracing, by what is compiled for: ahead of time on a CPU, TPUs get the TPU kernel.
    `lax.platform_dependent` would trace every form everywhere, and cuDNN's cannot be traced without its library.
    """
    device = jax.typeof(q).sharding.mesh.abstract_device  # None on an AbstractMesh
    _, t, _, h = q.shape
    return choose(device and device.platform, t // shards(q, 1), h, q.dtype, rule.cap)(q, k, v, segments, rule)


def choose(platform: str | None, queries: int, head: int, dtype, cap: float | None = None) -> Callable:
    """The form for a platform, the queries per device and row, the head width, the dtype and the cap of scores."""
    if platform == "tpu" and queries % BLOCKS[-1] == 0:
        return splash
    half = dtype in (jnp.bfloat16, jnp.float16)
    fits = half and head % 8 == 0 and head <= 128 and queries % 2 == 0 and cap is None
    if platform == "gpu" and fits and has_cudnn():
        return cudnn
    return masked


def masked(q, k, v, segments: Segments, rule: Rule) -> Float[Array, "B T N U"]:
    """`dense` under the mask of `causal`."""
    if spec_of(q).partitions[1]:
        k, v = gather(k, "seq"), gather(v, "seq")
    index = jnp.arange(k.shape[1])
    past = rule.reaches(jax.reshard(index, P(spec_of(q).partitions[1]))[:, None] - index[None])
    return dense(q, k, v, (segments.q[:, :, None] == segments.k[:, None]) & past[None], rule)


FORMS = {"auto": causal, "dense": masked}  # what Decoder.attention may name


def splash(q, k, v, segments: Segments, rule: Rule, interpret: bool = False) -> Float[Array, "B T N U"]:
    """JAX's Pallas kernel for TPU, after FlashAttention-2 (Dao 2023): no scores in memory, and no tile that nothing of
    is seen.

    Its table of tiles is split over seq, so every shard has its own offset of the mask. Where some layers have a window
    and some have not, both kernels are compiled.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as sa

    (_, t, n, _), seq, split = q.shape, shards(q, 1), spec_of(q).partitions[1]
    block = next(b for b in BLOCKS if t // seq % b == 0)
    tiles = sa.BlockSizes(*(block,) * 8)

    def kernel(window: int | None):
        mask = sa.CausalMask((t, t)) if window is None else sa.LocalMask((t, t), (window - 1, 0), 0)
        made = sa.make_splash_mha(
            sa.MultiHeadMask([mask] * (n // shards(q, 2))), block_sizes=tiles, head_shards=1, q_seq_shards=seq,
            attn_logits_soft_cap=rule.cap, interpret=interpret,
        )  # fmt: skip
        return jax.tree.map(lambda x: jax.reshard(x, P(split) if x.ndim == 1 else P(None, split, None)), made)

    def local(q, k, v, segments, near, *kernels):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        run = lambda kernel: lambda: jax.vmap(kernel)(q, k, v, sa.SegmentIds(*segments))
        out = run(kernels[0])() if near is None else lax.cond(near, *map(run, kernels))
        return jnp.swapaxes(out, 1, 2)

    windows = (rule.window,) if rule.near is None else (rule.window, None)
    q = (q.astype(jnp.float32) * rule.scale).astype(q.dtype)  # the kernel does not scale
    return _by_device(local, q, k, v, segments, rule.near, *map(kernel, windows))


def cudnn(q, k, v, segments: Segments, rule: Rule, implementation: str = "cudnn") -> Float[Array, "B T N U"]:
    """cuDNN's flash attention for GPU. JAX gives it no segments: a `[B 1 S T]` bias of q's dtype is made in each block.

    Tiles above the diagonal are skipped where seq = 1; a shard's offset cannot be told to it, nor a window that some
    layers have: that is in the bias.
    """

    def local(q, k, v, segments, near):
        s, t = q.shape[1], k.shape[1]
        first = lax.axis_index("seq") * s if s < t else 0
        past = rule._replace(near=near).reaches((first + jnp.arange(s))[:, None] - jnp.arange(t)[None])
        mask = (segments.q[:, :, None] == segments.k[:, None]) & past[None]
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3] - v.shape[3])))
        attend = partial(
            jax.nn.dot_product_attention, is_causal=s == t, scale=rule.scale, implementation=implementation
        )
        return attend(q, k, v, mask=mask[:, None])

    return _by_device(local, q, k, v, segments, rule.near)[..., : v.shape[3]]


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
