"""From a checkpoint straight onto a mesh: every device's shard is put together from the slices that it consists of.

No tensor is ever whole on the host, and what several devices hold is read once.
"""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.errors import UserError
from rljax.model.table import Tensor, is_tensor, map_table, shardings
from rljax.weights.names import Naming, Piece, pieces, stored
from rljax.weights.source import Source

# What a checkpoint may have besides the table: angular frequencies, which older ones stored and settings say; and heads
# that the caller does not ask for. A tied model's output head is its embedding, and may be stored twice.
IGNORED = ("*.rotary_emb.inv_freq", "lm_head.weight", "score.weight")
QUANTIZED = ("*_scale_inv", "*.weight_scale", "*.qweight", "*.qzeros", "*.weight_packed", "*.absmax", "*_blocks")
SHOWN = 4  # kinds of names that an error lists
ROWS = 64  # that are copied at a time: transposing more at once misses the cache, and took three times as long

Cut = tuple[tuple[int, int], ...]  # start and stop in every dimension
Progress = Callable[[int, int], Any]  # told the bytes done, of how many


class Loaded(NamedTuple):
    """What `load` made. `model.table.graft` joins it with fresh values for what was missing."""

    params: Any  # as the table, with None for an optional tensor that the checkpoint lacks
    table: Any  # of these parameters
    ignored: tuple[str, ...]  # stored tensors that were left out
    read_bytes: int  # of the files
    staging_bytes: int  # of the largest shard put together on the host, one at a time


def load(
    table, source: Source, naming: Naming, mesh: jax.sharding.Mesh, zero: int, dtype,
    optional: tuple[str, ...] = (), progress: Progress | None = None,
) -> Loaded:  # fmt: skip
    """The parameters of a table, placed by `model.table.shardings`; each process reads what its devices hold.

    `dtype` is one, or a function of Tensors. Of `optional` tensors, by their names in the table, a checkpoint may have
    nothing. UserError, before anything is read, listing what else is missing, not of the model, or of another shape.
    """
    expected = stored(table, naming)
    absent, ignored = _compare(expected, source, naming, optional)
    kept = map_table(lambda t: None if t.name in absent else t, table)
    dtype, before, largest, done = dtypes(dtype), source.read_bytes, 0, 0
    leaves, structure = jax.tree.flatten(kept, is_leaf=is_tensor)
    plans = [(t, where, _shards(t, where, pieces(t, naming, table)))
             for t, where in zip(leaves, jax.tree.leaves(shardings(kept, mesh, zero)), strict=True)]  # fmt: skip
    total = sum(_bytes(source, cut, parts) for _, _, shards in plans for cut, (_, parts) in shards.items())
    params = []
    for t, where, shards in plans:
        arrays = []
        for cut, (devices, parts) in shards.items():
            staging = np.empty([stop - start for start, stop in cut], dtype(t))
            for piece in parts:
                part = piece.turn(staging[tuple(at - start for at, (start, _) in zip(piece.at, cut))])
                for mine, theirs in piece.windows(tuple(slice(*ends) for ends in cut[len(piece.at) :])):
                    numbers = source.read(piece.name, theirs)
                    copy(part[mine], numbers)
                    done += numbers.nbytes
                    if progress:
                        progress(done, total)
            largest = max(largest, staging.nbytes)
            # Waits, so that there is one buffer at a time. It is never written again: on CPU it is the device's own.
            arrays += jax.block_until_ready([jax.device_put(staging, device) for device in devices])
        params.append(jax.make_array_from_single_device_arrays(t.shape, where, arrays))
    return Loaded(jax.tree.unflatten(structure, params), kept, ignored, source.read_bytes - before, largest)


def dtypes(dtype) -> Callable[[Tensor], np.dtype]:
    """The dtype of each tensor, where it may be stated as one, or as a function of Tensors."""
    try:
        one = np.dtype(dtype)
    except TypeError:
        return lambda t: np.dtype(dtype(t))
    return lambda t: one


def copy(target: np.ndarray, numbers: np.ndarray) -> None:
    """target[...] = numbers, converted, a few rows at a time."""
    for row in range(0, len(target), ROWS):
        target[row : row + ROWS] = numbers[row : row + ROWS]


def _shards(t: Tensor, where, parts: list[Piece]) -> dict[Cut, tuple[list, list[Piece]]]:
    """Each different shard of this process: the devices that hold it, and the pieces that it has something of."""
    found: dict[Cut, tuple[list, list[Piece]]] = {}
    for device, index in where.addressable_devices_indices_map(t.shape).items():
        cut = tuple(s.indices(n)[:2] for s, n in zip(index, t.shape))
        within = lambda at: all(start <= i < stop for i, (start, stop) in zip(at, cut))
        if cut not in found:
            found[cut] = [], [piece for piece in parts if within(piece.at)]
        found[cut][0].append(device)
    return found


def _bytes(source: Source, cut: Cut, parts: list[Piece]) -> int:
    """What is read for a shard."""
    size = lambda piece: prod(stop - start for start, stop in cut[len(piece.at) :])
    return sum(size(piece) * source.tensors[piece.name].dtype.itemsize for piece in parts)


def _compare(expected, source: Source, naming: Naming, optional) -> tuple[set[str], tuple[str, ...]]:
    """Which optional tensors the checkpoint lacks, and what it has besides that is ignored. UserError for the rest."""
    there = source.tensors
    has = {t.name for name, parts in expected.items() if name in there for t, _ in parts}
    absent = {*optional} - has
    missing = [name for name, parts in expected.items() if name not in there and parts[0][0].name not in absent]
    matches = lambda name, patterns: any(fnmatchcase(name, pattern) for pattern in patterns)
    extra = [name for name in there if name not in expected]
    ignored = tuple(name for name in extra if matches(name, (*IGNORED, *naming.ignored)))
    extra = [name for name in extra if name not in {*ignored}]
    both = [(name, there[name], parts[0][1].shape) for name, parts in expected.items() if name in there]
    misshaped = {name: f"{list(e.shape)} there, {list(shape)} here" for name, e, shape in both if e.shape != shape}
    numbers = {name: str(e.dtype) for name, e, _ in both if not jnp.issubdtype(e.dtype, jnp.floating)}
    if missing or extra or misshaped or numbers:
        raise UserError(f"{source.path} is not a checkpoint of this model: " + "; ".join(filter(None, (
            _listed("missing", missing, lambda name: _close(name, extra, "there")),
            _listed("not of the model", extra, lambda name: _close(name, missing or expected, "here")),
            _listed("of another shape", misshaped, lambda name: f": {misshaped[name]}"),
            _listed("not of floating point", numbers, lambda name: f": {numbers[name]}"),
            "it is quantized: load the checkpoint that it was made of" if numbers or any(
                matches(name, QUANTIZED) for name in extra
            ) else "use the model and the naming that its config.json describes",
        ))))  # fmt: skip
    return absent, ignored


def _kind(name: str) -> str:
    """The name with {} for numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)


def _close(name: str, others: Iterable[str], where: str) -> str:
    close = get_close_matches(_kind(name), sorted({*map(_kind, others)}), 1)
    return f" ({where}: {close[0]}?)" if close else ""


def _listed(what: str, names: Iterable[str], comment: Callable[[str], str]) -> str:
    """How many there are, and one of each kind of the first."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind(name), []).append(name)
    like = lambda group: f" and {len(group) - 1} like it" if group[1:] else ""
    shown = [group[0] + like(group) + comment(group[0]) for group in [*kinds.values()][:SHOWN]]
    rest = sum(map(len, [*kinds.values()][SHOWN:]))
    count = sum(map(len, kinds.values()))
    return f"{count} {what}: {', '.join(shown)}" + (f", and {rest} more" if rest else "") if count else ""
