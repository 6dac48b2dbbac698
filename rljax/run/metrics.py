"""What a run writes down as it goes: JSON lines that survive a kill, and the trackers that hear the same numbers."""

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol
from uuid import uuid4

from rljax.errors import UserError


class JsonLines:
    """A file of one strict JSON object per line, opened to append, such as RUN_DIR/samples.jsonl.

    A row is written by one os.write, so a kill leaves whole rows and at most one torn tail, which opening cuts off.
    Rows outlive the process at once, but not the machine: nothing here waits for the disk.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        text = self.path.read_bytes()
        os.ftruncate(self._fd, text.rfind(b"\n") + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends `row`; NumPy and JAX scalars become numbers, NaN and infinities null. OSError if the disk is full."""
        line = json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False).encode() + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None  # which alone would name no file
        if written < len(line):
            os.ftruncate(self._fd, size)  # else the next row would be glued to this half
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


class MetricsLog(JsonLines):
    """RUN_DIR/metrics.jsonl, and whatever trackers listen to it."""

    def __init__(self, path: str | Path, *writers: "Writer"):
        super().__init__(path)
        self.writers = writers

    def append(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """One line: phase, step (from 1 in each phase), time (seconds since the epoch), then the metrics as floats."""
        head = {"phase": phase, "step": int(step), "time": time.time()}
        if taken := head.keys() & metrics.keys():
            raise ValueError(f"metrics cannot be named {sorted(taken)}: every line has these keys")
        metrics = {name: float(value) for name, value in metrics.items()}
        self.write(head | metrics)
        for writer in self.writers:
            writer(phase, int(step), metrics)

    def close(self) -> None:
        super().close()
        for writer in self.writers:
            writer.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, without a torn last one. UserError if it is missing or any other is bad."""
    return [row for _, row in _parse(Path(path))]


def truncate(path: str | Path, keep: Callable[[dict], bool]) -> None:
    """Drops the rows that `keep` refuses, such as those written after the checkpoint one resumes from.

    The file is replaced, never half written: what was opened before would append to the old one. Missing is empty.
    """
    path = Path(path)
    if not path.exists():
        return
    kept = [line for line, row in _parse(path) if keep(row)]
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _parse(path: Path) -> list[tuple[bytes, dict]]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was never finished
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode())
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: a {type(row).__name__}, where every line is an object")
        rows.append((line + b"\n", row))
    return rows


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Writer(Protocol):
    """An open tracker. Names are prefixed by the phase ("train/reward") and each phase has its own step axis."""

    def __call__(self, phase: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker(Protocol):
    """A place that metrics go to besides metrics.jsonl. UserError on open if its package is missing."""

    def open(self, run_dir: Path, config: dict) -> Writer: ...


@dataclass(frozen=True)
class TensorBoard:
    """Event files in RUN_DIR/tensorboard, for `tensorboard --logdir RUN_DIR`; at most `flush` seconds behind."""

    flush: int = 10

    def open(self, run_dir: Path, config: dict) -> Writer:
        """Starts from what metrics.jsonl holds, so that a resumed run shows no step twice."""
        package = _imported("tensorboardX", self)
        shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        board = package.SummaryWriter(str(run_dir / "tensorboard"), flush_secs=self.flush)
        board.add_text("config", "```json\n" + json.dumps(config, indent=2) + "\n```")
        writer = _BoardWriter(board)
        log = run_dir / "metrics.jsonl"
        for row in read(log) if log.exists() else ():
            phase, step, when = (row.pop(key) for key in ("phase", "step", "time"))
            writer(phase, step, row, when)
        return writer


@dataclass(frozen=True)
class _BoardWriter:
    board: Any

    def __call__(self, phase: str, step: int, metrics: Mapping[str, float], when: float | None = None) -> None:
        for name, value in _finite(metrics).items():
            self.board.add_scalar(f"{phase}/{name}", value, step, when)

    def close(self) -> None:
        self.board.close()


@dataclass(frozen=True)
class WandB:
    """Weights & Biases. With mode "offline" it writes to RUN_DIR/wandb, for `wandb sync`; None leaves it to wandb."""

    project: str = "rljax"
    entity: str | None = None
    name: str | None = None  # None: the run directory's
    mode: Literal["online", "offline", "disabled"] | None = None

    def open(self, run_dir: Path, config: dict) -> Writer:
        """Resumes the run whose id RUN_DIR/wandb.id keeps. UserError if nobody is logged in."""
        package = _imported("wandb", self)
        identity = run_dir / "wandb.id"
        if not identity.exists():
            identity.write_text(uuid4().hex)
        try:
            run = package.init(
                project=self.project, entity=self.entity, name=self.name or run_dir.resolve().name, mode=self.mode,
                dir=str(run_dir), config=config, id=identity.read_text().strip(), resume="allow",
                settings=package.Settings(console="off", silent=True),  # the terminal is the display's
            )  # fmt: skip
        except package.errors.UsageError as error:
            reason = " ".join(str(error).split())
            raise UserError(f'WandB: {reason} Or choose WandB(mode="offline")') from error
        return _WandBWriter(run, set())


@dataclass(frozen=True)
class _WandBWriter:
    run: Any
    phases: set[str]  # whose step axis is declared

    def __call__(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        if phase not in self.phases:  # wandb's own step must never go back, as ours does from phase to phase
            self.run.define_metric(f"{phase}/step", hidden=True)
            self.run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
            self.phases.add(phase)
        self.run.log({f"{phase}/step": step} | {f"{phase}/{name}": value for name, value in _finite(metrics).items()})

    def close(self) -> None:
        self.run.finish()


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """What can be drawn; the rest is a gap, as it is null in metrics.jsonl."""
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _imported(package: str, tracker: Tracker) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        name = type(tracker).__name__
        raise UserError(f"{name} needs the package {package} ({error}): pip install 'rljax[track]'") from error
