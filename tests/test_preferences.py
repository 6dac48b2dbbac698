"""Preference and reward model losses equal 2.14's numbers and, of packed rows, loops over pairs in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rows

from rljax.train.preferences import DPO, IPO, IRPO, KTO, ORPO, Hinge, SimPO
from rljax.train.reductions import pair_mean, sequence_mean_token_mean
from rljax.train.supervised import BradleyTerry, StepLabels
from rljax.train.view import View

sigmoid = lambda x: 1 / (1 + np.exp(-x))
PAIRED = [DPO(), DPO(0.4, smoothing=0.1), DPO(smoothing=0.2, robust=True), IPO(), IPO(0.3, averaged=False), Hinge(2.0),
          IRPO(0.3, alpha=0.7), ORPO(0.5), SimPO(), SimPO(3.0, gamma=0.2)]  # fmt: skip


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


def pair(policy=(-10.0, -12.0), reference=(-11.0, -11.0), lengths=(5, 4), prompt=2) -> View:
    """2.14's pair in one row: log-probabilities spread over the completions, which follow a prompt each."""
    fields = {"logp": [], "ref_logp": [], "mask": [], "segments": []}
    for i, n in enumerate(lengths):
        for name, sums in (("logp", policy), ("ref_logp", reference)):
            fields[name] += [0.0] * prompt + list(sums[i] * np.arange(1, n + 1) / np.arange(1, n + 1).sum())
        fields["mask"] += [False] * prompt + [True] * n
        fields["segments"] += [i + 1] * (prompt + n)
    types = {"mask": bool, "segments": np.int32}
    return View(**{name: np.array([x], types.get(name, np.float32)) for name, x in fields.items()})


def reduced(loss, view, reduction=pair_mean):
    each, seen = loss(view)
    weights = reduction(view.mask, view.segments)
    return float(np.sum(np.asarray(weights * each))), {k: mean(*v) for k, v in seen.items()}


def mean(values, weights):
    return float(np.sum(np.asarray(values, np.float64) * weights) / np.sum(weights))


@pytest.mark.pitfall("T-11")
@pytest.mark.parametrize(
    "loss, golden",
    [
        (DPO(), 0.598139),
        (DPO(smoothing=0.1), 0.618139),
        (DPO(smoothing=0.1, robust=True), (0.9 * 0.598139 - 0.1 * (0.598139 + 0.2)) / 0.8),  # -log s(-z) = z - log s(z)
        (IPO(), 20.7025),
        (IPO(averaged=False), (2 - 5) ** 2),
        (Hinge(), 1 - 0.2),
        (IRPO(), 0.598139 + 10 / 5),
        (IRPO(alpha=0.5), 0.598139 + 5 / 5),
        (SimPO(2.0, 1.0), np.log1p(np.exp(-(2 * (-2 + 3) - 1)))),
    ],
    ids=str,
)
def test_golden_numbers(loss, golden):
    value, seen = reduced(loss, pair())
    assert value == pytest.approx(golden, rel=2e-6)
    assert seen["preference/accuracy"] == 1


def test_orpo():
    """p = -2 and -3: -p_w - beta log sigmoid(log odds ratio), odds = e^p / (1 - e^p)."""
    ratio = (np.exp(-2) / (1 - np.exp(-2))) / (np.exp(-3) / (1 - np.exp(-3)))
    assert reduced(ORPO(0.1), pair())[0] == pytest.approx(2 + 0.1 * np.log1p(1 / ratio), rel=1e-6)
    certain = pair(policy=(0.0, -12.0))  # odds without bound
    value, grad = jax.value_and_grad(lambda x: jnp.sum(ORPO()(certain._replace(logp=x))[0]))(certain.logp)
    assert np.isfinite(value) and np.all(np.isfinite(grad))


def test_what_is_seen_of_a_pair():
    """Rewards are beta times the log ratios, 1 and -1 here."""
    seen = reduced(DPO(0.4), pair())[1]
    close([seen[f"preference/{x}"] for x in ("chosen", "rejected", "margin", "accuracy")], [0.4, -0.4, 0.8, 1])
    swapped = reduced(DPO(0.4), pair((-12.0, -10.0), lengths=(4, 5)))[1]
    close([swapped[f"preference/{x}"] for x in ("chosen", "rejected", "margin", "accuracy")], [-0.4, 0.4, -0.8, 0])


@pytest.mark.pitfall("T-45")
def test_rewards_are_the_same_with_the_likelihood_beside():
    plain, beside = reduced(DPO(), pair())[1], reduced(IRPO(alpha=1.0), pair())[1]
    assert beside["preference/nll"] == pytest.approx(2)
    for alpha in (0.0, 1.0):
        assert {k: v for k, v in reduced(IRPO(alpha=alpha), pair())[1].items() if k in plain} == plain


def single(loss, c, r):
    """The loss of one pair, whose masked fields are c and r, in float64."""
    logsigmoid = lambda x: -np.log1p(np.exp(-x))
    ratio = lambda s: (s["logp"] - s["ref_logp"]).sum()
    n, m = len(c["logp"]), len(r["logp"])
    z = ratio(c) - ratio(r) if type(loss) not in (ORPO, SimPO) else None
    p, q = c["logp"].mean(), r["logp"].mean()
    match loss:
        case DPO(beta, e, False):
            return -(1 - e) * logsigmoid(beta * z) - e * logsigmoid(-beta * z)
        case DPO(beta, e, True):
            return (-(1 - e) * logsigmoid(beta * z) + e * logsigmoid(-beta * z)) / (1 - 2 * e)
        case IPO(beta, averaged):
            h = ratio(c) / n - ratio(r) / m if averaged else z
            return (h - 1 / (2 * beta)) ** 2
        case Hinge(beta):
            return max(0.0, 1 - beta * z)
        case IRPO(beta, alpha):
            return -logsigmoid(beta * z) - alpha * p
        case ORPO(beta):
            odds = lambda p: np.log(np.exp(p) / (1 - np.exp(p)))
            return -p - beta * logsigmoid(odds(p) - odds(q))
        case SimPO(beta, gamma):
            return -logsigmoid(beta * (p - q) - gamma)


def pairs_of(sequences):
    """Masked fields in float64 of the pairs whose two sides both have any."""
    masked = [{k: np.float64(x[s["mask"]]) for k, x in s.items()} for s in sequences]
    pairs = zip(masked[::2], masked[1::2])
    return [(i, *p) for i, p in enumerate(pairs) if all(len(s["logp"]) for s in p)]


@pytest.mark.pitfall("T-08")
@pytest.mark.pitfall("T-104")
@pytest.mark.parametrize("loss", PAIRED, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_packed_pairs(loss, seed):
    """The mean over whole pairs, its finite-difference gradient, and none at prompts and at pairs half empty."""
    rng = np.random.default_rng(seed)
    sequences = rows.sequences(rng, count=10)
    arrangement = rows.packed(sequences, rng, group=2)
    view = rows.view(sequences, arrangement, dirt=-5.0)
    whole = pairs_of(sequences)
    assert 0 < len(whole) < 5
    value, grad, seen = rows.compiled(loss)(view, pair_mean(view.mask, view.segments))
    assert value == pytest.approx(np.mean([single(loss, c, r) for _, c, r in whole]), rel=1e-5)
    assert seen["preference/margin"][1] == len(whole)
    grads = dict(enumerate(rows.taken(grad, sequences, arrangement)))
    for i, c, r in whole:
        for side, s in ((2 * i, c), (2 * i + 1, r)):
            moved = lambda d, s=s: single(loss, *(x | dict(logp=x["logp"] + d) if x is s else x for x in (c, r)))
            steps = 1e-6 * np.eye(len(s["logp"]))
            expected = [(moved(d) - moved(-d)) / 2e-6 / len(whole) for d in steps]
            got = grads.pop(side)
            close(got[sequences[side]["mask"]], expected, 1e-4)
            assert np.all(got[~sequences[side]["mask"]] == 0)
    assert all(np.all(g == 0) for g in grads.values())


@pytest.mark.pitfall("T-67")
@pytest.mark.parametrize("loss", [*PAIRED, KTO()], ids=str)
def test_who_needs_a_reference(loss):
    """Those that say so change with its log-probabilities; the others do without."""
    view = pair()._replace(advantages=np.float32(pair().mask), target=0 * pair().logp)
    reduction = sequence_mean_token_mean if isinstance(loss, KTO) else pair_mean
    if getattr(loss, "needs_reference", False):
        spoiled = view._replace(ref_logp=np.where(view.segments == 1, view.ref_logp + 1, view.ref_logp))
        assert abs(reduced(loss, spoiled, reduction)[0] - reduced(loss, view, reduction)[0]) > 1e-3
    else:
        reduced(loss, view._replace(ref_logp=None), reduction)


def test_kto():
    """lambda (1 - sigmoid(+-beta (d - z0))) of each sequence, and the mean over sequences; d = 1 and -1 here."""
    view = pair()._replace(advantages=np.where(pair().segments == 1, 1, -1).astype(np.float32) * pair().mask,
                           target=np.float32(0.5) * pair().mask)  # fmt: skip
    loss = KTO(0.4, desirable=1.5, undesirable=0.7)
    good, bad = 1.5 * (1 - sigmoid(0.4 * (1 - 0.5))), 0.7 * (1 - sigmoid(0.4 * (0.5 + 1)))
    value, seen = reduced(loss, view, sequence_mean_token_mean)
    assert value == pytest.approx((good + bad) / 2, rel=1e-6)
    close([seen[f"preference/{x}"] for x in ("accuracy", "chosen", "rejected")], [1, 0.4, -0.4])
    value, seen = reduced(loss, view._replace(advantages=-view.advantages), sequence_mean_token_mean)
    good, bad = 1.5 * (1 - sigmoid(0.4 * (-1 - 0.5))), 0.7 * (1 - sigmoid(0.4 * (0.5 - 1)))
    assert value == pytest.approx((good + bad) / 2, rel=1e-6)
    close([seen[f"preference/{x}"] for x in ("accuracy", "chosen", "rejected")], [0, -0.4, 0.4])


@pytest.mark.pitfall("T-104")
def test_kto_does_not_train_the_prompt():
    view = pair()._replace(advantages=np.float32(pair().mask), target=0 * pair().logp)
    weights = sequence_mean_token_mean(view.mask, view.segments)
    grad = np.asarray(jax.grad(lambda x: jnp.sum(weights * KTO()(view._replace(logp=x))[0]))(view.logp))
    assert np.all((grad != 0) == view.mask)


SCORES = np.array([[9, 9, 2.0, 9, 0.5, 9, 1.0, 3.0]], np.float32)
SCORED = View(logp=None, mask=np.array([[0, 1, 1, 0, 1, 0, 1, 1]], bool), scores=SCORES,
              segments=np.array([[1, 1, 1, 2, 2, 3, 3, 4]], np.int32))  # fmt: skip


def test_bradley_terry():
    """Scores of the last masked tokens: 2 against .5, and 1 against 3."""
    value, seen = reduced(BradleyTerry(), SCORED)
    assert value == pytest.approx(np.mean([-np.log(sigmoid(1.5)), -np.log(sigmoid(-2.0))]), rel=1e-6)
    close([seen[f"preference/{x}"] for x in ("accuracy", "margin", "chosen", "rejected")], [0.5, -0.25, 1.5, 1.75])
    value, _ = reduced(BradleyTerry(center=0.1), SCORED)
    expected = np.mean([-np.log(sigmoid(1.5)) + 0.1 * 2.5**2, -np.log(sigmoid(-2.0)) + 0.1 * 4**2])
    assert value == pytest.approx(expected, rel=1e-6)
    margins = SCORED._replace(target=np.array([[0, 1, 1, 0, 1, 0, 0.25, 0.25]], np.float32))
    value, seen = reduced(BradleyTerry(), margins)
    assert value == pytest.approx(np.mean([-np.log(sigmoid(0.5)), -np.log(sigmoid(-2.25))]), rel=1e-6)
    assert seen["preference/margin"] == pytest.approx(-0.25)


def test_bradley_terry_trains_the_last_token_alone():
    grad = jax.grad(lambda x: jnp.sum(BradleyTerry()(SCORED._replace(scores=x))[0]))(SCORES)
    s = [-sigmoid(-1.5), sigmoid(-1.5), -sigmoid(2.0), sigmoid(2.0)]
    close(grad, [[0, 0, s[0], 0, s[1], 0, s[2], s[3]]])


@pytest.mark.pitfall("T-106")
def test_step_labels():
    """Cross-entropy at the ends of steps alone."""
    view = SCORED._replace(scores=SCORES - 1.5, target=np.array([[0, 1, 0, 1, 0, 1, 0, 1]], np.float32))
    loss, seen = StepLabels()(view)
    p = sigmoid(np.float64(view.scores))
    close(loss, -np.log(np.where(view.target > 0, p, 1 - p)))
    assert seen["accuracy"].tolist() == [[False, True, False, True, True, True, True, True]]
    grad = jax.grad(lambda x: jnp.sum(jnp.where(view.mask, StepLabels()(view._replace(scores=x))[0], 0.0)))(view.scores)
    close(grad, np.where(view.mask, p - view.target, 0))
    far = view._replace(scores=np.where(view.target > 0, -500.0, 500.0).astype(np.float32))
    close(StepLabels()(far)[0], np.full((1, 8), 500.0))


@pytest.mark.parametrize("loss", [DPO(), IPO(), Hinge(), IRPO(), ORPO(), SimPO(), KTO(), BradleyTerry()], ids=str)
def test_sequences_far_apart_are_finite(loss):
    view = pair((-3000.0, -1.0), (-1.0, -3000.0))
    view = view._replace(advantages=np.float32(view.mask), target=0 * view.logp, scores=view.logp)
    of = "scores" if isinstance(loss, BradleyTerry) else "logp"
    total = lambda x: jnp.sum(jnp.where(view.mask, loss(view._replace(**{of: x}))[0], 0.0))
    value, grad = jax.value_and_grad(total)(getattr(view, of))
    assert np.isfinite(value) and np.all(np.isfinite(grad))


@pytest.mark.parametrize(
    "kind, bad",
    [(DPO, dict(beta=0.0)), (DPO, dict(smoothing=0.5)), (DPO, dict(smoothing=-0.1)), (IPO, dict(beta=-1.0)),
     (Hinge, dict(beta=0.0)), (IRPO, dict(alpha=-1.0)), (ORPO, dict(beta=0.0)), (SimPO, dict(gamma=-1.0)),
     (KTO, dict(beta=0.0)), (KTO, dict(undesirable=-1.0)), (BradleyTerry, dict(center=-1.0))],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused(kind, bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        kind(**bad)
