"""One optimizer step as a pure function: microbatches of unreduced sums, then one reduction and one update."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import P, lax

from rljax.mesh import Strategy, reduced, scatter, spec_of
from rljax.mesh.verbs import TOKENS, axes_of, split_over
from rljax.model.forward import outputs, read
from rljax.model.lora import drops
from rljax.model.microbatches import cut
from rljax.model.pipeline import value_and_grad
from rljax.model.products import mixed
from rljax.model.table import LM, is_tensor, join, learned, map_table, part
from rljax.train import running
from rljax.train.judge import judge
from rljax.train.master import kept, masters, split
from rljax.train.metrics import Mean
from rljax.train.objectives import Objective, Weights
from rljax.train.sequences import first
from rljax.types import Assessed, Rollout, TrainState


def start(
    lm: LM, params, optimizer: optax.GradientTransformation, zero: int, kl: float = 0.0, dtype: str = "float32"
) -> TrainState:
    """The state before the first update; optimizer state is of what updates change, placed like the updates.

    It holds matrices that are learned in `dtype`: "float32", or "bfloat16" and a float32 master of them.
    """
    own, others = part(lm.table, params)
    mine = _mine(lm, own, zero)
    own, master = split(learned(lm.table), own, mine, dtype)
    params, opt = join(own, others), optimizer.init(mine)
    return TrainState(jnp.int32(0), jnp.int32(0), params, opt, jnp.float32(kl), jnp.zeros(3, jnp.float32), master)


def _mine(lm: LM, params, zero: int):
    """The part of the learned parameters that a device updates: a slice of what it holds, at ZeRO-1 and 2."""
    return map_table(lambda t, w: jax.reshard(w, t.updated(zero)), learned(lm.table), params)


def _noise(seed, step, like) -> jax.Array:
    """Bits for each token [B T], a function of (seed, update, row, column): the same on every layout."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    row, column = (mixed(lax.broadcasted_iota(jnp.uint32, (n,), 0)) for n in like.shape)
    bits = mixed(jax.random.bits(key)[None, None] ^ row[:, None])
    return jax.reshard(mixed(bits ^ column[None]), spec_of(like))


def update(
    state: TrainState,
    batch: Assessed,
    frozen=None,
    seed=0,
    *,
    lm: LM,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    adjust: Callable,
    on_policy: bool,
    strategy: Strategy,
) -> tuple[TrainState, dict]:
    """Applies one update made of all rows of `batch`, and the metrics of it as float32 scalars.

    `state` has the learned parameters and `frozen` the rest, each with None for the other's (`table.part`). What
    adapters drop is drawn from `seed`. Rows with an empty mask weigh nothing. With `on_policy` (one update per batch of
    completions) the trust region is centered on the policy itself, so that every ratio is exactly 1; otherwise on the
    sampler's log-probabilities. An update whose loss or gradient is not finite changes nothing but `state.skipped`.
    """
    params = state.params if frozen is None else join(state.params, frozen)
    own = part(lm.table, params)[0]
    if drops(lm.table):
        rollout = batch.rollout
        noise = _noise(seed, state.step, rollout.tokens.ids)
        batch = batch.replace(rollout=rollout.replace(tokens=rollout.tokens.replace(noise=noise)))
    rollout, moments, kl = batch.rollout, state.moments, state.kl
    if objective.critic and objective.critic.normalize:
        moments = running.add(moments, batch.returns, rollout.mask)
        scaled = lambda x: running.normalized(moments, x)
        batch = batch.replace(returns=scaled(batch.returns), values=scaled(batch.values))
    weights = objective.weights(batch, kl if objective.adaptive else objective.kl)
    loss, sums, largest, layers, grads = gradients(
        params, batch, weights, lm=lm, objective=objective, adjust=adjust, on_policy=on_policy, strategy=strategy
    )
    norms = by_part(lm, grads)
    norm = jnp.sqrt(sum(norms.values()))
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    mine = _mine(lm, masters(state.replace(params=own)), strategy.zero)
    deltas, opt = optimizer.update(grads, state.optimizer, mine)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    mine = keep(lm.settle(optax.apply_updates(mine, deltas), layers), mine)
    # rounded before they are gathered: of parameters in bfloat16 half the bytes travel
    params = jax.tree.map(lambda new, old: jax.reshard(new.astype(old.dtype), spec_of(old)), mine, own)
    if objective.adaptive:
        measured, sequences = sums["kl/reference/k1"], jnp.sum(first(rollout.mask, rollout.tokens.segments))
        kl = objective.adaptive(kl, measured.total / jnp.maximum(measured.weight, 1.0), sequences.astype(jnp.float32))
    state = TrainState(
        step=state.step + 1,
        skipped=jnp.where(finite, 0, state.skipped + 1),
        params=params,
        optimizer=keep(opt, state.optimizer),
        kl=keep(kl, state.kl),
        moments=keep(moments, state.moments),
        master=kept(state.master, mine),
    )
    return state, {
        "tokens": jnp.sum(rollout.mask).astype(jnp.float32),
        "loss": loss,
        "grad_norm": norm,
        **{f"grad_norm/{part}": jnp.sqrt(square) for part, square in norms.items()},
        "skipped": state.skipped.astype(jnp.float32),
        **({"staleness": _staleness(state.step - 1, rollout)} if objective.advantage else {}),
        **({"kl/coefficient": state.kl} if objective.adaptive else {}),
        **sums,
        **largest,
        **lm.observe(layers),
    }


def _staleness(step, rollout: Rollout) -> Mean:
    """Updates between the policy that chose a token and the one that it trains."""
    behind = jnp.where(rollout.mask, step - rollout.version, 0).astype(jnp.float32)
    return Mean(jnp.sum(behind), jnp.sum(rollout.mask).astype(jnp.float32))


def by_part(lm: LM, grads) -> dict[str, jax.Array]:
    """The squared norm of the gradient of each part of the model."""
    squares = {}
    for t, g in zip(jax.tree.leaves(learned(lm.table), is_leaf=is_tensor), jax.tree.leaves(grads), strict=True):
        squares[t.part] = squares.get(t.part, 0.0) + jnp.sum(jnp.square(g))
    return squares


def gradients(
    params,
    batch: Assessed,
    weights: Weights,
    *,
    lm: LM,
    objective: Objective,
    adjust: Callable,
    on_policy: bool,
    strategy: Strategy,
):
    """(loss, sums that metrics are made of, maxima, the layers' sums, gradient), all global.

    The gradient is that of the learned parameters among `params`, placed as their update is.

    Weights are marked as reduced over the axes that tokens are split over, so each microbatch adds its unreduced
    gradient and the replicas' sum happens once, after the loop. From ZeRO-2 on the sum over fsdp is scattered in each
    microbatch instead, so that no device accumulates a whole gradient (Rajbhandari et al. 2020, section 5).
    """
    zero, table = strategy.zero, learned(lm.table)
    tokens = jnp.maximum(jnp.sum(batch.rollout.tokens.segments > 0), 1).astype(jnp.float32)

    judged = partial(judge, objective=objective, on_policy=on_policy)
    total = lambda x: jax.tree.map(jnp.sum, x)
    peak = lambda x: jax.tree.map(jnp.max, x)
    parts = cut((batch, weights), strategy.microbatches)
    if jax.sharding.get_abstract_mesh().shape["pipe"] > 1:

        def tail(head, x, microbatch):
            tokens, mask = microbatch[0].rollout.tokens, microbatch[0].rollout.mask
            return judged(read(lm, head, lm.norm(head, x), tokens.ids, mask, adjust, strategy), *microbatch)

        losses, (sums, largest), layers, grads = value_and_grad(
            lm, params, parts[0].rollout.tokens, parts, 1 / tokens, tail, strategy
        )
        return total(losses), total(sums), peak(largest), layers, grads

    def loss(own, batch: Assessed, weights: Weights):
        out, layers = outputs(lm, join(own, frozen), batch.rollout.tokens, batch.rollout.mask, adjust, strategy)
        value, seen = judged(out, batch, weights)
        return value + lm.penalty(layers) / tokens, (seen, lax.stop_gradient(layers))

    def scattered(t, g):
        """The share of a device in the sum over fsdp, where its update is split so and the gradient not yet."""
        (dim,) = [d for d, entry in enumerate(t.updated(zero).partitions) if "fsdp" in axes_of(entry)] or [None]
        return g if dim is None or "fsdp" not in spec_of(g).unreduced else scatter(g, "fsdp", dim)

    def empty(t, w):
        spec = t.updated(zero) if zero >= 2 else t.placed(zero)
        axes = frozenset(TOKENS) - {*split_over(spec)}
        return jnp.zeros(w.shape, jnp.float32, out_sharding=P(*spec.partitions, unreduced=axes))

    own, frozen = part(lm.table, jax.tree.map(reduced, params))
    zeros = map_table(empty, table, own)
    value = jax.value_and_grad(loss, has_aux=True)

    def accumulate(grads, microbatch):
        seen, g = value(own, *microbatch)
        g = jax.tree.map(lambda g: g.astype(jnp.float32), g)
        g = map_table(scattered, table, g) if zero >= 2 else g
        return jax.tree.map(jnp.add, grads, g), seen

    grads, (losses, ((sums, largest), layers)) = lax.scan(accumulate, zeros, parts)
    grads = map_table(lambda t, g: jax.reshard(scattered(t, g), t.updated(zero)), table, grads)
    layers = jax.tree.map(lambda x: jnp.sum(x, 0), layers)
    return total(losses), total(sums), peak(largest), layers, grads
