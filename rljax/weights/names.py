"""Where in a Hugging Face checkpoint the stacked tensors of a table are: under which names, in which rows, turned how.

There every layer and expert has tensors of its own, and a Linear is [out, in]; a table stacks them and has [in, out],
so matrices are transposed, but for the embedding, which is [V, D] in both.
"""

import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import jax

from rljax.model.table import Tensor, is_tensor

Index = tuple[slice, ...]  # with start and stop

ONE_ROW = ("score.weight",)  # a Linear with one output: [1, in] there, and a vector here
RANKS = (".lora_A.weight",)  # [r, in] there: its rows are not those of the matrix that it adds to


class Interleaved(NamedTuple):
    """A projection whose heads have rotary pairs in neighboring rows, 2k and 2k + 1 of the part that is turned.

    Here they are k and k + size / 2. The other rows of a head are where they are.
    """

    name: str  # such as "self_attn.q_proj"
    head: int  # rows of a head
    first: int  # its first row that is turned
    size: int  # rows that are


class Naming(NamedTuple):
    """How a family of checkpoints stores what a table names as Llama does.

    Names are whole pieces between dots, with {} where the number of a layer or an expert is.
    """

    renames: tuple[tuple[str, str], ...] = ()  # piece of a name in the table -> what is there, all at once
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()  # a piece -> those whose rows it has, in this order
    interleaved: tuple[Interleaved, ...] = ()
    ignored: tuple[str, ...] = ()  # patterns of what is there besides and not needed


# Mistral, Qwen2, Qwen3 with experts or without, Gemma and OLMo 2 too: their tables have their names.
LLAMA = Naming()
MIXTRAL = Naming(
    renames=(
        ("mlp.gate.", "block_sparse_moe.gate."),
        ("mlp.experts.{}.gate_proj.", "block_sparse_moe.experts.{}.w1."),
        ("mlp.experts.{}.down_proj.", "block_sparse_moe.experts.{}.w2."),
        ("mlp.experts.{}.up_proj.", "block_sparse_moe.experts.{}.w3."),
    )
)
PHI3 = Naming(
    fused=(
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    )
)


def deepseek(layers: int, keys: int, plain: int, turned: int) -> Naming:
    """DeepSeek-V2 and V3, of so many layers: the widths of latent attention, whose turned rows are interleaved.

    Layers beyond the last predict further tokens (arXiv:2412.19437, section 2.2), and are left out.
    """
    queries = ("self_attn.q_proj", "self_attn.q_b_proj")
    return Naming(
        interleaved=(
            *(Interleaved(name, plain + turned, plain, turned) for name in queries),
            Interleaved("self_attn.kv_a_proj_with_mqa", keys + turned, keys, turned),
        ),
        ignored=(f"model.layers.{layers}.*",),
    )


class Piece(NamedTuple):
    """One layer's or expert's part of a table's tensor, and where it is in a checkpoint."""

    name: str  # of the stored tensor
    shape: tuple[int, ...]  # of all of it
    at: tuple[int, ...]  # where the part is in the stacked dimensions
    start: int  # the first of its rows in the stored tensor
    rows: int
    transposed: bool
    one_row: bool
    pairs: Interleaved | None

    def turn(self, x):
        """The part, or a slice of it, as it is stored but for the order of its rows: a view."""
        return x.T if self.transposed else x[None] if self.one_row else x

    def windows(self, index: Index) -> Iterator[tuple[slice, Index]]:
        """For a slice of the part: rows of it, turned, and where these are stored. Together all of the slice."""
        index = index[::-1] if self.transposed else (slice(0, 1), *index) if self.one_row else index
        rows, *columns = index
        for mine, there in self._runs(rows.start, rows.stop):
            yield mine, (there, *columns)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        _, head, first, size = self.pairs or ("", self.rows, 0, 0)
        middle, end = first + size // 2, first + size
        # Of a head's rows: from, to, where the first of these is stored, and how far apart they are there.
        parts = (0, first, 0, 1), (first, middle, first, 2), (middle, end, first + 1, 2), (end, head, end, 1)
        for base in range(start // head * head, stop, head):
            for low, high, there, step in parts:
                a, b = max(start, base + low), min(stop, base + high)
                if a < b:
                    at = self.start + base + there + (a - base - low) * step
                    yield slice(a - start, b - start), slice(at, at + (b - a - 1) * step + 1, step)


def pieces(t: Tensor, naming: Naming, table) -> list[Piece]:
    """Where each layer and expert of a tensor of `table` is. ValueError where the naming does not fit the table."""
    stacked = t.name.count("{}")
    shape, one_row = t.shape[stacked:], t.name.endswith(ONE_ROW)
    transposed = t.matrix and not _has(t.name, "embed_tokens")
    there = shape[::-1] if transposed else (1, *shape) if one_row else shape
    name, start, rows = t.name, 0, there[0]
    for whole, parts in naming.fused:
        part = next((part for part in parts if _has(t.name, part)), None)
        if part:
            sizes = [_rows(t.name.replace(part, other), t, whole, table) for other in parts]
            name, start = t.name.replace(part, whole), sum(sizes[: parts.index(part)])
            there = (sum(sizes), *there[1:])
    pairs = next((pairs for pairs in naming.interleaved if _has(t.name, pairs.name)), None)
    pairs = None if t.name.endswith(RANKS) else pairs
    if pairs and rows % pairs.head:
        raise ValueError(f"{t.name} has {rows} rows, which are not heads of {pairs.head}")
    name = _renamed(name, naming)
    places = product(*map(range, t.shape[:stacked]))
    numbers = lambda at: (t.first + at[0], *at[1:]) if at else at
    return [Piece(name.format(*numbers(at)), there, at, start, rows, transposed, one_row, pairs) for at in places]


def stored(table, naming: Naming) -> dict[str, list[tuple[Tensor, Piece]]]:
    """Every stored tensor by its name, and what it consists of. ValueError unless that is all of it, and once."""
    found: dict[str, list[tuple[Tensor, Piece]]] = {}
    for t in jax.tree.leaves(table, is_leaf=is_tensor):
        for piece in pieces(t, naming, table):
            found.setdefault(piece.name, []).append((t, piece))
    for name, parts in found.items():
        rows, names = sum(piece.rows for _, piece in parts), sorted({t.name for t, _ in parts})
        if rows != parts[0][1].shape[0]:
            raise ValueError(f"{name} has {parts[0][1].shape[0]} rows, but {' and '.join(names)} together {rows}")
    return found


def _has(name: str, piece: str) -> bool:
    return f".{piece}." in f".{name}."


def _rows(name: str, t: Tensor, whole: str, table) -> int:
    """The rows of a tensor that is fused with t."""
    for other in jax.tree.leaves(table, is_leaf=is_tensor):
        if (other.name, other.first) == (name, t.first):
            return other.shape[-1]
    raise ValueError(f"{whole} needs {name}, which the table lacks")


def _renamed(name: str, naming: Naming) -> str:
    new = dict(naming.renames)
    if not new:
        return name
    return re.sub(r"(?<![^.])(?:" + "|".join(map(re.escape, new)) + ")", lambda found: new[found[0]], name)
