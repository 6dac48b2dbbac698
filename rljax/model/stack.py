"""Stacked layers, scanned: what runs in the forward pass and what is recomputed in the backward one."""

from collections.abc import Callable

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.ad_checkpoint import checkpoint_policies as policies
from jaxtyping import Array, Float

from rljax.mesh.verbs import within
from rljax.model.ring import unrolled
from rljax.model.table import UNROLL

CASTS = {"name", "reshard", "pvary", "pcast", "reduced_vary_cast_p"}  # primitives whose result is their input


def all_but_gathered(primitive, *_, **params) -> bool:
    """Whether to keep a value: not one gathered over fsdp, by whatever name it goes further on."""
    return primitive.name not in CASTS and "fsdp" not in str(params.get("axis_name", ""))


# What the backward pass finds stored, per block. Weights gathered over fsdp are never kept: keeping them undoes ZeRO-3.
REMAT = {
    "none": all_but_gathered,
    "block": policies.nothing_saveable,
    "names": policies.save_only_these_names("attention", "ffn"),
    "offload": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=("block",),  # what enters each block waits in host memory
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def through(block: Callable, x: Float[Array, "B T D"], layers, remat: str) -> tuple[Float[Array, "B T D"], object]:
    """x through layers stacked on no axis, and what each sums. `block(x, w)` is under `jax.checkpoint`."""
    step = jax.checkpoint(lambda x, w: block(checkpoint_name(x, "block"), w), policy=REMAT[remat])
    return lax.scan(step, x, layers, unroll=unroll(layers))


def unroll(layers) -> bool:
    """Whether a scan over these layers is written out; in a pipeline on CPUs it is, for the sake of its collectives."""
    return len(jax.tree.leaves(layers)[0]) <= UNROLL or (within() and unrolled())
