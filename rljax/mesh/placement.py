"""How a role in a stage lies on its devices: a layout, and how its axes are used.

A strategy changes where numbers live and what is sent, never what is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rljax.mesh.axes import Layout


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the axes of a layout are used: what a mesh file says besides their sizes."""

    zero: int = 3  # what fsdp shards: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too
    microbatches: int = 1  # pieces that an update's batch is cut into
    remat: str = "block"  # what is recomputed: nothing, blocks, all but named values, or blocks from host memory
    sequence_parallel: bool = False  # the residual stream is split over tensor too (Korthikanti et al. 2022)
    context: str = "gather"  # how attention crosses the seq axis
    schedule: str = "gpipe"  # in which order the stages of pipe take the microbatches

    def columns(self, sizes: Mapping[str, int]) -> int:
        """What the number of tokens in a row must be a multiple of, on a mesh of these sizes."""
        return sizes["seq"] * (sizes["tensor"] if self.sequence_parallel else 1)


DEFAULT = Strategy()


@dataclass(frozen=True, kw_only=True)
class Placement(Strategy):
    """How one invocation, a role in a stage, lies on its devices."""

    layout: Layout  # sizes of the mesh axes; their product is the size of the group
    group: str = "all"  # the devices, by the name of their range in the mesh file
