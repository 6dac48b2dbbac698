"""A layout that a model cannot have is refused before anything is built: the rule, and the nearest that it can."""

from types import SimpleNamespace

import jax
import pytest
from tiny import DEEPSEEK, SIZES

from rljax.errors import UserError
from rljax.mesh import Layout, Placement
from rljax.mesh.file import parse
from rljax.model.decoder import Decoder
from rljax.model.table import misfits
from rljax.run.stages import place

SMALL = Decoder(**SIZES)  # 4 heads, 2 key/value heads of 8, width 32, feed-forward 64, vocabulary 48, 2 layers
MIXED = Decoder(**SIZES | dict(layers=5), experts=DEEPSEEK, dense=1)


@pytest.mark.parametrize(
    "model, placement, said",
    [
        (SMALL, dict(layout=Layout(tensor=3)), "4 heads do not divide over tensor=3: 1, 2, 4 would"),
        (
            Decoder(**SIZES | dict(heads=12, kv_heads=4, vocab=96)),
            dict(layout=Layout(tensor=6)),
            "4 key/value heads and tensor=6: neither divides the other: 1, 2, 4, 12 would",
        ),
        (SMALL, dict(layout=Layout(fsdp=3)), "dimension D = 32 does not divide over fsdp=3: 1, 2, 4, 8, 16, 32 would"),
        (SMALL, dict(layout=Layout(fsdp=3), zero=1), "dimension D = 32 does not divide over fsdp=3"),
        (
            SMALL,
            dict(layout=Layout(seq=4), context="ulysses"),
            "2 key/value heads over tensor=1 and seq=4, which do not divide them: seq=1, 2 or context = \"ring\" would",
        ),
        (SMALL, dict(layout=Layout(seq=2, tensor=4), context="ulysses"), "seq=1 or context = \"ring\" would"),
        (MIXED, dict(layout=Layout(expert=3)), "dimension E = 8 does not divide over expert=3: 1, 2, 4, 8 would"),
        (Decoder(**SIZES | dict(vocab=50)), dict(layout=Layout(tensor=4)), "dimension V = 50 does not divide"),
    ],
)  # fmt: skip
def test_one_line_says_the_rule_and_what_would_fit(model, placement, said):
    lines = misfits(model.build(), Placement(**placement))
    assert any(said in line for line in lines), lines
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    "model, placement",
    [
        (SMALL, dict(layout=Layout(data=3))),
        (SMALL, dict(layout=Layout(fsdp=3), zero=0)),  # whole on every device
        (SMALL, dict(layout=Layout(tensor=4))),  # two devices share a key/value head
        (SMALL, dict(layout=Layout(seq=3), context="ring")),  # rows are padded
        (SMALL, dict(layout=Layout(expert=3))),  # without experts it splits the batch alone
        (SMALL, dict(layout=Layout(seq=2), context="ulysses")),
        (MIXED, dict(layout=Layout(fsdp=2, expert=4, tensor=2), sequence_parallel=True)),
    ],
)
def test_what_fits_is_not_refused(model, placement):
    assert misfits(model.build(), Placement(**placement)) == []


def test_the_error_names_file_stage_and_role():
    mesh = parse('platform = "cpu"\ndevices = 3\n[train]\ntensor = 3', "three.toml")
    with pytest.raises(UserError, match=r"three.toml: \[train\] tensor=3 does not fit roles.actor.lm: 4 heads do not"):
        place(mesh, SMALL.build(), "train")


@pytest.mark.parametrize("stage", ["train", "generate", "assess"])
def test_frozen_roles_are_plain_replicas_and_trainable_ones_sharded_unless_said(stage):
    read = lambda tables: parse(f'platform = "cpu"\ndevices = 8\n{tables}', "m.toml").placement
    plain = read("[train]\nfsdp = 8")
    assert plain(stage, "reference", trainable=False).zero == plain(stage, "reward", trainable=False).zero == 0
    assert plain(stage, "actor").zero == plain(stage, "critic").zero == (3 if stage == "train" else 0)
    said = read(f"[train]\nfsdp = 8\n[{stage}.reference]\nfsdp = 8\nzero = 3\n[{stage}.critic]\nfsdp = 8\nzero = 1")
    assert said(stage, "reference", trainable=False).zero == 3 and said(stage, "critic").zero == 1


def test_a_pipeline_is_refused_where_the_compiler_would_abort(monkeypatch):
    mesh = parse('platform = "tpu"\ndevices = 2\n[train]\npipe = 2\nmicrobatches = 2', "two.toml")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 9))
    with pytest.raises(UserError, match="cannot compile pipelines for tpu: 0.12 or newer, or pipe = 1, would do"):
        place(mesh, SMALL.build(), "train", devices=2 * [SimpleNamespace(platform="tpu")])
    assert place(mesh, SMALL.build(), "train", devices=jax.devices()[:2]).placement.layout.pipe == 2
