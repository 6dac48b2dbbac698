"""Pipeline schedules: tables replayed with symbols for values, figures against the papers', and the picture."""

import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rljax.errors import UserError
from rljax.mesh.file import parse
from rljax.mesh.orders import BI, BW, IDLE, B, F, dualpipe
from rljax.mesh.schedule import SCHEDULES, build, figures, legal
from rljax.mesh.timetable import COLUMNS, SLOTS
from rljax.plan.draw_schedule import describe, draw

ROOT = Path(__file__).parents[1]
MICROBATCHES = 1, 2, 3, 4, 5, 8, 12, 15, 16, 17
every = pytest.mark.parametrize(
    "name, S", [(n, S) for n in SCHEDULES for S in (2, 3, 4, 6, 8) if legal(n, S, 48) is None]
)


def built(name, S):
    """The schedule for every number of microbatches that is legal."""
    return [build(name, S, M) for M in MICROBATCHES if legal(name, S, M) is None]


def replay(schedule) -> tuple[int, int]:
    """Runs the table as an executor would, on symbols; the most values that an inbox and a stash held at once.

    An input of a part is ("x", part, microbatch), a cotangent of its output ("ct", part, microbatch).
    """
    table, S, M = schedule.table, schedule.stages, schedule.microbatches
    last = schedule.part.max()
    inbox = [[None] * (schedule.inbox + 1) for _ in range(S)]
    stash = [[None] * schedule.stash for _ in range(S)]
    written, read, done = {}, {}, Counter()  # by device and value
    for t in range(len(table["op"])):
        out = [None] * S
        for d in range(S):
            op, chunk, m, first, at_last, slot, xin, cin, *_ = (int(table[name][t, d]) for name in (*COLUMNS, *SLOTS))
            if op == IDLE:
                assert not first and not at_last
                continue
            part = schedule.part[d, chunk]
            assert (first, at_last) == (part == 0, part == last) and not (at_last and op == F)
            if first:
                assert xin == schedule.inbox
            else:
                assert xin < schedule.inbox and inbox[d][xin] == ("x", part, m)
                read[d, "x", part, m] = t
            if op in (B, BI) and not at_last:
                assert cin < schedule.inbox and inbox[d][cin] == ("ct", part, m)
                read[d, "ct", part, m] = t
            else:
                assert cin == schedule.inbox
            if op not in (BI, BW):
                assert slot == 0
            if op == BI:
                stash[d][slot] = part, m
                written[d, "stash", part, m] = t - 1  # it is live in the tick that makes it
            if op == BW:
                assert stash[d][slot] == (part, m)
                read[d, "stash", part, m] = t
            if op in (B, BI) and not at_last:
                assert done[part, m] == 1  # after its forward
            done[part, m] += {F: 1, B: 10, BI: 4, BW: 6}[op]
            if op == F:
                out[d] = "x", part + 1, m
            elif op != BW and not first:
                out[d] = "ct", part - 1, m
        for d in range(S):
            sides = {"left_slot": (d - 1) % S, "right_slot": (d + 1) % S, "self_slot": d}
            at = {side: int(table[side][t, d]) for side in sides}
            kept = [slot for slot in at.values() if slot < schedule.inbox]
            assert len(kept) == len(set(kept))
            for side, sender in sides.items():
                inbox[d][at[side]] = out[sender]
                if at[side] < schedule.inbox:
                    assert (d, *out[sender]) not in written
                    written[d, *out[sender]] = t
    expected = {(p, m): 10 + (p < last) for p in range(last + 1) for m in range(M)}
    assert done == expected  # each part saw each microbatch forward and backward once
    assert written.keys() == read.keys()  # all that is kept is read

    def most(kinds) -> int:
        live = np.zeros((S, len(table["op"]) + 1), int)
        for (d, kind, *rest), t in written.items():
            live[d, t + 1 : read[d, kind, *rest] + 1] += kind in kinds
        return live.max()

    return most(("x", "ct")), most(("stash",))


@every
def test_every_op_reads_what_it_must_in_as_few_slots_as_can_be(name, S):
    for schedule in built(name, S):
        assert {column.dtype for column in schedule.table.values()} == {np.dtype(np.int32)}
        assert {column.shape for column in schedule.table.values()} == {(figures(schedule)["ticks"], S)}
        assert replay(schedule) == (schedule.inbox, schedule.stash)


@every
def test_both_views_have_one_order(name, S):
    for schedule in built(name, S):
        for d, boxes in enumerate(schedule.timeline):
            last = (
                schedule.part[d].tolist().index(schedule.parts - 1) if schedule.parts - 1 in schedule.part[d] else None
            )
            ops = np.stack([schedule.table[column][:, d] for column in ("op", "chunk", "microbatch")], 1)
            expected = [box.op for box in boxes if (box.op.kind, box.op.chunk) != (F, last)]
            assert [tuple(op) for op in ops.tolist() if op[0] != IDLE] == expected


@every
def test_in_the_timeline_ops_follow_what_they_need(name, S):
    """And one another, on a device."""
    for schedule in built(name, S):
        timeline_is_possible(schedule)


def timeline_is_possible(schedule):
    last, ends = schedule.parts - 1, {}
    for d, boxes in enumerate(schedule.timeline):
        for box, after in zip(boxes, boxes[1:], strict=False):
            assert box.start + box.units <= after.start
        for box in boxes:
            assert box.units == {F: 1, B: 2, BI: 1, BW: 1}[box.op.kind]
            ends[box.op.kind, schedule.part[d, box.op.chunk], box.op.microbatch] = box.start + box.units
    for d, boxes in enumerate(schedule.timeline):
        for start, _, (kind, chunk, m) in boxes:
            part = schedule.part[d, chunk]
            if kind == F:
                assert part == 0 or start >= ends[F, part - 1, m]
            elif kind == BW:
                assert start >= ends[BI, part, m]
            else:
                assert start >= ends[F, part, m]
                assert part == last or start >= min(ends.get((k, part + 1, m), np.inf) for k in (B, BI))


IDLE_UNITS = {  # of a device, F = BI = BW = 1 and B = 2, from the papers' formulas
    "gpipe": lambda S: 3 * (S - 1),  # (S - 1)(F + B)
    "1f1b": lambda S: 3 * (S - 1),
    "interleaved": lambda S: 3 * (S - 1),  # of parts half as long
    "zb-h1": lambda S: S - 1,  # (S - 1)(F + B - W)
    "zb-v": lambda S: S - 1,  # of parts half as long; the last device has to wait so long for its first input
    "dualpipe": lambda S: S // 2 if S > 2 else 0,  # less than the paper's S - 2: see the test of pairs
}
ENOUGH = {"zb-h1": 1, "zb-v": 2, "dualpipe": 2}  # microbatches a stage, from which the formula holds


@every
def test_bubbles_are_those_of_the_papers(name, S):
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    for schedule in built(name, S):
        M, f = schedule.microbatches, figures(schedule)
        if M >= ENOUGH.get(name, 0) * S:
            assert f["units"] == 3 * M * chunks + IDLE_UNITS[name](S)
            assert f["bubble"] == pytest.approx(IDLE_UNITS[name](S) / (3 * M * chunks), rel=1e-12)


@pytest.mark.parametrize("S", [2, 4, 6, 8, 16])
def test_dualpipe_in_chunks_of_a_forward_and_a_backward_pass_idles_as_its_paper_says(S):
    """(S/2 - 1)(F&B + B - 3W), where a pair passes on all it made at its end; in the timeline each pass has its own."""
    M, units = 2 * S + 2, {F: 1, B: 2, BI: 1, BW: 1}
    chunks = []
    for d in range(S):
        chunks.append([])
        for op in dualpipe(d, S, M):
            if op.kind == B and chunks[d][-1][-1].kind == F:
                chunks[d][-1].append(op)
            else:
                chunks[d].append([op])
    clock, made = [0] * S, {}
    while any(chunks):
        for d in range(S):
            needs = []
            for kind, chunk, m in chunks[d][0] if chunks[d] else []:
                source = d + (1 if (kind == F) == (chunk == 1) else -1)  # the first pipeline goes up, the second down
                if kind != BW and 0 <= source < S:
                    needs.append((kind == F, source, chunk, m))
            if chunks[d] and all(need in made for need in needs):
                pair = chunks[d].pop(0)
                clock[d] = max([clock[d], *(made[need] for need in needs)]) + sum(units[op.kind] for op in pair)
                made |= {(op.kind == F, d, op.chunk, op.microbatch): clock[d] for op in pair if op.kind != BW}
    assert max(clock) - 3 * M == (S / 2 - 1) * (3 + 2 - 3 * 1) >= IDLE_UNITS["dualpipe"](S)


@pytest.mark.parametrize("S, M, bubbles", [
    (8, 32, [7 / 32, 7 / 32, 7 / 64, 7 / 96, 7 / 192, 1 / 24]), (4, 8, [3 / 8, 3 / 8, 3 / 16, 1 / 8, 1 / 16, 1 / 12]),
])  # fmt: skip
def test_bubbles_in_numbers(S, M, bubbles):
    names = "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"
    assert [figures(build(name, S, M))["bubble"] for name in names] == pytest.approx(bubbles, rel=1e-12)


@pytest.mark.parametrize("S, M", [(2, 8), (4, 16), (8, 16), (8, 32)])
def test_what_is_in_flight(S, M):
    held = {name: figures(build(name, S, M)) for name in SCHEDULES}
    each = {name: f["in_flight_per_device"] for name, f in held.items()}
    assert each["gpipe"] == [M] * (S - 1) + [1]  # the last stage goes back at once
    assert each["1f1b"] == [min(M, S - i) for i in range(S)]
    assert each["interleaved"] == [2 * (S - i - 1) + S + 1 for i in range(S)]  # first: 2 S (1 + (S - 1) / 2S)
    assert each["zb-h1"] == [min(M, S)] * S  # 1F1B's first device's: what waits for BW counts
    assert each["zb-v"] == [2 * S] * S  # of half the size
    assert each["dualpipe"] == [S + 1] * S
    assert [f["in_flight"] for f in held.values()] == [max(n) for n in each.values()]
    assert [f["stash"] for f in held.values()] == [0, 0, 0, S, 2 * S - 1, S // 2]
    assert [f["weights"] for f in held.values()] == [1, 1, 1, 1, 1, 2]
    # a cotangent beside what is in flight on the second device, but where it takes the place of what it meets
    assert held["gpipe"]["inbox"] == M + (S > 2) - (S == 2)
    assert held["1f1b"]["inbox"] == S - (S == 2)


def test_few_microbatches_hold_few():
    assert figures(build("1f1b", 8, 3))["in_flight_per_device"] == [3, 3, 3, 3, 3, 3, 2, 1]
    assert figures(build("zb-h1", 8, 3))["in_flight"] == 3 and figures(build("zb-v", 8, 3))["in_flight"] == 6


def test_ticks_and_flops():
    """One op a tick; the last stage's forward is within its backward, and the others' is run again."""
    for name, (ticks, flops) in {
        "gpipe": (20, 4 / 3), "1f1b": (20, 4 / 3), "interleaved": (36, 4 / 3),
        "zb-h1": (26, 5 / 3), "zb-v": (51, 5 / 3), "dualpipe": (19, None),
    }.items():  # fmt: skip
        f = figures(build(name, 4, 8))
        assert f["ticks"] == ticks and (flops is None or f["flops"] == pytest.approx(flops))
    halves = [sum(box.op.kind == BI for box in boxes) for boxes in build("dualpipe", 4, 8).timeline]
    merged = [7 / 6, 4 / 3, 4 / 3, 7 / 6]  # a last part on either end
    assert f["flops_per_device"] == pytest.approx([m + n / 24 for m, n in zip(merged, halves, strict=True)])
    assert figures(build("1f1b", 4, 8))["flops_per_device"] == pytest.approx([4 / 3, 4 / 3, 4 / 3, 1])
    assert figures(build("zb-v", 4, 8))["flops_per_device"] == pytest.approx([3 / 2, 5 / 3, 5 / 3, 5 / 3])


def test_placements():
    part = {name: build(name, 4, 8).part.T.tolist() for name in SCHEDULES}
    assert part["gpipe"] == part["1f1b"] == part["zb-h1"] == [[0, 1, 2, 3]]
    assert part["interleaved"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert part["zb-v"] == [[0, 1, 2, 3], [7, 6, 5, 4]]
    assert part["dualpipe"] == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_the_order_of_zb_h1_by_hand():
    """Three stages, four microbatches: device i starts BW once i + 1 microbatches have been backward."""
    letters = {F: "F", BI: "B", BW: "W"}
    orders = [
        "".join(letters[b.op.kind] + str(b.op.microbatch) for b in boxes) for boxes in build("zb-h1", 3, 4).timeline
    ]
    assert orders == ["F0F1F2B0W0F3B1W1B2W2B3W3", "F0F1B0F2B1W0F3B2W1B3W2W3", "F0B0F1B1F2B2W0F3B3W1W2W3"]


@pytest.mark.parametrize("args, said", [
    (("interleaved", 4, 6), "microbatches = 6: interleaved needs a multiple of pipe = 4: 4 or 8 would fit"),
    (("interleaved", 4, 2), "microbatches = 2: interleaved needs a multiple of pipe = 4: 4 would fit"),
    (("dualpipe", 3, 8), "pipe = 3: dualpipe needs an even number of stages: 2 or 4 would fit"),
    (("dualpipe", 4, 9), "microbatches = 9: dualpipe needs an even number, at least 2 × pipe = 8: 10 would fit"),
    (("dualpipe", 4, 6), "microbatches = 6: dualpipe needs an even number, at least 2 × pipe = 8: 8 would fit"),
    (("1f1b", 4, 8, 30), "30 layers do not divide into pipe = 4 equal parts, as 1f1b needs: pipe = 3 or 5 would"),
    (("zb-v", 4, 8, 12), "do not divide into pipe = 4 × 2 = 8 equal parts, as zb-v needs: pipe = 3 or 6 would"),
    (("dualpipe", 4, 8, 6), "6 layers do not divide into pipe = 4 equal parts, as dualpipe needs: pipe = 2 or 6 would"),
    (("zb-v", 2, 8, 3), "do not divide into pipe = 2 × 2 = 4 equal parts, as zb-v needs: no pipe would"),
])  # fmt: skip
def test_what_is_illegal_and_what_would_fit(args, said):
    assert legal(*args).endswith(said)
    if len(args) == 3:
        with pytest.raises(ValueError, match="would fit"):
            build(*args)


def test_what_is_legal():
    assert all(legal(name, 1, 3, 7) is None for name in SCHEDULES)  # no pipeline, whatever it is called
    assert all(legal(name, 4, 8, 16) is None for name in SCHEDULES)
    assert legal("dualpipe", 4, 8, 4) is None and legal("1f1b", 3, 1, 3) is None


# In a mesh file, and drawn


def mesh(pipe, M, name, devices=None):
    text = f'platform = "cpu"\ndevices = {devices or pipe}\n[train]\npipe = {pipe}\nmicrobatches = {M}\n'
    return parse(text + f'schedule = "{name}"\n' + (f"fsdp = {devices // pipe}" if devices else ""), "m.toml")


def shown(description) -> str:
    terminal = Console(width=80, file=io.StringIO(), record=True)
    terminal.print(draw(description))
    text = "".join(line.rstrip() + "\n" for line in terminal.export_text().splitlines())
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_a_mesh_file_with_an_illegal_schedule_is_refused():
    assert mesh(4, 8, "zb-v", devices=8).placement("train").schedule == "zb-v"
    with pytest.raises(UserError, match=r"m.toml: \[train\] microbatches = 6: interleaved needs"):
        mesh(4, 6, "interleaved")


def test_the_picture_of_1f1b():
    assert """\
  pipe 0                   10                  20
     0 0 1 2 · · · · 0───3 1───4 2───5 3───· 4───· 5───
     1 · 0 1 · · 0───2 1───3 2───4 3───5 4───· 5───· ·
     2 · · 0 0───1 1───2 2───3 3───4 4───5 5───· · · ·
""" in shown(describe(mesh(3, 6, "1f1b")))


def test_the_picture_of_zb_h1():
    text = shown(describe(mesh(3, 4, "zb-h1", devices=6)))
    assert (
        """\
     0 0 1 2 · · 0─0=3 1─1=2─2=3─3=
     1 · 0 1 · 0─2 1─0=3 2─1=3─2=3=
     2 · · 0 0─1 1─2 2─0=3 3─1=2=3=
"""
        in text
    )
    assert all(words in text for words in ("16.7%  2 units idle for 12 busy, 14 in all", "1.67×", "in flight      3"))


def test_every_schedule_is_drawn_within_80_columns():
    for name in SCHEDULES:
        for pipe, M in ((2, 4), (4, 8), (8, 32), (32, 128)):
            description = describe(mesh(pipe, M, name))
            text = shown(description)
            assert f"{name} · pipe={pipe} · microbatches={M}" in text and len(text.splitlines()) < 60
            assert ("⋮" in text) == (description["figures"]["units"] > 146 or pipe > 16)
            assert shown(json.loads(json.dumps(description))) == text


def test_colors_tell_what_runs_and_in_which_part():
    terminal = Console(width=80, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor")
    boxes = Counter()
    for segment in terminal.render(draw(describe(mesh(2, 4, "zb-v")))):
        if segment.style and segment.style.bgcolor:
            boxes[segment.style.bgcolor.name] += len(segment.text.strip())
    assert len(boxes) == 6  # three kinds of op in two parts


def test_without_a_pipeline_there_is_nothing_to_draw():
    description = describe(parse('platform = "cpu"\ndevices = 1\n[train]\n', "m.toml"))
    assert description == {"file": "m.toml", "schedule": None, "pipe": 1, "microbatches": 1}
    assert shown(description) == "m.toml: [train] pipe = 1: no pipeline, so there is no schedule to draw\n"


def test_schedules_need_no_jax():
    code = (
        "import sys, importlib.util as u, types\n"
        "for name in ('rljax', 'rljax.mesh'):\n"
        "    sys.modules[name] = types.ModuleType(name); sys.modules[name].__path__ = [name.replace('.', '/')]\n"
        "from rljax.mesh.schedule import build\n"
        "build('zb-v', 4, 8)\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
