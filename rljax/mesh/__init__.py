"""Named device meshes: axes, mesh files, and the verbs used on sharded arrays."""

from rljax.mesh.axes import AXES, BATCH, Layout
from rljax.mesh.verbs import gather, reduced, shards, spec_of

__all__ = ["AXES", "BATCH", "Layout", "gather", "reduced", "shards", "spec_of"]
