"""The paper's claims about parallelism, as measured on compiled programs; numbers are those of the cost model.

Work is counted in the products of the compiled program of one device, state in its arguments, communication in its
collectives, and what is stored between the passes by how temporaries grow with the number of layers. XLA:CPU forms no
reduce-scatter by itself and reports no peak, so nothing here depends on either.

Claims 15 and 37, on experts, are in `test_moe.py`, and 21 is in `test_cost.py`.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import P
from jax.sharding import NamedSharding

from rljax.assess.advantages import GroupRelative
from rljax.generate.decode import generate
from rljax.generate.sampling import Sampling
from rljax.mesh import BATCH, Layout, Placement
from rljax.mesh.schedule import build, figures
from rljax.model.decoder import Decoder
from rljax.model.forward import logprobs
from rljax.model.moe import Experts
from rljax.model.table import abstract, map_table
from rljax.plan import cost, hlo, parts
from rljax.plan.flops import dot_flops
from rljax.plan.hlo import Collective, collectives
from rljax.train.losses import Clip
from rljax.train.objectives import Objective
from rljax.train.optimizer import AdamW
from rljax.train.step import start, update
from rljax.types import Assessed, Rollout, Tokens, TrainState

ROWS, TIME = 16, 32
M = Decoder(vocab=96, width=32, layers=5, heads=8, kv_heads=4, head_dim=8, ffn=80)  # five layers are scanned
STREAM = ROWS * TIME * M.width * 4  # bytes of the residual stream of all rows
AR, AG, RS, CP = "all-reduce", "all-gather", "reduce-scatter", "collective-permute"


def tokens(mesh):
    """(Tokens, mask) without values."""
    at = lambda dtype: jax.ShapeDtypeStruct((ROWS, TIME), dtype, sharding=NamedSharding(mesh, P(BATCH, None)))
    return Tokens(*[at(jnp.int32)] * 3), at(jnp.bool_)


class Program(NamedTuple):
    """An update, traced and compiled."""

    state: TrainState
    read: object  # what it reads of a batch
    flops: int  # of all devices, as traced
    text: str
    arguments: int  # bytes of a device
    temporary: int


def traced(m: Decoder, place: Placement):
    """An update, its state, and what it reads of a batch."""
    lm, mesh = m.build(), place.layout.mesh()
    optimizer = AdamW().build(10, map_table(lambda t: t.matrix, lm.table))
    ids, mask = tokens(mesh)
    row = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=NamedSharding(mesh, P(BATCH)))
    real = jax.ShapeDtypeStruct(mask.shape, jnp.float32, sharding=mask.sharding)
    batch = Assessed(Rollout(ids, mask, real, ids.ids, *[row] * 5), real, advantages=real)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda p: start(lm, p, optimizer, place.zero), abstract(lm.table, mesh, place.zero))
        run = lambda state, batch: update(
            state, batch, lm=lm, objective=Objective(Clip(), GroupRelative()), optimizer=optimizer, adjust=tiny.same,
            on_policy=False, strategy=place,
        )  # fmt: skip
        return jax.jit(run).trace(state, batch), state, (ids, mask, real, real, ids.ids)


@cache
def program(m: Decoder, place: Placement) -> Program:
    trace, state, read = traced(m, place)
    with jax.set_mesh(place.layout.mesh()):
        compiled = trace.lower().compile()
    memory = compiled.memory_analysis()
    return Program(
        state, read, dot_flops(trace.jaxpr), compiled.as_text(),
        memory.argument_size_in_bytes, memory.temp_size_in_bytes,
    )  # fmt: skip


def trained(layout: Layout, m: Decoder = M, **strategy) -> Program:
    return program(m, Placement(layout=layout, **strategy))


def held(tree) -> int:
    """Bytes of a device; scalars are on all."""
    share = lambda x: prod(x.sharding.shard_shape(x.shape)) if x.shape else 1
    return sum(share(x) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def arrays(text: str) -> list[Collective]:
    """Collectives, without the single numbers in them: those are metrics and norms."""
    found = []
    for c in collectives(text):
        several = [(dtype, shape) for dtype, shape in zip(c.dtypes, c.shapes, strict=True) if prod(shape) > 1]
        dtypes, shapes = zip(*several, strict=True) if several else ((), ())
        found += [c._replace(bytes=sum(hlo.size(*x) for x in several), shapes=shapes, dtypes=dtypes)] * bool(several)
    return found


def sent(text: str) -> dict[str, int]:
    """Bytes of a device by kind."""
    found = Counter()
    for c in arrays(text):
        found[c.kind] += c.times * c.sent
    return {kind: size for kind, size in found.items() if size}


def expected(layout: Layout, m: Decoder = M, **strategy) -> dict[str, int]:
    return cost.predict(m, Placement(layout=layout, **strategy), ROWS, TIME)["sent"]


def products(text: str) -> int:
    """FLOPs of the matrix products that a device computes, loops multiplied."""
    bodies, entry = hlo.parse(text)

    def walk(name: str) -> int:
        total, lines = 0, bodies[name]
        for line in lines.values():
            if line.op == "dot":
                contracted = hlo.numbers(line.text.partition("lhs_contracting_dims={")[2].partition("}")[0])
                lhs, out = lines[line.operands[0]].arrays[0][1], line.arrays[0][1]
                total += 2 * prod(out) * prod(lhs[d] for d in contracted)
            elif line.op == "while":
                total += hlo.trips(line, lines, bodies) * walk(hlo.named("body", line))
            else:
                total += sum(map(walk, hlo.called(line.text)))
        return total

    return walk(entry)


ONE = Layout()
WIDE = Decoder(vocab=4096, width=1024, layers=4, heads=16, kv_heads=8, head_dim=64, ffn=2048)
COUNTS = 8  # bytes of the optimizer's two counters
SCALARS = 8 + 4 + 12 + COUNTS  # and an update's number, how many were skipped, a KL coefficient, three moments


def claim_of_state(zero: int, paper):
    """That parameters, accumulated gradients and moments have so many elements on each of 8 devices, in all.

    Exactly of what fsdp splits; the scales of norms, 0.02 % of the parameters, it does not.
    """
    layout = Layout(fsdp=8)
    trace, state, _ = traced(WIDE, Placement(layout=layout, zero=zero, microbatches=2))
    loop = next(eqn for eqn in trace.jaxpr.eqns if eqn.primitive.name == "scan")
    gradients = [x.aval for x in loop.outvars[: len(jax.tree.leaves(state.params))]]
    stated = parts.state(WIDE, layout, zero)
    assert held(gradients) == stated.gradients
    assert held(state) == stated.params + stated.optimizer + SCALARS
    assert sum(stated) / 4 == pytest.approx(paper(parts.parameters(WIDE).total, 8), rel=2e-3)


def test_claim_01_zero_3_divides_all_state_by_the_ranks():
    """4 P / n; and a compiled update takes no more."""
    claim_of_state(3, lambda p, n: 4 * p / n)
    p = trained(Layout(fsdp=8))
    assert p.arguments == held((p.state, p.read))


def test_claim_02_zero_1_divides_the_optimizers_state():
    """2 P + 2 P / n; the parameters come whole."""
    claim_of_state(1, lambda p, n: 2 * p + 2 * p / n)
    p = trained(Layout(fsdp=8), DEEP, zero=1, microbatches=2)
    assert p.arguments == held((p.state, p.read))
    assert held(p.state.params) == 4 * parts.parameters(DEEP).total


DEEP = replace(M, width=128, ffn=320)  # weights outweigh activations


def test_claim_03_zero_2_divides_the_gradient_too():
    """P + 3 P / n: what is accumulated over microbatches is smaller by P (1 - 1/n)."""
    claim_of_state(2, lambda p, n: p + 3 * p / n)
    one, two = (trained(Layout(fsdp=8), DEEP, zero=zero, microbatches=2) for zero in (1, 2))
    assert one.arguments == two.arguments
    saved = parts.state(DEEP, Layout(fsdp=8), 1).gradients - parts.state(DEEP, Layout(fsdp=8), 2).gradients
    assert one.temporary - two.temporary == pytest.approx(saved, rel=0.05)  # less what waits to be scattered


def test_claim_04_data_parallelism_replicates_state_and_divides_work():
    """4 P on every device."""
    claim_of_state(0, lambda p, n: 4 * p)
    one, eight = trained(ONE), trained(Layout(data=8), zero=0)
    assert held(eight.state) == held(one.state)
    assert held(eight.read) == held(one.read) / 8
    assert products(eight.text) == products(one.text) / 8 == one.flops / 8 == eight.flops / 8


@cache
def forward(m: Decoder, layout: Layout):
    """Log-probabilities, compiled: what a frozen role does."""
    lm, mesh = m.build(), layout.mesh()
    with jax.set_mesh(mesh):
        ids, mask = tokens(mesh)
        run = jax.jit(lambda params, *args: logprobs(lm, params, *args)[0])
        return run.lower(abstract(lm.table, mesh, 0), ids, mask).compile()


def test_claim_05_data_parallel_inference_and_generation_send_nothing():
    """But, in generation, whether every row has ended."""
    lm, mesh = M.build(), Layout(data=8).mesh()
    at = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P(BATCH)))
    run = jax.jit(
        lambda params, *args: generate(
            lm, params, *args, jax.random.key(0), jnp.int32(0), Sampling(), n=2, max_new=9, stop=(1,), chunk=4
        )
    )
    with jax.set_mesh(mesh):
        text = run.lower(abstract(lm.table, mesh, 0), at(8, 8), at(8), at(8)).compile().as_text()
    assert arrays(text) == []
    assert {(c.kind, c.dtypes) for c in collectives(text)} == {(AR, ("pred",))}
    assert collectives(forward(M, Layout(data=8)).as_text()) == []


def test_claim_06_data_parallel_training_sums_one_gradient():
    p = trained(Layout(data=8), zero=0)
    assert sent(p.text) == {AR: 2 * 7 * 4 * parts.parameters(M).total // 8}
    assert all(c.loops == 0 for c in arrays(p.text))


def streams(text: str) -> Counter:
    """How often collectives of the whole residual stream run in loops over layers, by kind."""
    found = Counter()
    for c in arrays(text):
        found[c.kind] += c.times * (c.loops > 0 and c.bytes == STREAM)
    return +found


@pytest.mark.parametrize("remat, sums", [("none", 4), ("names", 4), ("block", 5)])
def test_claim_07_tensor_parallelism_sums_the_stream_four_times_a_layer(remat, sums):
    """Two forward and two backward; five times where a block is recomputed, and that is all that is sent."""
    layout = Layout(tensor=4)
    p = trained(layout, remat=remat)
    assert streams(p.text) == {AR: sums * M.layers}
    assert sent(p.text) == expected(layout, remat=remat)


def test_claim_08_tensor_parallelism_divides_parameters_and_work():
    """Exactly, but for the scales of norms."""
    one, four = trained(ONE), trained(Layout(tensor=4))
    assert products(four.text) == products(one.text) / 4
    vectors = sum(part.size for part in parts.parts(M) if not part.matrix)
    assert held(four.state.params) == 4 * (vectors + (parts.parameters(M).total - vectors) // 4)
    assert four.arguments == held((four.state, four.read))


@cache
def stored(layout: Layout, **strategy) -> float:
    """Bytes of a device that each further layer keeps from the forward to the backward pass.

    The gradient is the embedding's alone: it goes through all layers, and none of theirs is kept.
    """
    strategy, mesh = Placement(layout=layout, **strategy), layout.mesh()

    def temporary(layers: int) -> int:
        lm = replace(M, layers=layers).build()
        loss = lambda embed, params, *args: jnp.sum(
            logprobs(lm, params.replace(embed=embed), *args, strategy=strategy)[0]
        )
        with jax.set_mesh(mesh):
            params = abstract(lm.table, mesh)
            run = jax.jit(jax.grad(loss)).lower(params.embed, params, *tokens(mesh))
            return run.compile().memory_analysis().temp_size_in_bytes

    return (temporary(32) - temporary(24)) / 8


def test_claim_09_sequence_parallelism_divides_what_is_stored():
    """Under full recomputation that is the stream alone: whole on every device, or exactly 1/n of it."""
    layout = Layout(tensor=4)
    assert stored(layout) == STREAM
    assert stored(layout, sequence_parallel=True) == STREAM / 4


def test_claim_10_sequence_parallelism_sends_what_tensor_parallelism_sends():
    """Without recomputation: each all-reduce is an all-gather and a reduce-scatter of the same bytes. Under it, inputs
    that were stored whole are gathered again: 11 such halves a layer for 10."""
    moved = {}
    for remat in ("none", "block"):
        for sp in (False, True):
            layout = Layout(tensor=4)
            p = trained(layout, remat=remat, sequence_parallel=sp)
            whole = [c for c in arrays(p.text) if c.bytes in (STREAM, STREAM // 4)]
            moved[remat, sp] = sum(c.times * c.sent for c in whole)
            assert sent(p.text) == expected(layout, remat=remat, sequence_parallel=sp)
    half = STREAM * 3 // 4
    assert moved["none", True] == moved["none", False] == half * (8 * M.layers + 4)
    assert moved["block", False] == half * (10 * M.layers + 4)
    assert moved["block", True] == half * (11 * M.layers + 4)


CONTEXTS = ("gather", "ring", "ulysses")


def test_claim_11_context_parallelism_divides_the_work_of_a_sequence():
    """All of it, attention included. The tiles of rings of any size are in all as many."""
    for context in ("gather", "ulysses"):
        assert products(trained(Layout(seq=4), context=context).text) == products(trained(ONE).text) / 4
    ring = [Placement(layout=Layout(seq=n), context="ring") for n in (2, 8)]
    two, eight = (dot_flops(traced(M, place)[0].jaxpr) for place in ring)
    assert two == eight == trained(Layout(seq=4), context="ring").flops
    assert [cost.train(M, place, ROWS, TIME) for place in ring] == [two / 2, eight / 8]


@pytest.mark.parametrize("context", CONTEXTS)
def test_claim_11_context_parallelism_computes_exact_attention(context):
    m, (ids, mask, *_) = tiny.MODELS["plain"], tiny.tokens()
    lm, mesh, strategy = m.build(), Layout(seq=2).mesh(), Placement(layout=Layout(seq=2), context=context)
    with jax.set_mesh(mesh):
        args = jax.device_put((tiny.weights("plain"), ids, mask), NamedSharding(mesh, P()))
        args = args[0], *tiny.place(args[1:], mesh)
        logp = jax.jit(lambda *args: logprobs(lm, *args, strategy=strategy)[0])(*args)
    logits = tiny.oracle(m, tiny.weights("plain"), ids.ids, ids.positions, ids.segments)
    np.testing.assert_allclose(logp, tiny.oracle_logprobs(logits, ids.ids, mask)[0], atol=1e-5)


@pytest.mark.parametrize("context", CONTEXTS)
def test_claim_12_context_parallelism_exchanges_keys_and_values_only(context):
    """In layers; "ulysses" queries and outputs too. After the loops gradients are summed, and numbers of tokens made
    whole."""
    layout = Layout(seq=4)
    p = trained(layout, context=context)
    assert sent(p.text) == expected(layout, context=context)
    kind = {"gather": {AG, RS}, "ring": {CP}, "ulysses": {"all-to-all"}}[context]
    inside = [c for c in arrays(p.text) if c.loops]
    assert {c.kind for c in inside} == kind
    if context != "ulysses":
        block = ROWS * TIME // 4 * M.kv_heads * M.head_dim
        assert {prod(shape) for c in inside for shape in c.shapes} <= {block, 4 * block}


def test_claim_13_pipelines_divide_state_and_talk_to_neighbours_only():
    """The layers' state by p; the rest lies on all stages. Each tick activations go on, and cotangents back; all that
    stages send besides are the gradients of the embedding, the norm and the head, once."""
    m, place = replace(M, layers=8), Placement(layout=Layout(fsdp=2, pipe=4), microbatches=4)
    p = program(m, place)
    layers = sum(part.share(Layout(fsdp=2)) for part in parts.parts(m) if part.layers)
    ends = sum(part.share(Layout(fsdp=2)) for part in parts.parts(m) if not part.layers)
    assert held(p.state.params) == 4 * (layers // 4 + ends)
    assert p.arguments == held((p.state, p.read))
    across = [c for c in arrays(p.text) if any(len({d % 4 for d in group}) > 1 for group in c.groups)]  # fsdp, pipe
    ticks = [c for c in across if c.loops]
    assert {c.kind for c in ticks} == {CP}
    assert {(b - a) % 4 for c in ticks for a, b in map(sorted, c.groups)} == {1, 3}
    found = cost.sent(m, place, ROWS, TIME)
    assert sum(c.times * c.sent for c in ticks) == found[CP, "pipe"]
    once = [size for c in across if not c.loops for size in c.shapes if size != (4,)]  # but numbers of microbatches
    assert 2 * 3 * 4 * sum(map(prod, once)) // 4 == found[AR, "pipe"]


def test_claim_14_an_spmd_pipeline_computes_its_bubble():
    """Of time, (p - 1) / m is idle for 1 that is busy, in GPipe and 1F1B. A forward pass in which every stage computes
    in every tick does (m + p - 1) / m times the work."""
    stages, microbatches = 8, 16
    for name in ("gpipe", "1f1b"):
        assert figures(build(name, stages, microbatches))["bubble"] == pytest.approx((stages - 1) / microbatches)
    m, place = replace(M, layers=8), Placement(layout=Layout(pipe=stages), microbatches=microbatches)
    lm, mesh = m.build(), place.layout.mesh()
    with jax.set_mesh(mesh):
        run = lambda params, *args: logprobs(lm, params, *args, strategy=place)[0]
        trace = jax.jit(run).trace(abstract(lm.table, mesh), *tokens(mesh))
    ticks = microbatches + stages - 1
    head = stages * ticks * cost.logits(m, ROWS * TIME // microbatches)  # traced once, though the last stage's alone
    work = cost.blocks(m, ROWS * TIME, ROWS * TIME**2).total
    assert dot_flops(trace.jaxpr) - head == 1.4375 * work


FIVE = Layout(data=2, fsdp=2, seq=2, tensor=2, expert=2)


def test_claim_17_five_axes_divide_work():
    """Each of 32 devices computes 1/32: of dense layers as compiled, of experts, at capacity 1, as traced."""
    assert products(trained(FIVE).text) == products(trained(ONE).text) / 32
    even = replace(M, experts=Experts(8, 2, 16, dispatch="exchange", capacity=1.0))
    one, five = (traced(even, Placement(layout=layout))[0] for layout in (ONE, FIVE))
    assert dot_flops(one.jaxpr) == dot_flops(five.jaxpr)


@pytest.mark.parametrize(
    "layout",
    [
        FIVE,
        pytest.param(Layout(fsdp=2, pipe=2, seq=2, tensor=2, expert=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_claim_17_five_axes_divide_state_and_change_no_number(layout):
    """Each tensor by the axes of its own, matrices by fsdp and tensor, those of experts by expert too."""
    m, batch = tiny.MODELS["experts"], tiny.batch("experts")
    result = tiny.step("experts", layout, microbatches=layout.pipe)(batch)
    one = tiny.step("experts")(batch)
    assert result.loss == pytest.approx(one.loss, rel=1e-5)
    assert tiny.distance(result.grads, one.grads) < 2e-5
    stated = parts.state(m, layout, 3)
    assert held(result.state.params) == stated.params
    gate = result.state.params.layers.gate
    assert held(gate) == 4 * gate.size // (8 * layout.pipe)


def test_claim_22_recomputation_stores_less_for_a_third_more_work():
    """Blocks run forward again, but for their last product, whose result no gradient needs: with the gradient that is a
    third more, at most."""
    layout = Layout(tensor=4)
    none, block = (products(trained(layout, remat=remat).text) for remat in ("none", "block"))
    work = cost.blocks(M, ROWS * TIME, ROWS * TIME**2)
    assert block - none == (work.total - work.down) / 4
    assert 1 < block / none < 4 / 3
    assert stored(layout) < 0.2 * stored(layout, remat="none")


def test_claim_26_a_frozen_forward_pass_stores_nothing_a_layer():
    """Of 24 layers more it needs no byte more."""
    few, many = (forward(replace(M, layers=n), ONE).memory_analysis().temp_size_in_bytes for n in (8, 32))
    assert few == many


@pytest.mark.parametrize(
    "layout", [ONE, Layout(data=2, tensor=4), Layout(tensor=8), Layout(fsdp=2, seq=2, expert=2)], ids=str
)
def test_claim_27_caches_divide_over_heads_and_tokens(layout):
    """Beyond key/value heads, 4 here, tensor divides them no further."""
    lm, mesh, place = M.build(), layout.mesh(), Placement(layout=layout)
    at = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P(BATCH)))
    with jax.set_mesh(mesh):
        begin = lambda params, ids, lengths: lm.prefill(params, ids, lengths, place)[1]
        made = jax.eval_shape(begin, abstract(lm.table, mesh, 0), at(ROWS, TIME), at(ROWS))
    each = 2 * M.layers * M.kv_heads * M.head_dim * 4
    ways = layout.rows * layout.seq * min(layout.tensor, M.kv_heads)
    assert held(made) == cost.cache(M, layout, ROWS, TIME) == ROWS * TIME * each // ways


@pytest.mark.parametrize("remat", ["none", "names", "block", "offload"])
def test_weights_are_gathered_again_in_the_backward_pass(remat):
    """Whatever remat keeps, it keeps no gathered weight, and gradients are scattered: at ZeRO-3 twice what a layer has
    is gathered and once its gradient scattered."""
    p = trained(Layout(fsdp=8), remat=remat)
    assert sent(p.text) == expected(Layout(fsdp=8), remat=remat)
    inside = Counter()
    for c in arrays(p.text):
        inside[c.kind] += c.times * (c.loops > 0)
    assert inside[AG] == 2 * 7 * M.layers and inside[RS] == 7 * M.layers


RICH = replace(M, qk_norm="head", qkv_bias=True, tied=True)
ROUTED = Experts(8, 2, 16)
MIXED = replace(M, experts=replace(ROUTED, shared=24, bias_rate=0.01))
EXCHANGED = replace(M, experts=replace(ROUTED, dispatch="exchange"))
COMBINED = {
    "zero 2": (M, Layout(data=2, fsdp=2), dict(zero=2, microbatches=2)),
    "tied": (RICH, Layout(fsdp=2, seq=2, tensor=2), dict(remat="names")),
    "ring": (RICH, Layout(fsdp=2, seq=2, tensor=2), dict(context="ring", sequence_parallel=True, microbatches=2)),
    "few heads": (M, Layout(tensor=8), dict(sequence_parallel=True)),
    "experts": (MIXED, Layout(fsdp=2, tensor=2, expert=2), {}),
    "experts, sequence": (MIXED, Layout(fsdp=2, seq=2, tensor=2, expert=2), dict(sequence_parallel=True)),
    "exchange": (EXCHANGED, Layout(expert=4), dict(remat="none")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMBINED)
def test_layouts_together_send_what_closed_forms_say(case):
    """To two parts in a thousand: what balances experts, a number for each of them, is left out."""
    m, layout, strategy = COMBINED[case]
    assert sent(trained(layout, m, **strategy).text) == pytest.approx(expected(layout, m, **strategy), rel=2e-3)
