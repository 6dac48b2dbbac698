"""Law: every experiment that ships loads, says what it needs, fits its mesh, and is rebuilt from its JSON.

Those of real models lack their files here; a tiny tokenizer stands in for theirs.
"""

import json
from dataclasses import replace
from pathlib import Path

import chats
import pytest

from rljax.config import from_json, load_experiment, to_json, validate
from rljax.data.pretrained import Pretrained
from rljax.mesh.file import load
from rljax.model.table import misfits
from rljax.run.loop import fits, phases
from rljax.run.run import Run

ROOT = Path(__file__).parent.parent
EXPERIMENTS = sorted((ROOT / "experiments").glob("**/*.py"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A directory with a tokenizer and a chat template."""
    where = tmp_path_factory.mktemp("tokenizer")
    template, _, _, eos, _ = chats.KINDS["chatml"]
    chats.trained("chatml").save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "chat_template": template}))
    return str(where)


def with_tokenizer(run, where: str):
    """A run, and those that it starts from, with a tokenizer that is there."""
    if isinstance(run.tokenizer, Pretrained):
        run = replace(run, tokenizer=replace(run.tokenizer, path=where))
    starts = {name: getattr(role, "start", None) for name, role in run.roles.items()}
    changed = {
        name: replace(run.roles[name], start=with_tokenizer(start, where))
        for name, start in starts.items()
        if isinstance(start, Run)
    }
    return replace(run, roles=run.roles | changed)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_is_ready_to_run(path, tokenizer):
    run = with_tokenizer(load_experiment(str(path)), tokenizer)
    validate(run)
    run.check()
    mesh = load(ROOT / run.mesh)
    if mesh.platform == "cpu":
        fits(run, mesh)
    else:
        for each, *_ in phases(run, Path()):
            for role, lm in each.models().items():
                trained = each.roles[role].optimizer is not None
                for stage in ("train", "generate") if trained else ("assess",):
                    assert misfits(lm, mesh.placement(stage, role, trained)) == [], (role, stage)
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
