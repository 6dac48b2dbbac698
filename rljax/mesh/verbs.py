"""Communication that one can read. Shardings are part of array types, so a verb takes arrays and says what moves."""

from math import prod

import jax
from jax import P, lax

from rljax.mesh.axes import BATCH

TOKENS = (*BATCH, "seq")  # the axes that tokens are split over: a weight's gradient is a sum over them


def spec_of(x) -> P:
    """The placement in an array's type."""
    return jax.typeof(x).sharding.spec


def axes_of(entry) -> tuple[str, ...]:
    """The mesh axes in one entry of a placement: None, a name or a tuple of names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def split_over(spec: P) -> tuple[str, ...]:
    """All mesh axes of a placement, outermost dimension first."""
    return tuple(axis for entry in spec.partitions for axis in axes_of(entry))


def without(spec: P, *axes: str) -> P:
    """The placement with some mesh axes removed: what an array has after gathering over them."""
    kept = (tuple(axis for axis in axes_of(entry) if axis not in axes) for entry in spec.partitions)
    return P(*(k[0] if len(k) == 1 else k or None for k in kept))


def shards(x, dim: int) -> int:
    """Into how many parts dimension `dim` of x is split on the mesh in use."""
    sizes = jax.typeof(x).sharding.mesh.shape
    return prod(sizes[axis] for axis in axes_of(spec_of(x).partitions[dim]))


def island(body, out, check_vma: bool = True):
    """`body` on the shards of each device, its results placed as `out`: a shard_map over every axis not manual yet.

    Within a pipeline it is computed again in the backward pass: JAX cannot lower the residuals of an island there. And
    nothing there has types that say along which manual axes it differs, since kernels return none that do.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    body = jax.checkpoint(body) if within() else body
    return jax.shard_map(body, out_specs=out, axis_names=free, check_vma=check_vma and not within())


def within() -> bool:
    """Whether this is traced within a pipeline's shard_map, where types cannot say reduced or unreduced."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def rows() -> tuple[str, ...]:
    """The axes that types split a batch over: within a pipeline some are manual."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in BATCH if axis not in manual)


def whole(x, axis: str):
    """x where a mesh axis of size 1 splits nothing: a scan takes no xs whose first dimension is split."""
    return jax.reshard(x, P(*without(spec_of(x), axis).partitions, reduced=spec_of(x).reduced))


def reduced(x, axes=TOKENS):
    """The same weights, their gradient left as one unreduced sum per device over `axes` until this is transposed.

    Stated once before a loop over microbatches, the sum over replicas happens once after it. Elementwise use is a type
    error. Within a pipeline it is x as it was.
    """
    if within():
        return x
    spec = spec_of(x)
    return jax.reshard(x, P(*spec.partitions, reduced=spec.reduced | (frozenset(axes) - {*split_over(spec)})))


def gather(x, axis: str):
    """All-gather over one mesh axis, along the dimension it splits; x itself where it splits none.

    The transpose is a reduce-scatter of the cotangents' unreduced sum. A plain reshard would transpose to an
    all-reduce of the whole array followed by a slice, on CPU and TPU alike: twice the bytes and the whole buffer.
    Where other axes split the same dimension, `axis` must be the innermost of them, so that shards are contiguous.
    """
    spec = spec_of(x)
    dims = [d for d, entry in enumerate(spec.partitions) if axis in axes_of(entry)]
    if not dims:
        return x
    (d,) = dims
    if axes_of(spec.partitions[d])[-1] != axis:
        raise ValueError(f"gather over {axis!r}: it must be the innermost axis of dimension {d} of {spec}")
    out = P(*without(spec, axis), reduced=spec.reduced | {axis})
    if within():
        return jax.reshard(x, without(spec, axis))
    if shards(x, d) == 1:  # nothing moves, and JAX 0.10 cannot lower this island's transpose on a mesh of one device
        return jax.reshard(x, out)
    return island(lambda x: lax.all_gather(x, axis, axis=d, tiled=True, to="reduced"), out)(x)


def scatter(x, axis: str, dim: int):
    """Reduce-scatter of unreduced sums over one mesh axis, which then splits dimension `dim` as its innermost axis.

    A reshard to the same placement would be an all-reduce of the whole array followed by a slice.
    """
    spec = spec_of(x)
    entries = list(spec.partitions)
    entries[dim] = (*axes_of(entries[dim]), axis) if entries[dim] else axis
    out = P(*entries, unreduced=spec.unreduced - {axis}, reduced=spec.reduced)
    if jax.typeof(x).sharding.mesh.shape[axis] == 1:
        return jax.reshard(x, out)
    return island(lambda x: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True), out)(x)
