"""The loss of a microbatch, as a sum over its tokens, and what metrics are made of."""

import jax
import jax.numpy as jnp

from rljax.model.forward import Outputs, shifted
from rljax.train.kl import k1, k3
from rljax.train.metrics import Correlation, Mean
from rljax.train.objectives import Objective, Weights
from rljax.train.view import View
from rljax.types import Assessed


def judge(out: Outputs, batch: Assessed, weights: Weights, objective: Objective, on_policy: bool):
    """(the loss, a sum; ({metric: sums that add up}, {metric: maxima}))."""
    view, mask = view_of(out, batch, on_policy), batch.rollout.mask
    sampled = jnp.where(mask, batch.rollout.logp, 0.0) if objective.advantage and view.logp is not None else None
    add = lambda weights, each: jnp.sum(jnp.where(mask, weights * each, 0.0))
    each, seen = objective.loss(view)
    if objective.correction:
        kept = objective.correction(view.old, sampled, mask, view.segments)
        each, seen = each * kept, seen | {"correction/weight": kept, "correction/kept": kept > 0}
    each = each - objective.entropy * view.entropy if objective.entropy else each
    loss = add(weights.loss, each)
    if weights.kl is not None:
        loss = loss + add(weights.kl, objective.divergence(view.logp, view.ref_logp, view.old))
    for term, share in zip(objective.extra, weights.extra, strict=True):
        each, more = term.loss(view)
        loss, seen = loss + add(share, each), seen | more
    sums, largest = jax.lax.stop_gradient(report(view, seen, sampled))
    return loss, (sums, largest)


def view_of(out: Outputs, batch: Assessed, on_policy: bool) -> View:
    """What a loss reads of a batch: what the mask excludes may hold anything, NaN included, and is 0 here."""
    rollout, mask = batch.rollout, batch.rollout.mask
    clean = lambda x: None if x is None else jnp.where(mask, x, 0.0)
    center = rollout.logp if batch.prox_logp is None else batch.prox_logp
    return View(
        logp=out.logp,
        entropy=out.entropy,
        values=None if out.scores is None else clean(shifted(out.scores)),
        scores=clean(out.scores),
        old=jax.lax.stop_gradient(out.logp) if on_policy and out.logp is not None else clean(center),
        sampled=clean(rollout.logp),
        advantages=clean(0.0 if batch.advantages is None else batch.advantages),
        ref_logp=clean(batch.ref_logp),
        returns=clean(batch.returns),
        old_values=clean(batch.values),
        target=clean(batch.target),
        mask=mask,
        segments=rollout.tokens.segments,
    )


def report(view: View, seen: dict, sampled):
    """Sums of what a loss saw, and of how far policy, sampler and reference are apart; and the largest distance."""
    mask, largest = view.mask, {}
    if view.logp is not None:
        seen = seen | {"entropy": view.entropy}
    if view.logp is not None and view.ref_logp is not None:
        seen |= {"kl/reference": k3(view.logp, view.ref_logp), "kl/reference/k1": k1(view.logp, view.ref_logp)}
    if sampled is not None:
        gap = jnp.abs(view.logp - sampled)
        seen |= {"mismatch/mean": gap, "kl/sampler": k3(view.logp, sampled), "kl/sampler/k1": k1(view.logp, sampled)}
        largest["mismatch/max"] = jnp.max(jnp.where(mask, gap, 0.0))

    def mean(x) -> Mean:
        x, weight = x if isinstance(x, tuple) else (x, jnp.ones_like(mask, jnp.float32))
        total = lambda x: jnp.sum(jnp.where(mask, x.astype(jnp.float32), 0.0))
        return Mean(total(x * weight), total(weight))

    sums = {name: mean(x) for name, x in seen.items()}
    if sampled is not None:
        n, x, y = mask.astype(jnp.float32), jnp.where(mask, view.logp, 0.0), sampled
        sums["mismatch/correlation"] = Correlation(*map(jnp.sum, (n, x, y, x * x, y * y, x * y)))
    return sums, largest
