"""Pipeline schedules as tables: which device runs which part of the model on which microbatch, tick by tick.

A pipeline of S stages (devices along `pipe`) cuts the layers into equal parts, consecutive layers each. Most schedules
give a device one part; interleaved and zb-v give it two. In dualpipe two pipelines run in opposite directions: a device
holds a part of each, so the weights are held twice. `build` gives two views of one order:

- `timeline`, in the units of the papers (F 1, BI 1, BW 1, B 2), in which bubbles are measured and pictures drawn;
- `table`, which an executor scans, one op a device and tick. There the last part has no F: its B or BI is forward, loss
  and gradient in one. The other parts' B and BI run the part again from its stored input.

Nothing here touches a device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rljax.mesh import orders, timetable
from rljax.mesh.orders import BI, BW, B, F, Op
from rljax.mesh.timetable import Home, Step

UNITS = (0, 1, 2, 1, 1)  # of IDLE, F, B, BI, BW


class Box(NamedTuple):
    """An op in the timeline. The last part's F has its own box there, right before B or BI."""

    start: int
    units: int
    op: Op


@dataclass(frozen=True, eq=False)
class Schedule:
    """What an executor scans and a picture shows."""

    stages: int
    microbatches: int
    part: np.ndarray  # [stages chunks] int32: the part of the layers that a device's chunk is
    timeline: tuple[tuple[Box, ...], ...]  # of each device
    table: dict[str, np.ndarray]  # timetable's COLUMNS and SLOTS, each [ticks stages] int32
    inbox: int  # slots of a device's inbox; slot number `inbox` is the trash, for what nobody sent or reads
    stash: int  # slots for what BI leaves to BW; 0 where no backward pass is split

    @property
    def parts(self) -> int:
        """How many equal parts the layers are cut into."""
        return int(self.part.max()) + 1


def _straight(stages: int) -> list[list[Home]]:
    return [[(d, 0) for d in range(stages)]]


def _round(stages: int) -> list[list[Home]]:
    return [[(d, chunk) for chunk in (0, 1) for d in range(stages)]]


def _vee(stages: int) -> list[list[Home]]:
    return [[*((d, 0) for d in range(stages)), *((d, 1) for d in reversed(range(stages)))]]


def _opposite(stages: int) -> list[list[Home]]:
    return [[(d, 0) for d in range(stages)], [(d, 1) for d in reversed(range(stages))]]


class Plan(NamedTuple):
    lines: Callable[[int], list[list[Home]]]  # stages -> for each pipeline, where its parts live, from first to last
    order: Callable[[int, int, int], list[Op]]  # device, stages, microbatches -> its ops


SCHEDULES = {  # by their names in a mesh file
    "gpipe": Plan(_straight, orders.gpipe),
    "1f1b": Plan(_straight, orders.one_f_one_b),
    "interleaved": Plan(_round, orders.interleaved),
    "zb-h1": Plan(_straight, orders.zb_h1),
    "zb-v": Plan(_vee, orders.zb_v),
    "dualpipe": Plan(_opposite, orders.dualpipe),
}


def legal(name: str, stages: int, microbatches: int, layers: int | None = None) -> str | None:
    """What forbids a schedule, in one line with the nearest legal choice; None where nothing does.

    Layers are looked at where they are known. One stage is no pipeline, and legal under any name.
    """
    if stages == 1:
        return None
    both = name == "dualpipe"
    if both and stages % 2:
        return f"pipe = {stages}: dualpipe needs an even number of stages: {stages - 1} or {stages + 1} would fit"
    if both and (microbatches % 2 or microbatches < 2 * stages):
        rule = f"dualpipe needs an even number, at least 2 × pipe = {2 * stages}"
        fit = max(2 * stages, microbatches + microbatches % 2)
        return f"microbatches = {microbatches}: {rule}: {fit} would fit"
    if name == "interleaved" and microbatches % stages:
        below = microbatches // stages * stages
        fit = f"{below} or {below + stages}" if below else stages
        return f"microbatches = {microbatches}: interleaved needs a multiple of pipe = {stages}: {fit} would fit"
    chunks = len(SCHEDULES[name].lines(1)[0])  # of one pipeline
    if layers is None or layers % (stages * chunks) == 0:
        return None
    fit = [n for n in range(2, layers + 1) if layers % (n * chunks) == 0 and not (both and n % 2)]
    near = [*[n for n in fit if n < stages][-1:], *[n for n in fit if n > stages][:1]]
    would = f"pipe = {' or '.join(map(str, near))} would" if near else "no pipe would"
    cut = f"pipe = {stages}" + f" × {chunks} = {stages * chunks}" * (chunks > 1)
    return f"{layers} layers do not divide into {cut} equal parts, as {name} needs: {would}"


def build(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule of a name in SCHEDULES. ValueError where `legal` forbids it."""
    wrong = legal(name, stages, microbatches)
    if wrong:
        raise ValueError(wrong)
    plan = SCHEDULES[name]
    lines = plan.lines(stages)
    devices = timetable.steps(lines, [plan.order(d, stages, microbatches) for d in range(stages)])
    begin = timetable.earliest(devices, lambda step: UNITS[step.op.kind] + UNITS[F] * step.fused)
    boxes = tuple(
        tuple(box for step, start in zip(of_device, begin[d], strict=True) for box in _boxes(step, start))
        for d, of_device in enumerate(devices)
    )
    ticks = timetable.forwards_wait(devices, timetable.earliest(devices, lambda step: 1))
    return Schedule(stages, microbatches, _parts(lines), boxes, *timetable.table(devices, ticks))


def _boxes(step: Step, start: int) -> list[Box]:
    if not step.fused:
        return [Box(start, UNITS[step.op.kind], step.op)]
    forward = Box(start, UNITS[F], step.op._replace(kind=F))
    return [forward, Box(start + UNITS[F], UNITS[step.op.kind], step.op)]


def _parts(lines: list[list[Home]]) -> np.ndarray:
    """The part that each device's chunk is, [stages chunks]."""
    part = np.zeros(np.max(lines, axis=(0, 1)) + 1, np.int32)
    for line in lines:
        part[tuple(zip(*line, strict=True))] = np.arange(len(line))
    return part


def figures(schedule: Schedule) -> dict:
    """What a schedule costs, in units of one part's forward pass.

    `ticks`, the rows of the table; `units`, the length of the timeline; `bubble`, idle over busy time; `in_flight`, the
    inputs of parts that a device holds at most, from F to the end of B or BW (a first part's, the embedded microbatch,
    too); `inbox` and `stash`, the slots that the table needs; `weights`, how often all devices together hold the
    layers; `flops`, a device's over those of its share of a forward and backward pass without a pipeline: idle ticks
    compute nothing, B runs every part but the last forward again, and BI the blocks of its part once more. What remat
    runs again inside is left out of both.
    """
    chunks, parts = schedule.part.shape[1], schedule.parts
    busy = 3 * schedule.microbatches * parts // schedule.stages  # units of every device
    units = max(boxes[-1].start + boxes[-1].units for boxes in schedule.timeline)
    in_flight, flops = [], []
    for d, boxes in enumerate(schedule.timeline):
        kinds = np.array([box.op.kind for box in boxes])
        last = np.array([schedule.part[d, box.op.chunk] == parts - 1 for box in boxes])
        in_flight.append(int(np.cumsum((kinds == F) * 1 - (kinds == B) - (kinds == BW)).max()))
        again = ((kinds == B) | (kinds == BI)) & ~last
        flops.append(1 + int(again.sum() + (kinds == BI).sum()) * UNITS[F] / busy)
    return {
        "ticks": len(schedule.table["op"]),
        "units": units,
        "bubble": units / busy - 1,
        "in_flight": max(in_flight),
        "in_flight_per_device": in_flight,
        "inbox": schedule.inbox,
        "stash": schedule.stash,
        "weights": schedule.stages * chunks // parts,
        "flops": max(flops),
        "flops_per_device": flops,
    }
