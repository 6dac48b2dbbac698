"""A decoder's blocks on a cache of keys and values: prompts fill it, and each token that follows is appended.

`m` is the decoder's settings, a `decoder.Decoder`; `p` its `Params`. There is a cache for each stack of layers.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import P, lax
from jaxtyping import Array, Float, Int

from rljax.mesh import Strategy, spec_of
from rljax.mesh.verbs import whole
from rljax.model import attention, latent, order
from rljax.model.blocks import Frame, attend, embed, entering, look_up, norm, queries, rest, ropes, rule, stacks, weight
from rljax.model.table import UNROLL
from rljax.types import Tokens


@struct.dataclass
class Cache:
    """Keys and values in stripes over the C devices of the seq axis: slot t of stripe c holds token C t + c of a row.

    So every stripe grows as fast as the others, and ring attention finds the keys of a prompt where they stay. Latent
    attention keeps `latent.entries` in place of keys, which values are part of.
    """

    k: Float[Array, "L B C T K H"]
    v: Float[Array, "L B C T K U"] | None
    routes: Int[Array, "L B C T 1 k"] | None = None  # the experts chosen, where training shall replay them


def fill(m, layers, x: Float[Array, "B T D"], frame: Frame, strategy: Strategy) -> tuple[Float[Array, "B T D"], Cache]:
    """A stack of layers on whole sequences, and their keys and values."""

    def layer(x, w):
        q, k, v, kept = _made(m, x, w, frame.ropes)
        x, _, routes = rest(m, x, attend(m, q, k, v, w, frame), w, frame.segments.q)
        routes = routes[:, :, None] if _replayed(m, w) else None
        return x, jax.tree.map(lambda y: order.stripes(y, strategy), Cache(*kept, routes))

    return _scan(layer, x, layers)


def enter(m, p, ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """The residual stream of tokens that follow others: every device of seq works on all of them."""
    return look_up(m, p, ids, P(*spec_of(ids).partitions, None))


def advance(
    m, layers, x: Float[Array, "B S D"], cache: Cache, lengths: Int[Array, "B"], window: int | None = None, first=0
) -> tuple[Float[Array, "B S D"], Cache]:
    """A stack of layers on S tokens of each row that follow the `lengths` in its cache, and the cache with them.

    Layers of the cache count from `first` on: there may be those of several groups of rows, one after another.
    Attention reads the first `window` tokens (default all slots): the caller promises lengths + S <= window.
    The cache is carried through the layers, so that it is updated in place: as a scan's xs and ys it is copied whole.
    """
    stripes, slots = cache.k.shape[2:4]
    read = slots if window is None else min(slots, -(-window // stripes))
    positions = lengths[:, None] + jnp.arange(x.shape[1])[None]
    turned = ropes(m, positions)
    distance = positions[:, :, None, None] - order.positions(stripes, read)[None, None]

    def looked_up(x, w, cache, i):
        """What attention reads, as heads' values, and the cache with these tokens."""
        if m.latent:
            q, k, values = latent.absorbed(m, *entering(m, x, w, turned), weight)
            v = None
        else:
            q, k, v = queries(m, x, w, turned)
        kept = jax.tree.map(lambda old, new: order.append(old, new, i, lengths), (cache.k, cache.v), (k, v))
        k, v = jax.tree.map(lambda c: _first(c, i, read), kept)
        how, cache = rule(m, w), cache.replace(k=kept[0], v=kept[1])
        if m.latent:
            return values(attention.striped(q, k, k[..., : m.latent.keys], how.reaches(distance), how)), cache
        return attention.striped(q, k, v, how.reaches(distance), how), cache

    def layer(carry, scanned):
        x, cache = carry
        i, w = scanned
        attended, cache = looked_up(x, w, cache, i)
        x, _, routes = rest(m, x, attended, w, jnp.ones_like(positions))
        if _replayed(m, w):
            cache = cache.replace(routes=order.append(cache.routes, routes[:, :, None], i, lengths))
        return (x, cache), None

    return _scan(layer, (x, cache), (first + jnp.arange(len(jax.tree.leaves(layers)[0])), layers))[0]


def prefill(
    m, p, ids: Int[Array, "B S"], lengths: Int[Array, "B"], strategy: Strategy
) -> tuple[Float[Array, "B 1 D"], tuple[Cache, ...]]:
    """The hidden state after the last token of each right-padded row, and the keys and values of all S of them.

    Every device works on its share of the tokens, so S must be a multiple of `order.columns(strategy)`.
    """
    tokens = prompts(ids, strategy)
    (x, frame), caches = embed(m, p, tokens, strategy), []
    for layers in stacks(m, p, frame):
        x, cache = fill(m, layers, x, frame, strategy)
        caches.append(cache)
    return norm(m, p, after(x, tokens, lengths)), tuple(caches)


def prompts(ids: Int[Array, "B S"], strategy: Strategy) -> Tokens:
    """Right-padded prompts, dealt out. What pads them comes after all that is read."""
    ones = jnp.ones_like(ids)
    return order.deal(Tokens(ids, jnp.cumsum(ones, 1) - 1, ones), strategy)


def after(x: Float[Array, "B T D"], tokens: Tokens, lengths: Int[Array, "B"]) -> Float[Array, "B 1 D"]:
    """The state after the last token of each prompt."""
    last = jax.reshard(tokens.positions == lengths[:, None] - 1, P(*spec_of(x).partitions[:2]))
    return jnp.sum(jnp.where(last[..., None], x, 0), 1, keepdims=True)


def extend(
    m, p, ids: Int[Array, "B S"], caches: tuple[Cache, ...], lengths: Int[Array, "B"], window: int | None = None
) -> tuple[Float[Array, "B S D"], tuple[Cache, ...]]:
    """Appends S tokens to each row at its own length, and the hidden states after each: see `advance`."""
    x, grown = enter(m, p, ids), []
    for layers, cache in zip(stacks(m, p), caches, strict=True):
        x, cache = advance(m, layers, x, cache, lengths, window)
        grown.append(cache)
    return norm(m, p, x), tuple(grown)


def _first(cache: Float[Array, "L B C T K H"], layer, slots: int) -> Float[Array, "B C t K H"]:
    """The first slots of a layer: in one slice, since compilers copy what they slice."""
    _, b, c, _, *heads = cache.shape
    return lax.dynamic_slice(cache, (layer, 0, 0, 0, 0, 0), (1, b, c, slots, *heads))[0]


def _made(m, x, w, turned):
    """Queries, keys and values of whole sequences, and what a cache keeps of the latter."""
    if not m.latent:
        q, k, v = queries(m, x, w, turned)
        return q, k, v, (k, v)
    arguments = m, *entering(m, x, w, turned), weight
    known = latent.known(*arguments)
    return *latent.queries(*arguments, known), (latent.entries(known), None)


def _replayed(m, w) -> bool:
    return w.router is not None and m.experts.replay


def _scan(layer, carry, layers):
    layers = jax.tree.map(lambda x: whole(x, "pipe"), layers)
    return lax.scan(layer, carry, layers, unroll=len(jax.tree.leaves(layers)[0]) <= UNROLL)
