"""Blockwise and ring attention: exact, tile by tile, while the keys and values of the other devices come by.

Ring attention (Liu et al. 2023, arXiv:2310.01889) of tokens dealt like cards (striped, Brandon et al. 2023,
arXiv:2311.09431): shard r of the n of `seq` holds the row positions r, r + n, r + 2n, ..., so that index s on rank r is
position s*n + r. A query sees the keys of its own segment at positions up to its own. Then every pair of a query shard
and a key shard is one triangle, whichever ranks they belong to: the same work on every rank in every hop.

A shard has m tiles on a side and a hop visits the m (m + 1) / 2 pairs on and below the diagonal, 1 + 1/m times the
triangle. So the matmuls of a device are 1/n of those of one device with the same m: 2 T^2/n N H (1 + 1/m) FLOPs a row
forward and 2.5 times that backward, for T positions and N heads of width H.

A block is a device's keys and values, 2 B T/n K H numbers. Forward, a device sends n - 1 blocks in k's dtype. Backward,
and the other way round, it sends as many again; and in float32 as many blocks of gradients, one hop behind their keys;
and a last one in k's dtype, which goes home.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from rljax.mesh import island, shards, spec_of
from rljax.model.attention import MASKED, Rule, Segments
from rljax.model.entries import at, put

TILE = 512  # positions on a side of a tile, at most


def ring(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K U"],
    segments: Segments,
    rule: Rule,
    tile: int = TILE,
) -> Float[Array, "B T N U"]:
    """Causal attention of dealt tokens, q, k and v alike split over seq; with seq = 1, plain blockwise attention.

    Tiles are the largest that divide a shard, up to `tile` on a side. Only keys and values travel: `segments.k` is
    whole on every device. Nothing is larger than a shard or a tile of scores, and no block that came by is kept.
    """
    t = q.shape[1] // shards(q, 1)
    m = t // max(c for c in range(1, tile + 1) if t % c == 0)
    local = lambda q, k, v, near, *ids: _attend(m, rule._replace(near=None), q, k, v, near, Segments(*ids))
    return island(local, spec_of(q))(q, k, v, rule.near, *segments)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(m: int, rule: Rule, q, k, v, near, segments: Segments):
    return _forward(m, rule, q, k, v, near, segments)[0]


def _forward(m: int, rule: Rule, q, k, v, near, segments: Segments):
    """The output; and for the backward pass, beside the inputs, the logarithm of every softmax's denominator."""
    n, rank = lax.axis_size("seq"), lax.axis_index("seq")
    fold = partial(_fold, m, k.shape[2])
    # bound to q, or JAX would compute the masks of all tiles ahead of all layers, and keep them
    q, near, segments, rank = lax.optimization_barrier((q, near, segments, rank))
    queries, kv, ids, rule = fold(q), (fold(k), fold(v)), _fold_ids(m, segments), rule._replace(near=near)

    def tile(source, kv, state, pair):
        i, j = pair
        (key, value), (out, peak, total) = at(kv, j), at(state, i)
        scores = jnp.where(*_scores(rule, at(queries, i), key, ids, i, j, rank, source), MASKED)
        top = jnp.maximum(peak, jnp.max(scores, -1))
        # what a query summed before it saw a key is wiped out: its `old` is then exp(MASKED - a score) = 0
        weights, old = jnp.exp(scores - top[..., None]), jnp.exp(peak - top)
        out = out * old[..., None] + _dot("bkrt,bkth->bkrh", weights.astype(value.dtype), value)
        return put(state, (out, top, total * old + jnp.sum(weights, -1)), i), None

    def hop(source, kv, state):
        return lax.scan(partial(tile, source, kv), state, _pairs(m))[0]

    def onward(carry, distance):  # neither the sending nor the tiles wait for the other
        kv, state = carry
        return _rotate(kv, 1), hop((rank - distance) % n, kv, state)

    zeros = jnp.zeros_like(queries[..., 0], jnp.float32)
    state = jnp.broadcast_to(zeros[..., None], (*zeros.shape, v.shape[-1])), zeros + MASKED, zeros
    if n > 1:
        kv, state = _hops(onward, (kv, state), jnp.arange(n - 1))
    out, peak, total = hop((rank + 1) % n, kv, state)
    out = _unfold(q.shape[1], out / total[..., None]).astype(q.dtype)
    return out, (q, k, v, near, segments, out, peak + jnp.log(total))


def _backward(m: int, rule: Rule, residuals, d_out):
    """FlashAttention-2's (Dao 2023, arXiv:2307.08691): probabilities are recomputed from the stored denominators.

    Gradients of keys and values travel in float32, so that they are rounded once however many devices add to them: in
    bfloat16 their error tripled at n = 32. Blocks go the other way round than in the forward pass, lest XLA take them
    for the same and keep those.
    """
    q, k, v, near, segments, out, lse = residuals
    n, rank = lax.axis_size("seq"), lax.axis_index("seq")
    fold = partial(_fold, m, k.shape[2])
    d_out, near, segments, rank = lax.optimization_barrier((d_out, near, segments, rank))  # as in `_forward`
    queries, kv, ids, d_out = fold(q), (fold(k), fold(v)), _fold_ids(m, segments), fold(d_out)
    rule = rule._replace(near=near)
    delta = jnp.sum(d_out.astype(jnp.float32) * fold(out), -1)

    def tile(source, kv, state, pair):
        i, j = pair
        dq, dkv = state
        query, d, norm, shift = at((queries, d_out, lse, delta), i)
        (key, value), (dk, dv) = at(kv, j), at(dkv, j)
        sees, scores = _scores(rule, query, key, ids, i, j, rank, source)
        p = jnp.exp(jnp.where(sees, scores, MASKED) - norm[..., None])
        ds = p * (_dot("bkrh,bkth->bkrt", d, value) - shift[..., None])
        ds = (ds if rule.cap is None else ds * (1 - (scores / rule.cap) ** 2)).astype(q.dtype)
        dv += _dot("bkrt,bkrh->bkth", p.astype(d.dtype), d)
        dk += _dot("bkrt,bkrh->bkth", ds, query)
        dq = put(dq, at(dq, i) + _dot("bkrt,bkth->bkrh", ds, key), i)
        return (dq, put(dkv, (dk, dv), j)), None

    def hop(source, kv, dq):
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), kv)
        return lax.scan(partial(tile, source, kv), (dq, zeros), _pairs(m))[0]

    def onward(carry, distance):
        kv, dq, dkv = carry
        ahead, behind = _rotate(kv, -1), _rotate(dkv, -1)
        dq, own = hop((rank + distance) % n, kv, dq)
        return ahead, dq, _add(behind, own)

    dq, dkv = hop(rank, kv, jnp.zeros_like(queries, jnp.float32))
    if n > 1:
        kv, dq, dkv = _hops(onward, (_rotate(kv, -1), dq, dkv), jnp.arange(1, n - 1))
        behind = _rotate(dkv, -1)
        dq, own = hop((rank - 1) % n, kv, dq)
        dkv = _add(behind, own)
    dk, dv = dkv
    dk, dv = _rotate(((dk * rule.scale).astype(k.dtype), dv.astype(v.dtype)), -1)
    unfold = partial(_unfold, q.shape[1])
    return unfold(dq * rule.scale).astype(q.dtype), unfold(dk), unfold(dv), None, None


_attend.defvjp(_forward, _backward)


def _pairs(m: int):
    """Tiles (i, j) of queries and keys on and below the diagonal."""
    i, j = np.tril_indices(m)
    return jnp.int32(i), jnp.int32(j)


def _scores(
    rule: Rule, query, key, ids: Segments, i, j, rank, source
) -> tuple[Bool[Array, "B 1 R C"], Float[Array, "B K R C"]]:
    """Which keys of tile j of `source` the queries of tile i of rank `rank` see, and all scores."""
    n, (m, _, c) = lax.axis_size("seq"), ids.q.shape
    position = lambda tile, shard: (tile * c + jnp.arange(c)) * n + shard
    past = rule.reaches(position(i, rank)[:, None] - position(j, source)[None])
    sees = (at(ids.q, i)[:, :, None] == at(ids.k, source * m + j)[:, None]) & past[None]
    scores = rule.score(_dot("bkrh,bkth->bkrt", query, key))
    return jnp.tile(sees, (1, query.shape[2] // c, 1))[:, None], scores


_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
_add = partial(jax.tree.map, jnp.add)


def _hops(step, carry, distances):
    """A loop; written out where `unrolled`."""
    one = lambda carry, distance: (step(carry, distance), None)
    return lax.scan(one, carry, distances, unroll=unrolled())[0]


def unrolled() -> bool:
    """Whether this is traced for CPUs. There a collective waits until the loop before it has started, not until it has
    ended: with other collectives in the loop, devices may meet in different ones, and hang. Written out, hops are in
    order, but XLA sends early: every block of a layer is held for as long as its attention takes."""
    device = jax.sharding.get_abstract_mesh().abstract_device  # None on an AbstractMesh
    return device is not None and device.platform == "cpu"


def _rotate(tree, by: int):
    """From each rank to the one `by` further; nothing moves on one."""
    n = lax.axis_size("seq")
    return tree if n == 1 else lax.ppermute(tree, "seq", [(r, (r + by) % n) for r in range(n)])


def _fold(m: int, k: int, x: Float[Array, "B T N H"]) -> Float[Array, "m B K R H"]:
    """Tiles, of a matrix for each of k heads: R = N/k * C rows, the C positions of every query head that reads it."""
    b, t, n, h = x.shape
    x = x.reshape(b, m, t // m, k, n // k, h).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(m, b, k, -1, h)


def _unfold(t: int, x: Float[Array, "m B K R H"]) -> Float[Array, "B T N H"]:
    m, b, k, _, h = x.shape
    return x.reshape(m, b, k, -1, t // m, h).transpose(1, 0, 4, 2, 3, 5).reshape(b, t, -1, h)


def _fold_ids(m: int, segments: Segments) -> Segments:
    """Tiles of C ids, the keys' of rank 0 first."""
    c = segments.q.shape[1] // m
    return Segments(*(x.reshape(x.shape[0], -1, c).swapaxes(0, 1) for x in segments))
