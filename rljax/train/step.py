"""One optimizer step as a pure function: microbatches of unreduced sums, then one reduction and one update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import P

from rljax.mesh import reduced, spec_of
from rljax.model.forward import logprobs
from rljax.model.table import LM, map_table
from rljax.train.losses import k3
from rljax.train.objectives import Objective
from rljax.types import Assessed, TrainState


def start(params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update; optimizer state is placed like the parameters."""
    return TrainState(jnp.int32(0), jnp.int32(0), params, optimizer.init(params))


def update(
    state: TrainState,
    batch: Assessed,
    *,
    lm: LM,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    adjust: Callable,
    on_policy: bool,
    microbatches: int = 1,
    remat: str = "block",
) -> tuple[TrainState, dict]:
    """Applies one update made of all rows of `batch`, and the metrics of it as float32 scalars.

    Rows with an empty mask weigh nothing. With `on_policy` (one update per batch of completions) the trust region is
    centered on the policy itself, so that every ratio is exactly 1; otherwise on the sampler's log-probabilities.
    An update whose loss or gradient is not finite changes nothing but `state.skipped`.
    """
    weights = objective.reduction(batch.rollout.mask)
    loss, sums, largest, grads = gradients(
        state.params, batch, weights, lm=lm, objective=objective, adjust=adjust, on_policy=on_policy,
        microbatches=microbatches, remat=remat,
    )  # fmt: skip
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    deltas, opt = optimizer.update(grads, state.optimizer, state.params)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    skipped = jnp.where(finite, 0, state.skipped + 1)
    state = TrainState(
        state.step + 1,
        skipped,
        keep(optax.apply_updates(state.params, deltas), state.params),
        keep(opt, state.optimizer),
    )
    tokens = jnp.maximum(jnp.sum(batch.rollout.mask), 1).astype(jnp.float32)
    means = {name: total / tokens for name, total in sums.items()}
    return state, {
        "tokens": tokens,
        "loss": loss,
        "grad_norm": norm,
        "skipped": skipped.astype(jnp.float32),
        **means,
        **largest,
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
    microbatches: int,
    remat: str,
):
    """(loss, sums of metrics over masked tokens, maxima, gradient): all global, the gradient placed like `params`.

    Weights are marked as reduced over the axes that tokens are split over, so each microbatch adds its unreduced
    gradient and the replicas' sum happens once, after the loop. ZeRO-3 still scatters over fsdp in each microbatch.
    """

    def loss(params, batch: Assessed, weights):
        rollout, mask = batch.rollout, batch.rollout.mask
        clean = lambda x: jnp.where(mask, x, 0.0)  # what the mask excludes may hold anything, NaN included
        logp, entropy = logprobs(lm, params, rollout.tokens, mask, adjust, remat)
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

    def split(x):
        """Rows [B] to [microbatches, B / microbatches], each taking rows from every device: nothing moves."""
        rows = x.shape[0] // microbatches
        spec = P(spec_of(x).partitions[0], None, *spec_of(x).partitions[1:])
        return jnp.moveaxis(jnp.reshape(x, (rows, microbatches, *x.shape[1:]), out_sharding=spec), 1, 0)

    held = map_table(lambda t, w: reduced(w) if t.matrix else w, lm.table, params)
    zeros = jax.tree.map(
        lambda w: jnp.zeros(w.shape, w.dtype, out_sharding=P(*spec_of(w).partitions, unreduced=spec_of(w).reduced)),
        held,
    )
    parts = jax.tree.map(split, (batch, weights))
    value = jax.value_and_grad(loss, has_aux=True)

    def accumulate(grads, part):
        seen, g = value(held, *part)
        return jax.tree.map(jnp.add, grads, g), seen

    grads, (losses, (sums, largest)) = jax.lax.scan(accumulate, zeros, parts)
    grads = jax.tree.map(lambda g, w: jax.reshard(g, spec_of(w)), grads, params)
    total = lambda x: jax.tree.map(lambda v: jnp.sum(v, 0), x)
    return total(losses), total(sums), jax.tree.map(lambda v: jnp.max(v, 0), largest), grads
