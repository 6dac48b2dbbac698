"""A backward pass in two halves, for pipelines: what the stage before waits for, and what nobody waits for.

The halves are cut out of the whole backward pass as JAX traces it. The first half is what the gradient of the input
needs; the second is the rest, the products that make the gradients of weights. Between them live the values that the
first has made and the second reads: for a matmul its input and its output's cotangent. So both halves together do the
work of the whole once (Qi et al. 2023, arXiv:2401.10241, section 2.1). What one call makes for both, such as a
`shard_map`, is done in the first.
"""

from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

SHAPES = {"reshape", "transpose", "squeeze", "expand_dims"}  # what costs nothing to do again


def halve(f: Callable, w, x, rest) -> tuple[Callable, Callable]:
    """The halves of the backward pass of `f(w, x, rest) -> y`, for arguments of these types.

    `inputs(w, x, rest, dy) -> (dx, kept)` and `weights(w, rest, kept) -> dw`.
    """

    def backward(w, rest, x, dy):
        return jax.vjp(lambda w, x: f(w, x, rest), w, x)[1](dy)

    traced, (dw, dx) = jax.make_jaxpr(backward, return_shape=True)(w, rest, x, jax.eval_shape(f, w, x, rest))
    (w_tree, x_tree), jaxpr = map(jax.tree.structure, (dw, dx)), traced.jaxpr
    dw, dx = jaxpr.outvars[: w_tree.num_leaves], jaxpr.outvars[w_tree.num_leaves :]
    late = len(jax.tree.leaves((w, rest)))  # so many arguments the second half is given too
    first = _needed(jaxpr.eqns, dx)
    done = {id(eqn) for eqn in first}
    second = [eqn for eqn in _needed(jaxpr.eqns, dw) if id(eqn) not in done]
    for eqn in reversed(first):  # of a value in several shapes, one is kept
        if eqn.primitive.name in SHAPES and {*eqn.outvars} & {*_read(second, dw)}:
            second = [eqn, *second]
    late_made = {v for eqn in second for v in eqn.outvars}
    made = {*jaxpr.invars[late:], *(v for eqn in first for v in eqn.outvars)} - late_made
    kept = [v for v in _read(second, dw) if v in made]

    def inputs(w, x, rest, dy):
        out = _run(traced, first, jaxpr.invars, [*dx, *kept])(*jax.tree.leaves((w, rest, x, dy)))
        return jax.tree.unflatten(x_tree, out[: len(dx)]), out[len(dx) :]

    def weights(w, rest, kept_values):
        out = _run(traced, second, [*jaxpr.invars[:late], *kept], dw)(*jax.tree.leaves((w, rest)), *kept_values)
        return jax.tree.unflatten(w_tree, out)

    return inputs, weights


def _needed(eqns, outputs) -> list:
    """The equations that the outputs depend on, in order."""
    wanted, kept = {v for v in outputs if not isinstance(v, Literal)}, []
    for eqn in reversed(eqns):
        if wanted & {*eqn.outvars}:
            kept.append(eqn)
            wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return kept[::-1]


def _read(eqns, outputs) -> list:
    """Every variable that is read, once."""
    read = [v for eqn in eqns for v in eqn.invars] + list(outputs)
    return list(dict.fromkeys(v for v in read if not isinstance(v, Literal)))


def _run(traced: ClosedJaxpr, eqns, invars, outvars) -> Callable:
    return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr.replace(eqns=eqns, invars=invars, outvars=outvars), traced.consts))
