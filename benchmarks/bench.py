"""The fixed work that layouts and CPU measures are timed on: one batch, and the run's own update and generate on it."""

from contextlib import contextmanager

import jax
import numpy as np

from rljax.data.rows import fit, real
from rljax.mesh.file import MeshFile
from rljax.run.run import Run
from rljax.run.schedules import problems_of
from rljax.run.stages import Stages, build
from rljax.train.metrics import combine
from rljax.types import Assessed, Rollout, TrainState


class Bench:
    """The stages of a run on a mesh, from fresh weights; calls block. Programs are compiled where `patches` hold."""

    def __init__(self, run: Run, mesh: MeshFile, patches: tuple = ()):
        self.run, self.patches = run, patches
        self.stages = build(run, mesh)
        with self.compiling():
            self.state = self.stages.actor.begin(run.seed)
            self.prompts = problems_of(run, self.stages, 1)
            self.publish()

    def compiling(self):
        return patched(*self.patches)

    def publish(self) -> None:
        """Parameters for `generate`: valid until the next update, which may be given their very buffers."""
        self.params = jax.block_until_ready(self.stages.publish(self.state.params)[0])

    def generate(self):
        if self.params is None:
            self.publish()
        n = self.run.n if self.run.objective.advantage else 1
        return self.stages.complete(self.params, self.prompts, self.run.seed, 1, 0, self.run.sampling, n)

    def update(self, batch: Assessed) -> dict[str, float]:
        self.params = None
        self.state, metrics = self.stages.actor.update(self.state, batch)
        jax.block_until_ready(self.state)
        return combine([jax.device_get(metrics)])

    def batch(self) -> Assessed:
        """This bench's completions."""
        return assessed(self.run, real(self.generate()))


def assessed(run: Run, rollout: Rollout) -> Assessed:
    """Completions with advantages drawn at random: those of fresh weights would be 0."""
    rows = rollout.mask.shape[0]
    drawn = np.random.default_rng(0).normal(size=(rows, 1)).astype(np.float32)
    reference = rollout.logp if "reference" in run.roles else None
    return Assessed(rollout, np.zeros((rows, len(run.rewards)), np.float32), drawn * rollout.mask, reference)


def traced(stages: Stages, state: TrainState, batch: Assessed) -> jax.stages.Traced:
    """The very program that `stages.actor.update` calls, for arrays or for what is known of them."""
    place = stages.actor.place
    with jax.set_mesh(place.mesh):
        return stages.programs["train/actor"].trace(state, place.abstract(fit(batch, place.rows, place.columns)))


def compiled(stages: Stages, program: jax.stages.Traced) -> jax.stages.Compiled:
    """Lowered within the mesh too, so that `stages.actor.update` finds it compiled."""
    with jax.set_mesh(stages.actor.place.mesh):
        return program.lower().compile()


@contextmanager
def patched(*patches):
    """Attributes replaced for a while: (module, name, value)."""
    old = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for patch in patches:
            setattr(*patch)
        yield
    finally:
        for patch in old:
            setattr(*patch)
