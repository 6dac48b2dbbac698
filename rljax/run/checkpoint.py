"""Checkpoints by orbax: written behind the run's back, whole or not at all, restored onto any layout."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from rljax.errors import UserError
from rljax.model.table import LM, abstract, is_tensor
from rljax.run.run import Checkpoints
from rljax.types import TrainState


class Saver:
    """The checkpoints of one phase, `where/STEP/{params,rest,info}`; the latest and the best by a metric are kept."""

    def __init__(self, where: Path, settings: Checkpoints):
        kept = [policies.LatestN(settings.keep)]
        best = settings.best
        if best:
            kept.append(policies.BestN(get_metric_fn=lambda metrics: metrics[best], n=1))
        self.where, self.best = where, best
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
        with self.written():
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
        with self.written():
            self.manager.wait_until_finished()

    def close(self) -> None:
        with self.written():
            self.manager.close()

    @contextmanager
    def written(self) -> Iterator[None]:
        """What keeps a checkpoint from being written, such as a full disk, is the user's to mend, here or behind."""
        try:
            yield
        except (OSError, ValueError) as error:
            cause = re.search(r"[^:]*(?= \[os_error_code)", str(error))
            reason = getattr(error, "strerror", None) or (cause[0].strip() if cause else str(error)[:200])
            rule = "mend that, then --resume"
            raise UserError(f"{self.where}: a checkpoint could not be written: {reason}; {rule}") from error


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
        _same_tensors(run_dir, where / str(step) / "params", lm)
        items = ocp.args.Composite(params=ocp.args.StandardRestore(abstract(lm.table, mesh, zero)))
        return manager.restore(step, args=items)["params"], step


def _same_tensors(run_dir: Path, where: Path, lm: LM) -> None:
    """UserError naming the first tensor that a checkpoint holds in another shape than a model's, or not at all."""

    def shapes(tree, is_leaf=None) -> dict[str, tuple]:
        name = lambda path: ".".join(str(getattr(step, "name", getattr(step, "key", step))) for step in path)
        leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
        return {name(path): tuple(x.shape) for path, x in leaves if hasattr(x, "shape")}

    with ocp.StandardCheckpointer() as reader:
        kept = shapes(reader.metadata(where.absolute()).item_metadata.tree)
    needed = shapes(lm.table, is_tensor)
    for name in [*needed, *kept]:
        if kept.get(name) != needed.get(name):
            shape = lambda found: list(found[name]) if name in found else "nothing"
            both = f"{name} is {shape(kept)} there, and {shape(needed)} here"
            raise UserError(f"{run_dir} holds another model: {both}; use its roles.actor.lm")
