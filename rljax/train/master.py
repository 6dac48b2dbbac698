"""Matrices held in bfloat16, and their float32 master copy, which updates add to (Micikevicius et al. 2018,
arXiv:1710.03740, section 3.1).

A bfloat16 has 8 significant bits: an update below 1/512 of a weight would be lost in it, as most of fine-tuning's are.
Only matrices are narrow. Norms, biases and the value head are read in float32 and are less than a thousandth of all
parameters; and so the forward pass has the very numbers that it has with float32 parameters and compute="bfloat16",
where matrices are rounded as they are read. The master is placed as updates are, so that from ZeRO-1 on fsdp splits it.
"""

import jax

from rljax.model.table import map_table
from rljax.types import TrainState


def split(table, params, mine, dtype: str):
    """(parameters as a role holds them, its master) from float32 parameters and the part of them that is updated.

    In float32 parameters are their own master, and there is None.
    """
    if dtype == "float32":
        return params, None
    held = map_table(lambda t, w: w.astype(dtype) if t.matrix else w, table, params)
    return held, map_table(lambda t, w: w if t.matrix else None, table, mine)


def masters(state: TrainState):
    """All parameters in float32: what updates add to, and what a checkpoint holds."""
    return jax.tree.map(lambda m, w: w if m is None else m, state.master, state.params, is_leaf=_missing)


def kept(master, params):
    """Of float32 parameters, those that `master` has."""
    return jax.tree.map(lambda m, w: None if m is None else w, master, params, is_leaf=_missing)


def restored(rest: TrainState, params, like: TrainState) -> TrainState:
    """The state of which `masters` made float32 `params`, and `rest` is what else it had; placed like `like`."""
    held = lambda w, old: w if w.dtype == old.dtype else jax.device_put(w.astype(old.dtype), old.sharding)
    return rest.replace(params=jax.tree.map(held, params, like.params), master=kept(like.master, params))


def _missing(x) -> bool:
    return x is None
