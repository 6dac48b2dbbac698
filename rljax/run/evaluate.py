"""Held-out accuracy: what a run reports before, while and after it trains."""

import numpy as np

from rljax.assess.rewards import score
from rljax.data import examples
from rljax.data.problems import Problem
from rljax.data.rows import encode_prompts, real
from rljax.generate.sampling import Sampling
from rljax.run.assessment import of_model, read, sample_of
from rljax.run.reference import referred
from rljax.run.run import Run
from rljax.run.stages import Stages
from rljax.train.judge import judge
from rljax.train.metrics import combine
from rljax.types import TrainState

SEED = 0  # held-out problems and their draws are the same for every run, so that runs compare


def measure(
    run: Run, stages: Stages, states: dict[str, TrainState], frozen: dict
) -> tuple[dict[str, float], list[dict]]:
    """Held-out accuracy and samples where the actor can answer and a verifier can tell; else what it is trained on."""
    if stages.actor.lm.project and verifiers_of(run):
        return evaluate(run, stages, stages.publish(states["actor"].params)[0])
    return judged(run, stages, states, frozen), []


def held_out(run: Run) -> list[Problem]:
    return run.task.batch(run.evaluation.problems, SEED, 0, held_out=True)


def verifiers_of(run: Run) -> list:
    """The reward that held-out answers are judged by: the first that needs no model."""
    return [reward for reward in run.rewards if not of_model(reward)][:1]


def judged(run: Run, stages: Stages, states: dict[str, TrainState], frozen: dict) -> dict[str, float]:
    """The loss of held-out examples, and what it reports besides."""
    problems = held_out(run)
    batch = examples.rows_of(problems, run.tokenizer, run.max_prompt + run.max_new, run.separator)
    batch = referred(run, stages, states, frozen, problems, batch)
    out = stages.actor.score(states["actor"], batch.rollout)
    weights = run.objective.weights(batch, run.objective.kl)
    loss, (sums, largest) = judge(out, batch, weights, run.objective, on_policy=False)
    found = combine([{"tokens": batch.rollout.mask.sum(), "loss": loss, **sums, **largest}])
    return {f"eval/{name}": value for name, value in found.items() if name != "tokens"}


def evaluate(run: Run, stages: Stages, params) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of one completion for each held-out problem: sampled at temperature 1, and greedy.

    `params` are on the generation mesh. eval/exact_match is the mean of the run's first reward.
    """
    problems = held_out(run)
    rows = stages.generate.rows
    prompts = encode_prompts(problems, run.tokenizer, run.max_prompt, rows, first_uid=0)
    metrics, samples, verifiers = {}, [], verifiers_of(run)
    for name, sampling in (("", Sampling()), ("_greedy", Sampling(temperature=0.0))):
        rollout = real(stages.complete(params, prompts, SEED, 0, 0, sampling, 1))
        answered, completions = read(run, prompts, rollout)
        scores = score(verifiers, answered, completions)[:, 0] if verifiers else np.full(len(answered), np.nan)
        metrics[f"eval/exact_match{name}"] = float(np.nanmean(scores)) if np.any(~np.isnan(scores)) else float("nan")
        if not name:
            metrics["eval/length"] = float(np.mean(rollout.length - rollout.prompt_length))
            samples = [
                sample_of(rollout, b, answered[b], completions[b], scores[b]) for b in range(min(3, len(scores)))
            ]
    return metrics, samples
