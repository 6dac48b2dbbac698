"""The executor of pipeline schedules: one program, in which every device finds its ops in a table.

Layers are split over pipe; the embedding, the last norm and the head lie on every stage, and the first and the last use
them. A scan goes through the ticks of the schedule: a device runs its op (`ticks`), then what came out travels both
ways along pipe, into the slots of inboxes that the table names. No other activation leaves a stage.

Weights are gathered over fsdp layer by layer. Gradients stay sums of each device in float32 and are reduced once, after
all ticks; from ZeRO-2 on the sum over fsdp is scattered in every backward op.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

from rljax.mesh import Strategy, spec_of
from rljax.mesh.orders import BW, IDLE
from rljax.mesh.schedule import Schedule, build
from rljax.model import manual, stage
from rljax.model.entries import at, put
from rljax.model.manual import MANUAL, ROWS
from rljax.model.quantize import cast
from rljax.model.stage import Stage
from rljax.model.table import LM, learned, map_table, part
from rljax.model.ticks import OPS, PASS, Carry, Sums
from rljax.types import Tokens


def value_and_grad(lm: LM, params, tokens: Tokens, parts, share, tail: Callable, strategy: Strategy):
    """(losses, out, seen, gradient) of M microbatches, by `strategy.schedule`.

    Of `parts` [M B/M ...], those of a microbatch go to `tail(head, x, part) -> (loss, out)`: a sum over rows, and a
    pytree of scalars. x is the residual stream after the last block, `head` the parameters other than layers. To every
    loss comes share * lm.penalty of what its blocks sum. Losses and out are [M R], of the R = data * fsdp parts of a
    microbatch; `seen` is what the blocks of each layer sum, and the gradient, of the learned parameters, is placed as
    its update is.
    """
    zero, table = strategy.zero, learned(lm.table)
    schedule = build(strategy.schedule, _stages(), tokens.ids.shape[0])

    def body(params, tokens, parts, share):
        sums = _run(schedule, _stage(lm, strategy, tail, schedule.part, params, tokens, parts, share))
        layers, seen = manual.home(schedule.part, (sums.layers, sums.seen))
        head, *found = lax.psum((sums.head, sums.losses, sums.out), "pipe")
        grads = map_table(partial(manual.summed, zero), table, head.replace(layers=layers))
        return jax.tree.map(lambda x: x[:, None], found), lax.psum(seen, ROWS), grads

    rows = P(None, ROWS)
    run = jax.shard_map(
        body,
        axis_names=set(MANUAL),
        check_vma=False,
        in_specs=(_specs(lm.table, lambda t: t.placed(zero)), rows, rows, P()),
        out_specs=(rows, P("pipe"), _specs(table, lambda t: t.updated(zero))),
    )
    (losses, out), seen, grads = run(params, tokens, parts, share)
    return losses, out, _everywhere(seen), map_table(lambda t, g: jax.reshard(g, t.updated(zero)), table, grads)


def forward(lm: LM, params, tokens: Tokens, parts, tail: Callable, strategy: Strategy):
    """(out, seen) of M microbatches that pass the S stages once, in M + S - 1 ticks.

    As `value_and_grad`, but `tail(head, x, part)` makes a pytree of arrays [B/M ...], and out is of [M B/M ...].
    """
    schedule = _once(_stages(), tokens.ids.shape[0])

    def body(params, tokens, parts):
        sums = _run(schedule, _stage(lm, strategy, tail, schedule.part, params, tokens, parts))
        return lax.psum(sums.out, "pipe"), lax.psum(manual.home(schedule.part, sums.seen), ROWS)

    rows, specs = P(None, ROWS), jax.tree.map(lambda w: manual.specs(spec_of(w)), params)  # what is quantized has two
    out = rows, P("pipe")
    run = jax.shard_map(body, axis_names=set(MANUAL), check_vma=False, in_specs=(specs, rows, rows), out_specs=out)
    out, seen = run(params, tokens, parts)
    return out, _everywhere(seen)


def _once(stages: int, microbatches: int) -> Schedule:
    """Forward alone: in each tick every stage sends to the next, which reads that in the tick after."""
    m = np.arange(microbatches + stages - 1)[:, None] - np.arange(stages)[None]
    busy = (m >= 0) & (m < microbatches)
    columns = {
        "op": np.where(busy, PASS, IDLE),
        "microbatch": np.where(busy, m, 0),
        "first": busy & (np.arange(stages) == 0),
        "last": busy & (np.arange(stages) == stages - 1),
        "left_slot": ~np.roll(busy, 1, 1),
        "right_slot": np.ones_like(m),
        "self_slot": np.ones_like(m),
        **dict.fromkeys(("chunk", "stash", "xin", "cin"), np.zeros_like(m)),
    }
    table = {name: column.astype(np.int32) for name, column in columns.items()}
    return Schedule(stages, microbatches, np.arange(stages)[:, None], (), table, inbox=1, stash=0)


def _stages() -> int:
    return jax.sharding.get_abstract_mesh().shape["pipe"]


def _stage(lm: LM, strategy: Strategy, tail: Callable, part: np.ndarray, params, *rest) -> Stage:
    work = manual.deal(part, map_table(lambda t, w: cast(t, w, lm.compute), lm.table.layers, params.layers))
    return Stage(lm, strategy, tail, params.replace(layers=None), work, *rest)


def _start(schedule: Schedule, s: Stage) -> tuple[Stage, Carry]:
    """The stage as its ops need it, and zeros."""
    w, chunks, microbatches = at(s.work, 0), schedule.part.shape[1], schedule.microbatches
    x, frame = jax.eval_shape(lambda: stage.begin(s, s.head, 0))
    y, seen = jax.eval_shape(lambda x, frame: stage.through(s, w, x, frame, 0), x, frame)
    made = jax.eval_shape(lambda y: stage.finish(s, s.head, y, 0), y)
    seen, inbox = manual.zeros(seen, chunks), manual.zeros(x, schedule.inbox + 1)
    if PASS in schedule.table["op"]:
        return s, Carry(inbox, (), Sums(None, None, None, manual.zeros(made, microbatches), seen))
    own, _ = part(s.lm.table, s.head.replace(layers=w))
    grads = jax.eval_shape(lambda: stage.scattered(s.strategy.zero, learned(s.lm.table), own))
    layers = manual.zeros(grads.layers, chunks, dtype=jnp.float32)
    head = manual.zeros(grads.replace(layers=None), dtype=jnp.float32)
    stash = ()
    if schedule.stash:
        s = stage.halved(s, w, x, frame)
        both = lambda x, frame, seen: stage.inputs(s, w, stage.traced(s, w, x, frame, 0)[1], frame, 0, x, at(seen, 0))
        stash = manual.zeros(jax.eval_shape(both, x, frame, seen)[1], schedule.stash)
    return s, Carry(inbox, stash, Sums(layers, head, *manual.zeros(made, microbatches), seen))


def _run(schedule: Schedule, s: Stage) -> Sums:
    """All ticks of a schedule.

    Ops that differ in whether their part is the first or the last are different branches, rather than having branches:
    on CPUs, collectives within a branch and after it may otherwise meet each other.
    """
    ring = s.strategy.context == "ring" and jax.sharding.get_abstract_mesh().shape["seq"] > 1
    table, part = schedule.table, schedule.part[np.arange(schedule.stages), schedule.table["chunk"]]
    ends = np.stack([table[name] * ((table["op"] != BW) & (not ring)) for name in ("first", "last")], -1)
    every = np.concatenate([table["op"][..., None], ends], -1).reshape(-1, 3)
    kinds, kind = np.unique(every, axis=0, return_inverse=True)
    columns = table | {
        "kind": kind.reshape(table["op"].shape).astype(np.int32),
        "start": part * jax.tree.leaves(s.work)[0].shape[1],  # the number of the part's first layer
    }
    sides = [side for side in SENT if (table[side] < schedule.inbox).any()]
    s, carry = _start(schedule, s)
    ops = []
    for op, first, last in kinds.tolist():
        known = {} if ring else {"first": bool(first), "last": bool(last)}
        ops.append(lambda r, carry, op=op, known=known: OPS[op](s, r | known, carry))
    me = lax.axis_index("pipe")

    def tick(carry, row):
        r = {name: at(column, me) for name, column in row.items()}
        sent, carry = (_together if ring else _apart)(ops, row["kind"], r, carry)
        inbox = carry.inbox
        for side in sides:
            inbox = put(inbox, _send(sent, SENT[side]), r[side])
        return carry._replace(inbox=inbox), None

    return lax.scan(tick, carry, jax.tree.map(jnp.asarray, columns))[0].sums


def _apart(ops, kinds, r, carry: Carry):
    """Each device runs its own op."""
    return lax.switch(r["kind"], ops, r, carry)


def _together(ops, kinds, r, carry: Carry):
    """Every device runs each op that some device has in this tick, and keeps what its own does.

    So all meet in the permutations of a ring. Where forward ops come before backward ops, as in GPipe, it takes no
    longer than if each ran its own.
    """

    def run(op, i, r, carry, kept):
        return jax.tree.map(lambda new, old: jnp.where(r["kind"] == i, new, old), op(r, carry), kept)

    kept = jnp.zeros_like(carry.inbox[0]), carry
    for i, op in enumerate(ops):
        kept = lax.cond(jnp.any(kinds == i), partial(run, op, i), lambda r, carry, kept: kept, r, carry, kept)
    return kept


SENT = {"left_slot": 1, "right_slot": -1, "self_slot": 0}  # what a device finds there was sent so far along pipe


def _send(x, hops: int):
    """To another stage; the last is followed by the first."""
    stages = lax.axis_size("pipe")
    return lax.ppermute(x, "pipe", [(d, (d + hops) % stages) for d in range(stages)]) if hops else x


def _specs(table, placed: Callable):
    return map_table(lambda t: manual.specs(placed(t)), table)


def _everywhere(seen):
    """Sums of all layers on every stage."""
    return jax.tree.map(lambda x: jax.reshard(x, P(*(None,) * x.ndim)), seen)
