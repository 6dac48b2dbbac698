"""Law: every objective makes the single device's update on every kind of layout, whatever its terms and heads.

Losses are functions of rows, so all are added up in one objective: one program a layout. Each by itself is slow.
"""

from functools import cache
from inspect import signature
from zlib import crc32

import jax
import numpy as np
import optax
import pytest
import tiny
from test_layouts import agree
from tiny import ADAMW, CONTEXT, FSDP_TENSOR, MODELS, ONE, ROWS, TIME, remember, same

from rljax.assess.advantages import GroupRelative
from rljax.mesh import Layout, Strategy
from rljax.model.table import map_table, shardings
from rljax.train import algorithms
from rljax.train.corrections import OffPolicyMask, SequenceMask, Truncate
from rljax.train.kl import AdaptiveKL, Unbiased
from rljax.train.losses import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    VESPO,
    Clip,
    NegativeLogLikelihood,
    SequenceClip,
    ValueLoss,
)
from rljax.train.objectives import Critic, Objective, Term
from rljax.train.preferences import DPO, IPO, IRPO, KTO, ORPO, Hinge, SimPO
from rljax.train.reductions import pair_mean, sequence_mean_token_mean, sequence_mean_token_sum
from rljax.train.step import start, update
from rljax.train.supervised import BradleyTerry, StepLabels

PAIRS = DPO(), IPO(), IRPO(), ORPO(), SimPO(), Hinge(), BradleyTerry(0.01)
SEQUENCES = SequenceClip(0.1, 0.1), SequenceClip(0.1, 0.1, per_token=True), GMPO(), KTO()
TOKENS = CISPO(), SAPO(), VESPO(), DPPO(), OffPolicyMask(), NegativeLogLikelihood(), StepLabels()
EVERYTHING = Objective(
    loss=Clip(0.2, 0.28, dual=3.0), advantage=GroupRelative(), reduction=sequence_mean_token_mean, kl=0.1,
    divergence=Unbiased(), adaptive=AdaptiveKL(), entropy=0.01, correction=Truncate(),
    critic=Critic(ValueLoss(), weight=0.5, normalize=True),
    extra=(
        *(Term(loss, 0.1, pair_mean) for loss in PAIRS),
        *(Term(loss, 0.1, sequence_mean_token_mean) for loss in SEQUENCES),
        *(Term(loss, 0.1) for loss in TOKENS),
        Term(NegativeLogLikelihood(), 0.3, sequence_mean_token_sum, over=lambda batch: batch.advantages > 0),
    ),
).with_critic()  # fmt: skip
LAYOUTS = {
    "fsdp tensor": ("plain", FSDP_TENSOR, dict(zero=2, microbatches=2)),
    "seq": ("plain", CONTEXT, dict(context="ring", sequence_parallel=True)),
    "expert": ("experts", Layout(fsdp=2, tensor=2, expert=2), dict(microbatches=2)),
    "pipe": ("plain", Layout(pipe=2, fsdp=2, tensor=2), dict(microbatches=4, schedule="1f1b")),
}
CHOICES = {"dr_grpo": dict(max_new=9), "gdpo": dict(weights=(1.0,)), "value_pretraining": dict(steps=1)}
ALGORITHMS = [name for name, f in vars(algorithms).items() if getattr(f, "__module__", "") == algorithms.__name__]
ALGORITHMS.remove("right")


@cache
def batch(name: str):
    """`tiny.batch` with all that any loss reads."""
    found, rng = tiny.batch(name), np.random.default_rng(4)
    mask, near = found.rollout.mask, lambda x, width: (x + width * rng.normal(size=x.shape)).astype(np.float32)
    values = near(np.zeros(mask.shape), 1.0)
    return found.replace(
        values=values, returns=near(values, 0.5), prox_logp=np.where(mask, near(found.rollout.logp, 0.2), 0),
        target=(near(np.zeros((len(mask), 1)), 1.0) > 0) * np.ones((1, TIME), np.float32),
    )  # fmt: skip


@cache
def weights(name: str, heads: tuple[str, ...]):
    """Those of `tiny.weights`, and a value head's."""
    rng = lambda t: np.random.default_rng(crc32(t.name.encode()))
    with_head = map_table(lambda t: rng(t).normal(size=t.shape).astype(np.float32), MODELS[name].build(heads).table)
    known = {f: getattr(tiny.weights(name), f) for f in ("embed", "first", "layers", "norm")}
    unembed = tiny.weights(name).unembed if "tokens" in heads else None
    return with_head.replace(**known, unembed=unembed)


@cache
def step(name, layout, objective, heads=("tokens", "value"), on_policy=False, **strategy):
    lm, mesh, strategy = MODELS[name].build(heads), layout.mesh(), Strategy(**strategy)
    optimizer = optax.chain(remember, ADAMW.build(10, map_table(lambda t: t.matrix, lm.table)))
    with jax.set_mesh(mesh):
        params = jax.device_put(weights(name, heads), shardings(lm.table, mesh, strategy.zero))
        state = start(lm, params, optimizer, strategy.zero, objective.kl)
        run = jax.jit(
            lambda state, batch: update(
                state, batch, lm=lm, objective=objective, optimizer=optimizer, adjust=same, on_policy=on_policy,
                strategy=strategy,
            )
        )  # fmt: skip
        compiled = run.lower(state, tiny.place(batch(name), mesh)).compile()
    return tiny.Step(mesh, compiled, state, compiled.as_text())


@pytest.mark.parametrize("case", tiny.ordinary(LAYOUTS, "seq", "pipe"))
def test_everything_at_once(case):
    name, layout, strategy = LAYOUTS[case]
    one = step(name, ONE, EVERYTHING)(batch(name))
    result = step(name, layout, EVERYTHING, **strategy)(batch(name))
    agree(result, one)
    assert np.allclose(result.state.moments, one.state.moments) and result.state.kl == pytest.approx(one.state.kl)
    assert float(one.state.kl) != pytest.approx(EVERYTHING.kl) and one.metrics["grad_norm/value"] > 0.01


def test_a_critic_of_its_own():
    name, layout, strategy = LAYOUTS["fsdp tensor"]
    objective = EVERYTHING.of_critic()
    one = step(name, ONE, objective, ("value",))(batch(name))
    agree(step(name, layout, objective, ("value",), **strategy)(batch(name)), one)
    assert "entropy" not in one.metrics and one.metrics["grad_norm/value"] > 0.01


def test_every_term_counts():
    """Control: without any one of the terms the update is another."""
    reference = step("plain", ONE, EVERYTHING)(batch("plain"))
    for part in (EVERYTHING.extra[: len(PAIRS)], EVERYTHING.extra[-2:]):
        fewer = Objective(
            **{f: getattr(EVERYTHING, f) for f in signature(Objective).parameters if f != "extra"},
            extra=tuple(term for term in EVERYTHING.extra if term not in part),
        )
        assert tiny.distance(step("plain", ONE, fewer)(batch("plain")).grads, reference.grads) > 1e-3


@pytest.mark.pitfall("T-04")
@pytest.mark.parametrize("algorithm, heads", [("sft", ("tokens",)), ("reward_model", ("value",))])
def test_supervision_is_free_of_accumulation(algorithm, heads):
    """All rows at once on one device, or one at a time on each of four."""
    objective = getattr(algorithms, algorithm)()
    one = step("plain", ONE, objective, heads)(batch("plain"))
    assert one.metrics["grad_norm"] > 0.01
    agree(step("plain", Layout(data=2, fsdp=2), objective, heads, microbatches=ROWS // 4)(batch("plain")), one)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm(algorithm, case):
    name, layout, strategy = LAYOUTS[case]
    objective = getattr(algorithms, algorithm)(**CHOICES.get(algorithm, {}))
    objective = objective.with_critic() if objective.critic else objective
    heads = ("tokens", "value")
    one = step(name, ONE, objective, heads)(batch(name))
    agree(step(name, layout, objective, heads, **strategy)(batch(name)), one)


@pytest.mark.slow
def test_a_whole_sequence_may_be_rejected():
    """Corrections of whole sequences, which every layout decides alike."""
    from dataclasses import replace

    objective = replace(EVERYTHING, correction=SequenceMask(0.9, 1.1))
    for case in ("seq", "pipe"):
        name, layout, strategy = LAYOUTS[case]
        one = step(name, ONE, objective)(batch(name))
        assert 0 < one.metrics["correction/kept"] < 1
        agree(step(name, layout, objective, **strategy)(batch(name)), one)
