"""Optimizers by optax, their settings frozen values."""

from dataclasses import dataclass

import optax


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) after clipping by global norm; matrices decay, scales and biases do not.

    The learning rate warms up linearly over `warmup` updates, then stays (`decay="constant"`) or falls over the rest of
    them towards `floor` times its peak, which one update more would have (`"linear"`, `"cosine"`).
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

    def __post_init__(self):
        if self.decay not in ("constant", "linear", "cosine"):
            raise ValueError(f"decay={self.decay!r} must be 'constant', 'linear' or 'cosine'")
        if self.lr <= 0 or self.clip <= 0:
            raise ValueError(f"lr={self.lr} clip={self.clip} must both be above 0")

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
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                self.schedule(updates), self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=matrices
            ),
        )
