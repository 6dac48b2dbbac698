"""What flows between the stages.

The letters of every annotation: B sequences, U distinct prompts, T tokens, S queries, D model width, N heads,
K key/value heads, G query heads per K, H head width, F feed-forward width, V vocabulary, L layers, R rewards.

Rows are right-padded, a prompt and then its completion. Entry t of a `[B T]` array belongs to `ids[t]`, so a
log-probability at t is that of `ids[t]` given what precedes it, and entry 0 is 0.
"""

from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt


@struct.dataclass
class Tokens:
    """Token ids and what attention may see: equal segments only, segment 0 being padding."""

    ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # within the segment
    segments: Int[Array, "B T"]
    routes: Int[Array, "B T L k"] | None = None  # the experts that each layer with experts shall choose
    noise: UInt[Array, "B T"] | None = None  # bits of each token, where activations are dropped


@struct.dataclass
class Rollout:
    """Completions as the sampler made them."""

    tokens: Tokens
    mask: Bool[Array, "B T"]  # the actor chose this token, the stop token included
    logp: Float[Array, "B T"]  # of the distribution sampled from; 0 off the mask
    version: Int[Array, "B T"]  # the actor's update count when it chose the token
    length: Int[Array, "B"]  # prompt and completion
    prompt_length: Int[Array, "B"]
    finish: Int[Array, "B"]  # STOP or LENGTH
    uid: Int[Array, "B"]  # of the prompt; PAD_UID for a row that only fills the batch
    sample: Int[Array, "B"]  # which completion of its prompt


STOP, LENGTH = 0, 1  # Rollout.finish: ended by the stop token, or by max_new_tokens
PAD_UID = -1


@struct.dataclass
class Assessed:
    """A rollout with what its assessment found."""

    rollout: Rollout
    scores: Float[Array, "B R"]  # one column per reward; NaN where it does not apply
    advantages: Float[Array, "B T"] | None = None
    ref_logp: Float[Array, "B T"] | None = None
    token_rewards: Float[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None
    returns: Float[Array, "B T"] | None = None
    prox_logp: Float[Array, "B T"] | None = None  # of the actor as the step began
    target: Float[Array, "B T"] | None = None  # what a loss compares with: a margin, a baseline, a label


@struct.dataclass
class TrainState:
    """A trainable role between updates."""

    step: Int[Array, ""]  # updates applied or skipped
    skipped: Int[Array, ""]  # consecutive updates skipped because they were not finite
    params: Any
    optimizer: Any
    kl: Float[Array, ""]  # the coefficient now, where it adapts
    moments: Float[Array, "3"]  # of returns, where a critic's are normalized
    master: Any = None  # matrices in float32, where `params` has them in bfloat16
