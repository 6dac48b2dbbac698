"""Held-out accuracy: what a run reports before, while and after it trains."""

import numpy as np

from rljax.assess.rewards import score
from rljax.data.rows import encode_prompts, real
from rljax.generate.sampling import Sampling
from rljax.run.run import Run
from rljax.run.schedules import read, sample_of
from rljax.run.stages import Stages

SEED = 0  # held-out problems and their draws are the same for every run, so that runs compare


def evaluate(run: Run, stages: Stages, params) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of one completion for each held-out problem: sampled at temperature 1, and greedy.

    `params` are on the generation mesh. eval/exact_match is the mean of the run's first reward.
    """
    problems = run.task.batch(run.evaluation.problems, SEED, 0, held_out=True)
    rows = stages.generate.rows
    prompts = encode_prompts(problems, run.tokenizer, run.max_prompt, rows, first_uid=0)
    metrics, samples = {}, []
    for name, sampling in (("", Sampling()), ("_greedy", Sampling(temperature=0.0))):
        rollout = real(stages.complete(params, prompts, SEED, 0, 0, sampling, 1))
        answered, completions = read(run, prompts, rollout)
        scores = score(run.rewards[:1], answered, completions)[:, 0]
        metrics[f"eval/exact_match{name}"] = float(np.nanmean(scores)) if np.any(~np.isnan(scores)) else float("nan")
        if not name:
            metrics["eval/length"] = float(np.mean(rollout.length - rollout.prompt_length))
            samples = [
                sample_of(rollout, b, answered[b], completions[b], scores[b]) for b in range(min(3, len(scores)))
            ]
    return metrics, samples
