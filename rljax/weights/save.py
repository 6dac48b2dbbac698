"""From a mesh into the safetensors files of a Hugging Face directory, one stored tensor after another."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from rljax.errors import UserError
from rljax.mesh import spec_of
from rljax.model.table import Tensor, is_tensor
from rljax.weights.load import Progress, copy, dtypes
from rljax.weights.names import Naming, Piece, stored
from rljax.weights.source import CODES, INDEX, SINGLE, Entry

RANK = {dtype: rank for rank, dtype in enumerate(CODES)}


class Saved(NamedTuple):
    """What `save` wrote."""

    files: tuple[str, ...]
    bytes: int  # of tensors
    staging_bytes: int  # of the largest stored tensor, which is put together on the host one at a time


def save(
    table, params, naming: Naming, directory, dtype,
    shard_bytes: int = 5 * 10**9, progress: Progress | None = None, single: str = SINGLE, beside: dict | None = None,
) -> Saved:  # fmt: skip
    """Writes the parameters of a table: model.safetensors (or `single`) or, of more than `shard_bytes`, several files
    and an index; and texts `beside` them, by the names of their files.

    `dtype` is one, or a function of Tensors. A layer or an expert at a time comes from the devices, each giving what it
    has of it. UserError where weights are there already or cannot be written, in which case no file is left, and where
    other processes have a part of them.
    """
    dtype, sources = dtypes(dtype), {}
    for t, x in zip(jax.tree.leaves(table, is_leaf=is_tensor), jax.tree.leaves(params), strict=True):
        if x.shape != t.shape:
            raise ValueError(f"{t.name} has shape {x.shape}, and {t.shape} in the table")
        if not x.is_fully_addressable:
            raise UserError(f"{t.name} lies on devices of other processes too; restore the run in one, and save there")
        sources[t] = x
    parts = stored(table, naming)
    entries = {name: Entry(parts[name][0][1].shape, dtype(parts[name][0][0])) for name in sorted(parts, key=_numbered)}
    size = {name: prod(entry.shape) * entry.dtype.itemsize for name, entry in entries.items()}
    files, done, total = _files(size, shard_bytes, single), 0, sum(size.values())
    with _whole(Path(directory)) as create:
        for file, text in (beside or {}).items():
            with create(file) as out:
                out.write(text.encode())
        for file, names in files.items():
            # The library's order: of falling alignment, so that numbers are aligned, then by name.
            names = sorted(names, key=lambda name: (-RANK[entries[name].dtype], name))
            with create(file) as out:
                out.write(header({name: entries[name] for name in names}))
                for name in names:
                    out.write(_assembled(entries[name], parts[name], sources).reshape(-1).view(np.uint8).data)
                    done += size[name]
                    if progress:
                        progress(done, total)
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            with create(INDEX) as out:
                out.write((json.dumps(index, indent=2) + "\n").encode())
    return Saved((*files,), total, max(size.values()))


def header(entries: dict[str, Entry]) -> bytes:
    """What a file begins with, before the numbers of these tensors in this order."""
    listed, begin = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, dtype) in entries.items():
        end = begin + prod(shape) * dtype.itemsize
        listed[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that what follows is aligned
    return len(text).to_bytes(8, "little") + text


def _numbered(name: str) -> list:
    """Sorts by layers and experts as numbers: what is computed together lies together."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _files(size: dict[str, int], most: int, single: str) -> dict[str, list[str]]:
    """File -> names of its tensors: as many as it takes, in their order, or one that is larger than a file may be."""
    groups, room = [], 0
    for name, bytes in size.items():
        if not groups or bytes > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= bytes
    number = lambda i: f"model-{i:05}-of-{len(groups):05}.safetensors"
    return {number(i): names for i, names in enumerate(groups, 1)} if len(groups) > 1 else {single: groups[0]}


def _assembled(entry: Entry, parts: list[tuple[Tensor, Piece]], sources: dict[Tensor, jax.Array]) -> np.ndarray:
    """A stored tensor, from the shards that have something of it."""
    out = np.empty(*entry)
    for t, piece in parts:
        for index, numbers in _shards(sources[t], piece.at):
            numbers = piece.turn(numbers)
            for mine, theirs in piece.windows(index):
                copy(out[theirs], numbers[mine])
    return out


def _shards(x: jax.Array, at: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """The different shards of what is at `at` of the stacked dimensions of x, each with where it is in that."""
    stacked, blocks = len(at), x.sharding.shard_shape(x.shape)
    with jax.set_mesh(x.sharding.mesh):
        layer = _layer(x, tuple(np.int32(i % n) for i, n in zip(at, blocks))) if at else x
    mine = [i // n for i, n in zip(at, blocks)]
    seen = set()
    for shard in layer.addressable_shards:
        cut = [s.indices(n)[:2] for s, n in zip(shard.index, layer.shape)]
        if [start for start, _ in cut[:stacked]] == mine and str(cut) not in seen:
            seen.add(str(cut))
            yield tuple(slice(*ends) for ends in cut[stacked:]), np.asarray(shard.data)[(0,) * stacked]


@jax.jit
def _layer(x, at: tuple):
    """What each device has at `at` of its own layers and experts, of which it has one then. Nothing is sent."""

    def body(x, at):
        stacked, rest = len(at), x.shape[len(at) :]
        return lax.dynamic_slice(x, (*at, *(0,) * len(rest)), (1,) * stacked + rest)

    return jax.shard_map(body, out_specs=spec_of(x))(x, at)


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A directory under another name, which takes its own once it is whole and on the disk, and is gone otherwise."""
    partial = directory.with_name(f".{directory.name}.{token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        yield partial
        for each in partial.iterdir():
            with each.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(directory)
    finally:
        rmtree(partial, ignore_errors=True)


@contextmanager
def _whole(directory: Path) -> Iterator[Callable[[str], Any]]:
    """Gives what opens a file in the directory by its name. All get their names at the end, or none is there."""
    made: dict[Path, Path] = {}

    def create(name: str):
        made[directory / name] = directory / f".{name}.partial"
        return open(directory / f".{name}.partial", "wb")

    try:
        directory.mkdir(parents=True, exist_ok=True)
        if held := sorted(path.name for path in directory.glob("*.safetensors*")):
            raise UserError(f"{directory} has {held[0]} already; choose another directory, or remove what is there")
        yield create
        for partial in made.values():
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        for path, partial in made.items():
            partial.replace(path)
    except OSError as error:
        raise UserError(f"{directory}: weights cannot be written: {error.strerror}; mend that and repeat") from error
    finally:
        for partial in made.values():
            partial.unlink(missing_ok=True)
