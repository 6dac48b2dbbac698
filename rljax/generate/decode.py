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

from rljax.generate.sampling import Sampling, sample
from rljax.mesh import BATCH, Strategy, spec_of
from rljax.mesh.placement import DEFAULT
from rljax.model.order import by_token, columns
from rljax.model.table import LM
from rljax.types import LENGTH, STOP, Rollout, Tokens


class Progress(NamedTuple):
    """Rows in the middle of their completions."""

    t: Int[Array, ""]  # tokens sampled
    cache: object
    lengths: Int[Array, "B"]  # tokens in the cache
    token: Int[Array, "B"]  # the newest, not yet in the cache
    done: Bool[Array, "B"]
    ids: Int[Array, "B M"]
    logp: Float[Array, "B M"]


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
    chunks = ceil((max_new - 1) / chunk)
    chunk = ceil((max_new - 1) / max(chunks, 1))
    width = 1 + chunks * chunk
    project = lm.project(params)

    def born(shape, value, dtype):
        return jnp.full(shape, value, dtype, out_sharding=P(BATCH, *(None,) * (len(shape) - 1)))

    def repeat(x, axis):
        """Rows of prompts [U] to rows of completions [U * n], neighbors staying on one device."""
        wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], n, *x.shape[axis + 1 :]))
        return jnp.reshape(wide, (*x.shape[:axis], u * n, *x.shape[axis + 1 :]), out_sharding=spec_of(x))

    def draw(h: Float[Array, "R D"], t):
        return sample(project(h), jax.vmap(jax.random.fold_in, (0, None))(keys, t), sampling)

    wide = jnp.pad(prompts, ((0, 0), (0, -p % columns(strategy))))
    last, cache = lm.prefill(params, wide, prompt_length, strategy)

    def grown(c):
        """A cache of completions, with room for their tokens: rows [L U C T ...] to [L U * n, C, slots, ...]."""
        more = max(0, -(-(p + width) // c.shape[2]) - c.shape[3])
        empty = -1 if jnp.issubdtype(c.dtype, jnp.integer) else 0
        return jnp.pad(repeat(c, 1), [(0, more if d == 3 else 0) for d in range(c.ndim)], constant_values=empty)

    cache = jax.tree.map(grown, cache)
    prompts, prompt_length, uid, last = (repeat(x, 0) for x in (prompts, prompt_length, uid, last[:, 0]))
    index = jax.reshard(jnp.arange(u * n, dtype=jnp.int32) % n, P(BATCH))
    keys = jax.vmap(lambda a, b: jax.random.fold_in(jax.random.fold_in(key, a), b))(uid.astype(jnp.uint32), index)

    is_stop = lambda ids: jnp.any(jnp.stack([ids == s for s in stop]), 0) if stop else jnp.zeros_like(ids, bool)
    put = lambda buffer, x, t: lax.dynamic_update_slice_in_dim(buffer, x[:, None], t, 1)
    token, logp = draw(last, 0)
    state = Progress(
        jnp.int32(1), cache, prompt_length, token, is_stop(token) | (uid < 0),
        put(born((u * n, width), 0, jnp.int32), token, 0), put(born((u * n, width), 0, jnp.float32), logp, 0),
    )  # fmt: skip

    def step(s: Progress, window: int) -> Progress:
        h, cache = lm.extend(params, s.token[:, None], s.cache, s.lengths, window)
        token, logp = draw(h[:, 0], s.t)
        ids, logps = put(s.ids, token, s.t), put(s.logp, logp, s.t)
        return Progress(s.t + 1, cache, s.lengths + 1, token, s.done | is_stop(token), ids, logps)

    for until, window in windows(p, chunk, chunks):
        scan = lambda s, window=window: lax.scan(lambda s, _: (step(s, window), None), s, None, chunk)[0]
        state = lax.while_loop(lambda s, until=until: (s.t <= until) & ~jnp.all(s.done), scan, state)

    ids, logp = state.ids[:, :max_new], state.logp[:, :max_new]
    stopped = is_stop(ids)
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
    routes = getattr(state.cache, "routes", None)
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


def windows(prompt: int, chunk: int, chunks: int) -> list[tuple[int, int]]:
    """(tokens sampled by then, slots read until then) of each loop: chunks are grouped so that the slots double."""
    plan, j = [], 0
    while j < chunks:
        j = min(chunks, j + max(1, (prompt + j * chunk) // chunk))
        plan.append((j * chunk, prompt + j * chunk))
    return plan
