"""Corrections of the mismatch between sampler and trainer: bounds on w = prox / sampled itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.train.corrections import Mask, SequenceMask, Truncate
from rljax.train.losses import Clip
from rljax.train.reductions import token_mean
from rljax.train.view import View

# the decoupled example of `ref_math.py`: w = [1.125, .875, 1.4, .25] and [1, 1, 1.5, 1]
LOGP = np.log(np.array([[0.5, 0.3, 0.9, 0.2], [0.4, 0.1, 0.6, 0.5]], np.float32))
SAMPLED = np.log(np.array([[0.4, 0.4, 0.5, 0.4], [0.4, 0.1, 0.2, 0.5]], np.float32))
PROX = np.log(np.array([[0.45, 0.35, 0.7, 0.1], [0.4, 0.1, 0.3, 0.5]], np.float32))
W = np.array([[1.125, 0.875, 1.4, 0.25], [1, 1, 1.5, 1]])
MASK = np.array([[1, 1, 1, 1], [1, 0, 1, 0]], bool)
SEGMENTS = np.ones((2, 4), np.int32)


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


def weights(correction, prox=PROX, sampled=SAMPLED, mask=MASK, segments=SEGMENTS):
    return np.asarray(jax.jit(correction)(prox, sampled, mask, segments))


def of(w, mask=None):
    """Weights of a row of which the ratios are w."""
    w = np.atleast_2d(np.float32(w))
    mask = np.ones(w.shape, bool) if mask is None else np.atleast_2d(mask)
    return lambda correction: weights(correction, np.log(w), 0 * w, mask, np.ones(w.shape, np.int32))[0]


def test_truncate():
    close(weights(Truncate(0.5, 1.2)), np.where(MASK, np.clip(W, 0.5, 1.2), 0))
    close(of([0.01, 1, 7])(Truncate()), [0.01, 1, 2])


def test_mask():
    close(of([0.4, 0.6, 4.9, 5.1])(Mask()), [0, 0.6, 4.9, 0])


@pytest.mark.pitfall("T-65")
def test_bounds_are_those_of_w_and_not_of_its_inverse():
    for correction in (Mask(0.1, 2.0), Mask(0.1, 2.0, "sequence"), Mask(0.1, 2.0, "sequence", product=True)):
        close(of([5.0])(correction), [0])
        close(of([1 / 5])(correction), [1 / 5])
    close(of([5.0])(SequenceMask(0.1, 2.0)), [0])
    close(of([1 / 5])(SequenceMask(0.1, 2.0)), [1 / 5])


def test_sequence_levels():
    """Geometric mean or product, for the bounds and as the weight."""
    w = [0.5, 2.0, 4.0, 99.0]
    row, mean = of(w, [1, 1, 1, 0]), 4 ** (1 / 3)
    close(row(Truncate(0, 9, "sequence")), [mean] * 3 + [0])
    close(row(Truncate(0, 1.1, "sequence")), [1.1] * 3 + [0])
    close(row(Truncate(0, 9, "sequence", product=True)), [4] * 3 + [0])
    close(row(Mask(0, 2, "sequence")), [mean] * 3 + [0])
    close(row(Mask(0, 3, "sequence", product=True)), [0] * 4)


@pytest.mark.pitfall("T-65")
def test_sequence_mask_keeps_raw_weights():
    """By its geometric mean a sequence is kept or not; what is kept is each token's own w, untruncated."""
    close(of([50.0, 1 / 50])(SequenceMask()), [50, 1 / 50])
    close(of([1.01, 1.0])(SequenceMask()), [0, 0])  # 1.005
    close(of([0.99, 1.0])(SequenceMask()), [0, 0])  # .995
    close(of([1.002, 1.001])(SequenceMask()), [1.002, 1.001])


@pytest.mark.pitfall("T-27")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("correction", [Truncate(), Mask(), Truncate(level="sequence"), SequenceMask(0.1, 9)], ids=str)
def test_ratios_that_are_not_finite_count_as_one(correction, bad):
    prox, clean = np.array([[0.1, bad, 0.2]], np.float32), np.array([[0.1, 0, 0.2]], np.float32)
    mask, segments, zeros = np.ones((1, 3), bool), np.ones((1, 3), np.int32), np.zeros((1, 3), np.float32)
    close(weights(correction, prox, zeros, mask, segments), weights(correction, clean, zeros, mask, segments), 1e-7)
    off = np.array([[True, False, True]])
    got = weights(correction, prox, zeros, off, segments)
    assert got[0, 1] == 0 and np.all(got[0, [0, 2]] > 1)


def test_far_ratios_are_finite():
    for correction in (Truncate(0, 1e30), Truncate(0, 1e30, "sequence"), Truncate(0, 1e30, "sequence", product=True)):
        assert np.all(np.isfinite(weights(correction, np.full((2, 4), 600.0, np.float32), SAMPLED)))


def decoupled(correction, prox=PROX, sampled=SAMPLED):
    """sum over tokens of w min(r A, clip(r) A) / N, with r = logp / prox."""
    advantages = np.array([[1.0] * 4, [-1.0] * 4], np.float32)
    view = View(logp=LOGP, mask=MASK, segments=SEGMENTS, old=prox, advantages=advantages)
    return float(np.sum(token_mean(MASK, SEGMENTS) * Clip()(view)[0] * weights(correction, prox, sampled)))


@pytest.mark.pitfall("T-65")
def test_what_is_rejected_stays_in_the_denominator():
    """The numbers of `ref_math.py`: .003333 with all tokens kept, .211667 with one rejected, not .254."""
    assert decoupled(Mask(0, 5)) == pytest.approx(0.003333, abs=1e-6)
    sampled = SAMPLED.copy()
    sampled[0, 0] = PROX[0, 0] - np.log(7)
    assert decoupled(Mask(0, 5), sampled=sampled) == pytest.approx(0.211667, abs=1e-6)


@pytest.mark.parametrize("correction", [Truncate(0.5, 1.2), Mask(), SequenceMask(0.1, 2)], ids=str)
def test_weights_have_no_gradient(correction):
    total = lambda prox, sampled: jnp.sum(correction(prox, sampled, MASK, SEGMENTS))
    assert all(np.all(g == 0) for g in jax.grad(total, (0, 1))(PROX, SAMPLED))


@pytest.mark.parametrize(
    "kind, bad, said",
    [(Truncate, dict(low=2.0), "low=2.0"), (Mask, dict(high=0.1), "high=0.1"), (Mask, dict(low=-1.0), "low=-1.0"),
     (SequenceMask, dict(low=1.1), "low=1.1"), (Truncate, dict(level="row"), "level='row'"),
     (Mask, dict(product=True), "product=True")],
)  # fmt: skip
def test_impossible_settings_are_refused(kind, bad, said):
    with pytest.raises(ValueError, match=said):
        kind(**bad)
