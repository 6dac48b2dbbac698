"""Weights and gradients where pipe, data and fsdp are manual axes: the communication that types cannot state there.

In a pipeline's `shard_map` a weight is the share of one device. What follows from its Tensor: where it is gathered over
fsdp, where its gradient is reduced, and how layers reach the devices that a schedule wants them on.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

from rljax.mesh import island, spec_of
from rljax.mesh.verbs import axes_of
from rljax.model.entries import add_at, at, put
from rljax.model.quantize import Quantized, cast
from rljax.model.table import Tensor

ROWS = ("data", "fsdp")  # of the axes that rows are split over, those that are manual
MANUAL = ("pipe", *ROWS)


def specs(spec: P) -> P:
    """The manual axes of a placement: what the specs of a shard_map may name."""
    return P(*(tuple(axis for axis in axes_of(entry) if axis in MANUAL) or None for entry in spec.partitions))


def zeros(like, *lead: int, dtype=None):
    """Zeros of the types of a tree, with leading dimensions."""
    new = lambda x: jnp.zeros(
        (*lead, *x.shape), dtype or x.dtype, out_sharding=P(*(None,) * len(lead), *x.sharding.spec.partitions)
    )
    return jax.tree.map(new, like)


def whole(dtype: str, zero: int, t: Tensor, w, stacked: bool = False):
    """A weight as blocks read it: a matrix in the compute dtype, whole over fsdp. `stacked`: one layer of a stack.

    What is quantized stays so, its values whole.
    """
    if isinstance(w, Quantized):
        return w.replace(values=_whole(zero, t, w.values, stacked))
    return _whole(zero, t, cast(t, w, dtype), stacked)


def _whole(zero: int, t: Tensor, w, stacked: bool):
    dim = _split(t.placed(zero)) if zero == 3 else None
    if dim is None or lax.axis_size("fsdp") == 1:
        return w
    gather = lambda w: lax.all_gather(w, "fsdp", axis=dim - stacked, tiled=True)
    return island(gather, spec_of(w))(w)


def scattered(zero: int, t: Tensor, g):
    """The gradient of a microbatch, its sum over fsdp scattered at ZeRO-2; at ZeRO-3 it comes so from `whole`."""
    dim = _split(t.updated(zero)) if zero == 2 else None
    return g if dim is None else _scatter(g, dim)


def summed(zero: int, t: Tensor, g):
    """The gradient of an update from the sums of the devices, placed as its update is."""
    dim = _split(t.updated(zero))
    if dim is None:
        return lax.psum(g, ROWS)
    return lax.psum(_scatter(g, dim) if zero == 1 else g, "data")


def _scatter(g, dim: int):
    """Reduce-scatter over fsdp, in an island: JAX cannot lower it where types split a dimension."""
    scatter = lambda g: lax.psum_scatter(g, "fsdp", scatter_dimension=dim, tiled=True)
    return island(scatter, spec_of(g))(g)


def _split(spec: P) -> int | None:
    """The dimension that fsdp splits."""
    return next((d for d, entry in enumerate(spec.partitions) if "fsdp" in axes_of(entry)), None)


def deal(part: np.ndarray, layers):
    """Layers [L/S ...], in order over pipe, as the parts [chunks L/parts ...] that a schedule has on each device.

    Each chunk comes by one permutation of the devices: what a device lacks travels once an update, before the ticks.
    """
    held = (int(part.max()) + 1) // part.shape[0]
    layers = jax.tree.map(lambda x: jnp.reshape(x, (held, -1, *x.shape[1:]), out_sharding=_led(x)), layers)
    if part.shape[1] == 1:
        return layers
    me = lax.axis_index("pipe")
    work = jax.tree.map(lambda x: jnp.concatenate([x] * (part.shape[1] // held)), layers)  # every chunk is replaced
    for pairs, sent, chunk in _rounds(part, held):
        work = put(work, lax.ppermute(at(layers, sent[me]), "pipe", pairs), chunk[me])
    return work


def home(part: np.ndarray, work):
    """What `deal` did, undone for gradients [chunks L/parts ...]: those of a part that two devices have are added."""
    held = (int(part.max()) + 1) // part.shape[0]
    layers = jax.tree.map(lambda x: x[:held], work)
    if part.shape[1] > 1:
        me, layers = lax.axis_index("pipe"), jax.tree.map(jnp.zeros_like, layers)
        for pairs, sent, chunk in _rounds(part, held):
            back = [(device, source) for source, device in pairs]
            layers = add_at(layers, lax.ppermute(at(work, chunk[me]), "pipe", back), sent[me])
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=P(*spec_of(x)[1:])), layers)


def _rounds(part: np.ndarray, held: int):
    """Permutations that bring every chunk: (source, device) pairs, the part a source sends, the chunk that it becomes.

    In round r, device d gets chunk d (held - 1) + r, modulo chunks: of the placements that there are, no two devices
    then get theirs from one source.
    """
    stages, chunks = part.shape
    d = np.arange(stages)
    for r in range(chunks):
        chunk = (d * (held - 1) + r) % chunks
        source, index = np.divmod(part[d, chunk], held)
        sent = np.zeros(stages, np.int32)
        sent[source] = index
        yield list(zip(source.tolist(), d.tolist())), jnp.int32(sent), jnp.int32(chunk)


def _led(x) -> P:
    return P(None, *spec_of(x).partitions)
