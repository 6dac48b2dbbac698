"""Experiment files: Python that defines `RUN`, imported under one fixed name wherever the file lies."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from rljax.config.annotations import frozen, one_line, shown
from rljax.config.values import EXPERIMENT
from rljax.errors import UserError, nearest


def load_experiment(path: str) -> object:
    """The `RUN` that the Python file `path` defines.

    The file becomes the module `experiment`, so that the names its values are written under (`experiment:Reward`)
    resolve; the load that ends last holds the name, and a failed one leaves it to its holder. The file can import what
    lies in its folder while it runs, not later; what it imported stays imported.
    Raises UserError for a missing file, one that is no .py, one that raises (named with the line at fault), and a RUN
    that is missing or no frozen dataclass.
    """
    file = Path(path)
    if not file.exists():
        near = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        rule = nearest(file.name, near) if near else f"{file.parent} holds no experiment"
        raise UserError(f"{path}: no such file; {rule}")
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{path}: an experiment is a Python file, NAME.py")
    module = import_file(file.resolve(), path)
    if not hasattr(module, "RUN"):
        raise UserError(f"{path}: defines no RUN, the frozen dataclass that is the experiment")
    if not frozen(type(module.RUN)):
        raise UserError(f"{path}: RUN is {shown(module.RUN)}, not an instance of a frozen dataclass")
    sys.modules[EXPERIMENT] = module
    return module.RUN


def import_file(file: Path, path: str) -> ModuleType:
    """The module of `file`, which holds the name `experiment` only while it runs; `path` is what the user called it."""
    spec = importlib.util.spec_from_file_location(EXPERIMENT, file)
    module = importlib.util.module_from_spec(spec)
    holder, folder = sys.modules.get(EXPERIMENT), str(file.parent)
    sys.modules[EXPERIMENT] = module
    sys.path.insert(0, folder)
    try:
        # Not spec.loader.exec_module: that would leave a __pycache__ in a run directory, and trust a stale one.
        exec(spec.loader.source_to_code(file.read_bytes(), str(file)), vars(module))
        return module
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{where(error, file, path)}: {kind}{one_line(error)}") from error
    finally:
        if folder in sys.path:  # unless the file itself took it off
            sys.path.remove(folder)
        if holder is None:
            sys.modules.pop(EXPERIMENT, None)
        else:
            sys.modules[EXPERIMENT] = holder


def where(error: Exception, file: Path, path: str) -> str:
    """`path:line` of the deepest frame inside the file, or of the syntax error there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines = [error.lineno]
    return f"{path}:{lines[-1]}" if lines else path
