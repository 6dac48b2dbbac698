"""One update and one generation, laid out in many ways: time, memory, communication, each beside its prediction.

    python benchmarks/sharding.py [EXPERIMENT] [--meshes FILE ...] [--rounds 7] [--cache] [--json] [FIELD=VALUE ...]
    python benchmarks/sharding.py [EXPERIMENT] --topology v5e:4x4 [--meshes FILE ...] [--json] [FIELD=VALUE ...]

By default every strategy has a mesh file of eight simulated devices, those of experts where the model has some. All get
the same weights and the same batch. Steps are timed in turns, A B C A B C, so a ratio (to the first file) holds however
loaded the machine is; simulated devices share its cores, so it says what a layout costs, never what it would gain on
real ones. Exits with 1 if loss, gradient norm or entropy of the first update differ from the first file's by more than
the tolerance.

With a topology nothing runs: the real compiler compiles the update for chips that are not there. A mesh file of another
number of devices is widened to it along an axis that splits the batch.

Figures are of one device and one update. Bytes of state, which is parameters and moments, are those of the shards, the
others the compiler's; FLOPs are those of the jaxpr's matrix products, with every score of attention; bytes sent are
those of the compiled program's collectives. Predictions are the closed forms of rljax.plan.cost: of the peak they count
state, gradients and what the backward pass waits for, without the batch and what is being worked on. A pipeline's FLOPs
and bytes sent are measured at most: of the branches of a tick the costliest counts, or all.
"""

import json
import sys
from math import prod
from pathlib import Path

import command
import jax
from absent import begun, blank, widened
from bench import Bench, compiled, traced
from command import Parser, count, show
from tables import EQUAL, tables
from timing import Compiles, interleave, middle, ratio

from rljax.data.rows import fit
from rljax.errors import RunFailed, UserError
from rljax.mesh import Placement
from rljax.mesh.file import MeshFile
from rljax.mesh.verbs import axes_of
from rljax.model.table import is_tensor
from rljax.plan import cost, parts, topology
from rljax.plan.flops import dot_flops
from rljax.run import devices
from rljax.run.directory import find_mesh
from rljax.run.run import Run
from rljax.run.stages import Stages, build
from rljax.types import Assessed

MESHES = (
    "one", "eight_data", "eight_zero1", "eight_zero2", "eight_fsdp", "eight_fsdp_tensor", "eight_sp", "eight",
    "eight_gather", "eight_ring", "eight_ulysses", "eight_seq", "eight_pipe",
)  # fmt: skip
EXPERTS = ("eight_expert", "eight_expert_tensor")


def standard(run: Run) -> list[str]:
    """The mesh files that compare all strategies which the model can use."""
    table = run.roles["actor"].lm.build().table
    split = {axis for t in jax.tree.leaves(table, is_leaf=is_tensor) for entry in t.spec for axis in axes_of(entry)}
    return [str(command.ROOT / "meshes" / f"{name}.toml") for name in MESHES + EXPERTS * ("expert" in split)]


def fitting(args, meshes: list[MeshFile], count: int | None = None) -> tuple[list[MeshFile], list[str]]:
    """Those that the model fits, for `count` devices, and why the others do not; a UserError if they were asked for."""
    fits, left = [], []
    for mesh in meshes:
        try:
            mesh = widened(mesh, count or mesh.devices)
            build(args.run, mesh)
            fits.append(mesh)
        except UserError as error:
            if args.meshes:
                raise
            left.append(str(error))
    if not fits:
        raise UserError(left[0])
    return fits, left


def bytes_per_device(tree) -> int:
    """From shard shapes: looking at shards would make arrays of them."""
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def facts(run: Run, mesh: MeshFile, stages: Stages, state, batch: Assessed, flops: int, program) -> dict:
    """What a compiled update needs of a device, and what the closed forms predict of it."""
    place, needs, actor = stages.actor.place, topology.report(program), run.roles["actor"]
    p, lm = place.placement, actor.lm
    widths = parts.widths(actor.params or "float32", actor.optimizer.moments)
    rows, time = fit(batch, place.rows, place.columns).rollout.mask.shape
    return {
        "mesh": mesh.path,
        "train": describe(p),
        "generate": str(stages.generate.placement.layout),
        "devices": p.layout.devices,
        "rows": rows,
        "time": time,
        "flops": flops / p.layout.devices,
        "bytes": needs["bytes"]
        | {"params": bytes_per_device(state.params), "optimizer": bytes_per_device((state.master, state.optimizer))},
        "collectives": needs["collectives"],
        "sent": sum(kind["bytes"] for kind in needs["collectives"].values()),
        "exact": needs["exact"],
        "predicted": cost.predict(lm, p, rows, time, widths)
        | {"gradients": parts.state(lm, p.layout, p.zero, widths).gradients},
    }


def describe(placement: Placement) -> str:
    """The layout, and what its strategy has other than a mesh file's defaults."""
    p, words = placement, [str(placement.layout)]
    words += [f"zero={p.zero}"] * (p.zero != 3)
    words += [f"microbatches={p.microbatches}"] * (p.microbatches > 1)
    words += [f"remat={p.remat}"] * (p.remat != "block")
    words += ["sequence parallel"] * p.sequence_parallel
    words += [p.context] * (p.layout.seq > 1) + [p.schedule] * (p.layout.pipe > 1)
    return ", ".join(words)


def measure(run: Run, meshes: list[MeshFile], rounds: int) -> list[dict]:
    """One report for each mesh file, of steps that run."""
    compiles, benches, reports, batch = Compiles(), [], [], None
    for i, mesh in enumerate(meshes):
        compiles.stage = "begin"
        bench = Bench(run, mesh)
        compiles.stage = f"generate {i}"
        batch = bench.batch() if batch is None else batch
        bench.generate()
        compiles.stage = f"update {i}"
        program = traced(bench.stages, bench.state, batch)
        flops, program = dot_flops(program.jaxpr), compiled(bench.stages, program)
        report = facts(run, mesh, bench.stages, bench.state, batch, flops, program)
        report["metrics"] = {name: value for name, value in bench.update(batch).items() if name in EQUAL}
        report["compile_seconds"] = {stage: compiles.seconds[f"{stage} {i}"] for stage in ("update", "generate")}
        report["programs"] = compiles.programs[f"update {i}"]
        benches.append(bench)
        reports.append(report)
    for stage, call in (("update", lambda b: b.update(batch)), ("generate", Bench.generate)):
        spent = interleave({i: (lambda b=b, call=call: call(b)) for i, b in enumerate(benches)}, rounds)
        for i, report in enumerate(reports):
            at, to_first = middle(spent[i]), ratio(spent[i], spent[0])
            report[f"{stage}_seconds"] = at._asdict() | {"ratio": to_first.wall, "cpu_ratio": to_first.cpu}
    return reports


def here(args, meshes: list[MeshFile]) -> dict:
    """In a process that may compile for chips: how many there are; with a mesh file, the report of its update."""
    try:
        chips = topology.topology(args.topology)
    except UserError as error:
        return {"mistake": str(error)}
    if not meshes:
        return {"chips": len(chips)}
    jax.config.update("jax_num_cpu_devices", len(chips))
    mesh, compiles = widened(meshes[0], len(chips)), Compiles()
    stages, simulated = build(args.run, mesh, chips), build(args.run, mesh)
    batch = fit(blank(args.run), stages.actor.place.rows, stages.actor.place.columns)
    state = begun(stages)
    flops = dot_flops(traced(simulated, begun(simulated), batch).jaxpr)  # no kernels of chips there
    compiles.stage = "update"
    program = compiled(stages, traced(stages, state, batch))
    seconds = {"update": compiles.seconds["update"]}
    return facts(args.run, mesh, stages, state, batch, flops, program) | {"compile_seconds": seconds}


def apart(args, *words: str) -> dict:
    """What `here` returns in a process of its own."""
    return topology.apart(
        __file__, str(args.experiment), *args.overrides, "--topology", args.topology, "--here", *words
    )


def attempt(args, mesh: MeshFile) -> dict:
    """The report of an update compiled for chips, or why it is not."""
    print(f"{Path(mesh.path).stem}: compiling for {args.topology}", file=sys.stderr)
    try:
        return apart(args, "--meshes", mesh.path)
    except RunFailed as error:
        return {"mesh": mesh.path, "train": describe(mesh.placement("train")), "refused": str(error)}


def absent(args, meshes: list[MeshFile]) -> tuple[dict, list[str]]:
    """Updates compiled for a topology, and what is wrong: those that the compiler refuses."""
    found = apart(args)
    if "mistake" in found:
        raise UserError(found["mistake"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", found["chips"])
    meshes, left = fitting(args, meshes, found["chips"])
    reports = [attempt(args, mesh) for mesh in meshes]
    wrong = [f"{r['mesh']}: {r['refused']}" for r in reports if "refused" in r]
    return {"topology": args.topology, "layouts": reports, "left_out": left}, wrong


def simulated(args, meshes: list[MeshFile]) -> tuple[dict, list[str]]:
    """Updates and generations that run, and what is wrong: where their results differ."""
    if len({mesh.platform for mesh in meshes}) > 1:
        raise UserError(f"--meshes: platforms {', '.join(m.platform for m in meshes)} differ; a process has but one")
    if not args.cache:
        command.measure_compiles()
    devices.configure(max(meshes, key=lambda mesh: mesh.devices))
    meshes, left = fitting(args, meshes)
    reports = measure(args.run, meshes, args.rounds)
    wrong = differences(reports, args.tolerance)
    return {"layouts": reports, "left_out": left, "differences": wrong}, wrong


def differences(reports: list[dict], tolerance: float) -> list[str]:
    """What the layouts disagree on, relative where a value is above 1."""
    lines = []
    for report in reports[1:]:
        for name, value in report["metrics"].items():
            first = reports[0]["metrics"][name]
            if not abs(value - first) <= tolerance * max(1.0, abs(first)):
                lines.append(f"{name} is {value:.6g} on {report['mesh']} but {first:.6g} on {reports[0]['mesh']}")
    return lines


def body() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--meshes", nargs="+", metavar="FILE", default=[], help="the first is compared with")
    parser.add_argument("--topology", metavar="NAME", help="absent chips to compile for, such as v5e:4x4 or h100:8")
    parser.add_argument("--here", action="store_true", help="compile for the topology in this process")
    parser.add_argument("--rounds", type=count, default=7, help="times that each step is timed [7]")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="allowed difference of results [1e-4]")
    parser.add_argument("--cache", action="store_true", help="use the persistent compilation cache")
    args = parser.read()
    files = args.meshes or standard(args.run)[bool(args.topology) :]  # one device has no other form
    if args.here:
        print(json.dumps(here(args, [find_mesh(name, args.experiment)[0] for name in args.meshes])))
        return 0
    meshes = [find_mesh(name, args.experiment)[0] for name in files]
    report, wrong = (absent if args.topology else simulated)(args, meshes)
    report = {"experiment": args.experiment.stem} | report
    show(report, tables(report), args.json)
    for line in wrong:
        print(f"sharding.py: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(command.main(body))
