"""A run from its start to its summary: what it writes, how it stops and goes on, and what its stages owe each other."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fcntl import LOCK_EX, flock
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trial
from jax import P
from trial import built, experiment, measured, mesh, rows, saved, train

from rljax.config import to_json
from rljax.data.rows import fit, real, take
from rljax.generate.sampling import Sampling
from rljax.mesh import BATCH
from rljax.model.table import specs
from rljax.run import loop, roles, stages
from rljax.run.assessment import answered, assess
from rljax.run.checkpoint import Saver
from rljax.run.directory import recall
from rljax.run.evaluate import evaluate
from rljax.run.metrics import read
from rljax.run.run import Checkpoints, Evaluation, Fresh
from rljax.run.schedules import problems_of
from rljax.train.metrics import combine
from rljax.types import PAD_UID, TrainState

pytestmark = pytest.mark.usefixtures("here")

# KL of two equal models: their programs, one of which recomputes its blocks, may round apart by 1e-7, whose k3 is 1e-14
EXACT = 1e-12
SPENT = "generate", "reshard", "assess", "train"


@pytest.fixture(scope="module")
def finished(folder) -> Path:
    """A run of two steps of warm-up and four of reinforcement, never interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trial.share(patch)
        assert train("finished") == 0
    return folder / "finished"


@pytest.fixture(scope="module")
def step(folder, finished):
    """(run, stages on one device, the state before step 3, that step's assessed rollout)."""
    run = experiment(folder)
    on = built(run, mesh(folder, "one"))
    states, _ = saved(finished, on, 2)
    state, prompts = states["actor"], problems_of(run, on, 3)
    rollout = real(on.complete(on.publish(state.params)[0], prompts, run.seed, 3, 2, run.sampling, run.n))
    frozen = {"reference": on.frozen["reference"].freeze(state.params)}
    assessed, _ = assess(run, on, states, frozen, answered(run, prompts, rollout), None)
    return run, on, state, assessed


def fresh(state: TrainState) -> TrainState:
    """A copy that an update may take the buffers of."""
    return jax.tree.map(jnp.copy, state)


def numbers(metrics: dict) -> dict[str, float]:
    """What one update reports, as a run logs it."""
    return combine([jax.device_get(metrics)])


def close(a, b, atol: float = 1e-4) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol), *jax.device_get((a, b)))


# What a run writes


def test_a_run_directory_holds_what_the_contract_says(finished, folder):
    config, run, file = recall(finished)
    assert config["name"] == "small" and len(config["run_id"]) == 32
    assert config["versions"].keys() >= {"rljax", "python", "jax", "jaxlib", "flax", "optax", "numpy"}
    assert config["git"] is None or config["git"].keys() == {"revision", "dirty"}
    assert (finished / "experiment.py").read_text() == trial.EXPERIMENT
    assert to_json(run) == to_json(experiment(folder))
    assert file.tables == mesh(folder, "one").tables

    lines = rows(finished)
    assert [r["phase"] for r in lines] == ["warmup"] * 2 + ["train"] * 4
    assert [r["step"] for r in lines] == [1, 2, 1, 2, 3, 4]
    assert all(a["time"] < b["time"] < time.time() for a, b in pairwise(lines))
    for row in lines:
        assert row.keys() >= {"loss", "grad_norm", "length", "entropy", "skipped", "seconds/train"}
        assert all(isinstance(value, float) for key, value in row.items() if key not in ("phase", "step"))
    for row in lines[2:]:
        assert row.keys() >= {"reward", "reward/digits", "reward/ExactMatch", "kl/reference", "tokens_per_second"}
        assert all(row[f"seconds/{stage}"] >= 0 for stage in SPENT)
        assert row["bytes/reshard"] == 0  # one device generates from where it trains
        assert ("eval/exact_match" in row) == (row["step"] % 2 == 0)
    assert max(row["advantage/std"] for row in lines[2:]) > 0.1  # else no test here could tell an update from none

    samples = rows(finished, "samples")
    assert [s["step"] for s in samples] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    for s in samples:
        assert s.keys() == {"step", "uid", "prompt", "completion", "reward", "length", "finish_reason"}
        assert s["finish_reason"] == "stop" or s["length"] == 6
    assert [s["uid"] for s in samples] == [uid for uid in (0, 8, 16, 24) for _ in range(4)]

    summary = json.loads((finished / "summary.json").read_text())
    assert summary.keys() >= {"before", "after", "steps", "seconds"} and summary["steps"] == 4
    for when in ("before", "after"):
        assert summary[when].keys() == {"eval/exact_match", "eval/exact_match_greedy", "eval/length"}
    assert summary["after"].items() <= lines[-1].items()  # the last step was evaluated too
    assert summary["seconds"].keys() >= set(SPENT)
    for stage in SPENT:
        assert summary["seconds"][stage] == pytest.approx(sum(r[f"seconds/{stage}"] for r in lines[2:]))
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert {p.name for p in (finished / "checkpoints").iterdir()} == {"1", "2", "3", "4"}
    assert {p.name for p in (finished / "warmup" / "checkpoints").iterdir()} == {"2"}


@pytest.mark.pitfall("T-29")
@pytest.mark.pitfall("T-50")
@pytest.mark.pitfall("T-57")
def test_step_0_identity(step, finished):
    """One model as policy, reference and sampler: every ratio is 1 and nothing diverges."""
    first = next(row for row in rows(finished) if row["phase"] == "train")
    assert first["ratio"] == 1 and first["clip_fraction/low"] == first["clip_fraction/high"] == 0
    assert 0 <= first["kl/reference"] < EXACT
    assert first["mismatch/max"] < 1e-3 and abs(first["kl/sampler"]) < 1e-3
    _, on, state, batch = step  # of later weights, whose reference is frozen anew
    metrics = numbers(on.actor.update(fresh(state), batch)[1])
    mask, advantages = batch.rollout.mask, np.float64(batch.advantages)
    assert abs(advantages).max() > 0.5 and len({*batch.rollout.length.tolist()}) > 2
    assert metrics["loss"] == pytest.approx(-advantages[mask].mean(), abs=1e-6)
    assert 0 <= metrics["kl/reference"] < EXACT and metrics["mismatch/max"] < 1e-3


# How it goes on


@pytest.mark.pitfall("T-86")
def test_two_runs_of_one_seed_are_bitwise_equal_and_of_two_seeds_are_not(finished, folder, monkeypatch):
    monkeypatch.setattr(loop, "build", stages.build)  # compiled anew
    assert train("again") == 0
    assert measured(folder / "again") == measured(finished)
    assert rows(folder / "again", "samples") == rows(finished, "samples")
    trial.share(monkeypatch)
    assert train("other", "seed=1", "steps=1") == 0
    assert rows(folder / "other", "samples")[0] != rows(finished, "samples")[0]


STOPS = {
    "steps": ("steps=2",),
    "SIGTERM": (signal.SIGTERM, "train", 2),
    "Ctrl-C": (signal.SIGINT, "train", 3),
    "warm-up": (signal.SIGTERM, "warmup", 1),
}


@pytest.mark.pitfall("T-79")
@pytest.mark.pitfall("T-87")
@pytest.mark.pitfall("T-88")
@pytest.mark.parametrize("stop", STOPS)
def test_train_stop_resume_equals_train(finished, folder, monkeypatch, capsys, stop):
    where, on = folder / stop, built(experiment(folder), mesh(folder, "one"))
    if stop == "steps":
        assert train(where, "steps=2") == 0
    else:
        signum, phase, at = STOPS[stop]
        with monkeypatch.context() as patch:
            trial.kill_at(patch, signum, phase, at)
            assert train(where) == 128 + signum
        assert f"stopped at {phase} step {at}, saved; continue with --resume" in capsys.readouterr().err
        assert (rows(where)[-1]["phase"], rows(where)[-1]["step"]) == (phase, at)
    compiled = on.compiles()
    assert train(where, "--resume") == 0
    assert on.compiles() == compiled  # T-111: a restored state is placed as the one that it was saved from

    assert measured(where) == measured(finished)
    assert rows(where, "samples") == rows(finished, "samples")
    states, info = saved(where, on, 4)
    same, expected = saved(finished, on, 4)
    state = states["actor"]
    assert trial.identical(states, same) and int(state.step) == 4
    assert info["reached"] is expected["reached"] is False
    counts = [x for x in jax.tree.leaves(state.optimizer) if x.ndim == 0]
    assert counts and all(int(count) == 4 for count in counts)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (where, finished)]
    assert summaries[0]["before"] == summaries[1]["before"] and summaries[0]["after"] == summaries[1]["after"]
    assert summaries[0]["seconds"]["train"] == pytest.approx(sum(r["seconds/train"] for r in rows(where)[2:]))


def test_a_finished_run_resumed_does_nothing_more(finished, folder):
    where = shutil.copytree(finished, folder / "idle")
    before = (where / "metrics.jsonl").read_bytes(), (where / "samples.jsonl").read_bytes()
    assert train(where, "--resume") == 0
    assert ((where / "metrics.jsonl").read_bytes(), (where / "samples.jsonl").read_bytes()) == before
    assert {p.name for p in (where / "checkpoints").iterdir()} == {"1", "2", "3", "4"}


def test_a_run_starts_from_another_run(finished, folder):
    where = folder / "further"
    assert train(where, f"roles.actor.start={finished}", "steps=1") == 0
    before, after = (json.loads((run / "summary.json").read_text()) for run in (where, finished))
    assert before["before"] == after["after"]  # held-out problems and their draws are the same for every run
    first = measured(where)[0]
    assert (first["phase"], first["step"]) == ("train", 1) and not (where / "warmup").exists()
    assert 0 <= first["kl/reference"] < EXACT  # the reference is the actor as it started here


def test_a_resumed_run_keeps_the_start_that_it_had(finished, folder):
    """The run it started from may go on: the reference stays what the actor was at first."""
    source, where = folder / "source", folder / "from_source"
    shutil.copytree(finished, source)
    shutil.rmtree(source / "checkpoints" / "4")
    assert train(where, f"roles.actor.start={source}", "steps=1") == 0
    shutil.copytree(finished / "checkpoints" / "4", source / "checkpoints" / "4")
    assert train(where, f"roles.actor.start={source}", "steps=2", "--resume") == 0
    assert json.loads((where / "summary.json").read_text())["start"] == {"actor": 3}
    whole = folder / "from_source_whole"
    shutil.rmtree(source / "checkpoints" / "4")
    assert train(whole, f"roles.actor.start={source}", "steps=2") == 0
    assert measured(where)[-1] == measured(whole)[-1]


def test_warm_ups_of_warm_ups_have_names_and_directories_of_their_own(folder):
    first = experiment(folder).roles["actor"].start
    second = replace(first, roles={"actor": replace(first.roles["actor"], start=first)})
    run = replace(second, roles={"actor": replace(first.roles["actor"], start=second)})
    chain = loop.phases(run, Path("run"))
    places = [("warmup/warmup", Path("run/warmup/warmup")), ("warmup", Path("run/warmup")), ("train", Path("run"))]
    assert [(name, where) for _, name, where in chain] == places
    # each draws problems of its own, and another seed of the run changes them all
    seeds = [each.seed for each, *_ in chain]
    others = [each.seed for each, *_ in loop.phases(replace(run, seed=1), Path("run"))]
    assert len({*seeds, *others}) == 6


@pytest.mark.pitfall("T-92")
def test_what_a_kill_while_saving_leaves_behind_is_passed_over(finished, folder):
    where = shutil.copytree(finished, folder / "torn")
    for step in ("3", "4"):
        shutil.rmtree(where / "checkpoints" / step)
    half = shutil.copytree(where / "checkpoints" / "2", where / "checkpoints" / "3.orbax-checkpoint-tmp-17")
    shutil.rmtree(half / "actor" / "d")
    with open(where / "metrics.jsonl", "a") as log:
        log.write('{"phase": "tra')
    assert train(where, "--resume") == 0
    assert measured(where) == measured(finished) and rows(where, "samples") == rows(finished, "samples")
    assert {p.name for p in (where / "checkpoints").iterdir()} >= {"1", "2", "3", "4"}


@pytest.mark.slow
@pytest.mark.pitfall("T-92")
def test_a_run_killed_at_any_moment_loads_and_goes_on(folder, monkeypatch):
    where, rng = folder / "killed", random.Random(0)
    command = [sys.executable, "-m", "rljax", "train", "small.py", "--run-dir", str(where)]
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(folder / "cache")
    root = str(Path(stages.__file__).parents[2])
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "PYTHONPATH": root}
    long = ["steps=100000", "checkpoints.keep=2"]
    seen = []
    for attempt in range(6):
        began = len(seen)
        process = subprocess.Popen([*command, *long, *["--resume"] * (attempt > 0)], env=env, stderr=subprocess.DEVNULL)
        deadline = time.time() + 180
        while time.time() < deadline and process.poll() is None:
            if (where / "metrics.jsonl").exists() and len(read(where / "metrics.jsonl")) > began + 3:
                break
            time.sleep(0.02)
        time.sleep(rng.random())
        os.kill(process.pid, signal.SIGKILL if attempt < 5 else signal.SIGTERM)
        assert process.wait() == (-signal.SIGKILL if attempt < 5 else 128 + signal.SIGTERM)
        seen = read(where / "metrics.jsonl")  # parses, a torn tail aside
        assert trial.rljax("generate", where, "--ids", "1 2 3") == 0
    count = seen[-1]["step"]
    assert train("whole", f"steps={count}", "checkpoints.every=0") == 0
    assert measured(where)[: count + 1] == measured(folder / "whole")[:-1]  # whose last step is evaluated besides
    last, same = measured(where)[count + 1], measured(folder / "whole")[-1]
    assert last.items() <= same.items() and last["step"] == count


@pytest.mark.pitfall("T-88")
def test_a_run_goes_on_another_mesh(step, finished, folder, monkeypatch):
    """From one device to four that train beside four that generate."""
    run, one, state, batch = step
    monkeypatch.setattr(loop, "build", built)
    where = shutil.copytree(finished, folder / "moved")
    for late in ("3", "4"):
        shutil.rmtree(where / "checkpoints" / late)
    assert train(where, "--resume", "steps=3", "--mesh", "split.toml") == 0
    here, there = measured(finished)[4], measured(where)[4]
    assert there["step"] == 3 and there["bytes/reshard"] > 0
    for name in ("loss", "grad_norm", "reward", "length", "entropy", "kl/reference", "mismatch/mean"):
        assert there[name] == pytest.approx(here[name], rel=1e-4, abs=1e-6)

    split = built(run, mesh(folder, "split"))
    on_split = saved(finished, split, 2)[0]["actor"]
    assert trial.identical(on_split, state)
    assert {d.id for d in on_split.params.embed.devices()} == {0, 1, 2, 3}
    (a, seen), (b, known) = split.actor.update(on_split, batch), one.actor.update(fresh(state), batch)
    close((a, numbers(seen)), (b, numbers(known)))


@pytest.mark.pitfall("T-92")
def test_the_latest_and_the_best_checkpoints_are_kept(tmp_path):
    of = lambda x: TrainState(
        jnp.int32(x), jnp.int32(0), {"w": jnp.full(3, float(x))}, {}, jnp.float32(0), jnp.zeros(3)
    )
    states = lambda step: {"actor": of(step), "critic": of(-step)}
    settings = Checkpoints(keep=2, best="score")
    kept = []
    for session in ([(1, 0.1), (2, 0.9), (3, 0.3)], [(4, 0.9), (5, None), (6, float("nan"))], [(7, 0.2), (8, 0.1)]):
        saver = Saver(tmp_path, settings)
        for step, score in session:
            saver.save(step, states(step), {}, {} if score is None else {"score": score})
            saver.finish()
        kept.append((sorted(saver.manager.all_steps()), saver.latest()))
        restored, _ = saver.restore(saver.latest(), jax.tree.map(loop.abstract_like, states(0)))
        assert trial.identical(restored, states(saver.latest()))
        saver.close()
    # 4 ties with 2 and is newer; what was not measured, or is NaN, is never the best; the best survives a new process
    assert kept == [([2, 3], 3), ([4, 5, 6], 6), ([4, 7, 8], 8)]


# What is refused


def test_a_run_directory_in_use_is_refused(finished, capsys):
    with open(finished / ".lock", "a+") as lock:
        flock(lock, LOCK_EX)
        lock.truncate(0)
        lock.write("4711")
        lock.flush()
        for resume in (["--resume"], []):
            assert train(finished, *resume) == 2
            assert "in use by process 4711" in capsys.readouterr().err
    assert train(finished, "--resume") == 0  # the lock went with its file


def test_a_run_directory_that_holds_something_is_refused(finished, folder, capsys):
    before = (finished / "config.json").read_bytes()
    assert train(finished) == 2
    assert "is not empty; continue its run with --resume" in capsys.readouterr().err
    assert (finished / "config.json").read_bytes() == before
    (folder / "papers").mkdir()
    (folder / "papers" / "thesis.tex").write_text("x")
    assert train("papers") == 2 and train("papers", "--resume") == 2
    assert [p.name for p in (folder / "papers").iterdir() if p.name != ".lock"] == ["thesis.tex"]


@pytest.mark.parametrize("field, value", {
    "objective.loss.high": 0.5, "seed": 3, "task.digits": 3, "roles.actor.start.steps": 3,
    "roles.actor.optimizer.lr": 1e-5, "rewards": '[{"$": "rljax.assess.rewards:ExactMatch"}]',
}.items())  # fmt: skip
def test_a_run_resumes_only_as_what_it_was(finished, capsys, field, value):
    assert train(finished, "--resume", f"{field}={value}") == 2
    assert f": {field} differs from what the run was started with" in capsys.readouterr().err


def test_resume_needs_a_run(capsys):
    assert trial.rljax("train", "small.py", "--resume") == 2
    assert train("nothing", "--resume") == 2
    assert not Path("nothing").exists()
    lines = capsys.readouterr().err.splitlines()
    assert "--resume needs --run-dir" in lines[0] and "holds no run to resume" in lines[1]


IMPOSSIBLE = {
    "temperature 0": ("sampling.temperature=0", "sampling.temperature=0.0 must be above 0 for training"),
    "temperature below 0": ("sampling.temperature=-1", "sampling.temperature=-1.0 must be above 0"),
    "a group of one": ("n=1", "n=1: a group-relative advantage"),
    "more updates than rows": ("minibatches=33", "minibatches=33 exceeds the 32 rows"),
    "no reward": ("rewards=[]", "rewards is empty"),
    "no problem": ("evaluation.problems=0", "problems=0"),
    "no checkpoint": ("checkpoints.keep=0", "keep=0"),
    "a seed below 0": ("seed=-1", "seed=-1"),
    "no step": ("steps=0", "steps=0 must be at least 1"),
    "a reference of another size": ("roles.reference.lm.ffn=32", "roles.reference.lm has other tensors than"),
    "an actor that is not trained": ("roles.actor.optimizer=null", "roles.actor.optimizer is None"),
    "a reference that is trained": (
        'roles.reference.optimizer={"$": "rljax.train.optimizer:AdamW"}',
        "roles.reference.optimizer: only actor and critic",
    ),
    "no token in a row": ("pack=0", "pack=0 must be at least 1 token"),
    "a warm-up of another model": (
        "roles.actor.start.roles.actor.lm.tied=true",
        "roles.actor.start.roles.actor.lm has other tensors than",
    ),
    "a small vocabulary": ("roles.actor.lm.vocab=8", "roles.actor.lm.vocab=8 is below tokenizer.vocab=16"),
}


@pytest.mark.pitfall("T-52")
@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_run_that_cannot_be_is_refused_before_anything_is_built(capsys, monkeypatch, what):
    assignment, message = IMPOSSIBLE[what]
    monkeypatch.setattr(loop, "build", lambda *_: pytest.fail("built"))
    assert train("refused", assignment) == 2
    assert message in capsys.readouterr().err
    assert not Path("refused").exists()


@pytest.mark.pitfall("T-68")
def test_kl_without_a_reference_is_refused(capsys):
    lone = 'RUN = Run(**{**vars(RUN), "roles": {"actor": RUN.roles["actor"]}})'
    Path("lone.py").write_text(f"{trial.EXPERIMENT}\n{lone}\n")
    assert trial.rljax("train", "lone.py", "--run-dir", "refused", "objective.kl=0.1") == 2
    assert "objective.kl=0.1 needs roles.reference" in capsys.readouterr().err
    assert not Path("refused").exists()


# What the stages owe each other


@pytest.mark.pitfall("T-67")
@pytest.mark.pitfall("T-84")
@pytest.mark.pitfall("T-100")
@pytest.mark.pitfall("T-110")
@pytest.mark.pitfall("T-111")
def test_twenty_steps_compile_once_and_train_each_completion_once_an_epoch(folder):
    """Two minibatches that do not divide the rows, two epochs, prompts dropped now and then, no reference."""
    run = experiment(folder, "minibatches=2", "epochs=2", "prompts=5", "n=7", "steps=20", "task=experiment:Long")
    run = replace(run, roles={"actor": replace(run.roles["actor"], start=Fresh())})
    on = stages.build(run, mesh(folder, "eight"))
    seen, steps, dropped = [], [], []

    def update(state, batch):
        rollout = batch.rollout
        used = rollout.mask.any(1)
        seen.append([(int(u), int(s)) for u, s in zip(rollout.uid[used], rollout.sample[used], strict=True)])
        assert set(rollout.version[rollout.mask].tolist()) == {4 * len(steps)}
        return on.actor.update(state, batch)

    refused = lambda *args: pytest.fail("nothing here asks for scores")
    watched = on._replace(trained={"actor": on.actor._replace(update=update, score=refused)})
    assert not on.frozen  # no reference was declared
    for states, metrics, _ in run.schedule(run, watched, *watched.fresh(run.seed), 1, lambda stage: None):
        problems = run.task.batch(run.prompts, run.seed, len(steps) + 1)
        short = [u for u, p in enumerate(problems, 5 * len(steps)) if len(p.prompt) <= run.max_prompt]
        every = [(uid, sample) for uid in short for sample in range(7)]  # whole groups
        assert len(seen) == 4
        first, second = seen[0] + seen[1], seen[2] + seen[3]
        assert sorted(first) == sorted(second) == every and first != second  # dealt anew
        steps.append(int(states["actor"].step))
        dropped.append(metrics["prompts/dropped"])
        assert metrics["prompts/dropped"] == 5 - len(short) and "kl/reference" not in metrics
        seen.clear()
    assert steps == [4 * step for step in range(1, 21)] and {0, 1} <= set(dropped)
    # float32 is published as it is, so resharding computes nothing
    once = {"generate", "begin/actor", "train/actor"}
    assert on.compiles() == {name: int(name in once) for name in ("reshard", "adopt/actor", "score/actor", *once)}


@pytest.mark.pitfall("T-24")
def test_what_was_sampled_is_what_is_trained_byte_for_byte(step):
    run, on, state, _ = step
    sampled, trained = [], []
    complete = lambda *args: sampled.append(on.complete(*args)) or sampled[-1]
    update = lambda state, batch: trained.append(batch.rollout) or on.actor.update(state, batch)
    watched = on._replace(complete=complete, trained={"actor": on.actor._replace(update=update)})
    frozen = {"reference": on.frozen["reference"].freeze(state.params)}
    next(run.schedule(run, watched, {"actor": fresh(state)}, frozen, 3, lambda stage: None))
    (given,), (taken,) = sampled, trained
    assert trial.identical(given.replace(tokens=given.tokens), taken)
    said = [ids[begin:end] for ids, begin, end in zip(taken.tokens.ids, taken.prompt_length, taken.length, strict=True)]
    assert all(mask.sum() == len(ids) for mask, ids in zip(taken.mask, said, strict=True))
    # what their text would not have said: that they stopped, and the id that pads, sampled
    assert {ids[-1] == 1 for ids in said} == {True, False} and any(0 in ids for ids in said)


@pytest.mark.pitfall("T-111")
def test_a_run_compiles_each_function_once_a_shape(step):
    run, on, state, _ = step  # after a whole run, resumed or not
    params, prompts = on.publish(state.params)[0], problems_of(run, on, 3)
    for sampling in (Sampling(temperature=1), Sampling(0.5, top_k=3), Sampling(top_p=1, min_p=0.1)):  # 1 is 1.0
        on.complete(params, prompts, 0, 0, 0, sampling, run.n)
    # generate has one shape to train and one to evaluate
    assert on.compiles() == {
        "reshard": 0, "generate": 2, "begin/actor": 1, "adopt/actor": 1, "train/actor": 1, "score/actor": 0,
        "score/reference": 1,
    }  # fmt: skip


def test_updates_that_are_not_finite_are_skipped_and_ten_in_a_row_end_the_run(folder, capsys):
    where = folder / "infinite"
    with np.errstate(invalid="ignore"):  # the spread of infinite advantages
        assert train(where, "objective.advantage=experiment:Infinite", "steps=12") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "train step 10: the last 10 updates were not finite" in error and "learning rate" in error
    lines = rows(where)[2:]
    assert [row["skipped"] for row in lines] == list(range(1, 11))
    assert all(row["loss"] is None for row in lines)  # no number, and no JSON that only Python reads
    on = built(experiment(folder), mesh(folder, "one"))
    state = saved(where, on, 9)[0]["actor"]
    assert int(state.step) == int(state.skipped) == 9
    assert trial.identical(state.params, saved(where / "warmup", on, 2)[0]["actor"].params)
    assert not any(np.any(x) for x in jax.tree.leaves(jax.device_get(state.optimizer)))


@pytest.mark.pitfall("T-97")
def test_rows_that_do_not_divide_weigh_what_they_weigh_on_one_device(step, folder):
    run, one, state, batch = step
    eight = built(run, mesh(folder, "data"))
    at = saved(folder / "finished", eight, 2)[0]["actor"]

    few = replace(run, prompts=3)
    prompts = problems_of(few, eight, 1)
    assert prompts.uid.tolist() == [0, 1, 2] + [PAD_UID] * 5
    rollout = real(eight.complete(eight.publish(at.params)[0], prompts, 0, 3, 2, run.sampling, run.n))
    everyone = problems_of(run, one, 1)
    whole = one.complete(one.publish(state.params)[0], everyone, 0, 3, 2, run.sampling, run.n)
    expected = take(whole, slice(0, 12))
    assert trial.identical(rollout.replace(logp=0), expected.replace(logp=0))
    np.testing.assert_allclose(rollout.logp, expected.logp, atol=1e-5)

    for count in (1, 3, 7, 8, 9, 13, 16):
        some = take(batch, np.arange(count) * 2)
        (a, seen), (b, known) = eight.actor.update(fresh(at), some), one.actor.update(fresh(state), fit(some, 32))
        close(numbers(seen), numbers(known))
        close(a.params, b.params)


@pytest.mark.pitfall("T-85")
def test_held_out_problems_that_do_not_divide_are_each_scored_once(step, folder):
    run, one, state, _ = step
    eight = built(run, mesh(folder, "data"))
    asked = []

    def reward(problem, completion):
        asked.append(problem.prompt)
        return len(asked) % 5 - 1.0

    run = replace(run, rewards=(reward,), evaluation=Evaluation(problems=13))
    metrics, _ = evaluate(run, eight, eight.publish(saved(folder / "finished", eight, 2)[0]["actor"].params)[0])
    prompts = [p.prompt for p in run.task.batch(13, 0, 0, held_out=True)]
    assert asked == prompts * 2
    given = np.arange(1, 27) % 5 - 1.0
    assert metrics["eval/exact_match"] == pytest.approx(given[:13].mean())
    assert metrics["eval/exact_match_greedy"] == pytest.approx(given[13:].mean())


@pytest.mark.pitfall("T-69")
@pytest.mark.pitfall("T-70")
@pytest.mark.pitfall("T-71")
@pytest.mark.pitfall("T-74")
@pytest.mark.parametrize("name", ["one", "split"])
def test_what_is_published_is_what_was_trained(step, folder, name):
    run, _, _, batch = step
    on = built(run, mesh(folder, name))
    state, reference = saved(folder / "finished", on, 2)[0]["actor"], on.frozen["reference"]
    prompts = problems_of(run, on, 3)
    greedy = lambda params: on.complete(params, prompts, 0, 0, 0, Sampling(temperature=0.0), run.n)
    probe = lambda rollout: reference.score(reference.freeze(state.params), rollout).logp
    answers = [greedy(on.publish(state.params)[0])]
    for _ in range(3):
        old = jax.device_get(state.params)
        state, _ = on.actor.update(state, batch)
        published, _ = on.publish(state.params)
        assert trial.identical(published, state.params) and not trial.identical(published, old)
        answers.append(greedy(published))
        np.testing.assert_allclose(answers[-1].logp, probe(answers[-1]), atol=1e-4)
    # weights far away, then back: nothing of the others lingers
    away = jax.tree.map(lambda w: -3 * w, state.params)
    far = greedy(on.publish(away)[0])
    assert not np.array_equal(far.tokens.ids, answers[-1].tokens.ids)
    before = jax.device_get(state.params)
    for _ in range(100):
        published, moved = on.publish(state.params)
    assert trial.identical(greedy(published), answers[-1])
    assert trial.identical(state.params, before) and (moved > 0) == (name == "split")


@pytest.mark.pitfall("T-114")
def test_each_stage_is_given_its_inputs_where_the_mesh_file_says(step, folder, monkeypatch):
    """Traced with types that carry placements, and stopped before anything compiles."""
    run, _, _, batch = step
    given = {}

    class Seen(Exception):
        pass

    def placed(x):
        return jax.typeof(x).sharding.spec, dict(jax.typeof(x).sharding.mesh.shape)

    def record(name):
        def stage(*args, **kwargs):
            arrays = [arg for arg in args if all(isinstance(x, jax.Array) for x in jax.tree.leaves(arg))]
            given[name] = jax.tree.map(placed, arrays)
            raise Seen

        return stage

    for where, name, function in (
        (stages, "generate", "generate"),
        (roles, "score", "outputs"),
        (roles, "train", "update"),
    ):
        monkeypatch.setattr(where, function, record(name))
    on = stages.build(run, mesh(folder, "split"))
    state, reference = saved(folder / "finished", on, 2)[0]["actor"], on.frozen["reference"]
    rollout = take(batch.rollout, slice(0, 30))
    with pytest.raises(Seen):
        on.complete(on.publish(state.params)[0], problems_of(run, on, 3), 0, 3, 0, run.sampling, run.n)
    with pytest.raises(Seen):
        reference.score(reference.freeze(state.params), rollout)
    given["assess"] = given.pop("score")
    with pytest.raises(Seen):
        on.actor.score(state, rollout)
    with pytest.raises(Seen):
        on.actor.update(state, take(batch, slice(0, 30)))

    learn = dict(data=1, fsdp=2, pipe=1, seq=1, tensor=2, expert=1)
    act = learn | dict(data=4, fsdp=1, tensor=1)
    place = lambda tree, axes: jax.tree.map(lambda spec: (spec, axes), tree, is_leaf=lambda x: isinstance(x, P))
    by_row = lambda tree, axes: jax.tree.map(lambda x: (P(BATCH, *(None,) * (x.ndim - 1)), axes), tree)
    params, ids, length, uid, *_ = given["generate"]
    assert params == place(specs(on.actor.lm.table, 0), act)
    prompts = problems_of(run, on, 3)
    assert (ids, length, uid) == by_row((prompts.ids, prompts.length, prompts.uid), act)
    assert given["assess"][0] == place(specs(on.actor.lm.table, 0), act)
    assert given["assess"][1:] == by_row([rollout.tokens, rollout.mask], act)
    assert given["score"][0] == place(specs(on.actor.lm.table, 3), learn)  # of the actor itself, where it trains
    assert given["score"][1:] == by_row([rollout.tokens, rollout.mask], learn)
    assert given["train"][0].params == place(specs(on.actor.lm.table, 3), learn)
    assert given["train"][1] == by_row(batch, learn)
    adam = lambda x: hasattr(x, "mu")
    (moments,) = filter(adam, jax.tree.leaves(given["train"][0].optimizer, is_leaf=adam))
    assert moments.mu == moments.nu == given["train"][0].params


@pytest.mark.pitfall("T-61")
def test_a_reference_holds_the_actor_back_only_where_kl_is_above_0(step, folder):
    run, one, state, batch = step
    away = batch.ref_logp - 0.5 * batch.rollout.mask
    nothing = batch.replace(advantages=np.zeros_like(batch.advantages), ref_logp=away)
    free, metrics = one.actor.update(fresh(state), nothing)
    metrics = numbers(metrics)
    assert metrics["grad_norm"] == 0 and metrics["kl/reference"] > 0.05
    held = built(experiment(folder, "objective.kl=0.1"), mesh(folder, "one"))
    moved, metrics = held.actor.update(fresh(state), nothing)
    metrics = numbers(metrics)
    assert metrics["grad_norm"] > 1e-4
    assert metrics["loss"] == pytest.approx(0.1 * metrics["kl/reference"], rel=1e-5)
    assert not trial.identical(moved.params, free.params)
