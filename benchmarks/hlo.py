"""Collectives of a compiled program, read from its HLO text: how often each kind runs, and the bytes that sends."""

import re
from collections import defaultdict
from math import prod
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
WIDTH = {"pred": 8, "bf": 16, "token": 0, "opaque": 0}  # bits of types whose name does not end in them

LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
SHAPE = re.compile(r"\b(pred|bf16|[a-z]+\d+)[\w]*\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
KIND = re.compile(rf"({'|'.join(KINDS)})(?:-start)?")


class Kind(NamedTuple):
    """Executions in one run of the program, and the bytes that each device sends in them (ring algorithms)."""

    count: int = 0
    bytes: int = 0


class Traffic(NamedTuple):
    kinds: dict[str, Kind]
    unknown: int  # loops with collectives whose trip count the text does not tell; their bodies are counted once


def traffic(text: str, devices: int) -> Traffic:
    """Bodies of loops count as often as they run; of a conditional every branch counts, so that is an upper bound."""
    text = re.sub(r"/\*.*?\*/", "", text)  # /*index=5*/ in tuples
    bodies, entry, inside, bytes_of = defaultdict(list), None, None, {}
    for line in text.splitlines():
        if found := LINE.match(line):
            name, shape, op, rest = found.groups()
            bytes_of[name] = shape_bytes(shape)
            bodies[inside].append((op, rest))
        elif (found := HEADER.match(line)) and not line.startswith("HloModule"):
            inside = found[2]
            entry = inside if found[1] else entry
    kinds, unknown = {kind: Kind() for kind in KINDS}, 0

    def walk(name: str, times: int) -> int:
        nonlocal unknown
        seen = 0
        for op, rest in bodies[name]:
            if found := KIND.fullmatch(op):
                kind = found[1]
                operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
                held, ranks = sum(bytes_of[operand] for operand in operands), group_size(rest, devices)
                old = kinds[kind]
                kinds[kind] = Kind(old.count + times, old.bytes + times * sent(kind, held, ranks))
                seen += 1
                continue
            trips = TRIPS.search(rest) if op == "while" else None
            called = CALLED.findall(rest) + re.findall(r"[\w.\-]+", " ".join(BRANCHES.findall(rest)))
            within = sum(walk(each, times * int(trips[1]) if trips else times) for each in called)
            unknown += op == "while" and not trips and within > 0
            seen += within
        return seen

    walk(entry, 1)
    return Traffic(kinds, unknown)


def sent(kind: str, held: int, ranks: int) -> int:
    """Bytes that a device sends in a ring whose operand holds `held` bytes on each of `ranks` devices."""
    of_held = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": ranks - 1, "collective-permute": 1}
    return round(held * of_held.get(kind, (ranks - 1) / ranks))


def shape_bytes(shape: str) -> int:
    """Of an array, or of a tuple's arrays together."""
    bits = lambda kind: WIDTH.get(kind) or int(re.search(r"\d+", kind)[0])
    return sum(prod(map(int, filter(None, dims.split(",")))) * bits(kind) for kind, dims in SHAPE.findall(shape)) // 8


def group_size(line: str, devices: int) -> int:
    """How many devices take part: replica groups are written {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'b'}."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])  # 'a':(1)2 is the part of a of size 2
        return prod(int(part or sizes[axis]) for axis, part in axes)
    return devices
