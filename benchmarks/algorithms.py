"""Online algorithms side by side: from the same warm-up, on the same task, at the same learning rate.

    python benchmarks/algorithms.py [EXPERIMENT] --out DIR [--only NAME ...] [--seeds 0 1 2] [--steps N] [--mesh FILE]
                                    [--json] [FIELD=VALUE ...]

For any experiment that starts from a warm-up and has a verifier. Every algorithm has its paper's coefficients and the
experiment's optimizer, so what differs is the algorithm and not its tuning: none is at its best. Losses without a ratio
(rloo, remax) make one update a step, as their papers do, others the experiment's. VAPO's critic is trained alone first.
"shuffled" is GRPO whose advantages are dealt at random, a control. Each is a whole run, in DIR/seed-S/NAME;
DIR/algorithms.{json,md,png} tell the outcome: held-out accuracy by step and by tokens trained. Started again with the
same DIR, it continues what was interrupted and keeps what is done. The quickstart's take about a minute a run.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import command
import controls
import matplotlib
import numpy as np
from command import Parser, count, show, table
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from rljax.assess.advantages import Shuffled
from rljax.errors import UserError, nearest
from rljax.run import devices, directory, loop, report
from rljax.run.metrics import read
from rljax.run.run import Checkpoints, Resample, Role, Run, Shared
from rljax.train import algorithms as field
from rljax.train.losses import PolicyGradient
from rljax.train.objectives import Objective

SHOWN = (("eval/exact_match", "sampled"), ("eval/exact_match_greedy", "greedy"))
PRETRAINING = 20  # steps of VAPO's critic alone


def objectives(run: Run) -> dict[str, Objective]:
    """Without KL to a reference, which the warm-up of a small task is not worth."""
    return {
        "ppo": field.ppo(kl_in_reward=0.0),
        "ppo, shared critic": field.ppo(kl_in_reward=0.0),
        "vapo": field.vapo(),
        "grpo": field.grpo(),
        "grpo, sequence means": field.deepseek_grpo(kl=0.0),
        "dr. grpo": field.dr_grpo(run.max_new),
        "dapo": field.dapo(),
        "gspo": field.gspo(),
        "cispo": field.cispo(),
        "rloo": field.rloo(kl_in_reward=0.0),
        "reinforce++": field.reinforce_plus_plus(kl_in_reward=0.0),
        "reinforce++-baseline": field.reinforce_plus_plus_baseline(kl=0.0),
        "remax": field.remax(kl_in_reward=0.0),
        "opo": field.opo(),
        "gdpo": field.gdpo((1.0,) * len(run.rewards)),
        "sapo": field.sapo(),
        "gmpo": field.gmpo(),
        "decoupled ppo": field.decoupled_ppo(),
        "shuffled": replace(field.grpo(), advantage=Shuffled(field.grpo().advantage)),
    }


def arm(run: Run, name: str, start: Path, seed: int) -> Run:
    """The run of one algorithm. A critic of its own learns from the actor's backbone, three times as fast."""
    objective = objectives(run)[name]
    actor = replace(run.roles["actor"], start=str(start))
    roles, made = {"actor": actor}, dict(checkpoints=Checkpoints(every=0))
    if objective.critic:
        critic = Role(actor.lm, optimizer=replace(actor.optimizer, lr=3 * actor.optimizer.lr))
        if name == "vapo":
            alone = field.value_pretraining(PRETRAINING)
            before = replace(
                run, roles=roles | {"critic": critic}, objective=alone, steps=PRETRAINING,
                evaluation=replace(run.evaluation, every=0), **made,
            )  # fmt: skip
            critic = replace(critic, start=before)
        elif name == "ppo":
            objective = replace(objective, critic=replace(objective.critic, warmup=3))
        roles["critic"] = Shared() if name.endswith("shared critic") else critic
    return replace(
        run, seed=seed, roles=roles, objective=objective, resample=Resample() if name == "dapo" else None,
        minibatches=1 if isinstance(objective.loss, PolicyGradient) else run.minibatches, **made,
    )  # fmt: skip


def train(run: Run, mesh, text: str, where: Path, experiment: Path) -> dict:
    """[step, tokens trained so far, accuracy] by what is shown."""
    curves = controls.train(run, mesh, text, where, experiment)
    steps = [row for row in read(where / "metrics.jsonl") if row["phase"] == "train"]
    tokens = dict(zip([0, *(row["step"] for row in steps)], np.cumsum([0, *(row.get("tokens", 0.0) for row in steps)])))
    return {name: [[step, float(tokens[step]), value] for step, value in curves[name]] for _, name in SHOWN}


def columns(outcome: dict) -> list[str]:
    """Sampled accuracy by step, and what it ends with."""
    curves = next(iter(outcome["seeds"].values()))[outcome["algorithms"][0]]["sampled"]
    return ["algorithm", *(f"step {step}" for step, *_ in curves), "range", "greedy", "range", "tokens, k"]


def rows(outcome: dict) -> Iterator[list[str]]:
    """Means over seeds, the best first, with the range of what they end with."""
    ends = lambda name, curve, at: [seed[name][curve][at] for seed in outcome["seeds"].values()]
    mean = lambda *where: float(np.mean([point[-1] for point in ends(*where)]))
    span = lambda values: f"{min(values):.2f}-{max(values):.2f}"
    for name in sorted(outcome["algorithms"], key=lambda name: -mean(name, "sampled", -1)):
        points = range(len(next(iter(outcome["seeds"].values()))[name]["sampled"]))
        cells = [f"{mean(name, 'sampled', at):.3f}" for at in points]
        last = {curve: [point[-1] for point in ends(name, curve, -1)] for _, curve in SHOWN}
        tokens = np.mean([point[1] for point in ends(name, "sampled", -1)]) / 1e3
        greedy = f"{mean(name, 'greedy', -1):.3f}", span(last["greedy"])
        yield [name, *cells, span(last["sampled"]), *greedy, f"{tokens:.0f}"]


def markdown(outcome: dict) -> str:
    head = columns(outcome)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows(outcome)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw(outcome: dict, path: Path) -> None:
    """A small picture for each algorithm, GRPO behind it: sampled accuracy over tokens, a line for each seed."""
    names = [cells[0] for cells in rows(outcome)]
    across = 5
    with matplotlib.rc_context(report.STYLE):
        figure = Figure(figsize=(13, 2.5 * -(-len(names) // across)), dpi=120, layout="constrained")
        axes = figure.subplots(-(-len(names) // across), across, sharex="row", sharey=True, squeeze=False).flat
        for name, ax in zip(names, axes):  # names first: one more axis would be taken, and left
            shades = [("grpo", report.GRAY), (name, report.ORANGE if name == "shuffled" else report.BLUE)]
            for other, color in [shade for shade in shades if shade[0] in outcome["algorithms"]]:
                for seed in outcome["seeds"].values():
                    _, tokens, values = zip(*seed[other]["sampled"], strict=True)
                    ax.plot(np.array(tokens) / 1e3, values, color=color, linewidth=1.2)
            ax.set(title=name, ylim=(-0.03, 1.03))
            ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        for ax in list(axes):
            ax.set_axis_off()
        figure.supxlabel("thousand tokens trained, after the warm-up (gray: grpo)")
        figure.supylabel("held-out accuracy, sampled")
        partial = path.with_name(".partial.png")
        figure.savefig(partial)
    os.replace(partial, path)


def body() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the runs and their outcome go")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the algorithms [all]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="[0 1 2]")
    parser.add_argument("--steps", type=count, metavar="N", help="of each run [default: the experiment's]")
    parser.add_argument("--mesh", metavar="FILE", help="mesh file [default: the experiment's]")
    args = parser.read("steps")
    known = objectives(args.run)
    names = args.only or list(known)
    if wrong := [name for name in names if name not in known]:
        raise UserError(f"--only {wrong[0]}: no such algorithm; {nearest(wrong[0], known)}")
    mesh, text = directory.find_mesh(args.mesh or args.run.mesh, args.experiment)
    warm = {seed: controls.warm_up(args.run, seed, None) for seed in args.seeds}
    devices.configure(mesh)
    loop.fits(args.run, mesh)
    outcome = {"experiment": args.experiment.stem, "mesh": mesh.path, "algorithms": names, "seeds": {}}
    for seed in args.seeds:
        where = args.out / f"seed-{seed}"
        controls.train(warm[seed], mesh, text, where / "warmup", args.experiment)
        curves = outcome["seeds"][str(seed)] = {}
        for name in names:
            run = arm(args.run, name, where / "warmup", seed)
            curves[name] = train(run, mesh, text, where / name.replace(" ", "-").replace(",", ""), args.experiment)
    directory.write_json(args.out / "algorithms.json", outcome)
    (args.out / "algorithms.md").write_text(markdown(outcome))
    draw(outcome, args.out / "algorithms.png")
    shown = table(*columns(outcome))
    for cells in rows(outcome):
        shown.add_row(*cells)
    title = f"{args.experiment.stem} on {mesh.path}: held-out accuracy, mean of {len(args.seeds)} seeds (range)"
    show(outcome, [title, shown], args.json)


if __name__ == "__main__":
    sys.exit(command.main(body))
