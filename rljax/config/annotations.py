"""What a field's annotation accepts: the one type check behind experiment files, overrides and JSON alike."""

import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from operator import is_
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rljax.errors import UserError

TUPLES = (tuple, Sequence, Collection, Iterable)
DICTS = (dict, Mapping)


def conform(value, expected, path: str):
    """`value` as a field annotated `expected` holds it: an int becomes a float where only a float will do.

    Dataclasses, tuples, lists and dicts are checked to the bottom, and rebuilt only around what became a float.
    Raises UserError naming the innermost path at fault, what is there, and what is expected.
    """
    error = None
    # The exact type first: 3 stays an int in `float | int`.
    for kind in sorted(alternatives(expected), key=lambda kind: kind is not type(value)):
        if matches(value, kind):
            try:
                return within(value, kind, path)
            except UserError as deeper:
                error = deeper
    raise error or UserError(f"{path or 'value'}: expected {title(expected)}, got {shown(value)}")


def matches(value, kind) -> bool:
    """Whether the outermost type of `value` is `kind`, one alternative of an annotation; `within` checks the rest."""
    outer = get_origin(kind) or kind
    if outer in (Any, object) or isinstance(outer, TypeVar):
        return True
    if outer is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if isinstance(value, bool | str):  # a bool is no number, and a str is no sequence of str
        return outer is type(value)
    if outer is float:
        return isinstance(value, int | float)
    if outer is Callable:
        return callable(value)
    try:
        bounds = get_args(kind) if outer is type else ()
        return isinstance(value, outer) and all(issubclass(value, b) for b in bounds if isinstance(b, type))
    except TypeError:  # a protocol that is not runtime-checkable, or a form of typing that has no instances
        return callable(value) or "__call__" not in getattr(outer, "__dict__", ())


def within(value, kind, path: str):
    """`value`, whose outermost type is right, with what it contains made to conform."""
    if is_dataclass(value) and not isinstance(value, type):
        known = hints(type(value))
        old = {f.name: getattr(value, f.name) for f in settable(value)}
        new = {name: conform(item, known[name], join(path, name)) for name, item in old.items()}
        changed = {name: item for name, item in new.items() if item is not old[name]}
        return guarded(path, replace, value, **changed) if changed else value
    if type(value) in (tuple, list):
        inner = elements(kind, value, path)
        new = [conform(x, k, join(path, i)) for i, (x, k) in enumerate(zip(value, inner, strict=True))]
        return value if all(map(is_, new, value)) else type(value)(new)
    if type(value) is dict:
        key, inner = get_args(pick(kind, *DICTS)) or (Any, Any)
        new = {conform(k, key, f"{path}, a key"): conform(x, inner, join(path, k)) for k, x in value.items()}
        return value if all(map(is_, new.values(), value.values())) else new
    return float(value) if kind is float else value


def alternatives(expected) -> tuple:
    """The members of a union, or the annotation alone; NewType and `type X = ...` stand for what they name."""
    if (named := getattr(expected, "__supertype__", getattr(expected, "__value__", None))) is not None:
        return alternatives(named)
    if get_origin(expected) in (Union, types.UnionType):
        return tuple(kind for member in get_args(expected) for kind in alternatives(member))
    return (types.NoneType if expected is None else expected,)


def pick(expected, *outers):
    """The first alternative of `expected` whose outermost type is among `outers`, or None."""
    return next((kind for kind in alternatives(expected) if (get_origin(kind) or kind) in outers), None)


def elements(kind, value: Sequence, path: str) -> list:
    """The annotation of each element of `value` in a field annotated `kind`; UserError where their number is wrong."""
    args = get_args(kind) or (Any, ...)
    if get_origin(kind) is not tuple or args[-1] is ...:
        return [args[0]] * len(value)
    if len(args) != len(value):
        raise UserError(f"{path}: expected {title(kind)}, {len(args)} elements, got {shown(value)}, {len(value)}")
    return list(args)


def hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of a dataclass; UserError where one names what does not exist."""
    try:
        return get_type_hints(cls)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise UserError(f"{cls.__module__}:{cls.__qualname__}: an annotation cannot be resolved: {error}") from error


def settable(instance_or_class) -> list[Field]:
    """The fields one gives to a dataclass; those it computes (`init=False`) are neither written nor overridden."""
    return [f for f in fields(instance_or_class) if f.init]


def frozen(cls: type) -> bool:
    return is_dataclass(cls) and cls.__dataclass_params__.frozen


def build(cls: type, values: dict[str, Any], path: str):
    """A frozen dataclass from checked values; UserError where it is none, lacks a value, or refuses the values."""
    name = f"{cls.__module__}:{cls.__qualname__}" if isinstance(cls, type) else shown(cls)
    if not (isinstance(cls, type) and frozen(cls)):
        raise UserError(f"{path or 'value'}: {name} is not a frozen dataclass")
    needed = [f.name for f in settable(cls) if f.default is MISSING and f.default_factory is MISSING]
    if absent := [f for f in needed if f not in values]:
        raise UserError(f'{path or "value"}: {name} needs {", ".join(absent)}: {{"$": "{name}", "{absent[0]}": ...}}')
    return guarded(path, cls, **values)


def guarded(where: str, make: Callable, *args, **values):
    """`make(...)`, where what a `__post_init__` says against its values becomes the user's error at `where`."""
    try:
        return make(*args, **values)
    except (ValueError, UserError) as error:
        raise UserError(f"{where or 'value'}: {one_line(error)}") from error


def join(path: str, step) -> str:
    return f"{path}.{step}" if path else str(step)


def one_line(text) -> str:
    return " ".join(str(text).split())


def shown(value) -> str:
    """A value as an error shows it: on one line, not long, functions and classes by name."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    text = one_line(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def title(expected) -> str:
    """An annotation as its author would write it, names for unions and other types spelled out."""
    names = [
        "None"
        if kind is types.NoneType
        else kind.__name__
        if isinstance(kind, type) and not get_args(kind)
        else str(kind).replace("typing.", "").replace("collections.abc.", "")
        for kind in alternatives(expected)
    ]
    return " | ".join(names)
