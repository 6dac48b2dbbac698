"""Rows of token ids on the host: prompts to complete, examples to imitate, and the padding that a mesh needs."""

from typing import NamedTuple

import jax
import numpy as np

from rljax.data.problems import Problem
from rljax.data.tokenizer import Tokenizer
from rljax.errors import UserError
from rljax.types import PAD_UID, STOP, Assessed, Rollout, Tokens


class Prompts(NamedTuple):
    """Prompts as the sampler takes them, right-padded, and the problems they came from."""

    ids: np.ndarray  # int32 [U P]
    length: np.ndarray  # int32 [U]
    uid: np.ndarray  # int32 [U]; PAD_UID marks a row that only fills the batch
    problems: list[Problem]  # one per row, filler rows excepted
    dropped: int  # prompts left out for being longer than allowed


def encode_prompts(
    problems: list[Problem], tokenizer: Tokenizer, longest: int, multiple: int, first_uid: int
) -> Prompts:
    """Encodes prompts to rows of `longest` tokens, their number padded to a multiple of `multiple`.

    A longer prompt is dropped and counted; a UserError if that leaves none. Uids count from `first_uid`, dropped
    prompts included, so that a prompt's draws do not depend on its neighbors.
    """
    encoded = [tokenizer.encode(problem.prompt) for problem in problems]
    fits = [u for u, ids in enumerate(encoded) if 0 < len(ids) <= longest]
    if not fits:
        sizes = sorted(len(ids) for ids in encoded)
        raise UserError(
            f"max_prompt={longest}: all {len(encoded)} prompts are longer or empty ({sizes[0]} to {sizes[-1]} tokens); "
            f"set max_prompt={sizes[-1]}"
        )
    rows = -(-len(problems) // multiple) * multiple
    ids, length, uid = prompt_rows([encoded[u] for u in fits], [first_uid + u for u in fits], rows, longest)
    return Prompts(ids, length, uid, [problems[u] for u in fits], len(problems) - len(fits))


def prompt_rows(encoded: list[list[int]], uids, rows: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, lengths and uids of `rows` rows of `longest` tokens; those beyond the prompts only fill the batch."""
    ids = np.zeros((rows, longest), np.int32)
    length, uid = np.ones(rows, np.int32), np.full(rows, PAD_UID, np.int32)
    for row, (prompt, name) in enumerate(zip(encoded, uids)):
        length[row], uid[row] = len(prompt), name
        ids[row, : length[row]] = prompt
    return ids, length, uid


def examples(problems: list[Problem], tokenizer: Tokenizer, width: int) -> Rollout:
    """Solved problems as rows whose solution, ended by the stop token, is what to imitate. Longer ones are an error."""
    rows = []
    for problem in problems:
        if problem.solution is None:
            raise UserError(f"the task has no solution to imitate for {problem.prompt!r}")
        prompt, solution = tokenizer.encode(problem.prompt), [*tokenizer.encode(problem.solution), tokenizer.stop[0]]
        if len(prompt) + len(solution) > width:
            need = len(prompt) + len(solution)
            raise UserError(f"max_prompt + max_new = {width} tokens, but an example has {need}: {problem.prompt!r}")
        rows.append((prompt, solution))
    b = len(rows)
    ids = np.zeros((b, width), np.int32)
    prompt_length = np.array([len(p) for p, _ in rows], np.int32)
    length = prompt_length + np.array([len(s) for _, s in rows], np.int32)
    for row, (prompt, solution) in enumerate(rows):
        ids[row, : length[row]] = prompt + solution
    t = np.arange(width, dtype=np.int32)[None]
    inside = t < length[:, None]
    return Rollout(
        tokens=Tokens(ids, np.where(inside, t, 0), inside.astype(np.int32)),
        mask=inside & (t >= prompt_length[:, None]),
        logp=np.zeros((b, width), np.float32),
        version=np.zeros((b, width), np.int32),
        length=length,
        prompt_length=prompt_length,
        finish=np.full(b, STOP, np.int32),
        uid=np.arange(b, dtype=np.int32),
        sample=np.zeros(b, np.int32),
    )


def fit(batch, rows: int, columns: int = 1):
    """Pads a batch on the host to a multiple of `rows` rows and `columns` columns.

    Filler rows are zero, so their mask is empty and they weigh nothing; a `[B T]` or `[B T L k]` array is one whose
    second dimension is the tokens'.
    """
    b, t = (batch.rollout if isinstance(batch, Assessed) else batch).mask.shape
    down, right = -b % rows, -t % columns

    def pad(x):
        wide = x.ndim in (2, 4) and x.shape[1] == t
        return np.pad(x, [(0, down)] + [(0, right if wide and d == 0 else 0) for d in range(x.ndim - 1)])

    return jax.tree.map(pad, batch)


def take(batch, index):
    """The same rows of every field."""
    return jax.tree.map(lambda x: x[index], batch)


def real(rollout: Rollout) -> Rollout:
    """The rows that answer a prompt, filler rows left out."""
    return take(rollout, rollout.uid >= 0)
