"""Every form of attention is the same function: in values and gradients, on every layout, and padding stays finite."""

import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from rljax.mesh import BATCH, Layout
from rljax.model import attention, table
from rljax.model.decoder import Decoder
from rljax.model.forward import logprobs
from rljax.types import Tokens

SPLASH = partial(attention.splash, interpret=True)
CUDNN = partial(attention.cudnn, implementation="xla")  # the same call, by the form of it that a CPU runs
ONE, SEQ = Layout(), Layout(fsdp=2, seq=2, tensor=2)
PLAIN = attention.Rule(1 / 4)
RULES = {
    "plain": PLAIN,
    "window": attention.Rule(0.3, window=7),
    "capped": attention.Rule(0.3, cap=1.5, window=7),
    "near": attention.Rule(0.3, 1.5, 7, near=True),
    "far": attention.Rule(0.3, 1.5, 7, near=False),
}


def batch(t: int, width: int = 16):
    """q, k, v and segments: rows packed, padded at the end, wholly padding, and packed with a gap."""
    rng = np.random.default_rng(0)
    sizes = (4, 16), (2, 16), (2, width)
    q, k, v = (rng.normal(size=(4, t, *size)).astype(np.float32) for size in sizes)
    at = np.arange(t)
    packed = np.where(at < t // 3, 1, np.where(at < t - 5, 2, 0))
    gap = np.where(at < t // 4, 1, np.where(at < t // 2, 0, 2))
    return (q, k, v), np.stack([packed, at < t - 9, at < 0, gap]).astype(np.int32)


def run(form, layout: Layout, qkv, segments, rule=PLAIN):
    """What a form returns on a layout, and the gradients of a weighted sum of it, scanned under checkpoint."""

    @partial(jax.value_and_grad, has_aux=True)
    def loss(qkv, segments):
        segments = attention.Segments(jax.reshard(segments, P(BATCH, "seq")), segments)
        how = rule if rule.near is None else rule._replace(near=jnp.asarray(rule.near))
        step = jax.checkpoint(lambda x, _: (x + form(*qkv, segments, how), None))
        out, _ = jax.lax.scan(step, jnp.zeros_like(qkv[0][..., : qkv[2].shape[3]]), None, 1)
        return jnp.sum(out * jnp.sin(qkv[0][..., : out.shape[3]])), out

    with jax.set_mesh(layout.mesh()):
        qkv = tuple(jax.device_put(x, P(BATCH, "seq", "tensor", None)) for x in qkv)
        compiled = jax.jit(loss).lower(qkv, jax.device_put(segments, P(BATCH, None))).compile()
        (_, out), grads = compiled(qkv, jax.device_put(segments, P(BATCH, None)))
        return jax.device_get((out, *grads)), compiled.as_text()


def close(actual, expected) -> bool:
    return np.abs(actual - expected).max() <= 5e-6 * np.abs(expected).max()


def by_hand(q, k, v, segments, rule):
    """Query by query in numpy, of the tokens that count."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, s, n in np.ndindex(q.shape[:3]):
        if segments[b, s]:
            far = rule.window is None or rule.near is False
            seen = [t for t in range(s + 1) if segments[b, t] == segments[b, s] and (far or t > s - rule.window)]
            keys, values = (x[b, seen, n // (q.shape[2] // k.shape[2])].astype(np.float64) for x in (k, v))
            scores = keys @ q[b, s, n] * rule.scale
            weights = np.exp(scores if rule.cap is None else rule.cap * np.tanh(scores / rule.cap))
            out[b, s, n] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize(
    "layout, rule",
    [(ONE, "plain"), (Layout(data=2, tensor=2), "plain"), (SEQ, "plain"), *((SEQ, name) for name in RULES)],
    ids=str,
)
def test_the_reference_is_attention_by_hand(layout, rule):
    qkv, segments = batch(24, width=12)
    (out, *_), _ = run(attention.masked, layout, qkv, segments, RULES[rule])
    expected = by_hand(*qkv, segments, RULES[rule])
    np.testing.assert_allclose(np.where(segments[..., None, None] > 0, out, 0), expected, atol=1e-6)


@pytest.mark.parametrize(
    "form, layout, t, rule",
    [
        (SPLASH, Layout(fsdp=2, tensor=2), 128, "plain"),
        (SPLASH, SEQ, 256, "capped"),
        (SPLASH, SEQ, 256, "near"),
        (SPLASH, SEQ, 256, "far"),
        (CUDNN, ONE, 24, "plain"),
        (CUDNN, SEQ, 24, "window"),
    ],
    ids=["splash", "splash-seq", "splash-near", "splash-far", "cudnn", "cudnn-seq"],
)
def test_a_kernel_is_the_reference_in_values_and_gradients(form, layout, t, rule):
    """At padding too, so that is finite. Over seq the keys' gradients are summed once, by one reduce-scatter each."""
    rule = RULES[rule]
    expected, _ = run(attention.masked, ONE, *batch(t, width=8 if form is CUDNN else 16), rule)
    actual, text = run(form, layout, *batch(t, width=8 if form is CUDNN else 16), rule)
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert np.isfinite(a).all()
        assert close(a, e), name
    if layout.seq > 1:
        assert len(re.findall(r" = \S+ reduce-scatter\(", text)) == 2


def test_padding_is_finite_and_changes_nothing_else():
    (q, k, v), segments = batch(24)
    spoilt = [np.where(segments[..., None, None] > 0, x, 1e4).astype(np.float32) for x in (q, k, v)]
    (out, *_), _ = run(attention.masked, ONE, (q, k, v), segments)
    (other, *grads), _ = run(attention.masked, ONE, spoilt, segments)
    assert all(np.isfinite(x).all() for x in (other, *grads))
    np.testing.assert_array_equal(out[segments > 0], other[segments > 0])


def test_the_form_follows_platform_shape_and_dtype(monkeypatch):
    choose, half, full = attention.choose, jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert choose("cpu", 1024, 128, half) is choose(None, 1024, 128, half) is attention.masked
    assert choose("tpu", 1024, 128, half) is choose("tpu", 384, 64, full) is attention.splash
    assert choose("tpu", 1000, 128, half) is choose("tpu", 64, 128, half) is attention.masked
    monkeypatch.setattr(attention, "has_cudnn", lambda: True)
    assert choose("gpu", 1000, 64, half) is attention.cudnn
    for queries, head, dtype in ((1000, 64, full), (1001, 64, half), (1000, 60, half), (1000, 256, half)):
        assert choose("gpu", queries, head, dtype) is attention.masked
    assert choose("gpu", 1000, 64, half, 50.0) is attention.masked
    assert choose("tpu", 1024, 128, half, 50.0) is attention.splash
    monkeypatch.setattr(attention, "has_cudnn", lambda: False)
    assert choose("gpu", 1000, 64, half) is attention.masked


def test_a_decoder_may_force_the_reference():
    with pytest.raises(ValueError, match="attention='flash' must be 'auto' or 'dense'"):
        Decoder(vocab=8, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn=8, attention="flash")


def decoder_loss(attend: str, layout: Layout):
    """The loss of a decoder on packed and padded rows, and its gradients."""
    lm = Decoder(vocab=16, width=16, layers=1, heads=4, kv_heads=2, head_dim=8, ffn=16, attention=attend).build()
    segments = batch(128)[1][:2]
    ids = np.random.default_rng(0).integers(0, 16, segments.shape).astype(np.int32)
    positions = np.tile(np.arange(128, dtype=np.int32), (2, 1))
    loss = lambda params, tokens, mask: -jnp.sum(logprobs(lm, params, tokens, mask)[0])
    with jax.set_mesh(layout.mesh()):
        params = jax.jit(partial(table.init, lm.table))(jax.random.key(0))
        args = jax.device_put((Tokens(ids, positions, segments), segments > 0), P(BATCH, None))
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, *args))


def test_a_decoder_learns_the_same_from_the_kernel(monkeypatch):
    expected = decoder_loss("dense", ONE)
    monkeypatch.setattr(attention, "choose", lambda *facts: SPLASH)
    actual = decoder_loss("auto", Layout(fsdp=2, tensor=2))
    assert all(jax.tree.leaves(jax.tree.map(close, actual, expected)))


AHEAD = """
import jax, jax.numpy as jnp
from jax import P
from jax.experimental import topologies
from jax.sharding import NamedSharding
from rljax.mesh import BATCH, Layout
from rljax.model import table
from rljax.model.decoder import Decoder
from rljax.model.forward import logprobs
from rljax.types import Tokens

lm = Decoder(vocab=256, width=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=256, compute="bfloat16").build()
mesh = Layout(fsdp=4, tensor=2).mesh(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
x, mask = (jax.ShapeDtypeStruct((4, 128), t, sharding=NamedSharding(mesh, P(BATCH, None))) for t in (jnp.int32, bool))
loss = lambda params, tokens, mask: -jnp.sum(logprobs(lm, params, tokens, mask)[0])
with jax.set_mesh(mesh):
    lowered = jax.jit(jax.grad(loss)).lower(table.abstract(lm.table, mesh), Tokens(x, x, x), mask)
print(lowered.compile().as_text())
"""


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_compiled_for_a_tpu_the_decoder_has_its_kernel():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run([sys.executable, "-c", AHEAD], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    calls = re.findall(r'%splash_mha_([a-z]+)\S* = .*custom_call_target="tpu_custom_call"', done.stdout)
    assert {*calls} == {"fwd", "dq", "dkv"}
