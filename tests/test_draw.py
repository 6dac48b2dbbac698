"""The drawing of a mesh file: numbers against hand-computed ones and JAX's own, and a picture of 80 columns."""

import io
import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from rljax.mesh.axes import AXES, Layout
from rljax.mesh.file import MeshFile, load, parse
from rljax.model.decoder import Decoder
from rljax.model.table import is_tensor, shardings
from rljax.plan.draw import SHARDS, describe, draw

ROOT = Path(__file__).parents[1]
MESHES = sorted((ROOT / "meshes").glob("*.toml"))
SIMULATED = [path for path in MESHES if load(path).devices <= 32]
LM = Decoder(vocab=32, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128).build()
ROLES = {"actor": (LM, True), "reference": (LM, False)}


def mesh_file(platform="cpu", **tables):
    """A mesh file that the grammar need not support yet, on as many devices as its train layout has."""
    devices = tables["train"]["layout"].devices
    full = {name: {"group": "all", **table} for name, table in tables.items()}
    return MeshFile("made.toml", platform, devices, None, {"all": (0, devices)}, full)


def console(width=80):
    return Console(width=width, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor")


def text(description):
    """What a terminal of 80 columns shows, checked to stay within them."""
    terminal = console()
    terminal.print(draw(description))
    shown = terminal.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    return shown


@pytest.fixture(scope="module")
def eight():
    return describe(load(ROOT / "meshes/eight.toml"), ROLES)


def test_the_facts_of_the_file(eight):
    assert eight["platform"] == "cpu" and eight["devices"] == 8 and eight["topology"] is None
    assert eight["groups"] == {"all": [0, 8]} and list(eight["stages"]) == [
        "train", "generate", "assess", "assess.reference",
    ]  # fmt: skip
    train = eight["stages"]["train"]
    assert train["axes"] == {"data": 2, "fsdp": 2, "pipe": 1, "seq": 1, "tensor": 2, "expert": 1}
    assert (train["zero"], train["microbatches"], train["remat"], train["group"]) == (3, 1, "none", "all")
    assert train["devices"] == [0, 8] and train["batch"]["parts"] == 4
    assert train["parameters"] == {"axes": ["fsdp", "pipe", "tensor"], "parts": 4}
    assert np.array(train["grid"]).shape == (2, 2, 1, 1, 2, 1)
    assert eight["stages"]["generate"]["parameters"]["parts"] == 1
    assert json.loads(json.dumps(eight)) == eight


def test_roles_stand_where_they_run(eight):
    present = {name: list(stage["roles"]) for name, stage in eight["stages"].items()}
    assert present == {"train": ["actor"], "generate": ["actor"], "assess": [], "assess.reference": ["reference"]}
    own = parse('platform = "cpu"\ndevices = 8\n[train]\nfsdp = 8\n[train.critic]\ndata = 8\n', "m.toml")
    stages = describe(own, {**ROLES, "critic": (LM, True)})["stages"]
    assert {name: list(stage["roles"]) for name, stage in stages.items()} == {
        "train": ["actor"], "train.critic": ["critic"], "generate": ["actor"], "assess": ["critic", "reference"],
    }  # fmt: skip
    assert list(describe(own)["stages"]) == ["train", "train.critic", "generate", "assess"]


def test_bytes_of_eight_by_hand(eight):
    """78,144 parameters: 77,824 in matrices, split over fsdp and tensor, and 5 norms of 64, on every device."""
    tensor = lambda stage, role, name: next(
        t for t in eight["stages"][stage]["roles"][role]["tensors"] if name in t["name"]
    )
    gate = tensor("train", "actor", "gate_proj")
    assert gate == {
        "name": "model.layers.{}.mlp.gate_proj.weight", "dims": "L D F", "shape": [2, 64, 128],
        "placement": [["pipe"], ["fsdp"], ["tensor"]], "bytes": 65536, "bytes_per_device": 16384,
    }  # fmt: skip
    assert tensor("generate", "actor", "gate_proj")["placement"] == [["pipe"], [], ["tensor"]]  # ZeRO 0: no fsdp
    assert tensor("generate", "actor", "gate_proj")["bytes_per_device"] == 65536
    assert tensor("assess.reference", "reference", "gate_proj")["bytes_per_device"] == 32768
    assert tensor("train", "actor", "input_layernorm")["bytes_per_device"] == 2 * 64 * 4
    actor = eight["stages"]["train"]["roles"]["actor"]
    assert (actor["parameters"], actor["bytes"]) == (78144, 312576)
    assert actor["bytes_per_device"] == actor["gradient_bytes_per_device"] == 79104 == (77824 // 4 + 320) * 4
    assert actor["optimizer_bytes_per_device"] == 2 * 79104
    assert eight["stages"]["generate"]["roles"]["actor"]["bytes_per_device"] == 312576
    reference = eight["stages"]["assess.reference"]["roles"]["reference"]
    assert reference["bytes_per_device"] == 156928 == (77824 // 2 + 320) * 4
    assert "optimizer_bytes_per_device" not in reference and not reference["training"]


def test_half_the_bytes_per_element_but_full_moments():
    actor = describe(load(ROOT / "meshes/eight.toml"), ROLES, bytes_per_element=2)["stages"]["train"]["roles"]["actor"]
    assert actor["bytes_per_device"] == actor["gradient_bytes_per_device"] == 39552
    assert actor["optimizer_bytes_per_device"] == 2 * 79104


@pytest.mark.parametrize("zero, split", [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_zero_levels_split_state_one_after_another(zero, split):
    """How many ways fsdp=4 splits the matrices of parameters, gradients and moments; norms stay whole."""
    file = mesh_file(train={"layout": Layout(fsdp=4), "zero": zero})
    actor = describe(file, ROLES)["stages"]["train"]["roles"]["actor"]
    parameters, gradients, moments = (77824 // ways + 320 for ways in split)
    assert actor["bytes_per_device"] == 4 * parameters
    assert actor["gradient_bytes_per_device"] == 4 * gradients
    assert actor["optimizer_bytes_per_device"] == 8 * moments


@pytest.mark.parametrize("path", SIMULATED, ids=lambda path: path.stem)
def test_grid_and_shards_are_those_of_jax(path):
    """On simulated devices: their numbers by coordinate, the bytes of a shard, and as many distinct ones as a whole."""
    for name, stage in describe(load(path), ROLES)["stages"].items():
        layout = Layout(**stage["axes"])
        mesh = layout.mesh(jax.devices("cpu")[slice(*stage["devices"])])
        assert stage["grid"] == np.vectorize(lambda device: device.id)(mesh.devices).tolist(), name
        table = jax.tree.leaves(LM.table, is_leaf=is_tensor)
        places = jax.tree.leaves(shardings(LM.table, mesh, stage["zero"]))
        for role in stage["roles"].values():
            for row, tensor, sharding in zip(role["tensors"], table, places, strict=True):
                assert row["bytes_per_device"] == prod(sharding.shard_shape(tensor.shape)) * 4
                indices = sharding.devices_indices_map(tensor.shape).values()
                assert row["bytes_per_device"] * len(set(map(str, indices))) == row["bytes"] == tensor.size * 4
                assert row["placement"] == [[axis] if axis else [] for axis in sharding.spec.partitions]


@pytest.mark.parametrize("path", MESHES, ids=lambda path: path.stem)
@pytest.mark.parametrize("roles", [None, ROLES], ids=["file", "model"])
def test_every_mesh_file_is_drawn_within_80_columns(path, roles):
    description = describe(load(path), roles)
    shown = text(description)
    assert path.name in shown and "train" in shown and "generate" in shown and "assess" in shown
    assert ("MiB/device" in shown) == (roles is not None)
    assert text(json.loads(json.dumps(description))) == shown


def test_the_grid_of_eight():
    assert """\
      tensor        0             1
  data  fsdp ╭─────────────┬─────────────╮
     0     0 │ 0 shard 1/4 │ 1 shard 2/4 │ rows 1/4
           1 │ 2 shard 3/4 │ 3 shard 4/4 │ rows 2/4
             ├─────────────┼─────────────┤
     1     0 │ 4 shard 1/4 │ 5 shard 2/4 │ rows 3/4
           1 │ 6 shard 3/4 │ 7 shard 4/4 │ rows 4/4
             ╰─────────────┴─────────────╯
""" in "".join(line.rstrip() + "\n" for line in text(describe(load(ROOT / "meshes/eight.toml"))).splitlines())


def test_stages_placed_alike_are_drawn_once(eight):
    lines = text(eight).splitlines()
    heads = [line.split("  ")[0] for line in lines if "zero=" in line]
    assert heads == ["train", "generate, assess", "assess.reference"]
    shared = text(describe(load(ROOT / "meshes/v5p_8.toml"), ROLES))  # actor and reference: equal tables, drawn once
    assert "  actor, reference  78,144 parameters of 4 bytes" in shared
    assert shared.count("gate_proj") == 2


def test_what_is_replicated_is_said(eight):
    shown = text(eight)
    assert "4 parts over fsdp × tensor, replicated 2× over data" in shown
    assert "whole, replicated 8× over data" in shown
    assert "replicated" not in text(describe(load(ROOT / "meshes/one.toml"), ROLES))
    seq = text(describe(load(ROOT / "meshes/eight_seq.toml")))
    assert "sequences   2 parts over seq" in seq and "4 parts over fsdp × tensor, replicated 2× over seq" in seq


def test_one_shard_one_color():
    boxes = {}
    for segment in console().render(draw(describe(load(ROOT / "meshes/eight.toml")))):
        if segment.style and segment.style.bgcolor and "/4" in segment.text:
            boxes[segment.text.strip()] = segment.style.bgcolor.name
    assert boxes == {f"{device} shard {device % 4 + 1}/4": SHARDS[device % 4] for device in range(8)}


def test_a_table_of_tensors(eight):
    rows = [line.split() for line in text(eight).splitlines()]
    assert "mlp.gate_proj D=64 F=128 D/fsdp · F/tensor 0.02".split() in rows
    assert "model.norm D=64 replicated <0.01".split() in rows
    assert ["model.layers.{}", "L=2"] in rows
    assert ["Adam", "moments", "0.15"] in rows and ["total", "0.30"] in rows


def test_misfits_are_red():
    description = describe(mesh_file(train={"layout": Layout(tensor=8)}), ROLES)
    assert description["stages"]["train"]["roles"]["actor"]["misfits"][0].startswith("4 heads do not divide")
    red = [
        s.text for s in console().render(draw(description)) if s.style and s.style.color and s.style.color.name == "red"
    ]
    assert any("✗ 4 heads do not divide over tensor=8: 1, 2, 4 would" in line for line in red)
    assert text(description)


BIG = {
    "train": {"layout": Layout(data=4, fsdp=16, seq=2, tensor=8)},
    "generate": {"layout": Layout(data=32, tensor=32)},
    "assess": {"layout": Layout(data=1024)},
}


def test_a_thousand_devices_are_folded():
    description = describe(mesh_file("tpu", **BIG), {"actor": (LM, False)})
    shown = text(description)
    assert "⋮" in shown and "…" in shown and "1023·128" in shown and "rows 1024/1024" in shown
    assert "may permute TPU devices" in shown and len(shown.splitlines()) < 120
    assert np.array(description["stages"]["train"]["grid"]).ravel().tolist() == list(range(1024))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 2, 2, 2, 2, 2),
        Layout(*[16] * 4),
        Layout(1, 1, 1, 16, 16),
        Layout(tensor=8, fsdp=8),
        Layout(expert=8, pipe=2),
    ],
    ids=str,
)
def test_any_layout_is_drawn_within_80_columns(layout):
    for zero in (0, 3):
        shown = text(describe(mesh_file(train={"layout": layout, "zero": zero, "microbatches": 128})))
        assert all(axis in shown for axis in AXES if getattr(layout, axis) > 1)
        assert f"{layout.devices - 1}" in shown


def test_eight_way_tensor_parallelism_shows_every_column():
    shown = text(describe(mesh_file(train={"layout": Layout(fsdp=8, tensor=8)})))
    assert all(f"│{d:>2}·{d + 1:>2}" in shown for d in range(64)) and "device·shard" in shown


def test_groups_and_their_devices():
    description = describe(load(ROOT / "meshes/eight_split.toml"))
    assert "learn = 0–3 · act = 4–7" in text(description)
    assert "learn = 0–3 · act = 4–7" in text({**description, "file": 70 * "f" + ".toml"})  # on a line of its own
    assert np.array(description["stages"]["generate"]["grid"]).ravel().tolist() == [4, 5, 6, 7]


def test_nothing_touches_a_device():
    code = """
from jax._src import xla_bridge
from rich.console import Console
from rljax.mesh.file import load
from rljax.model.decoder import Decoder
from rljax.plan.draw import describe, draw
lm = Decoder(vocab=32, width=64, layers=2, heads=4, kv_heads=4, head_dim=16, ffn=128).build()
Console(width=80).print(draw(describe(load("meshes/v5e_8.toml"), {"actor": (lm, True)})))
assert not xla_bridge.backends_are_initialized()
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "none-such",
    }  # with which any touch is an error
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
