"""Law: every experiment that ships loads, says what it needs, fits its mesh, and is rebuilt from its JSON."""

import json
from pathlib import Path

import pytest

from rljax.config import from_json, load_experiment, to_json, validate
from rljax.mesh.file import load
from rljax.run.loop import fits, phases

ROOT = Path(__file__).parent.parent
EXPERIMENTS = sorted((ROOT / "experiments").glob("**/*.py"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_is_ready_to_run(path):
    run = load_experiment(str(path))
    validate(run)
    run.check()
    fits(run, load(ROOT / run.mesh))
    assert from_json(json.loads(json.dumps(to_json(run)))) == run
    names = [name for _, name, _ in phases(run, Path())]
    assert names[-1] == "train" and len({*names}) == len(names)
    assert path.read_text().startswith('"""')


@pytest.mark.parametrize(
    "name, chain",
    [
        ("irpo", ["warmup/warmup/warmup", "warmup/warmup", "warmup", "train"]),
        ("distill", ["warmup", "teacher", "train"]),
        ("reward_model", ["warmup", "reward", "train"]),
    ],
)
def test_runs_that_others_start_from_go_first(name, chain):
    run = load_experiment(str(ROOT / "experiments" / f"{name}.py"))
    assert [each for _, each, _ in phases(run, Path())] == chain
