"""Where a role starts from a directory in Hugging Face format: its settings, and its weights straight onto a mesh.

Adapters in PEFT's format are such a directory too: that of the model they belong to, with what they add to it.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.errors import UserError
from rljax.model.lora import adapted, attached, merged
from rljax.model.table import LM, completed
from rljax.weights import config, families, peft
from rljax.weights.load import Progress, load
from rljax.weights.names import Naming
from rljax.weights.source import SafeTensors

HEAD = ("score.weight",)  # what a model to be trained may have, and a checkpoint lack
ROWS = 64  # of an output head that is stored besides its embedding, to be compared


class Restored(NamedTuple):
    """A role as a run left it."""

    params: object
    step: int | None  # of the run
    moments: list[float]  # of the returns that its values are scaled by


def is_checkpoint(target) -> bool:
    """Whether a start or TARGET is in Hugging Face format, rather than the directory of a run."""
    path = Path(target) / "config.json"
    try:
        return peft.is_adapter(target) or "model_type" in json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False


def base_of(directory) -> Path:
    """The directory of the model that adapters belong to, which may lie beside them; that of a model itself."""
    if not peft.is_adapter(directory):
        return Path(directory)
    name = peft.base_name(directory)
    for path in (Path(name), Path(directory) / name):
        if name and not peft.is_adapter(path) and is_checkpoint(path):
            return path
    where = f"{Path(directory) / peft.CONFIG}: base_model_name_or_path={name!r}"
    raise UserError(f"{where} is no directory in Hugging Face format; set it to that of the model, on this machine")


def decoder(directory):
    """The model that a directory's config.json describes. UserError where it is not supported."""
    return families.read(settings(directory))


def settings(directory) -> config.Config:
    base = base_of(directory)
    return config.Config(config.read(base), str(base / "config.json"))


def imported(
    directory, model, heads: tuple[str, ...], mesh: jax.sharding.Mesh, zero: int, seed: int = 0, dtype=jnp.float32,
    progress: Progress | None = None, role: str = "actor",
) -> Restored:  # fmt: skip
    """The parameters of `model.build(heads)`. A value head that the checkpoint lacks is fresh, drawn from `seed`.

    `dtype` None keeps matrices as narrow as they are stored.
    UserError, before anything is allocated, where config.json or the tensors are those of another model.
    """
    c = settings(directory)
    found, lm = families.read(c), model.build(heads)
    differs = [f.name for f in fields(found) if _of(found, f.name) != _of(model, f.name)]
    if differs:
        name = differs[0]
        here = f"roles.{role}.lm.{name}={_of(model, name)!r}"
        raise UserError(f"{here}, but {c.where} says {_of(found, name)!r}: use the model that it describes")
    source, naming = SafeTensors(base_of(directory)), families.family(c).naming(found)
    if found.tied:
        _one_head(source)
    add = _adding(directory, lm, naming, mesh, zero) if peft.is_adapter(directory) else lambda loaded: loaded.params
    dtype = _stored(source) if dtype is None else dtype
    loaded = load(lm.table, source, naming, mesh, zero, dtype, optional=HEAD, progress=progress)
    return Restored(completed(lm.table, loaded.table, add(loaded), mesh, zero, seed), None, [0.0, 0.0, 0.0])


def _stored(source: SafeTensors):
    """The dtype of matrices that all have one of 16 bits, as a function of Tensors; else float32."""
    kinds = {entry.dtype for entry in source.tensors.values() if len(entry.shape) > 1}
    narrow = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    return lambda t: narrow if t.matrix and narrow.itemsize == 2 else np.float32


def _one_head(source: SafeTensors) -> None:
    """UserError where an output head is stored besides the embedding that it is said to be, and is another one: by some
    of its rows, since every process would have to read both."""
    names = "model.embed_tokens.weight", "lm_head.weight"
    if not {*names} <= {*source.tensors}:
        return
    vocab = source.tensors[names[1]].shape[0]
    for row in range(0, vocab, max(1, vocab // ROWS)):
        if not np.array_equal(*(source.read(name, (slice(row, row + 1), slice(None))) for name in names)):
            rule = "config.json says tie_word_embeddings=true; set it to false, or remove the head"
            raise UserError(f"{source.path}: row {row} of lm_head.weight is not that of the embedding, but {rule}")


def _adding(directory, lm: LM, naming: Naming, mesh: jax.sharding.Mesh, zero: int):
    """What makes of a loaded model its parameters with adapters added. These are read first, so that they are refused
    before the model is allocated."""
    settings = peft.read_adapter(directory)
    try:
        table = adapted(lm, settings).table
    except ValueError as error:
        raise UserError(f"{Path(directory) / peft.CONFIG}: {error}") from None
    own = peft.load_adapter(table, directory, naming, mesh, zero).params

    def add(loaded):
        there = adapted(lm._replace(table=loaded.table), settings).table
        with jax.set_mesh(mesh):
            return jax.jit(lambda base, own: merged(attached(there, base, own)), donate_argnums=0)(loaded.params, own)

    return add


def _of(model, name: str):
    """A setting that checkpoints have, or None of what is no decoder."""
    return getattr(families.essence(model), name) if hasattr(model, "vocab") else None
