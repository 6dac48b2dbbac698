"""Collectives of a compiled program, read from the HLO text that XLA prints for CPU, TPU and GPU.

The text is a schedule, so some of its lines are less or more than one collective. Loops multiply: the compilers for CPU
and GPU print the trip count, that for TPU only start, step and bound. On TPU an asynchronous collective lies in every
fusion that it overlaps, under one chain_id; of a `-start` and its `-done` the first is counted. A reduce-scatter may be
an all-reduce in a fusion called all-reduce-scatter; a windowed matmul is a loop of collective-permutes.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from math import ceil, prod
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip

LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
KIND = re.compile(rf"({'|'.join(KINDS)})(?:-start)?")


class Collective(NamedTuple):
    """One collective, as each device executes it."""

    kind: str
    bytes: int  # of its operands on one device
    shapes: tuple[tuple[int, ...], ...]  # of its operands on one device: combined, it has several
    dtypes: tuple[str, ...]
    groups: frozenset[frozenset[int]]  # of devices that talk to each other: a permutation's are pairs
    times: int  # executions in one run of the program
    loops: int  # how many loops it lies within
    exact: bool  # whether the text tells the trip count of them all; a body of unknown trips counts once

    @property
    def sent(self) -> int:
        """Bytes that a device sends in one execution, by ring algorithms; of a ragged all-to-all, at most."""
        n = max(map(len, self.groups))
        moved = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "collective-permute": 1, "collective-broadcast": 1}
        return round(self.bytes * moved.get(self.kind, (n - 1) / n))


class Kind(NamedTuple):
    """Executions in one run of the program, and the bytes that each device sends in them."""

    count: int = 0
    bytes: int = 0


class Line(NamedTuple):
    """One instruction: `name = arrays op(operands), rest`."""

    op: str
    arrays: list[tuple[str, tuple[int, ...]]]  # dtype and shape of its results
    operands: list[str]
    text: str  # from the operands on
    root: bool


def traffic(found: Iterable[Collective]) -> dict[str, Kind]:
    """Collectives summed by kind, all kinds included."""
    kinds = dict.fromkeys(KINDS, Kind())
    for c in found:
        count, sent = kinds[c.kind]
        kinds[c.kind] = Kind(count + c.times, sent + c.times * c.sent)
    return kinds


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program. All branches of a conditional count: an upper bound."""
    bodies, entry = parse(text)
    devices = prod(map(int, re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])))
    found = []

    def walk(name: str, times: int, loops: int, exact: bool, chains: set[str]) -> None:
        lines = bodies[name]
        for line in lines.values():
            if kind := KIND.fullmatch(line.op):
                if chain := re.search(r'chain_id="(\d+)"', line.text):
                    if chain[1] in chains:
                        continue
                    chains.add(chain[1])
                scattered = kind[1] == "all-reduce" and name.startswith("all-reduce-scatter")
                held = [array for operand in line.operands for array in lines[operand].arrays]
                found.append(
                    Collective(
                        "reduce-scatter" if scattered else kind[1],
                        sum(size(*array) for array in held),
                        tuple(shape for _, shape in held),
                        tuple(dtype for dtype, _ in held),
                        groups(line.text, devices),
                        times, loops, exact,
                    )
                )  # fmt: skip
            elif line.op == "while":
                count = trips(line, lines, bodies)
                told = count is not None
                for part, runs in (("condition", count + 1 if told else 1), ("body", count if told else 1)):
                    walk(named(part, line), times * runs, loops + 1, exact and told, set())
            elif line.op not in ("async-update", "async-done"):  # they name again what async-start calls
                for callee in called(line.text):
                    walk(callee, times, loops, exact, chains)

    walk(entry, 1, 0, True, set())
    return found


def parse(text: str) -> tuple[dict[str, dict[str, Line]], str]:
    """Lines by computation and name, and the name of the entry computation."""
    text = re.sub(r"/\*.*?\*/", "", text)  # /*index=5*/ in tuples
    bodies, entry, inside = defaultdict(dict), "", ""
    for row in text.splitlines():
        if found := LINE.match(row):
            root, name, shape, op, rest = found.groups()
            arrays = [(dtype, numbers(dims)) for dtype, dims in ARRAY.findall(shape)]
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            bodies[inside][name] = Line(op, arrays, operands, rest, bool(root))
        elif (found := HEADER.match(row)) and not row.startswith("HloModule"):
            inside = found[2]
            entry = inside if found[1] else entry
    return bodies, entry


def named(part: str, loop: Line) -> str:
    """The computation that is the body or the condition of a loop."""
    return re.search(rf"{part}=%?([\w.\-]+)", loop.text)[1]


def called(text: str) -> list[str]:
    return CALLED.findall(text) + re.findall(r"[\w.\-]+", " ".join(BRANCHES.findall(text)))


def trips(loop: Line, around: dict[str, Line], bodies: dict[str, dict[str, Line]]) -> int | None:
    """How often the body of a loop runs: as printed, else for a loop that counts from start to below bound by step."""
    if told := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.text):
        return int(told[1])
    body, condition = (bodies[named(part, loop)] for part in ("body", "condition"))
    test, last = (next(line for line in lines.values() if line.root) for lines in (condition, body))
    if test.op != "compare" or "direction=LT" not in test.text or around[loop.operands[0]].op != "tuple":
        return None
    counter, bound = condition[test.operands[0]], constant(test.operands[1], condition)
    if not (index := re.search(r"index=(\d+)", counter.text)):
        return None
    entry = lambda line: line.operands[int(index[1])]
    start, after = constant(entry(around[loop.operands[0]]), around), body[entry(last)]
    steps = [constant(operand, body) for operand in after.operands] if after.op == "add" else []
    steps = [step for step in steps if step is not None]
    if start is None or bound is None or len(steps) != 1:
        return None
    return max(0, ceil((bound - start) / steps[0]))


def constant(name: str, lines: dict[str, Line]) -> int | None:
    """The value of an integer constant, or of a copy of one."""
    line = lines[name]
    if line.op in ("copy", "bitcast"):
        return constant(line.operands[0], lines)
    value = re.match(r"(-?\d+)\)", line.text) if line.op == "constant" else None
    return value and int(value[1])


def size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array."""
    bits = re.search(r"\d+", dtype)
    return prod(shape) * (8 if dtype == "pred" else int(bits[0]) if bits else 0) // 8


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def groups(text: str, devices: int) -> frozenset[frozenset[int]]:
    """Who talks to whom: written as a list, as an iota to reshape, as axes of a mesh, or as a permutation's pairs."""
    sets = lambda rows: frozenset(map(frozenset, rows))
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", text):
        return sets(numbers(g) for g in re.findall(r"\{([\d,]+)\}", listed[1]))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return sets(order(iota[2], iota[3]).reshape(numbers(iota[1])).tolist())
    mesh = r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}"
    if axes := re.search(mesh, text):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", axes[1])}
        ids = order(axes[2] or str(prod(sizes.values())), axes[3])
        return sets(along(ids, sizes, re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes[4])).tolist())
    if re.search(r"replica_groups=(?!\{\})", text):
        raise ValueError(f"devices of a collective in a new notation: {text}")
    return sets([range(devices)])


def order(dims: str, turn: str | None) -> np.ndarray:
    """0, 1, 2... in the shape `dims`, transposed."""
    ids = np.arange(prod(numbers(dims))).reshape(numbers(dims))
    return ids.transpose(numbers(turn)) if turn else ids


def along(ids: np.ndarray, sizes: dict[str, int], over: list[tuple[str, str, str]]) -> np.ndarray:
    """[groups, ranks] of a mesh of devices, from the axes named: whole, or a part such as 'a':(2)4, which are the 4
    that follow the outermost 2 of a."""
    shape, chosen = [], []
    for name, whole in sizes.items():
        parts = [(int(before or 1), int(part or whole)) for axis, before, part in over if axis == name]
        edges = {1, whole, *(before for before, _ in parts), *(before * part for before, part in parts)}
        for low, high in pairwise(sorted(edges)):
            if any(before <= low and high <= before * part for before, part in parts):
                chosen.append(len(shape))
            shape.append(high // low)
    ranks = prod(shape[dim] for dim in chosen)
    return np.moveaxis(ids.reshape(shape), chosen, range(-len(chosen), 0)).reshape(-1, ranks)
