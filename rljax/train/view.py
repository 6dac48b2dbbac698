"""What a loss may read of a step: arrays `[B T]` alone, no models and no meshes."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class View(NamedTuple):
    """Float32, 0 off the mask; None where the run has no such thing. What a role estimates is differentiable.

    A row holds one or several sequences side by side. A loss is a function of a view; it returns the loss of each
    token, finite everywhere and of no meaning off the mask, and a dict of what is worth averaging: a metric's name to
    its values `[B T]`, which are averaged over the mask, or to (values, weights `[B T]`), averaged with those weights.
    """

    logp: Float[Array, "B T"] | None  # of the role being trained
    mask: Bool[Array, "B T"]  # the tokens that are trained
    segments: Int[Array, "B T"]  # 1, 2, ... tell a row's sequences apart, each contiguous; 0 is padding
    entropy: Float[Array, "B T"] | None = None  # of the role's distribution of the token, in nats
    values: Float[Array, "B T"] | None = None  # of the state before the token, by the role's value head
    scores: Float[Array, "B T"] | None = None  # of the state that the token leads to, by the role's head
    old: Float[Array, "B T"] | None = None  # log-probabilities that the trust region is centered on
    sampled: Float[Array, "B T"] | None = None  # log-probabilities that the tokens were sampled with
    advantages: Float[Array, "B T"] | None = None
    ref_logp: Float[Array, "B T"] | None = None  # log-probabilities by the reference
    returns: Float[Array, "B T"] | None = None  # what values shall become
    old_values: Float[Array, "B T"] | None = None  # values before the step's first update
    target: Float[Array, "B T"] | None = None  # what a loss compares with: a pair's margin, KTO's z0, a step's label
