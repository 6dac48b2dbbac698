"""Values to JSON and back: what a run was made of, written so that it can be made again.

- a frozen dataclass is `{"$": "module:name", field: value, ...}`;
- a function or class is `{"@": "module:name"}`, so that a class and an instance without fields differ;
- a tuple or list is a list, a dict with str keys an object; str, int, float (NaN and infinities too), bool, None are
  themselves.
"""

import importlib
import pkgutil
import sys
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin

from rljax.config.annotations import (
    DICTS,
    TUPLES,
    build,
    conform,
    elements,
    frozen,
    hints,
    join,
    one_line,
    pick,
    settable,
    shown,
)
from rljax.errors import UserError, nearest

EXPERIMENT = "experiment"  # the module name of whichever experiment file is loaded
SCALARS = (str, int, float, bool, type(None))


def to_json(value) -> object:
    """`value` as JSON, in the form this module describes.

    Raises UserError, naming the path and the remedy, for what could not be made again from its JSON: a lambda, a
    partial, a local function or class, a method, a dataclass that is not frozen, an array, a subclass of a scalar.
    """
    return encode(value, "")


def from_json(data) -> object:
    """The value that `to_json` wrote: `from_json(to_json(x)) == x`.

    A list becomes a tuple, or a list where only that suits the field's annotation; absent fields take their defaults.
    Raises UserError, naming the path and the nearest choice, for an unknown module, name or field, a value of the
    wrong type, and a class that is no frozen dataclass. An `experiment:` name needs its file loaded first.
    """
    return decode(data, Any, "")


def encode(value, path: str) -> object:
    if type(value) in SCALARS:  # not isinstance: an IntEnum or a numpy float would come back as something else
        return value
    if type(value) in (tuple, list):
        return [encode(item, join(path, i)) for i, item in enumerate(value)]
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key in ("$", "@"):
                raise UserError(f"{path or 'value'}: {key!r} cannot be a key: use a str other than '$' and '@'")
        return {key: encode(item, join(path, key)) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and frozen(type(value)):
        content = {f.name: encode(getattr(value, f.name), join(path, f.name)) for f in settable(value)}
        return {"$": reference(type(value), path), **content}
    return {"@": reference(value, path)}


def reference(value, path: str) -> str:
    """The `module:name` under which `value` itself is found, which is neither a copy nor a wrapper of it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    try:
        if module and name and resolve(f"{module}:{name}", path) is value:
            return f"{module}:{name}"
    except UserError:
        pass  # a local name, or one whose module is gone
    remedy = "use a module-level function, or a frozen dataclass where there are settings"
    raise UserError(f"{path or 'value'}: {shown(value)} ({type(value).__name__}) cannot be written down: {remedy}")


def resolve(name: str, path: str):
    """What `module:name` names; UserError with the nearest names where there is no such thing."""
    module_name, colon, attributes = name.partition(":")
    if not (module_name and colon and attributes):
        raise UserError(f"{path or 'value'}: {name!r} is not of the form module:name")
    found = load_module(module_name, path)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            known = {k: v for k, v in getattr(found, "__dict__", {}).items() if callable(v) and not k.startswith("_")}
            own = [k for k, v in known.items() if str(getattr(v, "__module__", "")).startswith(module_name)]
            rule = f"; {nearest(attribute, own)}" if own else ""  # not what the module itself imports
            raise UserError(f"{path or 'value'}: {module_name} has no {attributes!r}{rule}")
        found = getattr(found, attribute)
    return found


def load_module(name: str, path: str):
    """The module `name`, imported; UserError where there is none, or where it fails."""
    if name == EXPERIMENT and name not in sys.modules:  # never whatever experiment.py the working directory may hold
        raise UserError(f"{path or 'value'}: no module {name!r}: load the experiment file first")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise UserError(f"{path or 'value'}: {name} cannot be imported: {one_line(error)}") from error
        parent, _, last = error.name.rpartition(".")
        inside = [m.name for m in pkgutil.iter_modules(getattr(sys.modules.get(parent), "__path__", []))]
        if parent:
            rule = nearest(last, inside) if inside else f"{parent} is not a package"
        else:
            rule = nearest(last, [EXPERIMENT, "rljax"]) + ", or any installed module"
        raise UserError(f"{path or 'value'}: no module {error.name!r}; {rule}") from error
    except Exception as error:
        message = f"{name} cannot be imported: {type(error).__name__}: {one_line(error)}"
        raise UserError(f"{path or 'value'}: {message}") from error


def decode(data, expected, path: str):
    """The value written as `data` in a field annotated `expected`, which decides between tuple and list."""
    if isinstance(data, list):
        kind = pick(expected, *TUPLES) or pick(expected, list) or tuple
        inner = elements(kind, data, path)
        make = list if (get_origin(kind) or kind) is list else tuple
        return make(decode(x, k, join(path, i)) for i, (x, k) in enumerate(zip(data, inner, strict=True)))
    if not isinstance(data, dict):
        return data
    if "$" in data:
        return decode_dataclass(data, path)
    if "@" in data:
        if len(data) > 1 or not isinstance(data["@"], str):
            raise UserError(f'{path or "value"}: expected {{"@": "module:name"}} alone, got {shown(data)}')
        return resolve(data["@"], path)
    kind = get_args(pick(expected, *DICTS))[1:] or (Any,)
    return {key: decode(item, kind[0], join(path, key)) for key, item in data.items()}


def decode_dataclass(data: dict, path: str):
    if not isinstance(data["$"], str):
        raise UserError(f'{path or "value"}: expected {{"$": "module:name", ...}}, got {shown(data)}')
    cls = resolve(data["$"], path)
    if not (isinstance(cls, type) and frozen(cls)):
        return build(cls, {}, path)  # which says so
    known, names = hints(cls), [f.name for f in settable(cls)]
    values = {}
    for name, item in data.items():
        if name == "$":
            continue
        where = join(path, name)
        if name not in names:
            raise UserError(f"{where}: {data['$']} has no field {name!r}; {nearest(name, names)}")
        values[name] = conform(decode(item, known[name], where), known[name], where)  # before __post_init__ sees it
    return build(cls, values, path)
