"""Packed rows mean what their sequences mean apart: for every loss, reduction, KL form and correction."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rows
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P
from jax.sharding import NamedSharding

from rljax.mesh import BATCH, Layout
from rljax.train import corrections, kl, losses, preferences, reductions, supervised

TOKENS = [
    losses.Clip(0.2, 0.28, dual=1.5), losses.PolicyGradient(), losses.CISPO(low=0.2, high=0.3), losses.SAPO(),
    losses.VESPO(), losses.DPPO(low=0.1, high=0.1, tau=0.1), losses.NegativeLogLikelihood(), losses.ValueLoss(),
    supervised.StepLabels(), corrections.OffPolicyMask(delta=0.0),
]  # fmt: skip
SEQUENCES = [losses.SequenceClip(0.1, 0.1), losses.SequenceClip(0.1, 0.1, per_token=True), losses.GMPO(0.2, 0.2),
             preferences.KTO(undesirable=0.7)]  # fmt: skip
PAIRS = [
    preferences.DPO(smoothing=0.1), preferences.DPO(smoothing=0.1, robust=True), preferences.IPO(),
    preferences.IPO(averaged=False), preferences.Hinge(), preferences.IRPO(), preferences.ORPO(), preferences.SimPO(),
    supervised.BradleyTerry(center=0.1),
]  # fmt: skip
OF = {losses.ValueLoss: "values", supervised.StepLabels: "scores", supervised.BradleyTerry: "scores"}
REDUCTIONS = [
    reductions.token_mean, reductions.sequence_mean_token_mean, reductions.sequence_mean_token_sum,
    reductions.ConstantLength(9),
]  # fmt: skip
CASES = [*((loss, r) for loss in TOKENS + SEQUENCES for r in REDUCTIONS), *((x, reductions.pair_mean) for x in PAIRS)]
CORRECTIONS = [
    corrections.Truncate(0.5, 1.5), corrections.Mask(0.8, 1.2), corrections.SequenceMask(0.8, 1.2),
    *(kind(0.5, 1.5, "sequence", product) for kind in (corrections.Truncate, corrections.Mask) for product in (0, 1)),
]  # fmt: skip
WEIGHTS = {r: jax.jit(r) for r in (*REDUCTIONS, reductions.pair_mean, *CORRECTIONS)}


def result(loss, reduction, sequences, arrangement, **view):
    """(loss, gradient of each sequence, metrics)."""
    view = rows.view(sequences, arrangement, **view)
    value, gradient, seen = rows.compiled(loss, OF.get(type(loss), "logp"))(
        view, WEIGHTS[reduction](view.mask, view.segments)
    )
    return value, rows.taken(gradient, sequences, arrangement), seen


def close(a, b, tolerance=2e-6):
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def case_id(x):
    return getattr(x, "__name__", str(x))


def group_of(reduction) -> int:
    return 2 if reduction is reductions.pair_mean else 1


@pytest.mark.pitfall("T-08")
@pytest.mark.pitfall("T-09")
@pytest.mark.pitfall("T-28")
@pytest.mark.parametrize("loss, reduction", CASES, ids=case_id)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**20), dirt=st.sampled_from([0.0, -3.0, 7.0]))
def test_packed_equals_apart(loss, reduction, seed, dirt):
    """In whatever rows and order, beside rows of padding, and whatever the mask excludes."""
    rng = np.random.default_rng(seed)
    sequences, group = rows.sequences(rng), group_of(reduction)
    apart = result(loss, reduction, sequences, rows.each_apart(sequences, group))
    together = result(loss, reduction, sequences, rows.packed(sequences, rng, group), dirt=dirt)
    close(together, apart)
    for sequence, gradient in zip(sequences, together[1]):
        assert np.all(gradient[~sequence["mask"]] == 0)


@pytest.mark.parametrize("loss, reduction", [*zip(TOKENS + SEQUENCES, REDUCTIONS * 4), *CASES[-len(PAIRS) :]])
def test_more_padding_changes_nothing(loss, reduction):
    sequences = rows.sequences(np.random.default_rng(1))
    arrangement = rows.packed(sequences, np.random.default_rng(2), group_of(reduction))
    close(*(result(loss, reduction, sequences, arrangement, time=time) for time in (rows.TIME, rows.TIME + 7)))


@pytest.mark.pitfall("T-01")
@pytest.mark.pitfall("T-12")
@pytest.mark.parametrize("loss, reduction", [*zip(TOKENS + SEQUENCES, REDUCTIONS * 4), *CASES[-len(PAIRS) :]])
def test_microbatches_add_up(loss, reduction):
    """Rows of weights made once of all rows: each row by itself, and their sum."""
    sequences, group = rows.sequences(np.random.default_rng(3)), group_of(reduction)
    view = rows.view(sequences, rows.packed(sequences, np.random.default_rng(4), group))
    weights = np.asarray(WEIGHTS[reduction](view.mask, view.segments))
    run = rows.compiled(loss, OF.get(type(loss), "logp"))
    whole = run(view, weights)
    at = lambda b: np.arange(rows.ROWS)[:, None] == b
    only = lambda b: view._replace(mask=view.mask & at(b), segments=np.where(at(b), view.segments, 0))
    parts = [run(only(b), np.where(at(b), weights, 0)) for b in range(rows.ROWS)]
    close([sum(p[i] for p in parts) for i in (0, 1)], [whole[0], whole[1]])
    close({k: np.sum([p[2][k] for p in parts], 0) for k in whole[2]}, {k: np.array(v) for k, v in whole[2].items()})


@pytest.mark.pitfall("T-08")
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**20), dirt=st.sampled_from([0.0, np.nan, -np.inf]))
def test_corrections_of_packed_rows(correction, seed, dirt):
    rng = np.random.default_rng(seed)
    sequences, run = rows.sequences(rng), WEIGHTS[correction]

    def weights(arrangement, dirt=0.0):
        view = rows.view(sequences, arrangement, dirt=dirt)
        return rows.taken(run(view.old, view.sampled, view.mask, view.segments), sequences, arrangement)

    close(weights(rows.packed(sequences, rng), dirt), weights(rows.each_apart(sequences)))


FORMS = [kl.k1, kl.k2, kl.k3, kl.StraightThrough(), kl.Weighted(), kl.Unbiased()]


SOME = [losses.Clip(dual=1.5), losses.VESPO(), losses.ValueLoss(), corrections.OffPolicyMask(losses.GMPO(), 0.0),
        losses.SequenceClip(0.1, 0.1), preferences.KTO(), preferences.IRPO(), supervised.BradleyTerry(0.1)]  # fmt: skip


def test_sharded_rows_inside_a_scan_and_a_gradient():
    """Each kind of loss, reduction, form and correction on 8 devices, rows split: none is refused, nothing changes."""
    mesh = Layout(data=2, fsdp=2, expert=2).mesh()
    sequences = rows.sequences(np.random.default_rng(5), count=32)
    view = rows.view(sequences, rows.each_apart(sequences, 2))

    def everything(view):
        def objective(x, part):
            view, weights = part
            view = view._replace(logp=view.logp * x, values=view.values * x, scores=view.scores * x)
            kept = [c(view.old, view.sampled, view.mask, view.segments) for c in CORRECTIONS[2:4]]
            each = [loss(view)[0] * w for loss, w in zip(SOME, weights, strict=True)]
            each += [form(view.logp, view.ref_logp, view.old) * kept[0] * weights[0] for form in FORMS]
            values = jnp.stack([jnp.sum(jnp.where(view.mask, e, 0.0)) for e in (*each, *kept)])
            return jnp.sum(values * jnp.arange(1.0, len(values) + 1)), values

        weights = [r(view.mask, view.segments) for r in (*REDUCTIONS, *REDUCTIONS[1:3], *[reductions.pair_mean] * 2)]
        spec = P(None, BATCH, None) if jax.sharding.get_abstract_mesh().shape else None
        parts = jax.tree.map(lambda x: jnp.reshape(x, (2, -1, x.shape[-1]), out_sharding=spec), (view, weights))
        value = jax.value_and_grad(objective, has_aux=True)
        return jax.lax.scan(lambda _, part: (None, value(jnp.float32(1.0), part)), None, parts)[1]

    alone = jax.jit(everything)(view)
    with jax.set_mesh(mesh):
        sharded = jax.jit(everything)(jax.device_put(view, NamedSharding(mesh, P(BATCH, None))))
    close(jax.device_get(sharded), jax.device_get(alone), 1e-5)


def test_inside_a_pipeline():
    """Manual over pipe, explicit over the rest, where losses of the last stage are."""
    layout = Layout(fsdp=4, pipe=2)
    sequences = rows.sequences(np.random.default_rng(6), count=16)
    view = rows.view(sequences, rows.each_apart(sequences, 2))
    some = [losses.Clip(), losses.SequenceClip(), preferences.DPO(), supervised.BradleyTerry()]

    def run(view):
        def loss(x):
            stage = jax.lax.axis_index("pipe").astype(jnp.float32)
            scaled = view._replace(logp=view.logp * x * (1 + stage), scores=view.scores * x * (1 + stage))
            return sum(jnp.sum(jnp.where(view.mask, each(scaled)[0], 0.0)) for each in some)

        return jax.lax.psum(jax.grad(loss)(jax.lax.pcast(jnp.float32(1.0), "pipe", to="varying")), "pipe")

    mesh = layout.mesh()
    with jax.set_mesh(mesh):
        placed = jax.device_put(view, NamedSharding(mesh, P(BATCH, None)))
        got = jax.jit(jax.shard_map(run, axis_names={"pipe"}, out_specs=P()))(placed)

    def alone(x, stage):
        scaled = view._replace(logp=view.logp * x * (1 + stage), scores=view.scores * x * (1 + stage))
        return sum(jnp.sum(jnp.where(view.mask, each(scaled)[0], 0.0)) for each in some)

    close(got, sum(jax.grad(partial(alone, stage=stage))(1.0) for stage in (0, 1)), 1e-5)
