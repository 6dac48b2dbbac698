"""One run from start to summary: warm-ups, steps, evaluations, checkpoints, and leaving cleanly at any moment."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from zlib import crc32

import jax

from rljax.errors import Interrupted, RunFailed
from rljax.mesh.file import MeshFile
from rljax.run import report
from rljax.run.checkpoint import Saver, parameters
from rljax.run.directory import run_directory, write_json
from rljax.run.display import Display
from rljax.run.evaluate import evaluate
from rljax.run.metrics import JsonLines, MetricsLog, read, truncate
from rljax.run.run import Fresh, Run
from rljax.run.stages import Stages, build
from rljax.types import TrainState

SKIPS = 10  # so many updates in a row that are not finite end a run


class Phase:
    """A run or one of its warm-ups: what to train, its name in metrics, and its directory."""

    def __init__(self, run: Run, name: str, where: Path):
        self.run, self.name, self.where = run, name, where
        self.saver = Saver(where / "checkpoints", run.checkpoints)
        self.latest = self.saver.latest()


def phases(run: Run, where: Path, name: str = "train") -> list[tuple[Run, str, Path]]:
    """A run's warm-ups, the first to run first, and then itself.

    A warm-up's seed follows from its own and its run's: another seed of the run changes both, and no problem that the
    warm-up solved comes up again because both drew it alike.
    """
    start, before = run.roles["actor"].start, "warmup" if name == "train" else f"{name}/warmup"
    if not isinstance(start, Run):
        return [(run, name, where)]
    start = replace(start, seed=crc32(f"{run.seed} {start.seed}".encode()))
    return [*phases(start, where / "warmup", before), (run, name, where)]


def fits(run: Run, mesh: MeshFile) -> None:
    """UserError where a model of the run or of a warm-up does not fit the mesh; nothing is written or allocated."""
    for each, *_ in phases(run, Path()):
        build(each, mesh)


def train(run: Run, mesh: MeshFile, where: Path, config: dict, display: Display) -> dict:
    """Runs to the end, or on from its latest checkpoint, and returns the summary that it wrote to `where`.

    Interrupted after a SIGINT or SIGTERM, once the state of the step in progress is saved.
    """
    with interruptible() as stopped, ExitStack() as stack:
        chain = [Phase(*phase) for phase in phases(run, where)]
        for phase in chain:
            stack.callback(phase.saver.close)
            late = lambda row, phase=phase: row["phase"] == phase.name and row["step"] > (phase.latest or 0)
            truncate(where / "metrics.jsonl", lambda row, late=late: not late(row))
        truncate(where / "samples.jsonl", lambda row: row["step"] <= (chain[-1].latest or 0))
        writers = [tracker.open(where, config) for tracker in run.trackers]
        log = stack.enter_context(MetricsLog(where / "metrics.jsonl", *writers))
        samples = stack.enter_context(JsonLines(where / "samples.jsonl"))
        params = None
        for phase in chain:
            stages = build(phase.run, mesh)
            if phase.run is run:
                return _train(phase, stages, params, log, samples, display, stopped)
            params = _warm_up(phase, stages, params, log, display, stopped)
    raise AssertionError("a run is its own last phase")


def first_state(phase: Phase, stages: Stages, params, step: int | None = None) -> tuple[TrainState, int | None]:
    """The state before the phase's first step: from scratch, a run directory, or the phase before.

    With the step of the run directory's checkpoint: the one asked for, or else its latest.
    """
    start = phase.run.roles["actor"].start
    if isinstance(start, Fresh):
        return stages.begin(phase.run.seed), None
    if isinstance(start, str):
        place = stages.train
        params, step = parameters(run_directory(start), stages.lm, place.mesh, place.placement.zero, step)
    return stages.adopt(params), step


def _warm_up(phase: Phase, stages: Stages, params, log, display, stopped):
    """The parameters that a finished warm-up ends with."""
    state, _ = first_state(phase, stages, params)
    state, first, done, seconds = resumed(phase, stages, state)
    if not done:
        display.phase(phase.name, phase.run.steps)
        state = steps(phase, stages, state, None, first, seconds, log, None, display, stopped)
    return state.params


def _train(phase: Phase, stages: Stages, params, log, samples, display, stopped) -> dict:
    run, where = phase.run, phase.where
    path = where / "summary.json"
    begun = json.loads(path.read_text()) if phase.latest is not None and path.exists() else {}
    state, start = first_state(phase, stages, params, begun.get("start"))
    reference = stages.freeze(state.params) if "reference" in run.roles else None
    display.phase(phase.name, run.steps)
    if not begun:
        display.stage("evaluate")
        before, shown = evaluate(run, stages, stages.publish(state.params)[0])
        begun = {"before": before, "samples": {"before": shown}, "start": start}
        write_json(path, begun)
    state, first, done, seconds = resumed(phase, stages, state)
    if not done:
        state = steps(phase, stages, state, reference, first, seconds, log, samples, display, stopped)
    display.stage("evaluate")
    after, shown = evaluate(run, stages, stages.publish(state.params)[0])
    summary = begun | {
        "after": after,
        "steps": int(phase.saver.latest() or 0),
        "seconds": seconds,
        "samples": begun["samples"] | {"after": shown},
    }
    write_json(path, summary)
    report.draw(where, [{"phase": phase.name, "step": 0, **summary["before"]}, *read(where / "metrics.jsonl")])
    return summary


def resumed(phase: Phase, stages: Stages, state: TrainState) -> tuple[TrainState, int, bool, dict]:
    """The state to go on from, the first step to take, whether none is left, and the seconds spent so far."""
    if phase.latest is None:
        return state, 1, False, {}
    state, info = phase.saver.restore(phase.latest, jax.tree.map(abstract_like, state))
    return state, phase.latest + 1, info["reached"] or phase.latest >= phase.run.steps, info["seconds"]


def abstract_like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def steps(phase, stages, state, reference, first, seconds, log, samples, display, stopped) -> TrainState:
    """Takes the phase's steps: logs, evaluates and saves each as its settings say. `seconds` adds up by stage."""
    run, saver = phase.run, phase.saver
    schedule = run.schedule(run, stages, state, reference, first, display.stage)
    for step, (state, metrics, shown) in enumerate(schedule, first):
        metrics = {name: float(value) for name, value in metrics.items()}
        if run.evaluation.every and (step % run.evaluation.every == 0 or step == run.steps):
            display.stage("evaluate")
            at = perf_counter()
            metrics |= evaluate(run, stages, stages.publish(state.params)[0])[0]
            metrics["seconds/evaluate"] = perf_counter() - at
        for name, value in metrics.items():
            stage = name.removeprefix("seconds/")
            if stage != name:
                seconds[stage] = seconds.get(stage, 0.0) + value
        log.append(phase.name, step, metrics)
        for sample in shown if samples else ():
            samples.write({"step": step, **sample})
        display.update(step, metrics)
        if metrics["skipped"] >= SKIPS:
            raise RunFailed(
                f"{phase.name} step {step}: the last {SKIPS} updates were not finite (loss {metrics['loss']}, gradient "
                f"norm {metrics['grad_norm']}) and were skipped; lower the learning rate, or look at the rewards"
            )
        reached = run.until is not None and bool(run.until(metrics))
        done = reached or step == run.steps
        if done or stopped() or (run.checkpoints.every and step % run.checkpoints.every == 0):
            display.stage("save")
            saver.save(step, state, {"reached": reached, "seconds": seconds}, metrics)
        if stopped():
            saver.finish()
            raise Interrupted(stopped(), f"stopped at {phase.name} step {step}, saved; continue with --resume")
        if done:
            break
    saver.finish()
    return state


@contextmanager
def interruptible() -> Iterator:
    """SIGINT and SIGTERM ask for a stop after the step in progress; a second one stops at once."""
    seen = []

    def handle(signum, frame):
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen[0] if seen else None
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)
