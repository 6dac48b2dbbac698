"""`path.to.field=VALUE` from the command line, and the check of what an experiment file wrote."""

import json
import re
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin

from rljax.config.annotations import (
    DICTS,
    TUPLES,
    alternatives,
    build,
    conform,
    elements,
    guarded,
    hints,
    join,
    pick,
    settable,
    shown,
    title,
)
from rljax.config.values import SCALARS, decode, resolve
from rljax.errors import UserError, nearest

REFERENCE = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}


@dataclass
class Node:
    """What is assigned at one path and below it."""

    text: str | None = None  # VALUE of an assignment to this very path
    children: dict[str, "Node"] = field(default_factory=dict)


def override(run, assignments: list[str]):
    """A copy of the frozen dataclass `run` with each `path.to.field=VALUE` applied.

    A path steps through dataclass fields, dict keys and tuple indices. VALUE is JSON (`{"$": "module:name", ...}` for
    a dataclass); `module:name` for a function or class, where a frozen dataclass is made with its defaults unless the
    field holds a class; or a bare word where the field takes a str. A later assignment wins over an earlier one to the
    same path or below it, and may step into a value that an earlier one put there. Each dataclass is rebuilt once with
    all of its new values, so a rule that ties two fields sees both.
    Raises UserError, one line naming the path, the value and the expected type or nearest names; what a
    `__post_init__` refuses with a ValueError, it names with the assignments below that dataclass.
    """
    root = Node()
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not (path and equals):
            raise UserError(f"{assignment!r} is not an override: write path.to.field=VALUE")
        node = root
        for step in path.split("."):
            node = node.children.setdefault(step, Node())
        node.text, node.children = text, {}
    return apply(root, run, type(run), "")


def validate(run) -> None:
    """Checks every field of every dataclass in `run` against its annotation; UserError names the first at fault."""
    conform(run, type(run), "")


def apply(node: Node, value, expected, path: str):
    """`value`, of a field annotated `expected`, with the assignments of `node` made."""
    if node.text is not None:
        value = parse(node.text, value, expected, path)
    if not node.children:
        return value
    inner = {step: enter(value, expected, step, path) for step in node.children}
    new = {inner[s][0]: apply(child, *inner[s][1:], join(path, s)) for s, child in node.children.items()}
    if isinstance(value, dict):
        return value | new
    if isinstance(value, tuple | list):
        return type(value)(new.get(i, item) for i, item in enumerate(value))
    return guarded(" ".join(assigned(node, path)), replace, value, **new)


def enter(value, expected, step: str, path: str) -> tuple[Any, Any, Any]:
    """One step of a path into `value`: the key there, what it holds now, and its annotation."""
    where = join(path, step)
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in settable(value)]
        if step not in names:
            raise UserError(f"{where}: {type(value).__name__} has no field {step!r}; {nearest(step, names)}")
        return step, getattr(value, step), hints(type(value))[step]
    if isinstance(value, dict) and value:
        if step not in value:
            raise UserError(f"{where}: {path} has no key {step!r}; {nearest(step, value)}")
        return step, value[step], (get_args(pick(expected, *DICTS)) or (Any, Any))[1]
    if isinstance(value, tuple | list) and value:
        if not (step.isascii() and step.isdigit() and int(step) < len(value)):
            raise UserError(f"{where}: {path} has no index {step!r}; one of 0 to {len(value) - 1}")
        kind = pick(expected, list if isinstance(value, list) else tuple) or pick(expected, *TUPLES)
        return int(step), value[int(step)], elements(kind, value, path)[int(step)]
    raise UserError(f"{where}: {path} is {shown(value)}, which has no fields; set {path} as a whole")


def parse(text: str, current, expected, path: str):
    """VALUE, as written on the command line, for a field annotated `expected` that holds `current`."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if text[:1] in ("{", "[", '"'):
            raise UserError(f"{path}={text}: not JSON: {error.msg} at column {error.colno}") from error
        return parse_word(text, current, expected, path)
    try:
        return conform(decode(data, expected, path), expected, path)
    except UserError as error:
        if pick(expected, str) and type(data) in SCALARS:  # a directory named 2024, say
            raise UserError(f"{error}; as a str, write {path}='\"{text}\"'") from error
        raise


def parse_word(text: str, current, expected, path: str):
    """A VALUE that is no JSON: `module:name` where the field may hold more than scalars, else a bare str."""
    if text in PYTHON_WORDS:
        raise UserError(f"{path}={text}: expected {title(expected)}; {text} is written {PYTHON_WORDS[text]}")
    scalar = all(kind in SCALARS or get_origin(kind) is Literal for kind in alternatives(expected))
    if scalar or not REFERENCE.fullmatch(text):
        try:
            return conform(text, expected, path)
        except UserError as error:
            raise UserError(f"{error}; VALUE is JSON" + ("" if scalar else " or module:name")) from error
    found = resolve(text, path)
    wants_class = isinstance(current, type) or not is_dataclass(current) and pick(expected, type)
    if isinstance(found, type) and is_dataclass(found) and not wants_class:
        found = build(found, {}, path)
    return conform(found, expected, path)


def assigned(node: Node, path: str) -> list[str]:
    """The assignments at and below a node, as they were written."""
    below = [line for step, child in node.children.items() for line in assigned(child, join(path, step))]
    return ([] if node.text is None else [f"{path}={node.text}"]) + below
