"""Sequences by themselves, and rows that they are packed into, for the laws of what reads packed rows."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from rljax.train.view import View

ROWS, TIME = 8, 24
FIELDS = tuple(name for name in View._fields if name not in ("mask", "segments"))


def sequences(rng, count: int = 8, longest: int = 8) -> list[dict[str, np.ndarray]]:
    """Fields of sequences, each with a prompt that is masked off and now and then no token that is not."""
    return [sequence(rng, int(rng.integers(2, longest + 1)), empty=i in (3, 6)) for i in range(count)]


def sequence(rng, n: int, empty: bool = False) -> dict[str, np.ndarray]:
    """Log-probabilities around -1, one advantage for all tokens; an observation now and then amid the completion."""
    mask = (np.arange(n) > 0) & (rng.random(n) < 0.8) & (not empty)
    mask[-1] = not empty
    logp = -np.exp(rng.normal(size=n) * 0.5)
    near = lambda width: np.minimum(logp + width * rng.normal(size=n), -1e-3)
    fields = dict(
        logp=logp, entropy=rng.random(n), values=rng.normal(size=n), scores=rng.normal(size=n), old=near(0.4),
        sampled=near(0.4), advantages=np.full(n, rng.choice([-1, 1]) * (0.5 + rng.random())), ref_logp=near(0.4),
        returns=rng.normal(size=n), old_values=rng.normal(size=n), target=np.full(n, float(rng.integers(2))),
    )  # fmt: skip
    return {"mask": mask} | {name: np.float32(x) for name, x in fields.items()}


def each_apart(sequences, group: int = 1) -> list[list[int]]:
    """One sequence a row, or one group of neighbours."""
    return [list(range(i, i + group)) for i in range(0, len(sequences), group)]


def packed(sequences, rng, group: int = 1) -> list[list[int]]:
    """Which sequences a row holds, groups in any order and in few rows, which lie anywhere."""
    rows = [[] for _ in range(ROWS)]
    groups = each_apart(sequences, group)
    for i in rng.permutation(len(groups)):
        fits = lambda row: sum(len(sequences[j]["mask"]) for j in (*row, *groups[i])) <= TIME
        next(row for row in rows if fits(row)).extend(groups[i])
    return [rows[i] for i in rng.permutation(ROWS)]


def view(sequences, rows, time: int = TIME, dirt: float = 0.0) -> View:
    """Rows side by side; what the mask excludes is `dirt`."""
    count = max(len(rows), ROWS)
    out = {name: np.full((count, time), dirt, np.float32) for name in FIELDS}
    mask, segments = np.zeros((count, time), bool), np.zeros((count, time), np.int32)
    for b, t, number, i in places(sequences, rows):
        s = sequences[i]
        mask[b, t], segments[b, t] = s["mask"], number
        for name in FIELDS:
            out[name][b, t] = np.where(s["mask"], s[name], dirt)
    return View(mask=mask, segments=segments, **out)


def places(sequences, rows):
    """(row, slice of it, segment number, sequence) of every sequence."""
    for b, row in enumerate(rows):
        end = 0
        for number, i in enumerate(row, 1):
            start, end = end, end + len(sequences[i]["mask"])
            yield b, slice(start, end), number, i


def taken(x, sequences, rows) -> list[np.ndarray]:
    """What an array `[B T]` holds of each sequence, in the order of the sequences."""
    found = {i: np.asarray(x)[b, t] for b, t, _, i in places(sequences, rows)}
    return [found[i] for i in range(len(sequences))]


@cache
def compiled(loss, of: str = "logp"):
    """(view, weights) -> (loss, gradient with respect to a field `[B T]`, its metrics as (sum, weight))."""

    def total(x, view, weights):
        each, seen = loss(view._replace(**{of: x}))
        return jnp.sum(jnp.where(view.mask, weights * each, 0.0)), {k: averaged(v, view) for k, v in seen.items()}

    def averaged(v, view):
        values, weight = v if isinstance(v, tuple) else (v, jnp.ones_like(view.mask, jnp.float32))
        add = lambda x: jnp.sum(jnp.where(view.mask, x.astype(jnp.float32), 0.0))
        return add(values * weight), add(weight)

    run = jax.jit(jax.value_and_grad(total, has_aux=True))

    def call(view: View, weights):
        (value, seen), gradient = run(getattr(view, of), view, weights)
        return float(value), np.asarray(gradient), jax.tree.map(float, seen)

    return call
