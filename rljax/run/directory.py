"""The run directory: who may write it, and what it says about how it came to be."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

from rljax import __version__
from rljax.config import from_json, load_experiment, to_json
from rljax.errors import UserError, nearest
from rljax.mesh.file import MeshFile, load, parse
from rljax.run.run import Run

MAY_CHANGE = {"steps", "evaluation", "checkpoints", "samples", "trackers", "mesh", "chunk"}  # when a run is resumed


@contextmanager
def claim(path: Path, resume: bool) -> Iterator[Path]:
    """Holds a run directory for this process, created where it is missing. The kernel drops the lock with the process.

    UserError if it cannot be written, is in use, is not empty without `resume`, or holds no run to resume. What fails
    before its first step leaves nothing behind.
    """
    new = not path.exists()
    if resume and not (path / "config.json").is_file():
        raise UserError(f"--run-dir {path} holds no run to resume; leave out --resume to start one there")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "a+")
    except OSError as error:
        raise UserError(f"--run-dir {path} cannot be written: {error.strerror}; choose another") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise UserError(f"--run-dir {path} is in use by process {lock.read().strip()}; choose another") from None
        if not resume and any(entry.name != ".lock" for entry in path.iterdir()):
            raise UserError(f"--run-dir {path} is not empty; continue its run with --resume, or choose another")
        try:
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield path
        except BaseException:
            if not resume and not _stepped(path) and _same(path / ".lock", lock):
                _remove(path, new)
            raise


def _same(path: Path, file) -> bool:
    """Whether an open file still has its name: a directory removed and made anew is another process's."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _stepped(path: Path) -> bool:
    """Whether a step of the run has been logged: it is then worth keeping, and can be resumed."""
    log = path / "metrics.jsonl"
    return log.is_file() and log.stat().st_size > 0


def _remove(path: Path, new: bool) -> None:
    """Deletes a run directory, or what is in one that was there, empty, before the run."""
    for entry in [path] if new else list(path.iterdir()):
        shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


def write_json(path: Path, data) -> None:
    """Replaces a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def describe(where: Path, run: Run, mesh: MeshFile, mesh_text: str, experiment: Path) -> dict:
    """Writes config.json and the copy of the experiment, from which commands on the run rebuild it."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    config = {
        "name": experiment.stem,
        "run_id": uuid4().hex,
        "run": to_json(run),
        "mesh": {"path": mesh.path, "text": mesh_text},
        "versions": {"rljax": __version__, "python": platform.python_version()} | {p: version(p) for p in packages},
        "git": _git(),
    }
    shutil.copyfile(experiment, where / "experiment.py")
    write_json(where / "config.json", config)
    return config


def recall(where: Path) -> tuple[dict, Run, MeshFile]:
    """What `describe` wrote, rebuilt."""
    try:
        config = json.loads((where / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{where} is not a run directory: its config.json cannot be read ({error})") from None
    load_experiment(str(where / "experiment.py"))
    return config, from_json(config["run"]), parse(config["mesh"]["text"], config["mesh"]["path"])


def same_run(where: Path, run: Run) -> dict:
    """The config of a run to resume. UserError if `run` differs from it in what a resumed run must keep."""
    config = json.loads((where / "config.json").read_text())
    changed = [name for name in _differences(config["run"], to_json(run)) if name.split(".")[0] not in MAY_CHANGE]
    if changed:
        may = ", ".join(sorted(MAY_CHANGE))
        raise UserError(
            f"--resume {where}: {changed[0]} differs from what the run was started with; only {may} may change"
        )
    return config


def _differences(old, new, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for key in keys for d in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [path]


def find_mesh(name: str, experiment: Path) -> tuple[MeshFile, str]:
    """A mesh file and its text: relative to here, or to the experiment's folder or the one above it."""
    for folder in (Path(), experiment.parent, experiment.parent.parent):
        if (folder / name).is_file():
            return load(folder / name), (folder / name).read_text()
    return load(name), ""  # which says what is there instead


def run_directory(target: str) -> Path:
    """A TARGET that must be a run directory."""
    path = Path(target)
    if (path / "config.json").is_file() and "run_id" in (path / "config.json").read_text():
        return path
    if not path.exists():
        beside = [found.parent.name for found in path.parent.glob("*/config.json")]
        raise UserError(
            f"{target} does not exist; {nearest(path.name, beside)}" if beside else f"{target} does not exist"
        )
    raise UserError(f"{target} is no run directory: it has no config.json of a run")


def _git() -> dict | None:
    """Revision of the working directory's repository, and whether files differ from it."""
    call = lambda *args: subprocess.run(
        ["git", *args], capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()
    try:
        return {"revision": call("rev-parse", "HEAD"), "dirty": bool(call("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
