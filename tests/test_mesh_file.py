"""Mesh files: what each table means, and that every mistake is one line with the field, the value and a remedy."""

import os
import re
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from rljax.errors import UserError
from rljax.mesh.axes import Layout
from rljax.mesh.file import ROLES, STAGES, Placement, load, parse

MESHES = Path(__file__).parents[1] / "meshes"
HEAD = 'platform = "cpu"\ndevices = 8\n'
TRAIN = "[train]\nfsdp = 8\n"
SPLIT = HEAD + "groups = {learn = [0, 4], act = [4, 8]}\n"


def read(text):
    return parse(text, "m.toml")


def refusal(text):
    with pytest.raises(UserError) as caught:
        read(text)
    line = str(caught.value)
    assert line.startswith("mesh file m.toml: ") and len(line.splitlines()) == 1
    return line


def test_the_stated_table_is_the_placement():
    file = read(
        HEAD + 'topology = "v5e:2x4"\n[train]\ndata = 2\nfsdp = 2\ntensor = 2\nzero = 0\nmicrobatches = 4\n'
        'remat = "names"\nsequence_parallel = true\ncontext = "ring"\nschedule = "gpipe"\ngroup = "all"'
    )
    assert (file.path, file.platform, file.devices, file.topology) == ("m.toml", "cpu", 8, "v5e:2x4")
    assert file.groups == {"all": (0, 8)}
    assert file.placement("train") == Placement(
        layout=Layout(data=2, fsdp=2, tensor=2),
        zero=0,
        microbatches=4,
        remat="names",
        sequence_parallel=True,
        context="ring",
    )


def test_defaults():
    placement = read(HEAD + TRAIN).placement("train")
    assert placement == Placement(
        layout=Layout(fsdp=8), zero=3, microbatches=1, remat="block", context="gather", group="all"
    )


def test_one_device_needs_no_axis():
    assert read('platform = "cpu"\ndevices = 1\n[train]').placement("train").layout == Layout()


@pytest.mark.parametrize(
    ("stage", "trainable", "zero"),
    [("train", True, 3), ("train", False, 0), ("generate", True, 0), ("assess", True, 0), ("assess", False, 0)],
)
def test_zero_defaults_to_3_only_where_state_is_trained(stage, trainable, zero):
    assert read(HEAD + TRAIN).placement(stage, trainable=trainable).zero == zero


@pytest.mark.parametrize("trainable", [True, False])
def test_a_stated_zero_wins(trainable):
    file = read(HEAD + TRAIN + "zero = 0\n[assess]\nfsdp = 8\nzero = 3")
    assert file.placement("train", trainable=trainable).zero == 0
    assert file.placement("assess", "reference", trainable).zero == 3


def test_absent_stages_take_axes_group_and_context_alone():
    file = read(SPLIT + '[train]\nfsdp = 4\nzero = 3\nmicrobatches = 2\nremat = "none"\ngroup = "act"')
    taken = Placement(layout=Layout(fsdp=4), zero=0, microbatches=1, remat="block", context="gather", group="act")
    assert file.placement("generate") == file.placement("assess") == taken


def test_absent_assess_takes_generate():
    file = read(SPLIT + '[train]\nfsdp = 4\ngroup = "learn"\n[generate]\ndata = 2\ntensor = 2\ngroup = "act"')
    assert file.placement("assess", "critic") == Placement(layout=Layout(data=2, tensor=2), zero=0, group="act")


def test_a_role_inherits_nothing_from_its_stage():
    file = read(HEAD + '[train]\ndata = 8\nmicrobatches = 4\nremat = "none"\n[train.critic]\nfsdp = 8')
    assert file.placement("train", "critic") == Placement(layout=Layout(fsdp=8), zero=3)
    assert file.placement("train", "actor").microbatches == 4
    assert file.placement("train", "reward", trainable=False) == Placement(
        layout=Layout(data=8), zero=0, microbatches=4, remat="none"
    )


def test_a_role_speaks_for_its_own_stage_alone():
    file = read(HEAD + TRAIN + "[train.actor]\ntensor = 8")
    assert file.placement("train").layout == Layout(tensor=8)
    assert file.placement("generate").layout == file.placement("assess").layout == Layout(fsdp=8)


def test_a_stage_with_nothing_but_roles_is_absent():
    file = read(HEAD + TRAIN + "[generate]\ndata = 8\n[assess.reference]\ndata = 4\ntensor = 2")
    assert file.placement("assess", "reference", trainable=False).layout == Layout(data=4, tensor=2)
    assert file.placement("assess", "actor").layout == Layout(data=8)


def test_devices_of_is_the_range_of_the_group():
    file = read(SPLIT + '[train]\nfsdp = 4\ngroup = "learn"\n[generate]\ndata = 4\ngroup = "act"')
    assert file.groups == {"all": (0, 8), "learn": (0, 4), "act": (4, 8)}
    devices = list(range(8))
    assert devices[file.devices_of(file.placement("train"))] == [0, 1, 2, 3]
    assert devices[file.devices_of(file.placement("assess"))] == [4, 5, 6, 7]


def test_equal_groups_and_a_stated_all_are_fine():
    file = read(HEAD + 'groups = {all = [0, 8], a = [0, 4], b = [0, 4]}\n[train]\ndata = 4\ngroup = "a"')
    assert file.groups == {"all": (0, 8), "a": (0, 4), "b": (0, 4)}


@pytest.mark.parametrize(("stage", "role"), [("trian", "actor"), ("train", "judge"), ("train.critic", "actor")])
def test_an_invocation_outside_the_vocabulary_is_a_bug_of_the_caller(stage, role):
    with pytest.raises(ValueError, match="no invocation"):
        read(HEAD + TRAIN).placement(stage, role)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("platform = cpu", ["not TOML", "line 1", "quoted text"]),
        (HEAD + TRAIN + "fsdp = 4", ["not TOML", "a key comes once"]),
        ("devices = 8\n[train]\nfsdp = 8", ["platform is missing", "cpu, tpu, gpu"]),
        ('platform = "cpu"\n[train]\nfsdp = 8', ["devices is missing", "devices = 8"]),
        (HEAD, ["[train] is missing", "fsdp = 8"]),
        ('platform = "cuda"\ndevices = 8\n[train]', ['platform = "cuda"', "one of cpu, gpu, tpu"]),
        ('platform = "cpus"\ndevices = 8\n[train]', ['platform = "cpus"', "did you mean 'cpu'"]),
        ("platform = 3\ndevices = 8\n[train]", ["platform = 3", "a string", '"cpu"']),
        ('platform = "cpu"\ndevices = 0\n[train]', ["devices = 0", "at least 1"]),
        ('platform = "cpu"\ndevices = true\n[train]', ["devices = true", "an integer", "such as 1"]),
        ('platform = "cpu"\ndevices = "8"\n[train]', ['devices = "8"', "an integer", "such as 8"]),
        (HEAD + "topology = 8\n[train]\nfsdp = 8", ["topology = 8", "a string", '"v5e:2x4"']),
        (HEAD + "device = 8\n[train]\nfsdp = 8", ["device: unknown key", "did you mean 'devices'"]),
        (HEAD + "fsdp = 8\n[train]\nfsdp = 8", ["fsdp: unknown key at the top", "such as [train]"]),
        (HEAD + TRAIN + "[generat]\ndata = 8", ["[generat]: unknown stage", "did you mean 'generate'"]),
        (HEAD + TRAIN + "[train.critc]\nfsdp = 8", ["[train.critc]: unknown role", "'critic'? one of actor"]),
        (HEAD + "groups = [0, 8]\n[train]", ["groups = [0, 8]", "must be a table, such as {all = [0, 8]}"]),
        (HEAD + "train = 8", ["train = 8", "a table", "{data = 8}"]),
        (HEAD + TRAIN + "critic = 8", ["[train] critic = 8", "a table"]),
        (HEAD + '"a\\nb" = 1\n[train]\nfsdp = 8', ["a b: unknown key"]),
    ],
)
def test_refused_file(text, said):
    line = refusal(text)
    assert all(part in line for part in said), line


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("fdsp = 8", ["fdsp: unknown key", "did you mean 'fsdp'"]),
        ("devices = 8", ["devices: unknown key", "top of the file"]),
        ("data = 0", ["data = 0", "at least 1"]),
        ("microbatches = 0", ["microbatches = 0", "at least 1"]),
        ("seq = true", ["seq = true", "an integer"]),
        ('tensor = "2"', ['tensor = "2"', "an integer", "such as 2"]),
        ("tensor = 2.0", ["tensor = 2.0", "an integer"]),
        ("tensor.size = 2", ["tensor = {size = 2}", "an integer"]),
        ("zero = 4", ["zero = 4", "one of 0, 1, 2, 3"]),
        ("zero = true", ["zero = true", "an integer"]),
        ('remat = "blocks"', ['remat = "blocks"', "did you mean 'block'", "block, names, none, offload"]),
        ('context = "rings"', ['context = "rings"', "one of gather, ring, ulysses"]),
        ('schedule = "gpip"', ['schedule = "gpip"', "did you mean 'gpipe'"]),
        ("sequence_parallel = 0", ["sequence_parallel = 0", "true or false", "such as false"]),
        ("group = 0", ["group = 0", "a string", '"all"']),
        ('group = "lern"', ['group = "lern"', "did you mean 'learn'", "all, learn"]),
    ],
)
@pytest.mark.parametrize("table", ["train", "train.critic", "generate", "assess.reference"])
def test_refused_field(table, row, said):
    line = refusal(f"{HEAD}groups = {{learn = [0, 8]}}\n{'' if table == 'train' else TRAIN}[{table}]\n{row}")
    assert all(part in line for part in (f"[{table}] {said[0]}", *said[1:])), line


def test_pipe_and_expert_are_a_remedy_only_where_the_table_has_them():
    remedy = lambda axes: refusal(f"{HEAD}[train]\n{axes}").partition(" has 8: ")[2]
    for axes in ("data = 3\nfsdp = 3", "data = 2\nfsdp = 2", "seq = 5", ""):
        assert remedy(axes) and "pipe" not in remedy(axes) and "expert" not in remedy(axes)
    assert remedy("expert = 4") == "expert=8 would fit"


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("data = 2\nfsdp = 2\ntensor = 3", "tensor=3 makes 12 devices but group 'all' has 8: tensor=2 would fit"),
        ("data = 2\nfsdp = 2", "data=2 fsdp=2 makes 4 devices but group 'all' has 8: data=4 would fit"),
        ("data = 3\nfsdp = 4", "data=3 fsdp=4 makes 12 devices but group 'all' has 8: data=2 would fit"),
        ("tensor = 16", "tensor=16 makes 16 devices but group 'all' has 8: tensor=8 would fit"),
        ("data = 3\nfsdp = 3", "makes 9 devices but group 'all' has 8: no one axis can mend it: data=8 alone"),
        ("", "no axis above 1 makes 1 device but group 'all' has 8: data=8 would fit"),
    ],
)
@pytest.mark.parametrize("table", ["train", "train.actor", "assess"])
def test_the_product_of_the_axes_is_the_size_of_the_group(table, axes, said):
    line = refusal(f"{HEAD}{'' if table == 'train' else TRAIN}[{table}]\n{axes}")
    assert f"[{table}] " in line and said in line


@pytest.mark.parametrize("axes", ["data = 2", "fsdp = 2\ntensor = 3", "seq = 16", "data = 12\ntensor = 2"])
def test_the_remedy_for_a_product_does_fit(axes):
    axis, size = re.search(r"has 8: (\w+)=(\d+) would fit", refusal(f"{HEAD}[train]\n{axes}")).groups()
    rows = [row for row in axes.splitlines() if not row.startswith(f"{axis} ")]
    assert read(HEAD + "\n".join(["[train]", *rows, f"{axis} = {size}"])).placement("train").layout.devices == 8


def test_a_group_of_the_right_size_is_a_remedy_too():
    line = refusal(SPLIT + '[train]\nfsdp = 4\ngroup = "learn"\n[generate]\ndata = 4')
    assert "[generate] data=4 makes 4 devices but group 'all' has 8" in line
    assert 'data=8 or group = "learn" or group = "act" would fit' in line


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("a = [0, 12]", ["a = [0, 12]", "devices = 8", "[0, 8] would fit"]),
        ("a = [-2, 4]", ["a = [-2, 4]", "0 <= start", "[0, 4] would fit"]),
        ("a = [9, 12]", ["a = [9, 12]", "[7, 8] would fit"]),
        ("a = [4, 4]", ["a = [4, 4]", "start < end", "[4, 5] would fit"]),
        ("a = 4", ["a = 4", "half-open range", "such as [0, 8]"]),
        ("a = [0, 4, 8]", ["a = [0, 4, 8]", "half-open range"]),
        ("a = [false, true]", ["a = [false, true]", "half-open range"]),
        ("all = [0, 4]", ["all = [0, 4]", "every device", "[0, 8]"]),
        ("a = [0, 5], b = [4, 8]", ["a = [0, 5] and b = [4, 8] overlap", "equal or disjoint", "a = [0, 4] would fit"]),
        ("a = [0, 8], b = [0, 4]", ["b = [0, 4] and a = [0, 8] overlap", "a = [4, 8] would fit"]),
        ("a = [0, 8], b = [2, 4]", ["a = [0, 8] and b = [2, 4] overlap", "a = [0, 2] would fit"]),
    ],
)
def test_refused_groups(groups, said):
    line = refusal(f"{HEAD}groups = {{{groups}}}\n[train]\nfsdp = 8")
    assert all(part in line for part in ("[groups] " + said[0], *said[1:])), line


def test_one_stage_on_all_devices_and_another_on_some_overlap():
    line = refusal(SPLIT + '[train]\nfsdp = 8\n[generate]\ndata = 4\ngroup = "act"')
    assert "[train] group 'all' = [0, 8] overlaps 'act' = [4, 8] of [generate]: two groups must be equal" in line
    assert 'group = "learn" or "act" would fit' in line


def test_a_missing_file_names_those_beside_it(tmp_path):
    (tmp_path / "eight.toml").write_text(HEAD + TRAIN)
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(UserError) as caught:
        load(tmp_path / "eigth.toml")
    there = str(tmp_path / "eight.toml")
    assert str(caught.value).endswith(f"eigth.toml: no such file; did you mean {there!r}? one of {there}")


@pytest.mark.parametrize("path", ["eight", "eight.toml", "nowhere/eight.toml"])
def test_a_missing_file_where_there_are_none_names_those_in_meshes(path, tmp_path, monkeypatch):
    (tmp_path / "meshes").mkdir()
    (tmp_path / "meshes" / "eight.toml").write_text(HEAD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(f"mesh file {path}: no such file; did you mean 'meshes/eight.toml'? one of")


def test_a_folder_and_a_binary_are_not_text(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary.toml"):
        with pytest.raises(UserError, match="not a readable text file") as caught:
            load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("path", sorted(MESHES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_mesh_files_here_load(path):
    file = load(path)
    assert path.read_text().startswith("# ") and file.path == str(path)
    for stage in STAGES:
        for role in ROLES:
            placement = file.placement(stage, role)
            assert placement.layout.devices == len(range(file.devices)[file.devices_of(placement)])
    if file.platform == "tpu":
        shape = file.topology.partition(":")[2]
        assert prod(map(int, shape.split("x"))) == file.devices


def test_reading_touches_no_device():
    code = f"from rljax.mesh.file import load; load({str(MESHES / 'eight.toml')!r}).placement('train')"
    environment = {**os.environ, "JAX_PLATFORMS": "none-such"}  # with which any touch is an error
    subprocess.run([sys.executable, "-c", code], check=True, cwd=MESHES.parent, env=environment)
