"""Law: which of a model's scores are rewards."""

import numpy as np
import pytest

from rljax.assess.models import ModelReward, StepReward
from rljax.types import LENGTH, STOP, Rollout, Tokens

END = 7
IDS = np.array([[1, END, 3, END, 4, END, 0, 0], [END, 2, 3, 4, 5, 6, END, 9], [1, 2, 3, 0, 0, 0, 0, 0]])
PROMPT, SIZE = np.array([2, 1, 1]), np.array([6, 8, 3])


def rollout() -> Rollout:
    t = np.arange(8)[None]
    inside, zeros = t < SIZE[:, None], np.zeros(3, np.int32)
    return Rollout(
        Tokens(IDS, np.where(inside, t, 0), inside.astype(np.int32)), inside & (t >= PROMPT[:, None]),
        np.zeros((3, 8)), np.zeros((3, 8)), SIZE, PROMPT, np.array([STOP, LENGTH, STOP]), zeros, zeros,
    )  # fmt: skip


def logit(p):
    return np.log(p) - np.log1p(-p)


def test_a_reward_model_is_read_at_the_last_token():
    scores = np.arange(24.0).reshape(3, 8)
    reward, each = ModelReward(weight=2.0)(scores, rollout())
    assert reward.tolist() == [10.0, 30.0, 36.0] and each is None


def test_a_process_reward_model_is_read_where_steps_end():
    """Steps end at the separator within the completion: a prompt's does not count, nor does what no separator ends."""
    scores = np.full((3, 8), np.nan)
    for row, t, p in ((0, 1, 0.01), (0, 3, 0.9), (0, 5, 0.6), (1, 0, 0.01), (1, 6, 0.3)):
        scores[row, t] = logit(p)
    worst, none = StepReward(END, "min")(scores, rollout())
    last, _ = StepReward(END, "last")(scores, rollout())
    total, each = StepReward(END, "sum", weight=0.5)(scores, rollout())
    np.testing.assert_allclose(worst, [0.6, 0.3, 0.0])
    np.testing.assert_allclose(last, [0.6, 0.3, 0.0])
    assert none is None
    expected = np.zeros((3, 8))
    expected[0, 3], expected[0, 5], expected[1, 6] = 0.45, 0.3, 0.15
    np.testing.assert_allclose(each, expected)
    np.testing.assert_allclose(total, expected.sum(1))
    with pytest.raises(ValueError, match="reduce='mean' must be 'min', 'last' or 'sum'"):
        StepReward(END, "mean")


def test_the_worst_step_is_not_the_last():
    scores = np.zeros((3, 8))
    scores[0, 3], scores[0, 5] = logit(0.2), logit(0.9)
    assert StepReward(END, "min")(scores, rollout())[0][0] == pytest.approx(0.2)
    assert StepReward(END, "last")(scores, rollout())[0][0] == pytest.approx(0.9)
