"""Schedules: in which order a run goes through its stages. Each is a generator over the same stages.

A schedule yields after every step: (state, metrics, samples). Each stage is waited for, so its seconds are its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import jax
import numpy as np

from rljax.assess.rewards import Completion, score, total
from rljax.data.problems import Problem
from rljax.data.rows import Prompts, encode_prompts, examples, fit, real, take
from rljax.run.run import Run
from rljax.run.stages import Stages
from rljax.types import STOP, Assessed, Rollout, TrainState


class Clock:
    """Seconds by stage, and the display told which one is on."""

    def __init__(self, show):
        self.show, self.seconds = show, {}

    @contextmanager
    def __call__(self, stage: str):
        self.show(stage)
        began = perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - began


def synchronous(run: Run, stages: Stages, state: TrainState, reference, first: int, show) -> Iterator[tuple]:
    """Generate, assess, train, one after the other: every completion is from the parameters it trains."""
    for step in range(first, run.steps + 1):
        clock, began = Clock(show), perf_counter()
        prompts = problems_of(run, stages, step)
        with clock("reshard"):
            params, moved = stages.publish(state.params)
            jax.block_until_ready(params)
        with clock("generate"):
            version = (step - 1) * run.minibatches * run.epochs
            rollout = stages.complete(params, prompts, run.seed, step, version, run.sampling, run.n)
            rollout = real(rollout)
        del params
        with clock("assess"):
            assessed, metrics, samples = assess(run, prompts, rollout)
            assessed = fit(assessed, run.prompts * run.n)  # one shape, whatever prompts were dropped
            if reference is not None:
                assessed = assessed.replace(ref_logp=stages.refer(reference, assessed.rollout))
        with clock("train"):
            state, trained = train(run, stages, state, assessed, step)
        made = int(np.sum(rollout.length - rollout.prompt_length))
        metrics |= trained | {
            "prompts/dropped": prompts.dropped,
            "bytes/reshard": moved,
            "tokens_per_second": made / (perf_counter() - began),
            **{f"seconds/{stage}": spent for stage, spent in clock.seconds.items()},
        }
        yield state, metrics, samples


def supervised(run: Run, stages: Stages, state: TrainState, reference, first: int, show) -> Iterator[tuple]:
    """Train on the task's own solutions."""
    for step in range(first, run.steps + 1):
        clock = Clock(show)
        problems = run.task.batch(run.prompts, run.seed, step)
        rollout = examples(problems, run.tokenizer, run.max_prompt + run.max_new)
        with clock("train"):
            assessed = Assessed(rollout, np.zeros((len(problems), 0), np.float32))
            state, metrics = train(run, stages, state, assessed, step)
        length = float(np.mean(rollout.length - rollout.prompt_length))
        yield state, metrics | {"length": length, "seconds/train": clock.seconds["train"]}, []


def train(run: Run, stages: Stages, state: TrainState, assessed: Assessed, step: int) -> tuple[TrainState, dict]:
    """All updates of a step, and their metrics: means over the step's tokens, or the largest of what is a maximum."""
    seen = []
    for batch in minibatches(run, assessed, step):
        state, metrics = stages.update(state, batch)
        seen.append(metrics)
    seen = jax.device_get(seen)
    tokens = np.array([metrics["tokens"] for metrics in seen])
    combined = {}
    for name in seen[0]:
        values = np.array([metrics[name] for metrics in seen])
        if name == "tokens":
            combined[name] = float(values.sum())
        elif name == "skipped":
            combined[name] = float(values[-1])
        elif name.endswith("/max"):
            combined[name] = float(values.max())
        else:
            combined[name] = float(np.average(values, weights=np.maximum(tokens, 1)))
    return state, combined


def problems_of(run: Run, stages: Stages, step: int) -> Prompts:
    problems = run.task.batch(run.prompts, run.seed, step)
    rows = stages.generate.rows
    return encode_prompts(problems, run.tokenizer, run.max_prompt, rows, first_uid=(step - 1) * run.prompts)


def assess(run: Run, prompts: Prompts, rollout: Rollout) -> tuple[Assessed, dict, list[dict]]:
    """Scores and advantages of a rollout, metrics of them, and a few samples to write down."""
    problems, completions = read(run, prompts, rollout)
    scores = score(run.rewards, problems, completions)
    rewards = total(scores)
    advantages = run.objective.advantage(rewards, rollout.uid).astype(np.float32)
    groups = [rewards[rollout.uid == uid] for uid in np.unique(rollout.uid)]
    length = rollout.length - rollout.prompt_length
    names = [getattr(r, "__name__", type(r).__name__) for r in run.rewards]
    metrics = {
        "reward": _mean(rewards),
        **{f"reward/{name}": _mean(column) for name, column in zip(names, scores.T)},
        "advantage/std": float(np.std(advantages)),
        "groups/zero_variance": float(np.mean([np.ptp(g) == 0 for g in groups])),
        "length": float(np.mean(length)),
        "truncated": float(np.mean(rollout.finish != STOP)),
    }
    samples = [
        sample_of(rollout, b, problems[b], completions[b], rewards[b]) for b in range(min(run.samples, len(rewards)))
    ]
    return Assessed(rollout, scores, np.where(rollout.mask, advantages[:, None], 0)), metrics, samples


def read(run: Run, prompts: Prompts, rollout: Rollout) -> tuple[list[Problem], list[Completion]]:
    """The problem of each row and what was said, as text."""
    by_uid = dict(zip(prompts.uid.tolist(), prompts.problems))
    completions = []
    for ids, begin, end, finish in zip(rollout.tokens.ids, rollout.prompt_length, rollout.length, rollout.finish):
        said = ids[begin:end]
        completions.append(Completion(run.tokenizer.decode(said), tuple(said.tolist()), bool(finish == STOP)))
    return [by_uid[uid] for uid in rollout.uid.tolist()], completions


def minibatches(run: Run, assessed: Assessed, step: int) -> Iterator[Assessed]:
    """Every row once an epoch; dealt by (seed, step, epoch) where an epoch has several updates, all of one size."""
    rows = assessed.rollout.mask.shape[0]
    for epoch in range(run.epochs):
        order = np.arange(rows)
        if run.minibatches > 1:
            order = np.random.default_rng([run.seed, step, epoch]).permutation(rows)
        for part in np.array_split(order, run.minibatches):
            yield fit(take(assessed, part), -(-rows // run.minibatches))


def sample_of(rollout: Rollout, b: int, problem: Problem, completion: Completion, reward: float) -> dict:
    return {
        "uid": int(rollout.uid[b]),
        "prompt": problem.prompt,
        "completion": completion.text,
        "reward": float(reward),
        "length": len(completion.ids),
        "finish_reason": "stop" if completion.stopped else "length",
    }


def _mean(x: np.ndarray) -> float:
    return float(np.mean(x[~np.isnan(x)])) if not np.all(np.isnan(x)) else float("nan")
