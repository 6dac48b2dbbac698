"""Generation through a pipeline: groups of rows follow one another from stage to stage, so that all stages work.

A token of each of G groups takes G ticks; with G >= S groups in flight none of the S stages waits, but for S - 1 ticks
at either end. The latency of a row is that of all layers. A prompt goes through the same way, group after group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int

from rljax.generate.job import Job, repeat, windows
from rljax.mesh import spec_of
from rljax.mesh.verbs import axes_of
from rljax.model.cached import after, prompts
from rljax.model.entries import at, put
from rljax.model.manual import zeros
from rljax.model.microbatches import cut, join
from rljax.model.table import map_table


class Progress(NamedTuple):
    """What a stage knows of r rows in each of G groups; the caches of its layers, those of a group together."""

    tick: Int[Array, ""]
    caches: tuple  # [G L r C T ...] for each stack of layers
    came: Float[Array, "r 1 D"]  # from the stage before
    token: Int[Array, "G r"]  # the newest: what the first stage reads
    done: Bool[Array, "G r"]  # known to the last stage, as are ids and logp
    ids: Int[Array, "G r M+1"]  # and a column that nobody reads
    logp: Float[Array, "G r M+1"]
    finished: Bool[Array, ""]  # every row has ended


def relay(job: Job, params):
    """ids and log-probabilities [R M] of all rows, and what routes their caches hold."""
    groups = in_flight(job.strategy.microbatches, jax.sharding.get_abstract_mesh().shape["pipe"])
    per_row = lambda x: _group(x, job.n, groups) if x.ndim else jnp.broadcast_to(x, (groups,))
    keys, filler = per_row(jax.random.key_data(job.keys)), per_row(job.filler)
    parts = cut((job.prompts, job.lengths), groups), keys, filler, jax.tree.map(per_row, job.sampling)

    def body(params, parts):
        (prompts, lengths), keys, filler, sampling = parts

        def of(g) -> Job:
            keys_of = jax.random.wrap_key_data(at(keys, g))
            return job._replace(
                prompts=at(prompts, g), lengths=at(lengths, g), keys=keys_of, filler=at(filler, g),
                sampling=at(sampling, g),
            )  # fmt: skip

        ids, logp, routes = _stage(job, of, params, groups)
        grouped = lambda x: jnp.reshape(x, (groups, -1, *x.shape[1:]), out_sharding=P(None, *spec_of(x).partitions))
        return lax.psum((ids, logp), "pipe"), jax.tree.map(grouped, routes)

    over = map_table(lambda t: P("pipe") if "pipe" in axes_of(t.spec[0]) else P(), job.lm.table)
    out = P(), P(None, "pipe")
    run = jax.shard_map(body, axis_names={"pipe"}, check_vma=False, in_specs=(over, P()), out_specs=out)
    (ids, logp), routes = run(params, parts)
    if routes is not None:
        routes = jnp.moveaxis(jax.reshard(routes, P(None, None, *spec_of(routes).partitions[2:])), 1, 0)
        routes = jax.vmap(lambda x: _ungroup(x, job.n))(routes)
    return _ungroup(ids, job.n), _ungroup(logp, job.n), routes


def in_flight(microbatches: int, stages: int) -> int:
    """The groups of rows that generation has at a time: as many as microbatches, at least one for each stage."""
    return max(microbatches, stages) if stages > 1 else 1


def _stage(job: Job, of, params, groups: int):
    """What one stage does: ids and log-probabilities [G r M], zero but on the last, and routes [G L r C T 1 k]."""
    lm, stages, me = job.lm, lax.axis_size("pipe"), lax.axis_index("pipe")
    first, last = me == 0, me == stages - 1
    own = len(jax.tree.leaves(params.layers)[0])
    *ends, mine = lm.stacks(params, None, me * own)
    depth = [len(jax.tree.leaves(layers)[0]) for layers in (*ends, mine)]
    send = lambda x: lax.ppermute(x, "pipe", [(d, (d + 1) % stages) for d in range(stages)])

    def fill(came, m):
        """A group's prompts through this stage: what leaves it, the caches, and the state after each prompt."""
        tokens, caches = prompts(of(m).prompts, job.strategy), []
        x, frame = lm.embed(params, tokens, job.strategy)
        for layers in ends:
            x, cache = lm.fill(layers, x, frame, job.strategy)
            caches.append(cache)
        x, cache = lm.fill(mine, x if came is None else jnp.where(first, x, came), frame, job.strategy)
        return x, (*caches, cache), lm.norm(params, after(x, tokens, of(m).lengths))

    def prefill(carry, t):
        came, caches, states = carry
        m = jnp.clip(t - me, 0, groups - 1)
        x, *new = fill(came, m)
        keep = lambda old, new: put(old, jnp.where(t - me == m, new, at(old, m)), m)
        return (send(x), *jax.tree.map(keep, (caches, states), tuple(new))), None

    x, caches, states = jax.eval_shape(lambda: fill(None, 0))
    carry = zeros(x), zeros((caches, states), groups)[0], zeros(states, groups)
    (_, caches, states), _ = lax.scan(prefill, carry, jnp.arange(groups + stages - 1))
    caches = tuple(
        jax.tree.map(lambda c: _flat(jax.vmap(lambda c: job.grown(c, spare=1))(c)), cache) for cache in caches
    )
    free = caches[-1].k.shape[2] * caches[-1].k.shape[3] - 1  # a position that no row gets to

    project = lm.project(params)
    begin = lambda _, g: (None, of(g).draw(project(repeat(at(states, g)[:, 0], job.n)), 0))
    _, (token, logp) = lax.scan(begin, None, jnp.arange(groups))
    token, logp = lax.psum(jax.tree.map(lambda x: jnp.where(last, x, 0), (token, logp)), "pipe")
    done = jnp.stack([of(g).filler for g in range(groups)]) | job.stops(token)
    wide = lambda x: jnp.pad(x[..., None], ((0, 0), (0, 0), (0, job.width)))
    came = jnp.zeros_like(lm.enter(params, at(token, 0)[:, None]))
    state = Progress(jnp.int32(0), caches, came, token, done, wide(token), wide(logp), jnp.zeros((), bool))

    def tick(s: Progress, window: int) -> Progress:
        g, k = (
            (s.tick - me) % groups,
            (s.tick - me) // groups,
        )  # the group that is here, and how many tokens it has more
        works, now = (k >= 0) & (k < job.width - 1), of(g)
        lengths = jnp.where(works, repeat(now.lengths, job.n) + k, free)
        x, caches = lm.enter(params, at(s.token, g)[:, None]), []
        for layers, cache, n in zip((*ends, mine), s.caches, depth, strict=True):
            x = jnp.where(first, x, s.came) if layers is mine else x
            x, cache = lm.advance(layers, x, cache, lengths, window, g * n)
            caches.append(cache)
        nothing = lambda: (jnp.zeros_like(at(s.token, 0)), jnp.zeros_like(at(s.logp, 0)[:, 0]))
        draw = lambda: now.draw(project(lm.norm(params, x)[:, 0]), k + 1)
        new, logp = lax.cond(last, draw, nothing)
        column = jnp.where(works & last, k + 1, job.width)
        write = lambda buffer, new: lax.dynamic_update_slice(buffer, new[None, :, None], (g, 0, column))
        done = put(s.done, at(s.done, g) | (job.stops(new) & works & last), g)
        came, new_here = send(x), send(new)
        arrived = (s.tick - (stages - 1)) % groups  # the group whose token the last stage has just drawn
        token = jnp.where(s.tick >= stages - 1, put(s.token, new_here, arrived), s.token)
        return Progress(
            s.tick + 1, tuple(caches), came, token, done, write(s.ids, new), write(s.logp, logp), s.finished
        )

    def ticks(s: Progress, n: int, window: int) -> Progress:
        s = lax.scan(lambda s, _: (tick(s, window), None), s, None, n)[0]
        ended = lax.psum(jnp.where(last, jnp.all(s.done), False).astype(jnp.int32), "pipe")
        return s._replace(finished=ended > 0)

    window = job.prompt
    for until, window in windows(job.prompt, job.chunk, job.chunks):
        going = lambda s, until=until: (s.tick < until * groups) & ~s.finished
        chunk = lambda s, window=window: ticks(s, job.chunk * groups, window)
        state = lax.while_loop(going, chunk, state)
    if job.chunks:
        state = ticks(state, stages - 1, window)  # those still under way
    known = lambda x: jnp.where(last, x[..., : job.width], 0)
    return known(state.ids), known(state.logp), getattr(state.caches[-1], "routes", None)


def _group(x, n: int, groups: int):
    """Rows [R ...] as [G r ...], the completions of a prompt together."""
    split, *rest = spec_of(x).partitions
    x = cut(jnp.reshape(x, (len(x) // n, n, *x.shape[1:]), out_sharding=P(split, None, *rest)), groups)
    return jnp.reshape(x, (groups, -1, *x.shape[3:]), out_sharding=P(None, split, *rest))


def _ungroup(x, n: int):
    """What `_group` did, undone."""
    _, split, *rest = spec_of(x).partitions
    x = join(jnp.reshape(x, (len(x), -1, n, *x.shape[2:]), out_sharding=P(None, split, None, *rest)))
    return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=P(split, *rest))


def _flat(x):
    """Layers [G L ...] one after another."""
    return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=P(None, *spec_of(x).partitions[2:]))
