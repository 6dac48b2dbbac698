"""A decoder on whole sequences: embedding, blocks, norm and head.

`m` is the decoder's settings, a `decoder.Decoder`; `p` its `Params` and `w` the weights of one `Layer`.
Placements are stated where arrays are born (the table, the embedding, a fresh cache); types carry them from there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt

from rljax.mesh import Strategy, gather, island, reduced, shards, spec_of
from rljax.mesh.verbs import axes_of, rows, split_over, without
from rljax.model import attention, latent, moe, nn, products
from rljax.model.context import across
from rljax.model.quantize import dense
from rljax.model.rope import frequencies
from rljax.types import Tokens


class Ropes(NamedTuple):
    """Cosines and sines of every token, for layers that see everything and, where these turn otherwise, the others."""

    far: tuple[Array, Array]
    near: tuple[Array, Array] | None


@struct.dataclass
class Frame:
    """What every block reads besides the residual stream."""

    ropes: "Ropes"
    segments: attention.Segments
    routes: Int[Array, "L B T k"] | None
    noise: UInt[Array, "B T"] | None
    context: str = struct.field(pytree_node=False)


def weight(m, w: Array) -> Array:
    """A matrix, or what adds to it too, as its matmul reads it: in the compute dtype, whole over fsdp."""
    return products.each(lambda w: gather(reduced(dense(w, m.compute)), "fsdp"), w)


def embed(m, p, tokens: Tokens, strategy: Strategy) -> tuple[Float[Array, "B T D"], Frame]:
    """The residual stream, split over seq (and tensor) from here on, and the frame that its blocks share."""
    split = lambda x: jax.reshard(x, P(rows(), "seq"))
    x = look_up(m, p, tokens.ids, P(rows(), ("seq", "tensor") if strategy.sequence_parallel else "seq", None))
    turned = ropes(m, split(tokens.positions))
    routes = None if tokens.routes is None else jnp.moveaxis(tokens.routes, 2, 0).astype(jnp.int32)
    routes = None if routes is None else jax.reshard(routes, P(None, rows(), "seq", None))
    segments = attention.Segments(split(tokens.segments), tokens.segments)
    noise = None if tokens.noise is None else split(tokens.noise)
    return x, Frame(turned, segments, routes, noise, strategy.context)


def ropes(m, positions: Int[Array, "B T"]) -> Ropes:
    head = m.latent.turned if m.latent else m.head_dim
    table = lambda theta, scaling: nn.turn(positions, *frequencies(head, theta, scaling))
    apart = m.window_theta is not None
    return Ropes(table(m.rope_theta, m.rope_scaling), table(m.window_theta, None) if apart else None)


def rope(m, table: Ropes, w) -> tuple[Array, Array]:
    """That of a layer."""
    if table.near is None:
        return table.far
    if w.near is None:
        return table.near
    return jax.tree.map(lambda near, far: jnp.where(w.near, near, far), table.near, table.far)


def rule(m, w) -> attention.Rule:
    """How a layer attends."""
    return attention.Rule(m.scale, m.score_cap, m.window, w.near)


def look_up(m, p, ids, spec: P):
    """Embeddings of a table split over the vocabulary: each device looks up those it has, and tensor sums them.

    An indexed read would say as much, but ends in an all-reduce where `spec` wants a reduce-scatter, and XLA's
    partitioner aborts over it within a pipeline.
    """
    w = weight(m, p.embed)
    scaled = lambda x: x if m.embed_scale == 1 else x * jnp.asarray(m.embed_scale, x.dtype)
    if shards(w, 0) == 1:
        return scaled(w.at[ids].get(out_sharding=spec))

    def local(w, ids):
        at = ids - lax.axis_index("tensor") * w.shape[0]
        mine = (0 <= at) & (at < w.shape[0])
        x = jnp.where(mine[..., None], w.at[jnp.where(mine, at, 0)].get(), 0)
        if "tensor" in axes_of(spec.partitions[1]):
            return lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
        return lax.psum(x, "tensor")

    split = P(*without(spec, "tensor").partitions[:2])
    left = spec_of(w).reduced & {*split_over(split)}  # where tokens are whole, no sum is left
    w = jax.reshard(w, P(*spec_of(w).partitions, reduced=left))
    return scaled(island(local, spec)(w, jax.reshard(ids, split)))


def stacks(m, p, frame: Frame | None = None, start: int = 0) -> list:
    """Dense layers and those with experts are not alike, so they are two stacks.

    Of the second there may be but a part, from layer `start` of that stack on.
    """
    part = lambda x: lax.dynamic_slice_in_dim(x, start, len(jax.tree.leaves(p.layers)[0]))
    routes = frame and jax.tree.map(part, frame.routes)
    known = {"near": m.near} if len({*m.near}) > 1 else {}
    if frame and frame.noise is not None:
        known["number"] = range(m.layers)
    first = p.first and p.first.replace(**{name: jnp.array(x[: m.dense]) for name, x in known.items()})
    rest = {name: part(jnp.array(x[m.dense :])) for name, x in known.items()}
    return [*[first] * bool(m.dense), p.layers.replace(routes=routes, **rest)]


def block(m, x: Float[Array, "B T D"], w, frame: Frame) -> tuple[Float[Array, "B T D"], object]:
    """One layer on whole sequences, and the sums that its experts are balanced by."""
    w = products.sown(w, frame.noise)
    q, k, v = queries(m, x, w, frame.ropes)
    x, sums, _ = rest(m, x, attend(m, q, k, v, w, frame), w, frame.segments.q)
    return x, sums


def attend(m, q, k, v, w, frame: Frame):
    return across(frame.context, attention.FORMS[m.attention], q, k, v, frame.segments, rule(m, w))


def queries(m, x, w, turned: Ropes):
    """Queries, keys and values of a layer's heads, turned by position."""
    h, w, table = entering(m, x, w, turned)
    if m.latent:
        return latent.queries(m, h, w, table, weight)
    every = m.qk_norm == "all"

    def heads(y, bias, n, scale=None):
        y = y if bias is None else nn.shift(y, bias.astype(y.dtype))
        y = _spread(normed(m, y, scale) if every else y, n)
        y = jnp.reshape(y, (*y.shape[:2], -1, m.head_dim), out_sharding=P(*spec_of(y).partitions, None))
        return y if every else normed(m, y, scale)

    q, k, v = products.column(h, *(weight(m, w) for w in (w.wq, w.wk, w.wv)))
    q, k = heads(q, w.bq, m.heads, w.q_norm), heads(k, w.bk, m.kv_heads, w.k_norm)
    return nn.rotate(q, table), nn.rotate(k, table), heads(v, w.bv, m.kv_heads)


def entering(m, x, w, turned: Ropes):
    """What the attention of a layer reads: the normalized stream, the layer's weights, and how to turn."""
    return normed(m, x, w.norm1), w, rope(m, turned, w)


def normed(m, x, w):
    """x normalized, where there is a norm."""
    return x if w is None else nn.rms_norm(x, w, m.norm_eps, m.norm_offset)


def _spread(y: Float[Array, "B T K*H"], heads: int) -> Float[Array, "B T K*H"]:
    """Fewer heads than the tensor axis has devices: each device takes the whole head that its queries read."""
    tensor = shards(y, 2)
    if heads % tensor == 0:
        return y

    def local(y):
        y = lax.all_gather(y, "tensor", axis=2, tiled=True)
        width = y.shape[2] // heads
        return lax.dynamic_slice_in_dim(y, lax.axis_index("tensor") * heads // tensor * width, width, 2)

    return island(local, spec_of(y))(y)


def rest(m, x, attended: Float[Array, "B T N U"], w, segments: Int[Array, "B T"]):
    """What follows attention: its output projection and the feed-forward, each added to the stream.

    Also the sums that experts are balanced by, and which of them each token chose.
    """
    b, t, n, u = attended.shape
    a = jnp.reshape(attended, (b, t, n * u), out_sharding=P(*spec_of(attended).partitions[:3]))
    a = checkpoint_name(products.row(a, weight(m, w.wo), spec_of(x)), "attention")
    x = x + normed(m, a, w.post1)
    h = normed(m, x, w.norm2)
    y, *rest = _dense(m, h, w) if w.router is None else _mixture(m, h, w, segments)
    return x + normed(m, checkpoint_name(y, "ffn"), w.post2), *rest


def _dense(m, h: Float[Array, "B T D"], w):
    return products.gated(h, weight(m, w.gate), weight(m, w.up), weight(m, w.down), m.activation), (), None


def _mixture(m, h: Float[Array, "B T D"], w, segments: Int[Array, "B T"]):
    """Each token's experts, and those that all share. Padding has none."""
    whole = P(*without(spec_of(h), "tensor").partitions)
    router = reduced(weight(m, w.router), nn.split(h))
    logits = jax.reshard(jnp.einsum("btd,de->bte", h, router, preferred_element_type=jnp.float32), whole)
    routing = moe.route(m.experts, logits, w.router_bias, w.routes)
    routing = routing._replace(ids=jnp.where(segments[..., None] > 0, routing.ids, m.experts.count))
    matrices = (weight(m, w) for w in (w.gate, w.up, w.down))
    y, dropped = moe.experts(m.experts, gather(h, "tensor"), routing, *matrices, out=spec_of(h))
    if w.shared_gate is not None:
        y = y + products.gated(h, weight(m, w.shared_gate), weight(m, w.shared_up), weight(m, w.shared_down))
    return y, moe.measure(m.experts, routing, logits, segments)._replace(dropped=dropped), routing.ids


def norm(m, p, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return normed(m, x, p.norm)


def project(m, p):
    """Hidden states to logits, the head gathered once however often the result is called."""
    w, eq = (weight(m, p.embed), "...d,vd->...v") if m.tied else (weight(m, p.unembed), "...d,dv->...v")
    return lambda h: nn.capped(jnp.einsum(eq, h, w, preferred_element_type=jnp.float32), m.logit_cap)


def value(m, p, h: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """The scalar head, in float32."""
    return jnp.einsum("btd,d->bt", h.astype(jnp.float32), reduced(p.value.astype(jnp.float32), nn.split(h)))
