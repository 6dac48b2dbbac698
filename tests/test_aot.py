"""Law: the update that trains compiles for chips that are not there, on every layout, with the state that the table
says, the collectives of its layout, and no array made whole by accident.

Run as a program, `python test_aot.py CASE [CHANGES]` compiles one and prints what it needs; the changes are JSON.
"""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import NamedSharding

from rljax.assess.advantages import GroupRelative
from rljax.errors import RunFailed, UserError
from rljax.mesh import BATCH, Layout, Strategy
from rljax.mesh.verbs import axes_of, without
from rljax.model.decoder import Decoder
from rljax.model.moe import Experts
from rljax.model.table import abstract, is_tensor, map_table
from rljax.plan.topology import apart, report, topology
from rljax.run.place import OPTIONS
from rljax.train.losses import Clip
from rljax.train.objectives import Objective
from rljax.train.optimizer import AdamW
from rljax.train.reductions import sequence_mean_token_mean
from rljax.train.step import start, update
from rljax.types import Assessed, Rollout, Tokens

ROWS = 16
MODEL = dict(vocab=512, width=256, heads=8, kv_heads=4, head_dim=64, ffn=512, compute="bfloat16")
EXPERTS = Experts(count=8, top_k=2, width=256, balance=0.01)
AR, AG, RS, A2A, CP = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"


class Case(NamedTuple):
    chips: str
    layout: Layout
    kinds: set[str]  # of its collectives
    strategy: dict = {}
    layers: int = 6  # scanned; few layers are unrolled
    experts: Experts | None = None

    @property
    def model(self) -> Decoder:
        return Decoder(**MODEL, layers=self.layers, experts=self.experts)


LAYOUTS = {
    "data": (Layout(data=8), {AR}, dict(zero=0)),
    "zero 1": (Layout(data=2, fsdp=4), {AR, AG, RS}, dict(zero=1, microbatches=2)),
    "zero 2": (Layout(data=2, fsdp=4), {AR, AG, RS}, dict(zero=2, microbatches=2)),
    "fsdp": (Layout(fsdp=8), {AR, AG, RS}, {}),
    "microbatches": (Layout(data=2, fsdp=4), {AR, AG, RS}, dict(microbatches=2)),
    "offload": (Layout(fsdp=8), {AR, AG, RS}, dict(remat="offload")),
    "tensor": (Layout(tensor=4, data=2), {AR}, dict(zero=0)),
    "tensor beyond key/value heads": (Layout(tensor=8), {AR, AG, RS}, {}),
    "sequence parallel": (Layout(tensor=4, data=2), {AR, AG, RS}, dict(zero=0, sequence_parallel=True)),
    "gathered keys": (Layout(fsdp=2, seq=2, tensor=2), {AR, AG, RS}, {}),
    "ring": (Layout(fsdp=2, seq=4), {AR, AG, RS, CP}, dict(context="ring")),
    "ulysses": (Layout(fsdp=2, seq=4), {AR, AG, RS, A2A}, dict(context="ulysses")),
    "pipe": (Layout(pipe=2, fsdp=2, tensor=2), {AR, AG, RS, CP}, dict(microbatches=4, schedule="1f1b")),
}
GATHER, EXCHANGE = {"experts": EXPERTS}, {"experts": replace(EXPERTS, dispatch="exchange", capacity=2.0)}
EXPERT_LAYOUTS = {
    "experts gathered": (Layout(fsdp=2, tensor=2, expert=2), {AR, AG, RS}, {}, GATHER),
    "experts exchanged": (Layout(fsdp=2, expert=4), {AR, AG, RS, A2A}, {}, EXCHANGE),
}
CASES = {"tiny": Case("v5e:2x4", Layout(fsdp=4, tensor=2), {AR, AG, RS}, layers=2)} | {
    f"{chips} {name}": Case(chips, layout, kinds, strategy, **(more[0] if more else {}))
    for chips in ("v5e:2x4", "v5p:2x2x2", "h100:8")
    for name, (layout, kinds, strategy, *more) in {**LAYOUTS, **EXPERT_LAYOUTS}.items()
}
for name in ("fsdp", "offload", "tensor beyond key/value heads"):
    # over three dimensions of a torus XLA scatters no sum: every device gets the whole
    CASES[f"v5p:2x2x2 {name}"] = CASES[f"v5p:2x2x2 {name}"]._replace(kinds={AR, AG})


def compiled(case: Case):
    """The update of a decoder on sequences of 128 tokens for each part of the seq axis."""
    mesh, strategy = case.layout.mesh(topology(case.chips)), Strategy(**case.strategy)
    lm = case.model.build()
    objective = Objective(Clip(0.2, 0.28), GroupRelative(), sequence_mean_token_mean, kl=0.1, entropy=0.01)
    optimizer = AdamW(lr=1e-2).build(10, map_table(lambda t: t.matrix, lm.table))

    def rows(dtype, *shape):
        where = NamedSharding(mesh, P(BATCH, *(None,) * len(shape)))
        return jax.ShapeDtypeStruct((ROWS, *shape), dtype, sharding=where)

    time = 128 * case.layout.seq
    n, ids, mask, logp = rows(jnp.int32), *(rows(dtype, time) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
    rollout = Rollout(Tokens(ids, ids, ids), mask, logp, ids, n, n, n, n, n)
    batch = Assessed(rollout, rows(jnp.float32, 1), advantages=logp, ref_logp=logp)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(
            lambda params: start(lm, params, optimizer, strategy.zero), abstract(lm.table, mesh, strategy.zero)
        )
        run = lambda state, batch: update(
            state, batch, lm=lm, objective=objective, optimizer=optimizer, adjust=lambda logits, target: logits,
            on_policy=False, strategy=strategy,
        )  # fmt: skip
        return jax.jit(run, donate_argnums=0).lower(state, batch).compile(OPTIONS)


def state_bytes(case: Case) -> int:
    """Of one device: float32 parameters and two moments, each split as the ZeRO level says."""
    zero = case.strategy.get("zero", 3)

    def split(t, sharded):
        spec = t.spec if sharded else without(t.spec, "fsdp")
        return t.size // prod(getattr(case.layout, axis) for entry in spec for axis in axes_of(entry))

    table = jax.tree.leaves(case.model.build().table, is_leaf=is_tensor)
    return 4 * sum(split(t, zero == 3) + 2 * split(t, zero >= 1) for t in table)


def batch_bytes(case: Case) -> int:
    """At most: 9 arrays of a word for each token of a device, and 7 of one for each row, in pages of 512 bytes."""
    rows = ROWS // case.layout.rows
    return 9 * max(512, 4 * rows * 128 * case.layout.seq) + 7 * 512


def gathered_bytes(case: Case) -> int:
    """That a device sends at ZeRO-3: matrices in bfloat16, those of blocks once more as they are recomputed."""
    table = case.model.build().table
    matrices = lambda part: sum(t.size for t in jax.tree.leaves(part, is_leaf=is_tensor) if t.matrix)
    passes = matrices(table) + matrices(table.layers)
    n = case.layout.fsdp
    return case.strategy.get("microbatches", 1) * 2 * passes // case.layout.tensor // n * (n - 1)


def available(chips: str, pipe: int = 1) -> list[pytest.MarkDecorator]:
    package = "jax_cuda12_plugin" if chips.startswith("h100") else "libtpu"
    old = pipe > 1 and jax.__version_info__ < (0, 12)
    return [
        pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}: pip install rljax[compile]"),
        pytest.mark.skipif(old, reason="this JAX's TPU compiler aborts over pipelines: rljax refuses them there"),
    ]


def check(name: str) -> None:
    case, needs = CASES[name], apart(__file__, name)
    state, held = state_bytes(case), needs["bytes"]
    assert state <= held["arguments"] <= 1.002 * state + batch_bytes(case)
    assert held["alias"] >= state  # the new state takes the place of the old
    assert held["peak"] > held["arguments"]
    assert {*needs["collectives"]} == case.kinds
    assert needs["exact"] and needs["rematerialized"] == []
    if name.endswith(("tiny", "fsdp", "microbatches", "offload")):  # weights are all that is gathered
        assert needs["collectives"][AG]["bytes"] == gathered_bytes(case)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install rljax[compile]")
def test_an_update_compiles_for_a_tpu():
    check("tiny")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=available(c.chips, c.layout.pipe)) for n, c in CASES.items() if n != "tiny"]
)
def test_every_layout_compiles_for_every_chip(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("chips", [pytest.param(c, marks=available(c)) for c in ("v5e:2x4", "v5p:2x2x2", "h100:8")])
@pytest.mark.parametrize("remat, sums", [("none", 4), ("block", 5)])
def test_tensor_parallelism_sums_the_stream_four_times_a_layer(chips, remat, sums):
    """By what two more layers add. Five where a block is recomputed."""
    less, more = (
        apart(__file__, f"{chips} tensor", json.dumps({"layers": layers, "strategy": dict(zero=0, remat=remat)}))
        for layers in (6, 8)
    )
    added = {k: more["collectives"][k]["count"] - less["collectives"][k]["count"] for k in less["collectives"]}
    assert added == {AR: 2 * sums}


def whole():
    """A resharding that no collective can do: XLA:TPU makes the whole array on each device."""
    mesh = Layout(data=2, fsdp=2, tensor=2).mesh(topology("v5e:2x4"))
    where = NamedSharding(mesh, P(None, ("data", "tensor", "fsdp"), None))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32, sharding=where)
        return jax.jit(lambda x: jax.reshard(x, P("tensor", "fsdp", None))).lower(x).compile()


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install rljax[compile]")
def test_an_array_made_whole_is_reported():
    (line,) = apart(__file__, "whole")["rematerialized"]
    assert "cannot go from sharding" in line


def test_a_failed_compilation_is_one_line():
    with pytest.raises(RunFailed, match="^ValueError: too large$"):
        apart("-c", "raise ValueError('too large')")


@pytest.mark.parametrize(
    "name, said",
    [
        ("v5f:2x4", "chip 'v5f' is not known: did you mean 'v5p'?"),
        ("v5e", "such as v5e:2x4 and h100:8"),
        ("h100:2x4", "such as v5e:2x4 and h100:8"),
        ("v5e:2x4", "needs libtpu, the compiler for TPUs: pip install rljax[compile]"),
        ("h100:8", "needs jax-cuda12-plugin, the compiler for GPUs: pip install rljax[compile]"),
        ("h100:12", "must be at most 8 GPUs, or whole nodes of 8"),
    ],
)
def test_mistakes_are_one_line(name, said, monkeypatch):
    monkeypatch.setattr("rljax.plan.topology.find_spec", lambda package: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(UserError) as error:
        topology(name)
    assert said in str(error.value) and str(error.value).startswith(name) and "\n" not in str(error.value)


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "raise")
    name, *changes = sys.argv[1:]
    program = whole() if name == "whole" else compiled(CASES[name]._replace(**json.loads(*changes or ["{}"])))
    print(json.dumps(report(program)))
