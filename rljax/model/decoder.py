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
from rljax.mesh.verbs import axes_of, without
from rljax.model import attention, moe, nn, order
from rljax.model.context import across
from rljax.model.moe import Experts
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
    experts: Experts | None = None  # in place of the feed-forward, from layer `dense` on
    dense: int = 0
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
        if not 0 <= self.dense < self.layers or (self.dense and self.experts is None):
            raise ValueError(f"dense={self.dense} must be a number of layers before the first with experts, or 0")
        if self.compute not in ("float32", "bfloat16"):
            raise ValueError(f"compute={self.compute!r} must be 'float32' or 'bfloat16'")
        if self.attention not in attention.FORMS:
            raise ValueError(f"attention={self.attention!r} must be 'auto' or 'dense'")

    def build(self) -> LM:
        bind = lambda f: partial(f, self)
        return LM(
            table(self), bind(embed), bind(stacks), bind(block), bind(norm), bind(project), bind(prefill), bind(extend),
            bind(penalty), bind(settle), bind(observe), (self.heads, self.kv_heads), self.vocab, self.compute,
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
    gate: Array  # of every expert, where there are experts
    up: Array
    down: Array
    router: Array | None
    router_bias: Array | None
    shared_gate: Array | None
    shared_up: Array | None
    shared_down: Array | None
    routes: Array | None = None  # not a weight: the experts to choose


@struct.dataclass
class Params:
    embed: Array
    first: Layer | None  # dense layers before those with experts
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
    routes: Int[Array, "L B C T 1 k"] | None = None  # the experts chosen, where training shall replay them


@struct.dataclass
class Frame:
    """What every block reads besides the residual stream."""

    rope: tuple[Array, Array]
    segments: attention.Segments
    routes: Int[Array, "L B T k"] | None
    context: str = struct.field(pytree_node=False)


def table(m: Decoder) -> Params:
    D, V = m.width, m.vocab
    return Params(
        embed=Tensor("model.embed_tokens.weight", "V D", (V, D), P("tensor", "fsdp"), 1 / sqrt(D)),
        first=_layers(m, 0, m.dense, None) if m.dense else None,
        layers=_layers(m, m.dense, m.layers - m.dense, m.experts),
        norm=Tensor("model.norm.weight", "D", (D,), P(None), 1),
        unembed=None if m.tied else Tensor("lm_head.weight", "D V", (D, V), P("fsdp", "tensor"), 1 / sqrt(D)),
    )


def _layers(m: Decoder, first: int, L: int, e: Experts | None) -> Layer:
    """The tensors of L layers from number `first` on, with experts or without."""
    D, F, Q, KV, H = m.width, m.ffn, m.heads * m.head_dim, m.kv_heads * m.head_dim, m.head_dim
    column, row, vector, whole = P("fsdp", "tensor"), P("tensor", "fsdp"), P("tensor"), P(None)

    def tensor(name, dims, shape, spec, std, when=True):
        if when:
            return Tensor("model.layers.{}." + name, "L " + dims, (L, *shape), P(None, *spec), std, first)

    def matrix(name, dims, shape, spec, when=True):
        return tensor(name, dims, shape, spec, when and 1 / sqrt(shape[-2]), when)

    if e is None:
        feed_forward = dict(
            gate=matrix("mlp.gate_proj.weight", "D F", (D, F), column),
            up=matrix("mlp.up_proj.weight", "D F", (D, F), column),
            down=matrix("mlp.down_proj.weight", "F D", (F, D), row),
        )
    else:
        E, F, S = e.count, e.width, e.shared
        feed_forward = dict(
            gate=matrix("mlp.experts.{}.gate_proj.weight", "E D F", (E, D, F), P("expert", *column)),
            up=matrix("mlp.experts.{}.up_proj.weight", "E D F", (E, D, F), P("expert", *column)),
            down=matrix("mlp.experts.{}.down_proj.weight", "E F D", (E, F, D), P("expert", *row)),
            router=matrix("mlp.gate.weight", "D E", (D, E), P("fsdp", None)),
            router_bias=tensor("mlp.gate.e_score_correction_bias", "E", (E,), whole, 0, e.bias_rate > 0),
            shared_gate=matrix("mlp.shared_experts.gate_proj.weight", "D F", (D, S), column, S > 0),
            shared_up=matrix("mlp.shared_experts.up_proj.weight", "D F", (D, S), column, S > 0),
            shared_down=matrix("mlp.shared_experts.down_proj.weight", "F D", (S, D), row, S > 0),
        )
    absent = dict.fromkeys(("router", "router_bias", "shared_gate", "shared_up", "shared_down"))
    return Layer(
        norm1=tensor("input_layernorm.weight", "D", (D,), whole, 1),
        wq=matrix("self_attn.q_proj.weight", "D N*H", (D, Q), column),
        wk=matrix("self_attn.k_proj.weight", "D K*H", (D, KV), column),
        wv=matrix("self_attn.v_proj.weight", "D K*H", (D, KV), column),
        bq=tensor("self_attn.q_proj.bias", "N*H", (Q,), vector, 0, m.qkv_bias),
        bk=tensor("self_attn.k_proj.bias", "K*H", (KV,), vector, 0, m.qkv_bias),
        bv=tensor("self_attn.v_proj.bias", "K*H", (KV,), vector, 0, m.qkv_bias),
        q_norm=tensor("self_attn.q_norm.weight", "H", (H,), whole, 1, m.qk_norm),
        k_norm=tensor("self_attn.k_norm.weight", "H", (H,), whole, 1, m.qk_norm),
        wo=matrix("self_attn.o_proj.weight", "N*H D", (Q, D), row),
        norm2=tensor("post_attention_layernorm.weight", "D", (D,), whole, 1),
        **(absent | feed_forward),
    )


def weight(m: Decoder, w: Array) -> Array:
    """A matrix as its matmul reads it: in the compute dtype, whole over fsdp. Named, so that no remat keeps it."""
    return checkpoint_name(gather(reduced(w.astype(m.compute)), "fsdp"), "gathered")


def embed(m: Decoder, p: Params, tokens: Tokens, strategy: Strategy) -> tuple[Float[Array, "B T D"], Frame]:
    """The residual stream, split over seq (and tensor) from here on, and the frame that its blocks share."""
    split = lambda x: jax.reshard(x, P(BATCH, "seq"))
    x = _embed(m, p, tokens.ids, P(BATCH, ("seq", "tensor") if strategy.sequence_parallel else "seq", None))
    rope = nn.rope(split(tokens.positions), m.head_dim, m.rope_theta)
    routes = None if tokens.routes is None else jnp.moveaxis(tokens.routes, 2, 0).astype(jnp.int32)
    routes = None if routes is None else jax.reshard(routes, P(None, BATCH, "seq", None))
    return x, Frame(rope, attention.Segments(split(tokens.segments), tokens.segments), routes, strategy.context)


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


def stacks(m: Decoder, p: Params, frame: Frame) -> list[Layer]:
    """Dense layers and those with experts are not alike, so they are two stacks."""
    return [*[p.first] * bool(m.dense), p.layers.replace(routes=frame.routes)]


def block(m: Decoder, x: Float[Array, "B T D"], w: Layer, frame: Frame) -> tuple[Float[Array, "B T D"], object]:
    """One layer on whole sequences, and the sums that its experts are balanced by."""
    q, k, v = _qkv(m, x, w, frame.rope)
    x, sums, _ = _rest(m, x, _attend(m, q, k, v, frame), w, frame.segments.q)
    return x, sums


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

    def local(y):
        y = lax.all_gather(y, "tensor", axis=2, tiled=True)
        width = y.shape[2] // heads
        return lax.dynamic_slice_in_dim(y, lax.axis_index("tensor") * heads // tensor * width, width, 2)

    return island(local, spec_of(y))(y)


def _rest(m: Decoder, x, attended: Float[Array, "B T N H"], w: Layer, segments: Int[Array, "B T"]):
    """What follows attention: its output projection and the feed-forward, each added to the stream.

    Also the sums that experts are balanced by, and which of them each token chose.
    """
    b, t, *_ = attended.shape
    a = jnp.reshape(attended, (b, t, m.heads * m.head_dim), out_sharding=P(*spec_of(attended).partitions[:3]))
    x = x + checkpoint_name(nn.matmul(a, weight(m, w.wo), spec_of(x)), "attention")
    h = nn.rms_norm(x, w.norm2, m.norm_eps)
    y, *rest = _dense(m, h, w) if w.router is None else _mixture(m, h, w, segments)
    return x + checkpoint_name(y, "ffn"), *rest


def _dense(m: Decoder, h: Float[Array, "B T D"], w: Layer):
    return nn.swiglu(h, weight(m, w.gate), weight(m, w.up), weight(m, w.down)), (), None


def _mixture(m: Decoder, h: Float[Array, "B T D"], w: Layer, segments: Int[Array, "B T"]):
    """Each token's experts, and those that all share. Padding has none."""
    whole = P(*without(spec_of(h), "tensor").partitions)
    router = reduced(weight(m, w.router), nn.split(h))
    logits = jax.reshard(jnp.einsum("btd,de->bte", h, router, preferred_element_type=jnp.float32), whole)
    routing = moe.route(m.experts, logits, w.router_bias, w.routes)
    routing = routing._replace(ids=jnp.where(segments[..., None] > 0, routing.ids, m.experts.count))
    matrices = (weight(m, w) for w in (w.gate, w.up, w.down))
    y, dropped = moe.experts(m.experts, gather(h, "tensor"), routing, *matrices, out=spec_of(h))
    if w.shared_gate is not None:
        y = y + nn.swiglu(h, weight(m, w.shared_gate), weight(m, w.shared_up), weight(m, w.shared_down))
    return y, moe.measure(m.experts, routing, logits, segments)._replace(dropped=dropped), routing.ids


def penalty(m: Decoder, sums) -> Float[Array, ""]:
    """The mean over layers of the experts' auxiliary losses, to be divided by the real tokens of an update."""
    return jnp.sum(moe.penalty(m.experts, sums)) / (m.layers - m.dense) if m.experts else jnp.zeros(())


def settle(m: Decoder, p: Params, sums) -> Params:
    """Loss-free balancing moves the routers' biases by the load of the update just made."""
    if not (m.experts and m.experts.bias_rate):
        return p
    bias = moe.rebalance(m.experts, p.layers.router_bias, sums.load)
    return p.replace(layers=p.layers.replace(router_bias=bias))


def observe(m: Decoder, sums) -> dict[str, Float[Array, ""]]:
    """How evenly the experts of each layer were loaded, and the auxiliary losses per token and layer."""
    if not m.experts:
        return {}
    seen = {
        f"{name}/layer_{m.dense + i}": value[i]
        for name, value in moe.imbalance(sums.load).items()
        for i in range(m.layers - m.dense)
    }
    pairs = jnp.maximum(jnp.sum(sums.load), 1.0)
    return seen | {
        "experts/balance": jnp.sum(sums.balance) / pairs * m.experts.top_k,
        "experts/z": jnp.sum(sums.z) / pairs * m.experts.top_k,
        "experts/dropped": jnp.sum(sums.dropped) / pairs,
    }


def norm(m: Decoder, p: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return nn.rms_norm(x, p.norm, m.norm_eps)


def project(m: Decoder, p: Params):
    """Hidden states to logits, the head gathered once however often the result is called."""
    w, eq = (weight(m, p.embed), "...d,vd->...v") if m.tied else (weight(m, p.unembed), "...d,dv->...v")
    return lambda h: jnp.einsum(eq, h, w, preferred_element_type=jnp.float32)


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
        x, _, routes = _rest(m, x, _attend(m, q, k, v, frame), w, frame.segments.q)
        routes = routes[:, :, None] if _replayed(m, w) else None
        return x, jax.tree.map(lambda y: order.stripes(y, strategy), Cache(k, v, routes))

    x, first = _scan(layer, x, p.first)
    x, cache = _scan(layer, x, p.layers)
    if first is not None:
        cache = cache.replace(k=jnp.concatenate([first.k, cache.k]), v=jnp.concatenate([first.v, cache.v]))
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
        cache = cache.replace(k=order.append(cache.k, k, i, lengths), v=order.append(cache.v, v, i, lengths))
        k, v = (lax.dynamic_index_in_dim(c, i, keepdims=False)[:, :, :read] for c in (cache.k, cache.v))
        x, _, routes = _rest(m, x, attention.striped(q, k, v, mask), w, jnp.ones_like(ids))
        if _replayed(m, w):
            cache = cache.replace(routes=order.append(cache.routes, routes[:, :, None], i - m.dense, lengths))
        return (x, cache), None

    carry = (_embed(m, p, ids, P(*spec_of(ids).partitions, None)), cache)
    carry, _ = _scan(layer, carry, None if p.first is None else (jnp.arange(m.dense), p.first))
    (x, cache), _ = _scan(layer, carry, (jnp.arange(m.dense, m.layers), p.layers))
    return norm(m, p, x), cache


def _replayed(m: Decoder, w: Layer) -> bool:
    return w.router is not None and m.experts.replay


def _scan(layer, carry, layers):
    """`lax.scan` over stacked layers, of which there may be none."""
    n = len(jax.tree.leaves(layers)[0]) if layers is not None else 0
    return lax.scan(layer, carry, layers, unroll=n <= UNROLL) if n else (carry, None)
