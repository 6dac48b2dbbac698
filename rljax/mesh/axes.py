"""The axes of every mesh, and a layout: nothing but their sizes.

All axes are always present and size 1 means off, so no code asks whether an axis is on.
"""

from dataclasses import dataclass, fields
from math import prod

import jax
from jax.sharding import AxisType


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes, outermost (slowest network) first."""

    data: int = 1  # replicas
    fsdp: int = 1  # replicas that shard state (ZeRO)
    pipe: int = 1  # pipeline stages
    seq: int = 1  # context
    tensor: int = 1  # heads, feed-forward, vocabulary
    expert: int = 1  # experts

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    @property
    def rows(self) -> int:
        """How many ways a batch is split."""
        return prod(getattr(self, axis) for axis in BATCH)

    def mesh(self, devices=None) -> jax.sharding.Mesh:
        """The mesh over `devices` (by default the first that JAX sees), all axes Explicit."""
        devices = jax.devices()[: self.devices] if devices is None else devices
        return jax.make_mesh(self.sizes, AXES, (AxisType.Explicit,) * len(AXES), devices=devices)

    def abstract(self) -> jax.sharding.AbstractMesh:
        """The same mesh without devices: enough to trace and lower."""
        return jax.sharding.AbstractMesh(self.sizes, AXES, (AxisType.Explicit,) * len(AXES))

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in zip(AXES, self.sizes) if size > 1) or "one device"


AXES = tuple(field.name for field in fields(Layout))
BATCH = ("data", "fsdp", "expert")  # the axes that a batch dimension is split over
