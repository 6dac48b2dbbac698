"""Mixture of experts: a router picks k of E feed-forwards for every token, and tokens travel over the expert axis.

`route` makes the choice, `experts` carries it out in one of two dispatch forms, `measure` sums what balances it.
Mixtral, Qwen3-MoE and DeepSeek-V3 differ in the settings of `Experts` alone. In shapes, P is the number of devices
along expert, N the tokens of a device; a pair is one of the N k (token, choice).
"""

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Float, Int

from rljax.mesh import island, spec_of
from rljax.mesh.verbs import axes_of, split_over
from rljax.model import nn
from rljax.model.ragged import collect, pack, spread

TINY = 1e-18  # keeps quotients by vanishing sums finite: float32 holds its inverse square, which their gradients have


@dataclass(frozen=True)
class Experts:
    """Settings of expert layers.

    With a `capacity`, an expert takes from each device at most ceil(capacity * tokens * top_k / count) tokens, the
    first ones; the others lose that choice.
    """

    count: int
    top_k: int
    width: int  # feed-forward width of one expert
    shared: int = 0  # feed-forward width of the shared experts together
    score: str = "softmax"  # over the experts, or "sigmoid" of each
    normalize: bool = True  # the gates of a token sum to 1, before `scale`
    scale: float = 1.0
    groups: int = 1  # experts are chosen within the best `top_groups` of so many groups
    top_groups: int = 1
    group_by: int = 2  # a group is as good as the sum of so many of its best scores
    capacity: float | None = None  # None: no choice is dropped
    dispatch: str = "gather"  # tokens over expert, or "exchange" them: each is sent to its experts only
    balance: float = 0.0  # coefficient of the balance loss
    z: float = 0.0  # coefficient of the router z-loss
    bias_rate: float | None = None  # step of loss-free balancing by a bias of the router, or None: it has none
    replay: bool = False  # training repeats the sampler's choice of experts (arXiv:2510.11370)

    def __post_init__(self):
        for field in ("count", "top_k", "width", "groups", "top_groups", "group_by"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        for field in ("shared", "balance", "z", "bias_rate"):
            if (getattr(self, field) or 0) < 0:
                raise ValueError(f"{field}={getattr(self, field)} must be 0 (off) or above")
        if self.count % self.groups:
            raise ValueError(f"groups={self.groups} must divide count={self.count}")
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups={self.top_groups} must be at most groups={self.groups}")
        if self.top_k > (most := self.count // self.groups * self.top_groups):
            raise ValueError(f"top_k={self.top_k} must be at most {most}, the experts that may be chosen")
        if self.scale <= 0:
            raise ValueError(f"scale={self.scale} must be above 0")
        if self.capacity is not None and self.capacity <= 0:
            raise ValueError(f"capacity={self.capacity} must be above 0, or None to drop nothing")
        for field, choices in (("score", SCORES), ("dispatch", DISPATCH)):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field}={getattr(self, field)!r} must be {' or '.join(map(repr, choices))}")


class Routing(NamedTuple):
    """What the router chose. The id E is nowhere: such a choice takes no row and no capacity, and adds nothing."""

    ids: Int[Array, "B T k"]  # distinct within a token, but for E: buffers have no room for more
    gates: Float[Array, "B T k"]
    scores: Float[Array, "B T E"]


class Load(NamedTuple):
    """Sums over the real tokens of the whole batch; over microbatches they add up."""

    load: Float[Array, "E"]  # pairs that chose each expert, dropped ones included
    balance: Float[Array, ""]
    z: Float[Array, ""]
    dropped: Float[Array, ""] | float = 0.0  # pairs for which capacity had no room


SCORES = {"softmax": partial(jax.nn.softmax, axis=-1), "sigmoid": jax.nn.sigmoid}


def route(
    m: Experts,
    logits: Float[Array, "B T E"],
    bias: Float[Array, "E"] | None = None,
    replay: Int[Array, "B T k"] | None = None,
) -> Routing:
    """The k experts of each token, the best first and of equals the first, and their gates, in float32.

    `bias` sways the choice only (arXiv:2408.15664): gates come from the scores without it. `replay` is a choice made
    before, such as the sampler's, or -1 for none; its gates are computed anew and have their gradient.
    """
    scores = SCORES[m.score](logits.astype(jnp.float32))
    choose = island(partial(_choose, m), spec_of(logits))  # on each device: XLA would gather all tokens for a top_k
    ids = choose(lax.stop_gradient(scores), lax.stop_gradient(bias))
    ids = ids if replay is None else jnp.where(replay < 0, ids, replay)
    gates = jnp.take_along_axis(scores, ids, -1, mode="clip")
    if m.normalize:
        gates = gates / (jnp.sum(gates, -1, keepdims=True) + TINY)
    return Routing(ids, gates * m.scale, scores)


def _choose(m: Experts, scores: Float[Array, "B T E"], bias: Float[Array, "E"] | None) -> Int[Array, "B T k"]:
    """Top k, of the best groups only: those with the largest sum of two scores (DeepSeek-V3, arXiv:2412.19437, section
    2.1.2), or by the one largest (DeepSeek-V2, arXiv:2405.04434, section 2.2.2)."""
    scores = scores if bias is None else scores + bias[None, None]
    if m.groups > 1:
        size = m.count // m.groups
        grouped = nn.unfold(scores, 2, m.groups)
        best = lax.top_k(jnp.sum(lax.top_k(grouped, min(m.group_by, size))[0], -1), m.top_groups)[1]
        allowed = jnp.any(best[..., None] == jnp.arange(m.groups)[None, None, None], -2)
        scores = nn.fold(jnp.where(allowed[..., None], grouped, -jnp.inf), 2)
    return lax.top_k(scores, m.top_k)[1]


def experts(
    m: Experts,
    x: Float[Array, "B T D"],
    routing: Routing,
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    out: P,
) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
    """The gated sum of each token's experts, placed as `out`, and how many pairs were dropped.

    x is whole over tensor; experts are split over expert and their widths over tensor. `out` is x's placement, or
    that with T split over tensor too: the sum over tensor is then a reduce-scatter.
    """
    tokens, mesh = split_over(spec_of(x)), jax.typeof(x).sharding.mesh
    axes = tuple(dict.fromkeys((*tokens, "expert", "tensor")))

    def fit(a):
        """`reduced` over axes of the island's sums only, and none on one device: JAX cannot lower its transpose."""
        spec = spec_of(a)
        return jax.reshard(a, P(*spec.partitions, reduced=spec.reduced & {*axes} if mesh.size > 1 else frozenset()))

    def varying(a, spec):
        """Here rather than where it is first used, so that a gradient is summed over axes once tokens are whole."""
        for same in (spec.reduced, {*axes} - {*split_over(spec)} - spec.reduced):
            a = lax.pcast(a, tuple(axis for axis in axes if axis in same), to="varying")
        return a

    arrays = [fit(a) for a in (x, routing.gates, gate, up, down)]
    specs = [spec_of(a) for a in arrays]

    def body(ids, *arrays):
        x, gates, *w = map(varying, arrays, specs)
        b, t, d = x.shape
        ids, dropped = _cap(m, ids.reshape(b * t, -1))
        y = DISPATCH[m.dispatch](m, x.reshape(b * t, d), ids, gates.reshape(b * t, -1), w).reshape(b, t, d)
        if "tensor" in axes_of(out.partitions[1]):
            y = lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
        else:
            y = lax.psum(y, "tensor")
        return y, lax.psum(dropped, tokens)

    return island(body, (out, P()))(routing.ids, *arrays)


def _cap(m: Experts, ids: Int[Array, "N k"]) -> tuple[Int[Array, "N k"], Float[Array, ""]]:
    """The choices of this device that its share of the experts' capacity holds, the rest nowhere, and their number."""
    rows = _rows(m, ids.shape[0], 1)
    if rows == ids.shape[0]:
        return ids, jnp.zeros(())
    lost = (ids < m.count) & (pack(ids, m.count, 1, rows).slot == m.count * rows)
    return jnp.where(lost, m.count, ids), jnp.sum(lost, dtype=jnp.float32)


def _rows(m: Experts, tokens: int, per: int) -> int:
    """The most pairs that a device has for `per` experts: so many rows drop none but what capacity does."""
    most = tokens * min(m.top_k, per)
    return most if m.capacity is None else min(most, per * ceil(m.capacity * tokens * m.top_k / m.count))


def _gather(m: Experts, x: Float[Array, "N D"], ids, gates, w) -> Float[Array, "N D"]:
    """Each device applies its experts to the tokens of all, then sums: (P-1) N D values sent for each of the two."""
    per = w[0].shape[0]
    rows = lax.axis_size("expert") * _rows(m, x.shape[0], per)
    x, ids, gates = (lax.all_gather(a, "expert", tiled=True) for a in (x, ids, gates))
    y = _apply(x, ids - lax.axis_index("expert") * per, gates, w, rows)
    return lax.psum_scatter(y, "expert", tiled=True)


def _exchange(m: Experts, x: Float[Array, "N D"], ids, gates, w) -> Float[Array, "N D"]:
    """Tokens are sent to the devices of their experts, and the results home: (P-1) R D values each way.

    R = N min(k, E/P) or, if less, the capacity of E/P experts. Gates travel along and are applied there, so the
    backward pass needs nothing that came home.
    """
    ways, per, k = lax.axis_size("expert"), w[0].shape[0], ids.shape[1]
    rows = _rows(m, x.shape[0], per)
    swap = partial(lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True)
    pair, slot, sizes = pack(ids, ways, per, rows)
    there = swap(spread(x, pair // k, slot))
    gates = swap(spread(gates.reshape(-1), pair, slot.reshape(-1, 1)))
    # rows come sorted by expert, so how many each has says whose they are; unused rows are last, past all experts
    ends = jnp.cumsum(swap(sizes), 1)
    ids = jnp.sum(jnp.arange(rows)[None, :, None] >= ends[:, None], -1)
    y = _apply(there, ids.reshape(-1, 1), gates[:, None], w, ways * rows)
    return collect(swap(y), pair // k, slot)


DISPATCH = {"gather": _gather, "exchange": _exchange}  # what Experts.dispatch may name


def _apply(x: Float[Array, "N D"], ids: Int[Array, "N k"], gates, w, rows: int) -> Float[Array, "N D"]:
    """The gated sum over this device's experts, whose ids start at 0, of its part of their widths.

    Gates multiply the hidden layer. What follows is linear, so the sum is the same, and its gradient needs no output.
    """
    gate, up, down = w
    k = ids.shape[1]
    pair, slot, sizes = pack(ids, 1, gate.shape[0], rows)
    dot = partial(lax.ragged_dot, group_sizes=sizes[0])
    x, gates = spread(x, pair // k, slot), spread(gates.reshape(-1), pair, slot.reshape(-1, 1))
    h = jax.nn.silu(dot(x, gate)) * dot(x, up)
    return collect(dot((h * gates[:, None]).astype(x.dtype), down), pair // k, slot)


def measure(m: Experts, routing: Routing, logits: Float[Array, "B T E"], segments: Int[Array, "B T"]) -> Load:
    """The load of each expert and the auxiliary losses, as sums over the real tokens (segment above 0) of the batch.

    balance is the sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20), sequences weighted by
    their tokens: the sum over tokens t and experts e of p[t,e] f[s,e] E / k, where p are scores scaled to sum 1 and
    f, which has no gradient, is the share of the tokens of t's sequence s that chose e. Evenly spread, it is 1 a token.
    z is the sum of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, equation 5).

    A sequence is a segment of a row, numbered up to T. To count whole ones, ids are gathered over seq: k integers a
    token, where counts would be E for each segment there may be.
    """
    rows, time, _ = spec_of(logits).partitions
    ids, whole = jax.reshard(routing.ids, P(rows, None, None)), jax.reshard(segments, P(rows, None))

    def body(ids, whole, own):
        b, t = whole.shape
        row = jnp.arange(b)[:, None]
        counts = jnp.zeros((b, t + 1, m.count)).at[row[..., None], whole[..., None], ids].add(1)
        lengths = jnp.zeros((b, t + 1)).at[row, whole].add(1)
        share = (counts / jnp.maximum(lengths, 1)[..., None]).at[row, own].get()
        return lax.psum(jnp.sum(counts[:, 1:], (0, 1)), axes_of(rows)), share

    load, share = island(body, (P(), P(rows, time, None)))(ids, whole, segments)
    p = routing.scores / (jnp.sum(routing.scores, -1, keepdims=True) + TINY)
    total = lambda x: jnp.sum(jnp.where(segments > 0, x, 0))
    balance = total(jnp.sum(p * share, -1)) * (m.count / m.top_k)
    return Load(load, balance, total(jax.nn.logsumexp(logits.astype(jnp.float32), -1) ** 2))


def penalty(m: Experts, load: Load) -> Float[Array, ""]:
    """The auxiliary loss as a sum: its mean is over the real tokens of an update times the expert layers."""
    return m.balance * load.balance + m.z * load.z


def rebalance(m: Experts, bias: Float[Array, "*L E"], load: Float[Array, "*L E"]) -> Float[Array, "*L E"]:
    """Loss-free balancing (arXiv:2408.15664, algorithm 1), after an update: a step up for experts below the mean."""
    return bias + m.bias_rate * jnp.sign(jnp.mean(load, -1, keepdims=True) - load)


def imbalance(load: Float[Array, "L E"]) -> dict[str, Float[Array, "L"]]:
    """Of each layer, the largest load over the mean, and the share of experts that no token chose.

    The busiest sets the time, so P devices gain P / imbalance, with the loads of devices in place of experts.
    """
    mean = jnp.maximum(jnp.mean(load, -1), TINY)
    return {"experts/imbalance": jnp.max(load, -1) / mean, "experts/idle": jnp.mean(load == 0, -1)}
