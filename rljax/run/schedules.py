"""Schedules: in which order a run goes through its stages. Each is a generator over the same stages.

A schedule yields after every step: (states, metrics, samples). Each stage is waited for, so its seconds are its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from zlib import crc32

import jax
import numpy as np

from rljax.assess.groups import varied
from rljax.data import examples
from rljax.data.pack import pack
from rljax.data.rows import Prompts, encode_prompts, fit, real, take
from rljax.errors import RunFailed
from rljax.run.assessment import Answered, answered, assess, sample_of
from rljax.run.reference import referred
from rljax.run.run import Run
from rljax.run.stages import Stages
from rljax.train.metrics import combine
from rljax.types import Assessed, Rollout, TrainState

SHAPES = 8  # so many numbers of rows a step's packed sequences fill, or few more


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


def synchronous(run: Run, stages: Stages, states: dict, frozen: dict, first: int, show) -> Iterator[tuple]:
    """Generate, assess, train, one after the other: every completion is from the parameters it trains."""
    for step in range(first, run.steps + 1):
        clock, began = Clock(show), perf_counter()
        with clock("reshard"):
            params, moved = stages.publish(states["actor"].params)
            jax.block_until_ready(params)
        found, best, metrics = collect(run, stages, params, step, clock)
        del params
        with clock("assess"):
            assessed, seen = assess(run, stages, states, frozen, found, best)
            assessed = fit(assessed, run.prompts * run.n)  # one shape, whatever prompts were dropped
        with clock("train"):
            states, trained = train(run, stages, states, assessed, step)
        rollout = found.rollout
        made = int(np.sum(rollout.length - rollout.prompt_length))
        metrics |= (
            seen
            | trained
            | {
                "bytes/reshard": moved,
                "tokens_per_second": made / (perf_counter() - began),
                **{f"seconds/{stage}": spent for stage, spent in clock.seconds.items()},
            }
        )
        yield states, metrics, samples_of(run, found, assessed)


def collect(run: Run, stages: Stages, params, step: int, clock) -> tuple[Answered, Answered | None, dict]:
    """Verified completions of `run.prompts` prompts, the greedy one of each where it is needed, and metrics.

    With `run.resample`, prompts whose completions are all right or all wrong are replaced, round by round.
    """
    rounds, kept, greedy, dropped, done = run.resample.rounds if run.resample else 1, [], [], 0, 0
    version = (step - 1) * run.minibatches * run.epochs
    for round in range(rounds):
        prompts = problems_of(run, stages, step, round)
        dropped += prompts.dropped
        with clock("generate"):
            rollout = real(stages.complete(params, prompts, run.seed, step, version, run.sampling, run.n))
        with clock("assess"):
            found = answered(run, prompts, rollout)
        if getattr(run.objective.advantage, "needs_greedy", False):
            with clock("generate"):
                sampling = replace(run.sampling, temperature=0.0)
                best = real(stages.complete(params, prompts, run.seed, step, version, sampling, 1))
            with clock("assess"):
                greedy.append((answered(run, prompts, best), np.arange(len(best.uid))))
        rows = np.arange(len(rollout.uid))
        if run.resample:
            rows = rows[varied(found.scores[:, 0] > 0, rollout.uid)]
        kept.append((found, rows))
        done += len(np.unique(rollout.uid[rows]))
        if done >= run.prompts or not run.resample:
            break
    else:
        raise RunFailed(
            f"step {step}: {rounds} rounds of {run.prompts} prompts gave {done} answered both right and wrong, but "
            f"prompts={run.prompts} are needed: the task may be too easy or too hard; raise n or resample.rounds"
        )
    found = joined(kept)
    keep = np.isin(found.rollout.uid, np.unique(found.rollout.uid)[: run.prompts])  # uids count up, round by round
    metrics = {"prompts/dropped": dropped} | ({"rounds": len(kept)} if run.resample else {})
    return chosen(found, np.flatnonzero(keep)), joined(greedy) if greedy else None, metrics


def joined(parts: list[tuple[Answered, np.ndarray]]) -> Answered:
    """Some rows of each, one after the other."""
    parts = [chosen(found, rows) for found, rows in parts]
    rollout = jax.tree.map(lambda *xs: np.concatenate(xs), *(found.rollout for found in parts))
    flat = lambda name: [x for found in parts for x in getattr(found, name)]
    return Answered(rollout, flat("problems"), flat("completions"), np.concatenate([found.scores for found in parts]))


def chosen(found: Answered, rows: np.ndarray) -> Answered:
    pick = lambda items: [items[row] for row in rows]
    return Answered(take(found.rollout, rows), pick(found.problems), pick(found.completions), found.scores[rows])


def supervised(run: Run, stages: Stages, states: dict, frozen: dict, first: int, show) -> Iterator[tuple]:
    """Train on the task's own examples: solutions to imitate, pairs to prefer, labelled completions or steps."""
    for step in range(first, run.steps + 1):
        clock = Clock(show)
        problems = run.task.batch(run.prompts, run.seed, step)
        assessed = examples.rows_of(problems, run.tokenizer, run.max_prompt + run.max_new, run.separator)
        if "reference" in frozen:
            with clock("assess"):
                assessed = referred(run, stages, states, frozen, problems, assessed)
        with clock("train"):
            states, metrics = train(run, stages, states, assessed, step)
        seconds = {f"seconds/{stage}": spent for stage, spent in clock.seconds.items()}
        yield states, metrics | {"length": lengths(assessed.rollout)} | seconds, []


def paired(run: Run, stages: Stages, states: dict, frozen: dict, first: int, show) -> Iterator[tuple]:
    """Generate, verify, pair, train: preferences between the model's own right and wrong completions.

    They are the actor's, or with `run.pairs.of = "reference"` those of the model as the run began, so that a run is one
    iteration of iterative reasoning preference optimization (arXiv:2404.19733).
    """
    for step in range(first, run.steps + 1):
        clock, began = Clock(show), perf_counter()
        with clock("reshard"):
            reference = run.pairs.of == "reference"
            source = stages.acting("reference", frozen["reference"]) if reference else states["actor"].params
            params, moved = stages.publish(source)
            jax.block_until_ready(params)
        found, _, metrics = collect(run, stages, params, step, clock)
        del params
        with clock("assess"):
            rewards = np.nansum(found.scores, 1)
            made = examples.pairs_of(found.rollout, rewards, run.pairs.per_prompt, run.seed)
            metrics |= {"reward": float(np.mean(rewards)), "pairs": len(made.rollout.uid)}
            made = fit(made, run.prompts * run.pairs.per_prompt)
            made = referred(run, stages, states, frozen, [], made)
        with clock("train"):
            states, trained = train(run, stages, states, made, step)
        metrics |= trained | {
            "length": lengths(found.rollout),
            "bytes/reshard": moved,
            "seconds/step": perf_counter() - began,
            **{f"seconds/{stage}": spent for stage, spent in clock.seconds.items()},
        }
        yield states, metrics, samples_of(run, found, None)


def lengths(rollout: Rollout) -> float:
    """Mean number of tokens that a row trains."""
    rows = rollout.mask.any(1)
    return float(np.sum(rollout.mask) / max(1, np.sum(rows)))


def samples_of(run: Run, found: Answered, assessed: Assessed | None) -> list[dict]:
    """A few completions to write down."""
    scores = found.scores if assessed is None else assessed.scores
    rewards = np.nansum(scores, 1)
    rows = range(min(run.samples, len(found.problems)))
    return [sample_of(found.rollout, b, found.problems[b], found.completions[b], rewards[b]) for b in rows]


def train(run: Run, stages: Stages, states: dict[str, TrainState], assessed: Assessed, step: int) -> tuple[dict, dict]:
    """All updates of a step, and their metrics as one."""
    states, metrics = dict(states), {}
    alone = run.critic and step <= run.objective.critic.warmup
    learners = [role for role in states if role == "critic" or not alone]
    seen, packing = {role: [] for role in learners}, []
    for batch in minibatches(run, assessed, step):
        if run.pack:
            batch, filled = pack(batch, run.pack, quantum(batch, run.pack, stages.actor.place.rows), run.together)
            packing.append(filled)
        for role in learners:
            states[role], found = stages.trained[role].update(states[role], batch)
            seen[role].append(found)
    for role, found in jax.device_get(seen).items():
        mine = combine(found)
        metrics |= mine if role == "actor" else {f"{role}/{name}": value for name, value in mine.items()}
    for name in packing[0] if packing else ():
        metrics[name] = float(np.mean([filled[name] for filled in packing]))
    return states, metrics


def quantum(batch: Assessed, tokens: int, multiple: int) -> int:
    """Of how many rows the number of packed rows is a multiple: few numbers, since each is a shape to compile."""
    most = batch.rollout.mask.size / tokens
    return max(1, round(most / SHAPES / multiple)) * multiple


def problems_of(run: Run, stages: Stages, step: int, round: int = 0) -> Prompts:
    """The prompts of a step; those of later rounds are drawn apart, so that the rest do not depend on how many took."""
    seed = crc32(f"{run.seed} {round}".encode()) if round else run.seed
    problems = run.task.batch(run.prompts, seed, step)
    rounds = run.resample.rounds if run.resample else 1
    first_uid = ((step - 1) * rounds + round) * run.prompts
    return encode_prompts(problems, run.tokenizer, run.max_prompt, stages.generate.rows, first_uid=first_uid)


def minibatches(run: Run, assessed: Assessed, step: int) -> Iterator[Assessed]:
    """Every row once an epoch; dealt by (seed, step, epoch) where an epoch has several updates, all of one size."""
    rows = assessed.rollout.mask.shape[0]
    for epoch in range(run.epochs):
        order = np.arange(rows)
        if run.minibatches > 1:
            order = np.random.default_rng([run.seed, step, epoch]).permutation(rows)
        for part in np.array_split(order, run.minibatches):
            yield fit(take(assessed, part), -(-rows // run.minibatches))
