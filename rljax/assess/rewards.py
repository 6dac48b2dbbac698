"""Rewards: verifiers on the host. A reward is (problem, completion) -> float, or None where it does not apply."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from rljax.data.problems import Problem
from rljax.errors import UserError

# Digits, grouped by commas or not, with a fraction or not; a sign, unless it may be a minus between two terms.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Completion:
    """What a reward may look at."""

    text: str
    ids: tuple[int, ...]  # the stop token included
    stopped: bool  # ended by itself, rather than by max_new_tokens


@dataclass(frozen=True)
class ExactMatch:
    """1 if the text after the last `after` is the answer and the completion ended by itself, else 0."""

    after: str = ""

    def __call__(self, problem: Problem, completion: Completion) -> float:
        _, found, said = completion.text.rpartition(self.after) if self.after else ("", True, completion.text)
        return float(bool(found) and completion.stopped and said.strip() == problem.answer)


@dataclass(frozen=True)
class LastNumber:
    """1 if the last number of the text equals that of the answer and the completion ended by itself, else 0.

    "44 + 35 = 79.", "**79**" and "79.0" all say 79. What was cut short may have lost a digit, so it earns nothing,
    unless `cut` is set.
    """

    cut: bool = False

    def __call__(self, problem: Problem, completion: Completion) -> float:
        if (right := last_number(problem.answer)) is None:
            raise ValueError(f"the answer {problem.answer!r} holds no number")
        return float((completion.stopped or self.cut) and last_number(completion.text) == right)


def last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True)
class Overlong:
    """Soft punishment of long completions (DAPO, arXiv:2503.14476, equation 13), all of their tokens counted.

    0 up to `limit - cache` tokens, then falling by a straight line to -factor at `limit`, and no further.
    """

    limit: int
    cache: int
    factor: float = 1.0

    def __post_init__(self):
        if not 0 < self.cache <= self.limit:
            raise ValueError(f"cache={self.cache} must be above 0 and at most limit={self.limit}")
        if self.factor <= 0:
            raise ValueError(f"factor={self.factor} must be above 0: the penalty is its negative")

    def __call__(self, problem: Problem, completion: Completion) -> float:
        left = (self.limit - self.cache - len(completion.ids)) / self.cache  # below 0 within the cache
        return self.factor * max(min(left, 0.0), -1.0)


def score(rewards: Sequence[Callable], problems: Sequence[Problem], completions: Sequence[Completion]) -> np.ndarray:
    """float32 [B R]: every reward of every row; NaN where a reward returned None, which is not 0.

    An exception inside a reward, or a value that is no number, is a UserError that names it and the sample.
    """
    scores = np.full((len(completions), len(rewards)), np.nan, np.float32)
    for b, (problem, completion) in enumerate(zip(problems, completions, strict=True)):
        for r, reward in enumerate(rewards):
            try:
                value = reward(problem, completion)
                scores[b, r] = np.nan if value is None else float(value)
            except Exception as error:
                name = getattr(reward, "__name__", type(reward).__name__)
                raise UserError(
                    f"rewards.{r} ({name}) raised {type(error).__name__}: {error}; on prompt {problem.prompt!r}, "
                    f"completion {completion.text!r}"
                ) from error
            if value is not None and not np.isfinite(scores[b, r]):
                name = getattr(reward, "__name__", type(reward).__name__)
                raise UserError(f"rewards.{r} ({name}) returned {value!r} on prompt {problem.prompt!r}; return None, "
                                "not NaN, where it does not apply")  # fmt: skip
    return scores


def total(scores: np.ndarray) -> np.ndarray:
    """[B]: the sum of the rewards that apply; NaN for a row to which none does."""
    return np.where(np.all(np.isnan(scores), 1), np.nan, np.nansum(scores, 1))
