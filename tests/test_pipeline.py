"""Law: pipelines compute the single device's update and log-probabilities, in every schedule, beside every other axis.
What crosses a stage is what the table says; what a device computes is what its ops cost."""

from dataclasses import replace
from functools import cache, partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import P
from test_layouts import agree
from tiny import MODELS, ONE, ROWS, TIME

from rljax.mesh import BATCH, Layout, Placement, Strategy
from rljax.mesh.schedule import SCHEDULES, build, legal
from rljax.mesh.verbs import axes_of
from rljax.model import attention, manual
from rljax.model.decoder import Decoder
from rljax.model.forward import hidden, logprobs, read
from rljax.model.microbatches import cut
from rljax.model.pipeline import forward, value_and_grad
from rljax.model.table import abstract, init, map_table, misfits, shardings
from rljax.plan.flops import dot_flops, flops_of
from rljax.plan.hlo import collectives
from rljax.types import Tokens

OLD = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)
FOUR = Layout(pipe=4, fsdp=2), dict(microbatches=4, schedule="1f1b")

CASES = {  # model, layout, strategy
    "sequence parallel": ("rich", Layout(pipe=2, fsdp=2, tensor=2),
                          dict(microbatches=4, schedule="1f1b", sequence_parallel=True)),
    "gathered keys": ("rich", Layout(pipe=2, data=2, seq=2), dict(microbatches=4, schedule="dualpipe", zero=0)),
    "ulysses": ("deep", Layout(pipe=2, fsdp=2, seq=2),
                dict(microbatches=4, schedule="zb-v", context="ulysses", zero=2)),
    "ring": ("rich", Layout(pipe=2, fsdp=2, seq=2), dict(microbatches=2, context="ring")),
    "four stages": ("deep", *FOUR),
    "interleaved": ("deep", Layout(pipe=2, data=2), dict(microbatches=4, schedule="interleaved")),
    "zb-h1": ("deep", Layout(pipe=4, tensor=2), dict(microbatches=4, schedule="zb-h1")),
}  # fmt: skip
SLOW = {
    "zero 1": ("plain", Layout(pipe=2, data=2, fsdp=2, tensor=2), dict(microbatches=2, zero=1)),
    "experts": ("deepseek", Layout(pipe=2, fsdp=2, expert=2), dict(microbatches=2, schedule="1f1b", remat="names")),
    "zb-v": ("deep", Layout(pipe=2, fsdp=2, tensor=2), dict(microbatches=4, schedule="zb-v")),
    "dualpipe": ("rich", Layout(pipe=2, fsdp=2, tensor=2), dict(microbatches=4, schedule="dualpipe", zero=2)),
    "tensor beyond key/value heads": ("plain", Layout(pipe=2, tensor=4), dict(microbatches=2, schedule="zb-h1")),
    "zero 3": ("plain", Layout(pipe=2, fsdp=2, tensor=2), dict(microbatches=4, schedule="zb-h1", remat="none")),
    "zero 0": ("plain", Layout(pipe=2, fsdp=2, tensor=2), dict(microbatches=2, zero=0)),
    "ring of four": ("deep", Layout(pipe=4, seq=4), dict(microbatches=4, context="ring", sequence_parallel=True)),
    "exchange": ("exchange", Layout(pipe=2, seq=2, expert=2), dict(microbatches=4, schedule="zb-h1", zero=1)),
    "experts, tensor": ("experts", Layout(pipe=2, tensor=2, expert=2), dict(microbatches=2, sequence_parallel=True)),
    "offload": ("plain", Layout(pipe=2, fsdp=2), dict(microbatches=2, schedule="1f1b", remat="offload")),
    "five axes": ("deep", Layout(data=2, pipe=2, seq=2, tensor=2, fsdp=2), dict(microbatches=2, schedule="1f1b")),
}  # fmt: skip


@pytest.mark.parametrize("case", tiny.ordinary(CASES | SLOW, *SLOW, "ulysses"))
def test_a_pipeline_computes_the_single_device_update(case):
    model, layout, strategy = (CASES | SLOW)[case]
    result = tiny.step(model, layout, **strategy)(tiny.batch(model))
    agree(result, tiny.step(model)(tiny.batch(model)))


def test_state_divides_by_stages():
    """Costs, claim 13: parameters, gradient and moments of layers, but not of what every stage has."""
    layout, strategy = FOUR
    result = tiny.step("deep", layout, **strategy)(tiny.batch("deep"))
    _, moments = result.state.optimizer[1][1][0][1:]

    def held(t, *arrays):
        ways = prod(getattr(layout, axis) for entry in t.spec.partitions for axis in axes_of(entry))
        assert ways % layout.pipe == 0 or "L" not in t.dims.split()
        assert [x.addressable_shards[0].data.size * ways for x in arrays] == [t.size] * 3, t.name

    map_table(held, MODELS["deep"].build().table, result.state.params, result.sharded, moments)


def stages_of(layout: Layout, device: int) -> int:
    return int(np.unravel_index(device, layout.sizes)[2])


def test_stages_exchange_one_microbatch_each_way_a_tick_and_nothing_else():
    """Costs, claim 13."""
    layout, strategy = FOUR
    ticks = len(build("1f1b", 4, 4).table["op"])
    found = collectives(tiny.step("deep", layout, **strategy).text)
    across = [c for c in found if any(len({stages_of(layout, d) for d in group}) > 1 for group in c.groups)]
    within = [c for c in across if c.loops]
    rows = ROWS // layout.fsdp // strategy["microbatches"]
    assert [(c.kind, c.shapes, c.times) for c in within] == [("collective-permute", ((rows, TIME, 32),), ticks)] * 2
    assert all(c.exact for c in within)
    hops = {(stages_of(layout, b) - stages_of(layout, a)) % 4 for c in within for a, b in map(sorted, c.groups)}
    assert hops == {1, 3}
    assert {c.kind for c in across if not c.loops} == {"all-reduce"}  # of the gradient of the head, and of metrics


@pytest.mark.skipif(OLD, reason="JAX 0.10 gathers weights over tensor where they enter the pipeline")
def test_weights_are_gathered_over_fsdp_alone():
    layout = Layout(pipe=2, fsdp=2, tensor=2)
    found = collectives(tiny.step("rich", layout, **CASES["sequence parallel"][2]).text)
    gathered = [c for c in found if c.kind == "all-gather" and not c.loops]
    assert not [c for c in gathered if any(len({d % 2 for d in group}) > 1 for group in c.groups)]


@cache
def scored(model: str, layout: Layout, **strategy):
    lm, mesh, strategy = MODELS[model].build(), layout.mesh(), Strategy(**strategy)
    rollout = tiny.batch(model).rollout
    with jax.set_mesh(mesh):
        params = jax.device_put(tiny.weights(model), shardings(lm.table, mesh, strategy.zero))
        score = jax.jit(lambda *args: logprobs(lm, *args, strategy=strategy, logits=4 * ROWS * 48)[:2])
        return jax.device_get(score(params, *tiny.place((rollout.tokens, rollout.mask), mesh)))


@pytest.mark.parametrize(
    "layout, strategy",
    [
        (Layout(pipe=4, tensor=2), dict(microbatches=8, zero=0)),
        pytest.param(Layout(pipe=2, fsdp=2, seq=2), dict(microbatches=4, context="ring"), marks=pytest.mark.slow),
        pytest.param(Layout(pipe=2, data=2, seq=2), dict(microbatches=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_log_probabilities_through_a_pipeline(layout, strategy):
    tok, mask = tiny.batch("deep").rollout.tokens, tiny.batch("deep").rollout.mask
    logits = tiny.oracle(MODELS["deep"], tiny.weights("deep"), tok.ids, tok.positions, tok.segments)
    for got, expected in zip(scored("deep", layout, **strategy), tiny.oracle_logprobs(logits, tok.ids, mask)):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.slow
def test_the_tpu_kernel_has_its_gradient_within_a_pipeline(monkeypatch):
    """Interpreted, on tokens split over seq, with the backward pass in halves."""
    lm = Decoder(vocab=48, width=32, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=32).build()
    ids = np.random.default_rng(0).integers(1, 48, (4, 256)).astype(np.int32)
    segments = np.where(np.arange(256) < 100, 1, 2) * np.ones((4, 1), np.int32)
    batch = Tokens(ids, np.arange(256, dtype=np.int32) * np.ones_like(ids), segments.astype(np.int32)), segments > 0

    def gradient(layout, strategy):
        def one(params, tokens, mask):
            return jnp.sum(logprobs(lm, params, tokens, mask, strategy=strategy)[0])

        def pipelined(params, tokens, mask):
            tokens, mask = cut((tokens, mask), strategy.microbatches)
            none = lambda logits, target: logits
            tail = lambda head, x, part: (
                jnp.sum(read(lm, head, lm.norm(head, x), *part, none, strategy).logp), (),
            )  # fmt: skip
            return value_and_grad(lm, params, tokens, (tokens.ids, mask), jnp.float32(0), tail, strategy)[3]

        mesh = layout.mesh()
        with jax.set_mesh(mesh):
            params = jax.jit(lambda: init(lm.table, jax.random.key(0)))()
            run = pipelined if layout.pipe > 1 else jax.grad(one)
            return jax.device_get(jax.jit(run)(params, *tiny.place(batch, mesh)))

    expected = gradient(ONE, Strategy())
    monkeypatch.setitem(attention.FORMS, "auto", partial(attention.splash, interpret=True))
    got = gradient(Layout(pipe=2, seq=2), Strategy(microbatches=2, schedule="zb-h1"))
    assert tiny.distance(got, expected) < 2e-5


STAGES = 4


def _arguments(layers: int, mesh):
    """A model of so many layers and what pipelines read, without values."""
    lm, where = replace(MODELS["deep"], layers=layers).build(), jax.NamedSharding(mesh, P(BATCH, None))
    tokens = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tiny.tokens()[0])
    return lm, abstract(lm.table, mesh), tokens


def _added(count) -> int:
    """What 4 more layers than 4 add to a count: embedding, head and loss cancel."""
    return count(8) - count(4)


def _layers_of_one_device() -> int:
    """FLOPs of a forward pass of all rows through 4 layers."""
    mesh = ONE.mesh()

    def count(layers):
        lm, *args = _arguments(layers, mesh)
        return flops_of(lambda params, tokens: hidden(lm, params, tokens)[0], *args)

    with jax.set_mesh(mesh):
        return _added(count)


@pytest.mark.parametrize("microbatches", [2, 4, 16])
def test_a_forward_pipeline_takes_its_bubble(microbatches):
    """Costs, claim 14: the time of M + S - 1 microbatches on an S-th of the layers, counted as what some stage does."""
    mesh = Layout(pipe=STAGES).mesh()

    def count(layers):
        lm, params, tokens = _arguments(layers, mesh)

        def run(params, tokens):
            tokens = cut(tokens, microbatches)
            return forward(lm, params, tokens, tokens.ids, lambda head, x, part: part, Strategy())[0]

        return flops_of(run, params, tokens)

    with jax.set_mesh(mesh):
        assert _added(count) * microbatches == _layers_of_one_device() * (microbatches + STAGES - 1)


@pytest.mark.parametrize("schedule, remat", [("1f1b", "none"), ("1f1b", "block"), ("zb-h1", "block")])
def test_ops_cost_what_they_are_said_to(schedule, remat):
    """Costs, claim 14: idle ticks compute nothing, so the FLOPs of a device are those of its ops."""
    microbatches, mesh = 4, Layout(pipe=STAGES).mesh()

    def ops(layers):
        lm, params, tokens = _arguments(layers, mesh)
        tail = lambda head, x, part: (jnp.sum(x), ())

        def run(params, tokens):
            tokens = cut(tokens, microbatches)
            strategy = Strategy(schedule=schedule, remat=remat)
            return value_and_grad(lm, params, tokens, tokens.ids, jnp.float32(0), tail, strategy)[3]

        jaxpr = jax.make_jaxpr(run)(params, tokens).jaxpr
        branches = [eqn.params["branches"] for eqn in tiny.equations(jaxpr) if eqn.primitive.name == "cond"]
        return np.array([dot_flops(branch) for branch in max(branches, key=len)])

    with jax.set_mesh(mesh):
        whole = _layers_of_one_device() // microbatches // STAGES
        tokens, m = ROWS * TIME // microbatches, MODELS["deep"]
        matrices = 2 * tokens * m.width * (2 * m.heads * m.head_dim + 2 * m.kv_heads * m.head_dim + 3 * m.ffn)
        again = whole - 2 * tokens * m.width * m.ffn  # nothing reads what a block's last product would be
        backward = [3 * whole + again * (remat == "block")] * 3  # of a part in the middle, the last, the first
        if schedule == "zb-h1":  # of attention, all of the backward pass is in BI
            backward = [*(cost - matrices for cost in backward), matrices]
        assert _added(ops).tolist() == [0, whole, whole, *backward]


@pytest.mark.parametrize("name", SCHEDULES)
def test_layers_reach_their_parts_and_come_home(name):
    part, mesh = build(name, 4, 8).part, Layout(pipe=4).mesh()
    parts = int(part.max()) + 1
    layers = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)

    def both(x):
        work = manual.deal(part, x)
        return work[None], manual.home(part, work)

    with jax.set_mesh(mesh):
        run = jax.shard_map(both, axis_names=set(manual.MANUAL), in_specs=P("pipe"), out_specs=P("pipe"))
        x = jax.device_put(layers, jax.NamedSharding(mesh, P("pipe", None)))
        work, back = jax.device_get(jax.jit(run)(x))
    np.testing.assert_array_equal(work, layers.reshape(parts, -1, 3)[part])
    np.testing.assert_array_equal(back, layers * (4 * part.shape[1] // parts))  # once for every device that has it


@pytest.mark.parametrize("name", SCHEDULES)
def test_parts_travel_by_permutations(name):
    for stages in [S for S in (2, 3, 4, 5, 8, 16, 64) if legal(name, S, 2 * S) is None]:
        part = build(name, stages, 2 * stages).part
        rounds = list(manual._rounds(part, (int(part.max()) + 1) // stages))
        assert all(sorted(source for source, _ in pairs) == list(range(stages)) for pairs, *_ in rounds)
        assert len(rounds) == part.shape[1]


@pytest.mark.parametrize(
    "layout, strategy, said",
    [
        (Layout(pipe=2, seq=2), dict(context="ring", schedule="1f1b"), 'needs schedule = "gpipe"'),
        (Layout(pipe=4), {}, "2 layers do not divide into pipe = 4 equal parts, as gpipe needs: pipe = 2 would"),
        (Layout(pipe=2), dict(schedule="interleaved", microbatches=2), "2 layers do not divide"),
        (Layout(pipe=2), dict(schedule="dualpipe", microbatches=2), "4 would fit"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(layout, strategy, said):
    (line,) = misfits(MODELS["plain"].build(), Placement(layout=layout, **strategy))
    assert said in line
