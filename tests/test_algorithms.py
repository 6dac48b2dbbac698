"""The objective refuses what cannot be right, and the optimizer equals its paper's equations in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from rljax.model.table import map_table
from rljax.train.losses import Clip
from rljax.train.objectives import Objective
from rljax.train.optimizer import AdamW


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


def test_negative_kl_coefficients_are_refused():
    with pytest.raises(ValueError, match="kl=-0.1"):
        Objective(Clip(), kl=-0.1)


def rate(i, lr=0.5, warmup=4, updates=20, decay="constant", floor=0.1):
    """The learning rate of update i in closed form."""
    if i < warmup:
        return lr * (i + 1) / warmup
    done = min(1.0, (i - warmup) / (updates - warmup))
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}[decay]
    return lr * (share if decay == "constant" else floor + (1 - floor) * share)


@pytest.mark.pitfall("T-91")
@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_closed_form(decay, warmup):
    schedule = AdamW(lr=0.5, warmup=warmup, decay=decay, floor=0.1).schedule(20)
    for i in range(25):
        assert float(schedule(i)) == pytest.approx(rate(i, warmup=warmup, decay=decay), rel=1e-5), i


@pytest.mark.pitfall("T-91")
def test_resumed_updates_have_the_rates_of_uninterrupted_ones():
    """Under a constant gradient Adam moves by the learning rate, so each update shows the rate it had."""
    settings = AdamW(lr=0.5, warmup=4, decay="cosine", floor=0.1, clip=1e9, eps=1e-12)
    params = {"w": jnp.zeros((2, 2))}
    run = settings.build(20, {"w": True})
    state, moved = run.init(params), []
    for i in range(20):
        if i == 7:  # a checkpoint: to the host and back, into a new optimizer
            run, state = settings.build(20, {"w": True}), jax.tree.map(jnp.asarray, jax.device_get(state))
        delta, state = run.update({"w": jnp.full((2, 2), 3.0)}, state, params)
        moved.append(-float(delta["w"][0, 0]))
    close(moved, [rate(i, decay="cosine") for i in range(20)], 1e-4)


def test_matrices_alone_decay():
    """With no gradient what moves a parameter is decay: by lr * weight_decay of itself."""
    table = tiny.MODELS["rich"].build().table
    params = tiny.weights("rich")
    run = AdamW(lr=0.1, weight_decay=0.5).build(10, map_table(lambda t: t.matrix, table))
    deltas, _ = jax.jit(lambda g, p: run.update(g, run.init(p), p))(jax.tree.map(np.zeros_like, params), params)
    decays = {}
    for t, p, d in zip(
        jax.tree.leaves(table, is_leaf=lambda t: hasattr(t, "dims")), *map(jax.tree.leaves, (params, deltas))
    ):
        decays[t.name.split(".")[-2] + "." + t.name.split(".")[-1]] = bool(np.any(d != 0))
        close(d, -0.05 * p if np.any(d != 0) else np.zeros(p.shape), 1e-6)
    kept = [f"{n}.weight" for n in ("input_layernorm", "q_norm", "k_norm", "post_attention_layernorm", "norm")]
    assert decays == {
        "embed_tokens.weight": True, **{k: False for k in kept}, **{f"{n}_proj.bias": False for n in "qkv"},
        **{f"{n}_proj.weight": True for n in ("q", "k", "v", "o", "gate", "up", "down")},
    }  # fmt: skip


def test_gradients_are_clipped_by_their_global_norm():
    """First moments after one update hold (1 - b1) times the clipped gradient."""
    grads = {"a": jnp.array([[3.0, 0.0]]), "b": jnp.array([[0.0, 4.0]])}
    for clip, scale in ((1.0, 0.2), (5.0, 1.0), (50.0, 1.0)):
        run = AdamW(lr=0.1, clip=clip, b1=0.9).build(10, {"a": True, "b": True})
        _, state = run.update(grads, run.init(grads), grads)
        (adam,) = [s for s in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(s)]
        close(adam.mu["a"], 0.1 * scale * np.array([[3.0, 0]])), close(adam.mu["b"], 0.1 * scale * np.array([[0, 4.0]]))


def _is_adam(s):
    return isinstance(s, optax.ScaleByAdamState)


@pytest.mark.parametrize("bad", [dict(lr=0.0), dict(clip=0.0), dict(decay="step")], ids=str)
def test_impossible_optimizers_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdamW(**bad)
