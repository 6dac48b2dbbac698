"""A trained run put to use: evaluated, or completing prompts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rljax.config import load_experiment, validate
from rljax.data.rows import Prompts, prompt_rows, real
from rljax.errors import UserError
from rljax.generate.sampling import Sampling
from rljax.mesh.file import load as load_mesh
from rljax.run import devices
from rljax.run.checkpoint import parameters
from rljax.run.directory import recall, run_directory
from rljax.run.run import Run
from rljax.run.stages import Stages, build
from rljax.types import STOP


def load(target: str, mesh: Path | None, step: int | None, experiment: Path | None, max_new: int | None = None):
    """(run, stages, parameters on the generation mesh, step) of a run directory.

    An experiment given stands in for the run's own task, rewards, tokenizer and sizes.
    """
    where = run_directory(target)
    _, run, file = recall(where)
    if "tokens" not in run.heads("actor"):
        raise UserError(f'{target}: its actor has head="value", which scores completions and makes none')
    if experiment:
        other = load_experiment(str(experiment))
        validate(other)
        other.check()
        run = replace(other, roles=run.roles)
    if max_new:
        run = replace(run, max_new=max_new)
    file = load_mesh(mesh) if mesh else file
    devices.configure(file)
    stages = build(run, file)
    place, role = stages.generate, run.roles["actor"]
    found = parameters(where, role, run.heads("actor"), place.mesh, place.placement.zero, step)
    return run, stages, found.params, found.step


def complete(
    run: Run, stages: Stages, params, texts: list[str], ids: list[str], sampling: Sampling, n: int, seed: int
) -> Iterator[dict]:
    """n completions of each prompt, prompts given as text first, then as ids: prompt, text, ids, log-probabilities."""
    prompts = [run.tokenizer.prompt([("user", text)]) for text in texts]
    prompts += [_ids(line, stages.actor.lm.vocab) for line in ids]
    if not prompts:
        raise UserError('nothing to complete: give --prompt TEXT or --ids "1 2 3"')
    if not all(prompts):
        raise UserError("a prompt is empty; give at least one token")
    multiple = stages.generate.rows
    rows = -(-len(prompts) // multiple) * multiple
    batch = Prompts(*prompt_rows(prompts, range(len(prompts)), rows, max(map(len, prompts))), [], 0)
    rollout = real(stages.complete(params, batch, seed, 0, 0, sampling, n))
    for b, (begin, end) in enumerate(zip(rollout.prompt_length.tolist(), rollout.length.tolist())):
        row = rollout.tokens.ids[b]
        yield {
            "prompt": run.tokenizer.decode(row[:begin]),
            "prompt_ids": row[:begin].tolist(),
            "ids": row[begin:end].tolist(),
            "text": run.tokenizer.decode(row[begin:end]),
            "logprobs": [float(x) for x in rollout.logp[b, begin:end]],
            "finish_reason": "stop" if rollout.finish[b] == STOP else "length",
        }


def _ids(line: str, vocab: int) -> list[int]:
    try:
        ids = [int(word) for word in line.replace(",", " ").split()]
    except ValueError:
        raise UserError(f'--ids {line!r} must be whole numbers, such as "1 2 3"') from None
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        raise UserError(f"--ids {line!r}: {wrong[0]} is outside the vocabulary, 0 to {vocab - 1}")
    return ids
