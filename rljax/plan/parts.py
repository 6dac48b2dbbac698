"""The parameters of a decoder from its sizes alone: how many, and how much of their state each device has.

They come in groups that lie alike, which is also what decides where they are gathered and their gradients summed.
"""

from math import prod
from typing import NamedTuple

import jax

from rljax.mesh import Layout
from rljax.mesh.verbs import split_over
from rljax.model.decoder import Decoder
from rljax.model.lora import LoRA
from rljax.model.moe import Experts
from rljax.model.quantize import contracted, eight, scales
from rljax.model.table import is_tensor

WIDTH = {"float32": 4, "bfloat16": 2}  # bytes of a number


class Part(NamedTuple):
    """Parameters that lie alike."""

    size: int  # of all layers
    axes: tuple[str, ...]  # that split it at ZeRO-3
    matrix: bool = True  # fsdp splits it, and who reads it gathers it
    layers: int = 0  # of its stack; 0: the vocabulary's, and the last norm
    routed: bool = False  # to experts

    def share(self, layout: Layout, fsdp: bool = True) -> int:
        """The elements that a device holds."""
        return self.size // prod(getattr(layout, axis) for axis in self.axes if fsdp or axis != "fsdp")


def parts(m: Decoder) -> list[Part]:
    """All parameters. Layers with experts, or all where none has, are split over pipe; those before them are not."""
    vocabulary = Part(m.vocab * m.width, ("fsdp", "tensor"))
    ends = [vocabulary, *[vocabulary] * (not m.tied), Part(m.width, (), matrix=False)]
    found = [*ends, *_stack(m, m.dense, None, ()), *_stack(m, m.layers - m.dense, m.experts, ("pipe",))]
    return [part for part in found if part.size]


def _stack(m: Decoder, layers: int, e: Experts | None, over: tuple[str, ...]) -> list[Part]:
    D, N, K, H = m.width, m.heads, m.kv_heads, m.head_dim
    part = lambda size, *axes, **kind: Part(layers * size, (*over, *axes), layers=layers, **kind)
    every, l = m.qk_norm == "all", m.latent
    if l:
        into = N * H * (l.queries or D) + l.keys * N * (l.plain + l.value)
        once, scales = D * (l.queries + l.keys + l.turned), l.queries + l.keys
    else:
        into, once, scales = D * H * (N + 2 * K), 0, 2 * H * (m.qk_norm == "head")
    found = [
        part(into + N * m.value_dim * D + 3 * D * (e.shared if e else m.ffn), "fsdp", "tensor"),
        part(once, "fsdp"),
        part(H * (N + 2 * K) * m.qkv_bias + H * (N + K) * every, "tensor", matrix=False),
        part(D * (4 if m.norms == "both" else 2) + scales, matrix=False),
    ]
    if e:
        found += [
            part(e.count * 3 * D * e.width, "expert", "fsdp", "tensor", routed=True),
            part(D * e.count, "fsdp"),
            part(e.count * (e.bias_rate is not None), matrix=False),
        ]
    return found


def adapters(m: Decoder, lora: LoRA) -> list[Part]:
    """Those of every targeted matrix: r numbers for each row, lying as rows do, and for each column."""
    D, F, H, l = m.width, m.ffn, m.head_dim, m.latent
    column, row, once = (("fsdp",), ("tensor",)), (("tensor",), ("fsdp",)), (("fsdp",), ())
    attention = {"o_proj": (m.heads * m.value_dim, D, row)}
    if l is None:
        attention |= {"q_proj": (D, m.heads * H, column)} | {f"{x}_proj": (D, m.kv_heads * H, column) for x in "kv"}
    else:
        attention |= {
            "kv_a_proj_with_mqa": (D, l.keys + l.turned, once),
            "kv_b_proj": (l.keys, m.heads * (l.plain + l.value), column),
        } | (
            {"q_a_proj": (D, l.queries, once), "q_b_proj": (l.queries, m.heads * H, column)}
            if l.queries
            else {"q_proj": (D, m.heads * H, column)}
        )
    attention = {f"self_attn.{name}": matrix for name, matrix in attention.items()}

    def feed_forward(where: str, F: int):
        return {f"{where}.{x}_proj": (D, F, column) for x in ("gate", "up")} | {f"{where}.down_proj": (F, D, row)}

    shared = m.experts.shared if m.experts else 0
    later = feed_forward("mlp.shared_experts", shared) if shared else {} if m.experts else feed_forward("mlp", F)
    stacks = (m.dense, feed_forward("mlp", F), ()), (m.layers - m.dense, later, ("pipe",))
    found = []
    for layers, more, over in stacks:
        for name, (into, out, ends) in (attention | more).items():
            if layers and any(f".{name}".endswith(f".{target}") for target in lora.targets):
                for size, axes in zip((into, out), ends):
                    found.append(Part(layers * size * lora.rank, (*over, *axes), layers=layers))
    return found


class Parameters(NamedTuple):
    dense: int  # what every token meets
    routed: int  # all experts but the shared
    active: int  # what one token meets

    @property
    def total(self) -> int:
        return self.dense + self.routed


def parameters(m: Decoder) -> Parameters:
    """How many there are."""
    routed = sum(part.size for part in parts(m) if part.routed)
    dense = sum(part.size for part in parts(m)) - routed
    return Parameters(dense, routed, dense + (routed // m.experts.count * m.experts.top_k if m.experts else 0))


class Widths(NamedTuple):
    """Bytes of a matrix's element. Norms and biases are float32 and their own master, whatever matrices are."""

    params: int
    gradients: int
    master: int
    moments: int  # both


OURS = Widths(4, 4, 0, 8)  # parameters are their own float32 master


def widths(params: str = "float32", moments: str = "float32") -> Widths:
    """Those of a trained `Role.params` and of `AdamW.moments`."""
    narrow = params == "bfloat16"
    return Widths(4 - 2 * narrow, 4, 4 * narrow, 8 if moments == "float32" else 4)


class State(NamedTuple):
    """Bytes of a device: what an update leaves to the next, and the gradient that it accumulates."""

    params: int
    gradients: int
    optimizer: int  # master and both moments


def state(m: Decoder, layout: Layout, zero: int, widths: Widths = OURS, lora: LoRA | None = None) -> State:
    """ZeRO (Rajbhandari et al. 2020, figure 1): of P elements over n replicas 4P, 2P + 2P/n, P + 3P/n or 4P/n.

    With adapters, of these; the model has no gradient and no optimizer state then, and its matrices the width that
    they are multiplied in.
    """
    own = adapters(m, lora) if lora else parts(m)

    def held(level: int, matrix: int, other: int, of=own) -> int:
        return sum(part.share(layout, zero >= level) * (matrix if part.matrix else other) for part in of)

    return State(
        held(3, widths.params, OURS.params) + (held(3, WIDTH[m.compute], OURS.params, parts(m)) if lora else 0),
        held(2, widths.gradients, widths.gradients),
        held(1, widths.master + widths.moments, OURS.master + widths.moments),
    )


def frozen(table, layout: Layout, zero: int, params: str | None) -> int:
    """Bytes of a device for the parameters of a frozen role, held as `Role.params` says; None counts as float32."""
    share = lambda size, spec: size // prod(getattr(layout, axis) for axis in split_over(spec))

    def held(t) -> int:
        if eight(t, params):
            return share(t.size, t.placed(zero)) + 4 * share(t.size // t.shape[contracted(t)], scales(t, t.spec))
        return share(t.size, t.placed(zero)) * (2 if params == "bfloat16" and t.matrix else 4)

    return sum(map(held, jax.tree.leaves(table, is_leaf=is_tensor)))
