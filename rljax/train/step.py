"""One optimizer step as a pure function: microbatches of unreduced sums, then one reduction and one update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import P

from rljax.mesh import Strategy, reduced, scatter, spec_of
from rljax.mesh.verbs import TOKENS, axes_of, split_over
from rljax.model.forward import logprobs, scores
from rljax.model.microbatches import cut
from rljax.model.pipeline import value_and_grad
from rljax.model.table import LM, map_table
from rljax.train.losses import k3
from rljax.train.objectives import Objective
from rljax.types import Assessed, TrainState


def start(lm: LM, params, optimizer: optax.GradientTransformation, zero: int) -> TrainState:
    """The state before the first update; optimizer state is placed like the updates that it makes."""
    return TrainState(jnp.int32(0), jnp.int32(0), params, optimizer.init(_mine(lm, params, zero)))


def _mine(lm: LM, params, zero: int):
    """The part of the parameters that a device updates: a slice of what it holds, at ZeRO-1 and 2."""
    return map_table(lambda t, w: jax.reshard(w, t.updated(zero)), lm.table, params)


def update(
    state: TrainState,
    batch: Assessed,
    *,
    lm: LM,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    adjust: Callable,
    on_policy: bool,
    strategy: Strategy,
) -> tuple[TrainState, dict]:
    """Applies one update made of all rows of `batch`, and the metrics of it as float32 scalars.

    Rows with an empty mask weigh nothing. With `on_policy` (one update per batch of completions) the trust region is
    centered on the policy itself, so that every ratio is exactly 1; otherwise on the sampler's log-probabilities.
    An update whose loss or gradient is not finite changes nothing but `state.skipped`.
    """
    weights = objective.reduction(batch.rollout.mask)
    loss, sums, largest, layers, grads = gradients(
        state.params, batch, weights, lm=lm, objective=objective, adjust=adjust, on_policy=on_policy, strategy=strategy
    )
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    mine = _mine(lm, state.params, strategy.zero)
    deltas, opt = optimizer.update(grads, state.optimizer, mine)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    skipped = jnp.where(finite, 0, state.skipped + 1)
    params = keep(lm.settle(optax.apply_updates(mine, deltas), layers), mine)
    params = jax.tree.map(lambda new, old: jax.reshard(new, spec_of(old)), params, state.params)
    state = TrainState(state.step + 1, skipped, params, keep(opt, state.optimizer))
    tokens = jnp.maximum(jnp.sum(batch.rollout.mask), 1).astype(jnp.float32)
    means = {name: total / tokens for name, total in sums.items()}
    return state, {
        "tokens": tokens,
        "loss": loss,
        "grad_norm": norm,
        "skipped": skipped.astype(jnp.float32),
        **means,
        **largest,
        **lm.observe(layers),
    }


def gradients(
    params,
    batch: Assessed,
    weights,
    *,
    lm: LM,
    objective: Objective,
    adjust: Callable,
    on_policy: bool,
    strategy: Strategy,
):
    """(loss, sums of metrics over masked tokens, maxima, the layers' sums, gradient), all global.

    The gradient is placed as its update is.

    Weights are marked as reduced over the axes that tokens are split over, so each microbatch adds its unreduced
    gradient and the replicas' sum happens once, after the loop. From ZeRO-2 on the sum over fsdp is scattered in each
    microbatch instead, so that no device accumulates a whole gradient (Rajbhandari et al. 2020, section 5).
    """
    zero = strategy.zero
    tokens = jnp.maximum(jnp.sum(batch.rollout.tokens.segments > 0), 1).astype(jnp.float32)

    def judge(logp, entropy, batch: Assessed, weights):
        """The loss of a microbatch, a sum, and what metrics are made of."""
        rollout, mask = batch.rollout, batch.rollout.mask
        clean = lambda x: jnp.where(mask, x, 0.0)  # what the mask excludes may hold anything, NaN included
        sampled = clean(rollout.logp)
        old = jax.lax.stop_gradient(logp) if on_policy else sampled
        each, seen = objective.loss(logp, old, clean(0.0 if batch.advantages is None else batch.advantages))
        gap = jax.lax.stop_gradient(logp) - sampled
        seen |= {"entropy": entropy, "mismatch/mean": jnp.abs(gap), "kl/sampler": k3(gap, jnp.zeros_like(gap))}
        if batch.ref_logp is not None:
            divergence = k3(logp, clean(batch.ref_logp))
            seen["kl/reference"] = divergence
            each = each + objective.kl * divergence if objective.kl else each
        each = each - objective.entropy * entropy if objective.entropy else each
        sums = {name: jnp.sum(clean(x.astype(jnp.float32))) for name, x in jax.lax.stop_gradient(seen).items()}
        largest = {"mismatch/max": jnp.max(jnp.abs(clean(gap)))}
        return jnp.sum(jnp.where(mask, weights * each, 0.0)), (sums, largest)

    total = lambda x: jax.tree.map(jnp.sum, x)
    peak = lambda x: jax.tree.map(jnp.max, x)
    parts = cut((batch, weights), strategy.microbatches)
    if jax.sharding.get_abstract_mesh().shape["pipe"] > 1:

        def tail(head, x, part):
            batch, weights = part
            ids, mask = batch.rollout.tokens.ids, batch.rollout.mask
            return judge(*scores(lm, head, lm.norm(head, x), ids, mask, adjust, strategy), batch, weights)

        losses, (sums, largest), layers, grads = value_and_grad(
            lm, params, parts[0].rollout.tokens, parts, 1 / tokens, tail, strategy
        )
        return total(losses), total(sums), peak(largest), layers, grads

    def loss(params, batch: Assessed, weights):
        rollout = batch.rollout
        logp, entropy, layers = logprobs(lm, params, rollout.tokens, rollout.mask, adjust, strategy)
        value, seen = judge(logp, entropy, batch, weights)
        return value + lm.penalty(layers) / tokens, (seen, jax.lax.stop_gradient(layers))

    def scattered(t, g):
        """The share of a device in the sum over fsdp, where its update is split so and the gradient not yet."""
        (dim,) = [d for d, entry in enumerate(t.updated(zero).partitions) if "fsdp" in axes_of(entry)] or [None]
        return g if dim is None or "fsdp" not in spec_of(g).unreduced else scatter(g, "fsdp", dim)

    def empty(t, w):
        spec = t.updated(zero) if zero >= 2 else t.placed(zero)
        axes = frozenset(TOKENS) - {*split_over(spec)}
        return jnp.zeros(w.shape, jnp.float32, out_sharding=P(*spec.partitions, unreduced=axes))

    held = jax.tree.map(reduced, params)
    zeros = map_table(empty, lm.table, params)
    value = jax.value_and_grad(loss, has_aux=True)

    def accumulate(grads, part):
        seen, g = value(held, *part)
        g = map_table(scattered, lm.table, g) if zero >= 2 else g
        return jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, g), seen

    grads, (losses, ((sums, largest), layers)) = jax.lax.scan(accumulate, zeros, parts)
    grads = map_table(lambda t, g: jax.reshard(scattered(t, g), t.updated(zero)), lm.table, grads)
    layers = jax.tree.map(lambda x: jnp.sum(x, 0), layers)
    return total(losses), total(sums), peak(largest), layers, grads
