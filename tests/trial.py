"""A run small enough to train in a test: its experiment file, its meshes, and the command line in this process.

Compiles dominate, so runs that differ only in what the host does share the programs that the first of them compiled.
"""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from rljax.cli import main
from rljax.config import load_experiment, override
from rljax.mesh.file import MeshFile, load
from rljax.run import loop, serve, stages
from rljax.run.checkpoint import Saver
from rljax.run.display import Display
from rljax.run.loop import abstract_like
from rljax.run.run import Checkpoints, Role, Run

EXPERIMENT = '''
from dataclasses import dataclass

import numpy as np

from rljax.assess.rewards import ExactMatch
from rljax.data.problems import Addition, Problem
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.run.run import Checkpoints, Evaluation, Fresh, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import grpo, sft
from rljax.train.optimizer import AdamW


def digits(problem, completion):
    """A reward that a hardly trained model earns by chance, so that advantages are not all 0."""
    return sum(map(str.isdigit, completion.text)) / 6


def fails(problem, completion):
    raise RuntimeError("no such verifier")


def abstains(problem, completion):
    return None


@dataclass(frozen=True)
class Infinite:
    """An advantage that is not finite."""

    def __call__(self, e):
        return np.where(e.mask, np.inf, 0.0)


@dataclass(frozen=True)
class Long:
    """Every prompt that ends in `2=` is longer than the run allows; all of them where `all` is set."""

    all: bool = False

    def batch(self, count, seed, step, held_out=False):
        sums = Addition(digits=2, think=0.0).batch(count, seed, step, held_out)
        long = lambda p: self.all or p.prompt.endswith("2=") and not held_out
        return [Problem(p.prompt * (1 + long(p)), p.answer, p.solution) for p in sums]


LM = Decoder(vocab=16, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=16)
COMMON = dict(
    task=Addition(digits=2, think=0.0), tokenizer=Characters("0123456789+=;#"), prompts=8, max_prompt=6, max_new=6,
    mesh="one.toml",
)
WARMUP = Run(
    roles={"actor": Role(LM, Fresh(), AdamW(lr=3e-3))}, objective=sft(), schedule=supervised, rewards=(digits,),
    steps=2, evaluation=Evaluation(every=0, problems=16), **COMMON,
)
RUN = Run(
    roles={"actor": Role(LM, WARMUP, AdamW(lr=3e-3)), "reference": Role(LM)}, objective=grpo(), schedule=synchronous,
    rewards=(digits, ExactMatch("#")), n=4, steps=4, evaluation=Evaluation(every=2, problems=16),
    checkpoints=Checkpoints(every=1, keep=9), **COMMON,
)
'''
MESHES = {
    "one": "devices = 1\n[train]\n",
    "eight": "devices = 8\n[train]\ndata = 2\nfsdp = 2\ntensor = 2\n[generate]\ndata = 8\n",
    "split": "devices = 8\ngroups = { learn = [0, 4], act = [4, 8] }\n[train]\nfsdp = 2\ntensor = 2\ngroup = 'learn'\n"
    "[generate]\ndata = 4\ngroup = 'act'\n[assess]\ndata = 4\ngroup = 'act'\n",
    "roles": "devices = 8\n[train]\ndata = 2\nfsdp = 2\ntensor = 2\n[train.critic]\nfsdp = 4\nseq = 2\nzero = 2\n"
    "microbatches = 2\n[generate]\ndata = 8\n[assess]\ndata = 8\n[assess.reward]\ndata = 4\ntensor = 2\n",
    "data": "devices = 8\n[train]\ndata = 8\n",
    "misfit": "devices = 4\n[train]\ntensor = 4\n",
}
TIMES = "time", "tokens_per_second"  # and seconds/*: what "bitwise equal metrics" leaves out


def write(folder: Path) -> Path:
    """The experiment and its meshes, in a folder to work in."""
    (folder / "small.py").write_text(EXPERIMENT)
    for name, text in MESHES.items():
        (folder / f"{name}.toml").write_text(f'platform = "cpu"\n{text}')
    return folder


def rljax(*args) -> int:
    """The command's exit status."""
    assert len(jax.devices()) >= 32  # JAX has started: from here on a mesh takes the first of the simulated devices
    return main(list(map(str, args)))


def train(where, *args) -> int:
    return rljax("train", "small.py", "--run-dir", where, *args)


def experiment(folder: Path, *overrides: str) -> Run:
    return override(load_experiment(str(folder / "small.py")), list(overrides))


def mesh(folder: Path, name: str) -> MeshFile:
    return load(folder / f"{name}.toml")


BUILT: dict[str, stages.Stages] = {}


def built(run: Run, file: MeshFile) -> stages.Stages:
    """`stages.build`, once for all runs whose programs are the same: what only the host reads is not in the key."""
    traced = replace(run.objective, advantage=run.objective.advantage is not None, drop_truncated=False)
    roles = {name: replace(role, start=None) if isinstance(role, Role) else role for name, role in run.roles.items()}
    key = repr((
        roles, traced, run.sampling, run.tokenizer, run.max_new, run.chunk, run.pack, run.minibatches * run.epochs == 1,
        file.groups, file.tables, run.seed if any(getattr(role, "lora", None) for role in roles.values()) else None,
    ))  # fmt: skip
    if key not in BUILT:
        BUILT[key] = stages.build(run, file)
    return BUILT[key]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("small"))


@pytest.fixture
def here(folder, monkeypatch) -> None:
    """A test works in one folder with the others of its module, on shared programs."""
    monkeypatch.chdir(folder)
    share(monkeypatch)


def share(monkeypatch) -> None:
    keep_cache(monkeypatch)
    for module in (loop, serve):
        monkeypatch.setattr(module, "build", built)


def keep_cache(monkeypatch) -> None:
    """Commands compile into the cache that the suite was given, or into none: never into the user's."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))


def rows(where: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (where / f"{name}.jsonl").read_text().splitlines()]


def measured(where: Path) -> list[dict]:
    """The metrics of a run without the times."""
    timed = lambda key: key in TIMES or key.startswith("seconds/")
    return [{key: value for key, value in row.items() if not timed(key)} for row in rows(where)]


def saved(where: Path, stages: stages.Stages, step: int):
    """A checkpoint's state, placed as these stages would, and its info."""
    saver = Saver(where / "checkpoints", Checkpoints(keep=9))
    try:
        return saver.restore(step, jax.tree.map(abstract_like, stages.fresh(0)[0]))
    finally:
        saver.close()


def identical(a, b) -> bool:
    """Bitwise, wherever the leaves lie."""
    same = lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes()
    return jax.tree.all(jax.tree.map(same, jax.device_get(a), jax.device_get(b)))


def kill_at(monkeypatch, signum: signal.Signals, phase: str, step: int) -> None:
    """Sends this process a signal while the run is in a step."""
    shown = []
    begin, update = Display.phase, Display.update

    def phased(self, name, steps):
        shown.append(name)
        begin(self, name, steps)

    def updated(self, at, metrics):
        update(self, at, metrics)
        if (shown[-1], at) == (phase, step):
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(Display, "phase", phased)
    monkeypatch.setattr(Display, "update", updated)
