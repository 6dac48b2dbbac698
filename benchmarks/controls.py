"""Is it the reward? One warm-up, then three ways on from it: GRPO, GRPO with shuffled advantages, more supervision.

    python benchmarks/controls.py [EXPERIMENT] --out DIR [--seeds 0 1 2] [--steps N] [--until ACCURACY] [--mesh FILE]
                                  [--json] [FIELD=VALUE ...]

For any experiment that starts from a warm-up. Shuffled advantages keep the sizes and lose the credit; the supervised
control takes as many more updates on as many rows, at reinforcement learning's optimizer settings. Each is a whole
run, in DIR/seed-S/{warmup,grpo,shuffled,supervised}; DIR/controls.{json,md,png} tell the outcome. Started again with
the same DIR, it continues what was interrupted and keeps what is done. The quickstart's take one to two minutes a run.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import command
import matplotlib
from command import Parser, count, show, table
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from rljax.assess.advantages import Shuffled
from rljax.config import validate
from rljax.errors import UserError
from rljax.run import devices, directory, loop, report
from rljax.run.display import Display
from rljax.run.metrics import read
from rljax.run.run import Checkpoints, Reached, Run

ARMS = {"grpo": report.BLUE, "shuffled": report.GRAY, "supervised": report.ORANGE}
FRESH = 1000  # added to the seed of more supervision: its problems are not the warm-up's over again
SHOWN = (("eval/exact_match", "sampled"), ("eval/exact_match_greedy", "greedy"), ("eval/length", "length"))
COLUMNS = ["seed, arm", "steps", *(f"{name} {when}" for _, name in SHOWN for when in ("before", "after"))]


def warm_up(run: Run, seed: int, until: float | None) -> Run:
    """The run's warm-up as a run of its own, drawn as it would be within the run."""
    if not isinstance(run.roles["actor"].start, Run) or run.objective.advantage is None:
        raise UserError("the controls need rewards and a start from a warm-up: set roles.actor.start to a Run")
    first, *_ = loop.phases(replace(run, seed=seed), Path())[-2]
    return first if until is None else replace(first, until=Reached("eval/exact_match", until))


def arms(run: Run, warm: Run, where: Path, seed: int) -> Iterator[tuple[str, Run]]:
    """What follows the warm-up in `where`, one run each."""
    actor = replace(run.roles["actor"], start=str(where))
    keep = Checkpoints(every=0)
    run = replace(run, seed=seed, roles=run.roles | {"actor": actor}, checkpoints=keep)
    yield "grpo", run
    shuffled = replace(run.objective, advantage=Shuffled(run.objective.advantage, seed))
    yield "shuffled", replace(run, objective=shuffled)
    yield "supervised", replace(
        warm, seed=seed + FRESH, roles=warm.roles | {"actor": actor}, steps=run.steps, until=None,
        prompts=run.prompts * run.n, minibatches=run.minibatches, epochs=run.epochs,
        evaluation=run.evaluation, checkpoints=keep,
    )  # fmt: skip


def train(run: Run, mesh, text: str, where: Path, experiment: Path) -> dict:
    """Runs to the end in `where`, or on from where it stopped; held-out metrics by step, step 0 being before."""
    validate(run)
    run.check()
    resume = (where / "config.json").is_file()
    with directory.claim(where, resume):
        config = directory.same_run(where, run) if resume else directory.describe(where, run, mesh, text, experiment)
        with Display(f"{where.parent.name} {where.name}") as display:
            summary = loop.train(run, mesh, where, config, display)
    rows = [row for row in read(where / "metrics.jsonl") if SHOWN[0][0] in row]
    curve = {0: summary["before"]} | {row["step"]: row for row in rows}
    return {name: [[step, values[key]] for step, values in curve.items()] for key, name in SHOWN}


def tables(outcome: dict) -> list:
    shown = table(*COLUMNS)
    for cells in rows(outcome):
        shown.add_row(*cells)
    return [f"{outcome['experiment']} on {outcome['mesh']}: held-out accuracy and mean length in tokens", shown]


def rows(outcome: dict) -> Iterator[list[str]]:
    for seed, curves in outcome["seeds"].items():
        for arm, curve in curves.items():
            ends = [f"{curve[name][i][1]:.{1 if name == 'length' else 3}f}" for _, name in SHOWN for i in (0, -1)]
            yield [f"{seed} {arm}", str(curve["sampled"][-1][0]), *ends]


def markdown(outcome: dict) -> str:
    lines = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1), *rows(outcome)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw(outcome: dict, path: Path) -> None:
    """Accuracy and length over steps after the warm-up: a line for each seed, a color for each arm."""
    with matplotlib.rc_context(report.STYLE):
        figure = Figure(figsize=(13, 4.4), dpi=120, layout="constrained")
        axes = figure.subplots(1, 3)
        for ax, (_, name) in zip(axes, SHOWN, strict=True):
            for arm, color in ARMS.items():
                for i, curves in enumerate(outcome["seeds"].values()):
                    steps, values = zip(*curves[arm][name], strict=True)
                    ax.plot(steps, values, color=color, marker="o", markersize=3, label=None if i else arm)
            ax.set_xlabel("steps after the warm-up")
            if name == "length":
                ax.set(title="Response length", ylabel="tokens")
            else:
                ax.set(title=f"Held-out accuracy, {name}", ylim=(-0.03, 1.03))
                ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes[0].legend(loc="best")
        partial = path.with_name(".partial.png")
        figure.savefig(partial)
    os.replace(partial, path)


def body() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the runs and their outcome go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="[0 1 2]")
    parser.add_argument("--steps", type=count, metavar="N", help="of each arm [default: the experiment's]")
    parser.add_argument("--until", type=float, metavar="ACCURACY", help="ends the warm-up [default: the experiment's]")
    parser.add_argument("--mesh", metavar="FILE", help="mesh file [default: the experiment's]")
    args = parser.read("steps")
    mesh, text = directory.find_mesh(args.mesh or args.run.mesh, args.experiment)
    warm = {seed: warm_up(args.run, seed, args.until) for seed in args.seeds}
    devices.configure(mesh)
    loop.fits(args.run, mesh)
    outcome = {"experiment": args.experiment.stem, "mesh": mesh.path, "seeds": {}}
    for seed in args.seeds:
        where = args.out / f"seed-{seed}"
        train(warm[seed], mesh, text, where / "warmup", args.experiment)
        curves = outcome["seeds"][str(seed)] = {}
        for arm, run in arms(args.run, warm[seed], where / "warmup", seed):
            curves[arm] = train(run, mesh, text, where / arm, args.experiment)
    directory.write_json(args.out / "controls.json", outcome)
    (args.out / "controls.md").write_text(markdown(outcome))
    draw(outcome, args.out / "controls.png")
    show(outcome, tables(outcome), args.json)


if __name__ == "__main__":
    sys.exit(command.main(body))
