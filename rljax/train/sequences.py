"""Sums over the sequences of packed rows: exact, differentiable, in O(T log T), with no bound on their number.

A row holds sequences side by side, told apart by `segments` `[B T]`: each sequence is contiguous and 0 is padding,
whose values never matter. Rows may be split over devices; T is whole.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def totals(x: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The sum of x over a token's sequence, the same number at each of its tokens; 0 at padding."""
    x = jnp.where(segments > 0, x, 0).astype(jnp.float32)
    ends = jnp.pad(segments[:, 1:], ((0, 0), (0, 1))) != segments
    return _running(jnp.where(ends, _running(x, segments), 0.0), segments, reverse=True)


def means(x: Float[Array, "B T"], mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The mean of x over the masked tokens of a token's sequence; 0 where it has none."""
    return totals(jnp.where(mask, x, 0), segments) / jnp.maximum(lengths(mask, segments), 1)


def lengths(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """How many masked tokens a token's sequence has."""
    return totals(mask, segments)


def first(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the first masked token of each sequence that has one."""
    return _leads(mask, segments, reverse=False)


def last(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the last masked token of each sequence that has one."""
    return _leads(mask, segments, reverse=True)


def pairs(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Segments of pairs: sequences 1 and 2 of a row are pair 1, the odd one chosen and the even one rejected."""
    return (segments + 1) // 2


def chosen(mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the first masked token of the chosen sequence of each pair, where both sequences have a masked token."""
    heads = first(mask, segments)
    return heads & (segments % 2 == 1) & (totals(heads, pairs(segments)) == 2)


def _leads(mask, segments, reverse: bool):
    """True at the masked tokens that no other of their sequence precedes, or follows."""
    mask = jnp.logical_and(mask, segments > 0)
    return mask & (_running(mask.astype(jnp.int32), segments, reverse) == 1)


def _running(x, segments, reverse: bool = False):
    """The sum of x over a token's sequence from its first token, or its last, up to the token.

    After each round it is the sum over twice as many tokens, of which those of other sequences are left out. Rounds
    are a loop, since each written out would be more to compile than the loss itself.
    """
    length = x.shape[1]

    def moved(x, reach):
        """What lies `reach` tokens before, or after; 0 beyond the edge."""
        x = jnp.pad(x, ((0, 0), (0, length) if reverse else (length, 0)))
        return jax.lax.dynamic_slice_in_dim(x, reach if reverse else length - reach, length, 1)

    def double(i, x):
        reach = jnp.left_shift(1, i)
        return x + jnp.where(moved(segments, reach) == segments, moved(x, reach), 0)

    return jax.lax.fori_loop(0, (length - 1).bit_length(), double, x)
