"""One run from start to summary: warm-ups, steps, evaluations, checkpoints, and leaving cleanly at any moment."""

import json
import os
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
from rljax.model.table import completed
from rljax.run import report
from rljax.run.checkpoint import Base, Saver, parameters
from rljax.run.directory import run_directory, write_json
from rljax.run.display import Display
from rljax.run.evaluate import held_out, measure, verifiers_of
from rljax.run.imported import imported, is_checkpoint
from rljax.run.metrics import JsonLines, MetricsLog, read, truncate
from rljax.run.reference import keep
from rljax.run.run import Fresh, Run, Warm
from rljax.run.stages import Stages, build
from rljax.types import TrainState

SKIPS = 10  # so many updates in a row that are not finite end a run


class Phase:
    """A run or one of those that it starts from: what to train, its name in metrics, and its directory."""

    def __init__(self, run: Run, name: str, where: Path):
        self.run, self.name, self.where = run, name, where
        self.saver = Saver(where / "checkpoints", run.checkpoints)
        self.latest = self.saver.latest()


def phases(run: Run, where: Path, name: str = "train", started=None) -> list[tuple[Run, str, Path]]:
    """The runs that a run's roles start from, the first to run first, and then itself; each starts from directories.

    The actor's is its warm-up, and those of other roles are named after these. Roles that start from the same run share
    it, and so do roles of these runs (`started`: runs and their directories). The seed of a run to start from follows
    from its own and its run's: another seed of the run changes both, and no problem that the warm-up solved comes up
    again because both drew it alike.
    """
    chain, roles, started = [], dict(run.roles), [] if started is None else started
    for role, each in sorted(run.roles.items(), key=lambda item: item[0] != "actor"):
        start = getattr(each, "start", None)
        if not isinstance(start, Run):
            continue
        folder = next((folder for other, folder in started if other == start), None)
        if folder is None:
            folder = where / ("warmup" if role == "actor" else role)
            before = folder.name if name == "train" else f"{name}/{folder.name}"
            seed = crc32(f"{run.seed} {start.seed}".encode())
            chain += phases(replace(start, seed=seed), folder, before, started)
            started.append((start, folder))
        roles[role] = replace(each, start=Warm(str(folder)))
    return [*chain, (replace(run, roles=roles), name, where)]


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
        for phase in chain[:-1]:
            _warm_up(phase, build(phase.run, mesh), log, display, stopped)
        return _train(chain[-1], build(chain[-1].run, mesh), log, samples, display, stopped)


def first_states(
    phase: Phase, stages: Stages, at: dict[str, int], display: Display | None = None
) -> tuple[dict[str, TrainState], dict, dict]:
    """(states before the first step, parameters of frozen roles, {role: the step of the run directory it is from}).

    `at` says which steps these were when the run was begun; else they are the latest.
    """
    run, states, frozen, steps = phase.run, {}, {}, {}

    def found(role: str, place, of: str):
        """What a role starts from, without adapters."""
        start, heads, at_zero = run.roles[of].start, run.heads(role), (place.mesh, place.placement.zero)
        model, lora = run.roles[role].lm, run.roles[role].lora
        if isinstance(start, str) and is_checkpoint(start):
            told = display and (lambda done, size: display.stage(f"read {role} {done / size:.0%}"))
            dtype = (lambda t: model.compute if t.matrix else "float32") if lora else "float32"
            if run.roles[role].optimizer is None and run.roles[role].params is not None:
                dtype = None  # what is narrowed next need not be wide before
            based(role, os.path.abspath(start), None)
            return imported(start, model, heads, *at_zero, seed=run.seed, dtype=dtype, progress=told, role=role)
        where = Path(start.where) if isinstance(start, Warm) else run_directory(start)
        restored = parameters(where, model, heads, *at_zero, at.get(role), role=role, seed=run.seed)
        steps[role] = restored.step
        based(role, os.path.relpath(where, phase.where), restored.step)
        return restored

    def based(role: str, *base):
        if (lora := run.roles[role].lora) is not None:
            phase.saver.bases[role] = Base(lora, run.heads(role), run.seed, *base, role).to_json()

    def adapting(role: str, player, params):
        """Parameters with fresh adapters, where the role has some."""
        table, place = run.roles[role].lm.build(run.heads(role)).table, player.place
        return completed(player.lm.table, table, params, place.mesh, place.placement.zero, run.seed)

    for role, player in stages.trained.items():
        of = role if run.roles[role].start is not None else "actor"
        if isinstance(run.roles[of].start, Fresh):
            states[role] = player.begin(run.seed)
            based(role, None, None)
        else:
            restored = found(role, player.place, of)
            states[role] = player.adopt(adapting(role, player, restored.params), restored.moments)
    for role, judge in stages.frozen.items():
        start = run.roles[role].start
        if start is None:
            frozen[role] = stages.copied(role, states)
        elif isinstance(start, Fresh):
            frozen[role] = judge.begin(run.seed)
        else:
            frozen[role] = judge.hold(found(role, judge.place, role).params)
    return states, frozen, steps


def _warm_up(phase: Phase, stages: Stages, log, display, stopped) -> None:
    """Takes the steps that are left of a run that another starts from."""
    display.phase(phase.name, phase.run.steps)
    states, frozen, _ = first_states(phase, stages, {}, display)
    keep_reference(phase, stages, frozen)
    states, first, done, seconds = resumed(phase, stages, states)
    if not done:
        steps(phase, stages, states, frozen, first, seconds, log, None, display, stopped)


def _train(phase: Phase, stages: Stages, log, samples, display, stopped) -> dict:
    run, where = phase.run, phase.where
    path = where / "summary.json"
    begun = json.loads(path.read_text()) if phase.latest is not None and path.exists() else {}
    display.phase(phase.name, run.steps)
    states, frozen, start = first_states(phase, stages, begun.get("start") or {}, display)
    keep_reference(phase, stages, frozen)
    if not begun:
        display.stage("evaluate")
        before, shown = measure(run, stages, states, frozen)
        begun = {"before": before, "samples": {"before": shown}, "start": start}
        write_json(path, begun)
    states, first, done, seconds = resumed(phase, stages, states)
    if not done:
        states = steps(phase, stages, states, frozen, first, seconds, log, samples, display, stopped)
    display.stage("evaluate")
    after, shown = measure(run, stages, states, frozen)
    summary = begun | {
        "after": after,
        "steps": int(phase.saver.latest() or 0),
        "seconds": seconds,
        "samples": begun["samples"] | {"after": shown},
    }
    write_json(path, summary)
    report.draw(where, [{"phase": phase.name, "step": 0, **summary["before"]}, *read(where / "metrics.jsonl")])
    return summary


def keep_reference(phase: Phase, stages: Stages, frozen: dict) -> None:
    """Where the run says so."""
    run = phase.run
    if run.keep_reference and "reference" in frozen:
        keep(run, stages, frozen, phase.where, (phase.latest or 0) + 1, [] if verifiers_of(run) else held_out(run))


def resumed(phase: Phase, stages: Stages, states: dict[str, TrainState]) -> tuple[dict, int, bool, dict]:
    """The states to go on from, the first step to take, whether none is left, and the seconds spent so far."""
    if phase.latest is None:
        return states, 1, False, {}
    own = {role: stages.trained[role].own(state) for role, state in states.items()}
    own, info = phase.saver.restore(phase.latest, jax.tree.map(abstract_like, own))
    states = {role: stages.trained[role].whole(state, states[role]) for role, state in own.items()}
    return states, phase.latest + 1, info["reached"] or phase.latest >= phase.run.steps, info["seconds"]


def abstract_like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def steps(phase, stages, states, frozen, first, seconds, log, samples, display, stopped) -> dict[str, TrainState]:
    """Takes the phase's steps: logs, evaluates and saves each as its settings say. `seconds` adds up by stage."""
    run, saver = phase.run, phase.saver
    schedule = run.schedule(run, stages, states, frozen, first, display.stage)
    for step, (states, metrics, shown) in enumerate(schedule, first):
        metrics = {name: float(value) for name, value in metrics.items()}
        if run.evaluation.every and (step % run.evaluation.every == 0 or step == run.steps):
            display.stage("evaluate")
            at = perf_counter()
            metrics |= measure(run, stages, states, frozen)[0]
            metrics["seconds/evaluate"] = perf_counter() - at
        for name, value in metrics.items():
            stage = name.removeprefix("seconds/")
            if stage != name:
                seconds[stage] = seconds.get(stage, 0.0) + value
        log.append(phase.name, step, metrics)
        for sample in shown if samples else ():
            samples.write({"step": step, **sample})
        display.update(step, metrics)
        for of in ("", "critic/"):  # a critic may learn alone
            if metrics.get(f"{of}skipped", 0) >= SKIPS:
                raise RunFailed(
                    f"{phase.name} step {step}: the last {SKIPS} updates were not finite ({of}loss "
                    f"{metrics[f'{of}loss']}, gradient norm {metrics[f'{of}grad_norm']}) and were skipped; "
                    "lower the learning rate, or look at the rewards"
                )
        reached = run.until is not None and bool(run.until(metrics))
        done = reached or step == run.steps
        if done or stopped() or (run.checkpoints.every and step % run.checkpoints.every == 0):
            display.stage("save")
            own = {role: stages.trained[role].own(state) for role, state in states.items()}
            saver.save(step, own, {"reached": reached, "seconds": seconds}, metrics)
        if stopped():
            saver.finish()
            raise Interrupted(stopped(), f"stopped at {phase.name} step {step}, saved; continue with --resume")
        if done:
            break
    saver.finish()
    return states


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
