"""Losses equal their papers' equations: golden numbers come from `spec/algorithms.md` 2.14 (a float64 reference of
another author) or are worked by hand here; others are loops over single sequences, in float64, with the gradients that
finite differences give."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rows

from rljax.train.corrections import OffPolicyMask
from rljax.train.kl import LOG_RATIO
from rljax.train.losses import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    VESPO,
    Clip,
    NegativeLogLikelihood,
    PolicyGradient,
    SequenceClip,
    ValueLoss,
)
from rljax.train.reductions import sequence_mean_token_mean
from rljax.train.view import View

# ratios: [1.25, .75, 1.8, .5] with A = 1; [1, 1, 3, 1] with A = -1, of which the first and third tokens count
LOGP = np.log(np.array([[0.5, 0.3, 0.9, 0.2], [0.4, 0.1, 0.6, 0.5]], np.float32))
OLD = np.log(np.array([[0.4, 0.4, 0.5, 0.4], [0.4, 0.1, 0.2, 0.5]], np.float32))
ADVANTAGES = np.array([[1.0] * 4, [-1.0] * 4], np.float32)
MASK = np.array([[1, 1, 1, 1], [1, 0, 1, 0]], bool)
SEEN = View(logp=LOGP, mask=MASK, segments=np.ones((2, 4), np.int32), old=OLD, advantages=ADVANTAGES)


def one(logp, old, advantages, mask=None) -> View:
    """A row of one sequence."""
    logp, old, advantages = (np.atleast_2d(np.asarray(x, np.float32)) for x in (logp, old, advantages))
    mask = np.ones(logp.shape, bool) if mask is None else np.atleast_2d(mask)
    return View(logp=logp, mask=mask, segments=np.ones(logp.shape, np.int32), old=old, advantages=advantages)


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


def gradient(loss, view, of="logp"):
    """Of the sum over the mask."""
    total = lambda x: jnp.sum(jnp.where(view.mask, loss(view._replace(**{of: x}))[0], 0.0))
    return np.asarray(jax.jit(jax.grad(total))(getattr(view, of)))


def test_clip():
    loss, seen = Clip()(SEEN)
    close(loss, [[-1.2, -0.75, -1.2, -0.5], [1, 1, 3, 1]])
    close(seen["ratio"], [[1.25, 0.75, 1.8, 0.5], [1, 1, 3, 1]])
    assert seen["clip_fraction/high"].tolist() == [[True, False, True, False], [False] * 4]
    assert not np.any(seen["clip_fraction/low"])  # a ratio below 1 - low is held only where A < 0
    low = Clip()(SEEN._replace(advantages=-ADVANTAGES))[1]["clip_fraction/low"]
    assert low.tolist() == [[False, True, False, True], [False] * 4]


def test_clip_higher():
    close(Clip(0.2, 0.28)(SEEN)[0][0], [-1.25, -0.75, -1.28, -0.5])


def test_dual_clip():
    loss, seen = Clip(dual=1.5)(SEEN)
    close(loss, [[-1.2, -0.75, -1.2, -0.5], [1, 1, 1.5, 1]])
    assert seen["clip_fraction/dual"].tolist() == [[False] * 4, [False, False, True, False]]


@pytest.mark.pitfall("T-64")
def test_clipped_tokens_have_no_gradient():
    """And the others that of -ratio A."""
    clip = Clip(0.2, 0.28, dual=1.5)
    total = lambda x: jnp.sum(clip(SEEN._replace(logp=x))[0])
    close(jax.grad(total)(LOGP), [[-1.25, -0.75, 0, -0.5], [1, 1, 0, 1]])


def test_two_sided_clipping_is_the_dual_clip():
    """INTELLECT-2's -min(min(r, delta) A, clip(r) A), with delta = 4."""
    rng = np.random.default_rng(0)
    ratio, advantages = np.exp(rng.normal(size=(4, 50)) * 1.5), rng.normal(size=(4, 50))
    expected = -np.minimum(np.minimum(ratio, 4) * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    assert np.any((ratio > 4) & (advantages < 0)) and np.any((ratio > 4) & (advantages > 0))
    close(Clip(0.2, 0.28, dual=4.0)(one(np.log(ratio), 0 * ratio, advantages))[0], expected, 1e-5)


def test_clip_is_that_of_the_reference():
    rng = np.random.default_rng(1)
    lp, old, a = -rng.random((3, 40)), -rng.random((3, 40)), rng.normal(size=(3, 40))
    r = np.exp(lp - old)
    expected = np.maximum(-r * a, -np.clip(r, 0.9, 1.15) * a)
    close(Clip(0.1, 0.15)(one(lp, old, a))[0], expected)
    close(Clip(0.1, 0.15, dual=1.2)(one(lp, old, a))[0], np.where(a < 0, np.minimum(expected, -1.2 * a), expected))


@pytest.mark.parametrize("loss", [Clip(), SequenceClip(), GMPO(), CISPO(), SAPO(), VESPO(), DPPO()], ids=str)
@pytest.mark.parametrize("far", [-500.0, -50.0, 50.0, 500.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_log_ratio_cannot_overflow(loss, far, sign):
    view = one([[min(far, 0), 0.0]], [[-max(far, 0), 0.0]], [[sign, sign]])
    assert np.all(np.isfinite(loss(view)[0])) and np.all(np.isfinite(gradient(loss, view)))


def test_ratios_are_held_where_they_would_overflow():
    close(Clip()(one([[50.0]], [[0.0]], [[-1.0]]))[0], [[np.exp(LOG_RATIO)]])


def test_policy_gradient():
    close(PolicyGradient()(SEEN)[0], [np.log([2, 1 / 0.3, 1 / 0.9, 5]), np.log([0.4, 0.1, 0.6, 0.5])])
    close(gradient(PolicyGradient(), SEEN), np.where(MASK, -ADVANTAGES, 0))


def test_negative_log_likelihood():
    view = View(logp=LOGP, mask=MASK, segments=SEEN.segments)
    close(NegativeLogLikelihood()(view)[0][0], -np.log([0.5, 0.3, 0.9, 0.2]))


@pytest.mark.pitfall("T-64")
def test_sequence_clip():
    """2.14's s = [.958415, 1.732051], by hand: clipped at 1.2 and above 1 for A = 1 only."""
    for loss in (SequenceClip(0.02, 0.2), SequenceClip(0.02, 0.2, per_token=True)):
        value, seen = loss(SEEN)
        close(value, [[-0.958415] * 4, [1.732051] * 4])
        values, weights = seen["ratio"]
        close(values, [[0.958415] * 4, [1.732051] * 4])
        assert weights.tolist() == [[1, 0, 0, 0]] * 2
        value, seen = loss(SEEN._replace(advantages=-ADVANTAGES))
        close(value, [[0.98] * 4, [-1.2] * 4])
        low, high = (seen[f"clip_fraction/{side}"][0] for side in ("low", "high"))
        assert low[:, 0].tolist() == [True, False] and high[:, 0].tolist() == [False, True]


@pytest.mark.pitfall("T-64")
def test_sequence_clip_has_one_gradient_in_both_forms():
    """-s A / n at each token, where it is not clipped."""
    weights = sequence_mean_token_mean(MASK, SEEN.segments)
    for loss in (SequenceClip(0.02, 0.2), SequenceClip(0.02, 0.2, per_token=True)):
        grad = jax.grad(lambda x: jnp.sum(weights * loss(SEEN._replace(logp=x))[0]))(LOGP)
        close(grad, [[-0.958415 / 8] * 4, [1.732051 / 4, 0, 1.732051 / 4, 0]])
        clipped = SEEN._replace(advantages=-ADVANTAGES)
        assert np.all(gradient(loss, clipped) == 0)


def test_sequence_clip_by_token_takes_each_tokens_advantage():
    """What GSPO-token is for: -s A_t grad logp_t."""
    view = SEEN._replace(advantages=np.array([[1.0, 2, 3, 4], [0, 0, -1, 0]], np.float32))
    close(gradient(SequenceClip(0.5, 0.9, per_token=True), view), -view.advantages * [[0.958415], [1.732051]])


def sequential(loss):
    """A loss of one sequence's masked tokens, in float64, as a function of (logp, old, A)."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))

    def gspo(d, a):
        s = np.exp(d.mean())
        return np.maximum(-s * a, -np.clip(s, 1 - loss.low, 1 + loss.high) * a)

    def gmpo(d, a):
        product = 1.0
        for x, sign in zip(d, np.sign(a)):
            product *= np.exp(sign * min(sign * x, loss.high if sign > 0 else loss.low)) ** (1 / len(d))
        return -a * product

    def sapo(d, a):
        tau = np.where(a > 0, loss.positive, loss.negative)
        return -4 / tau * sigmoid(tau * (np.exp(d) - 1)) * a

    return {SequenceClip: gspo, GMPO: gmpo, SAPO: sapo}[type(loss)]


@pytest.mark.pitfall("T-64")
@pytest.mark.pitfall("T-28")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", [SequenceClip(0.2, 0.3), GMPO(0.1, 0.2), SAPO(), SAPO(2.0, 3.0)], ids=str)
def test_differentiable_losses_of_packed_rows(loss, seed):
    """Value and finite-difference gradient, each sequence by itself in float64."""
    rng = np.random.default_rng(seed)
    sequences = rows.sequences(rng)
    arrangement = rows.packed(sequences, rng)
    view = rows.view(sequences, arrangement, dirt=-2.0)
    value, grad = np.asarray(loss(view)[0]), gradient(loss, view)
    for b, t, _, i in rows.places(sequences, arrangement):
        s = sequences[i]
        m = s["mask"]
        if not m.any():
            continue
        d, a = np.float64(s["logp"] - s["old"])[m], np.float64(s["advantages"])[m]
        f = partial(sequential(loss), a=a)
        close(value[b, t][m], f(d))
        steps = 1e-6 * np.eye(len(d))
        close(grad[b, t][m], [(f(d + h) - f(d - h)).sum() / 2e-6 for h in steps], 1e-4)


def test_gmpo_holds_ratios_pessimistically():
    """High ratios only where A > 0 and low ones only where A < 0."""
    d = np.log([[2.0, 0.25]])
    close(GMPO(0.4, 0.4)(one(d, 0 * d, [[1.0, 1]]))[0][0, 0], -np.sqrt(np.exp(0.4) * 0.25))
    loss, seen = GMPO(0.4, 0.4)(one(d, 0 * d, [[-1.0, -1]]))
    close(loss[0, 0], np.sqrt(2.0 * np.exp(-0.4)))
    assert seen["clip_fraction/low"].tolist() == [[False, True]] and not np.any(seen["clip_fraction/high"])


@pytest.mark.pitfall("T-64")
@pytest.mark.parametrize("low, high, bounds", [(None, 0.5, (0, 1.5)), (0.2, 0.28, (0.8, 1.28)), (None, 4.0, (0, 5.0))])
def test_cispo_keeps_the_gradient_of_clipped_tokens(low, high, bounds):
    """-clip(r) A grad logp everywhere, which is not zero where r is clipped, as Clip's is."""
    ratio = np.array([[0.1, 0.9, 1.0, 1.3, 7.0]])
    view = one(np.log(ratio) - 3, 0 * ratio - 3, [[1.0, -2.0, 1.0, 0.5, 3.0]])
    loss, seen = CISPO(low, high)(view)
    close(loss, -np.clip(ratio, *bounds) * view.advantages * view.logp)
    close(gradient(CISPO(low, high), view), -np.clip(ratio, *bounds) * view.advantages)
    assert gradient(CISPO(low, high), view)[0, 4] < 0 == gradient(Clip(), view)[0, 4]
    assert seen["clip_fraction/high"].tolist() == [[False, False, False, high < 0.3, True]]
    assert seen["clip_fraction/low"].tolist() == [[low is not None, False, False, False, False]]


def test_sapo_is_a_policy_gradient_where_nothing_moved():
    """The gate's slope is 1 at r = 1, for either temperature."""
    view = one([[-1.0, -2.0]], [[-1.0, -2.0]], [[3.0, -3.0]])
    close(gradient(SAPO(), view), [[-3.0, 3.0]])
    close(SAPO()(view)[0], [[-2 * 3.0, 2 / 1.05 * 3.0]])


def test_vespo():
    """phi(w) = w^k e^(rate (1 - w)) with w = 1.25 * .75 * 1.8 * .5 = .84375 for A = 1, and w = 3 for A = -1."""
    first, second = 0.84375**2 * np.exp(3 * (1 - 0.84375)), 3.0**3 * np.exp(2 * (1 - 3.0))
    close(VESPO()(SEEN)[0], np.array([[-first], [second]]) * LOGP, 1e-5)
    close(gradient(VESPO(), SEEN), np.where(MASK, [[-first], [second]], 0), 1e-5)


def test_dppo():
    """By differences of probability: .5 - .4, .3 - .4, .9 - .5, .2 - .4 rise beyond .2 once, where A = 1."""
    loss, seen = DPPO(tau=0.5)(SEEN)
    squares = 0.5 * np.log([[1.25, 0.75, 1.8, 0.5], [1, 1, 3, 1]]) ** 2
    close(loss, squares + [[-1.25, -0.75, 0, -0.5], [1, 1, 3, 1]])
    assert seen["clip_fraction/high"].tolist() == [[False, False, True, False], [False] * 4]
    loss, seen = DPPO(low=0.15, high=0.35, tau=0.0)(SEEN._replace(advantages=-ADVANTAGES))
    close(loss, [[1.25, 0.75, 1.8, 0], [-1, -1, 0, -1]])  # risen .4 where A = 1; fallen .2 where A = -1
    assert seen["clip_fraction/low"].tolist() == [[False, False, False, True], [False] * 4]
    close(gradient(DPPO(tau=0.5), SEEN)[0, 2], 2 * 0.5 * np.log(1.8))  # what is left out still has the second term's


def test_off_policy_mask():
    """Sequences are dropped where mean(sampled - logp) > delta and A < 0: .0425 for the first here, -.549 for the
    second; they keep their place in the denominator."""
    view = SEEN._replace(old=LOGP - 0.1, sampled=OLD, advantages=-np.ones((2, 4), np.float32))
    assert np.mean((OLD - LOGP)[0]) == pytest.approx(-np.log(0.958415), abs=1e-5)
    loss, seen = OffPolicyMask(Clip(), 0.04)(view)
    assert np.all(loss[0] == 0) and seen["off_policy_fraction"].tolist() == [[True] * 4, [False] * 4]
    close(loss[1], Clip()(view)[0][1])
    close(OffPolicyMask(Clip(), 0.05)(view)[0], Clip()(view)[0])
    close(OffPolicyMask(Clip(), 0.04)(SEEN._replace(sampled=OLD))[0], Clip()(SEEN)[0])  # A > 0 in the first
    assert np.all(gradient(OffPolicyMask(Clip(), 0.04), view)[0] == 0)


def values(v, old, r) -> View:
    v, old, r = (np.array([x], np.float32) for x in (v, old, r))
    return View(logp=None, mask=v == v, segments=np.ones(v.shape, np.int32), values=v, old_values=old, returns=r)


def test_value_loss():
    """max((V - R)^2, (clip(V) - R)^2) / 2: the clipped error where V went too far towards R, else the free one."""
    view = values([1.0, 3.0, 1.0, 0.0], [0.0, 2.0, 0.9, 2.0], [2.0, 0.0, 3.0, 0.0])
    loss, seen = ValueLoss(0.5)(view)
    close(loss, [[1.5**2 / 2, 9 / 2, 4 / 2, 1.5**2 / 2]])
    assert seen["clip_fraction/value"].tolist() == [[True, False, False, True]]
    close(gradient(ValueLoss(0.5), view, "values"), [[0, 3, -2, 0]])
    close(ValueLoss(None)(view._replace(old_values=None))[0], [[0.5, 4.5, 2, 0]])


def test_huber():
    view = values([0.5, -3.0, 12.0], [0.0] * 3, [0.0] * 3)
    close(ValueLoss(None, huber=2.0)(view)[0], [[0.125, 2 * (3 - 1), 2 * (12 - 1)]])
    close(gradient(ValueLoss(None, huber=2.0), view, "values"), [[0.5, -2, 2]])


@pytest.mark.parametrize(
    "loss, bad",
    [
        (Clip, dict(low=1.0)),
        (Clip, dict(low=-0.1)),
        (Clip, dict(high=-0.1)),
        (Clip, dict(dual=1.0)),
        (SequenceClip, dict(low=1.0)),
        (GMPO, dict(low=0.0)),
        (CISPO, dict(high=-1.0)),
        (CISPO, dict(low=1.5)),
        (SAPO, dict(positive=0.0)),
        (SAPO, dict(negative=-1.0)),
        (VESPO, dict(positive=(2.0, 0.0))),
        (VESPO, dict(negative=(0.0, 1.0))),
        (DPPO, dict(low=0.0)),
        (DPPO, dict(high=1.1)),
        (DPPO, dict(tau=-1.0)),
        (ValueLoss, dict(clip=0.0)),
        (ValueLoss, dict(huber=-1.0)),
        (OffPolicyMask, dict(delta=-0.1)),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(loss, bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        loss(**bad)
