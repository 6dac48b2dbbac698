"""The roles of a run, compiled over their meshes: those that are trained, and those that only score.

Rows in and out are NumPy; parameters and states stay on their devices.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax import P
from jax.sharding import NamedSharding

from rljax.data.rows import fit
from rljax.mesh.move import move
from rljax.model.forward import Outputs, outputs
from rljax.model.quantize import hold
from rljax.model.table import LM, init, map_table
from rljax.run.place import Place, compiled
from rljax.train import running
from rljax.train.objectives import Objective
from rljax.train.step import start, update
from rljax.types import Assessed, Rollout, TrainState


class Trained(NamedTuple):
    """A role with an optimizer."""

    lm: LM
    place: Place
    begin: Callable  # seed -> TrainState with fresh parameters
    adopt: Callable  # parameters on any mesh, moments of returns -> TrainState that starts from them
    update: Callable  # TrainState, Assessed -> TrainState, metrics
    score: Callable  # TrainState, Rollout -> Outputs
    programs: dict[str, Callable]


class Frozen(NamedTuple):
    """A role whose parameters stay as they are."""

    lm: LM
    place: Place
    begin: Callable  # seed -> fresh parameters
    hold: Callable  # parameters on any mesh -> the same, in the precision of the role
    freeze: Callable  # parameters on any mesh -> a copy on its own, in that precision
    score: Callable  # parameters, Rollout -> Outputs
    programs: dict[str, Callable]


def trained(
    lm: LM, place: Place, objective: Objective, optimizer, adjust: Callable, on_policy: bool, routed: bool = True,
    dtype: str = "float32",
) -> Trained:  # fmt: skip
    """`optimizer` builds an optax transformation from which parameters are matrices. Unless `routed`, tokens come
    without the experts that another model chose for them. `dtype` is that of the matrices held."""
    zero = place.placement.zero
    kl = objective.kl or objective.kl_in_reward
    optimizer = optimizer(map_table(lambda t: t.matrix, lm.table))
    born = jax.jit(lambda seed: start(lm, init(lm.table, jax.random.key(seed), zero), optimizer, zero, kl, dtype))
    begun = jax.jit(lambda params: start(lm, params, optimizer, zero, kl, dtype))
    updated = compiled(
        partial(
            update, lm=lm, objective=objective, optimizer=optimizer, adjust=adjust, on_policy=on_policy,
            strategy=place.placement,
        ),
        donate_argnums=0,
    )  # fmt: skip
    scored = scorer(lm, place, adjust)

    def begin(seed: int) -> TrainState:
        with jax.set_mesh(place.mesh):
            return born(place.put(np.uint32(seed)))

    def adopt(params, moments) -> TrainState:
        with jax.set_mesh(place.mesh):
            state = begun(move(params, place.shardings(lm)))
            return state.replace(moments=_whole(np.asarray(moments, np.float32), place))

    def step(state: TrainState, batch: Assessed) -> tuple[TrainState, dict]:
        batch = fit(batch if routed else _unrouted(batch), place.rows, place.columns)
        with jax.set_mesh(place.mesh):
            return updated(state, place.put(batch))

    def score(state: TrainState, rollout: Rollout) -> Outputs:
        return _on_host(scored, place, rollout, routed, state.params, state.moments)

    programs = {"begin": born, "adopt": begun, "train": updated, "score": scored}
    return Trained(lm, place, begin, adopt, step, score, programs)


def frozen(lm: LM, place: Place, adjust: Callable, precision: str | None = None) -> Frozen:
    """`precision` is what the role holds matrices in; None: as they come."""
    scored = scorer(lm, place, adjust)

    born = jax.jit(lambda seed: hold(lm.table, init(lm.table, jax.random.key(seed), place.placement.zero), precision))
    held = jax.jit(lambda params: hold(lm.table, params, precision))

    def narrow(params):
        if precision is None:
            return params
        with jax.set_mesh(jax.tree.leaves(params)[0].sharding.mesh):
            return held(params)

    def begin(seed: int):
        with jax.set_mesh(place.mesh):
            return born(place.put(np.uint32(seed)))

    def freeze(params):
        return move(narrow(params), place.shardings(lm, precision), share=precision is not None)

    def score(params, rollout: Rollout) -> Outputs:
        return _on_host(scored, place, rollout, False, params, _whole(np.zeros(3, np.float32), place))

    return Frozen(lm, place, begin, narrow, freeze, score, {"score": scored})


def scorer(lm: LM, place: Place, adjust: Callable) -> Callable:
    """(parameters, moments of returns, tokens, mask) -> Outputs, compiled. Values are as large as returns."""

    @compiled
    def scored(params, moments, tokens, mask):
        out = outputs(lm, params, tokens, mask, adjust, place.placement)[0]
        return out if out.scores is None else out._replace(scores=running.restored(moments, out.scores))

    return scored


def _unrouted(batch: Assessed) -> Assessed:
    rollout = batch.rollout
    return batch.replace(rollout=rollout.replace(tokens=rollout.tokens.replace(routes=None)))


def _whole(x: np.ndarray, place: Place) -> jax.Array:
    """On every device of a mesh."""
    return jax.device_put(x, NamedSharding(place.mesh, P(None)))


def _on_host(scored, place: Place, rollout: Rollout, routed: bool, params, moments) -> Outputs:
    b, t = rollout.mask.shape
    rollout = fit(rollout, place.rows, place.columns)
    tokens = rollout.tokens if routed else rollout.tokens.replace(routes=None)
    with jax.set_mesh(place.mesh):
        out = jax.device_get(scored(params, moments, *place.put((tokens, rollout.mask))))
    return jax.tree.map(lambda x: x[:b, :t], out)
