"""Rows of token ids on the host: prompts to complete, examples to imitate, and the padding that a mesh needs."""

from typing import NamedTuple

import jax
import numpy as np

from rljax.data.problems import Problem
from rljax.data.tokenizer import Tokenizer, ended
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
    encoded = [tokenizer.prompt(problem.asked) for problem in problems]
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


class Sequence(NamedTuple):
    """Ids of one sequence, and which of them are learned. The first never is: nothing precedes it."""

    ids: list[int]
    learned: list[bool]


def continued(prompt: list[int], completion: list[int]) -> Sequence:
    """A prompt, and a completion to learn."""
    return Sequence([*prompt, *completion], [False] * len(prompt) + [True] * len(completion))


def fitting(sequences: list[Sequence], columns: int, what: str, problem: Problem) -> tuple[Sequence, ...]:
    """The sequences of a row; UserError where they are longer than it."""
    if (need := sum(len(sequence.ids) for sequence in sequences)) > columns:
        rule = f"but max_prompt + max_new leave it {columns}; raise either"
        raise UserError(f"{what} has {need} tokens with its prompt, {rule}: {problem.prompt!r}")
    return tuple(sequences)


def lay(rows: list[tuple[Sequence, ...]], columns: int) -> Rollout:
    """Rows of `columns` tokens that hold these sequences one after the other, as segments 1, 2, ...

    Masks come of lengths alone, so the stop token may be the id that pads. A row's uid is its number. `prompt_length`
    is what precedes the first learned token of a row of one sequence, and 0 in a row of several.
    """
    b = len(rows)
    ids, positions, segments = np.zeros((3, b, columns), np.int32)
    mask, length, prompt_length = np.zeros((b, columns), bool), np.zeros(b, np.int32), np.zeros(b, np.int32)
    for row, sequences in enumerate(rows):
        for segment, sequence in enumerate(sequences, 1):
            size = len(sequence.ids)
            here = slice(length[row], length[row] + size)
            ids[row, here], mask[row, here] = sequence.ids, sequence.learned
            positions[row, here], segments[row, here] = np.arange(size), segment
            length[row] += size
        if len(sequences) == 1:
            prompt_length[row] = (sequences[0].learned + [True]).index(True)
    return Rollout(
        tokens=Tokens(ids, positions, segments),
        mask=mask,
        logp=np.zeros((b, columns), np.float32),
        version=np.zeros((b, columns), np.int32),
        length=length,
        prompt_length=prompt_length,
        finish=np.full(b, STOP, np.int32),
        uid=np.arange(b, dtype=np.int32),
        sample=np.zeros(b, np.int32),
    )


def examples(problems: list[Problem], tokenizer: Tokenizer, width: int) -> Rollout:
    """Solved problems as rows whose solution, ended by the stop token, is what to imitate. Longer ones are an error."""
    rows = []
    for problem in problems:
        if problem.solution is None:
            raise UserError(f"the task has no solution to imitate for {problem.prompt!r}")
        prompt, solution = tokenizer.prompt(problem.asked), ended(tokenizer, problem.solution)
        rows.append(fitting([continued(prompt, solution)], width, "an example", problem))
    return lay(rows, width)


def put(batch, source: np.ndarray, begin: np.ndarray, row: np.ndarray, column: np.ndarray, size: np.ndarray, shape):
    """Copies runs of tokens to new rows: `size[i]` columns of row `source[i]` from `begin[i]` on, to `row[i]` from
    `column[i]` on.

    Every array of two or more dimensions is taken to be `[B T ...]`, and becomes one of `shape` = (rows, columns), 0
    where nothing comes to lie. Arrays `[B]` stay what they are.
    """
    step = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)  # 0, 1, ... within each run
    old = np.repeat(source, size), np.repeat(begin, size) + step
    new = np.repeat(row, size), np.repeat(column, size) + step

    def copy(x):
        if np.ndim(x) < 2:
            return x
        out = np.zeros((*shape, *x.shape[2:]), x.dtype)
        out[new] = np.asarray(x)[old]
        return out

    return jax.tree.map(copy, batch)


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
