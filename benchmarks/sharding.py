"""One update and one generation, laid out in several ways side by side: time, memory, communication, and equal results.

    python benchmarks/sharding.py [EXPERIMENT] [--meshes FILE ...] [--rounds 7] [--cache] [--json] [FIELD=VALUE ...]

Every mesh file gets the same weights and the same batch. Steps are timed in turns, A B C A B C, so a ratio (to the
first file) holds however loaded the machine is; simulated devices share its cores, so it says what a layout costs,
never what it would gain on real ones. State bytes are those of the shards, temporary bytes the compiler's, both per
device; collectives are those of the compiled update with the bytes each device sends. Exits with 1 if loss, gradient
norm or entropy of the first update differ from the first file's by more than the tolerance.
"""

import sys
from math import prod
from pathlib import Path

import command
import jax
from bench import Bench
from command import Parser, count, show, size, table
from timing import Compiles, interleave, middle, ratio

from rljax.errors import UserError
from rljax.plan.hlo import KINDS, collectives, traffic
from rljax.run import devices
from rljax.run.directory import find_mesh

MESHES = ("one", "eight_fsdp", "eight_fsdp_tensor", "eight", "eight_seq")
EQUAL = ("loss", "grad_norm", "entropy")


def bytes_per_device(tree) -> int:
    """From shard shapes: looking at shards would make arrays of them."""
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(run, meshes: list, rounds: int) -> list[dict]:
    """One report for each mesh file."""
    compiles, benches, reports, batch = Compiles(), [], [], None
    for i, mesh in enumerate(meshes):
        compiles.stage = "begin"
        bench = Bench(run, mesh)
        compiles.stage = f"generate {i}"
        batch = bench.batch() if batch is None else batch
        bench.generate()
        compiles.stage = f"update {i}"
        program = bench.compiled_update(batch)
        place = bench.stages.train
        found = collectives(program.as_text())
        report = {
            "mesh": mesh.path,
            "train": str(place.placement.layout),
            "generate": str(bench.stages.generate.placement.layout),
            "bytes": {
                "params": bytes_per_device(bench.state.params),
                "optimizer": bytes_per_device(bench.state.optimizer),
                "temporary": program.memory_analysis().temp_size_in_bytes,
            },
            "collectives": {kind: each._asdict() for kind, each in traffic(found).items()},
            "in_loops_of_unknown_length": sum(not c.exact for c in found),
            "metrics": {name: value for name, value in bench.update(batch).items() if name in EQUAL},
        }
        report["compile_seconds"] = {stage: compiles.seconds[f"{stage} {i}"] for stage in ("update", "generate")}
        benches.append(bench)
        reports.append(report)
    for stage, call in (("update", lambda b: b.update(batch)), ("generate", Bench.generate)):
        spent = interleave({i: (lambda b=b, call=call: call(b)) for i, b in enumerate(benches)}, rounds)
        for i, report in enumerate(reports):
            at, to_first = middle(spent[i]), ratio(spent[i], spent[0])
            report[f"{stage}_seconds"] = at._asdict() | {"ratio": to_first.wall, "cpu_ratio": to_first.cpu}
    return reports


def differences(reports: list[dict], tolerance: float) -> list[str]:
    """What the layouts disagree on, relative where a value is above 1."""
    lines = []
    for report in reports[1:]:
        for name, value in report["metrics"].items():
            first = reports[0]["metrics"][name]
            if not abs(value - first) <= tolerance * max(1.0, abs(first)):
                lines.append(f"{name} is {value:.6g} on {report['mesh']} but {first:.6g} on {reports[0]['mesh']}")
    return lines


def tables(reports: list[dict], experiment: str) -> list:
    shown = table(experiment, *(Path(r["mesh"]).stem for r in reports))
    row = lambda name, cell: shown.add_row(name, *map(cell, reports))
    row("train", lambda r: r["train"])
    row("generate", lambda r: r["generate"])
    for stage in ("update", "generate"):
        shown.add_section()
        time = lambda r, stage=stage: r[f"{stage}_seconds"]
        row(f"{stage}, ms", lambda r, time=time: f"{1e3 * time(r)['wall']:.1f}")
        row("  of CPU time", lambda r, time=time: f"{1e3 * time(r)['cpu']:.1f}")
        row("  to the first", lambda r, time=time: f"×{time(r)['ratio']:.2f}")
        row("  of CPU time", lambda r, time=time: f"×{time(r)['cpu_ratio']:.2f}")
        row("  compile, s", lambda r, stage=stage: f"{r['compile_seconds'][stage]:.2f}")
    shown.add_section()
    for name in ("params", "optimizer", "temporary"):
        row(f"{name} a device", lambda r, name=name: size(r["bytes"][name]))
    shown.add_section()
    for kind in KINDS:
        if any(r["collectives"][kind]["count"] for r in reports):
            cell = lambda c: f"{c['count']}, {size(c['bytes'])}" if c["count"] else "-"
            row(kind, lambda r, kind=kind, cell=cell: cell(r["collectives"][kind]))
    row("sent a device", lambda r: size(sum(c["bytes"] for c in r["collectives"].values())))
    shown.add_section()
    for name in EQUAL:
        row(name, lambda r, name=name: f"{r['metrics'][name]:.6f}")
    return [shown]


def body() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--meshes", nargs="+", metavar="FILE", default=[], help="the first is compared with")
    parser.add_argument("--rounds", type=count, default=7, help="times that each step is timed [7]")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="allowed difference of results [1e-4]")
    parser.add_argument("--cache", action="store_true", help="use the persistent compilation cache")
    args = parser.read()
    files = args.meshes or [str(command.ROOT / "meshes" / f"{name}.toml") for name in MESHES]
    meshes = [find_mesh(name, args.experiment)[0] for name in files]
    if len({mesh.platform for mesh in meshes}) > 1:
        raise UserError(f"--meshes: platforms {', '.join(m.platform for m in meshes)} differ; a process has but one")
    if not args.cache:
        command.measure_compiles()
    devices.configure(max(meshes, key=lambda mesh: mesh.devices))
    reports = measure(args.run, meshes, args.rounds)
    wrong = differences(reports, args.tolerance)
    report = {"experiment": args.experiment.stem, "layouts": reports, "differences": wrong}
    show(report, tables(reports, args.experiment.stem), args.json)
    for line in wrong:
        print(f"sharding.py: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(command.main(body))
