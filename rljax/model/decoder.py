"""The decoder of the Llama family and its kin: its settings and its table of tensors.

Grouped-query or latent attention, rotary positions, RMSNorm, a gated feed-forward or experts, and what families add to
these. Its functions are in `blocks`, on whole sequences, `cached`, on a cache of keys and values, and `balance`.
"""

from dataclasses import dataclass, fields
from functools import partial
from math import sqrt

from flax import struct
from jax import P
from jaxtyping import Array

from rljax.model import attention, balance, blocks, cached, nn
from rljax.model.latent import Latent
from rljax.model.moe import Experts
from rljax.model.rope import Linear, Llama3, Yarn
from rljax.model.table import LM, Tensor


@dataclass(frozen=True)
class Decoder:
    """Sizes and options of a decoder. `compute` is the dtype that activations and gathered weights have.

    With a `window`, a query sees so many positions, its own the last of them; layers `everywhere` see all.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 10_000.0
    rope_scaling: Linear | Llama3 | Yarn | None = None
    norm_eps: float = 1e-6
    norms: str = "pre"  # before attention and feed-forward, or "post" (of what they add to the stream), or "both"
    norm_offset: bool = False  # norms multiply by 1 + their weight
    qk_norm: str | None = None  # of each "head", or of "all" heads together
    qkv_bias: bool = False
    tied: bool = False
    activation: str = "silu"  # of the gate, or "gelu": its tanh form
    embed_scale: float = 1.0  # what embeddings are multiplied by
    query_scale: float | None = None  # what scores are multiplied by; None: 1 / sqrt(head_dim)
    score_cap: float | None = None  # scores z become cap * tanh(z / cap), before the softmax
    logit_cap: float | None = None  # and so do logits
    window: int | None = None
    everywhere: tuple[int, ...] = ()
    window_theta: float | None = None  # of layers with a window, unscaled; None: they turn as the others do
    latent: Latent | None = None  # in place of heads projected from the stream
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
        choices = dict(
            norms=("pre", "post", "both"), qk_norm=(None, "head", "all"), activation=tuple(nn.ACTIVATIONS),
            compute=("float32", "bfloat16"), attention=tuple(attention.FORMS),
        )  # fmt: skip
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise ValueError(f"{field}={getattr(self, field)!r} must be {' or '.join(map(repr, known))}")
        for field in ("query_scale", "score_cap", "logit_cap", "window", "embed_scale", "window_theta"):
            if (value := getattr(self, field)) is not None and value <= 0:
                raise ValueError(f"{field}={value} must be above 0")
        if self.window is None and (self.everywhere or self.window_theta):
            given = f"everywhere={self.everywhere} window_theta={self.window_theta}"
            raise ValueError(f"{given}: what layers with a window are told apart by, but window is None")
        if wrong := [layer for layer in self.everywhere if not 0 <= layer < self.layers]:
            raise ValueError(f"everywhere={self.everywhere} names layer {wrong[0]}, but there are {self.layers}")
        if self.latent:
            self.latent.check(self)

    @property
    def near(self) -> tuple[bool, ...]:
        """Which layers have the window."""
        return tuple(self.window is not None and layer not in self.everywhere for layer in range(self.layers))

    @property
    def value_dim(self) -> int:
        """The width of a head's values."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return 1 / sqrt(self.head_dim) if self.query_scale is None else self.query_scale

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

    norm1: Array | None
    wq: Array | None
    wk: Array | None
    wv: Array | None
    bq: Array | None
    bk: Array | None
    bv: Array | None
    q_down: Array | None  # latent attention's: into the queries' latent, and from it
    q_up: Array | None
    kv_down: Array | None  # into the latent of keys and values, and the part of keys that all heads share
    kv_up: Array | None
    q_norm: Array | None  # of heads, or of the latents
    k_norm: Array | None
    wo: Array
    post1: Array | None  # of what attention adds
    norm2: Array | None
    gate: Array  # of every expert, where there are experts
    up: Array
    down: Array
    router: Array | None
    router_bias: Array | None
    shared_gate: Array | None
    shared_up: Array | None
    shared_down: Array | None
    post2: Array | None  # of what the feed-forward adds
    routes: Array | None = None  # not a weight: the experts to choose
    near: Array | None = None  # nor this: whether the layer has the window, where some have and some have not
    number: Array | None = None  # nor this: which layer it is, where activations are dropped


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
        norm=Tensor("model.norm.weight", "D", (D,), P(None), 1 - m.norm_offset),
        unembed=Tensor("lm_head.weight", "D V", (D, V), P("fsdp", "tensor"), 1 / sqrt(D)) if untied else None,
        value=Tensor("score.weight", "D", (D,), P(None), 1 / (D + 1)) if "value" in heads else None,
    )


def _layers(m: Decoder, first: int, L: int, e: Experts | None, over: str | None) -> Layer:
    """The tensors of L layers from number `first` on, with experts or without, split over an axis or not."""
    D, F, Q, KV = m.width, m.ffn, m.heads * m.head_dim, m.kv_heads * m.head_dim
    column, row, vector, whole = P("fsdp", "tensor"), P("tensor", "fsdp"), P("tensor"), P(None)
    pre, post = m.norms != "post", m.norms != "pre"

    def tensor(name, dims, shape, spec, std, when=True):
        if when:
            return Tensor("model.layers.{}." + name, "L " + dims, (L, *shape), P(over, *spec), std, first)

    def matrix(name, dims, shape, spec, when=True):
        return tensor(name, dims, shape, spec, when and 1 / sqrt(shape[-2]), when)

    def norm(name, dim, size, spec=whole, when=True):
        return tensor(name, dim, (size,), spec, 1 - m.norm_offset, when)

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
            router_bias=tensor("mlp.gate.e_score_correction_bias", "E", (E,), whole, 0, e.bias_rate is not None),
            shared_gate=matrix("mlp.shared_experts.gate_proj.weight", "D F", (D, S), column, S > 0),
            shared_up=matrix("mlp.shared_experts.up_proj.weight", "D F", (D, S), column, S > 0),
            shared_down=matrix("mlp.shared_experts.down_proj.weight", "F D", (S, D), row, S > 0),
        )
    if m.latent is None:
        every, some = m.qk_norm == "all", m.qk_norm is not None
        attending = dict(
            wq=matrix("self_attn.q_proj.weight", "D N*H", (D, Q), column),
            wk=matrix("self_attn.k_proj.weight", "D K*H", (D, KV), column),
            wv=matrix("self_attn.v_proj.weight", "D K*H", (D, KV), column),
            bq=tensor("self_attn.q_proj.bias", "N*H", (Q,), vector, 0, m.qkv_bias),
            bk=tensor("self_attn.k_proj.bias", "K*H", (KV,), vector, 0, m.qkv_bias),
            bv=tensor("self_attn.v_proj.bias", "K*H", (KV,), vector, 0, m.qkv_bias),
            q_norm=norm("self_attn.q_norm.weight", *("N*H", Q, vector) if every else ("H", m.head_dim), when=some),
            k_norm=norm("self_attn.k_norm.weight", *("K*H", KV, vector) if every else ("H", m.head_dim), when=some),
        )
    else:
        l, once = m.latent, P("fsdp", None)
        A, C, U = l.queries, l.keys, l.plain + l.value
        attending = dict(
            wq=matrix("self_attn.q_proj.weight", "D N*H", (D, Q), column, not A),
            q_down=matrix("self_attn.q_a_proj.weight", "D A", (D, A), once, A > 0),
            q_norm=norm("self_attn.q_a_layernorm.weight", "A", A, when=A > 0),
            q_up=matrix("self_attn.q_b_proj.weight", "A N*H", (A, Q), column, A > 0),
            kv_down=matrix("self_attn.kv_a_proj_with_mqa.weight", "D C+R", (D, C + l.turned), once),
            k_norm=norm("self_attn.kv_a_layernorm.weight", "C", C),
            kv_up=matrix("self_attn.kv_b_proj.weight", "C N*U", (C, m.heads * U), column),
        )
    absent = dict.fromkeys(field.name for field in fields(Layer))
    present = dict(
        norm1=norm("input_layernorm.weight", "D", D, when=pre),
        wo=matrix("self_attn.o_proj.weight", "N*H D", (m.heads * m.value_dim, D), row),
        post1=norm("post_attention_layernorm.weight", "D", D, when=post),
        norm2=norm(f"{'pre_feedforward' if post else 'post_attention'}_layernorm.weight", "D", D, when=pre),
        post2=norm("post_feedforward_layernorm.weight", "D", D, when=post),
    )
    return Layer(**(absent | present | attending | feed_forward))
