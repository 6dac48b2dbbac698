"""What a step's completions are worth: rewards, log-probabilities and values of other roles, advantages of them all."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rljax.assess.experience import Experience, kl_rewards, spread
from rljax.assess.returns import explained_variance
from rljax.assess.rewards import Completion, score, total
from rljax.data.problems import Problem
from rljax.data.rows import Prompts
from rljax.model.forward import Outputs
from rljax.run.run import Run
from rljax.run.stages import Stages
from rljax.types import STOP, Assessed, Rollout, TrainState


class Answered(NamedTuple):
    """Completions, what was asked, and what verifiers say."""

    rollout: Rollout
    problems: list[Problem]
    completions: list[Completion]
    scores: np.ndarray  # [B R], NaN where a reward does not apply or is a model's


def answered(run: Run, prompts: Prompts, rollout: Rollout) -> Answered:
    problems, completions = read(run, prompts, rollout)
    return Answered(rollout, problems, completions, verified(run, problems, completions))


def verified(run: Run, problems: list[Problem], completions: list[Completion]) -> np.ndarray:
    """[B R]: every reward that needs no model."""
    scores = np.full((len(completions), len(run.rewards)), np.nan, np.float32)
    verifiers = [r for r, reward in enumerate(run.rewards) if not of_model(reward)]
    scores[:, verifiers] = score([run.rewards[r] for r in verifiers], problems, completions)
    return scores


def of_model(reward) -> bool:
    """Whether a role scores completions for it."""
    return hasattr(reward, "role")


def read(run: Run, prompts: Prompts, rollout: Rollout) -> tuple[list[Problem], list[Completion]]:
    """The problem of each row and what was said, as text."""
    by_uid = dict(zip(prompts.uid.tolist(), prompts.problems))
    completions = []
    for ids, begin, end, finish in zip(rollout.tokens.ids, rollout.prompt_length, rollout.length, rollout.finish):
        said = ids[begin:end]
        completions.append(Completion(run.tokenizer.decode(said), tuple(said.tolist()), bool(finish == STOP)))
    return [by_uid[uid] for uid in rollout.uid.tolist()], completions


def assess(
    run: Run, stages: Stages, states: dict[str, TrainState], frozen: dict, a: Answered, best: Answered | None
) -> tuple[Assessed, dict]:
    """What an update reads besides the rollout, and metrics of it. `best` are the prompts' greedy completions."""
    objective, rollout, mask = run.objective, a.rollout, a.rollout.mask
    judged = {role: stages.frozen[role].score(params, rollout) for role, params in frozen.items()}
    logp_of = lambda role: judged[role].logp if role in judged else None
    columns, rewards, token_rewards = rewarded(run, a, lambda role: judged[role].scores)
    metrics = measured(run, rollout, rewards, columns)
    greedy = None
    if best is not None:
        _, whole, parts = rewarded(run, best, lambda role: stages.frozen[role].score(frozen[role], best.rollout).scores)
        by_uid = dict(zip(best.rollout.uid.tolist(), (whole + parts.sum(1)).tolist(), strict=True))
        greedy = np.array([by_uid[uid] for uid in rollout.uid.tolist()])

    own = own_outputs(run, stages, states, rollout)
    proximal = own.logp if objective.proximal else None
    if objective.kl_in_reward:
        beta = float(states["actor"].kl) if objective.adaptive else objective.kl_in_reward
        now = rollout.logp if proximal is None else proximal
        token_rewards = token_rewards + kl_rewards(now, logp_of("reference"), mask, beta)
    values = bootstrap = None
    if objective.critic:
        judge = stages.trained["critic"].score(states["critic"], rollout) if run.critic else own
        after = judge.scores  # of the state after each token
        values = np.pad(after[:, :-1], ((0, 0), (1, 0)))
        bootstrap = after[np.arange(len(after)), np.maximum(rollout.length - 1, 0)]
    experience = Experience(
        rewards, columns, rollout.uid, mask, rollout.finish != STOP, token_rewards, values, bootstrap, greedy,
        rollout.logp, logp_of("teacher"),
    )  # fmt: skip
    advantages, returns = objective.advantage(experience), None
    if objective.critic:
        returns = (objective.critic.returns or objective.advantage).returns(experience)
        metrics["values/explained_variance"] = explained_variance(values, returns, mask)
    metrics["advantage/std"] = float(np.std(advantages[mask])) if mask.any() else 0.0
    if objective.drop_truncated:
        rollout = rollout.replace(mask=mask & (rollout.finish == STOP)[:, None])
    single = lambda x: None if x is None else np.asarray(x, np.float32)
    return Assessed(
        rollout, columns, single(advantages), single(logp_of("reference")),
        single(token_rewards) if token_rewards.any() else None, single(values), single(returns),
        prox_logp=single(proximal), target=single(spread(columns[:, 0] > 0, mask)) if run.rewards else None,
    ), metrics  # fmt: skip


def own_outputs(run: Run, stages: Stages, states: dict[str, TrainState], rollout: Rollout) -> Outputs | None:
    """The actor's, in one forward pass for all that is asked: its vocabulary is skipped if only values are."""
    if not run.objective.proximal and not run.shared:
        return None
    asked = rollout if run.objective.proximal else rollout.replace(mask=np.zeros_like(rollout.mask))
    return stages.actor.score(states["actor"], asked)


def rewarded(run: Run, a: Answered, scores_of: Callable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(every reward [B R], the sum [B] of those of whole completions, the sum [B T] of those of tokens).

    `scores_of` says what a role scores the tokens. A reward of tokens is in the first only to be reported.
    """
    columns, tokens, whole = a.scores.copy(), np.zeros(a.rollout.mask.shape), np.ones(len(run.rewards), bool)
    for r, reward in enumerate(run.rewards):
        if of_model(reward):
            columns[:, r], each = reward(scores_of(reward.role), a.rollout)
            if each is not None:
                whole[r], tokens = False, tokens + each
    return columns, total(columns[:, whole]) if whole.any() else np.zeros(len(tokens)), tokens


def measured(run: Run, rollout: Rollout, rewards: np.ndarray, columns: np.ndarray) -> dict[str, float]:
    """Rewards and lengths."""
    groups = [rewards[rollout.uid == uid] for uid in np.unique(rollout.uid)]
    length = rollout.length - rollout.prompt_length
    return {
        "reward": mean(rewards),
        **{f"reward/{name}": mean(column) for name, column in zip(names(run), columns.T)},
        "groups/zero_variance": float(np.mean([np.ptp(g) == 0 for g in groups])),
        "length": float(np.mean(length)),
        "length/max": float(np.max(length)),
        "truncated": float(np.mean(rollout.finish != STOP)),
    }


def names(run: Run) -> list[str]:
    """Of the rewards, as metrics have them."""
    return [getattr(r, "__name__", type(r).__name__) for r in run.rewards]


def mean(x: np.ndarray) -> float:
    return float(np.mean(x[~np.isnan(x)])) if not np.all(np.isnan(x)) else float("nan")


def sample_of(rollout: Rollout, b: int, problem: Problem, completion: Completion, reward: float) -> dict:
    return {
        "uid": int(rollout.uid[b]),
        "prompt": problem.prompt,
        "completion": completion.text,
        "reward": float(reward),
        "length": len(completion.ids),
        "finish_reason": "stop" if completion.stopped else "length",
    }
