"""Law: which of the roles' outputs an update reads, and where they go; on the host, with roles of fixed outputs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.assess.advantages import GAE, GroupRelative, Returns
from rljax.assess.models import ModelReward, StepReward
from rljax.assess.rewards import Completion
from rljax.data.problems import Addition, Problem
from rljax.data.rows import take
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.model.forward import Outputs
from rljax.run.assessment import Answered, assess
from rljax.run.run import Fresh, Role, Run, Shared
from rljax.run.schedules import synchronous
from rljax.train.algorithms import grpo
from rljax.train.kl import AdaptiveKL
from rljax.train.losses import Clip, ValueLoss
from rljax.train.objectives import Critic, Objective
from rljax.train.optimizer import AdamW
from rljax.types import LENGTH, STOP, Rollout, Tokens

LM = Decoder(vocab=16, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8)
B, T, END = 4, 6, 9
PROMPT, SIZE = np.array([1, 2, 1, 2]), np.array([4, 6, 3, 5])
RNG = np.random.default_rng(0)
NUMBERS = {name: RNG.normal(size=(B, T)).astype(np.float32) for name in ("logp", "ref", "prox", "reward", "values")}
REWARDS = np.array([1.0, 0.0, 0.5, 0.25], np.float32)

NOTHING = dict.fromkeys(Outputs._fields)


def given(problem, completion):
    return 0.0


def rollout() -> Rollout:
    t = np.arange(T)[None]
    inside = t < SIZE[:, None]
    mask = inside & (t >= PROMPT[:, None])
    ids = np.where(t == 3, END, 1) * inside
    tokens = Tokens(ids, np.where(inside, t, 0), inside.astype(np.int32))
    finish, uid = np.array([STOP, LENGTH, STOP, STOP]), np.array([0, 0, 1, 1])
    logp = np.where(mask, NUMBERS["logp"], 0)
    return Rollout(tokens, mask, logp, np.zeros((B, T), np.int32), SIZE, PROMPT, finish, uid, np.arange(B) % 2)


def run(objective: Objective, rewards=(given,), **roles) -> Run:
    actor = Role(LM, Fresh(), AdamW())
    return Run(
        {"actor": actor, **roles}, Addition(2), Characters("0123456789+=;#"), objective, synchronous, rewards, n=2
    )  # fmt: skip


def of(a_run: Run, beta: float = 0.0, best=None):
    says = lambda name, kind: lambda params, rows: Outputs(**NOTHING | {kind: NUMBERS[name][: len(rows.uid)]})
    actor = SimpleNamespace(score=lambda state, rows: Outputs(NUMBERS["prox"], None, NUMBERS["values"]))
    critic = SimpleNamespace(score=says("values", "scores"))
    frozen = {
        "reference": SimpleNamespace(score=says("ref", "logp")),
        "reward": SimpleNamespace(score=says("reward", "scores")),
    }
    stages = SimpleNamespace(actor=actor, trained={"actor": actor, "critic": critic}, frozen=frozen)
    states = {"actor": SimpleNamespace(kl=beta), "critic": None}
    scores = np.stack([np.full(B, np.nan, np.float32) if hasattr(r, "role") else REWARDS for r in a_run.rewards], 1)
    answers = [Completion("", (), True)] * B
    found = Answered(rollout(), [Problem("", "")] * B, answers, scores)
    return assess(a_run, stages, states, {name: None for name in a_run.roles if name in frozen}, found, best)


def test_kl_in_the_reward_is_k1_of_the_sampler_and_moves_with_its_coefficient():
    objective = Objective(Clip(), Returns(whiten=False), kl_in_reward=0.5)
    batch, _ = of(run(objective, reference=Role(LM)))
    mask = batch.rollout.mask
    expected = np.where(mask, -0.5 * (NUMBERS["logp"] - NUMBERS["ref"]), 0)
    np.testing.assert_allclose(batch.token_rewards, expected, atol=1e-6)
    last = np.arange(T)[None] == SIZE[:, None] - 1
    total = expected + np.where(last, REWARDS[:, None], 0)
    np.testing.assert_allclose(batch.advantages, np.cumsum(total[:, ::-1], 1)[:, ::-1] * mask, atol=1e-5)
    moved, _ = of(run(replace(objective, adaptive=AdaptiveKL()), reference=Role(LM)), beta=2.0)
    np.testing.assert_allclose(moved.token_rewards, 4 * expected, atol=1e-5)
    np.testing.assert_allclose(batch.ref_logp, NUMBERS["ref"])


def test_a_truncated_completion_may_be_left_out_and_still_counts_in_its_group():
    kept, metrics = of(run(grpo()))
    dropped, _ = of(run(replace(grpo(), drop_truncated=True)))
    assert np.array_equal(dropped.advantages, kept.advantages) and metrics["truncated"] == 0.25
    assert not dropped.rollout.mask[1].any() and np.array_equal(dropped.rollout.mask[0], kept.rollout.mask[0])


def test_the_center_of_the_trust_region_is_scored_where_it_is_asked_for():
    assert of(run(grpo()))[0].prox_logp is None
    np.testing.assert_array_equal(of(run(replace(grpo(), proximal=True)))[0].prox_logp, NUMBERS["prox"])


@pytest.mark.parametrize("critic", [Role(LM, Fresh(), AdamW()), Shared()], ids=["own", "shared"])
def test_values_are_of_the_states_before_tokens_and_the_last_is_what_follows(critic):
    gae = GAE(1.0, 0.9, whiten=False, bootstrap=True)
    batch, metrics = of(run(Objective(Clip(), gae, critic=Critic(ValueLoss())), critic=critic))
    np.testing.assert_array_equal(batch.values[:, 1:], NUMBERS["values"][:, :-1])
    cut = 1  # the row that ran into max_new: its last token is followed by the value of the state after it
    t, v = SIZE[cut] - 1, NUMBERS["values"][cut]
    assert batch.advantages[cut, t] == pytest.approx(v[t] - v[t - 1], abs=1e-6)
    stopped = 0
    t, v = SIZE[stopped] - 1, NUMBERS["values"][stopped]
    assert batch.advantages[stopped, t] == pytest.approx(REWARDS[stopped] - v[t - 1], abs=1e-6)
    mask = batch.rollout.mask
    np.testing.assert_allclose(batch.returns[mask], (batch.advantages + batch.values)[mask], atol=1e-6)
    left = (batch.returns - batch.values)[mask].var() / batch.returns[mask].var()
    assert metrics["values/explained_variance"] == pytest.approx(1 - left, rel=1e-4)


def test_a_critic_may_learn_other_returns_than_the_policy_compares():
    objective = Objective(Clip(), GAE(lam=0.5), critic=Critic(returns=GAE(1.0, 1.0)))
    batch, _ = of(run(objective, critic=Shared()))
    mask = batch.rollout.mask
    np.testing.assert_allclose(batch.returns[mask], (REWARDS[:, None] * mask)[mask], atol=1e-5)


def test_rewards_of_steps_are_paid_where_steps_end_and_not_once_more():
    rewards = (StepReward(END, "sum"), given, ModelReward(weight=2.0))
    batch, metrics = of(run(Objective(Clip(), Returns(whiten=False)), rewards, reward=Role(LM, Fresh())))
    steps = batch.rollout.mask & (batch.rollout.tokens.ids == END)
    np.testing.assert_allclose(batch.token_rewards, np.where(steps, 1 / (1 + np.exp(-NUMBERS["reward"])), 0), atol=1e-6)
    of_model = 2 * NUMBERS["reward"][np.arange(B), SIZE - 1]
    assert metrics["reward"] == pytest.approx(np.mean(REWARDS + of_model), rel=1e-5)
    assert metrics["reward/StepReward"] == pytest.approx(batch.token_rewards.sum(1).mean(), rel=1e-5)
    np.testing.assert_allclose(batch.scores[:, 2], of_model, rtol=1e-5)


def test_right_completions_are_told_by_the_first_reward():
    batch, _ = of(run(Objective(Clip(), GroupRelative())))
    assert np.array_equal(batch.target > 0, batch.rollout.mask & (REWARDS > 0)[:, None])


def test_a_greedy_completion_is_rewarded_by_models_too():
    """Rows 0 and 2 stand for the greedy completions; the model scores the rows it is given as it did the first ones."""
    r, rows = rollout(), [0, 2]
    best = Answered(take(r, rows), [Problem("", "")] * 2, [Completion("", (), True)] * 2, np.full((2, 1), np.nan))
    objective = Objective(Clip(), Returns(baseline="greedy", whiten=False))
    batch, _ = of(run(objective, (ModelReward(),), reward=Role(LM, Fresh())), best=best)
    reward = NUMBERS["reward"][np.arange(B), SIZE - 1]
    baseline = np.repeat([NUMBERS["reward"][i, SIZE[row] - 1] for i, row in enumerate(rows)], 2)
    expected = (reward - baseline)[:, None] * batch.rollout.mask
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-6)
