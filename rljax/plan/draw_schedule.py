"""The pipeline schedule of a mesh file's training, before any device is touched: what runs where, when, at what cost.

`describe` is the JSON of `rljax mesh --schedule`; `draw` turns it into a picture for a terminal of 80 columns.
"""

from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rljax.mesh.file import MeshFile
from rljax.mesh.orders import BI, BW, B, F
from rljax.mesh.schedule import Box, build, figures
from rljax.plan.draw import HEIGHT, WIDTH

KINDS = {F: "F", B: "B", BI: "BI", BW: "BW"}
LETTERS = {"F": "F", "B": "B", "BI": "B", "BW": "W"}  # of a box too narrow for its microbatch
FILL = {"F": " ", "B": "─", "BI": "─", "BW": "="}  # after the microbatch: what color says, where there is none
COLORS = {  # of a device's first part and its second
    "F": ("#8ecae6", "#5fa8cc"),
    "B": ("#f7b267", "#d98f3d"),
    "BI": ("#f7b267", "#d98f3d"),
    "BW": ("#a7d7a0", "#78b56f"),
}
BANDS = 2  # lines of a device; what is longer is folded


def describe(file: MeshFile) -> dict:
    """How training runs through the stages of `pipe`, as plain data for JSON.

    `figures` of the schedule; `part`, the part of the layers that each device's chunk is, [pipe chunks]; `timeline`, by
    device along `pipe`, each op's start and length in units, what it is (F, B, BI or BW), its chunk and its microbatch.
    Where pipe is 1 there is no schedule, and none of these.
    """
    placement = file.placement("train")
    stages = placement.layout.pipe
    facts = {
        "file": file.path,
        "schedule": placement.schedule if stages > 1 else None,
        "pipe": stages,
        "microbatches": placement.microbatches,
    }
    if stages == 1:
        return facts
    schedule = build(placement.schedule, stages, placement.microbatches)
    return {
        **facts,
        "figures": figures(schedule),
        "part": schedule.part.tolist(),
        "timeline": [[_plain(box) for box in boxes] for boxes in schedule.timeline],
    }


def _plain(box: Box) -> dict:
    op = {"op": KINDS[box.op.kind], "chunk": box.op.chunk, "microbatch": box.op.microbatch}
    return {"start": box.start, "units": box.units, **op}


def draw(description: dict) -> RenderableType:
    """The picture of what `describe` returned, at most 80 columns wide: a row per device, time to the right."""
    file = Text(description["file"], "bold", overflow="fold")
    if description["schedule"] is None:
        return Text.assemble(file, ": [train] pipe = 1: no pipeline, so there is no schedule to draw")
    facts = f"{description['schedule']} · pipe={description['pipe']} · microbatches={description['microbatches']}"
    return Group(
        file, Text(facts, "dim"), "", *_chart(description), "", _legend(description), "", _captions(description)
    )


def _chart(description: dict) -> list[Text]:
    """Bands of time, each of a row per device; boxes have numbers where there is room for all of them."""
    timeline, units = description["timeline"], description["figures"]["units"]
    left = max(len("pipe"), len(str(len(timeline)))) + 3
    room = WIDTH - left
    wide = 1 + len(str(description["microbatches"] - 1))  # the least that holds every number and what follows it
    width = wide if units * wide <= BANDS * (room - room % wide) else 1
    per = room // width  # units of a band
    if units <= BANDS * per:
        bands = [(at, min(at + per, units)) for at in range(0, units, per)]
    else:
        bands = [(0, per), (units - per, units)]
    devices = list(range(len(timeline)))
    if len(devices) > HEIGHT:
        devices = [*devices[: HEIGHT - 2], None, devices[-1]]
    rows = {d: _row(timeline[d], units, width) for d in devices if d is not None}
    lines = []
    for begin, end in bands:
        if lines:
            lines.append(Text(f"{'⋮':>{left - 1}}" if begin > bands[0][1] else "", "dim"))
        lines.append(Text(f"{'pipe':>{left - 1}} " + _ruler(begin, end, width), "dim"))
        for d in devices:
            line = Text(f"{'⋮' if d is None else d:>{left - 1}} ", "dim", no_wrap=True)
            for style, cells in groupby([] if d is None else rows[d][begin * width : end * width], key=lambda c: c[1]):
                line.append("".join(cell for cell, _ in cells), style)
            lines.append(line)
    return lines


def _row(boxes: list[dict], units: int, width: int) -> list[tuple[str, str]]:
    """A device's characters and their styles, `width` to a unit."""
    row = [("·" if i % width == 0 else " ", "dim") for i in range(units * width)]
    for box in boxes:
        kind, start, length = box["op"], box["start"] * width, box["units"] * width
        text = f"{box['microbatch']:{FILL[kind]}<{length}}" if width > 1 else LETTERS[kind] * length
        style = f"not dim black on {COLORS[kind][box['chunk']]}"
        row[start : start + length] = [(character, style) for character in text]
    return row


def _ruler(begin: int, end: int, width: int) -> str:
    """The time in units, over every tenth of them."""
    first = begin + -begin % 10
    marks = "".join(f"{unit:<{10 * width}}" for unit in range(first, end, 10))
    return (" " * ((first - begin) * width) + marks)[: (end - begin) * width].rstrip()


def _legend(description: dict) -> RenderableType:
    """What the boxes are."""
    kinds = {box["op"] for boxes in description["timeline"] for box in boxes}
    names = {"F": "forward", "B": "backward", "BI": "input gradient", "BW": "weight gradient"}
    legend = Text()
    for kind in (kind for kind in names if kind in kinds):
        box = LETTERS[kind] + FILL[kind] * (2 if kind == "B" else 1)
        legend.append(f" {box}", f"black on {COLORS[kind][0]}").append(f" {names[kind]}   ")
    if len(description["part"][0]) > 1:
        second = "other direction" if description["figures"]["weights"] > 1 else "second part"
        legend.append(f"darker: {second}", "dim")
    return Padding(legend, (0, 0, 0, 2))


def _captions(description: dict) -> RenderableType:
    """The figures, in words."""
    f = description["figures"]
    idle = round(f["units"] * f["bubble"] / (1 + f["bubble"]))
    each = f["in_flight_per_device"]
    lines = Table.grid(padding=(0, 2))
    for column in ({"style": "dim"}, {"style": "bold", "justify": "right"}, {"style": "dim"}):
        lines.add_column(no_wrap=True, **column)
    for row in (
        ("bubble", f"{f['bubble']:.1%}", f"{idle} units idle for {f['units'] - idle} busy, {f['units']} in all"),
        ("ticks", f"{f['ticks']}", "rows of the table: the last part's F is within its B"),
        (
            "in flight",
            f"{f['in_flight']}",
            f"inputs held; {each[0]} by the first device, {each[-1]} by the last",
        ),
        ("inbox", f"{f['inbox']}", "slots for inputs and gradients that have arrived"),
        ("stash", f"{f['stash']}", "slots for what weight gradients wait with"),
        ("weights", f"{f['weights']}×", "copies over the devices"),
        ("FLOPs", f"{f['flops']:.2f}×", "what no pipeline costs a device: forward runs again"),
    ):
        lines.add_row(*row)
    return Padding(lines, (0, 0, 0, 2))
