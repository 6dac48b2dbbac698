"""Reductions equal their closed forms, and sums over packed sequences those of loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.train.reductions import (
    ConstantLength,
    luspo,
    pair_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
)
from rljax.train.sequences import chosen, first, last, lengths, means, totals

# Clip's losses of 2.14: ratios [1.25, .75, 1.8, .5] with A = 1; [1, 1, 3, 1] with A = -1
LOSS = np.array([[-1.2, -0.75, -1.2, -0.5], [1, 1, 3, 1]], np.float32)
MASK = np.array([[1, 1, 1, 1], [1, 0, 1, 0]], bool)
ONES = np.ones((2, 4), np.int32)
REDUCTIONS = [token_mean, sequence_mean_token_mean, sequence_mean_token_sum, ConstantLength(8)]


def reduced(reduction, loss=LOSS, mask=MASK, segments=None):
    segments = np.ones(mask.shape, np.int32) if segments is None else segments
    return float(np.sum(np.asarray(reduction(mask, segments)) * loss))


def in_one_row(*arrays):
    return tuple(x.reshape(1, -1) for x in arrays)


@pytest.mark.pitfall("T-08")
@pytest.mark.pitfall("T-11")
@pytest.mark.parametrize(
    "reduction, golden",
    [
        (token_mean, 0.058333),  # (-3.65 + 4) / 6
        (ConstantLength(8), 0.021875),  # 0.35 / (2 * 8)
        (sequence_mean_token_sum, 0.175),  # (-3.65 + 4) / 2
        (sequence_mean_token_mean, 0.54375),  # (-3.65 / 4 + 4 / 2) / 2
    ],
)
def test_reductions(reduction, golden):
    """As rows of their own, beside rows and sequences without a token, and both in one row."""
    assert reduced(reduction) == pytest.approx(golden, abs=1e-6)
    empty = np.concatenate([MASK, np.zeros((3, 4), bool)])
    loss = np.concatenate([LOSS, np.full((3, 4), 7.0)])
    assert reduced(reduction, loss, empty) == pytest.approx(golden, abs=1e-6)
    segments = np.concatenate([ONES, ONES + 1, 0 * ONES, 0 * ONES])[:5]
    assert reduced(reduction, loss, empty, segments) == pytest.approx(golden, abs=1e-6)
    one = in_one_row(loss, empty, np.repeat([[1], [2], [3], [0], [0]], 4, 1).astype(np.int32))
    assert reduced(reduction, *one) == pytest.approx(golden, abs=1e-6)


@pytest.mark.pitfall("T-08")
def test_a_row_is_not_a_sequence():
    """Control: taken as one sequence, a packed row of two has another mean."""
    loss, mask, segments = in_one_row(LOSS, MASK, ONES)
    assert reduced(sequence_mean_token_mean, loss, mask, segments) == pytest.approx(0.35 / 6, abs=1e-6)
    assert reduced(sequence_mean_token_sum, loss, mask, segments) == pytest.approx(0.35, abs=1e-6)


def test_luspo():
    """1/B sum n_i L_i, of losses of sequences: 4 tokens of loss 2, 2 tokens of loss -1."""
    loss = np.array([[2.0] * 4, [-1.0] * 4])
    assert reduced(luspo, loss) == pytest.approx((4 * 2 - 2 * 1) / 2, abs=1e-6)


@pytest.mark.pitfall("T-02")
def test_a_mean_of_token_means_is_another_number():
    """Control: 2.14's wrong value, each microbatch by its own count, is not what the token mean gives."""
    wrong = np.mean([reduced(token_mean, LOSS[i : i + 1], MASK[i : i + 1]) for i in range(2)])
    assert wrong == pytest.approx(0.54375, abs=1e-6) and abs(reduced(token_mean) - wrong) > 0.4


@pytest.mark.pitfall("T-03")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_twice_over_has_the_same_loss(reduction):
    twice = reduced(reduction, np.concatenate([LOSS, LOSS]), np.concatenate([MASK, MASK]))
    assert twice == pytest.approx(reduced(reduction), rel=1e-6)
    beside = reduced(reduction, np.tile(LOSS, 2), np.tile(MASK, 2), np.repeat([[1, 2], [1, 2]], 4, 1).astype(np.int32))
    assert beside == pytest.approx(reduced(reduction), rel=1e-6)


@pytest.mark.pitfall("T-25")
@pytest.mark.pitfall("T-26")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_are_float32_zero_off_the_mask_and_finite_without_any(reduction):
    weights = reduction(MASK, ONES)
    assert weights.dtype == np.float32 and np.all((np.asarray(weights) > 0) == MASK)
    assert np.all(np.asarray(reduction(np.zeros((2, 4), bool), ONES)) == 0)


def test_pair_mean():
    """One over the pairs, on the chosen's first token; a pair half empty, or without its second, is none."""
    segments = np.array([[1, 1, 1, 2, 2, 3, 3, 4, 4, 0], [1, 1, 2, 2, 3, 3, 3, 0, 0, 0]], np.int32)
    mask = np.array([[0, 1, 1, 0, 1, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 1, 1, 0, 0, 0]], bool)
    weights = pair_mean(mask, segments)
    assert weights.dtype == np.float32
    assert np.argwhere(np.asarray(weights)).tolist() == [[0, 1], [0, 5]] and np.all(weights[weights > 0] == 0.5)
    assert np.all(np.asarray(pair_mean(np.zeros_like(mask), segments)) == 0)


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match="length=0"):
        ConstantLength(0)


def naive(view, sequences, arrangement):
    """Totals, means, lengths, firsts, lasts by loops in float64."""
    out = {name: np.zeros(view.mask.shape) for name in ("totals", "means", "lengths", "first", "last")}
    for b, t, _, _ in rows.places(sequences, arrangement):
        x, where = np.float64(view.logp[b, t]), np.flatnonzero(view.mask[b, t])
        out["totals"][b, t], out["lengths"][b, t] = x.sum(), len(where)
        out["means"][b, t] = x[where].mean() if len(where) else 0
        if len(where):
            out["first"][b, t.start + where[0]] = out["last"][b, t.start + where[-1]] = 1
    return out


@jax.jit
def ours(view):
    x, mask, segments = view.logp, view.mask, view.segments
    return dict(
        totals=totals(x, segments), means=means(x, mask, segments), lengths=lengths(mask, segments),
        first=first(mask, segments), last=last(mask, segments),
    )  # fmt: skip


@jax.jit
def gradients(view, weights):
    of = lambda x: totals(x, view.segments) + 2 * means(x, view.mask, view.segments)
    return jax.grad(lambda x: jnp.sum(weights * of(x)))(view.logp)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_sums_over_sequences(seed):
    """Values and gradients are those of loops; every token of a sequence has the very same number."""
    rng = np.random.default_rng(seed)
    sequences = rows.sequences(rng, int(rng.integers(1, 13)), longest=int(rng.integers(2, 13)))
    arrangement = rows.packed(sequences, rng)
    view = rows.view(sequences, arrangement)
    expected, got = naive(view, sequences, arrangement), ours(view)
    for name in expected:
        np.testing.assert_allclose(np.float64(got[name]), expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
    weights = rng.normal(size=view.mask.shape).astype(np.float32)
    gradient, expected = np.asarray(gradients(view, weights)), np.zeros(view.mask.shape)
    for b, t, _, _ in rows.places(sequences, arrangement):
        n, total = view.mask[b, t].sum(), np.float64(weights[b, t]).sum()
        expected[b, t] = total + (2 * total / n * view.mask[b, t] if n else 0)
        assert len({float(x) for x in got["totals"][b, t]}) == 1
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.pitfall("T-27")
def test_padding_never_matters():
    """Not its values, NaN included, nor where it lies."""
    x = np.array([[np.nan, 1, 2, np.inf, 3, 4, 5, np.nan]], np.float32)
    segments = np.array([[0, 1, 1, 0, 2, 2, 2, 0]], np.int32)
    assert np.asarray(totals(x, segments)).tolist() == [[0, 3, 3, 0, 12, 12, 12, 0]]
    mask = np.ones_like(segments, bool)
    assert np.asarray(lengths(mask, segments)).tolist() == [[0, 2, 2, 0, 3, 3, 3, 0]]
    assert np.flatnonzero(first(mask, segments)).tolist() == [1, 4]
    assert np.flatnonzero(last(mask, segments)).tolist() == [2, 6]
    gradient = jax.grad(lambda x: jnp.sum(totals(x, segments)))(x)
    assert np.asarray(gradient).tolist() == [[0, 2, 2, 0, 3, 3, 3, 0]]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 64, 65])
def test_rows_of_any_length(length):
    segments = np.ones((1, length), np.int32)
    assert np.all(np.asarray(totals(np.ones((1, length), np.float32), segments)) == length)
    assert np.flatnonzero(first(segments > 0, segments)).tolist() == [0]
    assert np.flatnonzero(last(segments > 0, segments)).tolist() == [length - 1]


def test_sums_cost_rounds_not_squares():
    """The work of a row grows as T log T: no product of T by T, and no loop over tokens."""
    x = jax.ShapeDtypeStruct((1, 4096), jnp.float32), jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    text = jax.jit(totals).lower(*x).as_text()
    assert "4096x4096" not in text and "dense<12>" in text  # 2^12 tokens, 12 rounds


def test_pairs_of_which_one_side_is_empty():
    segments = np.array([[1, 1, 2, 2, 3, 3, 4, 4]], np.int32)
    mask = np.array([[1, 1, 0, 0, 0, 1, 1, 1]], bool)
    assert np.flatnonzero(chosen(mask, segments)).tolist() == [5]
