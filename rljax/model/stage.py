"""The model as a stage of a pipeline runs it: the embedding, a part of the layers, the loss, on the rows of a device.

All of it runs in a `shard_map` that is manual over pipe, data and fsdp (`manual`); the types of seq, tensor and expert
stay, so that blocks run as they are, each under the remat of the strategy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

from rljax.mesh import Strategy
from rljax.model import manual, order, stack
from rljax.model.entries import at
from rljax.model.halves import halve
from rljax.model.table import LM, is_tensor, learned, map_table, part
from rljax.types import Tokens


class Stage(NamedTuple):
    """What is the same in all ticks."""

    lm: LM
    strategy: Strategy
    tail: Callable  # head, the residual stream after the last block, what it needs of a microbatch -> its loss, say
    head: Any  # parameters other than layers
    work: Any  # layers [chunks L/parts ...], matrices in the compute dtype
    tokens: Tokens  # [M B/M T]
    parts: Any  # [M B/M ...], for the tail
    share: Float[Array, ""] | float = 0.0  # of the penalties in the loss
    halves: tuple[Callable, Callable] | None = None  # of a block's backward pass


def begin(s: Stage, head, m):
    """The residual stream of microbatch m where the layers over pipe begin, and the frame that all blocks share."""
    x, frame = s.lm.embed(_ends(s, head), order.deal(at(s.tokens, m), s.strategy), s.strategy)
    for layers in s.lm.stacks(head.replace(layers=at(s.work, 0)), frame)[:-1]:
        first = lambda x, w: s.lm.block(x, _whole(s, s.lm.table.first, w, stacked=True), frame)
        x, _ = stack.through(first, x, layers, s.strategy.remat)
    return x, frame


def frame(s: Stage, m):
    """The frame alone: the stream, of which nothing is read, is dead code."""
    return s.lm.embed(_ends(s, s.head), order.deal(at(s.tokens, m), s.strategy), s.strategy)[1]


def through(s: Stage, w, x, frame, start):
    """x after a part of the layers, from number `start` on, and what its blocks sum."""
    block = lambda x, layer: _block(s, layer, x, frame)
    return stack.through(block, x, _layers(s, w, frame, start), s.strategy.remat)


def finish(s: Stage, head, x, m):
    """What the tail makes of microbatch m."""
    return s.tail(_ends(s, head), x, at(s.parts, m))


def halved(s: Stage, w, x, frame) -> Stage:
    """The stage with its blocks' backward pass in two halves, for arguments of these types."""
    w, layer = jax.eval_shape(lambda w, frame: at((_own(s, w), _layers(s, w, frame, 0)), 0), w, frame)
    table = learned(s.lm.table.layers)
    weights = lambda layer, w: _map(lambda t, old, new: old if t is None else new, table, layer, w)
    block = lambda w, x, rest: _block(s, weights(rest[0], w), x, rest[1])
    return s._replace(halves=halve(block, w, x, (layer, frame)))


def traced(s: Stage, w, x, frame, start):
    """As `through`; and in between what enters each block."""

    def step(x, layer):
        y, seen = _block(s, layer, x, frame)
        return y, (x, seen)

    layers = _layers(s, w, frame, start)
    y, (xs, seen) = lax.scan(step, x, layers, unroll=stack.unroll(layers))
    return y, xs, seen


def inputs(s: Stage, w, xs, frame, start, dy, dseen):
    """The cotangent of a part's input, and what the gradients of its weights are made of."""
    half, _ = s.halves
    step = lambda dy, scanned: half(scanned[0], scanned[2], (scanned[1], frame), (dy, scanned[3]))
    scanned = _own(s, w), _layers(s, w, frame, start), xs, dseen
    return lax.scan(step, dy, scanned, reverse=True, unroll=stack.unroll(w))


def weights(s: Stage, w, frame, start, kept):
    """The gradients of a part's learned weights."""
    _, half = s.halves
    step = lambda _, scanned: (None, half(scanned[0], (scanned[1], frame), scanned[2]))
    return lax.scan(step, None, (_own(s, w), _layers(s, w, frame, start), kept), unroll=stack.unroll(w))[1]


def scattered(zero: int, table, g):
    """Gradients of one backward pass, as they are added up."""
    return map_table(partial(manual.scattered, zero), table, g)


def _own(s: Stage, w):
    """The learned weights of a part."""
    return part(s.lm.table.layers, w)[0]


def _block(s: Stage, layer, x, frame):
    return s.lm.block(x, _whole(s, s.lm.table.layers, layer, stacked=True), frame)


def _layers(s: Stage, w, frame, start):
    """What the blocks of a part are scanned over: weights, and what the frame has for each layer."""
    return s.lm.stacks(s.head.replace(layers=w), frame, start)[-1]


def _ends(s: Stage, head):
    """The embedding, the last norm and the head, whole."""
    return _whole(s, s.lm.table.replace(layers=None, first=None), head.replace(first=None))


def _whole(s: Stage, table, w, stacked: bool = False):
    one = lambda t, w: w if t is None else manual.whole(s.lm.compute, s.strategy.zero, t, w, stacked)
    return _map(one, table, w)


def _map(f: Callable, table, *trees):
    """`map_table` over trees that may have something where the table has None."""
    return jax.tree.map(f, table, *trees, is_leaf=lambda t: t is None or is_tensor(t))
