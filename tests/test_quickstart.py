"""The demonstration learns for the reason it claims: three seeds, and two controls from the same warm-ups.

What is required is in the README: accuracy and length rise by reward alone; shuffled, the same rewards destroy the
actor, and as much more supervision leaves it where half of its examples answer at once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENV = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # the suite's compile slower programs


@pytest.mark.slow
def test_three_seeds_learn_to_think_and_the_controls_do_not(tmp_path):
    command = [sys.executable, "benchmarks/controls.py", "--out", str(tmp_path), "--seeds", "0", "1", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for seed, arms in json.loads(done.stdout)["seeds"].items():
        ends = {
            arm: {name: (points[0][1], points[-1][1]) for name, points in curve.items()} for arm, curve in arms.items()
        }
        before, after = ends["grpo"]["sampled"]
        assert after - before >= 0.35, (seed, ends)
        before, after = ends["grpo"]["greedy"]
        assert before <= 0.8 and after >= 0.95, (seed, ends)
        before, after = ends["grpo"]["length"]
        assert after - before >= 5, (seed, ends)
        before, after = ends["shuffled"]["sampled"]
        assert after < before and after < 0.1, (seed, ends)
        assert ends["supervised"]["sampled"][1] <= 0.55, (seed, ends)


@pytest.mark.slow
def test_the_readme_s_command_leaves_a_run_directory(tmp_path):
    """The command itself, cut short: the files of a run, the table on stderr, nothing on stdout."""
    where = tmp_path / "run"
    command = [sys.executable, "-m", "rljax", "train", "experiments/quickstart.py", "--run-dir", str(where)]
    done = subprocess.run(
        [*command, "steps=2", "roles.actor.start.steps=10"], cwd=ROOT, env=ENV, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "" and "before" in done.stderr
    names = {path.name for path in where.iterdir()}
    assert names >= {
        "config.json",
        "experiment.py",
        "metrics.jsonl",
        "samples.jsonl",
        "summary.json",
        "curves.png",
        "checkpoints",
    }
