"""Law: every layout, ZeRO level, number of microbatches and remat choice computes the single device's loss, gradient
and AdamW update. What the mask excludes, padding rows included, takes no part in any of them, on any layout."""

from dataclasses import replace
from math import prod

import jax
import numpy as np
import pytest
import tiny
from tiny import ALL, CONTEXT, FILLER, FSDP, ONE, ROWS

from rljax.mesh import Layout
from rljax.mesh.verbs import axes_of, without
from rljax.model.table import init, map_table
from rljax.plan.hlo import collectives
from rljax.train import reductions

GRADIENT, PARAMS = 2e-5, 1e-4  # relative to a tensor's largest entry, in float32


def agree(result, reference):
    assert result.loss == pytest.approx(reference.loss, rel=1e-5, abs=1e-6)  # terms of 1 that cancel
    for name, value in reference.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert tiny.distance(result.grads, reference.grads) < GRADIENT
    assert tiny.distance(result.params, reference.params) < PARAMS


COVERED = "fsdp tensor", "zero 0"  # by others


@pytest.mark.pitfall("T-07")
@pytest.mark.pitfall("T-12")
@pytest.mark.parametrize(
    "model, case",
    [  # tied and untied in turns; the other of each is slow
        pytest.param(model, case, marks=[pytest.mark.slow] * (i % 2 != j or case in COVERED))
        for i, case in enumerate(tiny.LAYOUTS)
        for j, model in enumerate(tiny.DENSE)
    ],
)
def test_every_layout_computes_the_single_device_update(model, case):
    layout, strategy = tiny.LAYOUTS[case]
    result = tiny.step(model, layout, **strategy)(tiny.batch(model))
    agree(result, tiny.step(model)(tiny.batch(model)))

    shards_are_as_large_as_stated(model, layout, strategy, result)


@pytest.mark.pitfall("T-07")
@pytest.mark.pitfall("T-99")
@pytest.mark.parametrize(
    "case",
    tiny.ordinary(
        tiny.EXPERT_LAYOUTS, "experts, ring", "exchange, tensor", "deepseek, data expert", "deepseek, tensor"
    ),
)
def test_every_layout_of_experts_computes_the_single_device_update(case):
    model, layout, strategy = tiny.EXPERT_LAYOUTS[case]
    one = tiny.step(model)(tiny.batch(model))
    assert one.metrics["experts/balance"] > 0.5 and one.metrics["experts/dropped"] == 0
    result = tiny.step(model, layout, **strategy)(tiny.batch(model))
    agree(result, one)
    shards_are_as_large_as_stated(model, layout, strategy, result)


@pytest.mark.pitfall("T-07")
@pytest.mark.parametrize(
    "case",
    tiny.ordinary(
        tiny.FAMILY_LAYOUTS, "gemma, ulysses", "olmo, gathered keys", "latent, ring", "latent, expert tensor"
    ),
)
def test_every_layout_of_a_family_computes_the_single_device_update(case):
    model, layout, strategy = tiny.FAMILY_LAYOUTS[case]
    result = tiny.step(model, layout, **strategy)(tiny.batch(model))
    agree(result, tiny.step(model)(tiny.batch(model)))
    shards_are_as_large_as_stated(model, layout, strategy, result)


@pytest.mark.pitfall("T-07")
@pytest.mark.parametrize("case", tiny.ordinary(tiny.PRODUCTS, "4D of 16, pipe", "5D of 32, no pipe"))
def test_products_of_axes_compute_the_single_device_update(case):
    model, layout, strategy = tiny.PRODUCTS[case]
    result = tiny.step(model, layout, **strategy)(tiny.batch(model))
    agree(result, tiny.step(model)(tiny.batch(model)))
    shards_are_as_large_as_stated(model, layout, strategy, result)


def shards_are_as_large_as_stated(model, layout, strategy, result):
    table, zero = tiny.MODELS[model].build().table, strategy.get("zero", 3)
    _, moments = result.state.optimizer[1][1][0][1:]

    def held(t, param, gradient, moment):
        """Not merely labelled so."""
        for x, sharded in ((param, zero == 3), (gradient, zero >= 1), (moment, zero >= 1)):
            spec = t.spec if sharded else without(t.spec, "fsdp")
            ways = prod(getattr(layout, axis) for entry in spec for axis in axes_of(entry))
            assert x.addressable_shards[0].data.size * ways == t.size, t.name

    map_table(held, table, result.state.params, result.sharded, moments)


def test_the_comparison_notices_a_small_mistake():
    """Control: a batch that differs in one token's advantage is not the same update."""
    batch = tiny.batch("plain")
    advantages = batch.advantages.copy()
    advantages[0, batch.rollout.length[0] - 1] *= 1.01
    wrong, right = tiny.step("plain")(batch.replace(advantages=advantages)), tiny.step("plain")(batch)
    assert tiny.distance(wrong.grads, right.grads) > 2 * GRADIENT
    with pytest.raises(AssertionError):
        agree(wrong, right)


@pytest.mark.pitfall("T-01")
@pytest.mark.pitfall("T-10")
@pytest.mark.pitfall("T-12")
@pytest.mark.parametrize("layout, microbatches", [(ONE, 2), (ONE, 4), (ALL, 2), (ALL, 4)], ids=str)
def test_microbatches_equal_one(layout, microbatches):
    result = tiny.step("rich", layout, microbatches=microbatches)(tiny.batch("rich"))
    agree(result, tiny.step("rich")(tiny.batch("rich")))


@pytest.mark.parametrize("remat", ["none", "names", "offload"])
@pytest.mark.parametrize("layout", [ONE, ALL], ids=str)
def test_remat_changes_memory_alone(layout, remat):
    agree(tiny.step("rich", layout, remat=remat)(tiny.batch("rich")), tiny.step("rich")(tiny.batch("rich")))


REDUCTIONS = {
    "token mean": reductions.token_mean,
    "sequence mean of token means": reductions.sequence_mean_token_mean,
    "sequence mean of token sums": reductions.sequence_mean_token_sum,
    "constant length": reductions.ConstantLength(9),
}


@pytest.mark.pitfall("T-01")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_is_free_of_accumulation_and_layout(reduction):
    batch = tiny.batch("plain")
    weights = REDUCTIONS[reduction](batch.rollout.mask, batch.rollout.tokens.segments)
    loss, grads = tiny.gradient("plain")(batch, weights)
    for other in (
        tiny.gradient("plain", ONE, microbatches=4),
        tiny.gradient("plain", ONE, microbatches=ROWS),
        tiny.gradient("plain", FSDP, microbatches=4),
    ):
        again, same = other(batch, weights)
        assert again == pytest.approx(loss, rel=1e-5) and tiny.distance(same, grads) < GRADIENT


def token_mean(batch, mask):
    return reductions.token_mean(mask, batch.rollout.tokens.segments)


def uneven(batch):
    """The rows of devices 0 to 3 of 8 keep one token each; the others all of theirs."""
    mask = batch.rollout.mask.copy()
    last = np.arange(tiny.TIME)[None] == batch.rollout.length[:, None] - 1
    mask[: ROWS // 2] &= last[: ROWS // 2]
    return batch.replace(rollout=batch.rollout.replace(mask=mask))


@pytest.mark.pitfall("T-02")
def test_the_token_mean_is_global_however_tokens_are_spread():
    batch = uneven(tiny.batch("plain"))
    mask = batch.rollout.mask
    local = lambda parts: np.concatenate([m / max(m.sum(), 1) / parts for m in np.split(mask, parts)])
    counts = [m.sum() for m in np.split(mask, 8)]
    assert min(counts) <= 4 < 16 <= max(counts)
    _, truth = tiny.gradient("plain")(batch, mask / mask.sum())
    _, sharded = tiny.gradient("plain", FSDP, microbatches=4)(batch, token_mean(batch, mask))
    assert tiny.distance(sharded, truth) < GRADIENT
    _, wrong = tiny.gradient("plain", FSDP, microbatches=4)(batch, local(8))  # control: each device's own mean
    assert tiny.distance(wrong, truth) > 0.1


@pytest.mark.pitfall("T-26")
@pytest.mark.parametrize("empty", ["a device", "a microbatch", "all"])
def test_parts_without_a_token_are_harmless(empty):
    batch = tiny.batch("plain")
    mask = batch.rollout.mask.copy()
    mask[{"a device": slice(8, 12), "a microbatch": slice(1, None, 4), "all": slice(None)}[empty]] = False
    batch = batch.replace(rollout=batch.rollout.replace(mask=mask))
    weights = np.asarray(token_mean(batch, mask))
    loss, grads = tiny.gradient("plain", FSDP, microbatches=4)(batch, weights)
    expected = tiny.gradient("plain")(batch, weights)
    assert np.isfinite(loss) and loss == pytest.approx(expected[0], rel=1e-5)
    if empty == "all":
        assert loss == 0 and all(np.all(g == 0) for g in jax.tree.leaves(grads))
        for reduction in REDUCTIONS.values():
            assert np.all(np.asarray(reduction(mask, batch.rollout.tokens.segments)) == 0)
    else:
        assert tiny.distance(grads, expected[1]) < GRADIENT


def soiled(batch, fill):
    """Every float `[B T]` input holds `fill` wherever the mask excludes it."""
    mask, rollout = batch.rollout.mask, batch.rollout
    dirty = lambda x: np.where(mask, x, fill(x.shape)).astype(np.float32)
    scores = np.where(mask.any(1, keepdims=True), batch.scores, np.nan)
    return batch.replace(
        rollout=rollout.replace(logp=dirty(rollout.logp)), scores=scores,
        advantages=dirty(batch.advantages), ref_logp=dirty(batch.ref_logp),
    )  # fmt: skip


@pytest.mark.pitfall("T-27")
@pytest.mark.pitfall("T-28")
@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 1e30, None], ids=str)
@pytest.mark.parametrize("layout", [ONE, ALL], ids=["one", "all"])
def test_masked_values_cannot_leak(layout, fill):
    """The filler row is all masked, so it is soiled from end to end."""
    step, batch = tiny.step("rich", layout), tiny.batch("rich")
    assert not batch.rollout.mask[FILLER].any()
    rng = np.random.default_rng(2)
    dirty = soiled(batch, lambda shape: rng.normal(size=shape) if fill is None else np.full(shape, fill))
    clean, result = step(batch), step(dirty)
    assert np.isfinite(result.loss)
    for a, b in zip((clean.metrics, clean.grads, clean.params), (result.metrics, result.grads, result.params)):
        assert tiny.identical(a, b)


@pytest.mark.pitfall("T-28")
def test_unmasked_values_do_matter():
    """Control of the test above: the same soil where the mask is True is felt."""
    batch = tiny.batch("rich")
    for name in ("logp", "advantages", "ref_logp"):
        owner = batch.rollout if name == "logp" else batch
        value = np.where(batch.rollout.mask, getattr(owner, name) + 0.5, 0).astype(np.float32)
        changed = owner.replace(**{name: value})
        changed = batch.replace(rollout=changed) if name == "logp" else changed
        assert tiny.distance(tiny.step("rich")(changed).grads, tiny.step("rich")(batch).grads) > 1e-3, name


@pytest.mark.pitfall("T-16")
@pytest.mark.pitfall("T-28")
def test_padding_ids_and_the_filler_row_take_no_part():
    batch = tiny.batch("rich")
    tokens, rng = batch.rollout.tokens, np.random.default_rng(3)
    noise = rng.integers(0, 48, tokens.ids.shape).astype(np.int32)
    ids = np.where(tokens.segments > 0, tokens.ids, noise)
    ids[FILLER] = noise[FILLER]
    assert np.any(ids != tokens.ids)
    soiled = batch.replace(rollout=batch.rollout.replace(tokens=tokens.replace(ids=ids)))
    clean, result = tiny.step("rich")(batch), tiny.step("rich")(soiled)
    assert tiny.identical((clean.loss, clean.grads, clean.params), (result.loss, result.grads, result.params))


@pytest.mark.pitfall("T-97")
@pytest.mark.parametrize("layout, microbatches", [(FSDP, 4), (ALL, 1), (CONTEXT, 1)], ids=["fsdp", "all", "context"])
def test_batches_of_any_size_count_each_sample_once(layout, microbatches):
    """n rows padded to what the layout needs equal the sum of the n rows' gradients, each computed alone."""
    batch = tiny.batch("plain")
    ones = np.asarray(batch.rollout.mask, np.float32)
    alone = tiny.gradient("plain", rows=1)
    row = lambda i: alone(jax.tree.map(lambda x: x[i : i + 1], batch), ones[i : i + 1])
    loss, total = 0.0, jax.tree.map(lambda w: np.zeros(w.shape), tiny.weights("plain"))
    sizes = range(1, 18) if layout == FSDP else (1, 3, 8, 17)
    for i in range(17):
        one, grads = row(i)
        loss, total = loss + one, jax.tree.map(np.add, total, grads)
        if i + 1 not in sizes:
            continue
        mask = batch.rollout.mask & (np.arange(ROWS) <= i)[:, None]
        part = soiled(batch.replace(rollout=batch.rollout.replace(mask=mask)), lambda shape: np.full(shape, np.nan))
        got, grads = tiny.gradient("plain", layout, microbatches=microbatches)(part, token_mean(batch, mask))
        assert got == pytest.approx(loss / mask.sum(), rel=1e-4, abs=1e-6)
        assert tiny.distance(grads, jax.tree.map(lambda g: g / mask.sum(), total)) < GRADIENT, i + 1


DEVICES = np.arange(8).reshape(2, 2, 2)  # of ALL: data, fsdp, tensor


def crosses_data(collective) -> bool:
    replica = lambda device: int(np.argwhere(DEVICES == device)[0][0])
    return any(len(set(map(replica, group))) > 1 for group in collective.groups)


@pytest.mark.parametrize("zero, microbatches", [(3, 1), (3, 2), (3, 4), (2, 2), (1, 2), (0, 1), (0, 2)])
def test_replicas_sum_gradients_once_an_update(zero, microbatches):
    """Over data everything crosses once, after the loop over microbatches, and so over fsdp at ZeRO-1; from ZeRO-2 on
    the sum over fsdp is scattered within the loop. Nothing but metrics is summed whole over both."""
    found = collectives(tiny.step("rich", ALL, zero=zero, microbatches=microbatches).text)
    sums = [(c.loops, s) for c in found if c.kind == "all-reduce" and crosses_data(c) for s in c.shapes]
    assert [loops for loops, shape in sums if len(shape) > 1 and shape[-1] > 1] == [0] * 15  # all but the last norm
    scattered = [c.loops for c in found if c.kind == "reduce-scatter"]
    assert bool(scattered) == (zero > 0)
    if microbatches > 1:  # XLA dissolves a loop of one
        assert (0 in scattered) == (zero == 1) and (1 in scattered) == (zero > 1)
        assert not [shape for loops, shape in sums if loops and shape not in ((), (1,))]


@pytest.mark.pitfall("T-111")
def test_an_update_accepts_its_own_result_and_moves_nothing_implicitly():
    """One compile serves every update: what comes out is placed like what went in."""
    step = tiny.step("rich", ALL)
    first = step(tiny.batch("rich"))
    batch = tiny.place(tiny.batch("rich"), step.mesh)
    with jax.set_mesh(step.mesh), jax.transfer_guard("disallow"):
        state, metrics = step.compiled(first.state, batch)
    assert int(state.step) == 2 and float(metrics["loss"]) != first.loss
    assert all(value.shape == () for value in jax.tree.leaves(metrics))


def test_metrics_are_float32():
    step = tiny.step("rich")
    with jax.set_mesh(step.mesh):
        _, metrics = step.compiled(step.state, tiny.place(tiny.batch("rich"), step.mesh))
    assert {str(value.dtype) for value in jax.tree.leaves(metrics)} == {"float32"}


def test_initial_parameters_do_not_depend_on_the_layout():
    lm = tiny.MODELS["rich"].build()
    values = {}
    for layout, zero in ((ONE, 3), (Layout(data=2, fsdp=2, tensor=2), 3)):
        with jax.set_mesh(layout.mesh()):
            params = jax.jit(lambda key: init(lm.table, key, zero))(jax.random.key(0))  # noqa: B023
        values[layout] = jax.device_get(params)
        assert all(p.shape == t.shape for p, t in zip(jax.tree.leaves(params), _tensors(lm)))
    first, second = values.values()
    assert tiny.identical(first, second)
    for t, x in zip(_tensors(lm), jax.tree.leaves(first)):
        if t.std not in (0, 1):
            assert np.std(x) == pytest.approx(t.std, rel=6 / np.sqrt(prod(t.shape))), t.name


def _tensors(lm):
    return jax.tree.leaves(lm.table, is_leaf=lambda t: hasattr(t, "dims"))


@pytest.mark.pitfall("T-26")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(value):
    step, batch = tiny.step("rich"), tiny.batch("rich")
    advantages = batch.advantages.copy()
    advantages[0, batch.rollout.length[0] - 1] = value
    poisoned = batch.replace(advantages=advantages)
    first = step(batch)
    assert not tiny.identical(first.params, tiny.weights("rich"))
    before = jax.device_get(first.state)
    bad = step(poisoned, first.state)
    worse = step(poisoned, bad.state)
    after = jax.device_get(worse.state)
    assert tiny.identical((before.params, before.optimizer), (after.params, after.optimizer))
    assert [int(s.step) for s in (before, bad.state, after)] == [1, 2, 3]
    assert [int(s.skipped) for s in (before, bad.state, after)] == [0, 1, 2] and worse.metrics["skipped"] == 2
    good = step(batch, worse.state)
    assert int(good.state.skipped) == 0 and np.isfinite(good.loss)
    assert tiny.identical(good.params, step(batch, first.state).params)


ON_POLICY = replace(tiny.OBJECTIVE, entropy=0.0)


@pytest.mark.pitfall("T-57")
@pytest.mark.pitfall("T-61")
def test_on_policy_ratios_are_one_and_kl_alone_has_a_gradient():
    step, batch = tiny.step("plain", objective=ON_POLICY, on_policy=True), tiny.batch("plain")
    result = step(batch)
    assert result.metrics["ratio"] == 1.0 and result.metrics["clip_fraction/low"] == 0
    mask, tok = batch.rollout.mask, batch.rollout.tokens
    sequences = [mask & (tok.segments == s) & row for s in (1, 2) for row in np.eye(ROWS, dtype=bool)[..., None]]
    mean = lambda x: np.mean([x[own].mean() for own in sequences if own.any()])
    logits = tiny.oracle(tiny.MODELS["plain"], tiny.weights("plain"), tok.ids, tok.positions, tok.segments)
    own, _ = tiny.oracle_logprobs(logits, tok.ids, mask)
    d = np.where(mask, own - batch.ref_logp, 0)
    kl = mean(np.exp(-d) - 1 + d)
    assert result.loss == pytest.approx(-mean(batch.advantages) + 0.1 * kl, rel=1e-5)
    silent = step(batch.replace(advantages=np.zeros_like(batch.advantages)))
    assert silent.loss == pytest.approx(0.1 * kl, rel=1e-4) and silent.metrics["grad_norm"] > 1e-3
    # the gradient descends: half its norm times the step is gained to first order
    lm = tiny.MODELS["plain"]
    moved = jax.tree.map(lambda p, g: p - 1e-3 * g, tiny.weights("plain"), silent.grads)
    lower, _ = tiny.oracle_logprobs(tiny.oracle(lm, moved, tok.ids, tok.positions, tok.segments), tok.ids, mask)
    d = np.where(mask, lower - batch.ref_logp, 0)
    gain = 0.1 * (kl - mean(np.exp(-d) - 1 + d))
    assert gain == pytest.approx(1e-3 * float(silent.metrics["grad_norm"]) ** 2, rel=0.05)
