"""Checkpoints by orbax: written behind the run's back, whole or not at all, restored onto any layout."""

import math
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from orbax.checkpoint import checkpoint_managers as policies

from rljax.errors import UserError
from rljax.model.table import LM, abstract
from rljax.run.run import Checkpoints
from rljax.types import TrainState


class Saver:
    """The checkpoints of one phase, `where/STEP/{params,rest,info}`; the latest and the best by a metric are kept."""

    def __init__(self, where: Path, settings: Checkpoints):
        kept = [policies.LatestN(settings.keep)]
        best = settings.best
        if best:
            kept.append(policies.BestN(get_metric_fn=lambda metrics: metrics[best], n=1))
        self.best = best
        self.manager = ocp.CheckpointManager(
            where.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(kept),
                best_fn=(lambda metrics: metrics[best]) if best else None,
                enable_async_checkpointing=True,
            ),
        )

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState, info: dict, metrics: dict) -> None:
        """Copies the state off its devices, then writes in the background."""
        if step in self.manager.all_steps():
            return
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            rest=ocp.args.StandardSave((state.step, state.skipped, state.optimizer)),
            info=ocp.args.JsonSave(info),
        )
        score = metrics.get(self.best, math.nan)
        score = score if math.isfinite(score) else -math.inf  # not measured here: no order is defined with NaN
        self.manager.save(step, args=items, metrics={self.best: score} if self.best else None)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict]:
        """The state at a step, placed like `like`, and its info."""
        found = self.manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(like.params),
                rest=ocp.args.StandardRestore((like.step, like.skipped, like.optimizer)),
                info=ocp.args.JsonRestore(),
            ),
        )
        at, skipped, optimizer = found["rest"]
        return TrainState(at, skipped, found["params"], optimizer), found["info"]

    def finish(self) -> None:
        """Waits for what is being written; an error of a background write surfaces here."""
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.manager.close()


def parameters(run_dir: Path, lm: LM, mesh: jax.sharding.Mesh, zero: int, step: int | None = None):
    """(the actor's parameters of a run, the step they are from), straight onto a mesh; default the latest."""
    where = run_dir / "checkpoints"
    if not where.is_dir():
        raise UserError(f"{run_dir} has no checkpoint yet")
    with ocp.CheckpointManager(where.absolute(), options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        steps = manager.all_steps()
        if not steps:
            raise UserError(f"{run_dir} has no checkpoint yet")
        if step is not None and step not in steps:
            raise UserError(f"--step {step}: {run_dir} keeps checkpoints of steps {', '.join(map(str, sorted(steps)))}")
        step = max(steps) if step is None else step
        items = ocp.args.Composite(params=ocp.args.StandardRestore(abstract(lm.table, mesh, zero)))
        return manager.restore(step, args=items)["params"], step


def placed(state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """A traced state's shapes with shardings on real devices: what `restore` is to fill."""
    where = lambda x: NamedSharding(mesh, x.sharding.spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)), state)
