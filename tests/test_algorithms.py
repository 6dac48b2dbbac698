"""Losses, reductions, advantages and the optimizer equal their papers' equations: golden numbers come from
`spec/algorithms.md` 2.14 (a float64 reference of another author) or are worked by hand here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from rljax.assess.advantages import GroupRelative, Shuffled
from rljax.model.table import map_table
from rljax.train.losses import LOG_RATIO, Clip, NegativeLogLikelihood, k3
from rljax.train.objectives import Objective
from rljax.train.optimizer import AdamW
from rljax.train.reductions import ConstantLength, sequence_mean_token_mean, sequence_mean_token_sum, token_mean

# ratios: [1.25, .75, 1.8, .5] with A = 1; [1, 1, 3, 1] with A = -1, of which the first and third tokens count
LOGP = np.log(np.array([[0.5, 0.3, 0.9, 0.2], [0.4, 0.1, 0.6, 0.5]], np.float32))
OLD = np.log(np.array([[0.4, 0.4, 0.5, 0.4], [0.4, 0.1, 0.2, 0.5]], np.float32))
ADVANTAGES = np.array([[1.0] * 4, [-1.0] * 4], np.float32)
MASK = np.array([[1, 1, 1, 1], [1, 0, 1, 0]], bool)


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


def test_clip():
    loss, seen = Clip()(LOGP, OLD, ADVANTAGES)
    close(loss, [[-1.2, -0.75, -1.2, -0.5], [1, 1, 3, 1]])
    close(seen["ratio"], [[1.25, 0.75, 1.8, 0.5], [1, 1, 3, 1]])
    assert seen["clip_fraction/high"].tolist() == [[True, False, True, False], [False] * 4]
    assert not np.any(seen["clip_fraction/low"])  # a ratio below 1 - low is held only where A < 0
    low = Clip()(LOGP, OLD, -ADVANTAGES)[1]["clip_fraction/low"]
    assert low.tolist() == [[False, True, False, True], [False] * 4]


def test_clip_higher():
    close(Clip(0.2, 0.28)(LOGP, OLD, ADVANTAGES)[0][0], [-1.25, -0.75, -1.28, -0.5])


def test_dual_clip():
    loss, seen = Clip(dual=1.5)(LOGP, OLD, ADVANTAGES)
    close(loss, [[-1.2, -0.75, -1.2, -0.5], [1, 1, 1.5, 1]])
    assert seen["clip_fraction/dual"].tolist() == [[False] * 4, [False, False, True, False]]


def test_clipped_tokens_have_no_gradient():
    """And the others that of -ratio A."""
    grad = jax.grad(lambda logp: jnp.sum(Clip(0.2, 0.28, dual=1.5)(logp, OLD, ADVANTAGES)[0]))(LOGP)
    close(grad, [[-1.25, -0.75, 0, -0.5], [1, 1, 0, 1]])


def test_a_log_ratio_cannot_overflow():
    for far in (-500.0, 500.0):
        loss, grad = jax.value_and_grad(lambda x: jnp.sum(Clip()(x, jnp.zeros(1), -jnp.ones(1))[0]))(jnp.full(1, far))
        assert np.isfinite(loss) and np.all(np.isfinite(grad))
        assert np.isfinite(k3(jnp.full(1, far), jnp.zeros(1))).all()
    close(Clip()(jnp.full(1, 50.0), jnp.zeros(1), -jnp.ones(1))[0], np.exp(LOG_RATIO))


@pytest.mark.parametrize("bad", [dict(low=1.0), dict(low=-0.1), dict(high=-0.1), dict(dual=1.0)], ids=str)
def test_impossible_clips_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Clip(**bad)


def test_negative_log_likelihood():
    loss, _ = NegativeLogLikelihood()(LOGP, OLD, ADVANTAGES)
    close(loss[0], -np.log([0.5, 0.3, 0.9, 0.2]))


def test_negative_kl_coefficients_are_refused():
    with pytest.raises(ValueError, match="kl=-0.1"):
        Objective(Clip(), kl=-0.1)


def test_k3():
    ref = np.log(np.array([[0.45, 0.35, 0.7, 0.3]], np.float32))
    close(k3(LOGP[:1], ref), [[0.005361, 0.012516, 0.029092, 0.094535]], 1e-6)
    assert np.all(np.asarray(k3(LOGP, LOGP)) == 0)


@pytest.mark.pitfall("T-61")
def test_gradient_of_k3_is_that_of_the_reverse_kl():
    """In expectation over the policy's own tokens, exact on 5 tokens: KL(reference || policy), by finite difference."""
    logits, ref = np.array([0.3, -1.0, 0.8, 0.1, -0.4]), np.log([0.1, 0.3, 0.2, 0.25, 0.15])
    log = lambda z: z - np.log(np.exp(z).sum())
    p = np.exp(log(logits))

    def sampled(z):
        return jnp.sum(jnp.asarray(p, jnp.float32) * k3(jax.nn.log_softmax(z), jnp.asarray(ref, jnp.float32)))

    kl = lambda z: (np.exp(ref) * (ref - log(z))).sum()
    forward = lambda z: (np.exp(log(z)) * (log(z) - ref)).sum()
    difference = lambda f: np.array([(f(logits + d) - f(logits - d)) / 2e-5 for d in 1e-5 * np.eye(5)])
    grad = np.asarray(jax.grad(sampled)(jnp.asarray(logits, jnp.float32)))
    close(grad, difference(kl), 1e-5)
    assert np.abs(grad - difference(forward)).max() > 0.05  # control: the other direction is another gradient
    close(
        sampled(jnp.asarray(logits, jnp.float32)), forward(logits), 1e-6
    )  # while the value is KL(policy || reference)


def reduced(reduction, loss=None, mask=MASK):
    loss = Clip()(LOGP, OLD, ADVANTAGES)[0] if loss is None else loss
    return float(np.sum(np.asarray(reduction(mask)) * loss))


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
    assert reduced(reduction) == pytest.approx(golden, abs=1e-6)
    empty = np.concatenate([MASK, np.zeros((3, 4), bool)])  # rows without a token are in no denominator
    loss = np.concatenate([Clip()(LOGP, OLD, ADVANTAGES)[0], np.full((3, 4), 7.0)])
    assert reduced(reduction, loss, empty) == pytest.approx(golden, abs=1e-6)


@pytest.mark.pitfall("T-02")
def test_a_mean_of_token_means_is_another_number():
    """Control: 2.14's wrong value, each microbatch by its own count, is not what the token mean gives."""
    loss = Clip()(LOGP, OLD, ADVANTAGES)[0]
    wrong = np.mean([reduced(token_mean, loss[i : i + 1], MASK[i : i + 1]) for i in range(2)])
    assert wrong == pytest.approx(0.54375, abs=1e-6) and abs(reduced(token_mean) - wrong) > 0.4


@pytest.mark.pitfall("T-03")
@pytest.mark.parametrize(
    "reduction", [token_mean, sequence_mean_token_mean, sequence_mean_token_sum, ConstantLength(8)]
)
def test_a_batch_twice_over_has_the_same_loss(reduction):
    loss = Clip()(LOGP, OLD, ADVANTAGES)[0]
    twice = reduced(reduction, np.concatenate([loss, loss]), np.concatenate([MASK, MASK]))
    assert twice == pytest.approx(reduced(reduction), rel=1e-6)


@pytest.mark.pitfall("T-26")
@pytest.mark.parametrize(
    "reduction", [token_mean, sequence_mean_token_mean, sequence_mean_token_sum, ConstantLength(8)]
)
def test_weights_are_float32_zero_off_the_mask_and_finite_without_any(reduction):
    weights = reduction(MASK)
    assert weights.dtype == np.float32 and np.all((np.asarray(weights) > 0) == MASK)
    assert np.all(np.asarray(reduction(np.zeros((2, 4), bool))) == 0)


ONE_RIGHT = np.array([1.0, 0, 0, 0])


def test_group_relative():
    zeros = np.zeros(4, int)
    close(GroupRelative()(ONE_RIGHT, zeros), [1.5, -0.5, -0.5, -0.5])
    close(GroupRelative(scale=False)(ONE_RIGHT, zeros), [0.75, -0.25, -0.25, -0.25])
    assert abs(GroupRelative()(ONE_RIGHT, zeros)[0] - 1.732) > 0.2  # control: the population's deviation


@pytest.mark.pitfall("T-33")
@pytest.mark.parametrize("n", range(2, 17))
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-9, 1e9])
def test_groups_without_variance_give_exactly_zero_and_others_no_explosion(n, value):
    assert np.all(GroupRelative()(np.full(n, value), np.zeros(n, int)) == 0)
    assert np.all(GroupRelative(scale=False)(np.full(n, value), np.zeros(n, int)) == 0)
    different = np.full(n, value)
    different[0] += 1
    advantages = GroupRelative()(different, np.zeros(n, int))
    assert 0 < np.abs(advantages).max() <= np.sqrt(n)


def test_a_group_of_one_gives_zero():
    assert GroupRelative()(np.array([1.0, 5.0, 2.0]), np.array([0, 1, 1]))[0] == 0


@pytest.mark.pitfall("T-34")
def test_another_groups_rewards_change_nothing():
    groups, rewards = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([1.0, 0, 0, 0, 1, 1, 0, 0])
    before = GroupRelative()(rewards, groups)
    rewards[4:] = [90.0, -7, 3, 3]
    after = GroupRelative()(rewards, groups)
    assert np.array_equal(before[:4], after[:4]) and not np.allclose(before[4:], after[4:])


def test_groups_go_by_uid_wherever_their_rows_lie():
    rng = np.random.default_rng(0)
    groups, rewards = np.repeat([7, 3, 900, -2], 4), rng.normal(size=16)
    apart = np.concatenate([GroupRelative()(rewards[i : i + 4], np.zeros(4, int)) for i in range(0, 16, 4)])
    close(GroupRelative()(rewards, groups), apart, 1e-12)
    order = rng.permutation(16)
    close(GroupRelative()(rewards[order], groups[order]), apart[order], 1e-12)


def test_rewards_that_do_not_apply_are_left_out():
    """Not counted as 0: the mean and deviation are those of the other rows."""
    got = GroupRelative()(np.array([1.0, np.nan, 0, 0, 0, np.nan]), np.array([0, 0, 0, 0, 0, 1]))
    close(got, [1.5, 0, -0.5, -0.5, -0.5, 0])
    assert np.all(GroupRelative()(np.full(4, np.nan), np.zeros(4, int)) == 0)


def test_shuffled_deals_the_same_advantages_to_other_rows():
    rewards, groups = np.arange(32.0) ** 2, np.repeat(np.arange(8), 4)
    true, dealt = GroupRelative()(rewards, groups), Shuffled()(rewards, groups)
    close(np.sort(dealt), np.sort(true), 1e-12)
    assert not np.array_equal(true, dealt) and np.array_equal(dealt, Shuffled()(rewards, groups))


def rate(i, lr=0.5, warmup=4, updates=20, decay="constant", floor=0.1):
    """The learning rate of update i in closed form."""
    if i < warmup:
        return lr * (i + 1) / warmup
    done = min(1.0, (i - warmup) / (updates - warmup))
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}[decay]
    return lr * (share if decay == "constant" else floor + (1 - floor) * share)


@pytest.mark.pitfall("T-91")
@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_closed_form(decay, warmup):
    schedule = AdamW(lr=0.5, warmup=warmup, decay=decay, floor=0.1).schedule(20)
    for i in range(25):
        assert float(schedule(i)) == pytest.approx(rate(i, warmup=warmup, decay=decay), rel=1e-5), i


@pytest.mark.pitfall("T-91")
def test_resumed_updates_have_the_rates_of_uninterrupted_ones():
    """Under a constant gradient Adam moves by the learning rate, so each update shows the rate it had."""
    settings = AdamW(lr=0.5, warmup=4, decay="cosine", floor=0.1, clip=1e9, eps=1e-12)
    params = {"w": jnp.zeros((2, 2))}
    run = settings.build(20, {"w": True})
    state, moved = run.init(params), []
    for i in range(20):
        if i == 7:  # a checkpoint: to the host and back, into a new optimizer
            run, state = settings.build(20, {"w": True}), jax.tree.map(jnp.asarray, jax.device_get(state))
        delta, state = run.update({"w": jnp.full((2, 2), 3.0)}, state, params)
        moved.append(-float(delta["w"][0, 0]))
    close(moved, [rate(i, decay="cosine") for i in range(20)], 1e-4)


def test_matrices_alone_decay():
    """With no gradient what moves a parameter is decay: by lr * weight_decay of itself."""
    table = tiny.MODELS["rich"].build().table
    params = tiny.weights("rich")
    run = AdamW(lr=0.1, weight_decay=0.5).build(10, map_table(lambda t: t.matrix, table))
    deltas, _ = jax.jit(lambda g, p: run.update(g, run.init(p), p))(jax.tree.map(np.zeros_like, params), params)
    decays = {}
    for t, p, d in zip(
        jax.tree.leaves(table, is_leaf=lambda t: hasattr(t, "dims")), *map(jax.tree.leaves, (params, deltas))
    ):
        decays[t.name.split(".")[-2] + "." + t.name.split(".")[-1]] = bool(np.any(d != 0))
        close(d, -0.05 * p if np.any(d != 0) else np.zeros(p.shape), 1e-6)
    kept = [f"{n}.weight" for n in ("input_layernorm", "q_norm", "k_norm", "post_attention_layernorm", "norm")]
    assert decays == {
        "embed_tokens.weight": True, **{k: False for k in kept}, **{f"{n}_proj.bias": False for n in "qkv"},
        **{f"{n}_proj.weight": True for n in ("q", "k", "v", "o", "gate", "up", "down")},
    }  # fmt: skip


def test_gradients_are_clipped_by_their_global_norm():
    """First moments after one update hold (1 - b1) times the clipped gradient."""
    grads = {"a": jnp.array([[3.0, 0.0]]), "b": jnp.array([[0.0, 4.0]])}
    for clip, scale in ((1.0, 0.2), (5.0, 1.0), (50.0, 1.0)):
        run = AdamW(lr=0.1, clip=clip, b1=0.9).build(10, {"a": True, "b": True})
        _, state = run.update(grads, run.init(grads), grads)
        (adam,) = [s for s in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(s)]
        close(adam.mu["a"], 0.1 * scale * np.array([[3.0, 0]])), close(adam.mu["b"], 0.1 * scale * np.array([[0, 4.0]]))


def _is_adam(s):
    return isinstance(s, optax.ScaleByAdamState)


@pytest.mark.parametrize("bad", [dict(lr=0.0), dict(clip=0.0), dict(decay="step")], ids=str)
def test_impossible_optimizers_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdamW(**bad)
