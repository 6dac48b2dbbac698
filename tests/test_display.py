"""What a person sees: one plain line per step or a panel, on stderr alone, whatever the metrics lack."""

import io
import math
import re

import pytest
from rich.console import Console

from rljax.run import display
from rljax.run.display import Display, before_after

STEP = {
    "reward": 0.71, "loss": 0.0123, "eval/exact_match": 0.84, "eval/exact_match_greedy": 0.98, "length": 30.1,
    "tokens_per_second": 5123.0, "seconds/generate": 0.156, "seconds/reshard": 0.008, "seconds/assess": 0.021,
    "seconds/train": 0.225,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A clock that one sets, in seconds."""
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def rendered(renderable, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_a_plain_line_tells_the_step(capsys, clock):
    with Display("addition", plain=True) as shown:
        shown.phase("train", 40)
        shown.stage("generate")
        for step in range(1, 13):
            clock[0] += 0.5
            shown.update(step, STEP)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 13 and lines[0] == "addition: train, 40 steps"
    assert lines[1] == (
        "train 1/40  reward 0.71  loss 0.01  eval 0.84 (greedy 0.98)  length 30.1  5.1k tok/s  "
        "0.41 s: generate 38% reshard 2% assess 5% train 55%"
    )
    assert lines[-1] == lines[1].replace(" 1/40", " 12/40") + "  ETA 0:14"


def test_plain_lines_are_no_more_than_steps_and_not_a_flood(capsys, clock):
    shown = Display("t", plain=True)
    shown.phase("warmup", 1000)
    for step in range(1, 1001):
        clock[0] += 0.01
        shown.update(step, {"loss": 1.0})
        shown.update(step, {"eval/exact_match": 0.5})
    lines = capsys.readouterr().err.splitlines()[1:]
    assert 40 <= len(lines) <= 60 and lines[-1].startswith("warmup 1000/1000  loss 1.00  eval 0.50")


def test_a_phase_forgets_the_last_and_sparse_metrics_stay(capsys, clock):
    shown = Display("t", plain=True)
    shown.phase("warmup", None)
    shown.update(1, {"loss": 2.0})
    shown.phase("train", 3)
    for step, metrics in enumerate(({"reward": 0.5, "eval/exact_match_greedy": 0.25}, {"reward": 0.75}), 5):
        clock[0] += 60
        shown.update(step, metrics)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["t: warmup", "warmup 1  loss 2.00"]
    assert lines[3:] == ["train 5/3  reward 0.50  eval (greedy 0.25)",
                         "train 6/3  reward 0.75  eval (greedy 0.25)  ETA 0:00"]  # fmt: skip


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "x", 0.0, -1.0, 1e300])
def test_no_value_and_no_gap_stops_a_run(capsys, plain, value):
    with Display("t", plain=plain) as shown:
        rendered(shown)
        for steps in (None, 0, 2):
            shown.phase("train", steps)
            shown.update(1, {})
            shown.update(2, dict.fromkeys(STEP, value))
            rendered(shown)
    assert capsys.readouterr().out == ""


def test_the_panel_shows_phase_stage_progress_and_the_split_of_time(capsys, clock):
    with Display("addition", plain=False) as shown:
        shown.phase("train", 40)
        shown.stage("assess")
        for clock[0] in (1.0, 2.0):
            shown.update(int(clock[0]), STEP)
        text = rendered(shown)
        shown.note("a note [with] brackets\x1b[2J")
    for part in ("addition", "train · assess", "2/40", "ETA 0:38", "0.71", "0.84", "0.98", "5.1k", "30.1", "0.41 s",
                 "■ generate 38%", "■ train 55%"):  # fmt: skip
        assert part in text
    assert any(line.count("━") == 32 for line in text.splitlines())  # the stacked bar, whole
    out, err = capsys.readouterr()
    assert out == "" and "a note [with] brackets·[2J" in err
    assert len(text.splitlines()) == 6


def test_a_supervised_panel_has_only_the_loss(capsys):
    shown = Display("t", plain=False)
    shown.phase("warmup", 10)
    shown.update(1, {"loss": 2.5})
    text = rendered(shown)
    assert "2.50" in text and not re.search("reward|held-out|generate", text)


def test_a_pipe_gets_lines(capsys):
    assert Display("t").plain


def test_before_and_after_side_by_side():
    before = {"eval/exact_match": 0.1, "eval/length": 31.5}
    after = {"eval/exact_match": 0.9844, "eval/exact_match_greedy": 1.0, "eval/length": 30.0}
    samples = [{"prompt": f"{n} + [1] =", "completion": "x" * 200 + "\x1b[31m\n" + "y" * 200 + str(n), "reward": None}
               for n in range(4)]  # fmt: skip
    samples_after = [{"prompt": "2 + 2 =", "completion": "4", "reward": 1.0}]
    text = rendered(before_after(before, after, samples, samples_after, {"curves": "runs/x/curves.png"}), 120)
    squeezed = " ".join(text.split())
    assert "exact match, sampled 0.100 0.984 +0.884" in squeezed
    assert "exact match, greedy - 1.000" in squeezed
    assert "mean length, tokens 31.5 30.0 -1.5" in squeezed
    assert "2 + [1] =" in text and "3 + [1] =" not in text and "\x1b" not in text and "yyy0" in text
    assert "after 2 + 2 = 4 1.00" in squeezed and "curves runs/x/curves.png" in squeezed
    rendered(before_after({}, {}, [], [], {}))
