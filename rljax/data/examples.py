"""Examples of what to prefer, to judge and to say, as rows of token ids.

What does not fit in a row is an error; only the steps of a solution are cut, whole steps at a time, for each is judged
by itself. Scores are `[B 0]`: no reward was asked.
"""

from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from jaxtyping import Float

from rljax.data.problems import Problem
from rljax.data.rows import Sequence, continued, fitting, lay, put
from rljax.data.rows import examples as solved
from rljax.data.tokenizer import Tokenizer, Turn, ended
from rljax.errors import UserError, nearest
from rljax.types import LENGTH, STOP, Assessed, Rollout

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Pair(Problem):
    """Two completions of a prompt, the better one named. `steps`, if any, are right ones that precede both."""

    chosen: str
    rejected: str
    margin: float | None = None  # by how much the one is better
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Judged(Problem):
    """A completion, and whether it is desirable."""

    completion: str
    desirable: bool


@dataclass(frozen=True, kw_only=True)
class Solution(Problem):
    """A solution in steps, and how right each step is, 0 to 1."""

    steps: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Conversation(Problem):
    """Turns (role, text) of a conversation, whose assistant is to be imitated."""

    turns: tuple[Turn, ...]

    @property
    def asked(self) -> tuple[Turn, ...]:
        """The turns before the assistant's first."""
        return tuple(takewhile(lambda turn: turn[0] != "assistant", self.turns))


def pairs(problems: list[Pair], tokenizer: Tokenizer, columns: int, separator: str | None = None) -> Assessed:
    """One row a pair: segment 1 is the prompt and the chosen completion, segment 2 the prompt and the rejected one.

    The mask is on the completions, stop tokens included. `target` is the pair's margin on every token of both, 0 for a
    pair without one, or None where no pair has one.

    With a `separator` completions are steps (Step-DPO, arXiv:2406.18629): the prompt goes on with the right
    `steps`, and they and the two that are compared each end with the separator's token rather than a stop token.
    """
    end = None if separator is None else one_token(tokenizer, separator)
    completion = lambda text: ended(tokenizer, text) if end is None else [*tokenizer.encode(text), end]
    rows = []
    for pair in problems:
        prompt = encoded_prompt(pair, tokenizer)
        if pair.steps and separator is None:
            raise UserError(f"a pair has steps, but there is no separator to end each with: {pair.prompt!r}")
        for step in pair.steps:
            prompt = [*prompt, *completion(step)]
        both = [continued(prompt, completion(text)) for text in (pair.chosen, pair.rejected)]
        rows.append(fitting(both, columns, "a pair", pair))
    rollout, target = lay(rows, columns), None
    if any(pair.margin is not None for pair in problems):
        margin = np.array([[pair.margin or 0] for pair in problems], np.float32)
        target = np.where(rollout.tokens.segments > 0, margin, 0)
    return assessed(rollout, target=target)


def labelled(problems: list[Judged], tokenizer: Tokenizer, columns: int) -> Assessed:
    """One completion a row, for KTO: `advantages` are 1 on the tokens of a desirable one and -1 on others'."""
    rows = []
    for judged in problems:
        completion = ended(tokenizer, judged.completion)
        sequence = continued(encoded_prompt(judged, tokenizer), completion)
        rows.append(fitting([sequence], columns, "a completion", judged))
    rollout = lay(rows, columns)
    sign = np.array([[1 if judged.desirable else -1] for judged in problems], np.float32)
    return assessed(rollout, advantages=np.where(rollout.mask, sign, 0))


def mismatched(problems: list[Judged], tokenizer: Tokenizer, columns: int) -> Assessed:
    """The same prompts with completions of others, whose log-ratios estimate KTO's z0 (arXiv:2402.01306).

    Each prompt takes the completion of the next example, the first being next to the last, that has another prompt and
    fits in the row. A prompt for which none does is left out; uids are the numbers of the examples, as in `labelled`.
    UserError where that leaves none.
    """
    prompts = [encoded_prompt(judged, tokenizer) for judged in problems]
    completions = [ended(tokenizer, judged.completion) for judged in problems]
    rows, uid = [], []
    for i, prompt in enumerate(prompts):
        others = ((i + k) % len(problems) for k in range(1, len(problems)))
        fits = lambda j: prompts[j] != prompt and len(prompt) + len(completions[j]) <= columns
        if (other := next(filter(fits, others), None)) is not None:
            rows.append((continued(prompt, completions[other]),))
            uid.append(i)
    if not rows:
        raise UserError(
            f"none of {len(problems)} prompts can take the completion of another in {columns} tokens; "
            "give a step two prompts or more"
        )
    return assessed(lay(rows, columns).replace(uid=np.array(uid, np.int32)))


def steps(problems: list[Solution], tokenizer: Tokenizer, columns: int, separator: str) -> Assessed:
    """A solution a row, for a process reward model: the mask is on the separator that ends each step, `target` its
    label there.

    A row ends with the last separator that fits, and labels of later ones are dropped; `finish` is LENGTH where there
    were any. UserError where not even the first step fits.
    """
    end = one_token(tokenizer, separator)
    rows, finish, labels = [], [], []
    for solution in problems:
        if len(solution.steps) != len(solution.labels):
            sizes = f"{len(solution.steps)} steps and {len(solution.labels)} labels"
            raise UserError(f"a solution has {sizes}; give each step one label: {solution.prompt!r}")
        prompt = encoded_prompt(solution, tokenizer)
        row, kept = Sequence(prompt, [False] * len(prompt)), 0
        for step in solution.steps:
            ids = [*tokenizer.encode(step), end]
            if kept and len(row.ids) + len(ids) > columns:
                break
            row = Sequence(row.ids + ids, row.learned + [False] * (len(ids) - 1) + [True])
            kept += 1
        rows.append(fitting([row], columns, "a first step", solution))
        labels += solution.labels[:kept]
        finish.append(STOP if kept == len(solution.steps) else LENGTH)
    rollout = lay(rows, columns).replace(finish=np.array(finish, np.int32))
    target = np.zeros((len(rows), columns), np.float32)
    target[rollout.mask] = labels  # both row after row
    return assessed(rollout, target=target)


def turns(problems: list[Conversation], tokenizer: Tokenizer, columns: int) -> Assessed:
    """A conversation a row: the mask is on every turn of the assistant, each ended by a stop token, and on no other."""
    rows = []
    for conversation in problems:
        for role, _ in conversation.turns:
            if role not in ROLES:
                raise UserError(f"a turn has role {role!r}: {nearest(role, ROLES)}; prompt {conversation.prompt!r}")
        spans = tokenizer.turns(conversation.turns)
        ids = [i for span in spans for i in span.ids]
        learned = [span.said for span in spans for _ in span.ids]
        if not any(learned) or learned[0]:
            rule = "must have a turn of the assistant, and another with text before it"
            raise UserError(f"a conversation {rule}: {str(conversation.turns)[:60]}")
        rows.append(fitting([Sequence(ids, learned)], columns, "a conversation", conversation))
    return assessed(lay(rows, columns))


def pairs_of(rollout: Rollout, rewards: Float[np.ndarray, "B"], per_prompt: int, seed: int) -> Assessed:
    """Pairs of the sampler's own completions, `[P 2T]` rows laid out like those of `pairs`.

    The chosen ones have the highest reward of their prompt, the rejected ones the lowest; a prompt whose completions
    are equally good gives none, and rows with a NaN reward (none applied) take no part. Of all the pairs of a prompt at
    most `per_prompt` are taken, by (seed, uid), using its completions as evenly as can be (iterative reasoning
    preference optimization, arXiv:2404.19733, section 2). Ids and log-probabilities are the sampler's. `sample` is the
    chosen one's.
    """
    if per_prompt < 1:
        raise ValueError(f"per_prompt={per_prompt} must be at least 1")
    rewards, uids = np.asarray(rewards), np.asarray(rollout.uid)
    chosen, rejected = [], []
    for uid in np.unique(uids[uids >= 0]):
        rows = np.flatnonzero((uids == uid) & ~np.isnan(rewards))
        if not len(rows) or np.ptp(rewards[rows]) == 0:
            continue
        rng = np.random.default_rng([seed, uid])
        best, worst = (rng.permutation(rows[rewards[rows] == f(rewards[rows])]) for f in (np.max, np.min))
        period = np.lcm(len(best), len(worst))
        for i in range(min(per_prompt, len(best) * len(worst))):
            chosen.append(best[i % len(best)])
            rejected.append(worst[(i + i // period) % len(worst)])  # every pair of the two once
    chosen, rejected = np.array(chosen, np.int64), np.array(rejected, np.int64)
    p, t = len(chosen), rollout.mask.shape[1]
    length = np.asarray(rollout.length)
    long, row = length[chosen], np.arange(p)
    joined = put(
        rollout, np.append(chosen, rejected), np.zeros(2 * p, np.int64), np.append(row, row),
        np.append(np.zeros_like(long), long), np.append(long, length[rejected]), (p, 2 * t),
    )  # fmt: skip
    second = np.arange(2 * t)[None] >= long[:, None]
    segments = np.where((joined.tokens.segments > 0) & second, 2, joined.tokens.segments)
    of = {name: np.asarray(getattr(rollout, name))[chosen] for name in ("finish", "uid", "sample")}
    return assessed(
        joined.replace(
            tokens=joined.tokens.replace(segments=segments), length=long + length[rejected],
            prompt_length=np.zeros_like(long), **of,
        )
    )  # fmt: skip


def assessed(rollout: Rollout, **found) -> Assessed:
    return Assessed(rollout, np.zeros((len(rollout.uid), 0), np.float32), **found)


def encoded_prompt(problem: Problem, tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt; UserError where there is none, for then nothing precedes the first token to learn."""
    if not (ids := tokenizer.prompt(problem.asked)):
        raise UserError(f"an example has an empty prompt: {str(problem)[:60]}")
    return ids


def one_token(tokenizer: Tokenizer, separator: str) -> int:
    """The id of the separator; UserError where it is not one."""
    if len(ids := tokenizer.encode(separator)) != 1:
        raise UserError(f"separator={separator!r} is {len(ids)} tokens, but must be one: {ids}")
    return ids[0]


def rows_of(problems: list[Problem], tokenizer: Tokenizer, columns: int, separator: str | None = None) -> Assessed:
    """Rows to train on, of what kind the problems are; a pair has the room of two sequences."""
    kind = type(problems[0])
    if kind is Pair:
        return pairs(problems, tokenizer, 2 * columns, separator)
    if kind is Solution and separator is None:
        raise UserError("a solution in steps needs a separator to end each with: set separator")
    encode = {
        Judged: lambda: labelled(problems, tokenizer, columns),
        Solution: lambda: steps(problems, tokenizer, columns, separator),
        Conversation: lambda: turns(problems, tokenizer, columns),
    }
    return encode.get(kind, lambda: assessed(solved(problems, tokenizer, columns)))()
