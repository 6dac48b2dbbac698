"""Where a role runs in a stage: a mesh, and how arrays lie on it."""

from dataclasses import asdict, dataclass
from functools import partial

import jax
from jax import P
from jax.sharding import NamedSharding

from rljax.errors import UserError
from rljax.generate.relay import in_flight
from rljax.mesh import BATCH
from rljax.mesh.file import MeshFile, Placement
from rljax.model.attention import BLOCKS
from rljax.model.quantize import shardings
from rljax.model.table import LM, misfits

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

    def shardings(self, lm: LM, params: str | None = None):
        """Of parameters held as `Role.params` says."""
        return shardings(lm.table, self.mesh, self.placement.zero, params)


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
