"""The command line: what it prints, how it exits, and that a mistake costs one clear line and leaves nothing behind."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
import trial
from trial import experiment, mesh, rljax, rows, train

from rljax.run import directory, loop, stages
from rljax.run.checkpoint import Saver
from rljax.run.display import Display
from rljax.run.metrics import JsonLines
from rljax.run.run import Checkpoints

pytestmark = pytest.mark.usefixtures("here")

ROOT = Path(stages.__file__).parents[2]
KEYS = {"prompt", "prompt_ids", "ids", "text", "logprobs", "finish_reason"}


@pytest.fixture(scope="module")
def target(folder) -> Path:
    """A run directory whose checkpoints, of steps 1 and 3, hold what training starts from."""
    run, file, where = experiment(folder), mesh(folder, "one"), folder / "target"
    with directory.claim(where, resume=False):
        directory.describe(where, run, file, (folder / "one.toml").read_text(), folder / "small.py")
    saver = Saver(where / "checkpoints", Checkpoints())
    for step in (1, 3):
        saver.save(step, {"actor": trial.built(run, file).actor.begin(step)}, {"reached": False, "seconds": {}}, {})
    saver.finish()
    saver.close()
    return where


@pytest.fixture
def wrong(capsys):
    """Calls the command and gives the one line that it fails with."""

    def call(*args, code: int = 2) -> str:
        assert rljax(*args) == code
        said = capsys.readouterr()
        assert said.out == "" and "Traceback" not in said.err
        line = said.err.splitlines()[-1]
        assert line.startswith("rljax: ") and said.err.count("rljax: ") == 1
        return line

    return call


# Help and usage


@pytest.mark.parametrize("command, words", {
    "train": ["EXPERIMENT", "[FIELD=VALUE]...", "--mesh", "--run-dir", "--resume"],
    "eval": ["TARGET", "--experiment", "--mesh", "--step", "--json"],
    "generate": ["TARGET", "--prompt", "--ids", "--n", "--temperature", "--greedy", "--max-new", "--seed", "--json"],
    "mesh": ["FILE", "--model", "--schedule", "--json"],
}.items())  # fmt: skip
def test_every_command_tells_how_it_is_used(capsys, command, words):
    assert rljax(command, "--help") == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"Usage: rljax {command}") and not said.err
    assert all(word in said.out for word in words)
    for help in ([], ["--help"]):
        assert rljax(*help) == 0
        assert f"\n  {command} " in capsys.readouterr().out


@pytest.mark.parametrize("args, words", [
    (["trian"], "No such command 'trian'"), (["train"], "Missing argument 'EXPERIMENT'"), (["eval"], "'TARGET'"),
    (["generate", "x", "--n", "0"], "'--n'"), (["generate", "x", "--max-new", "0"], "'--max-new'"),
    (["generate", "x", "--seed", "-1"], "'--seed'"), (["generate", "x", "--seed", str(2**32)], "'--seed'"),
    (["generate", "x", "--temperature", "-1"], "'--temperature'"), (["mesh", "one.toml", "--jsn"], "No such option"),
])  # fmt: skip
def test_usage_errors(wrong, args, words):
    assert words in wrong(*args)


# Using a run


PROMPTS = "--prompt", "12+34=", "--prompt", "7", "--ids", "3 4, 12", "--n", 2, "--max-new", 5


def objects(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_generate_prints_one_object_a_completion(target, capsys):
    call = "generate", target, *PROMPTS, "--json"
    outs = []
    for seed in (0, 0, 1):
        assert rljax(*call, "--seed", seed) == 0
        said = capsys.readouterr()
        assert said.err == ""
        outs.append(objects(said.out))
    assert outs[0] == outs[1] != outs[2]
    assert [r["prompt"] for r in outs[0]] == ["12+34="] * 2 + ["7"] * 2 + ["12+"] * 2
    assert [r["prompt_ids"] for r in outs[0]][::2] == [[3, 4, 12, 5, 6, 13], [9], [3, 4, 12]]
    assert any(a["ids"] != b["ids"] for a, b in zip(outs[0][::2], outs[0][1::2], strict=True))
    for row in outs[0]:
        assert row.keys() == KEYS
        assert 1 <= len(row["ids"]) == len(row["logprobs"]) <= 5 and max(row["logprobs"]) < 0
        assert row["finish_reason"] == ("stop" if row["ids"][-1] == 1 else "length")
        assert (row["finish_reason"] == "stop" or len(row["ids"]) == 5) and 1 not in row["ids"][:-1]
    # the same draws without JSON: prompt and completion, a line each
    assert rljax(*call[:-1]) == 0
    assert capsys.readouterr().out.splitlines() == [r["prompt"] + r["text"] for r in outs[0]]


def test_greedy_takes_the_likeliest_whatever_the_seed(target, capsys):
    call = "generate", target, *PROMPTS, "--json"
    outs = []
    for how in (["--greedy"], ["--greedy", "--seed", 5], ["--temperature", 0]):
        assert rljax(*call, *how) == 0
        outs.append(objects(capsys.readouterr().out))
    assert outs[0] == outs[1] == outs[2]
    assert outs[0][::2] == outs[0][1::2]
    assert rljax(*call, "--greedy", "--step", 1) == 0  # the weights of another step
    assert objects(capsys.readouterr().out) != outs[0]


def test_eval_prints_one_object(target, folder, capsys):
    assert rljax("eval", target, "--json") == 0
    said = capsys.readouterr()
    (metrics,) = objects(said.out)
    assert metrics.keys() == {"eval/exact_match", "eval/exact_match_greedy", "eval/length", "step"}
    assert metrics["step"] == 3
    assert 0 < metrics["eval/exact_match"] < 1 and 1 <= metrics["eval/length"] <= 6 and said.err == ""
    assert rljax("eval", target, "--step", 1, "--json") == 0
    (earlier,) = objects(capsys.readouterr().out)
    assert earlier["step"] == 1 and earlier["eval/exact_match"] != metrics["eval/exact_match"]
    assert rljax("eval", target) == 0
    assert f"{metrics['eval/exact_match']:.4g}" in capsys.readouterr().out
    # another experiment's rewards, on this run's weights
    rewards = 'rewards=(digits, ExactMatch("#"))'
    (folder / "strict.py").write_text(trial.EXPERIMENT.replace(rewards, "rewards=(ExactMatch(),)"))
    assert rljax("eval", target, "--experiment", "strict.py", "--json") == 0
    assert objects(capsys.readouterr().out)[0]["eval/exact_match"] == 0
    (folder / "loose.py").write_text(trial.EXPERIMENT.replace(rewards, "rewards=digits"))
    assert rljax("eval", target, "--experiment", "loose.py", "--json") == 2
    assert "rewards: expected tuple" in capsys.readouterr().err


def test_mesh_draws_or_describes(capsys):
    assert rljax("mesh", "eight.toml", "--model", "small.py", "--json") == 0
    said = capsys.readouterr()
    (description,) = objects(said.out)
    assert description and said.err == ""
    assert rljax("mesh", "eight.toml") == 0
    drawn = capsys.readouterr().out
    assert "fsdp" in drawn and len(drawn.splitlines()) > 5


def test_mesh_draws_a_schedule(folder, capsys, wrong):
    text = 'platform = "cpu"\ndevices = 4\n[train]\npipe = 2\nfsdp = 2\nmicrobatches = 4\nschedule = "{}"\n'
    (folder / "pipe.toml").write_text(text.format("zb-h1"))
    assert rljax("mesh", "pipe.toml", "--schedule", "--json") == 0
    (description,) = objects(capsys.readouterr().out)
    assert description["schedule"] == "zb-h1" and description["figures"]["bubble"] == pytest.approx(1 / 12)
    assert rljax("mesh", "pipe.toml", "--schedule") == 0
    assert "bubble      8.3%" in capsys.readouterr().out
    assert rljax("mesh", "eight.toml", "--schedule") == 0
    assert capsys.readouterr().out == "eight.toml: [train] pipe = 1: no pipeline, so there is no schedule to draw\n"
    (folder / "pipe.toml").write_text(text.format("dualpipe").replace("= 4\ns", "= 2\ns"))
    assert "[train] microbatches = 2: dualpipe needs" in wrong("mesh", "pipe.toml", "--schedule")
    assert "give one of them" in wrong("mesh", "eight.toml", "--schedule", "--model", "small.py")
    (folder / "pipe.toml").unlink()


def test_looking_at_a_run_changes_nothing_in_it(target, capsys):
    (target / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(exist_ok=True)  # a live run may be writing it
    state = lambda: {p: p.stat().st_mtime_ns for p in sorted(target.rglob("*"))}
    before = state()
    assert rljax("eval", target, "--json") == 0 and rljax("eval", target, "--step", 2) == 2
    assert state() == before


WRONG_USE = {
    "nothing to complete": (["generate", "target"], "nothing to complete: give --prompt TEXT or --ids"),
    "an empty prompt": (["generate", "target", "--prompt", ""], "a prompt is empty"),
    "no ids": (["generate", "target", "--ids", " "], "a prompt is empty"),
    "words for ids": (["generate", "target", "--ids", "1 two"], "--ids '1 two' must be whole numbers"),
    "ids too large": (["generate", "target", "--ids", "3 16"], "16 is outside the vocabulary, 0 to 15"),
    "ids below 0": (["generate", "target", "--ids", "-1"], "-1 is outside the vocabulary"),
    "another alphabet": (["generate", "target", "--prompt", "1x2"], "lacks 'x', which '1x2' uses"),
    "a step not kept": (["eval", "target", "--step", "2"], "--step 2: target keeps checkpoints of steps 1, 3"),
    "no target": (["eval", "targt"], "targt does not exist; did you mean 'target'?"),
    "no run": (["eval", "one.toml"], "one.toml is no run directory"),
    "no such mesh": (["eval", "target", "--mesh", "oen.toml"], "oen.toml: no such file; did you mean 'one.toml'?"),
    "a mesh that does not fit": (["generate", "target", "--prompt", "1", "--mesh", "misfit.toml"], "tensor=4"),
    "no such experiment": (["eval", "target", "--experiment", "smal.py"], "smal.py: no such file; did you mean 'small"),
}


@pytest.mark.parametrize("what", WRONG_USE)
def test_a_run_wrongly_used(target, wrong, what):
    args, words = WRONG_USE[what]
    assert words in wrong(*args)


def test_a_run_without_a_checkpoint(target, folder, wrong):
    where = folder / "begun"
    where.mkdir()
    for name in ("config.json", "experiment.py"):
        (where / name).write_bytes((target / name).read_bytes())
    assert "has no checkpoint yet" in wrong("eval", where)
    assert {p.name for p in where.iterdir()} == {"config.json", "experiment.py"}
    (where / "config.json").write_text('{"run_id"')
    assert "its config.json cannot be read" in wrong("eval", where)


# Starting a run


SUMS = '{"prompt": "1+1=", "answer": "2"}\n'
TASK = 'task={"$": "rljax.data.files:Problems", "path": "sums.jsonl", "held_out_path": "sums.jsonl"}'
FRESH = 'roles.actor.start={"$": "rljax.run.run:Fresh"}'
WRONG_START = {
    "a field": (["stepz=3"], "stepz: Run has no field 'stepz'; did you mean 'steps'?"),
    "a field below": (["roles.actor.optimizer.rl=1"], "did you mean 'lr'?"),
    "a type": (["steps=many"], "steps: expected int, got 'many'"),
    "a list": (["rewards=3"], "rewards: expected"),
    "no assignment": (["steps"], "'steps' is not an override"),
    "an objective": (["objective.loss.low=2"], "objective.loss.low=2"),
    "no mesh file": (["--mesh", "oen.toml"], "oen.toml: no such file; did you mean 'one.toml'?"),
    "a mesh that does not fit": (["--mesh", "misfit.toml"], "misfit.toml: [train] tensor=4 does not fit roles.actor"),
    "no such start": (["roles.actor.start=nowhere"], "nowhere does not exist"),
    "no data": ([TASK, FRESH], "task.path='sums.jsonl' holds no held-out examples"),
    "bad data": ([TASK.replace("sums", "bad"), FRESH], "bad.jsonl:2: '{\"prompt\":' is not JSON"),
    "no data file": ([TASK.replace("sums", "nosums"), FRESH], "task.path='nosums.jsonl' cannot be read: No such file"),
    "long prompts": (["task=experiment:Long", "task.all=true", FRESH], "max_prompt=6: all 16 prompts are longer"),
    "long solutions": (["roles.actor.start.max_new=4"], "tokens with its prompt, but max_prompt + max_new leave it 10"),
}


@pytest.mark.parametrize("what", WRONG_START)
def test_a_run_wrongly_started_leaves_nothing_behind(folder, wrong, what):
    (folder / "sums.jsonl").write_text("")
    (folder / "bad.jsonl").write_text(SUMS + '{"prompt": ')
    args, words = WRONG_START[what]
    assert words in wrong("train", "small.py", "--run-dir", "new/run", *args)
    assert not (folder / "new" / "run").exists()
    (folder / "empty").mkdir()  # one that was there stays, as empty as it was
    assert words in wrong("train", "small.py", "--run-dir", "empty", *args)
    (folder / "empty").rmdir()


@pytest.mark.parametrize("change, words", [
    ("width=32", "embed is [16, 16] there, and [16, 32] here"), ("layers=2", "[1, 16] there, and [2, 16] here"),
    ("tied=true", "unembed is [16, 16] there, and nothing here"), ("qk_norm=head", "nothing there, and [1, 8] here"),
])  # fmt: skip
def test_a_start_from_another_model_is_named(target, folder, wrong, change, words):
    overrides = "roles.actor.start=target", f"roles.actor.lm.{change}", f"roles.reference.lm.{change}"
    line = wrong("train", "small.py", "--run-dir", "gone", *overrides)
    assert "target holds another model: " in line and words in line
    assert not (folder / "gone").exists()


def test_a_misfit_says_what_would_fit(wrong):
    line = wrong("train", "small.py", "--run-dir", "gone", "--mesh", "misfit.toml")
    assert "2 heads do not divide over tensor=4: 1, 2 would" in line


def test_no_such_experiment(wrong):
    assert "smal.py: no such file; did you mean 'small.py'?" in wrong("train", "smal.py")
    assert "an experiment is a Python file" in wrong("train", "one.toml")
    Path("broken.py").write_text("x = 1\nRUN = 1 / 0\n")
    assert "broken.py:2: ZeroDivisionError" in wrong("train", "broken.py")
    assert not Path("runs").exists()


def test_a_run_directory_that_cannot_be(folder, wrong):
    (folder / "file").write_text("mine")
    for where in ("file", "file/run"):
        line = wrong("train", "small.py", "--run-dir", where)
        assert f"--run-dir {where} cannot be written: " in line and "choose another" in line
    assert (folder / "file").read_text() == "mine"


def test_an_exception_in_a_reward_names_it_and_its_sample(folder, wrong):
    line = wrong("train", "small.py", "--run-dir", "gone", FRESH, 'rewards=[{"@": "experiment:fails"}]')
    assert "rewards.0 (fails) raised RuntimeError: no such verifier; on prompt '" in line and "completion '" in line
    assert not (folder / "gone").exists()
    with pytest.raises(Exception, match="no such verifier"):  # with --debug it is raised, for Python to show
        rljax("--debug", "train", "small.py", "--run-dir", "gone", FRESH, 'rewards=[{"@": "experiment:fails"}]')


# A full disk


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_the_start_leaves_nothing(folder, monkeypatch, wrong):
    monkeypatch.setattr(directory.shutil, "copyfile", full)
    assert "No space left on device" in wrong("train", "small.py", "--run-dir", "gone")
    assert not (folder / "gone").exists()


def test_a_full_disk_later_keeps_what_was_logged(folder, monkeypatch, capsys):
    write, written = JsonLines.write, []

    def once(self, row):
        written.append(row)
        if len(written) == 2:
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", full)
                return write(self, row)
        return write(self, row)

    quick = ["train", "supervised.py", "--run-dir", "disk", "steps=3"]
    (folder / "supervised.py").write_text(trial.EXPERIMENT + "\nRUN = WARMUP\n")
    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", once)
        assert rljax(*quick) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == f"rljax: [Errno 28] No space left on device: '{Path('disk/metrics.jsonl')}'"
    assert [row["step"] for row in rows(folder / "disk")] == [1]
    assert rljax(*quick, "--resume") == 0  # once there is room again
    assert [row["step"] for row in rows(folder / "disk")] == [1, 2, 3]


def test_a_checkpoint_that_cannot_be_written_is_no_success(folder, monkeypatch, capsys):
    def behind(*_):  # as tensorstore puts it, in the thread that writes
        raise ValueError(f"UNKNOWN: Error: {'x' * 500}: No space left on device [os_error_code='28'] [{'y' * 500}]")

    (folder / "supervised.py").write_text(trial.EXPERIMENT + "\nRUN = WARMUP\n")
    for method, fails in (("save", full), ("wait_until_finished", behind)):
        with monkeypatch.context() as patch:
            patch.setattr(ocp.CheckpointManager, method, fails)
            assert rljax("train", "supervised.py", "--run-dir", method) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        said = "a checkpoint could not be written: No space left on device; mend that, then --resume"
        assert line == f"rljax: {method}/checkpoints: {said}"
        assert not (folder / method / "curves.png").exists()
        assert rljax("train", "supervised.py", "--run-dir", method, "--resume") == 0
        assert [row["step"] for row in rows(folder / method)] == [1, 2]


# Leaving


def test_ctrl_c_outside_a_run_is_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "fits", interrupted)
    assert train("gone") == 130
    assert not Path("gone").exists()


def test_a_second_ctrl_c_stops_at_once(folder, monkeypatch, capsys):
    (folder / "supervised.py").write_text(trial.EXPERIMENT + "\nRUN = WARMUP\n")
    update = Display.update

    def twice(self, step, metrics):
        update(self, step, metrics)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Display, "update", twice)
    before = signal.getsignal(signal.SIGINT)
    assert rljax("train", "supervised.py", "--run-dir", "stopped") == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert not any((folder / "stopped" / "checkpoints").iterdir())


# Importing


def test_an_experiment_touches_no_device(folder):
    """With a platform that does not exist, whatever asks JAX for a device or an array fails."""
    script = f"""
import sys
from rljax.config import load_experiment, to_json
from rljax.mesh.file import load
for path in {[str(folder / "small.py"), str(ROOT / "experiments" / "quickstart.py")]!r}:
    run = load_experiment(path)
    run.check()
    to_json(run)
load({str(folder / "eight.toml")!r})
import jax
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
try:
    jax.numpy.zeros(1)
except RuntimeError as error:
    print("no device:", "none-such" in str(error))
"""
    env = os.environ | {"JAX_PLATFORMS": "none-such", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no device: True\n"


@pytest.mark.slow
def test_a_disk_that_is_really_full(folder):
    """The kernel refuses files above 4 KiB from the first checkpoint on, so orbax fails in its own threads."""
    (folder / "supervised.py").write_text(trial.EXPERIMENT + "\nRUN = WARMUP\n")
    script = """
import resource, sys
from rljax.cli import main
from rljax.run.checkpoint import Saver
save = Saver.save
def limited(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    save(*args)
Saver.save = limited
sys.exit(main(["train", "supervised.py", "--run-dir", "limited"]))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=300)
    said = [line for line in done.stderr.splitlines() if line.startswith("rljax: ")]  # tensorstore's threads print too
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert said[0].startswith("rljax: limited/checkpoints: a checkpoint could not be written: File too large")
    assert rljax("train", "supervised.py", "--run-dir", "limited", "--resume") == 0
