"""Every benchmark runs from a checkout on a tiny experiment, prints JSON, and answers a mistake with one line."""

import json
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
MESHES = {path.stem: str(path) for path in (ROOT / "meshes").glob("*.toml")}
ONE, EIGHT, SPLIT = MESHES["one"], MESHES["eight"], MESHES["eight_fsdp"]
EXPERIMENT = """
from rljax.assess.rewards import ExactMatch
from rljax.data.problems import Addition
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.model.moe import Experts
from rljax.run.run import Evaluation, Fresh, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import grpo, sft
from rljax.train.optimizer import AdamW

LM = Decoder(vocab=16, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=16, experts={experts})
COMMON = dict(
    task=Addition(digits=1), tokenizer=Characters("0123456789+=;#"), rewards=(ExactMatch(after="#"),),
    prompts=8, n=2, steps=2, max_prompt=4, max_new=12, evaluation=Evaluation(every=1, problems=8), mesh={mesh!r},
)
actor = lambda start: {{"actor": Role(LM, start=start, optimizer=AdamW(lr=1e-3))}}
WARMUP = Run(roles=actor(Fresh()), objective=sft(), schedule=supervised, **COMMON)
RUN = Run(roles=actor(WARMUP), objective=grpo(), schedule=synchronous, **COMMON)
"""


@pytest.fixture
def experiment(tmp_path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(EXPERIMENT.format(mesh=ONE, experts=None))
    return str(path)


def run(name: str, *words: str) -> dict:
    """The JSON that a benchmark prints."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_loop(experiment):
    report = run("loop", experiment, "--steps", "2", "--cache")
    assert list(report["stages"]) == ["generate", "reshard", "assess", "train"]
    assert sum(stage["share"] for stage in report["stages"].values()) == pytest.approx(1)
    assert report["stages"]["train"]["programs"] == report["compiles"]["train/actor"] == 1
    assert report["tokens_per_second"] > 0 and report["reshard_bytes"] == 0


def test_sharding(experiment):
    report = run("sharding", experiment, "--meshes", ONE, SPLIT, "steps=1", "--rounds", "1", "--cache")
    one, split = report["layouts"]
    assert report["differences"] == []
    assert one["bytes"]["optimizer"] > 4 * split["bytes"]["optimizer"]
    assert sum(kind["count"] for kind in one["collectives"].values()) == 0
    assert split["collectives"]["all-gather"]["count"] > 0 and split["collectives"]["reduce-scatter"]["bytes"] > 0
    for layout in report["layouts"]:
        agree(layout)
        assert layout["sent"] == sum(kind["bytes"] for kind in layout["collectives"].values())
        assert layout["programs"] == 1  # what is reported on is what runs


def agree(layout: dict, repeated: int = 0) -> None:
    """State and FLOPs are as predicted, but for two counters and what devices repeat, which a jaxpr has once."""
    held, expected = layout["bytes"], layout["predicted"]
    assert held["params"] == expected["params"] and held["optimizer"] == expected["optimizer"] + 2 * 4
    assert layout["flops"] == expected["flops"] - repeated
    assert 0 <= held["arguments"] - held["params"] - held["optimizer"]
    assert held["peak"] >= held["arguments"] + held["temporary"] and layout["exact"]


def test_cpu(experiment):
    rows = run("cpu", experiment, "--only", "append", "--devices", "1", "--rounds", "1", "--cache")["rows"]
    assert [(row["measure"], row["devices"], row["step"]) for row in rows] == [("append", 1, "generate")]
    assert rows[0]["speedup"] == pytest.approx(rows[0]["before"] / rows[0]["after"])


@pytest.mark.slow
def test_every_measure(experiment):
    rows = run("cpu", experiment, "--rounds", "1", "--cache")["rows"]
    measured = {(row["measure"], row["devices"]) for row in rows}
    assert len(measured) == 2 * 8 - 1  # on one device nothing is sharded that could be gathered


@pytest.mark.slow
def test_every_layout(experiment):
    report = run("sharding", experiment, "--rounds", "1", "--cache")
    assert len(report["layouts"]) == 12 and report["differences"] == []
    (line,) = report["left_out"]
    assert line.startswith(MESHES["eight_pipe"])  # one layer makes no two stages
    for layout in report["layouts"]:
        agree(layout)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "exchange"])
def test_experts(dispatch, experiment, tmp_path):
    experts = f"Experts(count=4, top_k=2, width=8, dispatch={dispatch!r})"
    path = tmp_path / "experts.py"
    path.write_text(EXPERIMENT.format(mesh=ONE, experts=experts))
    meshes = (MESHES[name] for name in ("one", "eight_expert", "eight_expert_tensor"))
    report = run("sharding", str(path), "--meshes", *meshes, "--rounds", "1", "--cache")
    assert report["differences"] == []
    kind = {"gather": "all-gather", "exchange": "all-to-all"}[dispatch]
    for layout, tensor in zip(report["layouts"], (1, 1, 2), strict=True):
        router = 4 * 2 * (16 * 16 // layout["devices"]) * 16 * 4  # forward, twice that backward, recomputed
        agree(layout, router * (tensor - 1))
    for layout in report["layouts"][1:]:
        assert layout["collectives"][kind]["count"] > 0 and layout["predicted"]["sent"][kind] > 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install rljax[compile]")
def test_absent_chips(experiment):
    """Of sixteen chips, so that files of eight devices are widened: fsdp=8 to 16, and data=2 fsdp=2 tensor=2."""
    report = run("sharding", experiment, "--topology", "v5e:4x4", "--meshes", SPLIT, EIGHT)
    fsdp, three = report["layouts"]
    assert fsdp["train"] == "fsdp=16" and three["train"] == "data=2 fsdp=4 tensor=2, remat=none"
    for layout in report["layouts"]:
        agree(layout)
        assert layout["time"] == 128 and layout["compile_seconds"]["update"] > 0
        assert layout["collectives"]["all-gather"]["bytes"] > 0


@pytest.mark.slow
def test_supervised_loop_on_eight(experiment):
    schedule = "schedule=rljax.run.schedules:supervised"
    report = run("loop", experiment, schedule, "--mesh", EIGHT, "--steps", "2", "--cache")
    assert list(report["stages"]) == ["train"] and report["reshard_bytes"] is None


@pytest.mark.slow
def test_controls(experiment, tmp_path):
    words = (experiment, "--out", str(tmp_path / "out"), "--seeds", "1", "--steps", "2", "--until", "0")
    outcome = run("controls", *words)
    curves = outcome["seeds"]["1"]
    assert list(curves) == ["grpo", "shuffled", "supervised"]
    assert all([step for step, _ in curve["sampled"]] == [0, 1, 2] for curve in curves.values())
    assert len({curve["sampled"][0][1] for curve in curves.values()}) == 1  # one warm-up
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"seed-1", "controls.json", "controls.md", "controls.png"}
    assert run("controls", *words) == outcome  # what is done is kept


@pytest.mark.slow
def test_algorithms(experiment, tmp_path):
    names = ["grpo", "remax", "ppo, shared critic", "shuffled"]
    out = tmp_path / "out"
    words = (experiment, "--out", str(out), "--only", *names, "--seeds", "0", "--steps", "2")
    outcome = run("algorithms", *words)
    assert outcome["algorithms"] == names and list(outcome["seeds"]) == ["0"]
    curves = outcome["seeds"]["0"]
    assert list(curves) == names
    for curve in curves.values():
        assert [step for step, *_ in curve["sampled"]] == [step for step, *_ in curve["greedy"]] == [0, 1, 2]
        tokens = [tokens for _, tokens, _ in curve["sampled"]]
        assert tokens[0] == 0 and all(0 < b - a <= 16 * 12 for a, b in zip(tokens, tokens[1:]))  # rows, max_new
    assert len({curve["sampled"][0][2] for curve in curves.values()}) == 1  # one warm-up
    assert {path.name for path in out.iterdir()} == {"seed-0", "algorithms.json", "algorithms.md", "algorithms.png"}
    folders = {"warmup", "grpo", "remax", "ppo-shared-critic", "shuffled"}
    assert {path.name for path in (out / "seed-0").iterdir()} == folders
    assert json.loads((out / "algorithms.json").read_text()) == outcome
    head, _, *rows = [line.strip("| ").split(" | ") for line in (out / "algorithms.md").read_text().splitlines()]
    assert head == ["algorithm", "step 0", "step 1", "step 2", "range", "greedy", "range", "tokens, k"]
    for name, *steps, spread, greedy, _, tokens in rows:
        points = curves[name]["sampled"]
        assert steps == [f"{value:.3f}" for *_, value in points]
        last = points[-1]
        assert spread == f"{last[2]:.2f}-{last[2]:.2f}" and tokens == f"{last[1] / 1e3:.0f}"
        assert greedy == f"{curves[name]['greedy'][-1][2]:.3f}"
    ends = [curves[name]["sampled"][-1][2] for name, *_ in rows]
    assert sorted(name for name, *_ in rows) == sorted(names) and ends == sorted(ends, reverse=True)
    assert (out / "algorithms.png").read_bytes().startswith(b"\x89PNG")
    taken = {path: path.read_bytes() for path in out.glob("*/*/metrics.jsonl")}
    assert len(taken) == 5
    assert run("algorithms", *words) == outcome  # what is done is kept
    assert {path: path.read_bytes() for path in taken} == taken  # the times of its steps too: none was taken again


@pytest.mark.parametrize(
    "words, said",
    [
        (("loop", "nowhere.py"), "nowhere.py: no such file"),
        (("loop", "--steps", "0"), "0 must be at least 1"),
        (("loop", "--mesh", "nowhere.toml"), "nowhere.toml: no such file"),
        (("sharding", "--meshes", ONE, "prompt=2"), "no field 'prompt'"),
        (("sharding", "a.py", "b.py"), "one experiment at a time"),
        (("sharding", "--topology", "v5f:2x4"), "chip 'v5f' is not known: did you mean 'v5p'"),
        (("cpu", "--only", "matmull"), "did you mean 'matmul'"),
        (("controls",), "--out"),
        (("algorithms", "--out", "x", "--only", "grpo", "ramax"), "--only ramax: no such algorithm; did you mean"),
        (("controls", "--out", "x", 'roles.actor.start={"$": "rljax.run.run:Fresh"}'), "start from a warm-up"),
    ],
)
def test_mistakes_are_one_line(words, said, monkeypatch, capsys):
    name, *rest = words
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *rest])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert said in err and err.count("\n") == 1 and err.startswith(f"{name}.py: ")
