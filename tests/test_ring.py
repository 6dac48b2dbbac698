"""Ring attention is attention: in values and gradients, on every layout; 1/n of the work, and keys alone travel."""

import re
from functools import cache, partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from tiny import shapes

from rljax.mesh import BATCH, Layout, Strategy
from rljax.model import ring as ring_module
from rljax.model.attention import Rule, Segments
from rljax.model.decoder import Decoder
from rljax.model.forward import logprobs
from rljax.model.ring import ring
from rljax.model.table import abstract
from rljax.plan.hlo import collectives
from rljax.types import Tokens

B, T, N, K, H = 4, 24, 4, 2, 8
ONE, RING = Layout(), Layout(seq=4, tensor=2)
AXES = P(BATCH, "seq", "tensor", None)
PLAIN = Rule(1 / H**0.5)
NEAR, FAR = (Rule(0.4, cap=1.5, window=7, near=near) for near in (True, False))


@cache
def batch(rows=B, t=T):
    """q, k, v, a cotangent, and segments: rows packed, padded at the end, wholly padding, and packed with a gap."""
    rng, at = np.random.default_rng(0), np.arange(t)
    arrays = tuple(rng.normal(size=(rows, t, heads, H)).astype(np.float32) for heads in (N, K, K, N))
    packed = np.where(at < t // 3, 1, np.where(at < t - 5, 2, 0))
    gap = np.where(at < t // 4, 1, np.where(at < t // 2, 0, 2))
    return arrays, np.stack([packed, at < t - 9, at < 0, gap]).astype(np.int32)[:rows]


def attend(q, k, v, segments, d, rule):
    """Attention and its gradients in float64, written out: every query beside all keys, padding a segment too."""
    k, v = (np.repeat(x, N // K, 2) for x in (k, v))
    sees = (segments[:, :, None] == segments[:, None]) & np.tri(q.shape[1], dtype=bool)
    if rule.window and rule.near is not False:
        sees &= ~np.tri(q.shape[1], k=-rule.window, dtype=bool)
    scores = np.einsum("bsnh,btnh->bnst", q, k) * rule.scale
    tanh = np.tanh(scores / rule.cap) if rule.cap else np.zeros_like(scores)
    e = np.exp(rule.cap * tanh if rule.cap else scores) * sees[:, None]
    p = e / e.sum(-1, keepdims=True)
    dp = np.einsum("bsnh,btnh->bnst", d, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * (1 - tanh**2) * rule.scale
    shared = lambda x: x.reshape(*x.shape[:2], K, N // K, H).sum(3)
    dk, dv = np.einsum("bnst,bsnh->btnh", ds, q), np.einsum("bnst,bsnh->btnh", p, d)
    return np.einsum("bnst,btnh->bsnh", p, v), np.einsum("bnst,btnh->bsnh", ds, k), shared(dk), shared(dv)


@cache
def oracle(rule):
    """Two layers of attention on a residual stream, which starts as q, and the gradients."""
    (x, k, v, dx), segments = batch()
    x, k, v, dx = (np.float64(x) for x in (x, k, v, dx))
    middle = x + attend(x, k, v, segments, dx, rule)[0]
    out, dq, *second = attend(middle, k, v, segments, dx, rule)
    _, dx, *first = attend(x, k, v, segments, middle_dx := dx + dq, rule)
    return middle + out, middle_dx + dx, *map(np.add, first, second)


def order(n: int, t: int):
    """The row position of every dealt token."""
    return np.arange(t).reshape(t // n, n).T.reshape(-1)


def ringed(q, k, v, segments, tile, rule=PLAIN):
    how = rule if rule.near is None else rule._replace(near=jnp.asarray(rule.near))
    return ring(q, k, v, Segments(jax.reshard(segments, P(BATCH, "seq")), segments), how, tile=tile)


def alone(qkv, d, segments, tile):
    out = ringed(*qkv, segments, tile)
    return jnp.sum(out.astype(jnp.float32) * d), out


def layers(qkv, d, segments, tile, rule=PLAIN):
    """The two layers as a model has them: scanned, and recomputed in the backward pass."""
    q, k, v = qkv
    layer = jax.checkpoint(lambda x, _: (x + ringed(x, k, v, segments, tile, rule), None))
    x, _ = jax.lax.scan(layer, q, None, 2)
    return jnp.sum(x * d), x


def run(f, layout: Layout, tile: int, rows=B, t=T, dtype=np.float32):
    """The output and the gradients of q, k and v, in the order of rows."""
    (*qkv, d), segments = batch(rows, t)
    deal = lambda x, spec: jax.device_put(x[:, order(layout.seq, t)], spec)
    with jax.set_mesh(layout.mesh()):
        args = tuple(deal(x.astype(dtype), AXES) for x in qkv), deal(d, AXES), deal(segments, P(BATCH, None))
        (_, out), grads = jax.jit(jax.value_and_grad(partial(f, tile=tile), has_aux=True))(*args)
    back = np.argsort(order(layout.seq, t))
    return [jax.device_get(x)[:, back] for x in (out, *grads)]


@cache
def program(layout: Layout, tile: int, t: int, dtype=jnp.float32):
    """The gradient of one row: traced, and yet to be compiled."""
    mesh = layout.mesh()
    at = lambda shape, spec, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        qkv = tuple(at((1, t, heads, H), AXES, dtype) for heads in (N, K, K))
        args = qkv, at((1, t, N, H), AXES, jnp.float32), at((1, t), P(BATCH, None), jnp.int32)
        return jax.jit(jax.value_and_grad(partial(alone, tile=tile), has_aux=True)).trace(*args)


@cache
def compiled(layout: Layout, tile: int, t: int):
    return program(layout, tile, t).lower().compile()


def executed(jaxpr, times=1):
    """Every equation of a jaxpr, and how often it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from executed(inner, times * eqn.params.get("length", 1))


def flops(traced) -> int:
    """Of all matmuls, on one device."""
    total = 0
    for eqn, times in executed(traced.jaxpr.jaxpr):
        if eqn.primitive.name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            total += times * 2 * prod(eqn.outvars[0].aval.shape) * prod(eqn.invars[0].aval.shape[d] for d in contracted)
    return total


def sent(text: str) -> int:
    """Bytes that a device sends to its neighbour, the trips of loops counted."""
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))

    def total(name: str) -> int:
        n = 0
        for line in computations[name].splitlines():
            if send := re.search(r"= (.*?) collective-permute(-start)?\(", line):
                n += sum(4 * prod(shape) for shape in shapes(send[1]))
            if loop := re.search(r"body=%([\w.\-]+).*known_trip_count\":\{\"n\":\"(\d+)\"", line):
                n += int(loop[2]) * total(loop[1])
        return n

    return total(re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1])


CASES = {
    "one": (ONE, 24, PLAIN),
    "one, small tiles": (ONE, 5, PLAIN),
    "one, window": (ONE, 5, NEAR),
    "seq 2": (Layout(seq=2), 4, PLAIN),
    "fsdp seq tensor": (Layout(fsdp=2, seq=2, tensor=2), 5, PLAIN),
    "seq tensor": (RING, 2, PLAIN),
    "seq tensor, window": (RING, 2, NEAR),
    "seq tensor, capped": (RING, 2, FAR),
    "one tile": (Layout(seq=8), 512, PLAIN),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_attention(case):
    """At padding too. Tiles that do not divide a shard shrink; the shards of the last are of one tile."""
    layout, tile, rule = CASES[case]
    got = run(partial(layers, rule=rule), layout, tile)
    for name, actual, expected in zip(("out", "dq", "dk", "dv"), got, oracle(rule), strict=True):
        assert np.abs(actual - expected).max() <= 2e-6 * np.abs(expected).max(), name


def error(layout: Layout, t: int):
    """Root mean square of what rounding to bfloat16 adds to each result, relative to that of the result."""
    (*qkv, d), segments = batch(1, t)
    half = [np.float64(x.astype(jnp.bfloat16)) for x in qkv]
    results = run(alone, layout, 16, 1, t, jnp.bfloat16)
    assert all(x.dtype == jnp.bfloat16 for x in results)
    rms = lambda x: float(np.sqrt(np.mean(np.square(np.float64(x)))))
    return [rms(np.float64(x) - y) / rms(y) for x, y in zip(results, attend(*half, segments, d, PLAIN), strict=True)]


def test_a_longer_ring_rounds_gradients_no_more_often():
    """Were gradients of keys to travel in bfloat16, sixteen devices would double their error."""
    near, far = error(ONE, 256), error(Layout(seq=16), 256)
    assert max(near) < 5e-3
    assert all(x < 1.2 * y for x, y in zip(far, near, strict=True))


@pytest.mark.parametrize("layout, tile, t", [(ONE, 16, 1024), (Layout(seq=8), 16, 1024), (RING, 4, 64)], ids=str)
def test_nothing_travels_but_blocks_to_the_neighbour(layout, tile, t):
    """Forward n - 1 blocks of keys and values; backward the same, n - 1 of gradients behind them and one home."""
    text, n = compiled(layout, tile, t).as_text(), layout.seq
    block = 2 * (t // n) * (K // layout.tensor) * H * 4
    assert sent(text) == ((n - 1) + (n - 1) + (n - 1) + (n > 1)) * block
    others = {(c.kind, *c.shapes) for c in collectives(text) if c.kind != "collective-permute"}
    assert others <= {("all-reduce", ())}  # the loss


def test_half_precision_halves_what_keys_and_values_send():
    """Read where it is written: a CPU widens what it sends."""
    width = {jnp.dtype("bfloat16"): 0, jnp.dtype("float32"): 0}
    for eqn, times in executed(program(RING, 4, 64, jnp.bfloat16).jaxpr.jaxpr):
        if eqn.primitive.name == "ppermute":
            for x in eqn.invars:
                width[x.aval.dtype] += times * x.aval.size
    n, block = 4, 2 * 16 * (K // 2) * H
    assert [*width.values()] == [(2 * (n - 1) + 1) * block, (n - 1) * block]


@pytest.mark.parametrize("m", [1, 4])
def test_matmuls_are_split_exactly(m):
    """Forward and backward, with m tiles on a side of a shard: tiles on the diagonal are computed whole."""
    t, n = 64, 4
    one, ring = flops(program(ONE, t // m, t)), flops(program(Layout(seq=n), t // n // m, t))
    assert one == n * ring == 3.5 * 2 * t * t * N * H * (1 + 1 / m)


def test_memory_is_a_shard_and_linear_in_time(monkeypatch):
    """Compiled in the form for accelerators, of eight devices each has an eighth and the blocks on their way; in both,
    none holds scores of [T T] or [T/n T]."""
    written_out = compiled(Layout(seq=8), 16, 1024)
    monkeypatch.setattr(ring_module, "unrolled", lambda: False)
    loops = lambda layout, t: program.__wrapped__(layout, 16, t).lower().compile()
    one, eight, twice = loops(ONE, 1024), loops(Layout(seq=8), 1024), loops(Layout(seq=8), 2048)
    temp = lambda x: x.memory_analysis().temp_size_in_bytes
    assert temp(eight) < 2 / 8 * temp(one)
    assert temp(twice) < 2 * temp(eight)
    for x, t in ((one, 1024), (eight, 128), (written_out, 128), (twice, 256)):
        assert max(map(prod, shapes(x.as_text()))) == t * N * H  # queries are the largest of all


def stored(seq: int, time: int) -> int:
    """Bytes of temporaries of a device in the gradient of a decoder of 6 scanned layers, on one row of tokens."""
    m = Decoder(vocab=96, width=64, layers=6, heads=4, kv_heads=2, head_dim=16, ffn=128)
    lm, mesh = m.build(), Layout(seq=seq).mesh()
    score = partial(logprobs, lm, strategy=Strategy(context="ring", zero=0), logits=2**16)
    with jax.set_mesh(mesh):
        row = NamedSharding(mesh, P(BATCH, None))
        ids, mask = (jax.ShapeDtypeStruct((1, time), dtype, sharding=row) for dtype in (jnp.int32, jnp.bool_))
        loss = lambda params, ids, mask: -jnp.sum(score(params, Tokens(ids, ids, ids), mask)[0])
        lowered = jax.jit(jax.grad(loss)).lower(abstract(lm.table, mesh, 0), ids, mask)
        return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("time", [2**14, pytest.param(2**17, marks=pytest.mark.slow)])
def test_what_a_device_stores_grows_with_its_part_of_the_tokens(time, monkeypatch):
    """Training on 8 devices takes as much as on 4 with half the tokens, and no more than in proportion: no mask of a
    part's tokens by a part's tokens is made ahead of the layers."""
    monkeypatch.setattr(ring_module, "unrolled", lambda: False)  # hops in a loop, as everywhere but on CPUs
    eight, half = stored(8, time), stored(8, time // 2)
    assert eight < 2.2 * half
    assert eight == pytest.approx(stored(4, time // 2), rel=0.15)
    assert eight < 2500 * time  # a mask alone would be (time / 8)^2 / 2 for each hop
