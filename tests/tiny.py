"""What the laws share: two tiny models, a hand-made batch, an oracle in plain numpy, and compiled steps by layout.

Compiles dominate, so everything compiled is cached and tests vary the data they give it.
"""

import re
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import NamedSharding

from rljax.assess.advantages import GroupRelative
from rljax.mesh import BATCH, Layout, Strategy
from rljax.model.decoder import Decoder
from rljax.model.latent import Latent
from rljax.model.moe import Experts
from rljax.model.rope import Linear, Llama3, Yarn
from rljax.model.table import map_table, shardings
from rljax.train.losses import Clip
from rljax.train.metrics import combine
from rljax.train.objectives import Objective, Weights
from rljax.train.optimizer import AdamW
from rljax.train.reductions import sequence_mean_token_mean
from rljax.train.step import gradients, start, update
from rljax.types import Assessed, Rollout, Tokens

SIZES = dict(vocab=48, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64)
EXPERTS = Experts(count=8, top_k=2, width=16, balance=0.05, z=0.01)
DEEPSEEK = replace(EXPERTS, shared=24, score="sigmoid", scale=2.5, groups=4, top_groups=2, bias_rate=0.01)
MODELS = {
    "plain": Decoder(**SIZES),
    "rich": Decoder(**SIZES, qk_norm="head", qkv_bias=True, tied=True),
    "deep": Decoder(**SIZES | dict(layers=4), qk_norm="head", tied=True),
    "experts": Decoder(**SIZES, experts=EXPERTS),
    "exchange": Decoder(**SIZES, experts=replace(EXPERTS, dispatch="exchange")),
    "replay": Decoder(**SIZES, experts=replace(EXPERTS, replay=True)),
    "deepseek": Decoder(**SIZES | dict(layers=3), experts=DEEPSEEK, dense=1, tied=True),
    "gemma": Decoder(
        **SIZES, qk_norm="head", norms="both", norm_offset=True, tied=True, activation="gelu", embed_scale=sqrt(32),
        query_scale=0.4, score_cap=2.0, logit_cap=5.0, window=4, everywhere=(1,), window_theta=100.0,
        rope_scaling=Linear(8.0),
    ),
    "olmo": Decoder(**SIZES, norms="post", qk_norm="all", window=5, rope_scaling=Llama3(8.0, original=32)),
    "latent": Decoder(
        **SIZES | dict(layers=3, kv_heads=4, head_dim=12),
        latent=Latent(keys=16, plain=8, turned=4, value=6, queries=24),
        experts=DEEPSEEK, dense=1, rope_scaling=Yarn(4.0, 64, amplitude=1.1), query_scale=0.1,
    ),
}  # fmt: skip
DENSE = ("plain", "rich")
ONE = Layout()
FSDP, FSDP_TENSOR = Layout(fsdp=8), Layout(fsdp=4, tensor=2)
ALL, CONTEXT = Layout(data=2, fsdp=2, tensor=2), Layout(fsdp=2, seq=2, tensor=2)
LAYOUTS = {  # with the strategy
    "fsdp": (FSDP, {}),
    "fsdp tensor": (FSDP_TENSOR, {}),
    "all": (ALL, {}),
    "zero 0": (ALL, dict(zero=0)),
    "zero 1": (ALL, dict(zero=1, microbatches=2)),
    "zero 2": (ALL, dict(zero=2, microbatches=2)),
    "tensor beyond key/value heads": (Layout(fsdp=2, tensor=4), {}),
    "sequence parallel": (Layout(fsdp=2, tensor=4), dict(sequence_parallel=True)),
    "gathered keys": (CONTEXT, {}),
    "ulysses": (Layout(data=2, fsdp=2, seq=2), dict(context="ulysses")),
    "ring": (Layout(fsdp=2, seq=4), dict(context="ring")),
    "ring, sequence parallel": (CONTEXT, dict(context="ring", sequence_parallel=True, zero=2)),
}
PRODUCTS = {  # of three to five axes, on 8, 16 and 32 devices
    "3D": ("rich", Layout(fsdp=2, pipe=2, tensor=2), dict(microbatches=2, schedule="1f1b")),
    "4D of 16": ("plain", Layout(data=2, fsdp=2, seq=2, tensor=2), dict(context="ring", sequence_parallel=True)),
    "4D of 16, pipe": ("rich", Layout(fsdp=2, pipe=2, seq=2, tensor=2), dict(microbatches=2, zero=1)),
    "5D of 32": (
        "experts",
        Layout(fsdp=2, pipe=2, seq=2, tensor=2, expert=2),
        dict(microbatches=2, schedule="1f1b", sequence_parallel=True),
    ),
    "5D of 32, no pipe": ("exchange", Layout(data=2, fsdp=2, seq=2, tensor=2, expert=2), dict(context="ring", zero=2)),
}
EXPERT_LAYOUTS = {
    "experts": ("experts", Layout(expert=8), {}),
    "experts, fsdp tensor": ("experts", Layout(fsdp=2, tensor=2, expert=2), dict(microbatches=2)),
    "experts, ring": ("experts", Layout(seq=2, tensor=2, expert=2), dict(context="ring", sequence_parallel=True)),
    "exchange, fsdp seq": ("exchange", Layout(fsdp=2, seq=2, expert=2), dict(zero=2, microbatches=2)),
    "exchange, tensor": ("exchange", Layout(tensor=2, expert=4), dict(sequence_parallel=True, zero=1)),
    "deepseek, data expert": ("deepseek", Layout(data=2, fsdp=2, expert=2), dict(remat="names")),
    "deepseek, tensor": ("deepseek", Layout(tensor=4, expert=2), dict(sequence_parallel=True)),
}


def ordinary(cases, *slow: str) -> list:
    """Parameters of a test, of which some are slow: others cover what they do."""
    assert {*slow} <= {*cases}
    return [pytest.param(case, marks=[pytest.mark.slow] * (case in slow)) for case in cases]


FAMILY_LAYOUTS = {
    "gemma, tensor": ("gemma", FSDP_TENSOR, dict(sequence_parallel=True)),
    "gemma, ring": ("gemma", CONTEXT, dict(context="ring")),
    "gemma, ulysses": ("gemma", Layout(data=2, fsdp=2, seq=2), dict(context="ulysses")),
    "gemma, pipe": ("gemma", Layout(fsdp=2, pipe=2), dict(microbatches=2, schedule="1f1b")),
    "olmo, tensor": ("olmo", Layout(fsdp=2, tensor=4), dict(sequence_parallel=True)),
    "olmo, gathered keys": ("olmo", CONTEXT, {}),
    "latent, expert tensor": ("latent", Layout(fsdp=2, tensor=2, expert=2), dict(sequence_parallel=True)),
    "latent, ring": ("latent", Layout(seq=2, tensor=2, expert=2), dict(context="ring")),
    "latent, pipe": ("latent", Layout(fsdp=2, pipe=2, tensor=2), dict(microbatches=2)),
}


# every term and both clips have a gradient (T-12)
OBJECTIVE = Objective(Clip(0.2, 0.28, dual=3.0), GroupRelative(), sequence_mean_token_mean, kl=0.1, entropy=0.01)
ROWS, TIME = 32, 16
FILLER = 11  # a row that only fills the batch


@cache
def weights(name: str):
    """Parameters as numpy arrays; no scale is 1 and no bias 0, and the distribution is far from flat."""

    def one(t):
        x = np.random.default_rng(crc32(t.name.encode())).normal(size=t.shape)
        return (t.std + 0.1 * x if t.std in (0, 1) else 2 * t.std * x).astype(np.float32)

    return map_table(one, MODELS[name].build().table)


def oracle(m: Decoder, p, ids, positions, segments, xp=np):
    """Logits `[B T V]`: the decoder written once more, without sharding, scans, chunks or caches. numpy in float64."""
    if xp is np:
        p = jax.tree.map(np.float64, p)
    rms = lambda x, w: x / xp.sqrt((x * x).mean(-1, keepdims=True) + m.norm_eps) * (w + m.norm_offset)
    cap = lambda z, most: z if most is None else most * xp.tanh(z / most)
    turned = m.latent.turned if m.latent else m.head_dim

    def turn(x, theta, scaling):
        frequency = theta ** (-np.arange(turned // 2) / (turned // 2))
        angle = positions[..., None, None] * (frequency if scaling is None else scaling(frequency, theta))
        a, b = x[..., : turned // 2], x[..., turned // 2 :]
        cos, sin = (f(angle) * (1 if scaling is None else scaling.amplitude) for f in (xp.cos, xp.sin))
        return xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def project(h, w, turn):
        """Queries, keys and values, the first two turned."""
        heads = lambda y: y.reshape(*y.shape[:2], m.heads, -1)
        if m.latent is None:
            y = [h @ a + (0 if c is None else c) for a, c in ((w.wq, w.bq), (w.wk, w.bk), (w.wv, w.bv))]
            norm = lambda x, w, kind: rms(x, w) if m.qk_norm == kind else x
            y = norm(y[0], w.q_norm, "all"), norm(y[1], w.k_norm, "all"), y[2]
            q, k, v = (x.reshape(*x.shape[:2], -1, m.head_dim) for x in y)
            q, k = norm(q, w.q_norm, "head"), norm(k, w.k_norm, "head")
            return turn(q), *(xp.repeat(y, m.heads // m.kv_heads, 2) for y in (turn(k), v))
        plain = m.latent.plain
        q = heads(rms(h @ w.q_down, w.q_norm) @ w.q_up)
        latent, shared = h @ w.kv_down[:, : m.latent.keys], turn((h @ w.kv_down[:, m.latent.keys :])[:, :, None])
        kv = heads(rms(latent, w.k_norm) @ w.kv_up)
        k = xp.concatenate([kv[..., :plain], xp.repeat(shared, m.heads, 2)], -1)
        return xp.concatenate([q[..., :plain], turn(q[..., plain:])], -1), k, kv[..., plain:]

    def feed(h, gate, up, down):
        gate = h @ gate
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        act = gate / (1 + xp.exp(-gate)) if m.activation == "silu" else gate / 2 * (1 + xp.tanh(inner))
        return (act * (h @ up)) @ down

    b, t = ids.shape
    sees = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0) & xp.tri(t, dtype=bool)
    distance = np.arange(t)[:, None] - np.arange(t)[None]
    x = p.embed[ids] * m.embed_scale
    for i in range(m.layers):
        stack, at = (p.first, i) if i < m.dense else (p.layers, i - m.dense)
        w = jax.tree.map(lambda w, at=at: w[at], stack)
        near = m.window is not None and i not in m.everywhere
        apart = near and m.window_theta is not None
        turned_by = (m.window_theta, None) if apart else (m.rope_theta, m.rope_scaling)
        q, k, v = project(x if m.norms == "post" else rms(x, w.norm1), w, lambda x, by=turned_by: turn(x, *by))
        scale = 1 / np.sqrt(m.head_dim) if m.query_scale is None else m.query_scale
        scores = cap(xp.einsum("bsnh,btnh->bnst", q, k) * scale, m.score_cap)
        seen = (sees & (distance < m.window) if near else sees)[:, None]
        scores = xp.where(seen, scores, -1e30)
        e = xp.where(seen, xp.exp(scores - scores.max(-1, keepdims=True)), 0)
        a = xp.einsum("bnst,btnu->bsnu", e / (e.sum(-1, keepdims=True) + 1e-30), v).reshape(b, t, -1) @ w.wo
        x = x + (a if m.norms == "pre" else rms(a, w.post1))
        h = x if m.norms == "post" else rms(x, w.norm2)
        y = feed(h, w.gate, w.up, w.down) if w.router is None else mixture(m.experts, h, w, feed, xp)
        x = x + (y if m.norms == "pre" else rms(y, w.post2))
    return cap(rms(x, p.norm) @ (p.embed.T if m.tied else p.unembed), m.logit_cap)


def mixture(e: Experts, h, w, feed, xp):
    """Every expert on every token, weighted by gates that are 0 for all but those chosen."""
    z = h @ w.router
    score = xp.exp(z - z.max(-1, keepdims=True)) if e.score == "softmax" else 1 / (1 + xp.exp(-z))
    score = score / score.sum(-1, keepdims=True) if e.score == "softmax" else score
    choose = score if w.router_bias is None else score + w.router_bias
    if e.groups > 1:
        grouped = choose.reshape(*choose.shape[:-1], e.groups, -1)
        best = xp.sort(grouped, -1)[..., -2:].sum(-1)
        worst = xp.sort(best, -1)[..., [-e.top_groups]]
        choose = xp.where((best >= worst)[..., None], grouped, -xp.inf).reshape(choose.shape)
    gates = xp.where(choose >= xp.sort(choose, -1)[..., [-e.top_k]], score, 0)
    gates = e.scale * (gates / gates.sum(-1, keepdims=True) if e.normalize else gates)
    y = sum(gates[..., [i]] * feed(h, w.gate[i], w.up[i], w.down[i]) for i in range(e.count))
    return y if w.shared_gate is None else y + feed(h, w.shared_gate, w.shared_up, w.shared_down)


def oracle_logprobs(logits, ids, mask, xp=np):
    """Log-probability of each masked token given those before it, and the entropy of its distribution, else 0."""
    z = logits - logits.max(-1, keepdims=True)
    log = z - xp.log(xp.exp(z).sum(-1, keepdims=True))
    take = xp.take_along_axis(log[:, :-1], ids[:, 1:, None], -1)[..., 0]
    entropy = -(xp.exp(log) * xp.where(log > -1e9, log, 0)).sum(-1)[:, :-1]
    late = lambda x: xp.where(mask, xp.pad(x, ((0, 0), (1, 0))), 0)
    return late(take), late(entropy)


@cache
def tokens() -> tuple[Tokens, np.ndarray, np.ndarray, np.ndarray]:
    """Mixed rows: prompts of 2 to 7 tokens, completions of 1 to 9, some ended by id 0, which is also what pads. Some
    hold a second sequence, whose prompt is one token."""
    rng, row, t = np.random.default_rng(0), np.arange(ROWS, dtype=np.int32), np.arange(TIME, dtype=np.int32)[None]
    prompt = 2 + row * 5 % 6
    length = prompt + np.where(row == FILLER, 0, 1 + row * 7 % 9)
    inside = t < length[:, None]
    ids = np.where(inside, rng.integers(1, 48, (ROWS, TIME)), 0).astype(np.int32)
    ids[row[::2], length[::2] - 1] = 0
    cut = np.where((row % 3 == 1) & (length - prompt > 3), length - 3, TIME)[:, None]  # where a second sequence begins
    positions = np.where(t < cut, t, t - cut)
    tokens = Tokens(ids, np.where(inside, positions, 0), np.where(inside, 1 + (t >= cut), 0).astype(np.int32))
    return tokens, inside & (t >= prompt[:, None]) & (t != cut), prompt, length


@cache
def batch(name: str) -> Assessed:
    """An assessed batch; log-probabilities of sampler and reference lie around the model's own, so ratios spread."""
    tok, mask, prompt, length = tokens()
    rng, row = np.random.default_rng(1), np.arange(ROWS, dtype=np.int32)
    own, _ = oracle_logprobs(oracle(MODELS[name], weights(name), tok.ids, tok.positions, tok.segments), tok.ids, mask)
    near = lambda width: np.where(mask, own + width * rng.normal(size=own.shape), 0).astype(np.float32)
    advantages = (rng.normal(size=(ROWS, 1)) * mask).astype(np.float32)
    uid = np.where(row == FILLER, -1, row % 8).astype(np.int32)
    rollout = Rollout(
        tok, mask, near(0.25), np.zeros_like(tok.ids), length, prompt, (row % 2).astype(np.int32), uid, row // 8
    )
    return Assessed(rollout, rng.normal(size=(ROWS, 1)).astype(np.float32), advantages, near(0.4))


def place(tree, mesh):
    """Rows over the batch axes."""
    return jax.device_put(tree, jax.tree.map(lambda x: NamedSharding(mesh, P(BATCH, *(None,) * (x.ndim - 1))), tree))


class Result(NamedTuple):
    """One update, fetched to the host; and the state and gradient where they lie."""

    loss: float
    metrics: dict
    grads: object
    params: object
    state: object
    sharded: object


class Step(NamedTuple):
    """A compiled update on a mesh, whose optimizer remembers the gradient it was given."""

    mesh: object
    compiled: object
    state: object
    text: str

    def __call__(self, batch: Assessed, state=None) -> Result:
        with jax.set_mesh(self.mesh):
            state, metrics = self.compiled(self.state if state is None else state, place(batch, self.mesh))
        grads, host = state.optimizer[0], jax.device_get((metrics, state.optimizer[0], state.params))
        return Result(float(host[0]["loss"]), combine([host[0]]), host[1], host[2], state, grads)


remember = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), lambda g, s, p=None: (g, g))
ADAMW = AdamW(lr=1e-2, weight_decay=0.1, clip=0.5, eps=1e-5)  # eps above rounding, which Adam would blow up to lr


def same(logits, target):
    return logits


@cache
def step(name, layout=ONE, objective=OBJECTIVE, on_policy=False, **strategy) -> Step:
    """The update of model `name` on a layout, from the same weights whatever the layout."""
    lm, mesh, strategy = MODELS[name].build(), layout.mesh(), Strategy(**strategy)
    optimizer = optax.chain(remember, ADAMW.build(10, map_table(lambda t: t.matrix, lm.table)))
    with jax.set_mesh(mesh):
        params = jax.device_put(weights(name), shardings(lm.table, mesh, strategy.zero))
        state = start(lm, params, optimizer, strategy.zero)
        run = jax.jit(
            lambda state, batch: update(
                state, batch, lm=lm, objective=objective, optimizer=optimizer, adjust=same, on_policy=on_policy,
                strategy=strategy,
            )
        )  # fmt: skip
        compiled = run.lower(state, place(batch(name), mesh)).compile()
    return Step(mesh, compiled, state, compiled.as_text())


@cache
def gradient(name, layout=ONE, rows=ROWS, **strategy):
    """(batch, weights) -> loss and gradient on the host, for any token weights: reductions share one compile."""
    lm, mesh, strategy = MODELS[name].build(), layout.mesh(), Strategy(**strategy)
    with jax.set_mesh(mesh):
        params = jax.device_put(weights(name), shardings(lm.table, mesh, strategy.zero))
        run = jax.jit(
            lambda p, batch, weights: gradients(
                p, batch, Weights(weights, OBJECTIVE.kl * weights, ()), lm=lm, objective=OBJECTIVE, adjust=same,
                on_policy=False, strategy=strategy,
            )
        )  # fmt: skip
        part = jax.tree.map(lambda x: x[:rows], batch(name))
        compiled = run.lower(params, *place((part, np.zeros((rows, TIME), np.float32)), mesh)).compile()

    def call(batch: Assessed, weights):
        with jax.set_mesh(mesh):
            loss, *_, grads = compiled(params, *place((batch, np.asarray(weights, np.float32)), mesh))
        return float(loss), jax.device_get(grads)

    return call


def distance(a, b) -> float:
    """The largest difference of any leaf, relative to the leaf's largest entry."""
    gap = lambda x, y: float(np.abs(np.float64(x) - np.float64(y)).max() / max(np.abs(np.float64(y)).max(), 1e-30))
    return max(jax.tree.leaves(jax.tree.map(gap, a, b)))


def identical(a, b) -> bool:
    """Bitwise."""
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def shapes(text: str, kind: str = "f32") -> set[tuple[int, ...]]:
    """The shapes of every array of one type in a compiled program."""
    return {tuple(map(int, s.split(","))) for s in re.findall(rf"\b{kind}\[([\d,]+)\]", text)}


def equations(jaxpr):
    """Every equation of a jaxpr, those inside loops, branches and calls included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
