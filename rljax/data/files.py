"""Tasks from files: problems, pairs, judged completions or steps, and conversations, in JSON Lines or Parquet.

A file is read and checked whole when it is first used, and then kept. `.parquet` files need the extra `parquet`; any
other is one JSON object a line. Every field's name can be set. What is wrong is a UserError that names the line (of
Parquet, the row, from 1 on), the field, and what is there.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rljax.data.examples import ROLES, Conversation, Judged, Pair, Solution
from rljax.data.problems import Problem, in_split
from rljax.errors import UserError, nearest


class Record(NamedTuple):
    """One object of a file, and the task whose settings say what its fields are called."""

    task: "Examples"
    where: str
    fields: dict

    def get(self, setting: str, fits: Callable, what: str):
        """The field that `task.setting` names; a UserError where it is absent or does not fit."""
        name = getattr(self.task, setting)
        if name not in self.fields:
            known = ", ".join(map(repr, self.fields)) or "nothing"
            raise UserError(f"{self.where}: lacks {name!r} and has {known}; set task.{setting} to the field's name")
        if not fits(value := self.fields[name]):
            raise UserError(f"{self.where}: {name!r} must be {what}, not {json.dumps(value, default=str)[:60]}")
        return value

    def prompt(self) -> str:
        return self.get("prompt", lambda x: isinstance(x, str) and x, "text that is not empty")

    def text(self, setting: str) -> str:
        return self.get(setting, lambda x: isinstance(x, str), "text")

    def answer(self) -> str:
        """What verifiers look for in held-out problems; nothing where the file does not say."""
        value = self.fields.get(self.task.answer)
        return "" if value is None else str(value)


@dataclass(frozen=True)
class Examples:
    """What the tasks below share; each adds `record`, which makes an example of a record.

    Each epoch has every example once, permuted by (seed, epoch). Held-out examples are those of `held_out_path`, or
    without it the share that the prompt's hash selects.
    """

    path: str
    prompt: str = "prompt"
    answer: str = field(default="answer", kw_only=True)
    held_out_path: str | None = field(default=None, kw_only=True)

    def batch(self, count: int, seed: int, step: int, held_out: bool = False) -> list[Problem]:
        found = self.read(held_out)
        if held_out:  # each at most once, however few there are
            return found[:count]
        wanted, size = range((step - 1) * count, step * count), len(found)
        order = {epoch: np.random.default_rng([seed, epoch]).permutation(size) for epoch in {i // size for i in wanted}}
        return [found[order[i // size][i % size]] for i in wanted]

    def read(self, held_out: bool) -> list[Problem]:
        apart = self.held_out_path is not None
        found = _read(self, self.held_out_path if held_out and apart else self.path)
        found = [example for example in found if apart or in_split(example.prompt, held_out)]
        if not found:
            which = "held-out examples" if held_out else "examples to train on"
            raise UserError(f"task.path={self.path!r} holds no {which}; give it more, or set task.held_out_path")
        return found


@dataclass(frozen=True)
class Problems(Examples):
    """Problems, with the answer that verifiers look for; a `solution` to imitate may be absent."""

    solution: str = "solution"

    def record(self, r: Record) -> Problem:
        answer = r.get("answer", lambda x: isinstance(x, str | int | float), "text or a number")
        return Problem(r.prompt(), str(answer), r.fields.get(self.solution))


@dataclass(frozen=True)
class Pairs(Examples):
    """A better and a worse completion of a prompt; where named, by what `margin`, and after which right `steps`."""

    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None
    steps: str | None = None

    def record(self, r: Record) -> Pair:
        fits = lambda x: x is None or number(x)
        margin = None if self.margin is None else r.get("margin", fits, "a number or null")
        return Pair(
            r.prompt(),
            r.answer(),
            chosen=r.text("chosen"),
            rejected=r.text("rejected"),
            margin=margin,
            steps=() if self.steps is None else tuple(r.get("steps", texts, "a list of texts")),
        )


@dataclass(frozen=True)
class Labelled(Examples):
    """A completion and whether it is desirable: true or false, 1 or 0."""

    completion: str = "completion"
    label: str = "label"

    def record(self, r: Record) -> Judged:
        label = r.get("label", lambda x: isinstance(x, bool) or number(x) and x in (0, 1), "true or false")
        return Judged(r.prompt(), r.answer(), completion=r.text("completion"), desirable=bool(label))


@dataclass(frozen=True)
class Steps(Examples):
    """The steps of a solution, each with a label: true or false, or how right it is from 0 to 1."""

    steps: str = "steps"
    labels: str = "labels"

    def record(self, r: Record) -> Solution:
        steps = r.get("steps", lambda x: texts(x) and x, "a list of texts that is not empty")
        share = lambda x: isinstance(x, bool) or number(x) and 0 <= x <= 1
        fits = lambda x: isinstance(x, list) and len(x) == len(steps) and all(map(share, x))
        labels = r.get("labels", fits, f"a list of {len(steps)} labels, one a step, each true, false or within [0, 1]")
        return Solution(r.prompt(), r.answer(), steps=tuple(steps), labels=tuple(map(float, labels)))


@dataclass(frozen=True)
class Supervised(Examples):
    """Conversations to imitate the assistant of: a prompt and its completion, or, where `messages` names the field, a
    list of {"role", "content"}. The prompt of such a list is what precedes the assistant's first turn.
    """

    completion: str = "completion"
    messages: str | None = None

    def record(self, r: Record) -> Conversation:
        if self.messages is None:
            prompt, completion = r.prompt(), r.text("completion")
            return Conversation(prompt, r.answer(), completion, turns=(("user", prompt), ("assistant", completion)))
        turn = lambda x: isinstance(x, dict) and texts([x.get("role"), x.get("content")])
        fits = lambda x: isinstance(x, list) and all(map(turn, x))
        turns = [(m["role"], m["content"]) for m in r.get("messages", fits, 'a list of {"role", "content"} of text')]
        for role, _ in turns:
            if role not in ROLES:
                raise UserError(f"{r.where}: a message has role {role!r}; {nearest(role, ROLES)}")
        first = next((i for i, (role, _) in enumerate(turns) if role == "assistant"), 0)
        prompt = "".join(text for _, text in turns[:first])
        if not prompt:
            rule = "must have a turn of the assistant, and text before it"
            raise UserError(f"{r.where}: {self.messages!r} {rule}")
        return Conversation(prompt, r.answer(), turns=tuple(turns))


def number(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def texts(x) -> bool:
    return isinstance(x, list) and all(isinstance(text, str) for text in x)


@lru_cache  # a run reads its file once
def _read(task: Examples, path: str) -> tuple[Problem, ...]:
    rows = parquet(path) if path.endswith(".parquet") else json_lines(path)
    return tuple(task.record(Record(task, where, fields)) for where, fields in rows)


def json_lines(path: str) -> Iterator[tuple[str, dict]]:
    """Place and content of each line that is not blank."""
    try:
        lines = Path(path).read_text("utf-8").split("\n")  # JSON strings may hold what splitlines takes for an end
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.path={path!r} cannot be read: {getattr(error, 'strerror', error)}") from None
    for count, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}:{count}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: {line.strip()[:60]!r} is not JSON ({error})") from None
            if not isinstance(fields, dict):
                raise UserError(f"{where}: {line.strip()[:60]!r} is not a JSON object")
            yield where, fields


def parquet(path: str) -> Iterator[tuple[str, dict]]:
    """Place and content of each row."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise UserError(f"task.path={path!r} needs pyarrow: pip install 'rljax[parquet]'") from None
    try:
        with open(path, "rb") as file:
            rows = read_table(file).to_pylist()
    except (OSError, ArrowException) as error:
        reason = str(getattr(error, "strerror", None) or error).split("\n")[0]
        raise UserError(f"task.path={path!r} cannot be read: {reason}") from None
    for count, fields in enumerate(rows, 1):
        yield f"{path}:{count}", fields
