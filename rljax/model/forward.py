"""From tokens to hidden states to log-probabilities and values, for any `LM`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import Strategy, shards, spec_of
from rljax.mesh.placement import DEFAULT
from rljax.mesh.verbs import rows, whole
from rljax.model import nn, order, pipeline
from rljax.model.microbatches import cut, join
from rljax.model.stack import through
from rljax.model.table import LM
from rljax.types import Tokens

LOGITS = 2**24  # float32 logits that may live on a device at a time (64 MiB)


def hidden(lm: LM, params, tokens: Tokens, strategy: Strategy = DEFAULT) -> tuple[Float[Array, "B T D"], object]:
    """Hidden states after the last norm, and each layer's sums: the scanned blocks, each under `jax.checkpoint`.

    Tokens come, and states go, in the order in which `strategy` splits T over seq (`order.deal`).
    """
    x, frame = lm.embed(params, tokens, strategy)
    for layers in lm.stacks(params, frame):
        layers = jax.tree.map(lambda w: whole(w, "pipe"), layers)
        x, sums = through(lambda x, w: lm.block(x, w, frame), x, layers, strategy.remat)
    return lm.norm(params, x), sums


class Outputs(NamedTuple):
    """What the heads of a model make of every token, in float32; None where it has no such head."""

    logp: Float[Array, "B T"] | None  # of each masked token given those before it, and 0 off the mask
    entropy: Float[Array, "B T"] | None  # of the distribution that it is from
    scores: Float[Array, "B T"] | None  # the value head's, of the state after the token


def outputs(
    lm: LM,
    params,
    tokens: Tokens,
    mask: Bool[Array, "B T"],
    adjust: Callable = lambda logits, target: logits,
    strategy: Strategy = DEFAULT,
    logits: int = LOGITS,
) -> tuple[Outputs, object]:
    """The model's outputs, and what its blocks sum.

    `adjust` turns logits into those of the distribution sampled from (temperature, truncation).
    """
    if jax.sharding.get_abstract_mesh().shape["pipe"] == 1:
        h, sums = hidden(lm, params, order.deal(tokens, strategy), strategy)
        return read(lm, params, h, tokens.ids, mask, adjust, strategy, logits), sums

    def tail(head, x, part):
        return read(lm, head, lm.norm(head, x), *part, adjust, strategy, logits)

    tokens, mask = cut((tokens, mask), strategy.microbatches)
    out, sums = pipeline.forward(lm, params, tokens, (tokens.ids, mask), tail, strategy)
    return join(out), sums


def logprobs(lm: LM, params, tokens: Tokens, mask: Bool[Array, "B T"], *args, **kwargs):
    """(log-probabilities, entropies, what the blocks sum) of `outputs`."""
    out, sums = outputs(lm, params, tokens, mask, *args, **kwargs)
    return out.logp, out.entropy, sums


def read(
    lm: LM,
    params,
    h: Float[Array, "B T D"],
    ids: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    adjust: Callable,
    strategy: Strategy,
    logits: int = LOGITS,
) -> Outputs:
    """What `outputs` makes of hidden states, which come in the order that `strategy` deals tokens in."""
    logp, entropy = vocabulary(lm, params, h, ids, mask, adjust, strategy, logits) if lm.project else (None, None)
    return Outputs(logp, entropy, in_order(lm.value(params, h), strategy) if lm.value else None)


def in_order(x: Float[Array, "B T"], strategy: Strategy) -> Float[Array, "B T"]:
    """Whole over seq, and in the order that tokens had before they were dealt."""
    return order.collect(jax.reshard(x, P(rows(), None)), strategy)


def vocabulary(
    lm: LM,
    params,
    h: Float[Array, "B T D"],
    ids: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    adjust: Callable,
    strategy: Strategy,
    logits: int = LOGITS,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probabilities and entropies of `outputs`.

    Positions go through the vocabulary in chunks of at most `logits` values a device, recomputed in the backward pass,
    and a chunk in which no row needs a position is skipped: no `[B T V]` array ever lives.
    """
    early = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))  # entry t now belongs to the state before the token
    target, wanted = order.deal((early(ids), early(mask)), strategy)
    h = nn.whole(h)
    project = lm.project(params)
    b, t = ids.shape
    ways, seq = shards(h, 0), shards(h, 1)
    vocab = lm.vocab // jax.typeof(h).sharding.mesh.shape["tensor"]
    most = max(1, logits // (b // ways * vocab))
    size = max(c for c in range(1, t // seq + 1) if t // seq % c == 0 and c <= most)
    n = t // seq // size
    fold = lambda x, *spec: jnp.reshape(
        x,
        (b, seq, n, size, *x.shape[2:]),
        out_sharding=P(rows(), "seq", None, None, *spec, reduced=spec_of(x).reduced),
    )

    def some(h, target, wanted):
        z = adjust(project(h), target)
        peak = lax.stop_gradient(jnp.max(z, -1, keepdims=True))
        e = jnp.exp(z - peak)
        total = jnp.sum(e, -1, keepdims=True)
        log = z - peak - jnp.log(total)
        # a sum over the vocabulary reads it where it lies, split over tensor; indexing could not
        hit = target[..., None] == jnp.arange(z.shape[-1])[None, None, None]
        entropy = -jnp.sum(jnp.where(jnp.isfinite(log), e / total * log, 0.0), -1)
        logp = jnp.sum(jnp.where(hit, log, 0.0), -1)
        return jnp.where(wanted, logp, 0.0), jnp.where(wanted, entropy, 0.0)

    def chunk(_, args):
        if n == 1:
            return None, some(*args)
        nothing = lambda *args: (jnp.zeros_like(args[1], jnp.float32),) * 2
        return None, lax.cond(jnp.any(args[2]), some, nothing, *args)

    scanned = fold(h, None), fold(target), fold(wanted)
    scanned = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), scanned)
    _, out = lax.scan(jax.checkpoint(chunk), None, scanned)

    def late(x):
        x = jnp.reshape(jnp.moveaxis(x, 0, 2), (b, t), out_sharding=P(rows(), "seq"))
        return shifted(in_order(x, strategy))

    return jax.tree.map(late, out)


def shifted(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """What is known before each token from what is known after it: entry t of entry t - 1, and entry 0 is 0."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
