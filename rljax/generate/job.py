"""What completing a batch of prompts takes, whichever way its layers lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int

from rljax.generate.sampling import Sampling, sample
from rljax.mesh import Strategy, spec_of
from rljax.model.table import LM


class Job(NamedTuple):
    """U prompts, n completions of each: R = U * n rows, those of one prompt adjacent."""

    lm: LM
    strategy: Strategy
    prompts: Int[Array, "U P"]  # padded to what the strategy's columns want
    lengths: Int[Array, "U"]
    keys: Array  # [R], of each row's draws
    filler: Bool[Array, "R"]  # rows that only fill the batch
    sampling: Sampling
    n: int
    prompt: int  # tokens that a prompt may have
    stop: tuple[int, ...]
    chunk: int  # tokens decoded between two looks at whether all rows have ended
    chunks: int

    @property
    def width(self) -> int:
        """Tokens that may be sampled."""
        return 1 + self.chunks * self.chunk

    def stops(self, ids: Int[Array, "*R"]) -> Bool[Array, "*R"]:
        return jnp.any(jnp.stack([ids == s for s in self.stop]), 0) if self.stop else jnp.zeros_like(ids, bool)

    def draw(self, logits: Float[Array, "R V"], t) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
        """Token t of each row and its log-probability."""
        return sample(logits, jax.vmap(jax.random.fold_in, (0, None))(self.keys, t), self.sampling)

    def grown(self, cache: Array, spare: int = 0) -> Array:
        """A prompts' cache [L U C T ...] as one of completions, with room for their tokens and `spare` more."""
        slots = -(-(self.prompt + self.width + spare) // cache.shape[2])
        empty = -1 if jnp.issubdtype(cache.dtype, jnp.integer) else 0
        more = [(0, max(0, slots - cache.shape[3]) if d == 3 else 0) for d in range(cache.ndim)]
        return jnp.pad(repeat(cache, self.n, 1), more, constant_values=empty)


def repeat(x: Array, n: int, axis: int = 0) -> Array:
    """Rows of prompts [U] as rows of completions [U * n], neighbors staying on one device."""
    wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], n, *x.shape[axis + 1 :]))
    shape = *x.shape[:axis], x.shape[axis] * n, *x.shape[axis + 1 :]
    return jnp.reshape(wide, shape, out_sharding=P(*spec_of(x).partitions))


def windows(prompt: int, chunk: int, chunks: int) -> list[tuple[int, int]]:
    """(tokens sampled by then, slots read until then) of each loop: chunks are grouped so that the slots double."""
    plan, j = [], 0
    while j < chunks:
        j = min(chunks, j + max(1, (prompt + j * chunk) // chunk))
        plan.append((j * chunk, prompt + j * chunk))
    return plan
