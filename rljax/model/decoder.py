"""The decoder of the Llama family: its settings and its table of tensors.

Grouped-query attention, rotary positions, RMSNorm, SwiGLU or experts; optional q/k norm, qkv bias and tied embeddings.
Its functions are in `blocks`, on whole sequences, `cached`, on a cache of keys and values, and `balance`.
"""

from dataclasses import dataclass
from functools import partial
from math import sqrt

from flax import struct
from jax import P
from jaxtyping import Array

from rljax.model import attention, balance, blocks, cached
from rljax.model.moe import Experts
from rljax.model.table import LM, Tensor


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

    def build(self, heads: tuple[str, ...] = ("tokens",)) -> LM:
        """With a head for "tokens" (logits), one for "value" (a scalar), or both."""
        bind = lambda f, head=None: partial(f, self) if head is None or head in heads else None
        return LM(
            table(self, heads), *map(bind, (blocks.embed, blocks.stacks, blocks.block, blocks.norm)),
            bind(blocks.project, "tokens"), bind(blocks.value, "value"),
            *map(bind, (cached.fill, cached.enter, cached.advance, cached.prefill, cached.extend)),
            *map(bind, (balance.penalty, balance.settle, balance.observe)),
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
    value: Array | None = None


def table(m: Decoder, heads: tuple[str, ...] = ("tokens",)) -> Params:
    D, V = m.width, m.vocab
    untied = "tokens" in heads and not m.tied
    return Params(
        embed=Tensor("model.embed_tokens.weight", "V D", (V, D), P("tensor", "fsdp"), 1 / sqrt(D)),
        first=_layers(m, 0, m.dense, None, None) if m.dense else None,
        layers=_layers(m, m.dense, m.layers - m.dense, m.experts, "pipe"),
        norm=Tensor("model.norm.weight", "D", (D,), P(None), 1),
        unembed=Tensor("lm_head.weight", "D V", (D, V), P("fsdp", "tensor"), 1 / sqrt(D)) if untied else None,
        value=Tensor("score.weight", "D", (D,), P(None), 1 / (D + 1)) if "value" in heads else None,
    )


def _layers(m: Decoder, first: int, L: int, e: Experts | None, over: str | None) -> Layer:
    """The tensors of L layers from number `first` on, with experts or without, split over an axis or not."""
    D, F, Q, KV, H = m.width, m.ffn, m.heads * m.head_dim, m.kv_heads * m.head_dim, m.head_dim
    column, row, vector, whole = P("fsdp", "tensor"), P("tensor", "fsdp"), P("tensor"), P(None)

    def tensor(name, dims, shape, spec, std, when=True):
        if when:
            return Tensor("model.layers.{}." + name, "L " + dims, (L, *shape), P(over, *spec), std, first)

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
