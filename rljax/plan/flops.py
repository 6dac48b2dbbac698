"""Floating-point operations of matrix products, counted in a jaxpr: what a program computes, before any compiler.

XLA's own count takes the body of a loop once, whatever its trip count; here it is multiplied.
"""

from collections.abc import Callable, Iterator
from math import prod

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

CALLS = {"jit", "eval_jaxpr", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"}  # each runs its jaxpr once


def flops_of(fn: Callable, *args) -> int:
    """Of one call, the arguments arrays or ShapeDtypeStructs."""
    return dot_flops(jax.make_jaxpr(fn)(*args))


def dot_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """FLOPs of all dot_general and ragged_dot, a multiply-add being 2; over all devices, what they replicate once.

    A dot_general that contracts nothing, or leaves no dimension of either side free, is elementwise work: not counted.
    The body of a scan counts as often as it runs, and that of a shard_map once per device that runs it: the product
    of the sizes of its manual axes. A cond counts its costliest branch. A product in a while loop is an error, since no
    one knows how often it runs, and so is one in a kernel or any other call that is not understood.
    """
    return sum(map(_flops, getattr(jaxpr, "jaxpr", jaxpr).eqns))


def _flops(eqn) -> int:
    name, p = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), (batch, _) = p["dimension_numbers"]
        lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        matrices = contracted and len(out) > len(batch)
        return 2 * prod(out) * prod(lhs[d] for d in contracted) if matrices else 0
    if name == "ragged_dot_general":
        return _ragged(eqn)
    if name == "cond":
        return max(map(dot_flops, p["branches"]))
    once = sum(map(dot_flops, _inner(p)))
    if name == "scan":
        return p["length"] * once
    if name == "shard_map":
        return prod(p["mesh"].shape[axis] for axis in p["newly_manual_axes"]) * once
    if once and name not in CALLS:
        raise ValueError(f"{name}: it holds matrix products, and how often it runs is not known")
    return once


def _ragged(eqn) -> int:
    """Every row of the left operand meets the matrix of one group, or each group sums its own rows: both cost as one
    dense product of the left operand with a single group's matrix."""
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    skipped = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2 * prod(lhs) * prod(size for d, size in enumerate(rhs) if d not in skipped)


def _inner(params: dict) -> Iterator[Jaxpr | ClosedJaxpr]:
    is_jaxpr = lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    return filter(is_jaxpr, jax.tree.leaves(list(params.values()), is_leaf=is_jaxpr))
