"""Losses of reward models: which of two sequences is better, and which steps of one are right."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax.nn import log_sigmoid, softplus

from rljax.train.preferences import judged, sides
from rljax.train.sequences import last
from rljax.train.view import View


@dataclass(frozen=True)
class BradleyTerry:
    """-log sigmoid(r_w - r_l - margin) + center (r_w + r_l)^2, r the score at a sequence's last masked token.

    (Bradley and Terry 1952; margin: Llama 2, arXiv:2307.09288, equation 2; center: arXiv:2312.09244.) Pairs lie as in
    `preferences`. The margin is `target`, on the tokens of the chosen sequence, or 0 where there is none.
    """

    center: float = 0.0
    unit: ClassVar[str] = "pair"

    def __post_init__(self):
        if self.center < 0:
            raise ValueError(f"center={self.center} must be 0 (off) or above")

    def __call__(self, view: View):
        won, lost = sides(jnp.where(last(view.mask, view.segments), view.scores, 0.0), view.segments)
        margin = 0.0 if view.target is None else view.target
        loss = -log_sigmoid(won - lost - margin) + self.center * jnp.square(won + lost)
        return judged(loss, won, lost, view)


@dataclass(frozen=True)
class StepLabels:
    """Binary cross-entropy of a score with the step's label, `target`, 0 or 1 (Lightman et al. 2023, arXiv:2305.20050).

    The mask holds the tokens that end a step, and those alone.
    """

    def __call__(self, view: View):
        right = (view.scores > 0) == (view.target > 0.5)
        return softplus(view.scores) - view.target * view.scores, {"accuracy": right}
