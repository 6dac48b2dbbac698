"""The stages of a run, compiled over the meshes of a mesh file: the only place that jits, places and donates.

Between stages, rows travel through the host (a few bytes a token) and parameters from mesh to mesh.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax import P
from jax.sharding import NamedSharding

from rljax.data.rows import Prompts, fit
from rljax.errors import UserError
from rljax.generate.decode import generate
from rljax.generate.relay import in_flight
from rljax.generate.sampling import Sampling
from rljax.mesh import BATCH
from rljax.mesh.file import MeshFile, Placement
from rljax.mesh.move import bytes_to_move, move
from rljax.model.attention import BLOCKS
from rljax.model.forward import logprobs
from rljax.model.table import LM, init, map_table, misfits, shardings
from rljax.run.run import Run
from rljax.train.step import start, update
from rljax.types import Assessed, Rollout, TrainState

OPTIONS = {
    # Where XLA fuses, it would keep bfloat16 values in float32: the same policy, scored by two programs, would differ.
    "xla_allow_excess_precision": False,
    # On TPU it would move the reduce-scatter of an accumulated gradient behind the loop, undoing ZeRO-2, and fails to
    # at ZeRO-3: openxla/xla#49143.
    "xla_disable_hlo_passes": "while-loop-all-reduce-code-motion",
}
compiled = partial(jax.jit, compiler_options=OPTIONS)


@dataclass(frozen=True)
class Place:
    """Where a role runs in a stage: a mesh and how parameters lie on it."""

    mesh: jax.sharding.Mesh
    placement: Placement
    pieces: int  # that rows are cut into: microbatches, or the groups in flight where a pipeline generates

    @property
    def rows(self) -> int:
        """What the number of rows (of prompts, where it generates) must be a multiple of."""
        return self.placement.layout.rows * self.pieces

    @property
    def columns(self) -> int:
        """What the number of tokens in a row must be a multiple of; on TPU the attention kernel has a say."""
        tile = BLOCKS[-1] if self.mesh.devices.flat[0].platform == "tpu" else 1
        return self.placement.columns(asdict(self.placement.layout)) * tile

    def where(self, x) -> NamedSharding:
        """Rows are split over the batch axes, scalars are on all devices."""
        return NamedSharding(self.mesh, P(BATCH, *(None,) * (x.ndim - 1)) if x.ndim else P())

    def put(self, tree):
        """Rows and scalars onto the devices."""
        return jax.device_put(tree, jax.tree.map(self.where, tree))

    def abstract(self, tree):
        """Rows and scalars without values: what a compiler needs to know of them."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.where(x)), tree)

    def shardings(self, lm: LM):
        return shardings(lm.table, self.mesh, self.placement.zero)


class Stages(NamedTuple):
    """What a schedule may call. Rows in and out are NumPy; parameters and states stay on their devices."""

    lm: LM
    train: Place
    generate: Place
    begin: Callable  # seed -> TrainState with fresh parameters
    adopt: Callable  # parameters on any mesh -> TrainState that starts from them
    publish: Callable  # parameters -> (parameters on the generation mesh, bytes that had to move)
    complete: Callable  # parameters, Prompts, seed, step, version, Sampling, n -> Rollout
    freeze: Callable  # parameters -> the reference's, a copy on its own mesh
    refer: Callable  # the reference's parameters, Rollout -> log-probabilities [B T]
    update: Callable  # TrainState, Assessed -> TrainState, metrics
    programs: dict[str, Callable]  # the jitted functions behind these, by stage

    def compiles(self) -> dict[str, int]:
        """Programs compiled so far, by stage: one for each shape that the stage has met."""
        return {name: program._cache_size() for name, program in self.programs.items()}


def place(mesh: MeshFile, lm: LM, stage: str, role: str = "actor", trainable: bool = True, devices=None) -> Place:
    """The devices and placement of a role in a stage. UserError where the model does not fit the layout."""
    placement = mesh.placement(stage, role, trainable)
    rules = misfits(lm, placement)
    if rules:
        raise UserError(f"{mesh.path}: [{stage}] {placement.layout} does not fit roles.{role}.lm: {'; '.join(rules)}")
    devices = jax.devices() if devices is None else devices
    platform = devices[0].platform
    if placement.layout.pipe > 1 and platform != "cpu" and jax.__version_info__ < (0, 12):
        rule = f"JAX {jax.__version__} cannot compile pipelines for {platform}: 0.12 or newer, or pipe = 1, would do"
        raise UserError(f"{mesh.path}: [{stage}] pipe = {placement.layout.pipe}: {rule}")
    pieces = placement.microbatches
    if stage == "generate":
        pieces = in_flight(pieces, placement.layout.pipe)
    return Place(placement.layout.mesh(devices[mesh.devices_of(placement)]), placement, pieces)


def build(run: Run, mesh: MeshFile, devices=None) -> Stages:
    """Everything compiled lazily, each function once for each shape it meets.

    `devices` are those that JAX sees, or absent ones (rljax.plan.topology), for which programs can only be compiled.
    """
    at = partial(place, mesh, devices=devices)
    lm = run.roles["actor"].lm.build()
    train, gen = at(lm, "train"), at(lm, "generate")
    frozen = run.roles.get("reference")
    ref_lm = frozen.lm.build() if frozen else lm
    ref = at(ref_lm, "assess", "reference", trainable=False) if frozen else None
    matrices = map_table(lambda t: t.matrix, lm.table)
    optimizer = run.roles["actor"].optimizer.build(run.updates, matrices)

    zero = train.placement.zero
    born = jax.jit(lambda seed: start(lm, init(lm.table, jax.random.key(seed), zero), optimizer, zero))
    begun = jax.jit(lambda params: start(lm, params, optimizer, zero))

    @jax.jit
    def cast(params):  # matrices travel in the dtype that they are multiplied in
        return map_table(lambda t, w: w.astype(lm.compute) if t.matrix else w, lm.table, params)

    @partial(compiled, static_argnames="n")
    def completed(params, ids, length, uid, seed, step, version, sampling, n):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return generate(
            lm, params, ids, length, uid, key, version, sampling, gen.placement,
            n=n, max_new=run.max_new, stop=run.tokenizer.stop, chunk=run.chunk,
        )  # fmt: skip

    @compiled
    def referred(params, tokens, mask):
        return logprobs(ref_lm, params, tokens, mask, run.sampling.adjust, ref.placement)[0]

    updated = compiled(
        partial(
            update, lm=lm, objective=run.objective, optimizer=optimizer, adjust=run.sampling.adjust,
            on_policy=run.minibatches * run.epochs == 1, strategy=train.placement,
        ),
        donate_argnums=0,
    )  # fmt: skip

    def begin(seed: int) -> TrainState:
        with jax.set_mesh(train.mesh):
            return born(train.put(np.uint32(seed)))

    def adopt(params) -> TrainState:
        with jax.set_mesh(train.mesh):
            return begun(move(params, train.shardings(lm)))

    def publish(params):
        target, own = gen.shardings(lm), lm.compute != "float32"
        if own:
            with jax.set_mesh(train.mesh):
                params = cast(params)
        return move(params, target, share=own), bytes_to_move(params, target)

    def complete(params, prompts: Prompts, seed: int, step: int, version: int, sampling: Sampling, n: int) -> Rollout:
        numbers = np.uint32(seed), np.uint32(step), np.int32(version)
        number = lambda x, like: np.asarray(x, np.float32 if isinstance(like, float) else np.int32)
        settings = jax.tree.map(number, sampling, Sampling())  # 1 and 1.0 are one temperature, and one program
        with jax.set_mesh(gen.mesh):
            args = gen.put((prompts.ids, prompts.length, prompts.uid, *numbers, settings))
            return jax.device_get(completed(params, *args, n=n))

    def freeze(params):
        return move(params, ref.shardings(ref_lm))

    def refer(params, rollout: Rollout) -> np.ndarray:
        b, t = rollout.mask.shape
        rollout = fit(rollout, ref.rows, ref.columns)
        tokens = rollout.tokens.replace(routes=None)  # the reference chooses its own experts
        with jax.set_mesh(ref.mesh):
            return jax.device_get(referred(params, *ref.put((tokens, rollout.mask))))[:b, :t]

    def step(state: TrainState, batch: Assessed):
        with jax.set_mesh(train.mesh):
            return updated(state, train.put(fit(batch, train.rows, train.columns)))

    programs = {
        "begin": born,
        "adopt": begun,
        "reshard": cast,
        "generate": completed,
        "assess": referred,
        "train": updated,
    }
    return Stages(lm, train, gen, begin, adopt, publish, complete, freeze, refer, step, programs)
