"""The decoder of the Llama family: one table of tensors and a few functions of them.

Grouped-query attention, rotary positions, RMSNorm, SwiGLU; optional q/k norm, qkv bias and tied embeddings.
Placements are stated where arrays are born (the table, the embedding, a fresh cache); types carry them from there.
"""

from dataclasses import dataclass
from functools import partial
from math import sqrt

import jax
import jax.numpy as jnp
from flax import struct
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rljax.mesh import BATCH, Strategy, gather, island, reduced, shards, spec_of
from rljax.mesh.verbs import axes_of
from rljax.model import attention, nn, order
from rljax.model.context import across
from rljax.model.table import LM, UNROLL, Tensor
from rljax.types import Tokens


@dataclass(frozen=True)
class Decoder:
    """Sizes and options of a decoder. `compute` is the dtype that activations and gathered weights have."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    compute: str = "float32"
    attention: str = "auto"  # on whole sequences: what the devices have, or "dense"

    def __post_init__(self):
        for field in ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if self.compute not in ("float32", "bfloat16"):
            raise ValueError(f"compute={self.compute!r} must be 'float32' or 'bfloat16'")
        if self.attention not in attention.FORMS:
            raise ValueError(f"attention={self.attention!r} must be 'auto' or 'dense'")

    def build(self) -> LM:
        bind = lambda f: partial(f, self)
        return LM(
            table(self), bind(embed), bind(block), bind(norm), bind(project), bind(prefill), bind(extend),
            (self.heads, self.kv_heads), self.vocab, self.compute,
        )  # fmt: skip


@struct.dataclass
class Layer:
    """Weights of one layer, or of all of them stacked; what an option leaves out is None."""

    norm1: Array
    wq: Array
    wk: Array
    wv: Array
    bq: Array | None
    bk: Array | None
    bv: Array | None
    q_norm: Array | None
    k_norm: Array | None
    wo: Array
    norm2: Array
    gate: Array
    up: Array
    down: Array


@struct.dataclass
class Params:
    embed: Array
    layers: Layer
    norm: Array
    unembed: Array | None


@struct.dataclass
class Cache:
    """Keys and values in stripes over the C devices of the seq axis: slot t of stripe c holds token C t + c of a row.

    So every stripe grows as fast as the others, and ring attention finds the keys of a prompt where they stay.
    """

    k: Float[Array, "L B C T K H"]
    v: Float[Array, "L B C T K H"]


@struct.dataclass
class Frame:
    """What every block reads besides the residual stream."""

    rope: tuple[Array, Array]
    segments: attention.Segments
    context: str = struct.field(pytree_node=False)


def table(m: Decoder) -> Params:
    L, D, F, V = m.layers, m.width, m.ffn, m.vocab
    Q, KV, H = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.head_dim
    at = "model.layers.{}."
    column, row = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
    when = lambda wanted, tensor: tensor if wanted else None
    return Params(
        embed=Tensor("model.embed_tokens.weight", "V D", (V, D), P("tensor", "fsdp"), 1 / sqrt(D)),
        layers=Layer(
            norm1=Tensor(at + "input_layernorm.weight", "L D", (L, D), P(None, None), 1),
            wq=Tensor(at + "self_attn.q_proj.weight", "L D N*H", (L, D, Q), column, 1 / sqrt(D)),
            wk=Tensor(at + "self_attn.k_proj.weight", "L D K*H", (L, D, KV), column, 1 / sqrt(D)),
            wv=Tensor(at + "self_attn.v_proj.weight", "L D K*H", (L, D, KV), column, 1 / sqrt(D)),
            bq=when(m.qkv_bias, Tensor(at + "self_attn.q_proj.bias", "L N*H", (L, Q), P(None, "tensor"), 0)),
            bk=when(m.qkv_bias, Tensor(at + "self_attn.k_proj.bias", "L K*H", (L, KV), P(None, "tensor"), 0)),
            bv=when(m.qkv_bias, Tensor(at + "self_attn.v_proj.bias", "L K*H", (L, KV), P(None, "tensor"), 0)),
            q_norm=when(m.qk_norm, Tensor(at + "self_attn.q_norm.weight", "L H", (L, H), P(None, None), 1)),
            k_norm=when(m.qk_norm, Tensor(at + "self_attn.k_norm.weight", "L H", (L, H), P(None, None), 1)),
            wo=Tensor(at + "self_attn.o_proj.weight", "L N*H D", (L, Q, D), row, 1 / sqrt(Q)),
            norm2=Tensor(at + "post_attention_layernorm.weight", "L D", (L, D), P(None, None), 1),
            gate=Tensor(at + "mlp.gate_proj.weight", "L D F", (L, D, F), column, 1 / sqrt(D)),
            up=Tensor(at + "mlp.up_proj.weight", "L D F", (L, D, F), column, 1 / sqrt(D)),
            down=Tensor(at + "mlp.down_proj.weight", "L F D", (L, F, D), row, 1 / sqrt(F)),
        ),
        norm=Tensor("model.norm.weight", "D", (D,), P(None), 1),
        unembed=when(not m.tied, Tensor("lm_head.weight", "D V", (D, V), P("fsdp", "tensor"), 1 / sqrt(D))),
    )


def weight(m: Decoder, w: Array) -> Array:
    """A matrix as its matmul reads it: in the compute dtype, whole over fsdp. Named, so that no remat keeps it."""
    return checkpoint_name(gather(reduced(w.astype(m.compute)), "fsdp"), "gathered")


def embed(m: Decoder, p: Params, tokens: Tokens, strategy: Strategy) -> tuple[Float[Array, "B T D"], Frame]:
    """The residual stream, split over seq (and tensor) from here on, and the frame that its blocks share."""
    split = lambda x: jax.reshard(x, P(BATCH, "seq"))
    x = _embed(m, p, tokens.ids, P(BATCH, ("seq", "tensor") if strategy.sequence_parallel else "seq", None))
    rope = nn.rope(split(tokens.positions), m.head_dim, m.rope_theta)
    return x, Frame(rope, attention.Segments(split(tokens.segments), tokens.segments), strategy.context)


def _embed(m: Decoder, p: Params, ids, spec: P):
    """Rows of a table split over the vocabulary: each device looks up those it has, and tensor sums them.

    The partitioner does the same with an indexed read, but ends in an all-reduce where `spec` wants a reduce-scatter.
    """
    w = weight(m, p.embed)
    if "tensor" not in axes_of(spec.partitions[1]) or shards(w, 0) == 1:
        return w.at[ids].get(out_sharding=spec)

    def local(w, ids):
        at = ids - lax.axis_index("tensor") * w.shape[0]
        mine = (0 <= at) & (at < w.shape[0])
        x = jnp.where(mine[..., None], w.at[jnp.where(mine, at, 0)].get(), 0)
        return lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)

    return island(local, spec)(w, jax.reshard(ids, P(BATCH, "seq")))


def block(m: Decoder, x: Float[Array, "B T D"], w: Layer, frame: Frame) -> Float[Array, "B T D"]:
    """One layer on whole sequences."""
    q, k, v = _qkv(m, x, w, frame.rope)
    return _rest(m, x, _attend(m, q, k, v, frame), w)


def _attend(m: Decoder, q, k, v, frame: Frame):
    return across(frame.context, attention.FORMS[m.attention], q, k, v, frame.segments)


def _qkv(m: Decoder, x, w: Layer, table):
    h = nn.whole(nn.rms_norm(x, w.norm1, m.norm_eps))

    def heads(matrix, bias, n):
        y = nn.matmul(h, weight(m, matrix))
        y = y if bias is None else nn.shift(y, bias.astype(y.dtype))
        y = _spread(y, n)
        return jnp.reshape(y, (*y.shape[:2], -1, m.head_dim), out_sharding=P(*spec_of(y).partitions, None))

    q, k, v = heads(w.wq, w.bq, m.heads), heads(w.wk, w.bk, m.kv_heads), heads(w.wv, w.bv, m.kv_heads)
    if m.qk_norm:
        q, k = nn.rms_norm(q, w.q_norm, m.norm_eps), nn.rms_norm(k, w.k_norm, m.norm_eps)
    return nn.rotate(q, table), nn.rotate(k, table), v


def _spread(y: Float[Array, "B T K*H"], heads: int) -> Float[Array, "B T K*H"]:
    """Fewer heads than the tensor axis has devices: each device takes the whole head that its queries read."""
    tensor = shards(y, 2)
    if heads % tensor == 0:
        return y

    @jax.checkpoint  # leaves no residuals, with which JAX cannot lower an island within a pipeline
    def local(y):
        y = lax.all_gather(y, "tensor", axis=2, tiled=True)
        width = y.shape[2] // heads
        return lax.dynamic_slice_in_dim(y, lax.axis_index("tensor") * heads // tensor * width, width, 2)

    return island(local, spec_of(y))(y)


def _rest(m: Decoder, x, attended: Float[Array, "B T N H"], w: Layer):
    """What follows attention: its output projection and the feed-forward, each added to the stream."""
    b, t, *_ = attended.shape
    a = jnp.reshape(attended, (b, t, m.heads * m.head_dim), out_sharding=P(*spec_of(attended).partitions[:3]))
    x = x + checkpoint_name(nn.matmul(a, weight(m, w.wo), spec_of(x)), "attention")
    h = nn.rms_norm(x, w.norm2, m.norm_eps)
    return x + checkpoint_name(nn.swiglu(h, weight(m, w.gate), weight(m, w.up), weight(m, w.down)), "ffn")


def norm(m: Decoder, p: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return nn.rms_norm(x, p.norm, m.norm_eps)


def project(m: Decoder, p: Params):
    """Hidden states to logits, the head gathered once however often the result is called."""
    w, eq = (weight(m, p.embed), "...d,vd->...v") if m.tied else (weight(m, p.unembed), "...d,dv->...v")
    return lambda h: jnp.einsum(eq, h, w, preferred_element_type=jnp.float32)


def empty_cache(m: Decoder, rows: int, slots: int) -> Cache:
    """Rows split over the batch axes, key/value heads over tensor, repeated where it has more devices than heads."""
    sizes = jax.sharding.get_abstract_mesh().shape
    shape = m.layers, rows, sizes["seq"], slots, max(m.kv_heads, sizes["tensor"]), m.head_dim
    return Cache(*(jnp.zeros(shape, m.compute, out_sharding=P(None, *STRIPES)) for _ in range(2)))


def prefill(
    m: Decoder, p: Params, ids: Int[Array, "B S"], lengths: Int[Array, "B"], strategy: Strategy
) -> tuple[Float[Array, "B 1 D"], Cache]:
    """The hidden state after the last token of each right-padded row, and the keys and values of all S of them.

    Every device works on its share of the tokens, so S must be a multiple of `order.columns(strategy)`.
    """
    ones = jnp.ones_like(ids)
    tokens = order.deal(Tokens(ids, jnp.cumsum(ones, 1) - 1, ones), strategy)
    x, frame = embed(m, p, tokens, strategy)

    def layer(x, w):
        q, k, v = _qkv(m, x, w, frame.rope)
        return _rest(m, x, _attend(m, q, k, v, frame), w), Cache(*(order.stripes(y, strategy) for y in (k, v)))

    x, cache = lax.scan(layer, x, p.layers, unroll=m.layers <= UNROLL)
    last = jax.reshard(tokens.positions == lengths[:, None] - 1, P(*spec_of(x).partitions[:2]))
    return norm(m, p, jnp.sum(jnp.where(last[..., None], x, 0), 1, keepdims=True)), cache


def extend(
    m: Decoder, p: Params, ids: Int[Array, "B S"], cache: Cache, lengths: Int[Array, "B"], window: int | None = None
) -> tuple[Float[Array, "B S D"], Cache]:
    """Appends S tokens to each row at its own length, and the hidden states after each.

    Attention reads the first `window` tokens (default all slots): the caller promises lengths + S <= window. Every
    device of the seq axis works on all S, each with the keys of its stripe.
    The cache is carried through the layers, so that it is updated in place: as a scan's xs and ys it is copied whole.
    """
    stripes, slots = cache.k.shape[2:4]
    read = slots if window is None else -(-window // stripes)
    positions = lengths[:, None] + jnp.arange(ids.shape[1])[None]
    rope = nn.rope(positions, m.head_dim, m.rope_theta)
    mask = positions[:, :, None, None] >= order.positions(stripes, read)[None, None]

    def layer(carry, scanned):
        x, cache = carry
        i, w = scanned
        q, k, v = _qkv(m, x, w, rope)
        cache = Cache(order.append(cache.k, k, i, lengths), order.append(cache.v, v, i, lengths))
        k, v = (lax.dynamic_index_in_dim(c, i, keepdims=False)[:, :, :read] for c in (cache.k, cache.v))
        return (_rest(m, x, attention.striped(q, k, v, mask), w), cache), None

    carry = (_embed(m, p, ids, P(*spec_of(ids).partitions, None)), cache)
    (x, cache), _ = lax.scan(layer, carry, (jnp.arange(m.layers), p.layers), unroll=m.layers <= UNROLL)
    return norm(m, p, x), cache
