"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads from one
narrow latent of each token.

A head's query and key have a plain part, and one that is turned by position; the turned part of the key is the same for
all heads. `m` is the decoder's settings, `w` the weights of a layer.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float

from rljax.mesh import spec_of
from rljax.model import nn, products


@dataclass(frozen=True)
class Latent:
    """Widths. A head's queries and keys have `plain + turned`, which is the decoder's `head_dim`."""

    keys: int  # of the latent of keys and values
    plain: int
    turned: int
    value: int
    queries: int = 0  # of the latent of queries; 0: they come straight from the stream

    def __post_init__(self):
        for field in ("keys", "plain", "turned", "value"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.queries < 0 or self.turned % 2:
            raise ValueError(f"queries={self.queries} turned={self.turned}: at least 0, and even")

    def check(self, m) -> None:
        """ValueError where the decoder does not go with it."""
        if m.head_dim != self.plain + self.turned:
            raise ValueError(f"head_dim={m.head_dim} must be latent.plain + latent.turned = {self.plain + self.turned}")
        if m.kv_heads != m.heads:
            raise ValueError(f"kv_heads={m.kv_heads} must equal heads={m.heads}: every head has its own of the latent")
        if m.qk_norm or m.qkv_bias or m.norms != "pre":
            raise ValueError(f"qk_norm={m.qk_norm!r} qkv_bias={m.qkv_bias} norms={m.norms!r}: not with a latent")


def queries(m, h: Float[Array, "B T D"], w, rope, weight) -> tuple[Array, Array, Array]:
    """Queries and keys `[B T N plain+turned]`, and values `[B T N value]`, of the normalized stream.

    Latents are made where the stream lies, split over tensor with sequence parallelism, and are what is gathered.
    """
    l = m.latent
    down = lambda w: products.once(h, weight(m, w))
    norm = lambda x, w: nn.rms_norm(x, w, m.norm_eps, m.norm_offset)
    if l.queries:
        (q,) = products.column(norm(down(w.q_down), w.q_norm), weight(m, w.q_up))
    else:
        (q,) = products.column(h, weight(m, w.wq))
    latent, shared = jnp.split(down(w.kv_down), [l.keys], -1)
    (kv,) = products.column(norm(latent, w.k_norm), weight(m, w.kv_up))
    kv = _heads(kv, m.heads)
    k, v = jnp.split(kv, [l.plain], -1)
    q, turned = jnp.split(_heads(q, m.heads), [l.plain], -1)
    lying = P(*spec_of(h).partitions[:2], None)
    shared = nn.rotate(shared[:, :, None], [jax.reshard(t, lying) for t in rope])[:, :, 0]
    each = jnp.ones(m.heads, h.dtype, out_sharding=P(spec_of(k).partitions[2]))  # a product, as in `nn.shift`
    shared = jnp.einsum("btr,n->btnr", nn.whole(shared), each)
    return jnp.concatenate([q, nn.rotate(turned, rope)], -1), jnp.concatenate([k, shared], -1), v


def _heads(x: Float[Array, "B T N*H"], heads: int) -> Float[Array, "B T N H"]:
    b, t, width = x.shape
    return jax.lax.reshape(x, (b, t, heads, width // heads), out_sharding=P(*spec_of(x).partitions, None))
