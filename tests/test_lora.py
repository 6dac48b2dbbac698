"""Law: a model with adapters computes what the model with their products added to its matrices computes, on every
layout; only adapters and value heads are trained, have state, are saved and travel."""

import json
import shutil
from dataclasses import replace
from functools import cache
from math import sqrt
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import trial
from jax import P
from tiny import ONE
from trial import built, mesh

from rljax.config import load_experiment
from rljax.data.rows import real
from rljax.generate.decode import generate
from rljax.generate.sampling import Sampling
from rljax.mesh import Layout, Strategy
from rljax.mesh.file import parse
from rljax.mesh.move import Kept
from rljax.model import lora as low_rank
from rljax.model.forward import logprobs
from rljax.model.lora import LoRA, adapted
from rljax.model.products import LowRank, _dropped, is_low_rank, mixed, sown
from rljax.model.table import abstract, count, init, is_tensor, join, learned, map_table, part, shardings
from rljax.plan import parts
from rljax.plan.draw import describe
from rljax.run import checkpoint
from rljax.run.assessment import assess
from rljax.run.imported import imported
from rljax.run.loop import Phase, first_states, phases
from rljax.run.schedules import Clock, collect, problems_of
from rljax.train import algorithms
from rljax.train.step import gradients, start, update
from rljax.types import Assessed

ALL = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
LATENT = (
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "mlp.gate_proj", "mlp.down_proj",
    "shared_experts.up_proj", "shared_experts.down_proj",
)  # fmt: skip
DENSE = LoRA(rank=4, alpha=6.0, targets=ALL, dropout=0.25)
CASES = {  # model, adapters, objective, layout, strategy: each kind of objective once
    "tensor": ("plain", DENSE, tiny.OBJECTIVE, Layout(fsdp=2, tensor=4), dict(sequence_parallel=True)),
    "ring": ("rich", DENSE, algorithms.sft(), Layout(fsdp=2, seq=4), dict(context="ring")),
    "experts": (
        "experts", LoRA(3, 6.0, ("q_proj", "o_proj"), 0.1), algorithms.ppo().with_critic(),
        Layout(fsdp=2, tensor=2, expert=2), dict(sequence_parallel=True, zero=2, microbatches=2),
    ),
    "zero bubble": ("rich", DENSE, algorithms.dpo(), Layout(fsdp=2, pipe=2), dict(microbatches=2, schedule="zb-h1")),
    "pipe": (
        "plain", LoRA(4, 6.0, ("q_proj", "down_proj"), 0.25), tiny.OBJECTIVE, Layout(fsdp=2, pipe=2, tensor=2),
        dict(microbatches=2, schedule="1f1b"),
    ),
    "latents": (
        "latent", LoRA(3, 6.0, LATENT, 0.1), algorithms.sft(), Layout(fsdp=2, tensor=2, expert=2),
        dict(sequence_parallel=True),
    ),
    "pipe of experts": (
        "latent", LoRA(3, 6.0, LATENT, 0.1), algorithms.sft(), Layout(fsdp=2, pipe=2, expert=2),
        dict(microbatches=2),
    ),
    "zero 1": ("plain", DENSE, algorithms.sft(), tiny.ALL, dict(zero=1, microbatches=2, remat="none")),
}  # fmt: skip


@cache
def model(name: str, lora: LoRA, value: bool = False):
    """(model with adapters, parameters as numpy arrays): no B is 0."""
    lm = adapted(tiny.MODELS[name].build(("tokens", "value") if value else ("tokens",)), lora)

    def one(t):
        x = np.random.default_rng(sum(t.name.encode())).normal(size=t.shape)
        return (t.std + 0.1 * x if t.std == 1 else 2 * (t.std or 0.05) * x).astype(np.float32)

    return lm, map_table(one, lm.table)


def batch(name: str) -> Assessed:
    found, rng = tiny.batch(name), np.random.default_rng(5)
    values = lambda: (rng.normal(size=found.rollout.mask.shape) * found.rollout.mask).astype(np.float32)
    return found.replace(values=values(), returns=values())


def updated(name, lora, objective, layout=ONE, seed=7, **strategy):
    """(loss, gradient, learned parameters after an update, what is kept of each, the frozen parameters after it)."""
    value = bool(objective.critic)
    (lm, weights), at, strategy = model(name, lora, value), layout.mesh(), Strategy(**strategy)
    matrices = map_table(lambda t: t.matrix, learned(lm.table))
    optimizer = optax.chain(tiny.remember, tiny.ADAMW.build(10, matrices))
    with jax.set_mesh(at):
        own, frozen = part(lm.table, jax.device_put(weights, shardings(lm.table, at, strategy.zero)))
        state = start(lm, own, optimizer, strategy.zero)
        run = jax.jit(
            lambda state, batch, frozen, seed: update(
                state, batch, frozen, seed, lm=lm, objective=objective, optimizer=optimizer, adjust=tiny.same,
                on_policy=False, strategy=strategy,
            ),
            donate_argnums=0,
        )  # fmt: skip
        state, metrics = run(state, tiny.place(batch(name), at), frozen, jax.device_put(np.uint32(seed)))
    return jax.device_get((metrics["loss"], state.optimizer[0], state.params)), state, frozen


single = cache(lambda case: updated(*CASES[case][:3]))


@pytest.mark.pitfall("T-07")
@pytest.mark.pitfall("T-119")
@pytest.mark.parametrize("case", tiny.ordinary(CASES, "pipe", "latents", "pipe of experts", "zero 1"))
def test_every_layout_computes_the_single_device_update(case):
    """What is dropped included; and the frozen parameters are the same bits after it, where they were."""
    name, lora, objective, layout, strategy = CASES[case]
    (loss, grads, params), state, frozen = updated(name, lora, objective, layout, **strategy)
    expected, expected_grads, expected_params = single(case)[0]
    assert loss == pytest.approx(expected, rel=2e-5)
    assert tiny.distance(grads, expected_grads) < 5e-5
    assert tiny.distance(params, expected_params) < 2e-4
    lm, weights = model(name, lora, bool(objective.critic))
    assert tiny.identical(frozen, part(lm.table, weights)[1])
    leaves = jax.tree.leaves(learned(lm.table), is_leaf=is_tensor)
    names = {t.name for t in leaves}
    assert len(jax.tree.leaves(state.params)) == len(leaves) and not any(t.frozen for t in leaves)
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight", "score.weight")) for name in names)
    assert ("score.weight" in names) == bool(objective.critic)
    for t, w in zip(leaves, jax.tree.leaves(state.params), strict=True):  # they lie as the table says
        assert w.sharding.spec == t.placed(strategy.get("zero", 3)), t.name


def test_the_seed_of_what_is_dropped_matters():
    """Control of the test above."""
    other = updated(*CASES["ring"][:3], seed=8)[0]
    assert tiny.distance(other[1], single("ring")[0][1]) > 0.01


@pytest.mark.pitfall("T-12")
def test_the_gradient_is_that_of_the_sum_of_base_and_product():
    """Of the log-likelihood, against autodiff of the oracle with W + alpha / rank A B in the place of W."""
    lora = replace(DENSE, dropout=0.0)
    lm, weights = model("rich", lora)
    tok, mask, *_ = tiny.tokens()
    plain, frozen = tiny.MODELS["rich"], part(lm.table, weights)[1]

    def loss(own):
        node = lambda w: w.base + 6.0 / 4 * jnp.einsum("lir,lro->lio", w.down, w.up) if is_low_rank(w) else w
        p = jax.tree.map(node, join(own, frozen), is_leaf=is_low_rank)
        p = jax.tree.map(jnp.asarray, p)
        logits = tiny.oracle(plain, p, tok.ids, tok.positions, tok.segments, jnp)
        return -tiny.oracle_logprobs(logits, tok.ids, mask, jnp)[0].sum() / mask.sum()

    own = jax.tree.map(jnp.asarray, part(lm.table, weights)[0])
    with jax.numpy_rank_promotion("allow"):
        value, grads = jax.value_and_grad(loss)(own)
    got = updated("rich", lora, algorithms.sft())[0]
    assert got[0] == pytest.approx(float(value), rel=1e-5)
    assert tiny.distance(got[1], jax.device_get(grads)) < 5e-5


def test_no_gradient_of_a_frozen_matrix_is_computed():
    """No product of an update is as large as a matrix; without adapters there are such (control)."""
    matrices = {(32, 32), (32, 16), (32, 64), (64, 32), (48, 32)}

    def products(lm, weights):
        objective, tall = algorithms.sft(), batch("plain")
        each = objective.weights(tall, 0.0)
        ask = lambda params, tall, each: gradients(
            params, tall, each, lm=lm, objective=objective, adjust=tiny.same, on_policy=False, strategy=Strategy()
        )[-1]
        with jax.set_mesh(ONE.mesh()):
            params = jax.device_put(weights, shardings(lm.table, ONE.mesh(), 3))
            traced = jax.make_jaxpr(ask)(params, *tiny.place((tall, each), ONE.mesh()))
        dots = [eqn for eqn in tiny.equations(traced.jaxpr) if eqn.primitive.name == "dot_general"]
        return {eqn.outvars[0].aval.shape for eqn in dots} | {eqn.outvars[0].aval.shape[::-1] for eqn in dots}

    assert not products(*model("plain", replace(DENSE, dropout=0.0))) & matrices
    assert products(tiny.MODELS["plain"].build(), tiny.weights("plain")) >= matrices


def test_fresh_adapters_change_nothing_and_begin_as_peft_does():
    lora = LoRA(rank=8, alpha=16.0, targets=("q_proj", "down_proj"))
    lm = adapted(tiny.MODELS["plain"].build(), lora)
    with jax.set_mesh(ONE.mesh()):
        params = jax.jit(lambda: init(lm.table, jax.random.key(0)))()
        tokens, mask, *_ = tiny.tokens()
        score = jax.jit(lambda lm_params, tokens, mask: logprobs(lm, lm_params, tokens, mask)[0])
        inputs = tiny.place((tokens, mask), ONE.mesh())
        ours = np.asarray(score(params, *inputs))
        plain = tiny.MODELS["plain"].build()
        base = np.asarray(jax.jit(lambda p, t, m: logprobs(plain, p, t, m)[0])(low_rank.without(params), *inputs))
    assert np.array_equal(ours, base) and np.any(base)
    wq, down = params.layers.wq, params.layers.down
    assert not np.any(wq.up) and wq.scale == 2.0
    for w, into in (wq, 32), (down, 64):  # Kaiming's, of a uniform distribution within 1 / sqrt(into)
        assert np.std(w.down) == pytest.approx(1 / sqrt(3 * into), rel=0.1)
    assert np.std(wq.down[0] - wq.down[1]) > 0.05


def test_what_is_dropped_is_dropped_independently():
    """A share of the numbers, of every token, layer, matrix and update others; the rest is as much larger."""
    layer = lambda number: {"a": LowRank(0, 0, 0, name="a", dropout=0.3), "b": LowRank(0, 0, 0, name="b", dropout=0.3)}

    class Layer(dict):
        number = jnp.int32(0)

    jax.tree_util.register_pytree_node(Layer, lambda d: ((d["a"], d["b"]), None), lambda _, c: Layer(a=c[0], b=c[1]))
    x = jnp.ones((64, 32, 48))
    noise = mixed(jnp.arange(64 * 32, dtype=jnp.uint32).reshape(64, 32))
    found = []
    for number, bits in ((0, noise), (1, noise), (0, mixed(noise ^ 1))):
        one = Layer(layer(number))
        one.number = jnp.int32(number)
        own = sown(one, bits)
        with jax.set_mesh(ONE.mesh()):
            found += [np.asarray(_dropped(jax.device_put(x, P(None, None, None)), w)) for w in (own["a"], own["b"])]
    for y in found:
        assert {*np.unique(y).tolist()} == {0.0, float(np.float32(1) / np.float32(0.7))}
        kept = y > 0
        assert kept.mean() == pytest.approx(0.7, abs=4 * sqrt(0.21 / kept.size))
        for axes in ((0, 1), (2,)):  # no feature and no token is dropped more often than others
            share, size = kept.mean(axes), kept.size // kept.mean(axes).size
            assert np.std(share) == pytest.approx(sqrt(0.21 / size), rel=0.4)
        for axis in range(3):  # nor together with its neighbor
            both = np.delete(kept, 0, axis) & np.delete(kept, -1, axis)
            assert both.mean() == pytest.approx(0.49, abs=0.01)
    for i, a in enumerate(found):
        for b in found[:i]:
            assert ((a > 0) & (b > 0)).mean() == pytest.approx(0.49, abs=0.01)


MISTAKES = {
    "unknown": (dict(targets=("q_porj",)), "'q_porj', a matrix that the model lacks; did you mean 'q_proj'?"),
    "experts": (dict(targets=("up_proj",)), "mlp.experts.{}.up_proj.weight: experts, whose matrices are stacked, have"),
    "router": (dict(targets=("mlp.gate",)), "routers have no adapters"),
    "head": (dict(targets=("lm_head",)), "the output head has no adapter"),
    "embedding": (dict(targets=("embed_tokens",)), "the embedding has no adapter"),
    "norm": (dict(targets=("input_layernorm",)), "only matrices have adapters"),
    "rank": (dict(rank=0), "rank=0 alpha=32.0: at least 1, and above 0"),
    "dropout": (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
    "none": (dict(targets=()), "targets=() leaves nothing to train"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_targets_that_cannot_have_an_adapter_are_named(case):
    settings, message = MISTAKES[case]
    with pytest.raises(ValueError) as error:
        adapted(tiny.MODELS["experts"].build(), LoRA(**settings))
    assert message in str(error.value)


BFLOAT = replace(tiny.MODELS["rich"], compute="bfloat16")


@pytest.mark.parametrize("name", ["plain", "rich", "latent", "experts", "bfloat16"])
@pytest.mark.parametrize("layout, zero", [(ONE, 3), (Layout(fsdp=2, tensor=2), 3), (Layout(fsdp=2), 1)], ids=str)
def test_parameters_and_bytes_are_those_of_the_table(name, layout, zero):
    m = BFLOAT if name == "bfloat16" else tiny.MODELS[name]
    targets = LATENT if m.latent else ("q_proj", "o_proj") if m.experts else ALL
    lora = LoRA(4, 8.0, targets)
    lm = adapted(m.build(), lora)
    assert sum(p.size for p in parts.adapters(m, lora)) == count(learned(lm.table)) > 0
    assert count(lm.table) - count(learned(lm.table)) == parts.parameters(m).total
    stated = parts.state(m, layout, zero, lora=lora)
    at, held = layout.mesh(), lambda x: np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    narrow = map_table(lambda t: t.frozen and t.matrix, lm.table)
    like = jax.tree.map(
        lambda x, n: jax.ShapeDtypeStruct(x.shape, m.compute if n else x.dtype, sharding=x.sharding),
        abstract(lm.table, at, zero), narrow,
    )  # fmt: skip
    assert stated.params == sum(map(held, jax.tree.leaves(like)))
    own = learned(lm.table)
    ways = lambda t: np.prod(jax.sharding.NamedSharding(at, t.updated(zero)).shard_shape(t.shape))
    assert stated.optimizer == 8 * sum(map(ways, jax.tree.leaves(own, is_leaf=is_tensor)))


def test_a_drawing_counts_no_state_of_what_is_frozen():
    lm = adapted(tiny.MODELS["plain"].build(), DENSE)
    file = parse('platform = "cpu"\ndevices = 1\n[train]\n', "one.toml")
    (told,) = describe(file, {"actor": (lm, True)})["stages"]["train"]["roles"].values()
    assert told["gradient_bytes_per_device"] == 4 * count(learned(lm.table))
    assert told["optimizer_bytes_per_device"] == 8 * count(learned(lm.table))
    assert told["parameters"] == count(lm.table)


GENERATING = {
    "tensor": (Layout(fsdp=2, tensor=2), dict(sequence_parallel=True)),
    "ring": (Layout(fsdp=2, seq=2), dict(context="ring")),
    "pipe": (Layout(fsdp=2, pipe=2, tensor=2), {}),
}


@cache
def completions(layout=ONE, **strategy):
    """Greedy ones of eight prompts, and their log-probabilities."""
    (lm, weights), at, strategy = model("plain", DENSE), layout.mesh(), Strategy(**strategy)
    ids = np.random.default_rng(0).integers(1, 48, (8, 6)).astype(np.int32)
    uid, greedy = np.arange(8, dtype=np.int32), jax.tree.map(jnp.asarray, Sampling(temperature=0.0))
    run = jax.jit(
        lambda params, *prompts: generate(
            lm, params, *prompts, jax.random.key(0), 0, greedy, strategy, n=1, max_new=6, stop=(),
            chunk=4,
        )
    )  # fmt: skip
    with jax.set_mesh(at):
        params = jax.device_put(weights, shardings(lm.table, at, strategy.zero))
        return jax.device_get(run(params, *tiny.place((ids, 1 + uid % 6, uid), at)))


@pytest.mark.pitfall("T-117")
@pytest.mark.parametrize("case", tiny.ordinary(GENERATING, "tensor", "ring"))
def test_generation_on_every_layout_is_the_single_devices(case):
    layout, strategy = GENERATING[case]
    got, expected = completions(layout, **strategy), completions()
    assert np.array_equal(got.tokens.ids, expected.tokens.ids) and len(np.unique(got.tokens.ids)) > 8
    assert np.abs(got.logp - expected.logp).max() < 2e-5
    weights, tokens = model("plain", DENSE)[1], expected.tokens
    merged = jax.tree.map(
        lambda w: w.base + w.scale * np.einsum("lir,lro->lio", w.down, w.up) if is_low_rank(w) else w, weights,
        is_leaf=is_low_rank,
    )  # fmt: skip
    logits = tiny.oracle(tiny.MODELS["plain"], merged, tokens.ids, tokens.positions, tokens.segments)
    truth, _ = tiny.oracle_logprobs(logits, tokens.ids, expected.mask)
    assert np.abs(np.where(expected.mask, truth - expected.logp, 0)).max() < 2e-4


def test_what_never_changes_is_sent_once_while_it_lives():
    kept, at = Kept(), Layout(data=2).mesh()
    where = jax.sharding.NamedSharding(at, P("data"))
    x = jax.device_put(np.arange(8.0, dtype=np.float32), jax.devices()[2])
    first, sent = kept({"w": x, "none": None}, {"w": where, "none": None})
    again, nothing = kept({"w": x}, {"w": where})
    assert sent == 32 and nothing == 0 and again["w"] is first["w"] and np.array_equal(first["w"], x)
    same, _ = kept({"w": x}, {"w": x.sharding})
    assert same["w"] is x
    del x, same
    assert not kept.held


# ---- runs

EXPERIMENT = """
from dataclasses import replace

from rljax.data.files import Pairs
from rljax.model.lora import LoRA
from rljax.run.run import Pairing, Shared
from rljax.run.schedules import paired
from rljax.train import algorithms

LORA = LoRA(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "down_proj"), dropout=0.2)
SHORT = replace(RUN, steps=2, evaluation=Evaluation(every=0, problems=16))


def having(run=SHORT, roles={}, **fields):
    roles = {"actor": replace(run.roles["actor"], lora=LORA, optimizer=AdamW(lr=3e-2))} | roles
    return replace(run, roles=run.roles | roles, **fields)


EXAMPLES = replace(SHORT, schedule=supervised, prompts=6)
"""
RUNS = {
    "grpo": "having(objective=algorithms.grpo(kl=0.1))",
    "critic": "having(roles={'critic': Role(LM, optimizer=AdamW(lr=1e-2), lora=LORA)}, objective=algorithms.ppo())",
    "shared critic": "having(roles={'critic': Shared()}, objective=algorithms.ppo())",
    "DPO": "having(EXAMPLES, objective=algorithms.dpo(), task=Pairs('pairs.jsonl'))",
    "iterated DPO": "having(objective=algorithms.irpo(), schedule=paired, pairs=Pairing('reference', 2))",
    "SFT": "having(replace(WARMUP, steps=2), objective=algorithms.sft())",
}


@pytest.fixture(scope="module")
def done(folder):
    """name -> (run, its stages on one device, the directory of that run after two steps)."""
    shown = [(f"{a}+{b}=", f"#{a + b:03d}", f"#{a}0") for a in range(10, 18) for b in (23, 45)]
    lines = [json.dumps(dict(prompt=p, chosen=right, rejected=wrong)) for p, right, wrong in shown]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    found = {}

    def of(name: str):
        if name not in found:
            file = folder / f"lora_{name.replace(' ', '_')}.py"
            file.write_text(f"{trial.EXPERIMENT}\n{EXPERIMENT}\nRUN = {RUNS[name]}\n")
            where = folder / file.stem
            assert trial.rljax("train", file, "--run-dir", where) == 0
            run = load_experiment(str(file))
            found[name] = run, built(run, mesh(folder, "one")), where, file
        return found[name]

    return of


def began(run, on, where: Path, role: str = "actor"):
    """The parameters without adapters that a role of a finished run started from."""
    place, start = on.trained[role].place, where / "warmup"
    if not start.is_dir():
        return low_rank.without(on.trained[role].begin(run.seed).params)
    return checkpoint.parameters(start, run.roles[role].lm, run.heads(role), place.mesh, 3, role=role).params


def states(run, on, where: Path, step: int):
    """As the run had them: what a checkpoint holds of them, and what they started from."""
    phase = Phase(*phases(run, where)[-1])
    try:
        first, frozen, _ = first_states(phase, on, {})
        own = {role: on.trained[role].own(state) for role, state in first.items()}
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), own)
        found = phase.saver.restore(step, like)[0]
        return {role: on.trained[role].whole(found[role], first[role]) for role in found}, frozen
    finally:
        phase.saver.close()


runs = pytest.mark.usefixtures("here")


@runs
@pytest.mark.pitfall("T-87")
@pytest.mark.parametrize("name", tiny.ordinary(RUNS, "critic", "shared critic", "DPO", "iterated DPO", "SFT"))
def test_a_run_trains_saves_and_resumes_adapters_alone(done, folder, name):
    run, on, whole, file = done(name)
    where = shutil.copytree(whole, folder / f"{whole.name}_resumed")
    shutil.rmtree(where / "checkpoints" / "2")
    assert trial.rljax("train", file, "--run-dir", where, "--resume") == 0
    assert trial.measured(where) == trial.measured(whole)
    now, then = states(run, on, where, 2)[0], states(run, on, whole, 2)[0]
    assert trial.identical(now, then)
    for role, player in on.trained.items():
        table = player.lm.table
        own = part(table, now[role].params)[0]
        before, after = began(run, on, whole, role), low_rank.without(now[role].params)
        assert trial.identical(after.replace(value=None), before.replace(value=None))
        up = [w.up for w in jax.tree.leaves(own, is_leaf=is_low_rank) if is_low_rank(w)]
        assert len(up) == 3 and all(np.any(w) for w in up)
        saved_names = {p.name.split(".")[-1] for p in (whole / "checkpoints" / "2" / role).rglob("*layers*")}
        assert not saved_names & {"norm1", "embed", "base"}
        leaves = jax.tree.leaves(now[role].optimizer)
        assert sum(x.size for x in leaves if x.ndim) == 2 * count(learned(table))


@runs
@pytest.mark.slow
def test_a_run_on_eight_devices_takes_the_step_of_one(done, folder):
    run, on, whole, file = done("grpo")
    where = folder / "lora_on_eight"
    assert trial.rljax("train", file, "--run-dir", where, "--mesh", "eight.toml", "steps=1") == 0
    row = lambda where: next(row for row in trial.measured(where) if row["phase"] == "train")
    got, expected = row(where), row(whole)
    for key in ("loss", "grad_norm", "reward", "length", "kl/reference", "mismatch/mean", "grad_norm/attention"):
        assert got[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
    eight = built(run, mesh(folder, "eight"))
    a, b = (states(run, on, where, 1)[0]["actor"].params for on, where in ((eight, where), (on, whole)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), *jax.device_get((a, b)))


@runs
def test_a_reference_has_the_very_arrays_of_the_actor(done, folder):
    """Where they lie alike, on one mesh and, with the actor that generates, on another."""
    run, on, where, _ = done("grpo")
    now, frozen = states(run, on, where, 2)
    pointers = lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    same = lambda a, b: jax.tree.all(jax.tree.map(lambda x, y: pointers(x) == pointers(y), a, b))
    params = now["actor"].params
    assert same(low_rank.without(params), frozen["reference"])
    published, moved = on.publish(params)
    assert same(low_rank.without(published), frozen["reference"]) and moved == 0
    assert not same(published.layers.wq.up, params.layers.wq.up)  # which the next update donates

    split = built(run, mesh(folder, "split"))
    now, frozen = states(run, split, where, 2)
    params = now["actor"].params
    published, moved = split.publish(params)
    again, less = split.publish(params)
    assert same(low_rank.without(published), frozen["reference"]) and same(low_rank.without(again), frozen["reference"])
    table = split.actor.lm.table
    own, others = part(table, params)
    travels = lambda tree: sum(4 * x.size * 4 for x in jax.tree.leaves(tree))  # to each of four devices, in float32
    assert moved == less == travels(own)  # the reference has had the others sent


@runs
def test_frozen_matrices_are_in_the_dtype_of_their_products(done, folder):
    """And the reference's with them: half the bytes, the same numbers; what is trained is not."""
    run, _, where, _ = done("grpo")
    wide = lambda role: replace(role, lm=replace(role.lm, compute="bfloat16"))
    run = replace(run, roles={name: wide(role) for name, role in run.roles.items()})
    on = built(run, mesh(folder, "one"))
    now, frozen = states(run, on, where, 2)
    for params in (now["actor"].params, on.publish(now["actor"].params)[0]):
        table = on.actor.lm.table
        kinds = map_table(lambda t, w: (t.frozen, t.matrix, str(w.dtype)), table, params)
        published = params is not now["actor"].params
        for still, matrix, dtype in jax.tree.leaves(kinds, is_leaf=lambda x: isinstance(x, tuple)):
            assert dtype == ("bfloat16" if matrix and (still or published) else "float32")
    assert low_rank.without(now["actor"].params).layers.wo is frozen["reference"].layers.wo
    prompts = problems_of(run, on, 1)
    rollout = real(on.complete(on.publish(now["actor"].params)[0], prompts, 0, 1, 0, run.sampling, run.n))
    gap = on.actor.score(now["actor"], rollout).logp - rollout.logp
    assert np.abs(np.where(rollout.mask, gap, 0)).max() < 0.05
    state, metrics = on.actor.update(now["actor"], replaced(rollout))
    assert np.isfinite(float(metrics["loss"])) and state.params.layers.wo is now["actor"].params.layers.wo


@runs
@pytest.mark.slow
def test_adapters_may_be_held_in_bfloat16_and_their_reference_in_8_bits(done, folder):
    """With a float32 master of what is learned alone; what is quantized is a copy."""
    run, _, where, _ = done("grpo")
    held = lambda role, params: replace(role, lm=replace(role.lm, compute="bfloat16"), params=params)
    roles = {"actor": held(run.roles["actor"], "bfloat16"), "reference": held(run.roles["reference"], "int8")}
    on = built(replace(run, roles=roles), mesh(folder, "one"))
    now, frozen = states(replace(run, roles=roles), on, where, 2)
    actor, table = now["actor"], on.actor.lm.table
    master = jax.tree.leaves(actor.master)
    assert sum(x.size for x in master) == count(learned(table)) and {str(x.dtype) for x in master} == {"float32"}
    assert actor.params.layers.wq.up.dtype == "bfloat16" and frozen["reference"].layers.wo.values.dtype == "int8"
    rollout = real(on.complete(on.publish(actor.params)[0], problems_of(run, on, 1), 0, 1, 0, run.sampling, run.n))
    assert np.isfinite(on.frozen["reference"].score(frozen["reference"], rollout).logp).all()
    before = [np.array(x) for x in master]
    state, metrics = on.actor.update(actor, replaced(rollout))
    assert np.isfinite(float(metrics["loss"])) and state.params.layers.wo is actor.params.layers.wo
    assert all(np.any(a != np.asarray(b)) for a, b in zip(before, jax.tree.leaves(state.master), strict=True))


@runs
def test_a_checkpoint_is_adapted_and_goes_out_as_one(done, folder, capsys):
    """A run with adapters is exported with their products added; a run that starts from these files, again."""
    run, on, where, file = done("grpo")
    m, at, export = run.roles["actor"].lm, on.actor.place.mesh, lambda *args: trial.rljax("export", *args)
    assert export(where, folder / "files", "--dtype", "float32") == 0
    merged = checkpoint.parameters(where, m, ("tokens",), at, 3).params
    assert trial.identical(imported(folder / "files", m, ("tokens",), at, 3).params, merged)
    changed = f"roles.actor.start={folder / 'files'}", "steps=1"
    assert trial.rljax("train", file, "--run-dir", folder / "from_files", *changed) == 0
    capsys.readouterr()
    prompts = "--ids", "2 3 4", "--ids", "5 6 7 8 9 10", "--max-new", "12"
    assert trial.rljax("generate", folder / "from_files", *prompts, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert export(folder / "from_files", folder / "out", "--dtype", "float32") == 0
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = {name: transformers.AutoModelForCausalLM.from_pretrained(folder / name) for name in ("files", "out")}

    # the adapters alone name the files that they belong to, and are a checkpoint like any other
    alone = folder / "alone"
    assert export(folder / "from_files", alone, "--adapter", "--dtype", "float32") == 0
    whole = checkpoint.parameters(folder / "from_files", m, ("tokens",), at, 3).params
    assert trial.identical(imported(alone, m, ("tokens",), at, 3).params, whole)
    capsys.readouterr()
    assert trial.rljax("generate", alone, *prompts, "--json") == 0
    for row, same in zip(rows, map(json.loads, capsys.readouterr().out.splitlines()), strict=True):
        assert row["ids"] == same["ids"] and np.abs(np.subtract(row["logprobs"], same["logprobs"])).max() < 1e-4
    changed = f"roles.actor.start={alone}", "steps=1"
    assert trial.rljax("train", file, "--run-dir", folder / "from_alone", *changed) == 0
    assert export(folder / "from_alone", folder / "again", "--adapter") == 0
    named = json.loads((folder / "again" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named is None  # PEFT could not load the sum that these belong to
    gaps = {"files": 0.0, "out": 0.0}
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["ids"]])
        for name, model in theirs.items():
            with torch.no_grad():
                logp = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
            gap = np.abs(np.array(row["logprobs"]) - logp[len(row["prompt_ids"]) - 1 :]).max()
            gaps[name] = max(gaps[name], gap)
    assert gaps["out"] < 1e-4 < gaps["files"]  # control: the step that it took shows


def replaced(rollout) -> Assessed:
    """A batch of these completions."""
    draw = np.random.default_rng(0).normal(size=rollout.mask.shape).astype(np.float32)
    return Assessed(rollout, np.zeros((len(rollout.uid), 2), np.float32), draw, rollout.logp)


@runs
@pytest.mark.pitfall("T-59")
@pytest.mark.pitfall("T-117")
def test_sampler_and_trainer_agree_after_training_and_nothing_is_dropped(done, folder):
    run, on, where, _ = done("grpo")
    now, frozen = states(run, on, where, 2)
    found, _, _ = collect(run, on, on.publish(now["actor"].params)[0], 3, Clock(lambda stage: None))
    mask = found.rollout.mask
    scores = [on.actor.score(now["actor"], found.rollout).logp for _ in range(2)]
    assert scores[0].tobytes() == scores[1].tobytes()
    assert np.abs(np.where(mask, scores[0] - found.rollout.logp, 0)).max() < 2e-5
    reference = on.frozen["reference"].score(frozen["reference"], found.rollout).logp
    assert np.abs(np.where(mask, scores[0] - reference, 0)).max() > 1e-3  # the adapters do something
    assessed, _ = assess(run, on, now, frozen, found, None)
    _, metrics = on.actor.update(now["actor"], assessed)
    assert float(metrics["loss"]) != 0


@runs
def test_commands_work_on_a_run_with_adapters_and_others_start_from_it(done, folder, capsys):
    run, on, where, file = done("grpo")
    capsys.readouterr()
    assert trial.rljax("generate", where, "--prompt", "12+34=", "--greedy", "--json") == 0
    row = json.loads(capsys.readouterr().out)
    params = states(run, on, where, 2)[0]["actor"].params
    prompts = problems_of(run, on, 1)
    with jax.set_mesh(on.actor.place.mesh):
        merged = jax.jit(low_rank.merged)(params)
    restored = checkpoint.parameters(where, run.roles["actor"].lm, ("tokens",), on.actor.place.mesh, 3)
    assert trial.identical(restored.params, merged)  # where the model has no adapters, they are added
    actor = run.roles["actor"]
    plain = built(replace(run, roles=run.roles | {"actor": replace(actor, lora=None)}), mesh(folder, "one"))
    sampling = replace(run.sampling, temperature=0.0)
    a = real(on.complete(on.publish(params)[0], prompts, 0, 0, 0, sampling, 1))
    b = real(plain.complete(plain.publish(restored.params)[0], prompts, 0, 0, 0, sampling, 1))
    assert np.array_equal(a.tokens.ids, b.tokens.ids) and np.abs(a.logp - b.logp).max() < 2e-5
    assert row["prompt"] == "12+34=" and len(row["ids"]) == len(row["logprobs"])
    assert trial.rljax("eval", where) == 0

    # a run that starts from it has it whole as its base, and so as its reference
    after = folder / "after"
    changed = f"roles.actor.start={where}", "roles.actor.lora.rank=3", "steps=1"
    assert trial.rljax("train", file, "--run-dir", after, *changed) == 0
    info = json.loads(next((after / "checkpoints" / "1" / "info").rglob("*")).read_text())
    assert info["bases"]["actor"]["start"] == f"../{where.name}" and info["bases"]["actor"]["step"] == 2
    place = on.actor.place
    role = replace(actor, lora=replace(actor.lora, rank=3))
    now = checkpoint.parameters(after, role, ("tokens",), place.mesh, 3).params
    assert now.layers.wq.down.shape[-1] == 3 and trial.identical(low_rank.without(now), merged)
    moved = folder / "elsewhere"
    moved.mkdir()
    shutil.copytree(after, moved / "after")
    assert trial.rljax("eval", moved / "after") == 2
    assert f"has but adapters to what {moved / 'after' / '..' / where.name} holds" in capsys.readouterr().err


@runs
def test_a_frozen_role_with_adapters_and_a_wrong_target_are_refused(done, folder, capsys):
    *_, file = done("grpo")
    for override, message in (
        (
            'roles.reference.lora={"$": "rljax.model.lora:LoRA"}',
            "roles.reference.lora: only actor and critic are",
        ),
        ('roles.actor.lora.targets=["q_prj"]', "roles.actor.lora: targets has 'q_prj', a matrix that the model lacks"),
        ("roles.actor.lora.rank=0", "rank=0"),
    ):
        assert trial.rljax("train", file, "--run-dir", folder / "refused", override) == 2
        assert message in capsys.readouterr().err
