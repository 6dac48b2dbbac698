"""Mesh files: which devices there are, and how each stage and role is laid out on them. Pure data.

Reading one touches no device and makes no array. Whatever is wrong with it is one `UserError` of one line.
"""

import json
import tomllib
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path

from rljax.errors import UserError, nearest
from rljax.mesh.axes import AXES, Layout
from rljax.mesh.placement import Placement, Strategy
from rljax.mesh.schedule import SCHEDULES, legal

STAGES = ("train", "generate", "assess")  # an absent one takes the axes of the one before it
ROLES = ("actor", "critic", "reference", "reward", "teacher")
PLATFORMS = ("cpu", "tpu", "gpu")

COUNTS = (*AXES, "microbatches")
CHOICES = {
    "zero": (0, 1, 2, 3),
    "remat": ("none", "block", "names", "offload"),
    "context": ("ring", "gather", "ulysses"),
    "sequence_parallel": (False, True),
    "schedule": tuple(SCHEDULES),
}
STRATEGY = tuple(field.name for field in fields(Strategy))
TABLE_KEYS = (*COUNTS, *CHOICES, "group")
FILE_KEYS = ("platform", "devices", "topology", "groups", *STAGES)


@dataclass(frozen=True)
class MeshFile:
    """A mesh file that has passed every check a file alone allows."""

    path: str
    platform: str  # cpu | tpu | gpu
    devices: int  # cpu: so many are simulated; otherwise what JAX must see
    topology: str | None  # the chip that compile, plan and roofline figures mean, such as "v5e:2x4"
    groups: dict[str, tuple[int, int]]  # half-open ranges of the device list; "all" is always there
    tables: dict[str, dict[str, object]]  # "train" or "train.critic" -> the fields of Placement it states

    def placement(self, stage: str, role: str = "actor", trainable: bool = True) -> Placement:
        """The placement of `role` in `stage`: its own table, or the stage's, or what an absent stage takes.

        A role's table speaks for its stage alone: an absent stage takes axes, group and context from the
        table of the stage before it, and the defaults for the rest. ZeRO is 3 by default where state is
        trained, else 0. Raises ValueError for a stage or role that the vocabulary does not have.
        """
        if stage not in STAGES or role not in ROLES:
            raise ValueError(f"no invocation {stage}.{role}: stages are {STAGES}, roles are {ROLES}")
        stated = self.tables.get(f"{stage}.{role}") or self.tables.get(stage)
        if stated is None:
            before = next(s for s in STAGES[STAGES.index(stage) :: -1] if s in self.tables)
            stated = {k: v for k, v in self.tables[before].items() if k in ("layout", "group", "context")}
        return Placement(**{"zero": 3 if stage == "train" and trainable else 0, **stated})

    def devices_of(self, placement: Placement) -> slice:
        """The range of the device list that `placement` lies on."""
        return slice(*self.groups[placement.group])


def load(path: str | Path) -> MeshFile:
    """The mesh file at `path`. A UserError for one that is missing names those that are not."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        found = _mesh_files(path.parent) or _mesh_files(Path("meshes"))
        hint = nearest(str(path.with_suffix(".toml")), found) if found else "no mesh file lies there or in meshes/"
        raise UserError(f"mesh file {path}: no such file; {hint}") from None
    except (OSError, ValueError) as error:  # a folder, no permission; not UTF-8, a null byte in the path
        raise UserError(f"mesh file {path}: not a readable text file: {error}") from None
    return parse(text, str(path))


def parse(text: str, path: str) -> MeshFile:
    """The mesh file that `text` is; `path` is what its errors call it."""
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        rule = 'a key comes once; values are integers, true or false, "quoted text" and [start, end]'
        raise UserError(f"mesh file {path}: not TOML: {error}; {rule}") from None
    try:
        return _file(document, path)
    except UserError as error:  # TOML keys may hold line breaks
        raise UserError(" ".join(f"mesh file {path}: {error}".split())) from None


def _mesh_files(folder: Path) -> list[str]:
    return [str(file) for file in folder.glob("*.toml") if file.name != "pyproject.toml"]


def _file(document: dict, path: str) -> MeshFile:
    """The checks of a whole file, top to bottom; errors name the field, `parse` adds the path."""
    for key, value in document.items():
        if key in TABLE_KEYS:
            raise UserError(f"{key}: unknown key at the top; it belongs in a stage's table, such as [train]")
        if key not in FILE_KEYS:
            what = f"[{key}]: unknown stage" if type(value) is dict else f"{key}: unknown key"
            raise UserError(f"{what}; {nearest(key, FILE_KEYS)}")
    for key, missing in {
        "platform": f"platform is missing: one of {', '.join(PLATFORMS)}",
        "devices": "devices is missing: how many there are, such as devices = 8",
        "train": "[train] is missing: the axes of training, such as fsdp = 8",
    }.items():
        if key not in document:
            raise UserError(missing)
    platform, topology = document["platform"], document.get("topology")
    _choice("platform", platform, PLATFORMS)
    devices = _count("devices", document["devices"])
    if topology is not None:
        _typed("topology", topology, str, "v5e:2x4")
    groups = _groups(_typed("groups", document.get("groups", {}), dict, {"all": [0, devices]}), devices)

    tables = {}
    for stage in STAGES:
        if stage not in document:
            continue
        table = _typed(stage, document[stage], dict, {"data": devices})
        roles = {key: value for key, value in table.items() if key in ROLES}
        own = {key: value for key, value in table.items() if key not in ROLES}
        if own or not roles or stage == "train":  # [assess.critic] alone leaves [assess] absent
            tables[stage] = _table(stage, own, groups)
        for role, value in roles.items():
            _typed(f"[{stage}] {role}", value, dict, {"data": devices})
            tables[f"{stage}.{role}"] = _table(f"{stage}.{role}", value, groups)
    _all_or_parts(tables, groups)
    return MeshFile(path, platform, devices, topology, groups, tables)


def _groups(stated: dict, devices: int) -> dict[str, tuple[int, int]]:
    """The stated ranges and "all": each within the devices, any two parts equal or disjoint."""
    groups = {"all": (0, devices)}
    for name, value in stated.items():
        field = f"[groups] {name} = {_show(value)}"
        if type(value) is not list or [type(end) for end in value] != [int, int]:
            raise UserError(f"{field}: must be the start and end of a half-open range, such as [0, {devices}]")
        start, end = value
        if not 0 <= start < end <= devices:
            inside = min(max(start, 0), devices - 1)
            fit = [inside, min(max(end, inside + 1), devices)]
            raise UserError(f"{field}: must have 0 <= start < end <= devices = {devices}: {fit} would fit")
        if name == "all" and (start, end) != groups["all"]:
            raise UserError(f"{field}: 'all' is every device: [0, {devices}], or another name, would fit")
        groups[name] = start, end
    parts = sorted((ends, name) for name, ends in groups.items() if name != "all")
    for ((start, end), name), ((other_start, other_end), other) in combinations(parts, 2):
        if (start, end) != (other_start, other_end) and other_start < end:
            fit = f"{name} = [{start}, {other_start}]" if start < other_start else f"{other} = [{end}, {other_end}]"
            both = f"{name} = [{start}, {end}] and {other} = [{other_start}, {other_end}]"
            raise UserError(f"[groups] {both} overlap: two groups must be equal or disjoint: {fit} would fit")
    return groups


def _table(name: str, table: dict, groups: dict[str, tuple[int, int]]) -> dict[str, object]:
    """The fields of Placement that the table `[name]` states, `layout` and `group` always among them."""
    for key, value in table.items():
        field = f"[{name}] {key}"
        if key in COUNTS:
            _count(field, value)
        elif key in CHOICES:
            _choice(field, value, CHOICES[key])
        elif key == "group":
            _choice(field, value, tuple(groups))
        elif type(value) is dict and "." not in name:
            raise UserError(f"[{name}.{key}]: unknown role; {nearest(key, ROLES)}")
        else:
            hint = "it belongs at the top of the file" if key in FILE_KEYS else nearest(key, TABLE_KEYS)
            raise UserError(f"{field}: unknown key; {hint}")
    layout = Layout(**{axis: table[axis] for axis in AXES if axis in table})
    group = table.get("group", "all")
    _fills(f"[{name}]", layout, table, group, groups)
    stated = {key: table[key] for key in STRATEGY if key in table}
    strategy = Strategy(**stated)
    wrong = legal(strategy.schedule, layout.pipe, strategy.microbatches)
    if wrong:
        raise UserError(f"[{name}] {wrong}")
    return {"layout": layout, "group": group, **stated}


def _fills(field: str, layout: Layout, table: dict, group: str, groups: dict[str, tuple[int, int]]) -> None:
    """The product of the axes must be the size of the group: if not, say which change would make it so."""
    size = {name: end - start for name, (start, end) in groups.items()}
    if layout.devices == size[group]:
        return
    # The axes that the table names come first, and those that any model and batch can have.
    axes = sorted(AXES, key=lambda axis: (axis not in table, axis in ("pipe", "expert")))
    whole = ((axis, divmod(getattr(layout, axis) * size[group], layout.devices)) for axis in axes)
    fit = next((f"{axis}={quotient}" for axis, (quotient, rest) in whole if rest == 0), None)
    fit = fit or f"no one axis can mend it: data={size[group]} alone"
    fit += "".join(f" or group = {_show(name)}" for name in size if size[name] == layout.devices and name != "all")
    makes = "no axis above 1 makes 1 device" if layout.devices == 1 else f"{layout} makes {layout.devices} devices"
    raise UserError(f"{field} {makes} but group {group!r} has {size[group]}: {fit} would fit")


def _all_or_parts(tables: dict[str, dict], groups: dict[str, tuple[int, int]]) -> None:
    """Stages lie on the same devices or on disjoint ones, so none is on all where another is on a part."""
    wide = [name for name in tables if groups[tables[name]["group"]] == groups["all"]]
    narrow = [name for name in tables if name not in wide]
    if not wide or not narrow:
        return
    group, part = tables[wide[0]]["group"], tables[narrow[0]]["group"]
    parts = _either(name for name, ends in groups.items() if ends != groups["all"])
    raise UserError(
        f"[{wide[0]}] group {group!r} = {list(groups[group])} overlaps {part!r} = {list(groups[part])} "
        f"of [{narrow[0]}]: two groups must be equal or disjoint: group = {parts} would fit"
    )


def _count(field: str, value: object) -> int:
    _typed(field, value, int, int(value) if type(value) is str and value.isdecimal() else 1)
    if value < 1:
        raise UserError(f"{field} = {value}: must be at least 1")
    return value


def _choice(field: str, value: object, choices: tuple) -> None:
    _typed(field, value, type(choices[0]), choices[0])
    if value not in choices:
        raise UserError(f"{field} = {_show(value)}: unknown; {nearest(str(value), choices)}")


def _typed(field: str, value: object, kind: type, example: object):
    """`value`, if it is of this very type."""
    if type(value) is not kind:  # not isinstance: to Python, true is an integer
        kinds = {int: "an integer", str: "a string", bool: "true or false", dict: "a table"}
        raise UserError(f"{field} = {_show(value)}: must be {kinds[kind]}, such as {_show(example)}")
    return value


def _either(values) -> str:
    return " or ".join(map(_show, values))


def _show(value: object) -> str:
    """`value` on one line, much as TOML writes it."""
    if type(value) is dict:
        return "{" + ", ".join(f"{key} = {_show(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, default=str)
