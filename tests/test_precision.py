"""Law: parameters in bfloat16 with a float32 master train bit for bit as float32 parameters that are multiplied in
bfloat16, and take the bytes that are stated. What a frozen role holds in 8 bits is what it computes with, everywhere.

Run as a program, `python test_precision.py DTYPE ZERO` compiles an update for absent chips and prints what it needs.
"""

import json
import re
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import trial
from jax.sharding import NamedSharding
from tiny import FSDP_TENSOR, ONE
from trial import built, measured, mesh, saved

from rljax.config import load_experiment
from rljax.errors import UserError
from rljax.mesh import Layout, Placement, Strategy
from rljax.model import quantize
from rljax.model.decoder import Decoder
from rljax.model.quantize import Quantized, hold
from rljax.model.table import abstract, is_tensor, map_table, shardings
from rljax.plan import parts
from rljax.plan.topology import apart, report, topology
from rljax.run.checkpoint import parameters
from rljax.run.imported import imported
from rljax.run.place import OPTIONS, Place
from rljax.run.reference import checksums
from rljax.run.roles import frozen
from rljax.run.run import Fresh, Pairing, Role
from rljax.train.master import masters
from rljax.train.optimizer import AdamW, held
from rljax.train.step import start, update
from rljax.weights import families
from rljax.weights.save import save


class Program:
    """An update of a tiny model that multiplies in bfloat16, on a layout, with its matrices held in a dtype."""

    def __init__(self, name: str, layout: Layout, dtype: str, optimizer=tiny.ADAMW, compute="bfloat16", **strategy):
        strategy = Strategy(**strategy)
        self.lm, self.mesh = replace(tiny.MODELS[name], compute=compute).build(), layout.mesh()
        adamw = optimizer.build(100, map_table(lambda t: t.matrix, self.lm.table))
        with jax.set_mesh(self.mesh):
            params = jax.device_put(tiny.weights(name), shardings(self.lm.table, self.mesh, strategy.zero))
            self.state = jax.jit(lambda params: start(self.lm, params, adamw, strategy.zero, dtype=dtype))(params)
            self.batch = tiny.place(tiny.batch(name), self.mesh)
            self.run = jax.jit(
                lambda state, batch: update(
                    state, batch, lm=self.lm, objective=tiny.OBJECTIVE, optimizer=adamw, adjust=tiny.same,
                    on_policy=False, strategy=strategy,
                )
            )  # fmt: skip

    def __call__(self, state=None, updates=1):
        state = self.state if state is None else state
        with jax.set_mesh(self.mesh):
            for _ in range(updates):
                state, metrics = self.run(state, self.batch)
        return state, jax.device_get(metrics)


LAYOUTS = {  # of untied models: the two gradients of a tied embedding are added in the dtype that it is held in
    "zero 1": ("plain", FSDP_TENSOR, dict(zero=1, microbatches=2)),
    "zero 2": ("plain", Layout(data=2, fsdp=2, seq=2), dict(zero=2, microbatches=2)),
    "zero 3, sequence parallel": ("plain", FSDP_TENSOR, dict(sequence_parallel=True)),
    "pipe": ("plain", Layout(fsdp=2, pipe=2), dict(zero=2, microbatches=2, schedule="1f1b")),
    "experts": ("experts", Layout(fsdp=2, expert=2), dict(zero=1)),
}


@pytest.mark.parametrize("case", tiny.ordinary(LAYOUTS, "zero 2", "zero 3, sequence parallel", "experts"))
def test_bfloat16_parameters_train_as_float32_ones_multiplied_in_bfloat16(case):
    """Metrics, moments and master after two updates, bit for bit; and parameters are the master, rounded."""
    name, layout, strategy = LAYOUTS[case]
    narrow, wide = (Program(name, layout, dtype, **strategy) for dtype in ("bfloat16", "float32"))
    (a, seen), (b, expected) = narrow(updates=2), wide(updates=2)
    assert tiny.identical(seen, expected)
    assert tiny.identical(jax.device_get(a.optimizer), jax.device_get(b.optimizer))
    assert tiny.identical(jax.device_get(masters(a)), jax.device_get(b.params))
    rounded = map_table(lambda t, w: w.astype(jnp.bfloat16) if t.matrix else w, narrow.lm.table, b.params)
    assert tiny.identical(jax.device_get(a.params), jax.device_get(rounded))
    assert b.master is None and not tiny.identical(jax.device_get(masters(a)), tiny.weights(name))

    table, zero = narrow.lm.table, strategy.get("zero", 3)
    m, bytes_of = (
        tiny.MODELS[name],
        lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)),
    )
    stated = parts.state(m, layout, zero, parts.widths("bfloat16"))
    assert bytes_of(a.params) == stated.params
    assert bytes_of((a.master, a.optimizer)) - 8 == stated.optimizer  # less two counters

    def lies(t, w, master):
        assert w.dtype == (jnp.bfloat16 if t.matrix else jnp.float32) and (master is None) == (not t.matrix)
        assert w.sharding.is_equivalent_to(NamedSharding(narrow.mesh, t.placed(zero)), w.ndim)
        if master is not None:
            assert master.dtype == jnp.float32
            assert master.sharding.is_equivalent_to(NamedSharding(narrow.mesh, t.updated(zero)), w.ndim)

    map_table(lies, table, a.params, a.master)


@pytest.mark.slow
def test_a_tied_embeddings_gradients_are_added_in_bfloat16():
    """Which is where the two differ: by the rounding of a sum."""
    narrow, wide = (
        Program("rich", FSDP_TENSOR, dtype, zero=1, microbatches=2)()[1] for dtype in ("bfloat16", "float32")
    )
    assert narrow["loss"] == wide["loss"]  # before it
    assert 0 < abs(narrow["grad_norm/embed"] - wide["grad_norm/embed"]) < 2**-8 * wide["grad_norm/embed"]


def test_ten_updates_too_small_for_bfloat16_move_the_master():
    """And are lost without one: of each matrix, but for entries near 0."""
    program = Program("plain", ONE, "bfloat16", AdamW(lr=1e-6))
    state, _ = program(updates=10)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), jax.device_get(masters(state)), tiny.weights("plain"))
    assert all(0.2e-5 < x < 1.2e-5 for x in jax.tree.leaves(moved))
    alone, _ = program(program.state.replace(master=None), updates=10)

    same = lambda a, b: float(np.mean(np.asarray(a) == np.asarray(b)))

    def lost(t, first, last, begun, ended):
        if t.matrix:
            assert same(first, last) > 0.99 and same(begun, ended) < 0.1, t.name

    map_table(lost, program.lm.table, program.state.params, alone.params, tiny.weights("plain"), masters(state))


@pytest.mark.parametrize("name", ["rich", "deepseek", "gemma", "olmo", "latent"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stated_bytes_are_those_of_the_state(name, dtype, moments):
    m = tiny.MODELS[name]
    lm, adamw = m.build(), AdamW(moments=moments)
    adamw = adamw.build(1, map_table(lambda t: t.matrix, lm.table))
    for layout in (Layout(fsdp=4), Layout(data=2, fsdp=2, seq=2, tensor=2, expert=2)):
        for zero in range(4):
            where = layout.mesh()
            with jax.set_mesh(where):
                made = lambda p, zero=zero: start(lm, p, adamw, zero, dtype=dtype)
                state = jax.eval_shape(made, abstract(lm.table, where, zero))
            stated = parts.state(m, layout, zero, parts.widths(dtype, moments))
            assert held_bytes(state.params) == stated.params
            assert held_bytes((state.master, state.optimizer)) - 8 == stated.optimizer


def held_bytes(tree) -> int:
    """Of a device, by the types."""
    part = lambda x: x.sharding.shard_shape(x.shape) if x.ndim else ()
    return sum(prod(part(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


# Moments


def test_bfloat16_moments_are_adams_rounded_between_updates():
    """Two updates of three numbers, by hand: what is read of a moment is the bfloat16 next to it."""
    rounded = lambda x: np.float32(np.asarray(x, jnp.bfloat16))
    g, lr, b1, b2, eps = np.float32([0.3, -0.07, 1e-3]), 0.1, 0.9, 0.95, 1e-8
    build = lambda moments: AdamW(lr=lr, eps=eps, clip=1e9, moments=moments).build(9, True)
    x, state = jnp.zeros(3), build("bfloat16").init(jnp.zeros(3))
    m = v = np.zeros(3, np.float32)
    for n, scale in ((1, 1.0), (2, -0.37)):
        updates, state = build("bfloat16").update(jnp.asarray(scale * g), state, x)
        m, v = b1 * rounded(m) + (1 - b1) * scale * g, b2 * rounded(v) + (1 - b2) * (scale * g) ** 2
        expected = -lr * (m / (1 - b1**n)) / (np.sqrt(v / (1 - b2**n)) + eps)
        np.testing.assert_allclose(updates, expected, rtol=1e-5)
        adam = state[1][0]
        assert adam.mu.dtype == adam.nu.dtype == jnp.bfloat16 and adam.count == n
        np.testing.assert_array_equal(np.float32(adam.mu), rounded(m))
        np.testing.assert_array_equal(np.float32(adam.nu), rounded(v))
    wide = build("float32")
    exact = wide.init(x)
    for scale in (1.0, -0.37):
        exact_updates, exact = wide.update(jnp.asarray(scale * g), exact, x)
    assert np.abs(exact_updates / updates - 1).max() > 1e-4  # control: rounding is felt


def test_a_decay_that_bfloat16_rounds_back_is_refused():
    """It would leave a moment where it is: without gradients it must shrink."""

    def left(b2):
        adam = held(optax.scale_by_adam(b2=b2), "bfloat16")
        values = jnp.arange(1, 2, 2**-7, jnp.float32)  # every bfloat16 of an octave
        state = adam.init(values)._replace(nu=values.astype(jnp.bfloat16))
        return np.float32(adam.update(0 * values, state)[1].nu) / values

    assert np.all(left(1 - 2**-8) < 1) and np.any(left(0.999) == 1)
    AdamW(b2=1 - 2**-8, moments="bfloat16")
    for field in ("b1", "b2"):
        with pytest.raises(ValueError, match=rf"{field}=0.999.* cannot hold a decay above 0.99609375"):
            AdamW(**{field: 0.999}, moments="bfloat16")
    AdamW(b2=0.999)
    with pytest.raises(ValueError, match="moments='float16' must be 'float32' or 'bfloat16'"):
        AdamW(moments="float16")


def test_moments_in_bfloat16_learn_as_fast():
    """A noisy regression of 64 numbers: after 100 updates the loss is within 5 %, the solution within 2 %."""
    rng = np.random.default_rng(0)
    truth, xs = rng.normal(size=64), rng.normal(size=(100, 16, 64))
    batches = jnp.float32(xs), jnp.float32(xs @ truth + 0.1 * rng.normal(size=(100, 16)))

    def solved(moments):
        adamw = AdamW(lr=0.05, decay="linear", moments=moments).build(100, True)

        def step(carry, batch):
            w, state = carry
            loss, g = jax.value_and_grad(lambda w: jnp.mean((batch[0] @ w - batch[1]) ** 2))(w)
            updates, state = adamw.update(g, state, w)
            return (w + updates, state), loss

        (w, _), losses = jax.lax.scan(step, (jnp.zeros(64), adamw.init(jnp.zeros(64))), batches)
        return np.asarray(w), float(losses[-10:].mean())

    (a, narrow), (b, wide) = solved("bfloat16"), solved("float32")
    assert wide < 5 and narrow == pytest.approx(wide, rel=0.05)
    assert 1e-4 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.02


# Frozen roles in 8 bits


def matrices(name: str, kind: str):
    """(tensor, weights, the same as held) of every tensor of a model."""
    table = tiny.MODELS[name].build().table
    with jax.set_mesh(ONE.mesh()):
        made = jax.device_get(jax.jit(lambda p: hold(table, p, kind))(tiny.weights(name)))
    found = []
    map_table(lambda t, w, q: found.append((t, w, q)), table, tiny.weights(name), made)
    return found


def test_a_matrix_in_int8_by_hand():
    """Columns by their largest entry, a column of zeros too; rows of an embedding."""
    t, _, _ = next(x for x in matrices("plain", "int8") if x[0].name == "lm_head.weight")
    w = jnp.float32([[2.54, 0.0, -1.0], [-1.27, 0.0, 0.5], [0.029, 0.0, 0.002]])
    with jax.set_mesh(ONE.mesh()):
        q = quantize.quantize(
            replace(t, shape=(3, 3)), jax.device_put(w, jax.NamedSharding(ONE.mesh(), t.spec)), "int8"
        )
        rows = quantize.quantize(
            replace(t, name="embed_tokens", shape=(3, 3)),
            jax.device_put(w.T, NamedSharding(ONE.mesh(), t.spec)),
            "int8",
        )
        again = quantize.dense(q, "float32")
    np.testing.assert_array_equal(q.values, [[127, 0, -127], [-64, 0, 64], [1, 0, 0]])  # 1.45, 63.5: halves to even
    np.testing.assert_allclose(q.scale, [[0.02, 1.0, 1 / 127]], rtol=1e-6)
    np.testing.assert_allclose(again, [[2.54, 0, -1], [-1.28, 0, 64 / 127], [0.02, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(rows.values, q.values.T)
    np.testing.assert_array_equal(rows.scale, q.scale.T)


@pytest.mark.parametrize("name", ["deepseek", "latent"])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_values_are_those_of_torch_and_near_the_weights(name, kind):
    """Of each channel of each layer and expert; norms, biases and routers are as they were."""
    torch = pytest.importorskip("torch")
    kept = set()
    for t, w, q in matrices(name, kind):
        if not isinstance(q, Quantized):
            assert q.dtype == np.float32 and tiny.identical(q, w)
            kept.add("router" if t.matrix else "vector")
            assert not t.matrix or t.part == "router"
            continue
        dim = -1 if t.part == "embed" else -2
        scale = np.abs(w).max(dim, keepdims=True) / np.float32(127 if kind == "int8" else 448)
        np.testing.assert_allclose(q.scale, scale, rtol=1e-6)
        scaled = torch.from_numpy(w / q.scale)
        if kind == "int8":
            expected = scaled.round().to(torch.int8).numpy()
        else:
            expected = scaled.to(torch.float8_e4m3fn).to(torch.float32).numpy()
        np.testing.assert_array_equal(np.float32(q.values), expected)
        gap = np.abs(np.float32(q.values) * q.scale - w)
        most = q.scale / 2 if kind == "int8" else np.maximum(np.abs(w) / 16, q.scale * 2**-10)
        assert np.all(gap <= most * (1 + 1e-5)) and gap.max() > 0
    assert kept == {"router", "vector"}


@cache
def scored(name: str, layout: Layout, kind: str | None, compute="float32", **placement):
    """(what a judge holds, log-probabilities of the batch, text of the program), its weights from one device."""
    lm = replace(tiny.MODELS[name], compute=compute).build()
    placement = Placement(layout=layout, **placement)
    judge = frozen(lm, Place(layout.mesh(), placement, placement.microbatches), tiny.same, kind)
    params = judge.freeze(jax.device_put(tiny.weights(name), shardings(lm.table, ONE.mesh(), 3)))
    return params, judge.score(params, tiny.batch(name).rollout).logp


JUDGES = {
    "one": ("plain", ONE, {}),
    "fsdp tensor": ("rich", FSDP_TENSOR, dict(zero=3)),
    "seq": ("rich", Layout(fsdp=2, seq=2, tensor=2), dict(context="ring", sequence_parallel=True)),
    "experts": ("deepseek", Layout(fsdp=2, tensor=2, expert=2), {}),
    "pipe": ("rich", Layout(fsdp=2, pipe=2), dict(zero=3, microbatches=2)),
    "latent, pipe": ("latent", Layout(fsdp=2, pipe=2, tensor=2), dict(microbatches=2)),
    "families": ("gemma", Layout(fsdp=2, seq=2), dict(zero=3)),
}


@pytest.mark.parametrize("kind", ["int8", pytest.param("float8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", tiny.ordinary(JUDGES, "experts", "latent, pipe", "families"))
def test_a_judge_in_8_bits_computes_with_what_it_holds_on_every_layout(case, kind):
    """Its log-probabilities are those of the oracle, written without any of this, of the weights multiplied out; and it
    holds what is stated."""
    name, layout, placement = JUDGES[case]
    params, logp = scored(name, layout, kind, **placement)
    again = lambda q, w: np.float32(q.values) * q.scale if isinstance(q, Quantized) else w
    dense = map_table(
        lambda t, w, q: again(q, w), tiny.MODELS[name].build().table, tiny.weights(name), jax.device_get(params)
    )
    tok, mask, *_ = tiny.tokens()
    logits = tiny.oracle(tiny.MODELS[name], dense, tok.ids, tok.positions, tok.segments)
    expected, _ = tiny.oracle_logprobs(logits, tok.ids, mask)
    np.testing.assert_allclose(logp, expected, atol=2e-4)
    exact, _ = tiny.oracle_logprobs(
        tiny.oracle(tiny.MODELS[name], tiny.weights(name), tok.ids, tok.positions, tok.segments), tok.ids, mask
    )
    assert np.abs(logp - exact).max() > 1e-2  # control: quantization is felt

    zero, table = placement.get("zero", 3), tiny.MODELS[name].build().table
    nbytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    assert nbytes == parts.frozen(table, layout, zero, kind)
    assert parts.frozen(table, layout, zero, None) > 2 * nbytes  # at widths of 32, where scales are not few


@pytest.mark.parametrize("kind", ["int8", "float8", "bfloat16", "float32"])
def test_every_way_to_a_judge_holds_the_same(kind):
    """Weights of another mesh or its own, as read from a checkpoint, whose source may go. Fresh ones are as narrow; all
    have a checksum."""
    lm, placement = tiny.MODELS["rich"].build(), Placement(layout=FSDP_TENSOR, zero=3)
    place = Place(FSDP_TENSOR.mesh(), placement, 1)
    judge = frozen(lm, place, tiny.same, kind)
    apart, own = (
        jax.device_put(tiny.weights("rich"), shardings(lm.table, mesh, 3)) for mesh in (ONE.mesh(), place.mesh)
    )
    copied, again, read = judge.freeze(apart), judge.freeze(own), judge.hold(own)
    for x in jax.tree.leaves((apart, own)):
        x.delete()
    assert tiny.identical(copied, again) and tiny.identical(copied, read)
    fresh, sums = judge.begin(0), jax.device_get(jax.tree.leaves(checksums(copied)))
    for tree in (again, read, fresh):
        like = lambda x, y: x.dtype == y.dtype and x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert all(jax.tree.leaves(jax.tree.map(like, copied, tree)))
    assert len({int(x) for x in sums}) > len(sums) // 2


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_what_is_narrowed_is_read_as_narrow_as_it_is_stored(stored, tmp_path):
    m, mesh = tiny.MODELS["plain"], FSDP_TENSOR.mesh()
    lm, family = m.build(), families.family_of(m)
    with jax.set_mesh(mesh):
        params = jax.device_put(tiny.weights("plain"), shardings(lm.table, mesh, 3))
    save(lm.table, params, family.naming(m), tmp_path, stored)
    (tmp_path / "config.json").write_text(json.dumps(families.written(family, m)))
    wide, read = (imported(tmp_path, m, ("tokens",), mesh, 3, dtype=d).params for d in ("float32", None))
    kinds = map_table(lambda t, w: w.dtype == (stored if t.matrix else "float32"), lm.table, read)
    assert all(jax.tree.leaves(kinds))
    with jax.set_mesh(mesh):
        narrow = jax.jit(lambda params: hold(lm.table, params, "int8"))
        assert tiny.identical(narrow(read), narrow(wide))


def test_a_large_models_judge_holds_a_byte_a_parameter():
    m = Decoder(vocab=32000, width=2048, layers=16, heads=16, kv_heads=8, head_dim=128, ffn=8192)
    for kind, width in (("int8", 1), ("float8", 1), ("bfloat16", 2), ("float32", 4), (None, 4)):
        held = parts.frozen(m.build().table, Layout(fsdp=8), 3, kind)
        assert held / (parts.parameters(m).total / 8) == pytest.approx(width, rel=0.02)


@pytest.mark.pitfall("T-63")
def test_a_frozen_role_in_bfloat16_computes_as_it_multiplies():
    """Held or cast, a matrix is rounded once."""
    narrow, logp = scored("rich", FSDP_TENSOR, "bfloat16", "bfloat16")
    _, expected = scored("rich", FSDP_TENSOR, None, "bfloat16")
    assert tiny.identical(logp, expected)
    back, _ = scored("rich", FSDP_TENSOR, "float32", "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(back)} == {jnp.dtype("float32")}
    table = tiny.MODELS["rich"].build().table
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(narrow))
    assert held == parts.frozen(table, FSDP_TENSOR, 3, "bfloat16")


def test_quantized_weights_are_gathered_in_8_bits():
    """Those that fsdp splits, and nothing wider but activations."""
    lm = tiny.MODELS["deep"].build()
    layout = Layout(fsdp=4)
    place = Place(layout.mesh(), Placement(layout=layout), 1)
    judge = frozen(lm, place, tiny.same, "int8")
    with jax.set_mesh(place.mesh):
        like = abstract(lm.table, place.mesh)
        params = jax.eval_shape(lambda p: hold(lm.table, p, "int8"), like)
        rollout = tiny.batch("deep").rollout
        moments = jax.ShapeDtypeStruct((3,), jnp.float32)
        text = judge.programs["score"].lower(params, moments, *place.abstract((rollout.tokens, rollout.mask))).compile()
    found = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", text.as_text())
    assert len(found) >= 8 and {kind for kind, _ in found} == {"s8"}


# Runs

MIXED = """
from dataclasses import replace

BOTH = replace(LM, compute="bfloat16")
OPTIMIZER = AdamW(lr=3e-3, moments="bfloat16")
BEFORE = replace(WARMUP, roles={"actor": Role(BOTH, Fresh(), OPTIMIZER, params="bfloat16")})
RUN = replace(
    RUN, roles={"actor": Role(BOTH, BEFORE, OPTIMIZER, params="bfloat16"), "reference": Role(BOTH, params="int8")},
    steps=3, evaluation=Evaluation(every=0, problems=16),
)
"""


def run(where, experiment: str, *args) -> int:
    return trial.rljax("train", experiment, "--run-dir", where, *args)


@pytest.mark.usefixtures("here")
@pytest.mark.pitfall("T-87")
@pytest.mark.pitfall("T-88")
def test_a_run_in_mixed_precision_resumes_bit_for_bit(folder):
    """Stopped after a step and resumed, as if never stopped. Its checkpoints hold the master and no second copy."""
    path = folder / "mixed.py"
    path.write_text(trial.EXPERIMENT + MIXED)
    assert run(folder / "whole", path) == 0
    assert run(folder / "part", path, "steps=1") == 0 and run(folder / "part", path, "--resume", "steps=3") == 0
    strip = lambda rows: [row for row in rows if row["phase"] == "train"]
    assert strip(measured(folder / "part")) == strip(measured(folder / "whole"))
    of = load_experiment(str(path))
    stages = built(of, mesh(folder, "one"))
    (whole, _), (part, _) = (saved(folder / name, stages, 3) for name in ("whole", "part"))
    assert trial.identical(whole["actor"], part["actor"])
    state, at = whole["actor"], stages.actor.place
    assert state.params.embed.dtype == jnp.bfloat16 and state.master.embed.dtype == jnp.float32
    assert np.any(np.float32(state.params.embed) != state.master.embed)
    assert state.optimizer[1][0].mu.embed.dtype == state.optimizer[1][0].nu.embed.dtype == jnp.bfloat16
    stored = parameters(folder / "whole", of.roles["actor"].lm, ("tokens",), at.mesh, 3, 3).params
    assert trial.identical(stored, masters(state))
    assert trial.identical(jax.tree.map(lambda w, p: w.astype(p.dtype), stored, state.params), state.params)
    # what generates is what was trained, and a reference of it in 8 bits holds a byte a parameter
    published, _ = stages.publish(state.params)
    assert trial.identical(published, state.params)
    copy = stages.copied("reference", whole)
    assert isinstance(copy.embed, Quantized) and copy.embed.values.dtype == jnp.int8
    assert {str(x.dtype) for x in jax.tree.leaves(copy)} == {"int8", "float32"}


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_run_with_bfloat16_parameters_is_one_with_float32_parameters(folder):
    """Every metric of every step and the last checkpoint, bit for bit; and each resumes the other's."""
    metrics, last = [], []
    for dtype in ("bfloat16", "float32"):
        path = folder / f"in_{dtype}.py"
        path.write_text(
            trial.EXPERIMENT + MIXED.replace('params="bfloat16"', f'params="{dtype}"').replace("int8", dtype)
        )
        assert run(folder / dtype, path) == 0
        metrics.append(measured(folder / dtype))
        of = load_experiment(str(path))
        last.append(masters(saved(folder / dtype, built(of, mesh(folder, "one")), 3)[0]["actor"]))
    assert metrics[0] == metrics[1] and trial.identical(*last)
    narrow = saved(folder / "float32", built(load_experiment(str(folder / "in_bfloat16.py")), mesh(folder, "one")), 3)
    assert trial.identical(masters(narrow[0]["actor"]), last[1])


def test_mistakes_are_named():
    lm = tiny.MODELS["plain"]
    adamw = AdamW()
    for bad, said in (
        (
            dict(optimizer=adamw, params="int8"),
            "params='int8' must be 'float32' or 'bfloat16', or None .int8 and float8",
        ),
        (dict(params="fp8"), "params='fp8' must be 'float32' or 'bfloat16' or 'int8' or 'float8', or None$"),
    ):
        with pytest.raises(ValueError, match=said):
            Role(lm, Fresh(), **bad)
    Role(lm, Fresh(), params="float8")


@pytest.mark.usefixtures("here")
def test_rules_that_join_fields_are_checked(folder):
    of = load_experiment(str(folder / "small.py"))
    actor, reference = of.roles["actor"], of.roles["reference"]
    with pytest.raises(UserError, match="roles.actor.params='bfloat16' with lm.compute='float32'"):
        replace(of, roles={"actor": replace(actor, params="bfloat16"), "reference": reference}).check()
    quantized = {"actor": actor, "reference": replace(reference, params="int8")}
    with pytest.raises(UserError, match="roles.reference.params='int8' with pairs.of='reference'"):
        replace(of, roles=quantized, pairs=Pairing("reference")).check()
    replace(of, roles=quantized).check()


# What the compiler for chips makes of it


def chips(dtype: str, zero: int):
    """An update of a small untied model for 8 TPUs."""
    layout, m = Layout(fsdp=8), replace(tiny.MODELS["plain"], compute="bfloat16", vocab=64, width=64)
    where, lm, strategy = layout.mesh(topology("v5e:2x4")), m.build(), Strategy(zero=zero, microbatches=2)
    adamw = AdamW().build(1, map_table(lambda t: t.matrix, lm.table))
    with jax.set_mesh(where):
        state = jax.eval_shape(lambda p: start(lm, p, adamw, zero, dtype=dtype), abstract(lm.table, where, zero))
        rows = NamedSharding(where, jax.P(("data", "fsdp", "expert")))
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), tiny.batch("plain"))
        run = lambda state, batch: update(
            state, batch, lm=lm, objective=tiny.OBJECTIVE, optimizer=adamw, adjust=tiny.same, on_policy=False,
            strategy=strategy,
        )  # fmt: skip
        return jax.jit(run, donate_argnums=0).lower(state, batch).compile(OPTIONS)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install rljax[compile]")
@pytest.mark.parametrize(
    "dtype, zero, width",
    [
        ("bfloat16", 1, 2),
        pytest.param("bfloat16", 2, 2, marks=pytest.mark.slow),
        pytest.param("float32", 1, 4, marks=pytest.mark.slow),
    ],
)
def test_updated_parameters_are_gathered_in_the_dtype_they_are_held_in(dtype, zero, width):
    """Of W elements 7/8 times their bytes, and nothing else is gathered."""
    table = replace(tiny.MODELS["plain"], vocab=64, width=64).build().table
    elements = sum(t.size for t in jax.tree.leaves(table, is_leaf=is_tensor) if t.matrix)
    needs = apart(__file__, dtype, str(zero))
    assert needs["collectives"]["all-gather"]["bytes"] == width * elements * 7 // 8


if __name__ == "__main__":
    print(json.dumps(report(chips(sys.argv[1], int(sys.argv[2])))))
