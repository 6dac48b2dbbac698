"""Where the time of a run goes: seconds, compiles and tokens of each stage, for any experiment on any mesh file.

    python benchmarks/loop.py [EXPERIMENT] [--mesh FILE] [--steps 8] [--cache] [--json] [FIELD=VALUE ...]

Runs the experiment's own schedule over its own stages; nothing is saved or evaluated. A warm-up is skipped: the actor
starts from fresh weights, so completions are mostly as long as allowed and rewards mean nothing. Seconds are medians
over the steps after the first, which compiles; compile seconds are XLA's alone, without the persistent cache.
"""

import sys
from statistics import median

import command
from command import Parser, count, show, size, table
from timing import Compiles

from rljax.run import devices
from rljax.run.directory import find_mesh
from rljax.run.stages import build

STAGES = ("generate", "reshard", "assess", "train")


def measure(run, mesh, compiles: Compiles) -> dict:
    """Takes run.steps steps and returns the report of them."""
    stages = build(run, mesh)
    layout = lambda place: str(place.placement.layout)
    show = lambda stage: setattr(compiles, "stage", stage)
    show("begin")
    states, frozen = stages.fresh(run.seed)
    history = []
    for _, metrics, _ in run.schedule(run, stages, states, frozen, 1, show):
        history.append({name: float(value) for name, value in metrics.items()})
    later = history[1:] or history
    of = lambda name, steps=later: [step[f"seconds/{name}"] for step in steps]
    found = [name for name in STAGES if f"seconds/{name}" in history[0]]
    total = sum(median(of(name)) for name in found)
    tokens = lambda step: step["length"] * run.prompts / step["seconds/train"]  # where nothing is generated
    mean = lambda name: median(step[name] for step in later) if name in history[0] else None
    return {
        "mesh": mesh.path,
        "layout": {"train": layout(stages.actor.place), "generate": layout(stages.generate)},
        "steps": len(history),
        "stages": {
            name: {
                "seconds": median(of(name)),
                "share": median(of(name)) / total,
                "first": of(name, history)[0],
                "compile_seconds": compiles.seconds[name],
                "programs": compiles.programs[name],
            }
            for name in found
        },
        "seconds": total,
        "tokens_per_second": median(step.get("tokens_per_second") or tokens(step) for step in later),
        "length": mean("length"),
        "reshard_bytes": mean("bytes/reshard"),
        "begin": {"compile_seconds": compiles.seconds["begin"], "programs": compiles.programs["begin"]},
        "compiles": stages.compiles(),
    }


def tables(report: dict) -> list:
    shown = table("stage", "ms", "share", "first step, s", "compile, s", "programs")
    for name, stage in report["stages"].items():
        shown.add_row(name, f"{1e3 * stage['seconds']:.1f}", f"{stage['share']:.0%}", f"{stage['first']:.2f}",
                      f"{stage['compile_seconds']:.2f}", str(stage["programs"]))  # fmt: skip
    parts = [report["begin"], *report["stages"].values()]
    total = lambda name: sum(part.get(name, 0) for part in parts)
    shown.add_section()
    shown.add_row("step", f"{1e3 * report['seconds']:.1f}", "", f"{total('first'):.2f}",
                  f"{total('compile_seconds'):.2f}", str(total("programs")))  # fmt: skip
    moved = "" if report["reshard_bytes"] is None else f"; {size(report['reshard_bytes'])} resharded a step"
    layout = ", ".join(f"{stage} {layout}" for stage, layout in report["layout"].items())
    return [
        f"{report['experiment']} on {report['mesh']}: {layout}",
        shown,
        f"{report['tokens_per_second']:,.0f} tokens/s of mean length {report['length']:.1f}{moved}",
        "entry programs by stage: " + ", ".join(f"{name} {n}" for name, n in report["compiles"].items() if n),
        f"medians of {max(1, report['steps'] - 1)} steps after the first, from fresh weights; the last row's compiles "
        "include those before step 1",
    ]


def body() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--mesh", metavar="FILE", help="mesh file [default: the experiment's]")
    parser.add_argument("--steps", type=count, default=8, help="steps, the first one included [8]")
    parser.add_argument("--cache", action="store_true", help="use the persistent compilation cache")
    args = parser.read("steps")
    mesh, _ = find_mesh(args.mesh or args.run.mesh, args.experiment)
    if not args.cache:
        command.measure_compiles()
    devices.configure(mesh)
    report = {"experiment": args.experiment.stem, **measure(args.run, mesh, Compiles())}
    show(report, tables(report), args.json)


if __name__ == "__main__":
    sys.exit(command.main(body))
