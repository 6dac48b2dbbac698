"""What a device of a pipeline does in a tick: one op, on one microbatch, of one of its parts of the layers.

An op maps a row of the schedule's table and what the device carries to what it sends on and carries further. The input
of a part is kept from its forward op on. The backward op runs the part again from there, and its blocks once more if
`remat` is "block". So in forward passes of the part F costs 1 and B 3, or 4; of the halves of B, BI costs 3 and BW 1,
whatever `remat` is. The last part has no F.

Whether the part is the first or the last (`first`, `last`) is known to the program, and then there are no branches in
an op; or it is in the table, and then both are computed and one is chosen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.mesh.orders import BI, BW, IDLE, B, F
from rljax.model import stage
from rljax.model.entries import add, add_at, at, put
from rljax.model.stage import Stage
from rljax.model.table import join, learned, part


class Sums(NamedTuple):
    """What the ops of a device add up. The first three are None where nothing is differentiated."""

    layers: Any  # gradients [chunks L/parts ...], in float32
    head: Any  # gradients of the other parameters, in float32
    losses: Float[Array, "M"] | None
    out: Any  # [M ...] of what the tail makes, besides a loss
    seen: Any  # [chunks L/parts ...] of what blocks sum


class Carry(NamedTuple):
    """What a device has from tick to tick."""

    inbox: Float[Array, "slots B T D"]
    stash: Any  # [slots L/parts ...] of what BI leaves to BW
    sums: Sums


def _idle(s: Stage, r, carry: Carry):
    return jnp.zeros_like(carry.inbox[0]), carry


def _pass(s: Stage, r, carry: Carry):
    m, sums = r["microbatch"], carry.sums
    x, frame = _enter(s, r, carry)
    y, seen = stage.through(s, at(s.work, r["chunk"]), x, frame, r["start"])
    out = _either(r["last"], lambda: put(sums.out, stage.finish(s, s.head, y, m), m), lambda: sums.out)
    return y, carry._replace(sums=sums._replace(out=out, seen=add_at(sums.seen, seen, r["chunk"])))


def _forward(s: Stage, r, carry: Carry):
    x, frame = _enter(s, r, carry)
    return stage.through(s, at(s.work, r["chunk"]), x, frame, r["start"])[0], carry


def _backward(s: Stage, r, carry: Carry):
    x, frame = _enter(s, r, carry)
    own, frozen = part(s.lm.table.layers, at(s.work, r["chunk"]))
    f = lambda own, x: stage.through(s, join(own, frozen), x, frame, r["start"])
    (y, seen), pull = jax.vjp(f, own, x)
    dy, sums = _leave(s, r, carry, y)
    dseen, sums = _weigh(s, r, sums, seen)
    dw, dx = pull((dy, dseen))
    return dx, carry._replace(sums=_learn(s, r, _embed(s, r, sums, dx), dw))


def _backward_inputs(s: Stage, r, carry: Carry):
    x, frame = _enter(s, r, carry)
    w = at(s.work, r["chunk"])
    y, xs, seen = stage.traced(s, w, x, frame, r["start"])
    dy, sums = _leave(s, r, carry, y)
    dseen, sums = _weigh(s, r, sums, seen)
    dx, kept = stage.inputs(s, w, xs, frame, r["start"], dy, dseen)
    return dx, carry._replace(stash=put(carry.stash, kept, r["stash"]), sums=_embed(s, r, sums, dx))


def _backward_weights(s: Stage, r, carry: Carry):
    frame = stage.frame(s, r["microbatch"])
    dw = stage.weights(s, at(s.work, r["chunk"]), frame, r["start"], at(carry.stash, r["stash"]))
    return jnp.zeros_like(carry.inbox[0]), carry._replace(sums=_learn(s, r, carry.sums, dw))


PASS = 1 + max(IDLE, F, B, BI, BW)  # forward, where no backward op follows
OPS = {IDLE: _idle, F: _forward, B: _backward, BI: _backward_inputs, BW: _backward_weights, PASS: _pass}


def _either(which, yes: Callable, no: Callable):
    """One of two results, of which only that is computed where the choice is known to the program."""
    if isinstance(which, bool):
        return yes() if which else no()
    return jax.tree.map(lambda a, b: jnp.where(which == 1, a, b), yes(), no())


def _enter(s: Stage, r, carry: Carry):
    """The input of the op's part and its frame."""
    m = r["microbatch"]
    x = _either(r["first"], lambda: stage.begin(s, s.head, m)[0], lambda: at(carry.inbox, r["xin"]))
    return x, stage.frame(s, m)


def _leave(s: Stage, r, carry: Carry, y):
    """The cotangent of the part's output: the loss's, if it is the last part."""
    sums, m = carry.sums, r["microbatch"]

    def loss():
        own, frozen = part(_head(s), s.head)
        f = lambda own, y: stage.finish(s, join(own, frozen), y, m)
        (loss, out), (g, dy) = jax.value_and_grad(f, (0, 1), has_aux=True)(own, y)
        return dy, _add_head(s, sums.head, g), put(sums.losses, loss, m), put(sums.out, out, m)

    cotangent = lambda: (at(carry.inbox, r["cin"]), sums.head, sums.losses, sums.out)
    dy, head, losses, out = _either(r["last"], loss, cotangent)
    return dy, sums._replace(head=head, losses=losses, out=out)


def _weigh(s: Stage, r, sums: Sums, seen):
    """The cotangent of what the part's blocks sum."""
    loss, d = jax.value_and_grad(lambda seen: s.share * s.lm.penalty(seen))(seen)
    losses, seen = add_at(sums.losses, loss, r["microbatch"]), add_at(sums.seen, seen, r["chunk"])
    return d, sums._replace(losses=losses, seen=seen)


def _embed(s: Stage, r, sums: Sums, dx):
    """The gradient of the embedding, which is the first part's input."""

    def embedding():
        own, frozen = part(_head(s), s.head)
        (g,) = jax.vjp(lambda own: stage.begin(s, join(own, frozen), r["microbatch"])[0], own)[1](dx)
        return _add_head(s, sums.head, g)

    return sums._replace(head=_either(r["first"], embedding, lambda: sums.head))


def _learn(s: Stage, r, sums: Sums, dw):
    """The gradient of the part's learned weights."""
    g = stage.scattered(s.strategy.zero, learned(s.lm.table.layers), dw)
    return sums._replace(layers=add_at(sums.layers, g, r["chunk"]))


def _add_head(s: Stage, total, g):
    g = jax.tree.map(lambda g: g.astype(jnp.float32), g)
    return add(total, stage.scattered(s.strategy.zero, learned(_head(s)), g))


def _head(s: Stage):
    """The table of what is not a layer of a part."""
    return s.lm.table.replace(layers=None)
