"""Law: the sampler's log-probabilities are the trainer's, of the distribution really drawn from; and a completion
depends on its prompt, its weights and its key alone: not on layout, batch, order, padding or the chunks of the loop."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import ALL, CONTEXT, FSDP, FSDP_TENSOR, MODELS, ONE

from rljax.data.rows import fit
from rljax.errors import UserError
from rljax.generate.decode import generate, windows
from rljax.generate.sampling import Sampling
from rljax.mesh import Layout, Strategy
from rljax.model.forward import logprobs
from rljax.model.table import abstract, shardings
from rljax.plan.hlo import collectives
from rljax.types import LENGTH, PAD_UID, STOP

DATA = Layout(data=8)
N, NEW, STOPS = 3, 17, (0, 5)  # id 0 is also what pads
LENGTHS = np.array([2, 6, 3, 5, 4, 6, 2, 3], np.int32)
UID = np.array([40, 41, 7, 43, 1000, 45, 46, PAD_UID], np.int32)
REAL = np.repeat(UID >= 0, N)
SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.6),
    "hot": Sampling(temperature=1.7),
    "top-k": Sampling(temperature=0.7, top_k=5),
    "top-p": Sampling(top_p=0.8),
    "min-p": Sampling(temperature=1.2, min_p=0.1),
    "all": Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
}
GREEDY = Sampling(temperature=0.0)
LAYOUTS = {
    "data": (DATA, {}),
    "fsdp": (FSDP, {}),
    "fsdp tensor": (FSDP_TENSOR, {}),
    "all": (ALL, {}),
    "tensor beyond key/value heads": (Layout(fsdp=2, tensor=4), {}),
    "sequence parallel": (Layout(data=4, tensor=2), dict(sequence_parallel=True)),
    "gathered keys": (CONTEXT, {}),  # prompts of 6 tokens in 2 or 4 parts
    "ulysses": (Layout(data=4, seq=2), dict(context="ulysses")),
    "ring": (CONTEXT, dict(context="ring")),
    "pipe": (Layout(pipe=2, data=2), {}),
    "pipe fsdp tensor": (Layout(fsdp=2, pipe=2, tensor=2), dict(microbatches=4)),
    "pipe ring": (Layout(data=2, pipe=2, seq=2), dict(context="ring")),
    "ring of 4, sequence parallel": (Layout(seq=4, tensor=2), dict(context="ring", sequence_parallel=True)),
}
EXPERTS = {
    "expert": ("experts", Layout(expert=8), {}),
    "fsdp tensor expert": ("deepseek", Layout(fsdp=2, tensor=2, expert=2), {}),
    "pipe expert": ("experts", Layout(pipe=2, expert=2, data=2), {}),
    "exchange seq": ("exchange", Layout(data=2, seq=2, expert=2), dict(context="ring")),
    "window, fsdp tensor": ("gemma", FSDP_TENSOR, {}),
    "window, ring": ("gemma", CONTEXT, dict(context="ring")),
    "window, pipe": ("gemma", Layout(pipe=2, data=2), {}),
    "latent, tensor seq": ("latent", CONTEXT, {}),
    "latent, ring expert": ("latent", Layout(seq=2, tensor=2, expert=2), dict(context="ring")),
    "latent, sequence parallel": ("latent", Layout(fsdp=2, tensor=4), dict(sequence_parallel=True)),
    "latent, pipe": ("latent", Layout(fsdp=2, pipe=2, tensor=2), dict(microbatches=2)),
}
KIND = np.arange(8 * N) % 3  # of each row: greedy, top-k 1, plain
MIXED = Sampling(
    np.where(KIND == 0, 0.0, 1.0).astype(np.float32), np.where(KIND == 1, 1, 0).astype(np.int32),
    np.ones(8 * N, np.float32), np.zeros(8 * N, np.float32),
)  # fmt: skip


@cache
def prompts():
    ids = np.random.default_rng(5).integers(1, 48, (8, 6)).astype(np.int32)
    return np.where(np.arange(6)[None] < LENGTHS[:, None], ids, 0)


@cache
def sampler(layout=ONE, name="rich", n=N, new=NEW, stop=STOPS, chunk=7, **strategy):
    """(mesh, jitted function, what calls it with host arrays and fetches the rollout)."""
    lm, mesh = MODELS[name].build(), layout.mesh()
    with jax.set_mesh(mesh):
        params = jax.device_put(tiny.weights(name), shardings(lm.table, mesh))
    run = jax.jit(
        lambda params, ids, length, uid, key, version, sampling: generate(
            lm, params, ids, length, uid, key, version, sampling, Strategy(**strategy),
            n=n, max_new=new, stop=stop, chunk=chunk,
        )
    )  # fmt: skip

    def arguments(sampling, seed=0, ids=None, length=LENGTHS, uid=UID):
        ids = prompts() if ids is None else ids
        settings = jax.tree.map(jnp.asarray, sampling)
        return params, *tiny.place((ids, length, uid), mesh), jax.random.key(seed), jnp.int32(3), settings

    def call(*args, **kwargs):
        with jax.set_mesh(mesh):
            return jax.device_get(run(*arguments(*args, **kwargs)))

    call.run, call.mesh, call.arguments = run, mesh, arguments
    return call


def completions(rollout):
    """The ids of each row's completion, as the mask has them."""
    return [row[m].tolist() for row, m in zip(rollout.tokens.ids, rollout.mask)]


def truncated(z, s: Sampling):
    """The distribution drawn from, once more in numpy: temperature, then top-k, top-p and min-p on what is left."""
    p = np.exp(z / s.temperature - (z / s.temperature).max())
    order = np.argsort(-p)
    keep = np.zeros(len(p), bool)
    keep[order[: s.top_k or len(p)]] = True
    p = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(p[order]) - p[order]
    keep[order[before >= s.top_p]] = False
    p = np.where(keep & (p >= s.min_p * p.max()), p, 0)
    return p / p.sum()


@pytest.mark.pitfall("T-50")
@pytest.mark.pitfall("T-53")
@pytest.mark.pitfall("T-54")
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_recorded_logp_is_that_of_the_distribution_drawn_from(name):
    """Against the oracle's float64 logits, token by token: the sampled id's, renormalized over the kept set."""
    s = SAMPLINGS[name]
    rollout = sampler()(s)
    tok = rollout.tokens
    logits = tiny.oracle(MODELS["rich"], tiny.weights("rich"), tok.ids, tok.positions, tok.segments)
    drawn = 0
    for row, t in np.argwhere(rollout.mask):
        p = truncated(logits[row, t - 1], s)
        assert p[tok.ids[row, t]] > 0, "a token outside the kept set was drawn"
        assert rollout.logp[row, t] == pytest.approx(np.log(p[tok.ids[row, t]]), abs=2e-4)
        drawn += 1
    assert drawn > 100 and np.all(rollout.logp[~rollout.mask] == 0) and np.all(rollout.logp <= 0)


def rescored(rollout, name, layout, sampling):
    """The log-probabilities of completions as the trainer computes them."""
    lm, mesh = MODELS[name].build(), layout.mesh()
    with jax.set_mesh(mesh):
        params = jax.device_put(tiny.weights(name), shardings(lm.table, mesh))
        score = jax.jit(lambda p, tokens, mask: logprobs(lm, p, tokens, mask, sampling.adjust)[0])
        return jax.device_get(score(params, *tiny.place((rollout.tokens, rollout.mask), mesh)))


@pytest.mark.pitfall("T-50")
@pytest.mark.pitfall("T-53")
def test_a_sampler_of_latents_agrees_with_a_trainer_of_heads():
    """A cache of latent attention keeps latents alone: no array in it is as wide as the heads' keys and values."""
    rollout, m = sampler(name="latent")(SAMPLINGS["cold"]), MODELS["latent"]
    assert np.abs(rescored(rollout, "latent", ALL, SAMPLINGS["cold"]) - rollout.logp).max() < 1e-4
    lm = m.build()
    params, mesh = abstract(lm.table, ONE.mesh()), ONE.mesh()
    with jax.set_mesh(mesh):
        prefill = lambda p, ids, length: lm.prefill(p, ids, length, Strategy())[1]
        caches = jax.eval_shape(prefill, params, *tiny.place((prompts(), LENGTHS), mesh))
    assert {cache.k.shape[2:] for cache in caches} == {(1, 6, 1, m.latent.keys + m.latent.turned)}
    assert {cache.v for cache in caches} == {None}


@pytest.mark.pitfall("T-50")
@pytest.mark.pitfall("T-53")
@pytest.mark.parametrize(
    "name, layout",
    [*((name, ONE) for name in SAMPLINGS), ("cold", ALL), ("all", ALL)],
    ids=lambda x: str(x).replace(" ", ","),
)
def test_sampler_logp_equals_trainer_logp(name, layout):
    """What an on-policy ratio of 1 rests on. The trainer may lie on other devices than the sampler did."""
    rollout = sampler()(SAMPLINGS[name])
    off = np.abs(rescored(rollout, "rich", layout, SAMPLINGS[name]) - rollout.logp).max()
    assert np.expm1(off) < 1e-3 and off < 1e-4
    if SAMPLINGS[name] != Sampling():  # control: the raw distribution has other log-probabilities
        tok = rollout.tokens
        logits = tiny.oracle(MODELS["rich"], tiny.weights("rich"), tok.ids, tok.positions, tok.segments)
        raw, _ = tiny.oracle_logprobs(logits, tok.ids, rollout.mask)
        assert np.abs(raw - rollout.logp).mean() > 0.01


@pytest.mark.pitfall("T-86")
@pytest.mark.parametrize("case", tiny.ordinary(LAYOUTS, "fsdp", "pipe", "ulysses", "ring"))
def test_every_layout_draws_the_same_tokens(case):
    layout, strategy = LAYOUTS[case]
    for s in (SAMPLINGS["plain"], SAMPLINGS["all"], GREEDY):
        one, other = sampler()(s), sampler(layout, **strategy)(s)
        assert np.array_equal(one.tokens.ids, other.tokens.ids) and np.abs(one.logp - other.logp).max() < 1e-4
        rest = lambda r: (r.tokens, r.mask, r.version, r.length, r.prompt_length, r.finish, r.uid, r.sample)
        assert tiny.identical(rest(one), rest(other))


@pytest.mark.parametrize(
    "case", tiny.ordinary(EXPERTS, "fsdp tensor expert", "pipe expert", "latent, ring expert", "latent, pipe")
)
def test_families_draw_the_same_tokens_on_every_layout(case):
    name, layout, strategy = EXPERTS[case]
    for s in (SAMPLINGS["plain"], GREEDY):
        one, other = sampler(name=name)(s), sampler(layout, name, **strategy)(s)
        assert tiny.identical(one.tokens, other.tokens) and np.abs(one.logp - other.logp).max() < 1e-4


TRAINED = {case: ("rich", *rest) for case, rest in tiny.LAYOUTS.items()} | tiny.EXPERT_LAYOUTS | tiny.PRODUCTS


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_every_layout_of_training_scores_and_draws_alike(case):
    """Log-probabilities of the actor, as it is trained, and of a reference, a replica; rows of two sequences too."""
    name, layout, strategy = TRAINED[case]
    lm, mesh, rollout = MODELS[name].build(), layout.mesh(), tiny.batch(name).rollout
    tok, mask = rollout.tokens, rollout.mask
    logits = tiny.oracle(MODELS[name], tiny.weights(name), tok.ids, tok.positions, tok.segments)
    expected, entropy = tiny.oracle_logprobs(logits, tok.ids, mask)
    for role in (Strategy(**strategy), Strategy(**strategy | {"zero": 0})):
        with jax.set_mesh(mesh):
            params = jax.device_put(tiny.weights(name), shardings(lm.table, mesh, role.zero))
            score = jax.jit(lambda *args: logprobs(lm, *args, strategy=role)[:2])  # noqa: B023
            got = jax.device_get(score(params, *tiny.place((tok, mask), mesh)))
        assert np.abs(got[0] - expected).max() < 2e-5 and np.abs(got[1] - entropy).max() < 2e-5
    one, other = sampler(name=name)(GREEDY), sampler(layout, name, **strategy)(GREEDY)
    assert tiny.identical(one.tokens, other.tokens) and np.abs(one.logp - other.logp).max() < 1e-4


@pytest.mark.pitfall("T-86")
def test_samples_differ_and_depend_on_seed_uid_and_number_alone():
    rollout = sampler()(Sampling())
    rows = completions(rollout)
    groups = [rows[i : i + N] for i in range(0, len(rows) - N, N)]
    assert all(len({tuple(r) for r in group}) == N for group in groups)
    assert rollout.sample.tolist() == [0, 1, 2] * 8 and rollout.uid.tolist() == np.repeat(UID, N).tolist()
    assert rows == completions(sampler()(Sampling()))
    other = completions(sampler()(Sampling(), seed=1))
    assert all(a != b for a, b in zip(rows[:-N], other[:-N]))

    order = np.random.default_rng(6).permutation(8)
    permuted = completions(sampler()(Sampling(), ids=prompts()[order], length=LENGTHS[order], uid=UID[order]))
    assert permuted == [rows[i * N + j] for i in order for j in range(N)]

    neighbors = prompts().copy()
    neighbors[1:] = np.where(neighbors[1:] > 0, 47 - neighbors[1:] + (neighbors[1:] == 47), 0)
    assert completions(sampler()(Sampling(), ids=neighbors))[:N] == rows[:N]

    twins = sampler()(Sampling(), ids=np.tile(prompts()[:1], (8, 1)), length=np.full(8, 2, np.int32))
    assert len({tuple(r) for r in completions(twins)[:-N]}) == 7 * N  # one prompt under 7 uids


@pytest.mark.pitfall("T-18")
@pytest.mark.pitfall("T-86")
def test_a_batch_of_mixed_lengths_equals_its_prompts_one_by_one():
    """Greedy and sampled alike, whatever the number of samples."""
    alone = sampler(n=N + 1, chunk=16)  # other sizes of everything
    for s in (GREEDY, Sampling()):
        batch = completions(sampler()(s))
        for i in range(7):
            rows = completions(alone(s, ids=prompts()[i : i + 1], length=LENGTHS[i : i + 1], uid=UID[i : i + 1]))
            assert rows[:N] == batch[i * N : (i + 1) * N]
            assert (len({tuple(r) for r in rows}) == 1) == (s is GREEDY)


@pytest.mark.pitfall("T-18")
def test_a_prompt_without_padding_completes_as_in_a_wide_batch():
    exact = sampler(n=1, new=5)
    for i in (0, 6):
        row = completions(exact(GREEDY, ids=prompts()[i : i + 1, :2], length=LENGTHS[i : i + 1], uid=UID[i : i + 1]))[0]
        assert row == completions(sampler()(GREEDY))[i * N][:5]


@pytest.mark.pitfall("T-18")
def test_greedy_is_the_argmax_of_the_full_forward():
    rollout = sampler()(GREEDY)
    tok = rollout.tokens
    logits = tiny.oracle(MODELS["rich"], tiny.weights("rich"), tok.ids, tok.positions, tok.segments)
    raw, _ = tiny.oracle_logprobs(logits, tok.ids, rollout.mask)
    assert np.abs(raw - rollout.logp).max() < 1e-4  # at temperature 1
    for row, t in np.argwhere(rollout.mask):
        assert tok.ids[row, t] == logits[row, t - 1].argmax()


@pytest.mark.pitfall("T-52")
def test_every_row_has_its_own_settings():
    """Numbers or arrays: rows at temperature 0 are greedy, rows with top-k 1 too, and the others as if alone."""
    rows, greedy, sampled = (completions(sampler()(s)) for s in (MIXED, GREEDY, Sampling()))
    assert rows == [s if kind == 2 else g for kind, g, s in zip(KIND, greedy, sampled)]


@pytest.mark.pitfall("T-15")
@pytest.mark.pitfall("T-20")
def test_a_stop_id_ends_the_row_and_is_kept_even_if_it_pads():
    """Lengths and finish reasons, not ids, say what is padding."""
    finishes = set()
    for s in (Sampling(), SAMPLINGS["hot"]):
        rollout = sampler()(s)
        for row, finish, length, prompt in zip(
            completions(rollout), rollout.finish, rollout.length, rollout.prompt_length
        ):
            if prompt == length:
                continue
            assert not set(row[:-1]) & set(STOPS) and len(row) == length - prompt <= NEW
            assert finish == (STOP if row[-1] in STOPS else LENGTH)
            assert finish == STOP or len(row) == NEW
            finishes.add((int(finish), row[-1] if finish == STOP else None))
    assert finishes == {(STOP, 0), (STOP, 5), (LENGTH, None)}  # all three were seen


def test_rows_are_a_prompt_then_its_completion_then_padding():
    rollout = sampler()(Sampling())
    t = np.arange(6 + NEW)
    for i, (ids, mask) in enumerate(zip(rollout.tokens.ids, rollout.mask)):
        prompt, length = LENGTHS[i // N], rollout.length[i]
        assert ids[:prompt].tolist() == prompts()[i // N, :prompt].tolist() and np.all(ids[length:] == 0)
        assert np.array_equal(mask, (t >= prompt) & (t < length))
        assert np.array_equal(rollout.tokens.positions[i], np.where(t < length, t, 0))
        assert np.array_equal(rollout.tokens.segments[i], t < length)
        assert np.array_equal(rollout.version[i], np.where(mask, 3, 0))
    assert rollout.prompt_length.tolist() == np.repeat(LENGTHS, N).tolist()


def test_filler_rows_generate_nothing():
    rollout = sampler()(Sampling())
    assert not rollout.mask[~REAL].any() and rollout.mask[REAL].any(1).all()
    assert np.array_equal(rollout.length[~REAL], rollout.prompt_length[~REAL])
    assert np.all(rollout.logp[~REAL] == 0) and np.all(rollout.uid[~REAL] == PAD_UID)


@pytest.mark.parametrize("name, layout", [("rich", ONE), ("rich", Layout(seq=2, tensor=2)), ("deepseek", ONE)], ids=str)
def test_one_row(name, layout):
    """Rows of a batch and a batch of one row draw alike."""
    args = dict(ids=prompts()[:1], length=LENGTHS[:1], uid=UID[:1])
    many, one = sampler(name=name)(Sampling()), sampler(layout, name, n=1)(Sampling(), **args)
    assert completions(one) == completions(many)[:1]


@pytest.mark.pitfall("T-20")
@pytest.mark.parametrize("new", [1, 2])
def test_exactly_so_many_tokens(new):
    """The first of a longer completion, and without a stop id all of them."""
    rows, longer = completions(sampler(new=new, stop=())(Sampling())), completions(sampler()(Sampling()))
    assert all(len(row) == new for row in rows[:-N]) and not any(rows[-N:])
    assert all(row[: len(full)] == full[:new] for row, full in zip(rows, longer))
    rollout = sampler(new=new, stop=())(Sampling())
    assert rollout.tokens.ids.shape == (8 * N, 6 + new) and np.all(rollout.finish == LENGTH)


@pytest.mark.pitfall("T-111")
def test_new_settings_compile_nothing():
    call = sampler()
    call(Sampling())
    size = call.run._cache_size()
    for s in (*SAMPLINGS.values(), GREEDY, Sampling(0.123, 3, 0.5, 0.3)):
        call(s, seed=9)
    assert call.run._cache_size() == size
    call(MIXED)  # control: an array of settings is another shape
    assert call.run._cache_size() == 2


@pytest.mark.parametrize("prompt", [1, 2, 6, 64, 1000])
@pytest.mark.parametrize("chunk", [1, 7, 32])
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 17, 100])
def test_the_plan_of_windows(prompt, chunk, chunks):
    plan = windows(prompt, chunk, chunks)
    untils, slots = [u for u, _ in plan], [w for _, w in plan]
    assert (untils[-1] if plan else 0) == chunk * chunks  # covers all, and no more
    assert all(a < b for a, b in zip(untils, untils[1:])) and all(u % chunk == 0 for u in untils)
    assert all(a < b for a, b in zip(slots, slots[1:]))
    assert all(w >= prompt + u for u, w in plan)  # token t of the longest row is written at slot prompt + t - 1
    assert all(
        b <= max(2 * a, a + chunk) for a, b in zip([prompt, *slots], slots)
    )  # reads at most twice what is needed
    assert len(plan) <= 2 + prompt + np.log2(max(1, chunk * chunks / prompt)) + chunk
    if chunk <= prompt:
        assert len(plan) <= 2 + np.log2((prompt + chunk * chunks) / prompt) / np.log2(1.5)


def traced(n, new, chunk):
    """The jaxpr of a generation, and the (ids, window) of each call of the model's `prefill` and `extend`."""
    lm, seen = MODELS["rich"].build(), []

    def prefill(p, ids, *args):
        seen.append((ids.shape, None))
        return lm.prefill(p, ids, *args)

    def extend(p, ids, cache, lengths, window):
        seen.append((ids.shape, window))
        return lm.extend(p, ids, cache, lengths, window)

    with jax.set_mesh(sampler().mesh):
        args = sampler().arguments(Sampling())
        spied = lm._replace(prefill=prefill, extend=extend)
        run = lambda *a: generate(spied, *a, n=n, max_new=new, stop=STOPS, chunk=chunk)
        return jax.make_jaxpr(run)(*args), seen


def test_each_prompt_is_prefilled_once_and_attention_reads_a_growing_window():
    jaxpr, seen = traced(n=4, new=1 + 3 * 8, chunk=8)
    assert seen[0] == ((8, 6), None)  # 8 prompts, not 32 rows
    assert {ids for ids, _ in seen[1:]} == {(32, 1)}
    plan = [w for _, w in windows(6, 8, 3)]
    assert list(dict.fromkeys(w for _, w in seen[1:])) == plan == [14, 22, 30]
    # what the two einsums of a (scanned) layer's attention read: keys or values, [rows, stripe, slots, heads, width]
    products = [e for e in tiny.equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    shapes = [v.aval.shape for e in products for v in e.invars if v.aval.shape[3:] == (2, 8)]  # queries' as well
    read = [slots for rows, _, slots, *_ in shapes if rows == 32 and slots > 2]
    assert sorted(read) == sorted(2 * plan)


@pytest.mark.parametrize("layout", [ONE, CONTEXT], ids=str)
def test_a_token_is_written_into_the_cache_in_place(layout):
    """Nothing in the loop over tokens makes an array as large as the cache, but for the write itself."""
    call = sampler(layout, stop=(), chunk=5)
    with jax.set_mesh(call.mesh):
        jaxpr = jax.make_jaxpr(call.run)(*call.arguments(Sampling()))
    carried = lambda e: {v.aval.shape for v in e.outvars if len(v.aval.shape) == 6}
    loops = [e for e in tiny.equations(jaxpr.jaxpr) if e.primitive.name == "scan" and carried(e)]
    assert loops
    for loop in loops:
        (cache,) = carried(loop)
        inside = [e for e in tiny.equations(loop.params["jaxpr"].jaxpr) if cache in carried(e)]
        assert {e.primitive.name for e in inside} <= {"scatter", "scan", "while", "jit", "pjit"}


def test_data_parallel_decode_does_not_communicate_within_a_chunk():
    """A chunk is a scan within the loop over chunks, so whatever lies two loops deep happens at every token."""

    def found(layout):
        call = sampler(layout)
        with jax.set_mesh(call.mesh):
            return collectives(call.run.lower(*call.arguments(Sampling())).compile().as_text())

    assert [c for c in found(DATA) if c.loops > 1] == []
    assert {shape for c in found(DATA) if c.loops for shape in c.shapes} <= {()}  # at most "has every row ended?"
    assert any(c.loops > 1 for c in found(ALL))  # control: tensor parallelism has to


@pytest.mark.pitfall("T-52")
@pytest.mark.parametrize(
    "sampling, training, field",
    [
        (GREEDY, True, "temperature"),
        (Sampling(-1.0), False, "temperature"),
        (Sampling(top_k=-1), False, "top_k"),
        (Sampling(top_p=0.0), False, "top_p"),
        (Sampling(top_p=1.5), False, "top_p"),
        (Sampling(min_p=-0.1), True, "min_p"),
        (Sampling(min_p=1.1), True, "min_p"),
    ],
)
def test_impossible_settings_are_one_line_errors(sampling, training, field):
    with pytest.raises(UserError, match=f"sampling.{field}=") as error:
        sampling.check(training)
    assert "\n" not in str(error.value)
    GREEDY.check(training=False), Sampling(0.6, 5, 0.9, 0.1).check(training=True)


@pytest.mark.parametrize("case", tiny.ordinary(["one", "expert seq", "pipe"], "pipe"))
def test_the_experts_chosen_travel_with_the_tokens(case):
    """Replayed with other weights, the policy is that of the sampler's experts; else each token chooses anew."""
    layout, strategy = {
        "one": (ONE, {}), "expert seq": EXPERTS["exchange seq"][1:], "pipe": EXPERTS["pipe expert"][1:]
    }[case]  # fmt: skip
    rollout = sampler(layout, "replay", **strategy)(Sampling())
    routes, inside = rollout.tokens.routes, rollout.tokens.segments > 0
    assert routes.shape == (*inside.shape, 2, 2) and routes.dtype == np.int16
    last = np.arange(inside.shape[1])[None] == rollout.length[:, None] - 1  # no token was drawn after it
    assert np.all((routes[inside & ~last] >= 0) & (routes[inside & ~last] < 8))
    assert tiny.identical(routes[inside & ~last], sampler(name="replay")(Sampling()).tokens.routes[inside & ~last])

    wide = fit(rollout, 8, 2)
    lm, mesh = MODELS["replay"].build(), layout.mesh()
    with jax.set_mesh(mesh):
        weights = tiny.weights("replay")
        other = weights.replace(layers=weights.layers.replace(router=-weights.layers.router))
        score = jax.jit(lambda p, tokens: logprobs(lm, p, tokens, wide.mask, strategy=Strategy(**strategy))[0])
        own, turned = (jax.device_put(w, shardings(lm.table, mesh)) for w in (weights, other))
        replayed, anew = (tiny.place(tokens, mesh) for tokens in (wide.tokens, wide.tokens.replace(routes=None)))
        assert np.abs(np.where(wide.mask, score(own, replayed) - wide.logp, 0)).max() < 1e-4
        assert tiny.identical(score(own, replayed), score(own, anew))
        assert np.abs(score(turned, replayed) - score(turned, anew)).max() > 1e-2  # control: they are obeyed
