"""Completions of a batch of prompts: each prompt prefilled once, then a scanned decode over a carried cache.

The decode runs chunks of tokens, each one scan without host or cross-device traffic, inside loops that stop as soon as
every row has ended. Attention reads only the slots that can be filled by then: the window doubles as rows grow.
"""

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int

from rljax.generate.job import Job, repeat, windows
from rljax.generate.relay import relay
from rljax.generate.sampling import Sampling
from rljax.mesh import BATCH, Strategy
from rljax.mesh.placement import DEFAULT
from rljax.model.order import by_token, columns
from rljax.model.table import LM
from rljax.types import LENGTH, STOP, Rollout, Tokens


def generate(
    lm: LM,
    params,
    prompts: Int[Array, "U P"],
    prompt_length: Int[Array, "U"],
    uid: Int[Array, "U"],
    key: Array,
    version: Int[Array, ""],
    sampling: Sampling,
    strategy: Strategy = DEFAULT,
    *,
    n: int,
    max_new: int,
    stop: tuple[int, ...],
    chunk: int = 32,
) -> Rollout:
    """n completions of each prompt, of at most `max_new` tokens, ended by any id of `stop` (kept in the row).

    Rows `[U * n, P + max_new]`, the completions of one prompt adjacent. `prompts` is right-padded; a row with negative
    uid only fills the batch: it generates nothing and its mask is empty. The draw of token t depends on
    (key, uid, sample, t) alone, so not on the layout, the batch or its order.
    """
    u, p = prompts.shape
    index = jax.reshard(jnp.arange(u * n, dtype=jnp.int32) % n, P(BATCH))
    owner = repeat(uid, n)
    keys = jax.vmap(lambda a, b: jax.random.fold_in(jax.random.fold_in(key, a), b))(owner.astype(jnp.uint32), index)
    chunks = ceil((max_new - 1) / chunk)
    job = Job(
        lm, strategy, jnp.pad(prompts, ((0, 0), (0, -p % columns(strategy)))), prompt_length, keys, owner < 0, sampling,
        n, p, stop, ceil((max_new - 1) / max(chunks, 1)), chunks,
    )  # fmt: skip
    complete = relay if jax.sharding.get_abstract_mesh().shape["pipe"] > 1 else _complete
    ids, logp, routes = complete(job, params)
    ids, logp, uid = ids[:, :max_new], logp[:, :max_new], owner
    prompts, prompt_length = repeat(prompts, n), repeat(prompt_length, n)
    stopped = job.stops(ids)
    ended = jnp.any(stopped, -1)
    made = jnp.where(ended, jnp.argmax(stopped, -1).astype(jnp.int32) + 1, max_new)
    made = jnp.where(uid < 0, 0, made)

    # completions follow their prompts at once, so that rows are right-padded
    paste = lambda prompt, ids, at: lax.dynamic_update_slice_in_dim(jnp.pad(prompt, (0, max_new)), ids, at, 0)
    shift = lambda x, at: lax.dynamic_update_slice_in_dim(jnp.zeros(p + max_new, x.dtype), x, at, 0)
    t = jnp.arange(p + max_new, dtype=jnp.int32)[None]
    length = prompt_length + made
    inside = t < length[:, None]
    mask = inside & (t >= prompt_length[:, None])
    tokens = Tokens(
        jnp.where(inside, jax.vmap(paste)(prompts, ids, prompt_length), 0),
        jnp.where(inside, t, 0),
        inside.astype(jnp.int32),
        None if routes is None else by_token(routes, p + max_new),
    )
    return Rollout(
        tokens, mask, jnp.where(mask, jax.vmap(shift)(logp, prompt_length), 0.0), jnp.where(mask, version, 0),
        length, prompt_length, jnp.where(ended, STOP, LENGTH).astype(jnp.int32), uid, index,
    )  # fmt: skip


class Progress(NamedTuple):
    """Rows in the middle of their completions."""

    t: Int[Array, ""]  # tokens sampled
    caches: tuple
    lengths: Int[Array, "B"]  # tokens in the cache
    token: Int[Array, "B"]  # the newest, not yet in the cache
    done: Bool[Array, "B"]
    ids: Int[Array, "B M"]
    logp: Float[Array, "B M"]


def _complete(job: Job, params):
    """ids and log-probabilities [R M] of all rows, and what routes their caches hold: every device decodes its rows."""
    last, caches = job.lm.prefill(params, job.prompts, job.lengths, job.strategy)
    project = job.lm.project(params)
    caches = tuple(jax.tree.map(job.grown, cache) for cache in caches)
    token, logp = job.draw(project(repeat(last[:, 0], job.n)), 0)
    buffer = lambda dtype: jnp.zeros((len(token), job.width), dtype, out_sharding=P(BATCH, None))
    put = lambda buffer, x, t: lax.dynamic_update_slice_in_dim(buffer, x[:, None], t, 1)
    state = Progress(
        jnp.int32(1), caches, repeat(job.lengths, job.n), token, job.filler | job.stops(token),
        put(buffer(jnp.int32), token, 0), put(buffer(jnp.float32), logp, 0),
    )  # fmt: skip

    def step(s: Progress, window: int) -> Progress:
        h, caches = job.lm.extend(params, s.token[:, None], s.caches, s.lengths, window)
        token, logp = job.draw(project(h[:, 0]), s.t)
        ids, logps = put(s.ids, token, s.t), put(s.logp, logp, s.t)
        return Progress(s.t + 1, caches, s.lengths + 1, token, s.done | job.stops(token), ids, logps)

    for until, window in windows(job.prompt, job.chunk, job.chunks):
        scan = lambda s, window=window: lax.scan(lambda s, _: (step(s, window), None), s, None, job.chunk)[0]
        state = lax.while_loop(lambda s, until=until: (s.t <= until) & ~jnp.all(s.done), scan, state)
    return state.ids, state.logp, getattr(state.caches[-1], "routes", None)
