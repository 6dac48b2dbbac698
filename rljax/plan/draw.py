"""What a mesh file means, before any device is touched: the grid of devices of each stage, the bytes of each tensor.

`describe` is the JSON of `rljax mesh`; `draw` turns it into a picture for a terminal of 80 columns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import groupby
from math import prod

import jax
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rljax.mesh.axes import AXES, BATCH
from rljax.mesh.file import ROLES, STAGES, MeshFile, Placement
from rljax.mesh.verbs import axes_of, split_over, without
from rljax.model.table import LM, Tensor, is_tensor, misfits

MODEL = ("fsdp", "pipe", "tensor", "expert")  # the axes that may split parameters, while no table says which do
DOWN, ACROSS = ("data", "fsdp", "expert", "pipe"), ("seq", "tensor")  # the drawn grid: what splits the batch goes down
WIDTH, HEIGHT = 80, 16  # characters of a drawing, lines of a grid; what is longer is folded
STYLE = {"generate": "blue", "assess": "yellow", "train": "green"}  # the same as while a run goes
SHARDS = "#8ecae6 #ffd166 #a7d7a0 #f4a6b8 #c9b6f2 #f7b267 #7fd8be #d6d6a5".split()  # colors, used again from the 9th
ORDER = "devices are numbered row-major over " + " ".join(AXES)


def describe(
    mesh_file: MeshFile, roles: Mapping[str, tuple[LM, bool]] | None = None, bytes_per_element: int = 4
) -> dict:
    """The mesh file as plain data for JSON; with `roles`, a model and whether it is trained, every tensor's bytes too.

    `stages` holds train, generate and assess, and beside them `STAGE.ROLE` where a role lies otherwise than its stage.
    Of each: the axis sizes and what else its table says; `devices`, a half-open range; `grid`, the device numbers
    nested in the order of AXES, as jax.make_mesh orders all but TPU devices (those it may permute for locality);
    how many parts the batch and the parameters are split into, and over which axes; and its `roles`: those trained in
    train, the actor in generate, the others in assess, and any that the file gives a table.

    Bytes are of parameters and gradients at `bytes_per_element`, of Adam's two moments at 4 each; frozen parameters
    have neither. Per device they are those of the largest shard, which is every shard where all dimensions divide;
    `misfits` has a line for each that does not.
    """
    roles = roles or {}
    tensors = jax.tree.leaves([lm.table for lm, _ in roles.values()], is_leaf=is_tensor)
    named = {axis for t in tensors for axis in split_over(t.spec)}
    stages = {}
    for name, (placement, present) in _invocations(mesh_file, roles).items():
        training = {role: roles[role][1] and name.startswith("train") for role in present}
        stages[name] = _stage(mesh_file, placement, named if roles else MODEL) | {
            "roles": {role: _role(roles[role][0], training[role], placement, bytes_per_element) for role in present}
        }
    return {
        "file": mesh_file.path,
        "platform": mesh_file.platform,
        "devices": mesh_file.devices,
        "topology": mesh_file.topology,
        "groups": {group: list(ends) for group, ends in mesh_file.groups.items()},
        "order": ORDER + ("; jax.make_mesh may permute TPU devices for locality" * (mesh_file.platform == "tpu")),
        "bytes_per_element": bytes_per_element,
        "stages": stages,
    }


def _invocations(file: MeshFile, roles: Mapping[str, tuple[LM, bool]]) -> dict[str, tuple[Placement, list[str]]]:
    """By name, the stages and the roles placed otherwise in them: the placement and which of `roles` have it."""
    found = {}
    for stage in STAGES:
        found[stage] = file.placement(stage), []
        for role in dict.fromkeys((*ROLES, *roles)):
            trained = roles[role][1] if role in roles else role in ("actor", "critic")
            runs = {"train": trained, "generate": role == "actor", "assess": role != "actor"}[stage]
            stated = f"{stage}.{role}" in file.tables
            if not stated and not (runs and role in roles):
                continue
            placement = file.placement(stage, role, trained)
            name = stage if placement == found[stage][0] else f"{stage}.{role}"
            found.setdefault(name, (placement, []))[1].extend([role] if role in roles else [])
    return found


def _stage(file: MeshFile, placement: Placement, named: Iterable[str]) -> dict:
    fields = asdict(placement)
    sizes = fields.pop("layout")
    split = [axis for axis in AXES if axis in named and (axis != "fsdp" or placement.zero == 3)]
    start, end = file.groups[placement.group]
    return {
        "axes": sizes,
        **fields,
        "devices": [start, end],
        "grid": np.arange(start, end).reshape(placement.layout.sizes).tolist(),
        "batch": {"axes": list(BATCH), "parts": placement.layout.rows},
        "parameters": {"axes": split, "parts": prod(sizes[axis] for axis in split)},
    }


def _role(lm: LM, training: bool, placement: Placement, width: int) -> dict:
    """The tensors of a model on a placement and their sums; `width`: bytes of an element."""
    sizes = asdict(placement.layout)

    def split(t: Tensor, fsdp: bool) -> list[list[str]]:
        entries = (t.spec if fsdp else without(t.spec, "fsdp")).partitions
        return [list(axes_of(entry)) for entry in (*entries, *[None] * (len(t.shape) - len(entries)))]

    def held(t: Tensor, fsdp: bool) -> int:  # elements of a device
        ways = lambda axes: prod(sizes[axis] for axis in axes)
        return prod(-(-n // ways(axes)) for n, axes in zip(t.shape, split(t, fsdp), strict=True))

    zero, tensors = placement.zero, jax.tree.leaves(lm.table, is_leaf=is_tensor)
    rows = [
        {
            "name": t.name,
            "dims": t.dims,
            "shape": list(t.shape),
            "placement": split(t, zero == 3),
            "bytes": t.size * width,
            "bytes_per_device": held(t, zero == 3) * width,
        }
        for t in tensors
    ]
    own = [t for t in tensors if not t.frozen]
    state = {
        "gradient_bytes_per_device": sum(held(t, zero >= 2) for t in own) * width,
        "optimizer_bytes_per_device": sum(held(t, zero >= 1) for t in own) * 2 * 4,
    }
    return {
        "training": training,
        "tensors": rows,
        "parameters": sum(t.size for t in tensors),
        "bytes": sum(row["bytes"] for row in rows),
        "bytes_per_device": sum(row["bytes_per_device"] for row in rows),
        **(state if training else {}),
        "misfits": misfits(lm, placement),
    }


def draw(description: dict) -> RenderableType:
    """The picture of what `describe` returned, at most 80 columns wide. Stages placed alike share a drawing."""
    drawings: list[tuple[list[str], dict, list]] = []  # names, their stage, the models in it
    for name, stage in description["stages"].items():
        alike = next((d for d in drawings if _placed(d[1]) == _placed(stage)), None)
        if alike is None:
            alike = [], stage, []
            drawings.append(alike)
        alike[0].append(name)
        alike[2].extend(stage["roles"].items())
    parts: list[RenderableType] = [_title(description)]
    for names, stage, models in drawings:
        parts += ["", _header(names, stage), "", *_grid(stage), "", _captions(stage)]
        for model in (m for i, (_, m) in enumerate(models) if m not in [before for _, before in models[:i]]):
            roles = dict.fromkeys(role for role, other in models if other == model)  # one table for equal ones
            parts += ["", *_model(roles, model, stage["axes"], description["bytes_per_element"])]
    if description["platform"] == "tpu":
        parts += ["", Text(f"The {description['order']}.", "dim")]
    return Group(*parts)


def _placed(stage: dict) -> dict:
    return {key: value for key, value in stage.items() if key != "roles"}


def _title(d: dict) -> RenderableType:
    """The file and its devices: on one line where they fit."""
    facts = [f"{d['devices']} {d['platform']} device" + "s" * (d["devices"] > 1)]
    facts += [d["topology"]] if d["topology"] else []
    facts += [f"{group} = {ends[0]}–{ends[1] - 1}" for group, ends in d["groups"].items() if group != "all"]
    file, rest = Text(d["file"], "bold", overflow="fold"), Text(" · ".join(facts), "dim", overflow="fold")
    return Text.assemble(file, "   ", rest) if len(file) + len(rest) + 3 <= WIDTH else Group(file, rest)


def _header(names: list[str], stage: dict) -> RenderableType:
    """The stages, their axes, and the rest of their table: on one line where they fit."""
    title = Text(", ".join(names), f"bold {STYLE[names[0].split('.')[0]]}")
    sizes = " ".join(f"{axis}={size}" for axis, size in stage["axes"].items() if size > 1) or "one device"
    keys = ["zero", "microbatches", "group"]
    keys[2:2] = [
        *["remat"] * any(name.startswith("train") for name in names),  # only training has a backward pass
        *["context"] * (stage["axes"]["seq"] > 1),
        *["schedule"] * (stage["axes"]["pipe"] > 1),
    ]
    says = " ".join(f"{key}={stage[key]}" for key in keys) + " sequence_parallel" * stage["sequence_parallel"]
    rest = Text.assemble(sizes, ("  " + says, "dim"))
    if len(title) + len(rest) + 8 <= WIDTH:
        return Rule(Text.assemble(title, "  ", rest), align="left", style="dim")
    return Group(Rule(title, align="left", style="dim"), rest)


def _grid(stage: dict) -> list[Text]:
    """The boxes: rows by DOWN, columns by ACROSS; in each a device and, as its color too, its shard of parameters."""
    sizes, S, B = stage["axes"], stage["parameters"]["parts"], stage["batch"]["parts"]
    down, across = ([axis for axis in axes if sizes[axis] > 1] for axes in (DOWN, ACROSS))
    height = prod(sizes[axis] for axis in DOWN)
    flat = lambda x: np.transpose(x, [AXES.index(axis) for axis in (*DOWN, *ACROSS)]).reshape(height, -1)
    device = flat(np.array(stage["grid"]))  # [rows columns], as is all that follows
    place = np.indices([sizes[axis] for axis in AXES])
    at = {axis: flat(place[i]) for i, axis in enumerate(AXES)}
    shard, batch = np.zeros_like(device), np.zeros_like(device)
    for axis in stage["parameters"]["axes"]:
        shard = shard * sizes[axis] + at[axis]
    for axis in stage["batch"]["axes"]:
        batch = batch * sizes[axis] + at[axis]

    part = lambda i, n: f"{i + 1:>{len(str(n))}}/{n}"
    name = lambda i, j: f"{device[i, j]:>{len(str(device.max()))}}"
    styles = {  # what a box says, the longest first, and what explains it
        "": lambda i, j: f" {name(i, j)} " + (f"shard {part(shard[i, j], S)} " if S > 1 else "whole "),
        " device shard": lambda i, j: f" {name(i, j)} {part(shard[i, j], S)} ",
        " device·shard": lambda i, j: f"{name(i, j)}·{part(shard[i, j], S).split('/')[0]}",
    }
    left = 1 + max(1, sum(len(axis) + 2 for axis in down), *(len(axis) + 2 for axis in ("", *across)))
    for key, text in styles.items():
        box, room = len(text(0, 0)), WIDTH - left - 1 - max(len(f" rows {part(0, B)}"), len(key))
        if device.shape[1] * (box + 1) <= room:
            break
    rows, columns = _fold(height, HEIGHT), _fold(device.shape[1], max(3, room // (box + 1)))

    def line(labels: str, start: str, cell, middle: str, end: str, after: str = "") -> Text:
        cells = [cell(j, 3 if j is None else box) for j in columns]
        inner = [piece for c in cells for piece in (middle, c)][1:]
        return Text.assemble(f"{labels:>{left}}", start, *inner, end, (after, "not dim"), style="dim", no_wrap=True)

    def label(index: list[str]) -> str:
        return "".join(f"{x:>{len(axis) + 2}}" for x, axis in zip(index, down, strict=True)) + " "

    lines = []
    for axis in across:
        lines.append(line(f"{axis} ", " ", lambda j, w: f"{'…' if j is None else at[axis][0, j]:^{w}}", " ", ""))
    rule = lambda _, w: "─" * w
    lines.append(line(label(down), "╭", rule, "┬", "╮", key))
    above = None
    for i in rows:
        if i is None:
            lines.append(line(label(["⋮"] * len(down)), "│", lambda _, w: f"{'⋮':^{w}}", "│", "│"))
            continue
        index = [int(at[axis][i, 0]) for axis in down]
        if above and above[0] != index[0] and height > sizes[down[0]]:
            lines.append(line("", "├", rule, "┼", "┤"))
        fresh = [str(x) if above is None or above[: k + 1] != index[: k + 1] else "" for k, x in enumerate(index)]
        color = lambda j: f"not dim black on {SHARDS[shard[i, j] % len(SHARDS)]}"
        cell = lambda j, w: f"{'…':^{w}}" if j is None else (text(i, j), color(j))
        held = f" rows {part(batch[i, 0], B)}" if B > 1 else " all rows"
        lines.append(line(label(fresh), "│", cell, "│", "│", held))
        above = index
    return [*lines, line("", "╰", rule, "┴", "╯")]


def _fold(n: int, most: int) -> list[int | None]:
    """The numbers below n; beyond `most` of them the first few, None for the gap, and the last."""
    return list(range(n)) if n <= most else [*range(most - 2), None, n - 1]


def _captions(stage: dict) -> RenderableType:
    """What splits and what repeats the batch, the sequences and the parameters, in words."""
    sizes, lines = stage["axes"], Table.grid(padding=(0, 2))
    on = [axis for axis, size in sizes.items() if size > 1]
    for what, axes in (("batch", BATCH), ("sequences", ("seq",)), ("parameters", stage["parameters"]["axes"])):
        over, copies = [axis for axis in on if axis in axes], [axis for axis in on if axis not in axes]
        says = f"{prod(sizes[axis] for axis in over)} parts over {' × '.join(over)}" if over else "whole"
        if what == "parameters" and copies:
            says += f", replicated {prod(sizes[axis] for axis in copies)}× over {' × '.join(copies)}"
        if over or what != "sequences":
            lines.add_row(Text(what, "dim"), says)
    return Padding(lines, (0, 0, 0, 2))


def _model(roles: Iterable[str], model: dict, axes: dict[str, int], width: int) -> list[RenderableType]:
    """The tensors of a model, those stacked over layers under one heading; sums; what does not divide."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), width=WIDTH - 4)
    table.add_column("tensor", ratio=1, overflow="fold")
    table.add_column("dimensions", overflow="fold")
    table.add_column("split" if any(size > 1 for size in axes.values()) else "", overflow="fold")
    table.add_column("MiB/device", justify="right", no_wrap=True)
    for stack, tensors in groupby(model["tensors"], lambda t: t["name"].rpartition("{}.")[0]):
        tensors = list(tensors)
        if stack:
            table.add_row(Text(stack + "{}", "dim"), Text(f"L={tensors[0]['shape'][0]}", "dim"))
        for t in tensors:
            over = [[axis for axis in by if axes[axis] > 1] for by in t["placement"]]
            dims = list(zip(t["dims"].split(), t["shape"], over, strict=True))
            split = " · ".join(f"{dim}/{','.join(by)}" for dim, _, by in dims if by)
            copied = "replicated" if max(axes.values()) > 1 else ""
            table.add_row(
                Text("  " * bool(stack) + t["name"].removeprefix(stack + "{}.").removesuffix(".weight")),
                Text(" ".join(f"{dim}={size}" for dim, size, _ in dims if not (stack and dim == "L"))),
                Text(split) if split else Text(copied, "dim"),
                _mib(t["bytes_per_device"]),
            )
    table.add_section()
    sums = {"parameters": model["bytes_per_device"]}
    if model["training"]:
        sums |= {"gradients": model["gradient_bytes_per_device"], "Adam moments": model["optimizer_bytes_per_device"]}
    for name, n in sums.items():
        table.add_row(name, "", "", _mib(n))
    if len(sums) > 1:
        table.add_row("total", "", "", _mib(sum(sums.values())), style="bold")
    title = Text.assemble((", ".join(roles), "bold"), (f"  {model['parameters']:,} parameters of {width} bytes", "dim"))
    red = [Padding(Text(f"✗ {line}", "red"), (0, 0, 0, 2)) for line in model["misfits"]]
    return [Padding(title, (0, 0, 1, 2)), Padding(table, (0, 0, 0, 2)), *[""] * bool(red), *red]


def _mib(n: int) -> str:
    mib = n / 2**20
    return "<0.01" if 0 < mib < 0.005 else f"{mib:,.2f}" if mib < 100 else f"{mib:,.0f}"
