"""Expert layers: every dispatch on every layout is the same function, dense and by hand, and counts are whole."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from tiny import ONE, distance

from rljax.mesh import BATCH, Layout, gather, reduced
from rljax.model import moe
from rljax.model.moe import Experts
from rljax.model.ragged import pack
from rljax.plan.hlo import collectives

B, T, D, F, E, K = 8, 4, 8, 4, 8, 2
MIXTRAL = Experts(E, 3, F)
QWEN = Experts(E, 3, F, normalize=False)
DEEPSEEK = Experts(
    E, K, F, score="sigmoid", scale=2.5, groups=4, top_groups=2, balance=0.1, z=0.01, bias_rate=0.05
)  # fmt: skip
SPLIT, CONTEXT = Layout(fsdp=2, tensor=2, expert=2), Layout(seq=2, expert=4)
COLUMN, ROW = P("expert", "fsdp", "tensor"), P("expert", "tensor", "fsdp")
CHOOSE = np.full((B, T, K), -1, np.int32)  # nothing replayed: the router chooses


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


X, LOGITS, BIAS = draw(B, T, D), draw(B, T, E), 0.3 * draw(E)
WEIGHTS = draw(E, D, F) / np.sqrt(D), draw(E, D, F, seed=1) / np.sqrt(D), draw(E, F, D) / np.sqrt(F)
SEGMENTS = np.array([[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 1, 0], [0, 0, 0, 0]] * 2, np.int32)  # packed, padded, empty


def chosen(m: Experts, scores, bias) -> list[int]:
    """The experts of one token, in numpy."""
    scores, size = np.float64(scores) + bias, m.count // m.groups
    best = sorted(range(m.groups), key=lambda g: -np.sort(scores[g * size : (g + 1) * size])[-2:].sum())
    allowed = [e for e in range(m.count) if m.groups == 1 or e // size in best[: m.top_groups]]
    return sorted(allowed, key=lambda e: -scores[e])[: m.top_k]


def scored(m: Experts, logits, xp=np):
    e = xp.exp(logits)
    return e / e.sum(-1, keepdims=True) if m.score == "softmax" else 1 / (1 + xp.exp(-logits))


def choices(m: Experts, logits, bias):
    scores = scored(m, np.float64(logits))
    return np.array([[chosen(m, token, bias) for token in row] for row in scores], np.int32)


def measured(m: Experts, ids, scores, logits, segments, xp=np):
    """Load, balance and z of whole sequences, one at a time as the paper has them."""
    load, balance, z = np.zeros(m.count), 0, 0
    p = scores / scores.sum(-1, keepdims=True)
    for b, row in enumerate(segments):
        for s in {*row[row > 0].tolist()}:
            at = np.flatnonzero(row == s)
            counts = np.bincount(ids[b, at].ravel(), minlength=m.count)
            f = counts * m.count / (m.top_k * len(at))
            balance += len(at) * (f * p[b, at].mean(0)).sum()
            z += (xp.log(xp.exp(logits[b, at]).sum(-1)) ** 2).sum()
            load += counts
    return load, balance, z


def dense(m: Experts, ids, kept, x, logits, w):
    """Every expert on every token, weighed by a one-hot of its choices; and the loss whose gradients are compared."""
    gate, up, down = w
    scores = scored(m, logits, jnp)
    gates = jnp.take_along_axis(scores, np.minimum(ids, m.count - 1), -1)
    gates = gates / gates.sum(-1, keepdims=True) if m.normalize else gates
    weigh = ((ids[..., None] == np.arange(m.count)) * (m.scale * gates * kept)[..., None]).sum(-2)
    h = jnp.einsum("btd,edf->btef", x, gate)
    h = h / (1 + jnp.exp(-h)) * jnp.einsum("btd,edf->btef", x, up)
    y = jnp.einsum("btef,efd,bte->btd", h, down, weigh)
    _, balance, z = measured(m, ids, scores, logits, SEGMENTS[:, : ids.shape[1]], jnp)
    return jnp.sum(y * jnp.sin(x)) + m.balance * balance + m.z * z, y


def expected(m: Experts, ids, kept=True, x=X, logits=LOGITS):
    with jax.numpy_rank_promotion("allow"):
        loss = partial(dense, m, ids, np.broadcast_to(kept, ids.shape))
        (_, y), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, logits, WEIGHTS)
    return jax.device_get((y, grads))


@cache
def compiled(m: Experts, layout: Layout):
    """(x, logits, segments, ids) -> y and gradients, dropped, Load: one layer scanned under checkpoint.

    Weights travel as the decoder's do, and over exchange tokens as sequence parallelism has them: gathered over tensor,
    then split again. An id of -1 leaves the choice to the router.
    """
    parallel = m.dispatch == "exchange"
    out = P(BATCH, ("seq", "tensor") if parallel else "seq", None)

    def loss(x, logits, w, segments, ids):
        def layer(total, w):
            routing = moe.route(m, logits, BIAS)
            routing = moe.route(m, logits, replay=jnp.where(ids < 0, routing.ids, ids))
            w = [gather(reduced(a), "fsdp") for a in w]
            whole = gather(jax.reshard(x, out), "tensor") if parallel else x
            y, dropped = moe.experts(m, whole, routing, *w, out)
            load = moe.measure(m, routing, logits, segments)
            return total + moe.penalty(m, load), (jax.reshard(y, P(BATCH, "seq", None)), dropped, load)

        stacked = jax.tree.map(lambda a: jnp.expand_dims(a, 0), w)
        total, seen = lax.scan(jax.checkpoint(layer), 0.0, stacked)
        y, dropped, load = jax.tree.map(lambda a: jnp.squeeze(a, 0), seen)
        return jnp.sum(y * jnp.sin(x)) + total, (y, dropped, load)

    mesh = layout.mesh()
    place = lambda x: jax.device_put(x, P(BATCH, "seq", *(None,) * (x.ndim - 2)))
    with jax.set_mesh(mesh):
        w = jax.device_put(WEIGHTS, (COLUMN, COLUMN, ROW))
        run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        step = run.lower(place(X), place(LOGITS), w, place(SEGMENTS), place(CHOOSE)).compile()

    def call(x=X, logits=LOGITS, segments=SEGMENTS, ids=CHOOSE):
        with jax.set_mesh(mesh):
            (_, (y, dropped, load)), grads = step(place(x), place(logits), w, place(segments), place(ids))
        return jax.device_get(((y, grads), dropped, load))

    return call, step.as_text()


FORMS = pytest.mark.parametrize("dispatch", ["gather", "exchange"])


def deepseek(dispatch: str, **settings) -> Experts:
    return Experts(**{**vars(DEEPSEEK), "dispatch": dispatch, **settings})


def route(m: Experts, logits, bias=None, replay=None):
    with jax.set_mesh(ONE.mesh()):
        return jax.device_get(jax.jit(partial(moe.route, m))(logits, bias, replay))


@pytest.mark.parametrize("m", [MIXTRAL, QWEN, DEEPSEEK], ids=["mixtral", "qwen", "deepseek"])
def test_the_router_by_hand(m):
    bias = None if m.score == "softmax" else BIAS
    ids, gates, scores = route(m, LOGITS, bias)
    np.testing.assert_array_equal(ids, choices(m, LOGITS, 0 if bias is None else bias))
    p = scored(m, np.float64(LOGITS))
    picked = np.take_along_axis(p, ids, -1)
    total = picked.sum(-1, keepdims=True) if m.normalize else 1
    np.testing.assert_allclose(gates, picked / total * m.scale, rtol=1e-5)
    np.testing.assert_allclose(scores, p, rtol=1e-5)


def test_equal_scores_choose_the_first_experts():
    np.testing.assert_array_equal(route(MIXTRAL, np.zeros((1, 2, E), np.float32)).ids, [[[0, 1, 2]] * 2])


def test_a_bias_sways_the_choice_and_no_gate():
    bias = np.where(np.arange(E) == 5, 9, 0).astype(np.float32)
    swayed = route(DEEPSEEK, LOGITS, bias)
    assert (swayed.ids[..., 0] == 5).all()
    assert (route(DEEPSEEK, LOGITS).ids != swayed.ids).any()
    np.testing.assert_array_equal(swayed.gates, route(DEEPSEEK, LOGITS, replay=swayed.ids).gates)


def test_groups_limit_the_choice():
    """The largest score may be out of reach: a group is as good as its two best."""
    logits = np.array([[[4, -9, 2, 2, 1, 3, 0, 0]]], np.float32)
    assert route(Experts(E, 2, F, score="sigmoid"), logits).ids.tolist() == [[[0, 5]]]
    limited = Experts(E, 2, F, score="sigmoid", groups=4, top_groups=1)
    assert route(limited, logits).ids.tolist() == [[[2, 3]]]
    assert route(limited, logits, np.full(E, -9, np.float32)).ids.tolist() == [[[2, 3]]], "whatever their sign"


def test_routing_moves_nothing():
    """XLA gathers all tokens for a top_k over rows that are split."""
    with jax.set_mesh(SPLIT.mesh()):
        logits = jax.device_put(LOGITS, P(BATCH, "seq", None))
        loss = lambda logits: jnp.sum(moe.route(DEEPSEEK, logits, BIAS).gates, (1, 2))
        text = jax.jit(lambda x: jax.vjp(loss, x)[1](jnp.ones_like(x[:, 0, 0]))).lower(logits).compile().as_text()
    assert collectives(text) == []


@FORMS
@pytest.mark.parametrize("layout", [ONE, SPLIT, CONTEXT], ids=str)
def test_every_layout_computes_the_dense_layer(layout, dispatch):
    """In values and gradients; with experts that no token chose, with padding sent nowhere, and with rows permuted."""
    run, _ = compiled(deepseek(dispatch), layout)
    ids = choices(DEEPSEEK, LOGITS, BIAS)
    result, dropped, load = run()
    assert distance(result, expected(DEEPSEEK, ids)) < 1e-5
    assert dropped == 0
    assert distance(load, moe.Load(*measured(DEEPSEEK, ids, scored(DEEPSEEK, LOGITS), LOGITS, SEGMENTS))) < 1e-5

    few = np.where(np.arange(K) == 0, 6, ids % 2).astype(np.int32)  # experts 0, 1 and 6
    result, dropped, load = run(ids=few)
    assert distance(result, expected(DEEPSEEK, few)) < 1e-5
    assert dropped == 0
    assert (load.load[[2, 3, 4, 5, 7]] == 0).all()
    assert all((g[[2, 3, 4, 5, 7]] == 0).all() and np.isfinite(g).all() for g in result[1][2])

    real = SEGMENTS[..., None] > 0
    away = np.where(real, ids, E).astype(np.int32)
    result, dropped, other = run(ids=away)
    assert distance(result, expected(DEEPSEEK, away, real)) < 1e-5
    assert (result[0][SEGMENTS == 0] == 0).all()
    assert dropped == 0
    assert other.load.sum() == K * real.sum()

    order = np.random.default_rng(0).permutation(B)
    mixed, *_ = run(X[order], LOGITS[order], SEGMENTS[order])
    plain, *_ = run()
    assert distance((mixed[0], *mixed[1][:2]), (plain[0][order], *(g[order] for g in plain[1][:2]))) < 1e-6


@FORMS
def test_capacity_keeps_the_first_tokens_of_each_device_and_counts_the_rest(dispatch):
    m = deepseek(dispatch, capacity=0.75)
    run, _ = compiled(m, SPLIT)
    ids = choices(m, LOGITS, BIAS)
    ids[-2:] = [0, 1]  # a device whose tokens all want the same
    kept = np.zeros(ids.shape, bool)
    for rows in np.split(np.arange(B), 4):
        room = np.full(E, 2)  # ceil(0.75 * 8 tokens * 2 / 8)
        for b, t, k in np.ndindex(2, T, K):
            e = ids[rows[b], t, k]
            kept[rows[b], t, k] = room[e] > 0
            room[e] -= 1
    result, dropped, load = run(ids=ids)
    assert distance(result, expected(m, ids, kept)) < 1e-5
    assert dropped == (~kept).sum() > 12
    assert load.load.sum() == K * (SEGMENTS > 0).sum(), "what is dropped was wanted"


@FORMS
def test_one_token_a_row(dispatch):
    """Decode: rows are split and tokens are not, not even over seq, though the weights are reduced over it."""
    m = deepseek(dispatch, balance=0.0, z=0.0)

    def loss(x, logits, w):
        w = [gather(reduced(a), "fsdp") for a in w]
        y, _ = moe.experts(m, x, moe.route(m, logits, BIAS), *w, P(BATCH, None, None))
        return jnp.sum(y * jnp.sin(x)), y

    x, logits = X[:, :1], LOGITS[:, :1]
    with jax.set_mesh(Layout(seq=2, tensor=2, expert=2).mesh()):
        args = *jax.device_put((x, logits), P(BATCH, None, None)), jax.device_put(WEIGHTS, (COLUMN, COLUMN, ROW))
        (_, y), grads = jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*args))
    assert distance((y, grads), expected(m, choices(m, logits, BIAS), x=x, logits=logits)) < 1e-5


@FORMS
def test_what_a_ragged_product_leaves_in_unused_rows_does_not_matter(dispatch, monkeypatch):
    """CPU leaves zeros there; the contract of the operation, forward and backward, is that they are not defined."""
    ragged = lax.ragged_dot

    def unused(rows, sizes, value):
        return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), rows, value)

    @jax.custom_vjp
    def wild(a, w, group_sizes):
        return unused(ragged(unused(a, group_sizes, 0), w, group_sizes), group_sizes, jnp.nan)

    def backward(saved, g):
        a, w, sizes = saved
        da, dw = jax.vjp(partial(ragged, group_sizes=sizes), unused(a, sizes, 0), w)[1](unused(g, sizes, 0))
        return unused(da, sizes, jnp.nan), dw, None

    wild.defvjp(lambda *args: (wild(*args), args), backward)
    monkeypatch.setattr(lax, "ragged_dot", wild)
    run, _ = compiled(deepseek(dispatch, scale=2.0), Layout(expert=2))
    ids = np.where(SEGMENTS[..., None] > 0, choices(DEEPSEEK, LOGITS, BIAS), E).astype(np.int32)
    result, *_ = run(ids=ids)
    assert distance(result, expected(deepseek(dispatch, scale=2.0), ids, ids < E)) < 1e-5


def test_packing_by_hand():
    """Two devices of two experts and three rows: sorted by expert, then by token. Expert 4 is nowhere."""
    ids = jnp.array([[3, 1], [0, 4], [1, 2], [3, 0], [0, 4]])
    pair, slot, sizes = pack(ids, 2, 2, 3)
    assert pair.tolist() == [2, 7, 8, 5, 0, 6]
    assert slot.tolist() == [[4, 6], [0, 6], [6, 3], [5, 1], [2, 6]]
    assert sizes.tolist() == [[3, 2], [1, 2]]
    assert pack(ids, 1, 2, 8).pair.tolist() == [2, 7, 8, 1, 4, 10, 10, 10]


def test_half_precision_moves_and_float32_gates():
    """bfloat16 in and out and in the gradients of x, near the float32 layer."""
    m = deepseek("exchange")

    def loss(x, w):
        y, _ = moe.experts(m, x, moe.route(m, LOGITS, BIAS), *w, P(BATCH, "seq", None))
        return jnp.sum((y * jnp.sin(x)).astype(jnp.float32)), y

    with jax.set_mesh(ONE.mesh()):
        half = lambda a: jnp.asarray(a, jnp.bfloat16)
        (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(half(X), [half(w) for w in WEIGHTS])
    assert {a.dtype for a in jax.tree.leaves((y, grads))} == {jnp.dtype("bfloat16")}
    assert distance(y, expected(m, choices(m, LOGITS, BIAS))[0]) < 0.02


def measure(m, ids, logits, segments):
    def run(ids, logits, segments):
        return moe.measure(m, moe.route(m, logits, replay=ids), logits, segments)

    with jax.set_mesh(ONE.mesh()):
        return jax.device_get(jax.jit(run)(ids, logits, segments))


def test_packing_and_padding_change_no_auxiliary_loss():
    """Three sequences in rows of their own, two rows or one, with what fills the rows as wild as it may be."""
    lengths = [5, 2, 4]
    where = np.arange(T * 4)[None] < np.array(lengths)[:, None]
    logits, ids = draw(3, T * 4, E), choices(DEEPSEEK, draw(3, T * 4, E), BIAS)
    wild = np.where(where[..., None], logits, 50).astype(np.float32)
    unpacked = measure(DEEPSEEK, ids, wild, where.astype(np.int32))
    join = lambda a: np.concatenate([a[i, :n] for i, n in enumerate(lengths)])[None]
    packed = measure(DEEPSEEK, join(ids), join(logits), np.repeat([1, 2, 3], lengths)[None].astype(np.int32))
    assert distance(packed, unpacked) < 1e-5
    assert unpacked.load.sum() == K * sum(lengths)


@FORMS
def test_rows_split_into_microbatches_add_up(dispatch):
    """The rows of the first half, then of the second, beside padding: their sums are the sum of all."""
    run, _ = compiled(deepseek(dispatch), SPLIT)
    first = (np.arange(B) < B // 2)[:, None]
    halves = [run(segments=np.where(half, SEGMENTS, 0).astype(np.int32))[2] for half in (first, ~first)]
    assert distance(jax.tree.map(np.add, *halves), run()[2]) < 1e-5


def test_even_routing_costs_one_a_token_and_no_coefficient_no_gradient():
    ids = np.stack([np.arange(T * 2) % E, (np.arange(T * 2) + 1) % E], -1)[None].astype(np.int32)
    zeros = np.zeros((1, T * 2, E), np.float32)
    load = measure(DEEPSEEK, ids, zeros, np.ones((1, T * 2), np.int32))
    assert load.balance == pytest.approx(T * 2)
    assert load.z == pytest.approx(T * 2 * np.log(E) ** 2)
    assert moe.penalty(DEEPSEEK, load) == pytest.approx(0.1 * load.balance + 0.01 * load.z)
    grad = jax.grad(lambda load: moe.penalty(MIXTRAL, load))(load)
    assert not any(np.any(g) for g in jax.tree.leaves(grad))


def test_rebalance_evens_a_skewed_router():
    m = Experts(E, K, F, score="sigmoid", bias_rate=0.02)
    logits, bias = draw(1, 64, E) + np.linspace(-1, 1, E, dtype=np.float32), np.zeros(E, np.float32)
    skew = []
    with jax.set_mesh(ONE.mesh()):
        run = jax.jit(partial(moe.route, m))
        for _ in range(60):
            load = np.bincount(np.asarray(run(logits, bias).ids).ravel(), minlength=E).astype(np.float32)
            skew.append(float(moe.imbalance(load[None])["experts/imbalance"][0]))
            step = bias + 0.02 * np.sign(load.mean() - load)
            bias = np.asarray(moe.rebalance(m, bias, load))
            np.testing.assert_allclose(bias, step, rtol=1e-6)
    assert skew[0] > 2 > 1.3 > skew[-1]


def test_claim_15_expert_parallelism_divides_experts_and_exchanges_twice():
    """Parameters divide by P; 2 all-to-alls forward, 4 with the backward pass, 5 where a checkpoint recomputes it.

    At capacity 1 a buffer has tau k rows, so each sends (P-1)/P tau k D values.
    """
    ways, m = 4, deepseek("exchange", capacity=1.0)
    with jax.set_mesh(Layout(expert=ways).mesh()):
        x, logits = jax.device_put((X, LOGITS), P(BATCH, "seq", None))
        w = jax.device_put(WEIGHTS, (COLUMN, COLUMN, ROW))
        assert all(a.addressable_shards[0].data.size * ways == a.size for a in w)

        def layer(x, logits, w):
            return moe.experts(m, x, moe.route(m, logits, BIAS), *(reduced(a) for a in w), P(BATCH, "seq", None))[0]

        text = lambda f: jax.jit(f).lower(x, logits, w).compile().as_text()
        forward = text(layer)
        both = text(jax.grad(lambda *a: jnp.sum(jnp.sin(layer(*a))), (0, 1, 2)))
    tau = B * T // ways
    for program, times in ((forward, 2), (both, 4)):
        exchanges = [c for c in collectives(program) if c.kind == "all-to-all" and len(c.shapes[0]) == 2]
        activations = [c for c in exchanges if c.shapes[0][1] == D]
        assert len(activations) == times
        for c in activations:
            assert len(c.shapes) == ways
            buffer = sum(rows * width for rows, width in c.shapes)
            assert (ways - 1) / ways * buffer == (ways - 1) / ways * tau * K * D
    _, checkpointed = compiled(deepseek("exchange"), CONTEXT)
    assert sum(c.kind == "all-to-all" and c.shapes[0][1:] == (D,) for c in collectives(checkpointed)) == 5


def test_claim_37_imbalance_erases_the_gain_of_expert_parallelism():
    """The busiest device sets the time. Even routing gains P; a router of one mind gains nothing."""
    ways, tokens = 4, 64
    even, skewed = draw(1, tokens, E), draw(1, tokens, E) + np.where(np.arange(E) < K, 50, 0).astype(np.float32)
    loads = [np.bincount(route(Experts(E, K, F), z).ids.ravel(), minlength=E) for z in (even, skewed)]
    devices = np.stack(loads).reshape(2, ways, E // ways).sum(-1)
    time = devices.max(-1) / (tokens * K)  # of that on one device
    seen = moe.imbalance(jnp.asarray(devices, jnp.float32))
    np.testing.assert_allclose(ways / seen["experts/imbalance"], 1 / time, rtol=1e-6)
    assert 1 / time[0] > 0.75 * ways
    assert 1 / time[1] == 1
    assert seen["experts/idle"].tolist() == [0, 0.75]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(top_k=0), "top_k=0 must be at least 1"),
        (dict(top_k=9), "top_k=9 must be at most 8, the experts that may be chosen"),
        (dict(groups=4), "top_k=3 must be at most 2, the experts that may be chosen"),
        (dict(groups=3), "groups=3 must divide count=8"),
        (dict(groups=2, top_groups=3), "top_groups=3 must be at most groups=2"),
        (dict(scale=0), "scale=0 must be above 0"),
        (dict(capacity=0.0), "capacity=0.0 must be above 0, or None to drop nothing"),
        (dict(shared=-1), "shared=-1 must be 0 \\(off\\) or above"),
        (dict(score="tanh"), "score='tanh' must be 'softmax' or 'sigmoid'"),
        (dict(dispatch="ring"), "dispatch='ring' must be 'gather' or 'exchange'"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_impossible_settings_name_field_and_rule(settings, message):
    with pytest.raises(ValueError, match=message):
        Experts(**{**vars(MIXTRAL), **settings})
