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
from rljax.mesh.move import Kept, move
from rljax.model.forward import Outputs, outputs
from rljax.model.quantize import cast, hold
from rljax.model.table import LM, init, join, learned, map_table, part
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
    own: Callable  # TrainState -> what of it updates change: without the frozen parameters
    whole: Callable  # such a state, a TrainState that has those -> TrainState
    update: Callable  # TrainState, Assessed -> TrainState, metrics
    score: Callable  # TrainState, Rollout -> Outputs
    programs: dict[str, Callable]


class Frozen(NamedTuple):
    """A role whose parameters stay as they are."""

    lm: LM
    place: Place
    begin: Callable  # seed -> fresh parameters
    hold: Callable  # parameters on any mesh -> the same, in the precision of the role
    freeze: Callable  # parameters on any mesh, which of them never change -> on its own, in that precision
    score: Callable  # parameters, Rollout -> Outputs
    programs: dict[str, Callable]


def trained(
    lm: LM, place: Place, objective: Objective, optimizer, adjust: Callable, on_policy: bool, routed: bool = True,
    dtype: str = "float32", seed: int = 0,
) -> Trained:  # fmt: skip
    """`optimizer` builds an optax transformation from which parameters are matrices. Unless `routed`, tokens come
    without the experts that another model chose for them. `dtype` is that of the learned matrices held, and `seed` what
    adapters drop is drawn from.

    A TrainState has all of the role's parameters; programs take and give back the learned ones, donated, and take the
    frozen ones besides, which so stay where they are. Frozen matrices are in the dtype that they are multiplied in.
    """
    zero = place.placement.zero
    kl = objective.kl or objective.kl_in_reward
    optimizer = optimizer(map_table(lambda t: t.matrix, learned(lm.table)))
    drawn = lambda seed: stored(lm, init(lm.table, jax.random.key(seed), zero))
    born = jax.jit(lambda seed: start(lm, drawn(seed), optimizer, zero, kl, dtype))
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
        mine, others = part(lm.table, params)
        to, there = part(lm.table, place.shardings(lm))
        with jax.set_mesh(place.mesh):
            state = begun(move(mine, to))
            others = move(stored(lm, others), there, share=True)
            moments = _whole(np.asarray(moments, np.float32), place)
            return state.replace(params=join(state.params, others), moments=moments)

    def own(state: TrainState) -> TrainState:
        return state.replace(params=part(lm.table, state.params)[0])

    def whole(state: TrainState, of: TrainState) -> TrainState:
        return state.replace(params=join(state.params, part(lm.table, of.params)[1]))

    def step(state: TrainState, batch: Assessed) -> tuple[TrainState, dict]:
        batch = fit(batch if routed else _unrouted(batch), place.rows, place.columns)
        others = part(lm.table, state.params)[1]
        with jax.set_mesh(place.mesh):
            more = (others, place.put(np.uint32(seed))) if jax.tree.leaves(others) else ()
            new, metrics = updated(own(state), place.put(batch), *more)
        return whole(new, state), metrics

    def score(state: TrainState, rollout: Rollout) -> Outputs:
        return _on_host(scored, place, rollout, routed, state.params, state.moments)

    programs = {"begin": born, "adopt": begun, "train": updated, "score": scored}
    return Trained(lm, place, begin, adopt, own, whole, step, score, programs)


def stored(lm: LM, params):
    """Parameters as a trained role has them: frozen matrices, which need no more, in the dtype of their products."""
    one = lambda t, w: cast(t, w, lm.compute) if t.frozen and w is not None else w
    return map_table(one, lm.table, params)


def frozen(
    lm: LM, place: Place, adjust: Callable, precision: str | None = None, kept: Kept | None = None
) -> Frozen:  # fmt: skip
    """`precision` is what the role holds matrices in; None: as they come. What never changes and comes as the role
    holds it, `kept` gives to all that lie alike."""
    scored, kept = scorer(lm, place, adjust), kept or Kept()

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

    def freeze(params, still=None):
        where = place.shardings(lm, precision)
        if precision is not None:
            return move(narrow(params), where, share=True)
        still = still or jax.tree.map(lambda w: False, params)
        of = lambda tree, kind: jax.tree.map(lambda x, known: x if known == kind else None, tree, still)
        return join(move(of(params, False), of(where, False)), kept(of(params, True), of(where, True))[0])

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
