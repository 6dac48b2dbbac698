"""The reference's log-probabilities of examples: asked of the model at every step, or all beforehand and kept."""

from collections.abc import Callable, Iterator
from hashlib import blake2b

import numpy as np

from rljax.data import examples
from rljax.data.problems import Problem
from rljax.data.rows import fit
from rljax.errors import RunFailed
from rljax.run.run import Run
from rljax.run.stages import Stages
from rljax.types import Assessed, Rollout, TrainState


class Kept:
    """Log-probabilities by sequence, on the host: 4 bytes a token. Takes the place of the reference's parameters."""

    def __init__(self):
        self.rows: dict[bytes, np.ndarray] = {}

    def __call__(self, rollout: Rollout) -> np.ndarray:
        out = np.zeros(rollout.mask.shape, np.float32)
        names = keys(rollout)
        for row in np.flatnonzero(rollout.mask.any(1)):
            if names[row] not in self.rows:
                raise RunFailed("keep_reference=true, but an example came up that the reference has not scored: it is "
                                "for supervised runs, whose tasks tell a step's examples beforehand")  # fmt: skip
            out[row, : rollout.length[row]] = self.rows[names[row]]
        return out

    def add(self, rollout: Rollout, score: Callable) -> None:
        names = keys(rollout)
        if any(name not in self.rows for name in names):
            logp = score(rollout)
            self.rows |= {name: logp[row, : rollout.length[row]] for row, name in enumerate(names)}


def keys(rollout: Rollout) -> list[bytes]:
    """What a row's log-probabilities depend on: its ids, and which of them belong together and are asked for."""
    tokens = rollout.tokens
    rows = zip(rollout.length.tolist(), tokens.ids, tokens.segments, rollout.mask, strict=True)
    return [blake2b(b"".join(x[:n].tobytes() for x in row), digest_size=16).digest() for n, *row in rows]


def live(stages: Stages, frozen: dict) -> Callable:
    """Rollout -> log-probabilities of the reference, whichever it is."""
    params = frozen["reference"]
    return params if isinstance(params, Kept) else lambda rows: stages.frozen["reference"].score(params, rows).logp


def keep(run: Run, stages: Stages, frozen: dict, first: int, held_out: list[Problem]) -> None:
    """Has the reference score all examples from step `first` on, and those held out, and leave its devices."""
    kept, score = Kept(), live(stages, frozen)
    for problems in (*(run.task.batch(run.prompts, run.seed, step) for step in range(first, run.steps + 1)), held_out):
        for rollout in rollouts(run, problems):
            kept.add(rollout, score)
    frozen["reference"] = kept


def rollouts(run: Run, problems: list[Problem]) -> Iterator[Rollout]:
    """The rows of a step of examples and, for KTO, those that its baseline is measured on."""
    if problems:
        columns = run.max_prompt + run.max_new
        yield examples.rows_of(problems, run.tokenizer, columns, run.separator).rollout
        if run.needs_baseline:
            yield mismatched(run, problems)


def mismatched(run: Run, problems: list[Problem]) -> Rollout:
    """As many rows as there are problems, so that the shape is always the same."""
    columns = run.max_prompt + run.max_new
    return fit(examples.mismatched(problems, run.tokenizer, columns).rollout, len(problems))


def referred(run: Run, stages: Stages, states: dict[str, TrainState], frozen: dict, problems, batch: Assessed):
    """The batch with the reference's log-probabilities, where there is one, and KTO's baseline."""
    if "reference" not in frozen:
        return batch
    refer = live(stages, frozen)
    batch = batch.replace(ref_logp=refer(batch.rollout))
    if run.needs_baseline:
        gap = baseline(stages, states, refer, mismatched(run, problems))
        batch = batch.replace(target=np.full(batch.rollout.mask.shape, gap))
    return batch


def baseline(stages: Stages, states: dict[str, TrainState], refer: Callable, other: Rollout) -> np.float32:
    """KTO's z0: how far the actor is from the reference on completions of other prompts (arXiv:2402.01306, section
    4.1), 0 at least."""
    gap = np.where(other.mask, stages.actor.score(states["actor"], other).logp - refer(other), 0.0)
    return np.float32(max(0.0, gap.sum() / max(1, other.mask.any(1).sum())))
