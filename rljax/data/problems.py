"""Problems to reason about, and where they come from."""

import json
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np

from rljax.errors import UserError

HELD_OUT = 0.1  # share of prompts, by hash, that training never sees


@dataclass(frozen=True)
class Problem:
    """A prompt, the answer that verifiers look for, and a worked solution to imitate where there is one."""

    prompt: str
    answer: str
    solution: str | None = None


class Task(Protocol):
    """A source of problems."""

    def batch(self, count: int, seed: int, step: int, held_out: bool = False) -> list[Problem]:
        """`count` problems for a step, from 1 on: a function of the arguments, so that a resumed run goes on."""


def in_split(prompt: str, held_out: bool) -> bool:
    """Whether a prompt is (not) of the held-out share: by its hash, so the two sets are disjoint under any order."""
    hashed = int.from_bytes(blake2b(prompt.encode(), digest_size=4).digest(), "big")
    return (hashed < HELD_OUT * 2**32) == held_out


@dataclass(frozen=True)
class Addition:
    """Sums of two `digits`-digit numbers. The answer follows `#`; a share of `think` solutions works column by column.

    "347+586=" is answered "#0933" at once, or after "7+6+0=13;4+8+1=13;3+5+1=09", where each term is digit + digit +
    carry from the lowest column on.
    """

    digits: int = 3
    think: float = 0.5

    def __post_init__(self):
        if self.digits < 1:
            raise ValueError(f"digits={self.digits} must be at least 1")
        if not 0 <= self.think <= 1:
            raise ValueError(f"think={self.think} is a share and must be in [0, 1]")

    def batch(self, count: int, seed: int, step: int, held_out: bool = False) -> list[Problem]:
        rng = np.random.default_rng([seed, step, held_out])
        problems = []
        while len(problems) < count:
            a, b = (int(x) for x in rng.integers(10 ** (self.digits - 1), 10**self.digits, 2))
            thinks = rng.random() < self.think
            if in_split(f"{a}+{b}=", held_out):
                problems.append(self.problem(a, b, thinks))
        return problems

    def problem(self, a: int, b: int, thinks: bool) -> Problem:
        columns, carry, x, y = [], 0, a, b
        for _ in range(self.digits):
            total = x % 10 + y % 10 + carry
            columns.append(f"{x % 10}+{y % 10}+{carry}={total:02d}")
            x, y, carry = x // 10, y // 10, total // 10
        answer = f"{a + b:0{self.digits + 1}d}"
        return Problem(f"{a}+{b}=", answer, (";".join(columns) if thinks else "") + "#" + answer)


@dataclass(frozen=True)
class JsonLines:
    """Problems from a file, one JSON object a line with the named fields; `solution` may be absent.

    Each epoch is a new permutation by (seed, epoch). Held-out problems are those of `held_out_path`, or without it the
    share that the prompt's hash selects.
    """

    path: str
    prompt: str = "prompt"
    answer: str = "answer"
    solution: str = "solution"
    held_out_path: str | None = None

    def batch(self, count: int, seed: int, step: int, held_out: bool = False) -> list[Problem]:
        problems = self.read(held_out)
        if held_out:  # each held-out problem at most once, however few there are
            return problems[:count]
        wanted, size = range((step - 1) * count, step * count), len(problems)
        order = {epoch: np.random.default_rng([seed, epoch]).permutation(size) for epoch in {i // size for i in wanted}}
        return [problems[order[i // size][i % size]] for i in wanted]

    def read(self, held_out: bool) -> list[Problem]:
        apart = self.held_out_path is not None
        path = self.held_out_path if held_out and apart else self.path
        found = _read(path, self.prompt, self.answer, self.solution)
        found = [p for p in found if apart or in_split(p.prompt, held_out)]
        if not found:
            which = "held-out problems" if held_out else "problems to train on"
            raise UserError(f"task.path={path!r} holds no {which}; give it more lines, or set task.held_out_path")
        return found


@lru_cache  # a run reads its file once
def _read(path: str, prompt: str, answer: str, solution: str) -> tuple[Problem, ...]:
    try:
        lines = Path(path).read_text("utf-8").split("\n")  # JSON strings may hold what splitlines takes for an end
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.path={path!r} cannot be read: {getattr(error, 'strerror', error)}") from None
    problems = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                problems.append(Problem(str(row[prompt]), str(row[answer]), row.get(solution)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                need = f"a JSON object with {prompt!r} and {answer!r}"
                raise UserError(f"{path}:{number}: {line.strip()[:60]!r} is not {need} ({error!r})") from None
    return tuple(problems)
