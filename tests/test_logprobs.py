"""Law: log-probabilities and entropies in chunks are those of the full logits, in value and gradient; no `[B T V]`
array lives; padding is invisible; and exactly the states before the masked tokens are trained."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import P
from jax.sharding import NamedSharding
from tiny import ALL, CONTEXT, MODELS, ONE, ROWS, TIME

from rljax.mesh import BATCH
from rljax.model.decoder import Decoder
from rljax.model.forward import LOGITS, hidden, logprobs
from rljax.model.table import abstract, shardings
from rljax.run.place import compiled
from rljax.train.kl import k3

CHUNKED = 4 * ROWS * 48  # of 4 positions on one device; several rows a device allow more


def batch():
    return tiny.batch("plain").rollout


@cache
def functions(name, layout=ONE, budget=LOGITS):
    """(tokens, mask, coefficients [2 B T]) -> log-probabilities, entropies and the gradient of their weighted sum."""
    lm, mesh = MODELS[name].build(), layout.mesh()
    with jax.set_mesh(mesh):
        params = jax.device_put(tiny.weights(name), shardings(lm.table, mesh))

    def loss(params, tokens, mask, a, b):
        logp, entropy, _ = logprobs(lm, params, tokens, mask, logits=budget)
        return jnp.sum(a * logp + b * entropy), (logp, entropy)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def call(tokens, mask, a, b):
        with jax.set_mesh(mesh):
            (_, out), grads = run(params, *tiny.place((tokens, mask, a, b), mesh))
        return jax.device_get((*out, grads))

    return call


@cache
def coefficients():
    rng = np.random.default_rng(8)
    return tuple(rng.normal(size=(ROWS, TIME)).astype(np.float32) for _ in range(2))


@cache
def expected(name):
    """From full logits: values in float64 by numpy, the gradient by JAX through the oracle."""
    tok, mask, m = batch().tokens, batch().mask, MODELS[name]
    values = tiny.oracle_logprobs(
        tiny.oracle(m, tiny.weights(name), tok.ids, tok.positions, tok.segments), tok.ids, mask
    )

    def loss(params, a, b):
        logits = tiny.oracle(m, params, tok.ids, tok.positions, tok.segments, jnp)
        logp, entropy = tiny.oracle_logprobs(logits, tok.ids, mask, jnp)
        return jnp.sum(a * logp + b * entropy)

    with jax.numpy_rank_promotion("allow"):
        grads = jax.jit(jax.grad(loss))(tiny.weights(name), *coefficients())
    return *values, jax.device_get(grads)


@pytest.mark.parametrize(
    "layout, budget", [(ONE, LOGITS), (ONE, CHUNKED), (CONTEXT, CHUNKED // 4)], ids=["one", "chunks", "seq"]
)
def test_chunks_equal_full_logits(model, layout, budget):
    got, want = functions(model, layout, budget)(batch().tokens, batch().mask, *coefficients()), expected(model)
    for a, b in zip(got[:2], want[:2]):
        assert a.dtype == np.float32 and np.abs(a - b).max() < 2e-5
        assert np.all(a[~batch().mask] == 0)
    assert want[1][batch().mask].min() > 0.3
    assert tiny.distance(got[2], want[2]) < 2e-5


@pytest.mark.parametrize("name", ["experts", "deepseek", "gemma", "olmo", "latent"])
def test_families_equal_the_oracle(name):
    got, want = functions(name)(batch().tokens, batch().mask, *coefficients()), expected(name)
    assert np.abs(got[0] - want[0]).max() < 2e-5 and np.abs(got[1] - want[1]).max() < 2e-5
    assert tiny.distance(got[2], want[2]) < 2e-5


def test_a_chunk_that_no_row_needs_is_skipped():
    """Counted where logits are made; what is skipped contributes nothing and what is not, everything."""
    lm, count = MODELS["plain"].build(), []

    def project(params):
        inner = lm.project(params)

        def counted(h):
            jax.debug.callback(lambda: count.append(h.shape[-2]))
            return inner(h)

        return counted

    tok, mask = batch().tokens, batch().mask
    narrow = mask & (np.arange(TIME) >= 9) & (np.arange(TIME) < 12)[None]  # states 8 to 10: the third chunk of four
    with jax.set_mesh(ONE.mesh()):
        run = jax.jit(lambda p, t, m: logprobs(lm._replace(project=project), p, t, m, logits=CHUNKED))
        for m, chunks in ((mask, 4), (narrow, 1), (np.zeros_like(mask), 0)):
            count.clear()
            logp, *_ = jax.device_get(run(tiny.weights("plain"), tok, m))
            jax.effects_barrier()
            assert count == [4] * chunks
            assert np.abs(logp - np.where(m, expected("plain")[0], 0)).max() < 2e-5


@pytest.mark.parametrize("layout", [ONE, ALL], ids=str)
def test_no_array_of_full_logits_lives(layout):
    """Neither in the jaxpr nor on a device, forward or backward. Control: with a large budget it does."""
    b, t, v = 8, 256, 1024
    m = Decoder(vocab=v, width=16, layers=1, heads=2, kv_heads=2, head_dim=4, ffn=16)
    lm, mesh = m.build(), layout.mesh()
    ways = layout.rows * layout.tensor

    def largest(budget):
        with jax.set_mesh(mesh):
            params = abstract(lm.table, mesh)
            row = NamedSharding(mesh, P(BATCH, None))
            ids, mask = (jax.ShapeDtypeStruct((b, t), dtype, sharding=row) for dtype in (jnp.int32, jnp.bool))
            loss = lambda p, ids, mask: sum(
                map(jnp.sum, logprobs(lm, p, tiny.Tokens(ids, ids, ids), mask, logits=budget)[:2])
            )
            traced = jax.jit(jax.grad(loss)).trace(params, ids, mask)
            outs = [
                x.aval.shape for e in tiny.equations(traced.jaxpr.jaxpr) for x in e.outvars if hasattr(x.aval, "shape")
            ]
            compiled = tiny.shapes(traced.lower().compile().as_text())
        of_vocab = lambda shapes, v: max(int(np.prod(s)) for s in shapes if v in s)
        return of_vocab(outs, v), of_vocab(compiled, v // layout.tensor)

    jaxpr, device = largest(b // layout.rows * v // layout.tensor * 32)
    assert jaxpr <= b * t * v // 8 and device <= b * t * v // ways // 8  # 32 of 256 positions at a time
    if layout == ONE:
        assert min(largest(LOGITS)) >= b * t * v


@pytest.mark.pitfall("T-16")
@pytest.mark.pitfall("T-30")
def test_padding_is_invisible():
    """Neither what pads nor how much of it is there changes a log-probability."""
    tok, mask = batch().tokens, batch().mask
    zeros = np.zeros((ROWS, TIME), np.float32)
    before = functions("rich")(tok, mask, *coefficients())
    rng = np.random.default_rng(9)
    noise = lambda x: np.where(tok.segments > 0, x, rng.integers(0, 48, x.shape)).astype(np.int32)
    after = functions("rich")(tok.replace(ids=noise(tok.ids), positions=noise(tok.positions)), mask, *coefficients())
    assert tiny.identical(before, after)

    wide = lambda x: np.pad(x, ((0, 0), (0, 5)))
    longer = functions("rich")(jax.tree.map(wide, tok), wide(mask), *map(wide, coefficients()))
    assert np.abs(longer[0][:, :TIME] - before[0]).max() < 1e-5 and np.all(longer[0][:, TIME:] == 0)
    assert tiny.distance(longer[2], before[2]) < 2e-5

    visible = tok.replace(ids=np.where(np.arange(TIME)[None] == 0, 47 - tok.ids, tok.ids))  # control: a real token
    assert np.abs(functions("rich")(visible, mask, zeros, zeros)[0] - before[0]).max() > 0.1


def states():
    """Positions P - 1 to P + T - 2 of each row: the states before its T completion tokens, save that whose next token
    begins another sequence."""
    rollout, t = batch(), np.arange(TIME)[None]
    row = (t >= rollout.prompt_length[:, None] - 1) & (t <= rollout.length[:, None] - 2)
    ends = np.diff(rollout.tokens.segments, append=0) == 1
    return row & ~ends & rollout.mask.any(1, keepdims=True)


@pytest.mark.pitfall("T-15")
@pytest.mark.pitfall("T-19")
@pytest.mark.pitfall("T-104")
def test_exactly_the_states_before_completion_tokens_are_trained():
    """By a probe added to the logits. Rows that end with id 0, which also pads, train that last token too."""
    lm, rollout = MODELS["plain"].build(), batch()
    assert np.any(rollout.tokens.ids[np.arange(ROWS), rollout.length - 1] == 0)

    def loss(probe, params, tokens, mask):
        probed = lm._replace(project=lambda p: lambda h: lm.project(p)(h) + probe.reshape(*h.shape[:-1], 48))
        return jnp.sum(logprobs(probed, params, tokens, mask)[0])

    with jax.set_mesh(ONE.mesh()):
        grad = jax.jit(jax.grad(loss))(
            np.zeros((ROWS, TIME, 48), np.float32), tiny.weights("plain"), rollout.tokens, rollout.mask
        )
    trained = np.any(np.asarray(grad) != 0, -1)
    assert np.array_equal(trained, states())
    assert np.array_equal(trained[:, :-1], rollout.mask[:, 1:])


@pytest.mark.pitfall("T-19")
def test_the_shift_is_right_across_chunks_and_context_shards():
    """By a probe added to the last hidden states, split over seq and read in chunks."""
    lm, rollout, mesh = MODELS["plain"].build(), batch(), CONTEXT.mesh()

    def loss(probe, params, tokens, mask):
        probed = lm._replace(norm=lambda p, x: lm.norm(p, x) + jax.reshard(probe, P(BATCH, "seq", None)))
        return jnp.sum(logprobs(probed, params, tokens, mask, logits=CHUNKED // 8)[0])

    with jax.set_mesh(mesh):
        params = jax.device_put(tiny.weights("plain"), shardings(lm.table, mesh))
        args = tiny.place((np.zeros((ROWS, TIME, 32), np.float32), rollout.tokens, rollout.mask), mesh)
        grad = jax.jit(jax.grad(loss))(args[0], params, *args[1:])
    assert np.array_equal(np.any(np.asarray(grad) != 0, -1), states())


@cache
def bfloat16():
    """Scored as a reference does, twice, and once more while differentiated: (log-probabilities, k3, k3, gradient)."""
    lm = Decoder(**tiny.SIZES, compute="bfloat16").build()
    tok, mask = batch().tokens, batch().mask
    score = lambda p: logprobs(lm, p, tok, mask)[0]

    def loss(p, ref):
        kl = k3(score(p), ref)
        return jnp.sum(kl), kl

    with jax.set_mesh(ONE.mesh()):
        params = jax.device_put(tiny.weights("plain"), shardings(lm.table, ONE.mesh()))
        ref, again = compiled(score)(params), compiled(lambda p, ref: k3(score(p), ref))
        (_, kl), grads = compiled(jax.value_and_grad(loss, has_aux=True))(params, ref)
        return jax.device_get((ref, again(params, ref), kl, grads))


@pytest.mark.pitfall("T-63")
def test_bfloat16_decides_in_float32():
    """Logits are accumulated in float32, and a reference with the policy's weights is at distance exactly 0."""
    lm = Decoder(**tiny.SIZES, compute="bfloat16").build()
    tok, mask = batch().tokens, batch().mask
    with jax.set_mesh(ONE.mesh()):
        params = abstract(lm.table, ONE.mesh())
        h = jax.eval_shape(lambda p: hidden(lm, p, tok)[0], params)
        jaxpr = jax.make_jaxpr(lambda p: logprobs(lm, p, tok, mask))(params).jaxpr
    (logits,) = [
        e for e in tiny.equations(jaxpr) if e.primitive.name == "dot_general" and e.outvars[0].aval.shape[-1] == 48
    ]
    assert logits.invars[0].aval.dtype == jnp.bfloat16 and logits.outvars[0].aval.dtype == jnp.float32
    ref, again, _, _ = bfloat16()
    assert h.dtype == jnp.bfloat16 and ref.dtype == jnp.float32
    assert 1e-3 < np.abs(ref - expected("plain")[0]).max() < 0.3  # near the float32 model's, and not it
    assert np.all(again == 0)


@pytest.mark.pitfall("T-63")
def test_a_bfloat16_reference_is_exact_while_the_policy_is_differentiated():
    *_, kl, grads = bfloat16()
    assert np.all(kl == 0) and all(np.all(g == 0) for g in jax.tree.leaves(grads))


@pytest.mark.pitfall("T-59")
def test_two_calls_are_bitwise_equal():
    args = batch().tokens, batch().mask, *coefficients()
    assert tiny.identical(functions("rich")(*args), functions("rich")(*args))
