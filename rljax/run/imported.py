"""Where a role starts from a directory in Hugging Face format: its settings, and its weights straight onto a mesh."""

import json
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.errors import UserError
from rljax.model.table import completed
from rljax.weights import config, families
from rljax.weights.load import Progress, load
from rljax.weights.source import SafeTensors

HEAD = ("score.weight",)  # what a model to be trained may have, and a checkpoint lack


class Restored(NamedTuple):
    """A role as a run left it."""

    params: object
    step: int | None  # of the run
    moments: list[float]  # of the returns that its values are scaled by


def is_checkpoint(target) -> bool:
    """Whether a start or TARGET is in Hugging Face format, rather than the directory of a run."""
    path = Path(target) / "config.json"
    try:
        return "model_type" in json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False


def decoder(directory):
    """The model that a directory's config.json describes. UserError where it is not supported."""
    return families.read(settings(directory))


def settings(directory) -> config.Config:
    return config.Config(config.read(Path(directory)), str(Path(directory) / "config.json"))


def imported(
    directory, model, heads: tuple[str, ...], mesh: jax.sharding.Mesh, zero: int, seed: int = 0, dtype=jnp.float32,
    progress: Progress | None = None, role: str = "actor",
) -> Restored:  # fmt: skip
    """The parameters of `model.build(heads)`. A value head that the checkpoint lacks is fresh, drawn from `seed`.

    UserError, before anything is allocated, where config.json or the tensors are those of another model.
    """
    c = settings(directory)
    found, lm = families.read(c), model.build(heads)
    differs = [f.name for f in fields(found) if _of(found, f.name) != _of(model, f.name)]
    if differs:
        name = differs[0]
        here = f"roles.{role}.lm.{name}={_of(model, name)!r}"
        raise UserError(f"{here}, but {c.where} says {_of(found, name)!r}: use the model that it describes")
    source, naming = SafeTensors(directory), families.family(c).naming(found)
    loaded = load(lm.table, source, naming, mesh, zero, dtype, optional=HEAD, progress=progress)
    return Restored(completed(lm.table, loaded.table, loaded.params, mesh, zero, seed), None, [0.0, 0.0, 0.0])


def _of(model, name: str):
    """A setting that checkpoints have, or None of what is no decoder."""
    return getattr(families.essence(model), name) if hasattr(model, "vocab") else None
