"""Checkpoints by orbax: written behind the run's back, whole or not at all, restored onto any layout."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from rljax.config import from_json, to_json
from rljax.errors import UserError
from rljax.model import lora
from rljax.model.lora import LoRA
from rljax.model.table import LM, abstract, completed, graft, init, is_tensor, join, learned, map_table
from rljax.run.imported import Restored, imported, is_checkpoint
from rljax.run.run import Checkpoints
from rljax.train.master import masters, restored
from rljax.types import TrainState


class Saver:
    """The checkpoints of one phase; the latest and the best by a metric are kept.

    In `where/STEP` lie the learned parameters of each trained role in float32, by its name, the rest of its state in
    `ROLE-state`, and `info`, which says of roles with adapters what these belong to (`bases`).
    """

    def __init__(self, where: Path, settings: Checkpoints):
        kept = [policies.LatestN(settings.keep)]
        best = settings.best
        if best:
            kept.append(policies.BestN(get_metric_fn=lambda metrics: metrics[best], n=1))
        self.where, self.best = where, best
        self.bases: dict[str, dict] = {}  # a `Base` of each role with adapters, as JSON
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
        items = {"info": ocp.args.JsonSave(info | {"moments": moments, "bases": self.bases})}
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


class Base(NamedTuple):
    """What adapters belong to: the parameters that a role started from."""

    lora: LoRA
    heads: tuple[str, ...]
    seed: int  # that fresh parameters were drawn from
    start: str | None  # the directory that the others are from, of a run as seen from that of the run with adapters
    step: int | None
    role: str

    def to_json(self) -> dict:
        return self._asdict() | {"lora": to_json(self.lora)}


def parameters(
    run_dir: Path, model, heads: tuple[str, ...], mesh: jax.sharding.Mesh, zero: int, step: int | None = None,
    role: str = "actor", seed: int = 0,
) -> Restored:  # fmt: skip
    """The parameters of a run's role, at a step or the latest, straight onto a mesh.

    `model.build(heads)` is what they are for: a head or adapters that the checkpoint lacks are fresh, drawn from
    `seed`, and a head that it has besides is left out. Adapters that the model has not are added to the matrices. A run
    that did not train `role` gives its actor.
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
        info = manager.restore(step, args=ocp.args.Composite(info=ocp.args.JsonRestore()))["info"]
        base = info.get("bases", {}).get(role)
        base = base and Base(**base | {"lora": from_json(base["lora"]), "heads": tuple(base["heads"])})
        plain = getattr(model, "lm", model)
        table = _kept(run_dir, where / str(step) / role, plain, base).table
        like = abstract(learned(table), mesh, zero)
        params = manager.restore(step, args=ocp.args.Composite(**{role: ocp.args.StandardRestore(like)}))[role]
    if base:
        params = join(params, _frozen(run_dir, base, plain, table, mesh, zero))
        if getattr(model, "lora", None) is None or unlike(model.lora, base.lora):
            with jax.set_mesh(mesh):
                table, params = lora.base(table), jax.jit(lora.merged)(params)
    params = completed(model.build(heads).table, table, params, mesh, zero, seed)
    return Restored(params, step, info["moments"][role])


def unlike(a: LoRA, b: LoRA) -> bool:
    """Whether adapters of one are none of the other."""
    return replace(a, dropout=0.0) != replace(b, dropout=0.0)


def _frozen(run_dir: Path, base: Base, plain, table, mesh, zero: int):
    """The frozen parameters of a table, from where the run's own were."""
    whole, where = plain.build(base.heads).table, run_dir / (base.start or "")
    if base.start is None:
        with jax.set_mesh(mesh):
            params = jax.jit(lambda: init(whole, jax.random.key(base.seed), zero))()
    elif not where.is_dir():
        raise UserError(f"{run_dir} has but adapters to what {where} holds, which is missing: put it back there")
    elif is_checkpoint(where):
        params = imported(where, plain, base.heads, mesh, zero, base.seed).params
    else:
        params = parameters(where, plain, base.heads, mesh, zero, base.step, base.role, base.seed).params
    return graft(map_table(lambda t: t if t.frozen else None, table), whole, params)


HEADS = ("tokens",), ("value",), ("tokens", "value")  # that a checkpoint may have


def _kept(run_dir: Path, where: Path, model, base: Base | None) -> LM:
    """The model whose learned parameters a checkpoint holds. UserError naming a tensor that no head accounts for."""
    with ocp.StandardCheckpointer() as reader:
        kept = _shapes(reader.metadata(where.absolute()).item_metadata.tree)
    models = [lora.adapted(model.build(heads), base and base.lora) for heads in ([base.heads] if base else HEADS)]
    for lm in models:
        if _shapes(learned(lm.table), is_tensor) == kept:
            return lm
    needed = _shapes(learned(models[0].table), is_tensor)
    name = next(name for name in [*needed, *kept] if kept.get(name) != needed.get(name))
    shape = lambda found: list(found[name]) if name in found else "nothing"
    both = f"{name} is {shape(kept)} there, and {shape(needed)} here"
    raise UserError(f"{run_dir} holds another model: {both}; use its roles.actor.lm")


def _shapes(tree, is_leaf=None) -> dict[str, tuple]:
    name = lambda path: ".".join(str(getattr(step, "name", getattr(step, "key", step))) for step in path)
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {name(path): tuple(x.shape) for path, x in leaves if hasattr(x, "shape")}
