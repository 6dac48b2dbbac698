"""Problems to reason about, and where they come from."""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import Protocol

import numpy as np

from rljax.data.tokenizer import Turn

HELD_OUT = 0.1  # share of prompts, by hash, that training never sees


@dataclass(frozen=True)
class Problem:
    """A prompt, the answer that verifiers look for, and a worked solution to imitate where there is one."""

    prompt: str
    answer: str
    solution: str | None = None

    @property
    def asked(self) -> tuple[Turn, ...]:
        """The turns that precede the answer."""
        return (("user", self.prompt),)


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
class SpokenAddition:
    """Sums of two numbers from `low` to `high`, asked in English. The solution to imitate is the bare number."""

    low: int = 10
    high: int = 49

    def __post_init__(self):
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low={self.low} high={self.high}: low must be at least 0 and at most high")
        for held_out in (False, True):  # of few sums, the hash may choose none
            if not any(in_split(_asks(a, b), held_out) for a, b in product(range(self.low, self.high + 1), repeat=2)):
                what = "held-out sums" if held_out else "sums to train on"
                raise ValueError(f"low={self.low} high={self.high} leaves no {what}; raise high")

    def batch(self, count: int, seed: int, step: int, held_out: bool = False) -> list[Problem]:
        rng = np.random.default_rng([seed, step, held_out])
        problems = []
        while len(problems) < count:
            a, b = (int(x) for x in rng.integers(self.low, self.high + 1, 2))
            if in_split(_asks(a, b), held_out):
                problems.append(Problem(_asks(a, b), str(a + b), str(a + b)))
        return problems


def _asks(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer with just the number."
