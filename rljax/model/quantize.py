"""How a role holds its matrices: in float32 or bfloat16, or a frozen one in 8 bits, which its matmuls read as others.

Weight-only quantization: W = scale * values, a float32 scale for each output channel, so that no activation is
quantized and no calibration needed. The largest weight of a channel becomes the largest value: 127 in int8 (Dettmers et
al. 2022, arXiv:2208.07339, section 2), or 448 in float8, which is e4m3 (Micikevicius et al. 2022, arXiv:2209.05433).
A channel is a column of a matrix and of every expert, and a row of the embedding. Norms and biases stay as they are,
and so do routers, of which a small error may choose another expert.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import P
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from rljax.mesh import spec_of
from rljax.mesh.verbs import without
from rljax.model import table as tables
from rljax.model.table import Tensor, map_table

EIGHT = {"int8": (jnp.int8, 127.0), "float8": (jnp.float8_e4m3fn, 448.0)}  # with the largest value
TRAINED = ("float32", "bfloat16")
FROZEN = (*TRAINED, *EIGHT)


@struct.dataclass
class Quantized:
    """A matrix in 8 bits, in place of its array."""

    values: Array
    scale: Float[Array, "..."]  # as `values`, its contracted dimension 1


def hold(table, params, kind: str | None):
    """Parameters with matrices held in one of FROZEN, each shard made where it lies; None: as they are."""
    if kind is None:
        return params
    return map_table(lambda t, w: quantize(t, w, kind) if eight(t, kind) else cast(t, w, kind), table, params)


def eight(t: Tensor, kind: str | None) -> bool:
    """Whether this tensor is held in 8 bits."""
    return kind in EIGHT and t.matrix and t.part != "router"


def quantize(t: Tensor, w, kind: str) -> Quantized:
    dtype, most = EIGHT[kind]
    w = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(w), contracted(t), keepdims=True) / most
    scale = jnp.where(scale > 0, scale, 1.0)
    scaled = w / scale
    values = (jnp.round(scaled) if kind == "int8" else scaled).astype(dtype)
    return Quantized(values, jax.reshard(scale, scales(t, spec_of(w))))


def cast(t: Tensor, w, dtype: str):
    """A matrix in a dtype, unless it is quantized; other tensors as they are."""
    return w.astype(dtype) if t.matrix and dtype not in EIGHT and not isinstance(w, Quantized) else w


def dense(w, dtype: str):
    """A matrix in a dtype: what is quantized is gathered over fsdp in its 8 bits, and multiplied out in float32."""
    if not isinstance(w, Quantized):
        return w.astype(dtype)
    values = jax.reshard(w.values, without(spec_of(w.values), "fsdp"))
    return (values.astype(jnp.float32) * w.scale).astype(dtype)


def contracted(t: Tensor) -> int:
    """The dimension that a matmul sums over: what shares a scale. The embedding's is that of the tied head."""
    return len(t.shape) - (1 if t.part == "embed" else 2)


def scales(t: Tensor, spec: P) -> P:
    """The placement of scales, from that of values. They are few: none is split over fsdp."""
    dim = contracted(t)
    return P(*(None if d == dim else entry for d, entry in enumerate(without(spec, "fsdp").partitions)))


def shardings(table, mesh: jax.sharding.Mesh, zero: int, kind: str | None):
    """The sharding of every array of parameters held so."""

    def one(t: Tensor, where: NamedSharding):
        return Quantized(where, NamedSharding(mesh, scales(t, where.spec))) if eight(t, kind) else where

    return map_table(one, table, tables.shardings(table, mesh, zero))
