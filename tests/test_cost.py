"""Law: closed forms agree with published figures, with the tensor table, and with what JAX traces.

What compilers make of it, `test_claims.py` compares with the same closed forms.
"""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax import P
from jax.sharding import NamedSharding

from rljax.mesh import BATCH, Layout, Placement
from rljax.mesh.schedule import build
from rljax.model.decoder import Decoder
from rljax.model.forward import logprobs
from rljax.model.latent import Latent
from rljax.model.moe import Experts
from rljax.model.table import abstract, count, is_tensor
from rljax.plan import cost, parts
from rljax.plan.flops import flops_of
from rljax.types import Tokens

QWEN = Decoder(152064, 3584, 28, 28, 4, 128, 18944, qkv_bias=True)
LLAMA_8B = Decoder(128256, 4096, 32, 32, 8, 128, 14336)
LLAMA_70B = Decoder(128256, 8192, 80, 64, 8, 128, 28672)
LLAMA_13B = Decoder(32000, 5120, 40, 40, 40, 128, 13824)
QWEN_30B = Decoder(151936, 2048, 48, 32, 4, 128, 6144, qk_norm="head", experts=Experts(128, 8, 768))
MIXTRAL = Decoder(32000, 4096, 32, 32, 8, 128, 14336, experts=Experts(8, 2, 14336))
PUBLISHED = {  # parameters
    "Qwen2.5-7B": (QWEN, 7_615_616_512),
    "Llama-3-8B": (LLAMA_8B, 8_030_261_248),
    "Llama-3-70B": (LLAMA_70B, 70_553_706_496),
    "Llama-2-13B": (LLAMA_13B, 13_015_864_320),
    "Qwen3-30B-A3B": (QWEN_30B, 30_532_122_624),
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704),
}
TERA = 1e12


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    m, published = PUBLISHED[name]
    assert parts.parameters(m).total == count(m.build().table) == published


def test_a_token_meets_few_experts():
    assert round(parts.parameters(QWEN_30B).active / 1e9, 3) == 3.353
    assert parts.parameters(QWEN).active == parts.parameters(QWEN).total
    routed, one = parts.parameters(MIXTRAL).routed, 3 * 4096 * 14336
    assert routed == 32 * 8 * one and parts.parameters(MIXTRAL).active == parts.parameters(MIXTRAL).dense + 64 * one


@pytest.mark.parametrize("name", tiny.MODELS)
def test_parameters_are_those_of_the_table(name):
    """Tied or not, with biases, norms, shared experts and a router's bias."""
    m = tiny.MODELS[name]
    assert parts.parameters(m).total == count(m.build().table)


SPLIT = (Layout(fsdp=4), Layout(fsdp=2, tensor=2), Layout(data=2, fsdp=2, seq=2, tensor=2, expert=2))


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("layout", SPLIT, ids=str)
@pytest.mark.parametrize("name", ["rich", "deepseek", "gemma", "olmo", "latent"])
def test_state_is_that_of_the_tables_shards(name, layout, zero):
    m, mesh = tiny.MODELS[name], layout.abstract()
    tensors = jax.tree.leaves(m.build().table, is_leaf=is_tensor)
    held = lambda spec: sum(prod(NamedSharding(mesh, spec(t)).shard_shape(t.shape)) for t in tensors)
    params, updates = held(lambda t: t.placed(zero)), held(lambda t: t.updated(zero))
    gradients = held(lambda t: t.updated(zero) if zero >= 2 else t.placed(zero))
    assert parts.state(m, layout, zero) == (4 * params, 4 * gradients, 8 * updates)


def test_published_work_of_one_sequence():
    """Of a prompt of 1024 tokens and a completion of 8192: teracounts of FLOPs, in full and to generate it."""
    s, t = 1024, 8192
    figures = {"Qwen2.5-7B": (147.4, 13.6, 132.7), "Llama-3-70B": (1392, 141.6, 1249), "Qwen3-30B-A3B": (89.5, 6, 82.8)}
    for name, (whole, prompt, completion) in figures.items():
        m, _ = PUBLISHED[name]
        assert cost.forward(m, 1, s + t, causal=True) / TERA == pytest.approx(whole, rel=1e-3), name
        assert cost.forward(m, 1, s, 1, causal=True) / TERA == pytest.approx(prompt, rel=5e-3), name
        assert cost.decode(m, 1, range(s + 1, s + t + 1)) / TERA == pytest.approx(completion, rel=1e-3), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_claim_21_generation_does_the_work_of_one_forward_pass(name):
    """All but the logits of the prompt, of which only the last are needed."""
    (m, _), s, t = PUBLISHED[name], 100, 28
    generated = cost.forward(m, 3, s, 3, causal=True) + cost.decode(m, 3, range(s + 1, s + t + 1))
    assert cost.forward(m, 3, s + t, causal=True) - generated == 3 * 2 * (s - 1) * m.width * m.vocab


def test_published_caches_of_one_sequence():
    """In gigabytes; more devices than key/value heads have one each."""
    for name, giga in {"Qwen2.5-7B": 0.528, "Llama-3-70B": 3.02, "Qwen3-30B-A3B": 0.906}.items():
        m = replace(PUBLISHED[name][0], compute="bfloat16")
        whole = cost.cache(m, Layout(), 1, 9216)
        assert whole / 1e9 == pytest.approx(giga, rel=1e-3)
        assert cost.cache(m, Layout(data=2, seq=4, tensor=m.kv_heads), 2, 9216) == whole // (4 * m.kv_heads)
        assert cost.cache(m, Layout(tensor=4 * m.kv_heads), 1, 9216) == whole // m.kv_heads


ROWS, TIME = 16, 32
M = Decoder(vocab=96, width=32, layers=6, heads=8, kv_heads=4, head_dim=8, ffn=80)
MODELS = {
    "plain": M,
    "rich": replace(M, qk_norm="head", qkv_bias=True, tied=True),
    "experts": replace(M, experts=Experts(8, 2, 16)),
    "shared": replace(M, dense=1, experts=Experts(8, 2, 16, shared=24)),
    "exchange": replace(M, experts=Experts(8, 2, 16, dispatch="exchange", capacity=1.5)),
    "latent": replace(M, kv_heads=8, latent=Latent(keys=16, plain=4, turned=4, value=6, queries=20)),
    "both norms": replace(M, norms="both", norm_offset=True, activation="gelu", score_cap=5.0, logit_cap=5.0),
}
TRAINED = [
    ("plain", Layout(), dict(remat="none")),
    ("plain", Layout(data=2, tensor=2), dict(remat="names", microbatches=4)),
    ("plain", Layout(seq=4), dict(context="ring")),
    ("plain", Layout(seq=2, tensor=2), dict(context="ring", remat="none")),
    ("rich", Layout(fsdp=2, seq=2, tensor=2), dict(context="ulysses")),
    ("rich", Layout(fsdp=2, tensor=8), dict(remat="offload", sequence_parallel=True)),
    ("experts", Layout(expert=8), dict(remat="none")),
    ("shared", Layout(tensor=2, expert=4), dict(sequence_parallel=True)),
    ("exchange", Layout(fsdp=2, expert=4), {}),
    ("latent", Layout(fsdp=2, tensor=2), dict(remat="none")),
    ("both norms", Layout(tensor=2), {}),
]


@pytest.mark.parametrize("name, layout, strategy", TRAINED, ids=lambda x: str(x) if isinstance(x, Layout) else None)
def test_the_work_of_an_update_is_what_jax_traces(name, layout, strategy):
    """The gradient of the log-probabilities of one microbatch, on each of as many devices."""
    m, place = MODELS[name], Placement(layout=layout, **strategy)
    lm, mesh = m.build(), layout.abstract()
    ids = jax.ShapeDtypeStruct(
        (ROWS // place.microbatches, TIME), jnp.int32, sharding=NamedSharding(mesh, P(BATCH, None))
    )
    mask = jax.ShapeDtypeStruct(ids.shape, jnp.bool_, sharding=ids.sharding)
    loss = lambda params, tokens, mask: jnp.sum(logprobs(lm, params, tokens, mask, strategy=place)[0])
    with jax.sharding.use_abstract_mesh(mesh):
        traced = flops_of(jax.grad(loss), abstract(lm.table, mesh), Tokens(ids, ids, ids), mask)
    assert cost.train(m, place, ROWS, TIME) * layout.devices == place.microbatches * traced


@pytest.mark.parametrize("name", ["plain", "latent"])
def test_the_work_and_the_caches_of_generation_are_what_jax_traces(name):
    """Of prompts and the logits after them, and of one more token that reads 24 of the cache's slots."""
    m = MODELS[name]
    lm, mesh, place = m.build(), Layout().abstract(), Placement(layout=Layout())

    def born(*shape):
        return jax.ShapeDtypeStruct(
            shape, jnp.int32, sharding=NamedSharding(mesh, P(BATCH, *(None,) * (len(shape) - 1)))
        )

    ids, lengths, token = born(ROWS, TIME), born(ROWS), born(ROWS, 1)
    logits = lambda params, h: lm.project(params)(h[:, -1])
    with jax.sharding.use_abstract_mesh(mesh):
        params = abstract(lm.table, mesh)
        prompts = lambda params, ids, lengths: lm.prefill(params, ids, lengths, place)
        _, cache = jax.eval_shape(prompts, params, ids, lengths)
        begin = lambda *args: logits(args[0], prompts(*args)[0])
        assert flops_of(begin, params, ids, lengths) == cost.forward(m, ROWS, TIME, ROWS)
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) == cost.cache(m, Layout(), ROWS, TIME)
        step = lambda params, *args: logits(params, lm.extend(params, *args, 24)[0])
        assert flops_of(step, params, token, cache, lengths) == cost.decode(m, ROWS, [24])


def test_stored_activations():
    """Of Llama-3-8B in bfloat16: under remat a stream a layer, of which sequence parallelism leaves each device its
    part, and of context parallelism its tokens."""
    m = replace(LLAMA_8B, compute="bfloat16")
    held = lambda rows=1, **strategy: cost.activations(m, Placement(**{"layout": Layout()} | strategy), rows, 8192)
    logits = 2 * 4 * cost.LOGITS
    stream = 8192 * 4096 * 2
    assert held() == 32 * stream + logits
    assert held(remat="names") == 3 * 32 * stream + logits and held(remat="offload") == logits
    assert held(layout=Layout(tensor=8)) - logits == 32 * stream
    assert held(layout=Layout(tensor=8), sequence_parallel=True) - logits == 32 * stream // 8
    assert held(layout=Layout(seq=4)) - logits == 32 * stream // 4
    assert held(rows=8, layout=Layout(data=2), microbatches=4) == held()
    tiled = held(remat="none", layout=Layout(seq=2), context="ring")
    assert tiled - logits == 32 * (4 * 4096 + 2 * 40 * 128 + 3 * 14336) * 2 * 4096
    piped = held(layout=Layout(pipe=4), rows=8, microbatches=8, schedule="1f1b") - logits
    assert piped == (8 + build("1f1b", 4, 8).inbox + 1) * stream
