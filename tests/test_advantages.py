"""Advantages equal their papers' equations: golden numbers come from `spec/algorithms.md` 2.14 (a float64 reference of
another author) or are worked by hand here; the oracles are loops over one row at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.assess.advantages import (
    GAE,
    Distillation,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    MultiReward,
    Returns,
    Shuffled,
)
from rljax.assess.experience import Experience, kl_rewards
from rljax.assess.groups import varied
from rljax.assess.returns import explained_variance, whiten
from rljax.assess.rewards import Completion, ExactMatch, Overlong, score, total
from rljax.data.problems import Problem

ONE_RIGHT = np.array([1.0, 0, 0, 0])
OBSERVED = np.array([[1, 0, 1, 0]], bool)  # an observation at 1, padding at 3
REINFORCE, BASELINE, REMAX = Returns(), Returns(baseline="group"), Returns(baseline="greedy", whiten=False)
SCALARS = [
    GroupRelative(),
    GroupRelative(scale=False),
    GroupRelative(ddof=0),
    GroupRelative(leave_one_out=True),
    LeaveOneOut(),
    LengthWeighted(),
    MultiReward((1.0, 0.5)),
]
PER_TOKEN = [
    REINFORCE, Returns(gamma=0.9, whiten=False), BASELINE, REMAX,
    GAE(), GAE(0.9, 0.8), GAE(alpha=0.05), GAE(bootstrap=True), GAE(whiten=False, bootstrap=True),
    Distillation(),
]  # fmt: skip
ALL = SCALARS + PER_TOKEN


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


def told(rewards, groups=None, mask=None, **more) -> Experience:
    """One token a row, one group, and every row ended by itself, where nothing else is said."""
    rewards = np.asarray(rewards, np.float64)
    rows = len(rewards)
    mask = np.ones((rows, 1), bool) if mask is None else np.asarray(mask, bool)
    empty = dict(scores=rewards[:, None], truncated=np.zeros(rows, bool))
    return Experience(rewards, groups=np.zeros(rows, int) if groups is None else groups, mask=mask, **empty | more)


def of_rows(advantage, rewards, groups=None):
    return advantage(told(rewards, groups))[:, 0]


def drawn(seed: int, rows: int = 8, columns: int = 7, absent: float = 0.1) -> Experience:
    """Everything at random: gaps in the mask, groups of several sizes out of order, rewards that do not apply."""
    rng = np.random.default_rng(seed)
    real = lambda *shape: rng.normal(size=shape)
    scores = np.where(rng.random((rows, 2)) < absent, np.nan, real(rows, 2).round(1))
    mask = rng.random((rows, columns)) < 0.6
    mask[:, 2] |= ~mask.any(1)
    return Experience(
        rewards=total(scores), scores=scores, groups=rng.integers(0, 3, rows), mask=mask,
        truncated=rng.random(rows) < 0.4, token_rewards=real(rows, columns), values=real(rows, columns),
        bootstrap=real(rows), greedy=real(rows), sampled=real(rows, columns), teacher=real(rows, columns),
    )  # fmt: skip


def each(e: Experience, f) -> Experience:
    """f of every field."""
    return Experience(*map(f, e))


def one(advantage, rewards, values, mask=None, **more):
    """The advantages of a single row with a reward for each token."""
    mask = np.ones((1, len(rewards)), bool) if mask is None else mask
    more = {"values": np.array([values])} | more
    return advantage(told([0.0], mask=mask, token_rewards=np.array([rewards]), **more))[0]


# What compares completions


def test_group_relative():
    close(of_rows(GroupRelative(), ONE_RIGHT), [1.5, -0.5, -0.5, -0.5])
    close(of_rows(GroupRelative(scale=False), ONE_RIGHT), [0.75, -0.25, -0.25, -0.25])
    close(of_rows(GroupRelative(ddof=0), ONE_RIGHT), np.array([3, -1, -1, -1]) / np.sqrt(3))
    assert abs(of_rows(GroupRelative(), ONE_RIGHT)[0] - 1.732) > 0.2  # control: the population's deviation


def test_leave_one_out():
    close(of_rows(LeaveOneOut(), ONE_RIGHT), [1, -1 / 3, -1 / 3, -1 / 3])
    close(of_rows(GroupRelative(scale=False, leave_one_out=True), ONE_RIGHT), of_rows(LeaveOneOut(), ONE_RIGHT))


def test_a_completion_beside_the_mean_and_deviation_of_the_others():
    rewards = np.array([3.0, 1, 0, 0.5, -2])
    got = of_rows(GroupRelative(leave_one_out=True), rewards)
    for i, r in enumerate(rewards):
        others = np.delete(rewards, i)
        assert got[i] == pytest.approx((r - others.mean()) / (others.std(ddof=1) + 1e-6), rel=1e-9)


def test_a_mean_weighted_by_length():
    mask = np.arange(4) < np.array([[1], [3], [4]])
    baseline = (1 * 1.0 + 3 * 0.0 + 4 * 0.5) / 8
    got = LengthWeighted()(told([1.0, 0.0, 0.5], mask=mask))
    close(got, np.where(mask, np.array([[1.0], [0.0], [0.5]]) - baseline, 0), 1e-12)


def test_rewards_of_any_size_have_the_same_say():
    """Two rewards, one a hundred times the other: decoupled they cancel, summed first the large one decides."""
    scores = np.array([[1.0, 0], [0, 100], [1, 0], [0, 100]])
    e = told(scores.sum(1), scores=scores)
    close(MultiReward((1.0, 1.0), GroupRelative(eps=0.0))(e), np.zeros((4, 1)), 1e-9)
    assert np.abs(GroupRelative()(e)).min() > 0.8
    by_hand = np.array([1.0, -1, 1, -1]) * np.sqrt(3 / 4)  # normalised by hand: deviation 1 / sqrt(3), whitened again
    close(MultiReward((2.0, 1.0))(e)[:, 0], by_hand)


def test_several_rewards_by_loops():
    """Equations of GDPO one number at a time."""
    rng = np.random.default_rng(0)
    scores, groups, weights = rng.normal(size=(12, 3)), np.tile(np.arange(3), 4), (1.0, 0.5, 2.0)
    scores[4, 1] = np.nan
    sums = np.zeros(12)
    for b in range(12):
        for k in range(3):
            column = scores[groups == groups[b], k]
            column = column[~np.isnan(column)]
            if not np.isnan(scores[b, k]):
                sums[b] += weights[k] * (scores[b, k] - column.mean()) / (column.std(ddof=1) + 1e-6)
    golden = (sums - sums.mean()) / np.sqrt(sums.var(ddof=1) + 1e-8)
    close(MultiReward(weights)(told(total(scores), groups, scores=scores))[:, 0], golden, 1e-9)


@pytest.mark.pitfall("T-33")
@pytest.mark.parametrize("n", range(2, 17))
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-9, 1e9])
def test_groups_without_variance_give_exactly_zero_and_others_no_explosion(n, value):
    different = np.full(n, value)
    different[0] += 1
    for advantage in (*SCALARS[:-1], MultiReward((1.0,)), Returns(baseline="group", whiten=False)):
        assert np.all(of_rows(advantage, np.full(n, value)) == 0), advantage
        assert 0 < np.abs(of_rows(advantage, different)).max() <= np.sqrt(n), advantage


@pytest.mark.parametrize("advantage", [*SCALARS[:-1], MultiReward((1.0,)), Returns(baseline="group", whiten=False)])
def test_a_group_of_one_gives_zero(advantage):
    """Not its raw reward, which no other completion stands against."""
    alone = of_rows(advantage, [1.0, 5.0, 2.0], np.array([0, 1, 1]))
    assert alone[0] == 0 and np.all(alone[1:] != 0)


@pytest.mark.pitfall("T-34")
@pytest.mark.parametrize("advantage", SCALARS[:-1])
def test_another_groups_rewards_change_nothing(advantage):
    groups, rewards = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([1.0, 0, 0, 0, 1, 1, 0, 0])
    before = of_rows(advantage, rewards, groups)
    rewards[4:] = [90.0, -7, 3, 3]
    after = of_rows(advantage, rewards, groups)
    assert np.array_equal(before[:4], after[:4]) and not np.allclose(before[4:], after[4:])


@pytest.mark.pitfall("T-34")
def test_whitening_is_of_the_whole_batch():
    """Control of the test above."""
    groups, rewards = np.array([0, 0, 1, 1]), np.array([1.0, 0, 1, 0])
    before = of_rows(BASELINE, rewards, groups)
    assert abs(before[0] - of_rows(BASELINE, [1.0, 0, 9, 0], groups)[0]) > 0.1


@pytest.mark.pitfall("T-110")
@pytest.mark.parametrize("advantage", SCALARS[:-1])
def test_groups_go_by_number_wherever_their_rows_lie_and_however_many_they_are(advantage):
    rng = np.random.default_rng(0)
    groups, rewards = np.repeat([7, 3, 900, -2], [4, 3, 6, 2]), rng.normal(size=15)
    apart = np.concatenate([of_rows(advantage, rewards[groups == g]) for g in (7, 3, 900, -2)])
    close(of_rows(advantage, rewards, groups), apart, 1e-12)
    order = rng.permutation(15)
    close(of_rows(advantage, rewards[order], groups[order]), apart[order], 1e-12)


def test_rewards_that_do_not_apply_are_left_out():
    """Not counted as 0: the mean and deviation are those of the other rows."""
    rewards, groups = np.array([1.0, np.nan, 0, 0, 0, np.nan]), np.array([0, 0, 0, 0, 0, 1])
    close(of_rows(GroupRelative(), rewards, groups), [1.5, 0, -0.5, -0.5, -0.5, 0])
    assert np.all(of_rows(GroupRelative(), np.full(4, np.nan)) == 0)


@pytest.mark.parametrize("advantage", [a for a in ALL if not isinstance(a, Distillation)])
def test_rows_without_a_reward_are_as_if_they_were_not_there(advantage):
    e = drawn(3, absent=0)
    out = np.isin(np.arange(8), (2, 5))
    without = each(e, lambda x: x[~out])
    e = e._replace(rewards=np.where(out, np.nan, e.rewards), scores=np.where(out[:, None], np.nan, e.scores),
                   truncated=e.truncated & ~out)  # fmt: skip
    got = advantage(e)
    assert np.all(got[out] == 0)
    close(got[~out], advantage(without), 1e-12)
    if isinstance(advantage, GAE):
        assert np.array_equal(advantage.returns(e)[out], np.where(e.mask, e.values, 0)[out])  # an error of 0


@pytest.mark.pitfall("T-42")
@pytest.mark.parametrize("advantage", SCALARS)
def test_every_token_of_a_completion_has_its_advantage(advantage):
    e = drawn(0)
    got = advantage(e)
    for b in range(8):
        assert len(set(got[b, e.mask[b]])) == 1 and np.all(got[b, ~e.mask[b]] == 0)


# What looks at tokens


def test_gae():
    a, r = [0.799675, 0.7365, 0.67, 0.6], [0.899675, 0.9365, 0.97, 1]
    gae, values = GAE(1.0, 0.95, whiten=False), np.array([[0.1, 0.2, 0.3, 0.4]])
    e = told([1.0], mask=np.ones((1, 4), bool), values=values)
    close(gae(e), [a], 1e-9), close(gae.returns(e), [r], 1e-9)
    close(one(gae, [0.0, 0, 0, 1], values[0]), a, 1e-9)  # the reward lies on the last token
    close(GAE(1.0, 0.95).returns(e), [r], 1e-9)  # before whitening
    close(GAE(1.0, 0.95)(e)[0], (np.array(a) - np.mean(a)) / np.std(a, ddof=1), 1e-5)


@pytest.mark.pitfall("T-40")
def test_observations_are_skipped():
    """Golden: what zeroes the observation's value instead finds .41675 at 0."""
    rewards, values = [0.0, 0, 1, 0], [0.5, 0.4, 0.3, 9]
    close(one(GAE(1.0, 0.95, whiten=False), rewards, values, OBSERVED), [0.465, 0, 0.7, 0], 1e-9)
    close(one(GAE(1.0, 0.95).returns, rewards, values, OBSERVED), [0.965, 0, 1, 0], 1e-9)


@pytest.mark.pitfall("T-40")
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_earlier_turns_have_the_returns_of_later_ones(gamma):
    """Golden for gamma 1: a reset at the observation gives return 0 at 0."""
    close(one(Returns(gamma, whiten=False), [0.0, 5, 1, 5], [0.0] * 4, OBSERVED), [gamma, 0, 1, 0], 1e-12)


def test_truncated_rows_go_on_with_the_critic():
    values = np.array([[0.1, 0.2, 0.3, 0.4]] * 2)
    e = told([0.0, 0.0], mask=np.ones((2, 4), bool), values=values, truncated=np.array([True, False]),
             bootstrap=np.array([0.6, np.nan]))  # fmt: skip
    on = GAE(1.0, 0.95, whiten=False, bootstrap=True)
    off = GAE(1.0, 0.95, whiten=False)
    close(on(e)[0], [0.456725, 0.3755, 0.29, 0.2], 1e-9)
    assert np.array_equal(on(e)[1], off(e)[1])  # ended by itself
    assert off(e)[0, -1] == -0.4  # the switch is off: 0 after the last token
    for unknown in (5.0, np.nan):  # what an unfinished completion would have scored
        assert np.array_equal(on(e._replace(rewards=np.array([unknown, 0.0]))), on(e))


def test_lambda_grows_with_length():
    mask = np.arange(1000) < np.array([[8], [20], [40], [1000]])
    close(GAE(alpha=0.05).decay(told([0.0] * 4, mask=mask)), [0, 0, 0.5, 0.98], 1e-12)
    e = drawn(5, rows=4, columns=60)._replace(rewards=np.ones(4))
    lams = 1 - 1 / np.maximum(0.05 * e.mask.sum(1), 1)
    assert np.ptp(lams) > 0.05
    for b, lam in enumerate(lams):
        row = each(e, lambda x: x[b : b + 1])
        close(GAE(alpha=0.05, whiten=False)(row), GAE(lam=lam, whiten=False)(row), 1e-12)


def test_decoupled_gae_is_two():
    """The critic's targets at lam 1 are the returns to come, whatever it said of them."""
    e = drawn(2, absent=0)
    close(GAE(0.9, 1.0).returns(e), Returns(0.9, whiten=False)(e), 1e-12)
    assert np.abs(GAE(0.9, 0.5).returns(e) - GAE(0.9, 1.0).returns(e)).max() > 0.1


def gae_of_a_row(rewards, values, mask, gamma, lam, last):
    """The estimator as its double sum over the tokens of the mask, not as a recursion."""
    at = np.flatnonzero(mask)
    r, v = rewards[at], np.append(values[at], last)
    deltas = r + gamma * v[1:] - v[:-1]
    out = np.zeros(len(mask))
    for i, t in enumerate(at):
        out[t] = sum((gamma * lam) ** k * d for k, d in enumerate(deltas[i:]))
    return out


@pytest.mark.pitfall("T-21")
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_gae_and_returns_by_loops(seed, gamma, lam, bootstrap):
    e = drawn(seed, absent=0)
    gae, returns = GAE(gamma, lam, False, bootstrap)(e), Returns(gamma, whiten=False)(e)
    for b in range(8):
        (at,) = np.flatnonzero(e.mask[b])[-1:]
        rewards, unfinished = np.where(e.mask[b], e.token_rewards[b], 0), bootstrap and e.truncated[b]
        plain = rewards + e.rewards[b] * (np.arange(7) == at)
        close(returns[b], gae_of_a_row(plain, np.zeros(7), e.mask[b], gamma, 1.0, 0.0), 1e-9)
        last = e.bootstrap[b] if unfinished else 0.0
        close(gae[b], gae_of_a_row(rewards if unfinished else plain, e.values[b], e.mask[b], gamma, lam, last), 1e-9)


@pytest.mark.pitfall("T-21")
def test_a_reward_lies_on_the_last_token_also_of_full_rows():
    mask = np.array([[0, 1, 1, 0, 0], [0, 1, 0, 0, 1], [1, 1, 1, 1, 1]], bool)
    got = Returns(gamma=0.0, whiten=False)(told([3.0, 5, 7], mask=mask))  # with gamma 0, each token's own reward
    assert np.array_equal(got, [[0, 0, 3, 0, 0], [0, 0, 0, 0, 5], [0, 0, 0, 0, 7]])


def test_reinforce_with_baselines():
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], bool)
    e = told([1.0, 0, 0, 0], mask=mask, greedy=np.array([0.25, 0.25, 0.25, np.nan]))
    close(Returns(baseline="greedy", whiten=False)(e), np.where(mask, [[0.75], [-0.25], [-0.25], [0]], 0), 1e-12)
    less = np.where(mask, np.array([[0.75], [-0.25], [-0.25], [-0.25]]), 0)
    close(Returns(baseline="group", whiten=False)(e), less, 1e-12)
    seen = less[mask]  # every token counts once, so that long completions count more
    close(BASELINE(e)[mask], (seen - seen.mean()) / seen.std(ddof=1), 1e-6)
    assert abs(BASELINE(e)[mask].mean()) < 1e-12 and abs(BASELINE(e)[:, 0].mean()) > 0.05  # control: of rows


def test_token_rewards_add_up():
    got = one(Returns(whiten=False), [1.0, 2, 4, 8], None)
    assert np.array_equal(got, [15, 14, 12, 8])


def test_distillation():
    e = drawn(1)
    close(Distillation(0.5)(e), np.where(e.mask, 0.5 * (e.teacher - e.sampled), 0), 1e-12)
    assert np.all(Distillation()(e._replace(teacher=e.sampled)) == 0)
    assert np.array_equal(Distillation()(e._replace(rewards=np.full(8, np.nan))), Distillation()(e))
    gap = lambda p, q: told([0.0, 0], sampled=np.log([[p], [1 - p]]), teacher=np.log([[q], [1 - q]]))
    kl = 0.7 * np.log(0.7 / 0.5) + 0.3 * np.log(0.3 / 0.5)  # both outcomes, weighted as the actor draws them
    assert np.array([0.7, 0.3]) @ Distillation()(gap(0.7, 0.5))[:, 0] == pytest.approx(-kl, abs=1e-12)


# KL as a reward


@pytest.mark.pitfall("T-44")
def test_kl_rewards():
    logp, ref = np.log([[0.5, 0.3, 0.9, 0.2]]), np.log([[0.45, 0.35, 0.7, 0.3]])
    golden = -0.1 * np.array([[0.105361, -0.154151, 0.251314, -0.405465]])
    close(kl_rewards(logp, ref, np.ones((1, 4), bool), 0.1), golden, 1e-6)
    off = np.where(OBSERVED, ref, np.inf)
    assert np.array_equal(kl_rewards(off, off, OBSERVED, 0.1), np.zeros((1, 4)))
    close(kl_rewards(logp, off, OBSERVED, 0.1), np.where(OBSERVED, golden, 0), 1e-6)


@pytest.mark.pitfall("T-44")
@pytest.mark.parametrize("advantage", [a for a in ALL if not isinstance(a, Distillation)])
def test_every_estimator_sees_token_rewards_on_the_mask_and_no_others(advantage):
    e = drawn(7, absent=0)
    without = advantage(e._replace(token_rewards=None))
    assert np.array_equal(without, advantage(e._replace(token_rewards=np.zeros((8, 7)))))
    assert np.array_equal(without, advantage(e._replace(token_rewards=np.where(e.mask, 0, 50.0))))
    moved = np.zeros((8, 7))
    moved[0, np.argmax(e.mask[0])] = -5  # of a group of several: the penalty makes its row worth less than before
    assert np.sum(e.groups == e.groups[0]) > 1
    assert advantage(e._replace(token_rewards=moved))[0].sum() < without[0].sum()


@pytest.mark.parametrize("advantage", SCALARS[:-1])
def test_one_number_per_row_is_the_reward_and_all_token_rewards(advantage):
    e = drawn(8)
    summed = e.rewards + np.where(e.mask, e.token_rewards, 0).sum(1)
    close(advantage(e), advantage(e._replace(rewards=summed, token_rewards=None)), 1e-9)


# Whitening, and how good a critic is


def test_whitening():
    x, mask = np.array([[1.0, 2, 99], [4, np.nan, -7]]), np.array([[1, 1, 0], [1, 0, 1]], bool)
    got = whiten(x, mask)
    assert np.all(got[~mask] == 0)
    close(got[mask], np.array([1.0, 2, 4, -7]) / np.sqrt(70 / 3), 1e-9)  # mean 0; Bessel: 70 / 3
    assert got[mask].std() < got[mask].std(ddof=1) == pytest.approx(1, abs=1e-8)


@pytest.mark.pitfall("T-26")
@pytest.mark.parametrize("mask", [np.zeros((2, 3)), [[0, 1, 0], [0, 0, 0]]], ids=["no token", "one token"])
def test_whitening_of_less_than_two_tokens_is_zero(mask):
    assert np.array_equal(whiten(np.full((2, 3), 5.0), np.array(mask, bool)), np.zeros((2, 3)))


@pytest.mark.pitfall("T-26")
@pytest.mark.parametrize("advantage", [*ALL, Shuffled()], ids=str)
def test_a_batch_without_tokens_has_no_advantage(advantage):
    e = drawn(0)
    assert np.array_equal(advantage(e._replace(mask=np.zeros((8, 7), bool))), np.zeros((8, 7)))
    assert advantage(each(e, lambda x: x[:0])).shape == (0, 7)


def test_explained_variance():
    mask = np.array([[1, 1, 1], [1, 1, 0]], bool)
    returns = np.array([[1.0, 2, 3], [4, 5, np.nan]])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(np.full((2, 3), 7.0), returns, mask) == pytest.approx(0, abs=1e-12)
    assert explained_variance(returns / 2, returns, mask) == pytest.approx(0.75)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert np.isnan(explained_variance(returns, np.ones((2, 3)), mask))


# Laws of all of them


@pytest.mark.parametrize("advantage", ALL, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_permuted_rows_have_permuted_advantages(advantage, seed):
    e, order = drawn(seed), np.random.default_rng(seed).permutation(8)
    close(advantage(each(e, lambda x: x[order])), advantage(e)[order], 1e-9)


@pytest.mark.pitfall("T-28")
@pytest.mark.pitfall("T-27")
@pytest.mark.parametrize("advantage", ALL, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([np.nan, np.inf, -np.inf, 1e300, 3.0]))
def test_what_lies_off_the_mask_changes_nothing(advantage, seed, junk):
    """Neither does padding: more columns on either side, and rows that only fill the batch."""
    e = drawn(seed)
    dirty = each(e, lambda x: np.where(e.mask, x, junk) if x.dtype == float and x.shape == e.mask.shape else x)
    assert np.array_equal(advantage(dirty), advantage(e))

    def pad(x, name):
        fill = {"mask": False, "truncated": True, "groups": -1, "rewards": np.nan, "scores": np.nan}.get(name, junk)
        sides = [(0, 3), *[(2, 4)] * (x.shape[1:] == (7,))] + [(0, 0)] * (x.ndim == 2 and x.shape[1] != 7)
        return np.pad(x, sides, constant_values=fill)

    wide = Experience(**{name: pad(x, name) for name, x in e._asdict().items()})
    close(advantage(wide), np.pad(advantage(e), [(0, 3), (2, 4)]), 1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_groups_advantages_add_up_to_nothing(seed):
    e = drawn(seed)
    for advantage in (GroupRelative(), GroupRelative(scale=False), GroupRelative(ddof=0), LeaveOneOut()):
        rows = advantage(e).sum(1) / e.mask.sum(1)
        for group in np.unique(e.groups):
            assert abs(rows[e.groups == group].sum()) < 1e-9
    by_length = LengthWeighted()(e._replace(rewards=np.nan_to_num(e.rewards))).sum(1)  # each token counts
    assert all(abs(by_length[e.groups == group].sum()) < 1e-9 for group in np.unique(e.groups))


@pytest.mark.parametrize("advantage", [*SCALARS, REINFORCE, BASELINE], ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.floats(-10, 10))
def test_a_constant_added_to_all_rewards_changes_nothing(advantage, seed, shift):
    e = drawn(seed)
    moved = e._replace(rewards=e.rewards + shift, scores=e.scores + shift)
    close(advantage(moved), advantage(e), 1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.5, 50))
def test_scaled_rewards_have_the_same_scaled_advantages(seed, scale):
    e = drawn(seed)._replace(token_rewards=None)
    moved = e._replace(rewards=e.rewards * scale)
    close(GroupRelative(eps=0.0)(moved), GroupRelative(eps=0.0)(e), 1e-9)
    close(LeaveOneOut()(moved), scale * LeaveOneOut()(e), 1e-9)


@pytest.mark.parametrize("advantage", [*ALL, Shuffled()], ids=str)
def test_float32_in_float64_out(advantage):
    e = drawn(0)
    single = each(e, lambda x: x.astype(np.float32) if x.dtype == float else x)
    assert advantage(single).dtype == np.float64 and advantage(single).shape == (8, 7)
    close(advantage(single), advantage(each(single, lambda x: x.astype(float) if x.dtype == np.float32 else x)), 1e-9)


def test_what_a_run_must_provide():
    needs = lambda a: {n for n in ("critic", "group", "greedy", "teacher") if getattr(a, f"needs_{n}")}
    assert all(needs(advantage) == {"group"} for advantage in SCALARS)
    assert needs(REINFORCE) == set() and needs(BASELINE) == {"group"} and needs(REMAX) == {"greedy"}
    assert needs(GAE()) == {"critic"} and needs(Distillation()) == {"teacher"}
    for advantage in ALL:
        assert needs(Shuffled(advantage)) == needs(advantage)
        everything = {"critic": ("values", "bootstrap"), "greedy": ("greedy",), "teacher": ("sampled", "teacher")}
        absent = [field for need, fields in everything.items() if need not in needs(advantage) for field in fields]
        e = drawn(0)
        assert np.array_equal(advantage(e._replace(**dict.fromkeys(absent))), advantage(e)), "it reads no more"


# The control


def test_shuffled_deals_the_same_advantages_to_other_rows():
    rewards, groups = np.arange(32.0) ** 2, np.repeat(np.arange(8), 4)
    true, dealt = of_rows(GroupRelative(), rewards, groups), of_rows(Shuffled(), rewards, groups)
    close(np.sort(dealt), np.sort(true), 1e-12)
    assert not np.array_equal(true, dealt) and np.array_equal(dealt, of_rows(Shuffled(), rewards, groups))
    assert not np.array_equal(dealt, of_rows(Shuffled(seed=1), rewards, groups))
    assert not np.array_equal(dealt, of_rows(Shuffled(), rewards, groups + 8))  # the next step's deal is another
    of_rows(Shuffled(), -rewards, groups)  # penalties


def test_shuffled_rows_of_other_lengths_have_the_dealt_advantage_on_all_their_tokens():
    e = drawn(4, rows=40)
    e = e._replace(mask=e.mask & (np.arange(40) < 30)[:, None])  # the last rows only fill the batch
    true, dealt = GroupRelative()(e), Shuffled()(e)
    number = lambda advantages: np.array([row[chosen][0] for row, chosen in zip(advantages[:30], e.mask)])
    close(np.sort(number(dealt)), np.sort(number(true)), 1e-12)
    assert np.array_equal(dealt[:30], np.where(e.mask[:30], number(dealt)[:, None], 0)) and np.all(dealt[30:] == 0)


def test_shuffled_advantages_know_nothing_of_the_reward():
    """Over many deals, a right completion has the mean advantage of the batch."""
    e = told(np.tile([1.0, 1, 0, 0, 0, 0, 0, 0], 8), np.repeat(np.arange(8), 8))
    mean = np.mean([Shuffled(seed=seed)(e)[e.rewards == 1].mean() for seed in range(200)])
    assert abs(mean) < 0.05 and GroupRelative()(e)[e.rewards == 1].mean() > 1


# Rewards and groups of DAPO


def said(n: int, stopped: bool = True) -> Completion:
    return Completion("", tuple(range(n)), stopped)


@pytest.mark.pitfall("T-39")
@pytest.mark.parametrize("n, golden", [(0, 0), (16384, 0), (18432, -0.5), (20480, -1), (30000, -1)])
def test_overlong(n, golden):
    assert Overlong(20480, 4096)(None, said(n)) == golden
    assert Overlong(20480, 4096, factor=0.5)(None, said(n)) == golden / 2
    assert -1 <= Overlong(20480, 4096)(None, said(n)) <= 0


@pytest.mark.pitfall("T-47")
def test_a_penalty_is_added_to_the_reward_and_replaces_none():
    """Whether the answer is right or wrong, and whether the completion ended by itself."""
    cases = [("2", 4, True), ("2", 6, True), ("3", 6, True), ("3", 9, True), ("2", 8, False)]
    completions = [Completion(text, tuple(range(n)), stopped) for text, n, stopped in cases]
    scores = score([ExactMatch(), Overlong(8, 4)], [Problem("1+1=", "2")] * len(cases), completions)
    assert total(scores).tolist() == [1 + 0, 1 - 0.5, 0 - 0.5, 0 - 1, 0 - 1]


@pytest.mark.pitfall("T-38")
def test_dynamic_sampling_looks_at_the_verifier():
    groups = np.array([5, 3, 5, 3, 9, 9, -1])
    correct = np.array([1, 1, 0, 1, 0, 0, 0], bool)
    assert varied(correct, groups).tolist() == [True, False, True, False, False, False, False]
    lengths = [1, 30, 2, 45, 40, 50, 0]
    shaped = correct + np.array([Overlong(50, 40)(None, said(n)) for n in lengths])
    assert len(set(shaped[groups == 3])) == 2  # its completions differ in length alone, and it is dropped
    assert varied(np.zeros(0, bool), np.zeros(0, int)).shape == (0,)


@pytest.mark.parametrize(
    "make, bad",
    [
        (GroupRelative, dict(eps=-1.0)), (GroupRelative, dict(ddof=2)), (Returns, dict(gamma=1.5)),
        (Returns, dict(baseline="batch")), (GAE, dict(lam=-0.1)), (GAE, dict(gamma=2.0)), (GAE, dict(alpha=0.0)),
        (Distillation, dict(coefficient=0.0)), (MultiReward, dict(weights=())),
        (Overlong, dict(cache=0, limit=5)), (Overlong, dict(cache=6, limit=5)),
        (Overlong, dict(factor=-1.0, limit=5, cache=1)),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused(make, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        make(**bad)


def test_weights_are_as_many_as_rewards():
    with pytest.raises(ValueError, match="weights=.*2"):
        MultiReward((1.0,))(drawn(0))
