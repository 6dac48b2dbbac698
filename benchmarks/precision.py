"""What narrower numbers change: a checkpoint's log-probabilities by how it is held, and a training by its moments.

    python benchmarks/precision.py weights DIRECTORY [--text FILE] [--rows 8] [--tokens 256] [--json]
    python benchmarks/precision.py moments [EXPERIMENT] [--steps 100] [--json] [FIELD=VALUE ...]

`weights` scores text (the README, unless a file is given) with a model in Hugging Face format, its matrices held in
each precision that a frozen role may have, and compares with float32: the mean and the largest absolute difference of a
token's log-probability, the difference of their means, and the bytes that a parameter takes. Matrices are multiplied in
float32 and, in the second half of the table, in bfloat16.

`moments` takes the first updates of the run that an experiment's actor starts from, or of the experiment itself if it
is supervised, on one device, with AdamW's moments in float32 and in bfloat16, and compares parameters (the norm of the
difference over that of what float32 learned) and the loss of the last ten updates. "b1=0.899" is a control: a change of
the optimizer that nobody would call one.
"""

import sys
from dataclasses import replace
from pathlib import Path

import command
import jax
import numpy as np
from command import Parser, count, show, table

from rljax.data.pretrained import Pretrained
from rljax.data.rows import continued, lay
from rljax.errors import UserError
from rljax.mesh import Layout, Placement
from rljax.mesh.file import load as load_mesh
from rljax.model.quantize import FROZEN
from rljax.plan import parts
from rljax.run.place import Place
from rljax.run.roles import frozen
from rljax.run.run import Fresh, Run
from rljax.run.stages import build
from rljax.weights import config, families
from rljax.weights.load import load
from rljax.weights.source import SafeTensors

LAST = 10  # updates whose loss is averaged


def weights(directory: Path, text: Path, rows: int, tokens: int) -> list[dict]:
    """Of each precision, how far log-probabilities of pieces of the text are from those in float32."""
    said = config.Config(config.read(directory))
    m, place = families.read(said), Place(Layout().mesh(), Placement(layout=Layout()), 1)
    ids = Pretrained(str(directory), chat=False).encode(text.read_text("utf-8"))
    if len(ids) < rows * tokens:
        raise UserError(f"{text} has {len(ids)} tokens: --rows {rows} of --tokens {tokens} need more")
    pieces = np.array(ids[: rows * tokens]).reshape(rows, tokens).tolist()
    rollout = lay([(continued(piece[:1], piece[1:]),) for piece in pieces], tokens)
    table = m.build().table
    naming = families.family(said).naming(m)
    params = load(table, SafeTensors(directory), naming, place.mesh, 3, np.float32).params
    found, exact = [], None
    for compute in ("float32", "bfloat16"):
        lm = replace(m, compute=compute).build()
        for held in FROZEN:
            judge = frozen(lm, place, lambda logits, target: logits, held)
            logp = judge.score(judge.hold(params), rollout).logp[rollout.mask]
            exact = logp if exact is None else exact
            gap = logp - exact
            found.append({
                "held": held, "multiplied": compute,
                "bytes": parts.frozen(table, place.placement.layout, 3, held) / parts.parameters(m).total,
                "mean": float(np.abs(gap).mean()), "max": float(np.abs(gap).max()), "shift": float(gap.mean()),
                "logp": float(logp.mean()), "tokens": int(gap.size),
            })  # fmt: skip
    return found


def moments(run: Run, steps: int) -> list[dict]:
    """Of each optimizer, the loss it comes to and how far its parameters are from those of moments in float32."""
    start = run.roles["actor"].start
    run = start if isinstance(start, Run) else run
    if run.objective.advantage is not None or not isinstance(run.roles["actor"].start, Fresh):
        raise UserError(
            "moments are compared on a supervised run from fresh weights: neither this nor its start is one"
        )
    mesh, role = load_mesh(command.ROOT / "meshes" / "one.toml"), run.roles["actor"]
    found, learned = [], None
    for name, fields in ("float32", {}), ("bfloat16", {"moments": "bfloat16"}), ("float32, b1=0.899", {"b1": 0.899}):
        optimizer = replace(role.optimizer, **fields)
        own = replace(run, steps=max(steps, run.steps), roles={"actor": replace(role, optimizer=optimizer)})
        stages = build(own, mesh)
        states, frozen = stages.fresh(own.seed)
        first = jax.device_get(states["actor"].params)
        schedule = own.schedule(own, stages, states, frozen, 1, lambda stage: None)
        losses, last = [], first
        for _, (after, metrics, _) in zip(range(steps), schedule):
            losses.append(float(metrics["loss"]))
            last = after["actor"].params
        last = jax.device_get(last)
        apart = lambda a, b: np.sqrt(sum(np.sum((x - y) ** 2) for x, y in zip(*map(jax.tree.leaves, (a, b)))))
        learned = last if learned is None else learned
        found.append({
            "moments": name, "loss": float(np.mean(losses[-LAST:])),
            "difference": float(apart(last, learned) / apart(learned, first)),
        })  # fmt: skip
    return found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--text", type=Path, default=command.ROOT / "README.md")
    for name, default in ("rows", 8), ("tokens", 256), ("steps", 100):
        parser.add_argument(f"--{name}", type=count, default=default)
    what, *rest = sys.argv[1:] or [""]
    if what not in ("weights", "moments"):
        raise UserError(f"{what or 'nothing'}: compare weights or moments")
    if what == "weights":
        args = parser.parse_intermixed_args(rest)
        if len(args.words) != 1:
            raise UserError("weights DIRECTORY: give one directory in Hugging Face format")
        found = weights(Path(args.words[0]), args.text, args.rows, args.tokens)
        shown = table("held", "multiplied in", "bytes/parameter", "mean |Δ|", "max |Δ|", "mean Δ")
        for row in found:
            numbers = (f"{row['bytes']:.3f}", f"{row['mean']:.4f}", f"{row['max']:.3f}", f"{row['shift']:+.4f}")
            shown.add_row(row["held"], row["multiplied"], *numbers)
    else:
        sys.argv[1:] = rest
        args = parser.read()
        found = moments(args.run, args.steps)
        shown = table("moments", f"loss, last {LAST} of {args.steps}", "difference of parameters")
        for row in found:
            shown.add_row(row["moments"], f"{row['loss']:.4f}", f"{row['difference']:.4f}")
    show({what: found}, [shown], args.json)


if __name__ == "__main__":
    sys.exit(command.main(main))
