"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads from one
narrow latent of each token.

A head's query and key have a plain part, and one that is turned by position; the turned part of the key is the same for
all heads. Latents are made where the stream lies, split over tensor with sequence parallelism; they are what is
gathered, and what a cache keeps. `m` is the decoder's settings, `w` the weights of a layer.
"""

from collections.abc import Callable
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


def known(m, h, w, rope, weight) -> tuple[Float[Array, "B T keys"], Float[Array, "B T turned"]]:
    """The latent of keys and values, and the part of the keys that is turned and that all heads share."""
    latent, shared = jnp.split(products.once(h, weight(m, w.kv_down)), [m.latent.keys], -1)
    lying = P(*spec_of(h).partitions[:2], None)
    shared = nn.rotate(shared[:, :, None], [jax.reshard(t, lying) for t in rope])[:, :, 0]
    return _normed(m, latent, w.k_norm), shared


def queries(m, h: Float[Array, "B T D"], w, rope, weight, of=None) -> tuple[Array, Array, Array]:
    """Queries and keys `[B T N plain+turned]`, and values `[B T N value]`, of the normalized stream.

    `of`: what is known of it already.
    """
    q, turned = _asked(m, h, w, rope, weight)
    latent, shared = of or known(m, h, w, rope, weight)
    (kv,) = products.column(latent, weight(m, w.kv_up))
    k, v = jnp.split(_heads(kv, m.heads), [m.latent.plain], -1)
    each = jnp.ones(m.heads, h.dtype, out_sharding=P(spec_of(k).partitions[2]))  # a product, as in `nn.shift`
    shared = jnp.einsum("btr,n->btnr", nn.whole(shared), each)
    return jnp.concatenate([q, turned], -1), jnp.concatenate([k, shared], -1), v


def entries(of: tuple[Array, Array]) -> Float[Array, "B T n keys+turned"]:
    """What a cache keeps: all that is known of a token, once for each of the n devices of tensor."""
    x = nn.whole(jnp.concatenate(of, -1))
    b, t, width = x.shape
    n = jax.typeof(x).sharding.mesh.shape["tensor"]
    rows, time, _ = spec_of(x).partitions
    return jax.reshard(jnp.broadcast_to(x[:, :, None], (b, t, n, width)), P(rows, time, "tensor", None))


def absorbed(m, h: Float[Array, "B T D"], w, rope, weight) -> tuple[Array, Array, Callable]:
    """Queries `[B T N keys+turned]` that meet what a cache keeps; that of these tokens; and what makes heads' values
    `[B T N value]` of the sums of latents that attention reads there.

    A head's plain part of a key is its matrix times the latent, so its queries are multiplied by that matrix instead
    (section 2.1.2).
    """
    q, turned = _asked(m, h, w, rope, weight)
    up = nn.unfold(products.added(weight(m, w.kv_up)), 1, m.heads)
    into, out = jnp.split(up, [m.latent.plain], -1)
    q = jnp.concatenate([jnp.einsum("btnp,cnp->btnc", q, into), turned], -1)
    return q, entries(known(m, h, w, rope, weight)), lambda sums: jnp.einsum("btnc,cnu->btnu", sums, out)


def _asked(m, h, w, rope, weight) -> tuple[Float[Array, "B T N plain"], Float[Array, "B T N turned"]]:
    """Both parts of the queries."""
    if m.latent.queries:
        latent = _normed(m, products.once(h, weight(m, w.q_down)), w.q_norm)
        (q,) = products.column(latent, weight(m, w.q_up))
    else:
        (q,) = products.column(h, weight(m, w.wq))
    q, turned = jnp.split(_heads(q, m.heads), [m.latent.plain], -1)
    return q, nn.rotate(turned, rope)


def _normed(m, x, w):
    return nn.rms_norm(x, w, m.norm_eps, m.norm_offset)


def _heads(x: Float[Array, "B T N*H"], heads: int) -> Float[Array, "B T N H"]:
    b, t, width = x.shape
    return jax.lax.reshape(x, (b, t, heads, width // heads), out_sharding=P(*spec_of(x).partitions, None))
