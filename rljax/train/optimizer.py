"""Optimizers by optax, their settings frozen values."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

SETTLES = 1 - 2**-8  # the largest decay that makes every bfloat16 smaller: a slower one may round back to where it was


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) after clipping by global norm; matrices decay, scales and biases do not.

    The learning rate warms up linearly over `warmup` updates, then stays (`decay="constant"`) or falls over the rest of
    them towards `floor` times its peak, which one update more would have (`"linear"`, `"cosine"`).

    With `moments="bfloat16"` both are held so between updates, which are computed in float32: 4 bytes a parameter for
    8, as DeepSeek-V3 was trained (arXiv:2412.19437, section 3.3.3). A moment then stops moving within 2^-8 / (1 - b) of
    what it tends to: the second, at b2=0.95, within 8 %, so steps within 4 %; decays above 1 - 2^-8 would not move it
    at all and are refused. Measured: docs/precision.md.
    """

    lr: float = 1e-6
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0  # largest global gradient norm
    warmup: int = 0  # updates
    decay: str = "constant"
    floor: float = 0.0
    moments: str = "float32"  # or "bfloat16": how they are held

    def __post_init__(self):
        if self.decay not in ("constant", "linear", "cosine"):
            raise ValueError(f"decay={self.decay!r} must be 'constant', 'linear' or 'cosine'")
        if self.lr <= 0 or self.clip <= 0:
            raise ValueError(f"lr={self.lr} clip={self.clip} must both be above 0")
        if self.moments not in ("float32", "bfloat16"):
            raise ValueError(f"moments={self.moments!r} must be 'float32' or 'bfloat16'")
        if self.moments == "bfloat16" and max(self.b1, self.b2) > SETTLES:
            rule = f"moments='bfloat16' cannot hold a decay above {SETTLES}, which rounds back: 'float32' can"
            raise ValueError(f"b1={self.b1} b2={self.b2}: {rule}")

    def schedule(self, updates: int) -> optax.Schedule:
        """The learning rate of update 0, 1, ... of `updates` in all."""
        rest = max(1, updates - self.warmup)
        after = {
            "constant": lambda: optax.constant_schedule(self.lr),
            "linear": lambda: optax.linear_schedule(self.lr, self.lr * self.floor, rest),
            "cosine": lambda: optax.cosine_decay_schedule(self.lr, rest, self.floor),
        }[self.decay]()
        if not self.warmup:
            return after
        start = self.lr / self.warmup  # the first update already moves
        return optax.join_schedules([optax.linear_schedule(start, self.lr, self.warmup - 1 or 1), after], [self.warmup])

    def build(self, updates: int, matrices) -> optax.GradientTransformation:
        """`matrices`: a pytree of bools like the parameters, True where weight decay applies."""
        adamw = optax.adamw(
            self.schedule(updates), self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=matrices
        )
        return optax.chain(optax.clip_by_global_norm(self.clip), held(adamw, self.moments))


def held(inner: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """`inner` with the floats of its state held in `dtype` between updates, and read in float32."""
    if dtype == "float32":
        return inner

    def to(dtype, state):
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def update(gradients, state, params=None):
        updates, state = inner.update(gradients, to(jnp.float32, state), params)
        return updates, to(dtype, state)

    return optax.GradientTransformation(lambda params: to(dtype, inner.init(params)), update)
