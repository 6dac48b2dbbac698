"""From tokens to hidden states to log-probabilities, for any `LM`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name
from jax.ad_checkpoint import checkpoint_policies as policies
from jaxtyping import Array, Bool, Float

from rljax.mesh import BATCH, Strategy, shards, spec_of
from rljax.mesh.placement import DEFAULT
from rljax.model import nn, order
from rljax.model.table import LM, UNROLL
from rljax.types import Tokens

# What the backward pass finds stored, per block. Weights gathered over fsdp are never kept: keeping them undoes ZeRO-3.
REMAT = {
    "none": policies.save_anything_except_these_names("gathered"),
    "block": policies.nothing_saveable,
    "names": policies.save_only_these_names("attention", "ffn"),
    "offload": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=("block",),  # what enters each block waits in host memory
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
LOGITS = 2**24  # float32 logits that may live on a device at a time (64 MiB)


def hidden(lm: LM, params, tokens: Tokens, strategy: Strategy = DEFAULT) -> tuple[Float[Array, "B T D"], object]:
    """Hidden states after the last norm, and each layer's sums: the scanned blocks, each under `jax.checkpoint`.

    Tokens come, and states go, in the order in which `strategy` splits T over seq (`order.deal`).
    """
    x, frame = lm.embed(params, tokens, strategy)
    step = jax.checkpoint(lambda x, w: lm.block(checkpoint_name(x, "block"), w, frame), policy=REMAT[strategy.remat])
    for stack in lm.stacks(params, frame):
        x, sums = lax.scan(step, x, stack, unroll=len(jax.tree.leaves(stack)[0]) <= UNROLL)
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
    sampled from (temperature, truncation). Positions go through the vocabulary in chunks of at most `logits` values a device, recomputed in the backward pass,
    and a chunk in which no row needs a position is skipped: no `[B T V]` array ever lives.
    """
    early = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))  # entry t now belongs to the state before the token
    target, wanted = early(tokens.ids), early(mask)
    tokens, target, wanted = order.deal((tokens, target, wanted), strategy)
    h, sums = hidden(lm, params, tokens, strategy)
    h = nn.whole(h)
    project = lm.project(params)
    b, t = tokens.ids.shape
    rows, seq = shards(h, 0), shards(h, 1)
    vocab = lm.vocab // jax.typeof(h).sharding.mesh.shape["tensor"]
    most = max(1, logits // (b // rows * vocab))
    size = max(c for c in range(1, t // seq + 1) if t // seq % c == 0 and c <= most)
    n = t // seq // size
    fold = lambda x, *spec: jnp.reshape(
        x,
        (b, seq, n, size, *x.shape[2:]),
        out_sharding=P(BATCH, "seq", None, None, *spec, reduced=spec_of(x).reduced),
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
        x = jnp.reshape(jnp.moveaxis(x, 0, 2), (b, t), out_sharding=P(BATCH, "seq"))
        x = order.collect(jax.reshard(x, P(BATCH, None)), strategy)
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))

    return *jax.tree.map(late, out), sums
