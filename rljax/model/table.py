"""One table per model: shape, placement, initializer and checkpoint name of every tensor, side by side.

Placements, initial values, abstract parameters, checkpoint targets and byte counts all derive from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding

from rljax.mesh import Placement
from rljax.mesh.schedule import legal
from rljax.mesh.verbs import axes_of, without

# So few layers are unrolled rather than scanned: scanned, kept activations are copied in and out of stacks, which took
# an update on a CPU 1.2 to 1.3 times as long. Deep models are scanned, for compile time and so that ZeRO-3 gathers
# again in the backward pass.
UNROLL = 4


@dataclass(frozen=True)
class Tensor:
    """One parameter, stacked over layers where its first dimension is L."""

    name: str  # in a Hugging Face checkpoint; {} stands for the layer
    dims: str  # a letter or product of letters per dimension, such as "L D N*H"
    shape: tuple[int, ...]
    spec: P  # placement with fsdp applied (ZeRO-3)
    std: float  # of the initial normal distribution; 0 for zeros and 1 for ones
    first: int = 0  # the number of its first layer
    frozen: bool = False  # no update changes it: it has no gradient, no optimizer state and no checkpoint

    @property
    def size(self) -> int:
        return prod(self.shape)

    def placed(self, zero: int) -> P:
        """The placement of the parameter: split over fsdp at ZeRO-3, replicated over it below."""
        return self.spec if zero == 3 else without(self.spec, "fsdp")

    def updated(self, zero: int) -> P:
        """The placement of its update, which optimizer state has too: split over fsdp from ZeRO-1 on."""
        return self.spec if zero >= 1 else without(self.spec, "fsdp")

    @property
    def part(self) -> str:
        """What it is a tensor of: embed, attention, router, experts, mlp, norm, head or value."""
        parts = {
            "embed_tokens": "embed", "self_attn": "attention", "mlp.gate.": "router", "experts": "experts",
            "mlp": "mlp", "norm": "norm", "lm_head": "head", "score": "value",
        }  # fmt: skip
        return next(part for piece, part in parts.items() if piece in self.name)

    @property
    def matrix(self) -> bool:
        """Multiplied with activations, rather than scaling or shifting them: what decays, is cast and is gathered."""
        return len(self.dims.removeprefix("L ").removeprefix("E ").split()) == 2


class LM(NamedTuple):
    """What the rest of the system knows of an architecture: a table and pure functions of parameters."""

    table: Any  # pytree of Tensor
    embed: Callable  # params, Tokens, Strategy -> x [B T D], frame (what every block reads besides x)
    stacks: Callable  # params, frame, start -> the weights of its blocks, in stacks of equal layers
    block: Callable  # x, one layer's weights, frame -> x, sums that its experts are balanced by
    norm: Callable  # params, x -> h [B T D]
    project: Callable | None  # params -> (h [... D] -> logits [... V] float32); gathers the head once
    value: Callable | None  # params, h [B T D] -> [B T] float32, of each state
    fill: Callable  # a stack, x, frame, Strategy -> x, its cache
    enter: Callable  # params, ids [B S] that follow others -> x
    advance: Callable  # a stack, x, its cache, lengths [B], window, its first layer in the cache -> x, its cache
    prefill: Callable  # params, ids [B S], lengths [B], Strategy -> h [B 1 D] after the last token, caches
    extend: Callable  # params, ids [B S], caches, lengths [B], window -> h [B S D], caches
    penalty: Callable  # sums -> auxiliary loss, to be divided by the tokens of an update
    settle: Callable  # parameters after an update, its sums -> parameters, their experts balanced
    observe: Callable  # sums -> metrics
    heads: tuple[int, int]  # query and key/value heads: what the tensor axis must divide
    vocab: int
    compute: str  # the dtype that matrices are multiplied in


def is_tensor(x) -> bool:
    return isinstance(x, Tensor)


def map_table(f: Callable, table, *trees):
    """`jax.tree.map` over the Tensors of a table."""
    return jax.tree.map(f, table, *trees, is_leaf=is_tensor)


def learned(table):
    """The tensors that updates change; None for the frozen ones."""
    return map_table(lambda t: None if t.frozen else t, table)


def part(table, params) -> tuple[Any, Any]:
    """(learned parameters, frozen ones), each with None for the others."""
    return tuple(map_table(lambda t, w: w if t.frozen == kind else None, table, params) for kind in (False, True))


def join(some, others):
    """What `part` did, undone."""
    return jax.tree.map(lambda a, b: b if a is None else a, some, others, is_leaf=lambda x: x is None)


def specs(table, zero: int = 3):
    """The placement of every parameter."""
    return map_table(lambda t: t.placed(zero), table)


def shardings(table, mesh: jax.sharding.Mesh, zero: int = 3):
    """The sharding of every parameter on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(table, zero), is_leaf=lambda s: isinstance(s, P))


def abstract(table, mesh, zero: int = 3, dtype=jnp.float32):
    """Parameters without values: what a compiler or a restored checkpoint needs to know of them."""
    where = shardings(table, mesh, zero)
    return map_table(lambda t, s: jax.ShapeDtypeStruct(t.shape, dtype, sharding=s), table, where)


def init(table, key, zero: int = 3, dtype=jnp.float32):
    """Initial parameters, a function of (key, tensor name, shape) alone, so equal on every layout."""

    def one(t: Tensor):
        spec = t.placed(zero)
        if t.std in (0, 1):
            return jnp.full(t.shape, t.std, dtype, out_sharding=spec)
        k = jax.random.fold_in(key, crc32(t.name.encode()) + t.first)
        return (jax.random.normal(k, t.shape, jnp.float32, out_sharding=spec) * t.std).astype(dtype)

    return map_table(one, table)


def graft(table, other, params):
    """Parameters of `table`, all of which `params`, of the table `other`, has too."""
    have = _named(other, params)
    return map_table(lambda t: have[t.name, t.first], table)


def completed(table, other, params, mesh: jax.sharding.Mesh, zero: int, seed: int):
    """Parameters of `table`: those that `params`, of the table `other`, has too, and the rest fresh, from `seed`."""
    have = _named(other, params)
    rest = [t for t in jax.tree.leaves(table, is_leaf=is_tensor) if (t.name, t.first) not in have]
    with jax.set_mesh(mesh):
        fresh = jax.jit(lambda: init(rest, jax.random.key(seed), zero))() if rest else []
    return graft(table, [*jax.tree.leaves(other, is_leaf=is_tensor), *rest], [*jax.tree.leaves(params), *fresh])


def _named(table, params) -> dict:
    """Parameters by name and first layer."""
    tensors = jax.tree.leaves(table, is_leaf=is_tensor)
    return {(t.name, t.first): w for t, w in zip(tensors, jax.tree.leaves(params), strict=True)}


def count(table) -> int:
    """Number of parameters."""
    return sum(t.size for t in jax.tree.leaves(table, is_leaf=is_tensor))


def misfits(lm: LM, placement: Placement) -> list[str]:
    """One line for each rule that a placement breaks, with what would fit: heads and split dimensions must divide."""
    layout, lines = placement.layout, []
    heads, shared = lm.heads
    if heads % layout.tensor:
        lines.append(f"{heads} heads do not divide over tensor={layout.tensor}: {_fits(heads)} would")
    elif shared % layout.tensor and layout.tensor % shared:
        fits = [d for d in range(1, heads + 1) if heads % d == 0 and (shared % d == 0 or d % shared == 0)]
        lines.append(
            f"{shared} key/value heads and tensor={layout.tensor}: neither divides the other: "
            f"{', '.join(map(str, fits))} would"
        )
    if placement.context == "ulysses" and shared % (layout.tensor * layout.seq):
        fits = _fits(shared // layout.tensor) if shared % layout.tensor == 0 else "1"
        lines.append(
            f'context = "ulysses" splits {shared} key/value heads over tensor={layout.tensor} and seq={layout.seq}, '
            f'which do not divide them: seq={fits} or context = "ring" would'
        )
    if placement.context == "ring" and placement.schedule != "gpipe" and min(layout.seq, layout.pipe) > 1:
        lines.append(f'context = "ring" within pipe={layout.pipe} needs schedule = "gpipe", not "{placement.schedule}"')
    for t in jax.tree.leaves(lm.table, is_leaf=is_tensor):
        if "pipe" in axes_of(t.spec[0]):
            lines.append(legal(placement.schedule, layout.pipe, placement.microbatches, t.shape[0]))
        for dim, size, entry in zip(t.dims.split(), t.shape, t.updated(placement.zero)):
            ways = prod(getattr(layout, axis) for axis in axes_of(entry))
            if size % ways and dim != "L":
                over = " ".join(f"{axis}={getattr(layout, axis)}" for axis in axes_of(entry))
                lines.append(f"{t.name}: dimension {dim} = {size} does not divide over {over}: {_fits(size)} would")
    return list(dict.fromkeys(filter(None, lines)))


def _fits(n: int) -> str:
    return ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)
