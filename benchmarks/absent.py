"""The update of a run for chips that are not there: its batch and state abstract, its compiler the real one."""

from dataclasses import replace

import jax
import numpy as np
from bench import assessed
from jax import P
from jax.sharding import NamedSharding

from rljax.errors import UserError
from rljax.mesh import Layout
from rljax.mesh.file import MeshFile
from rljax.model.table import abstract
from rljax.run.run import Run
from rljax.run.stages import Stages
from rljax.types import Assessed, Rollout, Tokens, TrainState


def blank(run: Run) -> Assessed:
    """A batch of the sizes that the run generates, all zeros."""
    rows, time = run.prompts * (run.n if run.objective.advantage else 1), run.max_prompt + run.max_new
    number, ids = np.zeros(rows, np.int32), np.zeros((rows, time), np.int32)
    lm = run.roles["actor"].lm
    replayed = lm.experts is not None and lm.experts.replay
    routes = np.zeros((rows, time, lm.layers - lm.dense, lm.experts.top_k), np.int16) if replayed else None
    rollout = Rollout(
        Tokens(ids, ids, ids, routes), ids.astype(bool), ids.astype(np.float32), ids,
        number, number, number, number, number,
    )  # fmt: skip
    return assessed(run, rollout)


def begun(stages: Stages) -> TrainState:
    """The state that training starts from, without values."""
    place, lm = stages.actor.place, stages.actor.lm
    with jax.set_mesh(place.mesh):
        state = jax.eval_shape(stages.programs["adopt/actor"], abstract(lm.table, place.mesh, place.placement.zero))

    def placed(x):  # of a scalar the type says nothing
        where = NamedSharding(place.mesh, x.sharding.spec if x.ndim else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(placed, state)


def widened(mesh: MeshFile, devices: int) -> MeshFile:
    """The mesh file for another number of devices: in each layout, an axis that splits the batch makes up for it."""
    if devices == mesh.devices:
        return mesh
    if len(mesh.groups) > 1:
        raise UserError(f"{mesh.path}: devices = {mesh.devices} in groups, but {devices} chips: write a file for them")

    def wide(layout: Layout) -> Layout:
        for axis in ("fsdp", "data", "expert"):
            size, rest = divmod(getattr(layout, axis) * devices, mesh.devices)
            if getattr(layout, axis) > 1 and size and not rest:
                return replace(layout, **{axis: size})
        raise UserError(
            f"{mesh.path}: {layout} cannot become {devices} chips: no axis that splits the batch can change"
        )

    tables = {name: table | {"layout": wide(table["layout"])} for name, table in mesh.tables.items()}
    return replace(mesh, devices=devices, groups={"all": (0, devices)}, tables=tables)
