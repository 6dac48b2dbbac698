"""From the order of each device's ops to when each runs, and to the table that an executor scans.

Every device sends at most one array a tick, to itself or a neighbour on the ring of `pipe`, all of one shape: the input
of the next part, or the cotangent of the one before. They wait in the receiver's inbox, in slots that are used again.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from rljax.mesh.orders import BI, BW, B, F, Op

COLUMNS = (
    "op",  # IDLE, F, B, BI or BW
    "chunk",  # which of the device's parts
    "microbatch",
    "first",  # 1: the part's input is the embedded microbatch, which takes no inbox slot
    "last",  # 1: the part's B or BI starts from the loss rather than a cotangent
    "stash",  # slot of what BI leaves to BW
)
SLOTS = (  # of the inbox: those that the op reads, and those that what arrives is written to once it has
    "xin",  # the part's input, kept until its B or BW has run
    "cin",  # the cotangent, kept until B or BI has run
    "left_slot",  # what the device on the left sends in this tick; the left of device 0 is the last device
    "right_slot",  # what the device on the right sends
    "self_slot",  # what the device sends to itself
)

Home = tuple[int, int]  # a device and its chunk


class Result(NamedTuple):
    """What an op leaves to that of another part."""

    forward: bool  # the input of the next part; else the cotangent of the one before
    home: Home  # of the op
    microbatch: int


class Step(NamedTuple):
    """An op, what has to arrive before it, and what it sends."""

    op: Op
    first: bool  # whether its part is the first, and so reads the embedded microbatch
    last: bool  # whether its part is the last, and so has the loss
    needs: Result | None
    makes: Result | None

    @property
    def fused(self) -> bool:
        """Whether it is forward, loss and backward in one."""
        return self.last and self.op.kind != BW


def steps(lines: list[list[Home]], orders: list[list[Op]]) -> list[list[Step]]:
    """Each device's ops with what joins them; the last part's forward is left to its backward. `lines`: pipelines."""
    before = {home: other for line in lines for home, other in zip(line, [None, *line[:-1]], strict=True)}
    after = {home: other for line in lines for home, other in zip(line, [*line[1:], None], strict=True)}

    def step(home: Home, op: Op) -> Step:
        last = after[home] is None
        source, target = before if op.kind == F or last else after, after if op.kind == F else before
        needs = makes = None
        if op.kind != BW and source[home]:
            needs = Result(source is before, source[home], op.microbatch)
        if op.kind != BW and target[home]:
            makes = Result(op.kind == F, home, op.microbatch)
        return Step(op, before[home] is None, last, needs, makes)

    every = [[step((d, op.chunk), op) for op in order] for d, order in enumerate(orders)]
    return [[s for s in of_device if not (s.last and s.op.kind == F)] for of_device in every]


def earliest(devices: list[list[Step]], length: Callable[[Step], int]) -> list[list[int]]:
    """When each step begins if every device takes its own in order, each as soon as what it needs is there."""
    begin: list[list[int]] = [[] for _ in devices]
    clock = [0] * len(devices)
    made: dict[Result | None, int] = {None: 0}  # when it is there
    waiting: dict[Result, int] = {}  # the device that waits for it
    ready = list(range(len(devices)))
    while ready:
        d = ready.pop()
        for step in devices[d][len(begin[d]) :]:
            if step.needs not in made:
                waiting[step.needs] = d
                break
            begin[d].append(max(clock[d], made[step.needs]))
            clock[d] = begin[d][-1] + length(step)
            if step.makes:
                made[step.makes] = clock[d]
                if step.makes in waiting:
                    ready.append(waiting.pop(step.makes))
    return begin


def forwards_wait(devices: list[list[Step]], ticks: list[list[int]]) -> list[list[int]]:
    """The same ticks, but forward passes, the last part's too, as late as they can be without delaying a backward one.

    What they send would only lie in an inbox for longer.
    """
    ticks = [list(of_device) for of_device in ticks]
    read: dict[Result | None, int] = {}  # when
    for _, d, i in sorted(((t, d, i) for d, ts in enumerate(ticks) for i, t in enumerate(ts)), reverse=True):
        step = devices[d][i]
        if step.fused or step.op.kind == F:
            ends = ticks[d][i + 1 : i + 2] + [read[step.makes]] * (step.makes in read)
            ticks[d][i] = min(ends) - 1 if ends else ticks[d][i]
        read[step.needs] = ticks[d][i]
    return ticks


def table(devices: list[list[Step]], ticks: list[list[int]]) -> tuple[dict[str, np.ndarray], int, int]:
    """COLUMNS and SLOTS as arrays [ticks devices] int32; how many inbox and how many stash slots they use.

    The inbox slot after the last is the trash: it stands where a tick receives nothing or reads nothing.
    """
    shape = 1 + max(map(max, ticks)), len(devices)
    columns = {name: np.zeros(shape, np.int32) for name in COLUMNS}
    columns |= {name: np.full(shape, -1, np.int32) for name in SLOTS}
    made = {s.makes: t for d, of_device in enumerate(devices) for s, t in zip(of_device, ticks[d], strict=True)}
    inbox = stash = 0
    for d, of_device in enumerate(devices):
        pairs = list(zip(of_device, ticks[d], strict=True))
        done = {s.op[1:]: t for s, t in pairs}  # of a chunk and microbatch, when the last of its ops runs
        needs = [(s, t) for s, t in pairs if s.needs]
        read = {s.needs: done[s.op[1:]] if s.needs.forward else t for s, t in needs}  # when it is read last
        slots, used = _slots((need, made[need], t) for need, t in read.items())
        inbox = max(inbox, used)
        for need, slot in slots.items():
            side = {d: "self_slot", (d - 1) % len(devices): "left_slot"}.get(need.home[0], "right_slot")
            columns[side][made[need], d] = slot
        own = {(s.needs.forward, *s.op[1:]): slots[s.needs] for s, _ in needs}
        left, used = _slots((s.op[1:], t, done[s.op[1:]]) for s, t in pairs if s.op.kind == BI)
        stash = max(stash, used)
        for name, value in {
            "op": lambda op: op.kind,
            "chunk": lambda op: op.chunk,
            "microbatch": lambda op: op.microbatch,
            "stash": lambda op, left=left: left.get(op[1:], 0) if op.kind in (BI, BW) else 0,
            "xin": lambda op, own=own: own.get((True, *op[1:]), -1),
            "cin": lambda op, own=own: own.get((False, *op[1:]), -1) if op.kind in (B, BI) else -1,
        }.items():
            columns[name][ticks[d], d] = [value(s.op) for s in of_device]
        columns["first"][ticks[d], d] = [s.first for s in of_device]
        columns["last"][ticks[d], d] = [s.last for s in of_device]
    for name in SLOTS:
        columns[name][columns[name] < 0] = inbox
    return columns, inbox, stash


def _slots(spans: Iterable[tuple[tuple, int, int]]) -> tuple[dict[tuple, int], int]:
    """A slot for each key of (key, tick at whose end it is written, tick last read): no more than are live at once."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    slots = {}
    for key, written, read in sorted(spans, key=lambda span: span[1:]):
        while busy and busy[0][0] <= written:
            heappush(free, heappop(busy)[1])
        slots[key] = heappop(free) if free else len(busy)
        heappush(busy, (read, slots[key]))
    return slots, len(busy) + len(free)
