"""Advantages: functions of a step's experience that know no model and no mesh: advantage(e) -> [B T], 0 off the mask.

They run on the host, in float64. What a run has to provide for one is told by its `needs_` attributes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from jaxtyping import Bool, Float

from rljax.assess.experience import Experience, applies, masked, placed, spread
from rljax.assess.groups import less_mean, relative
from rljax.assess.returns import discounted, following, whiten


class Needs:
    """What an advantage reads beyond rewards."""

    needs_critic = False  # values, and bootstrap where it is to be used
    needs_group = False  # two completions of a prompt or more
    needs_greedy = False  # a greedy completion of each prompt, rewarded like the others
    needs_teacher = False  # log-probabilities under a teacher


@dataclass(frozen=True)
class GroupRelative(Needs):
    """GRPO (arXiv:2402.03300, equation in section 4.1.2): (r - mean) / (std + eps) within the group, std with ddof 1.

    `scale = False` leaves out the division (Dr. GRPO, arXiv:2503.20783). `leave_one_out` compares a completion with the
    mean and deviation of the others alone (NeMo-RL); where the others do not differ, the difference is left unscaled.
    """

    scale: bool = True
    eps: float = 1e-6
    ddof: int = 1
    leave_one_out: bool = False

    needs_group = True

    def __post_init__(self):
        if self.eps < 0:
            raise ValueError(f"eps={self.eps} must be 0 or above")
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof={self.ddof} must be 1 (sample) or 0 (population)")

    def __call__(self, e: Experience) -> Float[np.ndarray, "B T"]:
        return spread(relative(self.compare, e.groups, e.totals), e.mask)

    def compare(self, x: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """What each of a group's numbers is worth beside the group's."""
        n = len(x)
        among = np.broadcast_to(x, (n, n))
        if self.leave_one_out:
            among = among[~np.eye(n, dtype=bool)].reshape(n, n - 1)
        differences = x - among.mean(1)
        if not self.scale:
            return differences
        ddof = min(self.ddof, among.shape[1] - 1)  # of one other alone the deviation is 0
        return differences / np.where(np.ptp(among, axis=1) > 0, among.std(1, ddof=ddof) + self.eps, 1.0)


@dataclass(frozen=True)
class LeaveOneOut(Needs):
    """RLOO (arXiv:2402.14740): r less the mean of the group's others, n / (n - 1) times r - mean."""

    needs_group = True

    def __call__(self, e: Experience) -> Float[np.ndarray, "B T"]:
        return spread(relative(lambda r: len(r) / (len(r) - 1) * less_mean(r), e.groups, e.totals), e.mask)


@dataclass(frozen=True)
class LengthWeighted(Needs):
    """OPO (arXiv:2505.23585): r less the group's mean weighted by the number of tokens."""

    needs_group = True

    def __call__(self, e: Experience) -> Float[np.ndarray, "B T"]:
        baseline = lambda r, n: (n * r).sum() / max(n.sum(), 1)
        return spread(relative(lambda r, n: r - baseline(r, n), e.groups, e.totals, e.lengths), e.mask)


@dataclass(frozen=True)
class MultiReward(Needs):
    """GDPO (arXiv:2601.05242): each reward by itself made group-relative, then added up by weight,
    and the sums whitened over the rows of the batch. Rewards of any size so keep their say.

    `weights` are one per reward of the run. A reward that does not apply to a row adds nothing to it. Token rewards,
    whose size has a meaning, are not scaled within the group: their sum less the group's mean is added.
    """

    weights: tuple[float, ...]
    each: GroupRelative = GroupRelative()

    needs_group = True

    def __post_init__(self):
        if not self.weights:
            raise ValueError(f"weights={self.weights} must be one number per reward")

    def __call__(self, e: Experience) -> Float[np.ndarray, "B T"]:
        if len(self.weights) != e.scores.shape[1]:
            raise ValueError(f"weights={self.weights} must be as many as rewards, {e.scores.shape[1]}")
        columns = [relative(self.each.compare, e.groups, column) for column in e.scores.T]
        none = np.all(np.isnan(e.scores), 1)
        tokens = relative(less_mean, e.groups, np.where(none, np.nan, e.token_sums))
        sums = tokens + sum(w * np.nan_to_num(column) for w, column in zip(self.weights, columns))
        return spread(whiten(sums[:, None], ~none[:, None])[:, 0], e.mask)


BASELINES: dict[str | None, Callable] = {
    None: lambda e: np.float64(e.rewards),
    "group": lambda e: relative(less_mean, e.groups, e.rewards),
    "greedy": lambda e: np.float64(e.rewards) - e.greedy,
}


@dataclass(frozen=True)
class Returns(Needs):
    """G_t, the discounted sum of the rewards from token t on: the completion's, less a baseline, is its last token's.

    - REINFORCE++ (arXiv:2501.03262): no baseline, whitened; minus beta KL as token rewards.
    - REINFORCE++-baseline (the same paper): the "group" mean, whitened.
    - ReMax (arXiv:2310.10505): the reward of the "greedy" completion, not whitened.

    The baseline is discounted with the reward, so that nothing is left of either where they are equal.
    """

    gamma: float = 1.0
    baseline: str | None = None
    whiten: bool = True

    needs_group = property(lambda self: self.baseline == "group")
    needs_greedy = property(lambda self: self.baseline == "greedy")

    def __post_init__(self):
        _check_share("gamma", self.gamma)
        if self.baseline not in BASELINES:
            raise ValueError(f"baseline={self.baseline!r} must be one of {', '.join(map(repr, BASELINES))}")

    def __call__(self, e: Experience) -> Float[np.ndarray, "B T"]:
        outcome = BASELINES[self.baseline](e)
        mask = applies(outcome, e.mask)
        returns = discounted(_rewards(e, outcome, mask), mask, self.gamma)
        return whiten(returns, mask) if self.whiten else returns


@dataclass(frozen=True)
class GAE(Needs):
    """Generalized advantage estimation (arXiv:1506.02438, equation 16): A_t = d_t + gamma lam A_next, with
    d_t = r_t + gamma V_next - V_t; then whitened. It needs a critic.

    `alpha` makes lam depend on a row's n tokens in place of `lam`: 1 - 1 / (alpha n), at least 0 (VAPO,
    arXiv:2504.05118). Decoupled GAE (there too) is two of these: one for the advantages, and one
    with lam = 1 whose `returns` the critic learns.

    After a row's last token V is 0. With `bootstrap` a truncated row goes on instead: the critic's value of the state
    after the last token takes the place of the completion's reward, which an unfinished completion has not earned.
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    bootstrap: bool = False
    alpha: float | None = None

    needs_critic = True

    def __post_init__(self):
        _check_share("gamma", self.gamma)
        _check_share("lam", self.lam)
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha} must be above 0, or None for one lam whatever the length")

    def __call__(self, e: Experience) -> Float[np.ndarray, "B T"]:
        outcome = self._outcome(e)
        advantages = self._estimate(e, outcome)
        return whiten(advantages, applies(outcome, e.mask)) if self.whiten else advantages

    def returns(self, e: Experience) -> Float[np.ndarray, "B T"]:
        """A + V, before whitening: what the critic learns. V itself, no error, where no reward applies."""
        return self._estimate(e, self._outcome(e)) + masked(e.values, e.mask)

    def decay(self, e: Experience) -> float | Float[np.ndarray, "B"]:
        """lam of each row."""
        return self.lam if self.alpha is None else np.maximum(1 - 1 / (self.alpha * np.maximum(e.lengths, 1)), 0.0)

    def _outcome(self, e: Experience) -> Float[np.ndarray, "B"]:
        return np.where(e.truncated, 0.0, e.rewards) if self.bootstrap else np.float64(e.rewards)

    def _estimate(self, e: Experience, outcome: Float[np.ndarray, "B"]) -> Float[np.ndarray, "B T"]:
        mask = applies(outcome, e.mask)
        values = masked(e.values, mask)
        last = np.where(e.truncated, e.bootstrap, 0.0) if self.bootstrap else np.zeros(len(mask))
        errors = _rewards(e, outcome, mask) + self.gamma * following(values, mask, last) - values
        return discounted(errors, mask, self.gamma * self.decay(e))


@dataclass(frozen=True)
class Distillation(Needs):
    """On-policy distillation: log teacher - log sampled of each token, in expectation -KL(actor || teacher).

    The reverse KL of generalized knowledge distillation (arXiv:2306.13649) by policy gradient, a token
    answering for itself alone (Thinking Machines 2025, "On-policy distillation").
    """

    coefficient: float = 1.0

    needs_teacher = True

    def __post_init__(self):
        if self.coefficient <= 0:
            raise ValueError(f"coefficient={self.coefficient} must be above 0")

    def __call__(self, e: Experience) -> Float[np.ndarray, "B T"]:
        return self.coefficient * (masked(e.teacher, e.mask) - masked(e.sampled, e.mask))


@dataclass(frozen=True)
class Shuffled(Needs):
    """A control: another estimator's advantages, dealt at random to the rows: nothing is learned from reward.

    A row gets the mean advantage of the tokens of the row dealt to it, on all of its own tokens, as many as they are.
    """

    of: Callable = GroupRelative()
    seed: int = 0

    needs_critic = property(lambda self: getattr(self.of, "needs_critic", False))
    needs_group = property(lambda self: getattr(self.of, "needs_group", False))
    needs_greedy = property(lambda self: getattr(self.of, "needs_greedy", False))
    needs_teacher = property(lambda self: getattr(self.of, "needs_teacher", False))

    def __call__(self, e: Experience) -> Float[np.ndarray, "B T"]:
        rows = np.flatnonzero(e.mask.any(1))  # those that fill the batch neither give nor take
        means = self.of(e)[rows].sum(1) / e.lengths[rows]
        told = [crc32(x[rows].tobytes()) for x in (np.float64(e.rewards), np.int64(e.groups))]  # each step another deal
        out = np.zeros(e.mask.shape)
        out[rows] = spread(np.random.default_rng([self.seed, *told]).permutation(means), e.mask[rows])
        return out

    def returns(self, e: Experience) -> Float[np.ndarray, "B T"]:
        """Those of the true estimator, as its critic learns them."""
        return self.of.returns(e)


def _rewards(e: Experience, outcome: Float[np.ndarray, "B"], mask: Bool[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    """r_t: the token rewards, and the outcome on the last token."""
    return placed(outcome, mask) + (0.0 if e.token_rewards is None else masked(e.token_rewards, mask))


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must be between 0 and 1")
