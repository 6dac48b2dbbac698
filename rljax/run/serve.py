"""A trained run or a checkpoint put to use: evaluated, or completing prompts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rljax.config import load_experiment, validate
from rljax.data.pretrained import Pretrained, stop_ids, templated
from rljax.data.problems import Problem
from rljax.data.rows import Prompts, prompt_rows, real
from rljax.data.tokenizer import Plain
from rljax.errors import UserError
from rljax.generate.sampling import Sampling
from rljax.mesh.file import load as load_mesh
from rljax.mesh.file import parse
from rljax.run import devices
from rljax.run.checkpoint import parameters
from rljax.run.directory import recall, run_directory
from rljax.run.imported import base_of, decoder, imported, is_checkpoint
from rljax.run.run import Role, Run
from rljax.run.schedules import supervised
from rljax.run.stages import Stages, build
from rljax.train.algorithms import sft
from rljax.train.optimizer import AdamW
from rljax.types import STOP
from rljax.weights.load import Progress

ALONE = 'platform = "cpu"\ndevices = 1\n[train]\ndata = 1\n'  # where no mesh file says otherwise


@dataclass(frozen=True)
class NoTask:
    """What a checkpoint has of problems."""

    def batch(self, count: int, seed: int, step: int, held_out: bool = False) -> list[Problem]:
        raise UserError("a checkpoint has no problems to be evaluated on: give --experiment FILE")


def load(
    target: str, mesh: Path | None, step: int | None, experiment: Path | None, max_new: int | None = None,
    compute: str | None = None, chat: bool = True, progress: Progress | None = None,
):  # fmt: skip
    """(run, stages, parameters on the generation mesh, step) of a run directory, or of one in Hugging Face format.

    An experiment given stands in for the run's own task, rewards, tokenizer and sizes. `compute` and `chat` are for
    checkpoints: the dtype of matrices and activations, and whether prompts are rendered by the chat template.
    """
    checkpoint = is_checkpoint(target)
    if checkpoint and step is not None:
        raise UserError(f"--step {step}: {target} is a checkpoint, which has no steps")
    if compute and not checkpoint:
        raise UserError(f"--compute {compute}: {target} is a run, which says what it computes in")
    where = None if checkpoint else run_directory(target)
    run, file = (of_checkpoint(target, compute or "float32", chat), None) if checkpoint else recall(where)[1:]
    if "tokens" not in run.heads("actor"):
        raise UserError(f'{target}: its actor has head="value", which scores completions and makes none')
    if experiment:
        other = load_experiment(str(experiment))
        validate(other)
        other.check()
        run = replace(other, roles=run.roles)
    if max_new:
        run = replace(run, max_new=max_new)
    file = load_mesh(mesh) if mesh else file or parse(ALONE, "of one device")
    devices.configure(file)
    stages = build(run, file)
    at, role, heads = stages.generate, run.roles["actor"], run.heads("actor")
    if not checkpoint:
        found = parameters(where, role, heads, at.mesh, at.placement.zero, step)
        return run, stages, found.params, found.step
    dtype = lambda t: role.lm.compute if t.matrix else "float32"
    params = imported(target, role.lm, heads, at.mesh, at.placement.zero, dtype=dtype, progress=progress).params
    return run, stages, params, None


def of_checkpoint(target: str, compute: str, chat: bool) -> Run:
    """A run whose actor is a checkpoint, to generate with."""
    lm, base = replace(decoder(target), compute=compute), base_of(target)
    tokenizer = Numbers(lm.vocab, stop_ids(base))
    if (base / "tokenizer.json").is_file():
        tokenizer = Pretrained(str(base), chat=chat and templated(str(base)))
    return Run(
        roles={"actor": Role(lm, start=target, optimizer=AdamW())}, task=NoTask(), tokenizer=tokenizer,
        objective=sft(), schedule=supervised, max_new=128,
    )  # fmt: skip


@dataclass(frozen=True)
class Numbers(Plain):
    """Ids without text, of a checkpoint without a tokenizer."""

    vocab: int
    stop: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        raise UserError(f'the checkpoint has no tokenizer.json, so {text[:40]!r} has no ids: give --ids "1 2 3"')

    def decode(self, ids, stops: bool = False) -> str:
        return " ".join(str(int(i)) for i in ids if stops or int(i) not in self.stop)


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
            "prompt": run.tokenizer.decode(row[:begin], stops=True),
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
