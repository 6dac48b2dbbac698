"""From logits to a token, and the log-probability of the distribution it was really drawn from."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import P, lax
from jaxtyping import Array, Float, Int

from rljax.errors import UserError
from rljax.mesh import spec_of
from rljax.model.attention import MASKED


@struct.dataclass
class Sampling:
    """How tokens are drawn. Numbers, or arrays `[B]` with one value a row; traced, so a new value compiles nothing.

    The order is Hugging Face's: temperature, then top-k, top-p and min-p on what is left.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens whose mass first reaches p
    min_p: float = 0.0  # keep tokens with at least min_p times the likeliest one's probability

    def check(self, training: bool) -> None:
        """Refuses what cannot be sampled from, and for training what has no density: temperature 0."""
        if self.temperature < 0 or (training and self.temperature == 0):
            why = "greedy completions have no policy gradient" if self.temperature == 0 else "it divides the logits"
            raise UserError(f"sampling.temperature={self.temperature} must be above 0 for training: {why}; try 1.0")
        if self.top_k < 0:
            raise UserError(f"sampling.top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling.top_p={self.top_p} must be in (0, 1]; 1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"sampling.min_p={self.min_p} must be in [0, 1]; 0 keeps all tokens")

    @property
    def truncates(self):
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    def adjust(self, logits: Float[Array, "*B V"], target: Int[Array, "*B"]) -> Float[Array, "*B V"]:
        """The trainer's form, for settings known when it compiles: logits of the distribution that was sampled from.

        The target is always kept: the sampler drew it, whatever rounding does at the edge of the kept set here.
        """
        z = logits / self.temperature
        if not self.truncates:
            return z
        z = jax.reshard(z, P(*spec_of(z).partitions[:-1], None))  # a sort needs the whole vocabulary
        drawn = target[..., None] == jnp.arange(z.shape[-1]).reshape((1,) * target.ndim + (-1,))
        return jnp.where(drawn, z, truncate(z, self))


def truncate(z: Float[Array, "*B V"], s: Sampling) -> Float[Array, "*B V"]:
    """Logits with what top-k, top-p and min-p exclude masked. The vocabulary must be whole on every device."""
    column = lambda x: jnp.reshape(x, (-1,) + (1,) * (z.ndim - 1)) if jnp.ndim(x) else x
    high = -jnp.sort(-z, axis=-1)
    rank = jnp.arange(z.shape[-1]).reshape((1,) * (z.ndim - 1) + (-1,))
    keep = (rank < column(s.top_k)) | (column(s.top_k) == 0)
    p = jax.nn.softmax(jnp.where(keep, high, MASKED), -1)
    keep &= jnp.cumsum(p, -1) - p < column(s.top_p)
    keep &= p >= column(s.min_p) * p[..., :1]
    least = jnp.min(jnp.where(keep, high, jnp.inf), -1, keepdims=True)
    return jnp.where(z >= least, z, MASKED)


def sample(logits: Float[Array, "B V"], keys: Array, s: Sampling) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """One token a row by its own key `[B]`, and its log-probability under the distribution drawn from, in float32.

    At temperature 0 the likeliest token, with its log-probability at temperature 1.
    """
    logits = jax.reshard(logits.astype(jnp.float32), P(spec_of(logits).partitions[0], None))
    column = lambda x: x[:, None] if jnp.ndim(x) else x
    greedy = column(s.temperature) == 0
    z = logits / jnp.where(greedy, 1.0, column(s.temperature))
    z = lax.cond(jnp.any(s.truncates), lambda z: truncate(z, s), lambda z: z, z)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (z.shape[-1],)))(keys)
    token = jnp.argmax(jnp.where(greedy, z, z + noise), -1).astype(jnp.int32)
    log = jax.nn.log_softmax(z, -1)
    hit = token[:, None] == jnp.arange(z.shape[-1])[None]
    return token, jnp.sum(jnp.where(hit, log, 0.0), -1)
