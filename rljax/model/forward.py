"""From tokens to hidden states to log-probabilities, for any `LM`."""

from collections.abc import Callable

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


def logprobs(
    lm: LM,
    params,
    tokens: Tokens,
    mask: Bool[Array, "B T"],
    adjust: Callable = lambda logits, target: logits,
    strategy: Strategy = DEFAULT,
    logits: int = LOGITS,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], object]:
    """Log-probability of each masked token given those before it, and the entropy of its distribution, in float32.

    0 off the mask. The third result is what the blocks sum. `adjust` turns logits into those of the distribution
    sampled from (temperature, truncation).
    Positions go through the vocabulary in chunks of at most `logits` values a device, recomputed in the backward pass,
    and a chunk in which no row needs a position is skipped: no `[B T V]` array ever lives.
    """
    if jax.sharding.get_abstract_mesh().shape["pipe"] == 1:
        h, sums = hidden(lm, params, order.deal(tokens, strategy), strategy)
        return *scores(lm, params, h, tokens.ids, mask, adjust, strategy, logits), sums

    def tail(head, x, part):
        return scores(lm, head, lm.norm(head, x), *part, adjust, strategy, logits)

    tokens, mask = cut((tokens, mask), strategy.microbatches)
    out, sums = pipeline.forward(lm, params, tokens, (tokens.ids, mask), tail, strategy)
    return *join(out), sums


def scores(
    lm: LM,
    params,
    h: Float[Array, "B T D"],
    ids: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    adjust: Callable,
    strategy: Strategy,
    logits: int = LOGITS,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """What `logprobs` makes of hidden states, which come in the order that `strategy` deals tokens in.

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
        x = order.collect(jax.reshard(x, P(rows(), None)), strategy)
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))

    return jax.tree.map(late, out)
