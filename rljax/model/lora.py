"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): a model of which only adapters, and value heads, are trained.

Names, scale and initialization are those of the PEFT library: B begins as zeros, so the model as what it adapts.
"""

from dataclasses import dataclass, replace
from math import sqrt

import jax
import jax.numpy as jnp
from jax import P

from rljax.errors import nearest
from rljax.mesh import spec_of
from rljax.model.products import LowRank, is_low_rank
from rljax.model.table import LM, Tensor, graft, is_tensor, join, map_table

PREFIX = "base_model.model."  # of all names in a file of PEFT
OTHERS = {  # of parts of a model that have none
    "embed": "the embedding has no adapter", "head": "the output head has no adapter",
    "experts": "experts, whose matrices are stacked, have no adapters",
    "router": "routers have no adapters",
}  # fmt: skip


@dataclass(frozen=True)
class LoRA:
    """Adapters of rank `rank`, scaled by alpha / rank, of the matrices whose names in a checkpoint end in a target."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    dropout: float = 0.0  # of what an adapter reads, in training

    def __post_init__(self):
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"rank={self.rank} alpha={self.alpha}: at least 1, and above 0")
        if not self.targets:
            raise ValueError("targets=() leaves nothing to train: name matrices, such as q_proj")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapted(lm: LM, lora: LoRA | None) -> LM:
    """The model with adapters, and all but these and a value head frozen; itself without. ValueError naming a target
    that it lacks, or that cannot have one."""
    return lm if lora is None else lm._replace(table=_table(lm.table, lora))


def _table(table, lora: LoRA):
    tensors = jax.tree.leaves(table, is_leaf=is_tensor)
    targeted = {t.name: [target for target in lora.targets if _ends(t.name, target)] for t in tensors}
    for target in lora.targets:
        of = [t for t in tensors if target in targeted[t.name]]
        known = {_module(t.name) for t in tensors if adaptable(t)}
        if not of:
            raise ValueError(f"targets has {target!r}, a matrix that the model lacks; {nearest(target, known)}")
        if wrong := next((t for t in of if not adaptable(t)), None):
            rule = OTHERS.get(wrong.part, "only matrices have adapters")
            raise ValueError(f"targets has {target!r}, which is {wrong.name}: {rule}; {nearest(target, known)}")

    def one(t: Tensor):
        if not targeted[t.name]:
            return replace(t, frozen=t.part != "value")
        layers, (rows, columns) = t.spec.partitions[:-2], t.spec.partitions[-2:]
        into, out = t.dims.split()[-2:]
        low = lambda kind, dims, shape, spec, std: Tensor(
            PREFIX + t.name.replace(".weight", f".{kind}.weight"), f"L {dims}", (t.shape[0], *shape), P(*layers, *spec),
            std, t.first,
        )  # fmt: skip
        down = low("lora_A", f"{into} r", (t.shape[1], lora.rank), (rows, None), 1 / sqrt(3 * t.shape[1]))
        up = low("lora_B", f"r {out}", (lora.rank, t.shape[2]), (None, columns), 0)
        return LowRank(replace(t, frozen=True), down, up, name=t.name, scale=lora.scale, dropout=lora.dropout)

    return map_table(one, table)


def adaptable(t: Tensor) -> bool:
    """Whether a tensor may have an adapter: the matrices of layers, but for routers and experts that are routed to."""
    return t.matrix and len(t.shape) == 3 and t.part != "router"


def _module(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def _ends(name: str, target: str) -> bool:
    """Whether a target names it, or the modules it is in, as in PEFT."""
    return f".{name}".endswith(f".{target}.weight")


def drops(table) -> bool:
    """Whether an adapter drops some of what it reads in training."""
    return any(w.dropout for w in jax.tree.leaves(table, is_leaf=is_low_rank) if is_low_rank(w))


def without(tree):
    """A table or parameters without adapters."""
    return jax.tree.map(lambda w: w.base if is_low_rank(w) else w, tree, is_leaf=is_low_rank)


def base(table):
    """The table without adapters, as it is where nothing is frozen."""
    return map_table(lambda t: replace(t, frozen=False), without(table))


def adapters(tree):
    """A table or parameters of the adapters alone; None for the rest."""
    one = lambda w: w.replace(base=None) if is_low_rank(w) else None
    return jax.tree.map(one, tree, is_leaf=is_low_rank)


def attached(table, params, own):
    """Parameters of a table, from those of the table without adapters and the adapters alone."""
    rest = map_table(lambda t: None if t.name.startswith(PREFIX) else t, table)
    return join(own, graft(rest, base(table), params))


def merged(params):
    """Parameters of the table without adapters, each matrix with what its adapter adds, computed in float32."""

    def one(w: LowRank):
        product = jnp.einsum("lir,lro->lio", *map(jnp.float32, (w.down, w.up)), out_sharding=spec_of(w.base))
        return (w.base + w.scale * product).astype(w.base.dtype)

    return jax.tree.map(lambda w: one(w) if is_low_rank(w) else w, params, is_leaf=is_low_rank)
