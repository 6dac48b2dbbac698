"""What the benchmarks' commands share: an experiment with changed fields, one-line errors, a table or JSON.

Import it before rljax: a checkout works without being installed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if find_spec("rljax") is None:
    sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from rljax.config import load_experiment, override, validate  # noqa: E402
from rljax.errors import Interrupted, RunFailed, UserError  # noqa: E402

WIDTH = 120  # of tables that go to no terminal


class Parser(argparse.ArgumentParser):
    """Takes [EXPERIMENT] [FIELD=VALUE ...] and --json besides a benchmark's own options. The docstring is its help."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
        self.add_argument("words", nargs="*", metavar="EXPERIMENT, FIELD=VALUE", help="a run, and its changed fields")
        self.add_argument("--json", action="store_true", help="print JSON")

    def error(self, message: str):
        self.exit(2, f"{Path(sys.argv[0]).name}: {' '.join(message.split())}\n")

    def read(self, *fields: str) -> argparse.Namespace:
        """The arguments; and `run` of the file `experiment`, changed by `overrides` and the options named `fields`."""
        args = self.parse_intermixed_args()
        words = [*args.words, *(word for word in getattr(args, "meshes", ()) if "=" in word)]
        if hasattr(args, "meshes"):  # --meshes A B steps=2: its list runs on
            args.meshes = [word for word in args.meshes if "=" not in word]
        files = [word for word in words if "=" not in word]
        if len(files) > 1:
            raise UserError(f"{' '.join(files)}: one experiment at a time")
        args.experiment = Path(files[0]) if files else ROOT / "experiments" / "quickstart.py"
        args.overrides = [word for word in words if "=" in word]
        stated = [f"{field}={value}" for field in fields if (value := getattr(args, field)) is not None]
        args.run = override(load_experiment(str(args.experiment)), args.overrides + stated)
        validate(args.run)
        args.run.check()
        return args


def count(text: str) -> int:
    """An argument that is a whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def measure_compiles() -> None:
    """Has everything compiled anew: called before JAX is configured."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = ""


def table(*columns: str) -> Table:
    """A table whose first column is words and the others numbers."""
    made = Table()
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    return made


def show(report: dict, tables: list[Table | str], as_json: bool) -> None:
    """The report, to people or to programs."""
    if as_json:
        print(json.dumps(report))
        return
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    for each in tables:
        console.print(each, highlight=False)


def main(body: Callable[[], int | None]) -> int:
    """The exit status: 2 with one line for a mistake of the user's, 1 for a failed check."""
    try:
        return body() or 0
    except (UserError, OSError) as error:
        failure, code = error, 2
    except RunFailed as error:
        failure, code = error, 1
    except Interrupted as error:
        failure, code = error, error.code
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(failure).split())}", file=sys.stderr)
    return code


def size(n: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
