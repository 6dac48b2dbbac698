"""How attention crosses the seq axis (context parallelism), on sequences of which each device has a part."""

from collections.abc import Callable

import jax
from jax import P
from jaxtyping import Array, Float

from rljax.mesh import shards, spec_of
from rljax.model.attention import Rule, Segments
from rljax.model.ring import ring


def across(context: str, form: Callable, q, k, v, segments: Segments, rule: Rule) -> Float[Array, "B T N U"]:
    """Attention on sequences split over seq: `form` where they are whole, or where it gathers the keys by itself.

    "ring": keys travel around seq, tokens being dealt out (`order.deal`). "ulysses": sequences are made whole and
    heads split instead, all-to-all, for the time of attention (Jacobs et al. 2023, arXiv:2309.14509).
    """
    if shards(q, 1) == 1 or context == "gather":
        return form(q, k, v, segments, rule)
    if context == "ring":
        return ring(q, k, v, segments, rule)
    spec = spec_of(q)
    heads = P(spec.partitions[0], None, ("tensor", "seq"), None)
    q, k, v = (jax.reshard(x, heads) for x in (q, k, v))
    return jax.reshard(form(q, k, v, Segments(segments.k, segments.k), rule), spec)
