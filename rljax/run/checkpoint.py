"""Checkpoints by orbax: written behind the run's back, whole or not at all, restored onto any layout."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from rljax.errors import UserError
from rljax.model.table import LM, abstract, completed, is_tensor
from rljax.run.run import Checkpoints
from rljax.train.master import masters, restored
from rljax.types import TrainState


class Saver:
    """The checkpoints of one phase; the latest and the best by a metric are kept.

    In `where/STEP` lie the float32 parameters of each trained role, by its name, the rest of its state in `ROLE-state`,
    and `info`.
    """

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

    def save(self, step: int, states: dict[str, TrainState], info: dict, metrics: dict) -> None:
        """Copies the states off their devices, then writes in the background."""
        if step in self.manager.all_steps():
            return
        moments = {role: jax.device_get(state.moments).tolist() for role, state in states.items()}
        items = {"info": ocp.args.JsonSave(info | {"moments": moments})}
        for role, state in states.items():
            items[role] = ocp.args.StandardSave(masters(state))
            items[f"{role}-state"] = ocp.args.StandardSave(_rest(state))
        score = metrics.get(self.best, math.nan)
        score = score if math.isfinite(score) else -math.inf  # not measured here: no order is defined with NaN
        with self.written():
            metrics = {self.best: score} if self.best else None
            self.manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)

    def restore(self, step: int, like: dict[str, TrainState]) -> tuple[dict[str, TrainState], dict]:
        """The states at a step, placed like `like`, and their info."""
        items = {"info": ocp.args.JsonRestore()}
        for role, state in like.items():
            items[role] = ocp.args.StandardRestore(masters(state))
            items[f"{role}-state"] = ocp.args.StandardRestore(_rest(state))
        found = self.manager.restore(step, args=ocp.args.Composite(**items))
        return {role: restored(found[f"{role}-state"], found[role], like[role]) for role in like}, found["info"]

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


def _rest(state: TrainState) -> TrainState:
    return state.replace(params=None, master=None)


class Restored(NamedTuple):
    """A role as a run left it."""

    params: object
    step: int | None  # of the run
    moments: list[float]  # of the returns that its values are scaled by


def parameters(
    run_dir: Path, model, heads: tuple[str, ...], mesh: jax.sharding.Mesh, zero: int, step: int | None = None,
    role: str = "actor", seed: int = 0,
) -> Restored:  # fmt: skip
    """The parameters of a run's role, at a step or the latest, straight onto a mesh.

    `model.build(heads)` is what they are for: a head that the checkpoint lacks is fresh, drawn from `seed`, and one
    that it has besides is left out. A run that did not train `role` gives its actor.
    """
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
        role = role if (where / str(step) / role).is_dir() else "actor"
        kept = _kept(run_dir, where / str(step) / role, model)
        items = {role: ocp.args.StandardRestore(abstract(kept.table, mesh, zero)), "info": ocp.args.JsonRestore()}
        found = manager.restore(step, args=ocp.args.Composite(**items))
    params = completed(model.build(heads).table, kept.table, found[role], mesh, zero, seed)
    return Restored(params, step, found["info"]["moments"][role])


HEADS = ("tokens",), ("value",), ("tokens", "value")  # that a checkpoint may have


def _kept(run_dir: Path, where: Path, model) -> LM:
    """The model that a checkpoint holds. UserError naming the first tensor that no head accounts for."""
    with ocp.StandardCheckpointer() as reader:
        kept = _shapes(reader.metadata(where.absolute()).item_metadata.tree)
    models = [model.build(heads) for heads in HEADS]
    for lm in models:
        if _shapes(lm.table, is_tensor) == kept:
            return lm
    needed = _shapes(models[0].table, is_tensor)
    name = next(name for name in [*needed, *kept] if kept.get(name) != needed.get(name))
    shape = lambda found: list(found[name]) if name in found else "nothing"
    both = f"{name} is {shape(kept)} there, and {shape(needed)} here"
    raise UserError(f"{run_dir} holds another model: {both}; use its roles.actor.lm")


def _shapes(tree, is_leaf=None) -> dict[str, tuple]:
    name = lambda path: ".".join(str(getattr(step, "name", getattr(step, "key", step))) for step in path)
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {name(path): tuple(x.shape) for path, x in leaves if hasattr(x, "shape")}
