"""Named device meshes: axes, mesh files, and the verbs used on sharded arrays."""

from rljax.mesh.axes import AXES, BATCH, Layout
from rljax.mesh.placement import Placement, Strategy
from rljax.mesh.verbs import gather, island, reduced, scatter, shards, spec_of

__all__ = [
    "AXES",
    "BATCH",
    "Layout",
    "Placement",
    "Strategy",
    "gather",
    "island",
    "reduced",
    "scatter",
    "shards",
    "spec_of",
]
