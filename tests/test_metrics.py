"""What a run writes survives a kill, is strict JSON, and can be cut back to a checkpoint; pictures and trackers."""

import json
import math
import os
import sys

import numpy as np
import pytest

from rljax.errors import UserError
from rljax.run.metrics import JsonLines, MetricsLog, TensorBoard, WandB, read, truncate
from rljax.run.report import draw


def test_a_line_is_strict_json_with_its_metrics_flat(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append("train", np.int32(1), {"reward": np.float32(0.5), "loss": math.nan, "kl/reference": -math.inf})
    (line,) = path.read_text().splitlines()

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads(line, parse_constant=refuse)
    assert list(row)[:3] == ["phase", "step", "time"] and row.pop("time") > 1.7e9
    assert row == {"phase": "train", "step": 1, "reward": 0.5, "loss": None, "kl/reference": None}


def test_metrics_cannot_take_the_names_of_the_line(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(ValueError, match="step"):
        log.append("train", 1, {"step": 2.0})


def test_floats_come_back_bitwise(tmp_path):
    values = np.random.default_rng(0).normal(size=50).astype(np.float32)
    with MetricsLog(tmp_path / "m") as log:
        for step, value in enumerate(values, 1):
            log.append("train", step, {"x": value})
    assert [row["x"] for row in read(tmp_path / "m")] == values.astype(float).tolist()


def test_samples_are_rows_of_the_same_kind(tmp_path):
    sample = {"step": 1, "uid": 7, "prompt": "1+1\u2028=", "completion": "é\n\ud800", "reward": np.float32("nan"),
              "length": np.int32(3), "finish_reason": "stop"}  # fmt: skip
    with JsonLines(tmp_path / "samples.jsonl") as samples:
        samples.write(sample)
        samples.write(sample | {"reward": 1.0})
    assert read(tmp_path / "samples.jsonl") == [sample | {"reward": None, "length": 3}, sample | {"reward": 1.0}]


def test_a_torn_last_line_is_ignored_and_cut_off_when_writing_goes_on(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    assert read(path) == [{"step": 1}]
    with JsonLines(path) as log:
        log.write({"step": 2})
    assert read(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("bad", [b'{"step": 2, "rew', b"[1]", b"", b"\xff"])
def test_any_other_bad_line_is_told_with_its_number(tmp_path, bad):
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"m, line 2: "):
        read(path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read(tmp_path / "m")


def test_truncate_keeps_lines_as_they_were_and_appending_goes_on(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'{"step":1, "x":0.10}\n{"step":2}\n{"step":3}\n{"st')
    truncate(path, lambda row: row["step"] <= 1)
    assert path.read_bytes() == b'{"step":1, "x":0.10}\n'
    with JsonLines(path) as log:
        log.write({"step": 2})
    assert [row["step"] for row in read(path)] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]
    truncate(tmp_path / "missing", lambda row: True)


def test_a_disk_that_takes_half_a_line_keeps_none_of_it(tmp_path, monkeypatch):
    write = os.write
    with JsonLines(tmp_path / "m") as log:
        log.write({"step": 1})
        with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
            full.setattr(os, "write", lambda fd, line: write(fd, line[:4]))
            log.write({"step": 2})
        log.write({"step": 3})
    assert [row["step"] for row in read(tmp_path / "m")] == [1, 3]


def test_writers_hear_every_line_and_are_closed(tmp_path):
    class Heard(list):
        closed = False

        def __call__(self, *line):
            self.append(line)

        def close(self):
            self.closed = True

    heard = Heard()
    with MetricsLog(tmp_path / "m", heard) as log:
        log.append("train", 1, {"reward": np.float32(0.5)})
    assert heard == [("train", 1, {"reward": 0.5})] and heard.closed


@pytest.mark.parametrize(("tracker", "package"), [(TensorBoard(), "tensorboardX"), (WandB(), "wandb")])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, tracker, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{type(tracker).__name__} needs .*{package}.*pip install 'rljax\[track\]'"):
        tracker.open(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_shows_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    for step in (1, 2):
        with MetricsLog(tmp_path / "metrics.jsonl", TensorBoard().open(tmp_path, {"seed": 0})) as log:
            log.append("train", step, {"reward": step / 4, "loss": math.nan})
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, points = file.read_bytes(), []
    while data:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(data[:8], "little")
        event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
        points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    assert [point for point in points if point[0].startswith("train/")] == [
        ("train/reward", 1, 0.25), ("train/reward", 2, 0.5),
    ]  # fmt: skip


def test_wandb_writes_offline(tmp_path, capsys):
    pytest.importorskip("wandb")
    for step in (1, 2):
        writer = WandB(mode="offline").open(tmp_path, {"seed": 0})
        writer("train", step, {"reward": 0.5, "loss": math.nan})
        writer.close()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2  # one id, so that a sync makes one run of them
    assert len((tmp_path / "wandb.id").read_text()) == 32
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("count", [0, 1, 3, 60])
def test_curves_are_drawn_of_whatever_was_measured(tmp_path, count):
    rows = [{"phase": "warmup", "step": 1, "time": 0.0, "loss": 1.0}]
    for step in range(1, count + 1):
        row = {"reward": None if step == 2 else 0.5, "length": 30.0, "seconds/generate": 0.1, "seconds/train": None}
        rows.append({"phase": "train", "step": step, "time": 0.0, **row})
    path = draw(tmp_path, rows)
    assert path == tmp_path / "curves.png" and path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
