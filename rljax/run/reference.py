"""The reference's log-probabilities of examples: asked of the model at every step, or all beforehand and kept."""

import json
import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rljax.config import to_json
from rljax.data import examples
from rljax.data.problems import Problem
from rljax.data.rows import fit
from rljax.errors import RunFailed
from rljax.run.run import Run
from rljax.run.stages import Stages
from rljax.types import Assessed, Rollout, TrainState

FILE = "reference.logp"  # of a run directory
DIGEST = 16  # bytes
ENTRY = np.dtype([("key", f"V{DIGEST}"), ("size", "<i8")])  # a row's key, and its tokens


class Kept:
    """Log-probabilities by row, in a file: 4 bytes a token. Takes the place of the reference's parameters.

    The file is the float32 values of row after row, an ENTRY for each, the number of rows in int64, and a digest of all
    that with the key `whose`. It is replaced whole or not at all; one that is damaged or whose digest has another key
    counts as none.
    """

    def __init__(self, path: Path, whose: bytes):
        self.path, self.whose = path, whose
        self.read()

    def read(self) -> None:
        """Maps the values into memory, so that a step reads those of its own rows and no more are held."""
        size = self.path.stat().st_size if self.path.exists() else 0
        data = np.memmap(self.path, np.uint8, "r") if size else np.zeros(0, np.uint8)
        body, digest = data[:-DIGEST], data[-DIGEST:].tobytes()
        if blake2b(body, digest_size=DIGEST, key=self.whose).digest() != digest:
            body = np.zeros(8, np.uint8)  # no rows
        body, rows = body[:-8], int(body[-8:].view("<i8")[0])
        values, index = np.split(body, [len(body) - rows * ENTRY.itemsize])
        self.values, self.index = values.view("<f4"), np.array(index.view(ENTRY))
        begin = np.cumsum(self.index["size"]) - self.index["size"]
        self.begin = dict(zip(self.index["key"].tolist(), begin.tolist(), strict=True))

    def __call__(self, rollout: Rollout) -> np.ndarray:
        out = np.zeros(rollout.mask.shape, np.float32)
        names = keys(rollout)
        for row in np.flatnonzero(rollout.mask.any(1)):
            if (begin := self.begin.get(names[row])) is None:
                raise RunFailed("keep_reference=true, but an example came up that the reference has not scored: it is "
                                "for supervised runs, whose tasks tell a step's examples beforehand")  # fmt: skip
            size = rollout.length[row]
            out[row, :size] = self.values[begin : begin + size]
        return out

    def missing(self, rollouts: Iterator[Rollout], score: Callable) -> Iterator[tuple[bytes, np.ndarray]]:
        """Key and values of each row that the file lacks. The rows of a rollout are scored together or not at all."""
        known = {*self.begin}
        for rollout in rollouts:
            names, rows = keys(rollout), np.flatnonzero(rollout.mask.any(1))
            if new := {names[row]: row for row in rows if names[row] not in known}:
                logp = score(rollout)
                yield from ((name, logp[row, : rollout.length[row]]) for name, row in new.items())
                known |= {*new}

    def add(self, rows: Iterator[tuple[bytes, np.ndarray]]) -> None:
        """Writes the file with these rows besides, as they come, to a file that then takes its place."""
        if (first := next(rows, None)) is None:
            return
        partial = self.path.with_name(f".{self.path.name}.partial")
        digest, sizes = blake2b(digest_size=DIGEST, key=self.whose), []
        try:
            with open(partial, "wb") as file:

                def put(x):
                    file.write(x)
                    digest.update(x)

                put(self.values)
                for name, values in chain([first], rows):
                    put(values)
                    sizes.append((name, len(values)))
                put(np.concatenate([self.index, np.array(sizes, ENTRY)]))
                put(np.array(len(self.index) + len(sizes), "<i8"))
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None  # a full disk alone names no file
        finally:
            partial.unlink(missing_ok=True)
        self.read()


def keys(rollout: Rollout) -> list[bytes]:
    """What a row's log-probabilities depend on: its ids, and which of them belong together and are asked for."""
    tokens = rollout.tokens
    rows = zip(rollout.length.tolist(), tokens.ids, tokens.segments, rollout.mask, strict=True)
    return [blake2b(b"".join(x[:n].tobytes() for x in row), digest_size=DIGEST).digest() for n, *row in rows]


def live(stages: Stages, frozen: dict) -> Callable:
    """Rollout -> log-probabilities of the reference, whichever it is."""
    params = frozen["reference"]
    return params if isinstance(params, Kept) else lambda rows: stages.frozen["reference"].score(params, rows).logp


def keep(run: Run, stages: Stages, frozen: dict, where: Path, first: int, held_out: list[Problem]) -> None:
    """Has the reference score all examples from step `first` on, and those held out, and leave its devices.

    What the run directory `where` holds of them, from before the run was interrupted, is not scored again.
    """
    kept = Kept(where / FILE, identity(run, stages, frozen["reference"]))
    batches = (run.task.batch(run.prompts, run.seed, step) for step in range(first, run.steps + 1))
    rows = (rollout for problems in chain(batches, [held_out]) for rollout in rollouts(run, problems))
    kept.add(kept.missing(rows, live(stages, frozen)))
    frozen["reference"] = kept


def identity(run: Run, stages: Stages, params) -> bytes:
    """What log-probabilities depend on besides the row: model, weights, and what is done to logits."""
    with jax.set_mesh(stages.frozen["reference"].place.mesh):
        weights = jax.device_get(jax.tree.leaves(checksums(params)))
    said = json.dumps([to_json(run.roles["reference"].lm), to_json(run.sampling), np.array(weights).tolist()])
    return blake2b(said.encode(), digest_size=DIGEST).digest()


@jax.jit
def checksums(params):
    """A number for each tensor, of its bits and where they are. Integers wrap, so layouts do not matter."""

    def one(w):
        bits = lax.bitcast_convert_type(w, f"uint{8 * w.dtype.itemsize}").astype(jnp.uint32)
        for dim in range(w.ndim):
            at = lax.broadcasted_iota(jnp.uint32, w.shape, dim)
            bits = (bits ^ bits >> 15) * (2 * at + 1) + at
        return jnp.sum(bits, dtype=jnp.uint32)

    return jax.tree.map(one, params)


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
