"""Every family of checkpoints computes what transformers computes from the same files: logits, text and gradients."""

import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import P
from tiny import ONE

from rljax.data.rows import prompt_rows
from rljax.errors import UserError
from rljax.generate.decode import generate
from rljax.generate.sampling import Sampling
from rljax.mesh import BATCH, Strategy
from rljax.model.forward import hidden, logprobs
from rljax.model.rope import Linear, Llama3, Yarn
from rljax.run.imported import imported
from rljax.types import Tokens
from rljax.weights import config, families
from rljax.weights.load import load
from rljax.weights.names import stored
from rljax.weights.source import SINGLE, SafeTensors

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.25,
)  # fmt: skip
LATENT = dict(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, num_key_value_heads=4,
              n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1)  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 500000.0}  # fmt: skip
GEMMA = dict(head_dim=12, sliding_window=8, query_pre_attn_scalar=20)
CASES = {  # class, settings
    "llama 2": ("Llama", dict(num_key_value_heads=4)),
    "llama 3.1": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "mistral": ("Mistral", dict(sliding_window=8)),
    "qwen2": ("Qwen2", dict(rope_parameters=YARN)),
    "qwen2, window": ("Qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    "qwen3": ("Qwen3", dict(head_dim=12)),
    "gemma 2": ("Gemma2", GEMMA),
    "gemma 3": (
        "Gemma3Text",
        GEMMA | dict(layer_types=["sliding_attention"] * 3 + ["full_attention"], rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }),
    ),
    "olmo 2": ("Olmo2", {}),
    "phi-3": ("Phi3", dict(sliding_window=8, pad_token_id=0)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, sliding_window=8)),
    "qwen3 moe": (
        "Qwen3Moe",
        dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True, head_dim=12,
             mlp_only_layers=[0]),
    ),
    "deepseek v2": (
        "DeepseekV2",
        LATENT | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=2.0,
                      q_lora_rank=None, n_shared_experts=2),
    ),
    "deepseek v3": (
        "DeepseekV3",
        LATENT | dict(n_group=4, topk_group=2, q_lora_rank=20,
                      rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.0)),
    ),
}  # fmt: skip
LENGTHS = (3, 21, 12)


@cache
def peer(case: str, folder):
    """(transformers' model in float32, the directory that it wrote)."""
    import torch
    import transformers

    kind, settings = CASES[case]
    torch.manual_seed(0)
    name = kind.removesuffix("Text")
    made = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    model = getattr(transformers, f"{name}ForCausalLM")(made).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or key.endswith("bias"):  # which start at 1 or 0: a mistake would not show
                value += 0.3 * torch.randn_like(value)
        for key, value in model.named_buffers():
            if key.endswith("correction_bias"):
                value += 0.2 * torch.randn_like(value)
    where = folder / case.replace(" ", "-")
    model.save_pretrained(where)
    return model, where


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("peers")


@cache
def ours(where):
    """(decoder, its model, parameters on one device)."""
    m = families.read(config.Config(config.read(where)))
    lm, mesh = m.build(), ONE.mesh()
    naming = families.family(config.Config(config.read(where))).naming(m)
    return m, lm, load(lm.table, SafeTensors(where), naming, mesh, 3, np.float32).params


def sequences(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 96, n).tolist() for n in LENGTHS]


def logits_of(model, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def rows(*packed: list[list[int]]) -> Tokens:
    """Rows of sequences, padded at the end."""
    width = max(sum(map(len, row)) for row in packed) + 3
    out = np.zeros((3, len(packed), width), np.int32)
    for b, row in enumerate(packed):
        at = 0
        for segment, ids in enumerate(row, 1):
            out[:, b, at : at + len(ids)] = ids, range(len(ids)), [segment] * len(ids)
            at += len(ids)
    return Tokens(*out)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, folder):
    """At every position: padded, packed, and past the window. 1e-4 of the largest."""
    model, where = peer(case, folder)
    _, lm, params = ours(where)
    a, b, c = sequences()
    tokens = rows([a, b], [c], [b, a])

    @jax.jit
    def run(params, tokens):
        return lm.project(params)(hidden(lm, params, tokens)[0])

    with jax.set_mesh(ONE.mesh()):
        got = jax.device_get(run(params, jax.device_put(tokens, P(BATCH, None))))
    want = {len(ids): logits_of(model, ids) for ids in (a, b, c)}
    for row, order in zip(got, ((a, b), (c,), (b, a)), strict=True):
        expected = np.concatenate([want[len(ids)] for ids in order])
        assert np.abs(row[: len(expected)] - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case, folder):
    """64 tokens after prompts of three lengths, token for token."""
    import torch

    model, where = peer(case, folder)
    _, lm, params = ours(where)
    prompts = sequences(1)
    ids, length, uid = prompt_rows(prompts, range(3), 3, max(LENGTHS))
    run = jax.jit(
        lambda *args: generate(
            lm, *args, jax.random.key(0), 0, Sampling(temperature=0.0), Strategy(), n=1, max_new=64, stop=(), chunk=32
        )  # fmt: skip
    )
    with jax.set_mesh(ONE.mesh()):
        got = jax.device_get(run(params, *tiny.place((ids, length, uid), ONE.mesh())))
    for b, prompt in enumerate(prompts):
        with torch.no_grad():
            want = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None,
                                  pad_token_id=0)[0].tolist()  # fmt: skip
        assert got.tokens.ids[b, : len(want)].tolist() == want


@pytest.mark.parametrize("case", ["llama 3.1", "qwen3", "gemma 3", "mixtral", "deepseek v3"])
def test_gradients_of_the_likelihood_are_those_of_transformers(case, folder):
    import torch

    model, where = peer(case, folder)
    m, lm, params = ours(where)
    ids = sequences()[1]
    tokens = rows([ids])
    mask = (tokens.segments > 0) & (tokens.positions > 4)
    loss = lambda params, tokens, mask: -jnp.sum(logprobs(lm, params, tokens, mask)[0])
    with jax.set_mesh(ONE.mesh()):
        grads = jax.device_get(jax.jit(jax.grad(loss))(params, *jax.device_put((tokens, mask), P(BATCH, None))))
    model.zero_grad()
    logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    (-logp[4:-1].gather(1, torch.tensor(ids[5:])[:, None]).sum()).backward()
    whole = {name: value.grad.numpy() for name, value in model.named_parameters()}
    checked = 0
    leaves = zip(jax.tree.leaves(lm.table, is_leaf=lambda x: hasattr(x, "dims")), jax.tree.leaves(grads), strict=True)
    by_name = {(t.name, t.first): g for t, g in leaves}
    for name, parts in stored(lm.table, families.family_of(m).naming(m)).items():
        if name not in whole or len(parts) > 1 or parts[0][1].pairs:
            continue  # experts are stacked there, and fused or turned rows are tested in test_weights.py
        t, piece = parts[0]
        got = piece.turn(by_name[t.name, t.first][piece.at])
        assert np.abs(got - whole[name]).max() <= 2e-4 * np.abs(whole[name]).max() + 1e-6, name
        checked += 1
    assert checked >= 20


@pytest.mark.parametrize("case", CASES)
def test_settings_are_read_and_written_alike(case, folder):
    """A decoder is written as settings that read as that very decoder, by its own family or an equal one."""
    _, where = peer(case, folder)
    m, *_ = ours(where)
    found = families.family_of(m)
    assert families.read(config.Config(families.written(found, m))) == m
    own = families.family(config.Config(config.read(where)))
    assert families.essence(own.read(config.Config(families.written(own, m)))) == m
    replaced = families.family_of(replace(m, compute="bfloat16"))
    assert replaced is found


def edited(where, **changes):
    values = config.read(where) | changes
    return config.Config({key: value for key, value in values.items() if value != "absent"})


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("llama 2", dict(model_type="mamba"), "model_type='mamba' is not supported"),
        ("llama 2", dict(hidden_act="relu"), 'hidden_act="relu" is not supported for \'llama\': "silu" is'),
        ("llama 2", dict(attention_bias=True), "attention_bias=true"),
        ("llama 2", dict(mlp_bias=True), "mlp_bias=true"),
        ("llama 2", dict(attention_dropout=0.1), "attention_dropout=0.1"),
        ("llama 2", dict(quantization_config={"bits": 4}), "quantization_config="),
        ("llama 2", dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), 'rope_scaling="dynamic"'),
        ("llama 2", dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "knob": 3}), "rope_scaling.knob=3"),
        ("llama 2", dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        ("llama 2", dict(vocab_size="absent"), "lacks 'vocab_size', which 'llama' needs"),
        ("llama 2", dict(vocab_size=None), "lacks 'vocab_size', which 'llama' needs"),
        ("llama 2", dict(hidden_size="576"), 'hidden_size="576" must be an integer'),
        ("llama 2", dict(num_hidden_layers=True), "num_hidden_layers=true must be an integer"),
        ("llama 2", dict(rms_norm_eps="small"), 'rms_norm_eps="small" must be a number'),
        ("llama 2", dict(tie_word_embeddings="no"), 'tie_word_embeddings="no" must be true or false'),
        ("llama 2", dict(rope_scaling="yes"), 'rope_scaling="yes" must be an object'),
        ("llama 2", dict(rope_scaling={"rope_type": "linear"}), "lacks rope_scaling.factor, which 'linear' needs"),
        ("llama 2", dict(rope_scaling={"rope_type": "linear", "factor": "two"}), 'rope_scaling={"rope_type": "linear"'),
        ("llama 2", dict(num_hidden_layers=0), "config.json: layers=0 must be at least 1"),
        ("llama 2", dict(num_key_value_heads=3), "config.json: heads=4 must be a multiple of kv_heads=3"),
        ("llama 2", dict(no_such_option=3), "no_such_option=3 is not supported for 'llama'"),
        ("gemma 2", dict(hidden_activation="gelu"), 'hidden_activation="gelu"'),
        ("gemma 3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=true"),
        ("gemma 3", dict(layer_types=["chunked_attention"] * 4), 'layer_types="chunked_attention"'),
        ("qwen3 moe", dict(mlp_only_layers=[2]), "mlp_only_layers=[2]"),
        ("qwen3 moe", dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
        ("deepseek v3", dict(rope_interleave=False), "rope_interleave=false"),
        ("phi-3", dict(rope_parameters={"rope_type": "longrope"}), 'rope_scaling="longrope"'),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_is_not_computed_here_is_refused_by_name(case, change, message, folder):
    with pytest.raises(UserError) as error:
        families.read(edited(peer(case, folder)[1], **change))
    assert message in str(error.value)


def test_a_tied_head_that_is_another_is_refused(folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    _, where = peer("gemma 2", folder)
    m, *_ = ours(where)
    tensors = load_file(where / SINGLE)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    (tmp_path / "config.json").write_text((where / "config.json").read_text())
    save_file(tensors, tmp_path / SINGLE)
    read = imported(tmp_path, m, ("tokens",), ONE.mesh(), 3).params
    assert np.array_equal(read.embed, head)  # a copy says nothing new
    head[5] += 1
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(UserError, match="row 5 of lm_head.weight is not that of the embedding"):
        imported(tmp_path, m, ("tokens",), ONE.mesh(), 3)


def test_settings_of_older_files_are_read():
    """As files had them before version 5 of transformers."""
    base = dict(
        model_type="llama", **{k: v for k, v in SIZES.items() if k != "initializer_range"}, torch_dtype="bfloat16"
    )
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    m = families.read(config.Config(base | dict(rope_theta=500000.0, rope_scaling=scaling)))
    assert m.rope_theta == 500000.0 and m.rope_scaling == Llama3(8.0, 1.0, 4.0, 32)
    m = families.read(config.Config(base | dict(rope_scaling={"type": "linear", "factor": 2.0})))
    assert m.rope_theta == 10000.0 and m.rope_scaling == Linear(2.0)
    m = families.read(config.Config(base | dict(model_type="qwen2", rope_scaling={"type": "yarn", "factor": 4.0})))
    assert m.rope_scaling == Yarn(4.0, 128, amplitude=0.1 * np.log(4.0) + 1)
    gemma = base | dict(model_type="gemma3_text", rope_theta=1e6, rope_local_base_freq=5e3, sliding_window_pattern=2)
    m = families.read(config.Config(gemma | dict(rope_scaling={"factor": 8.0, "rope_type": "linear"})))
    assert (m.rope_theta, m.window_theta, m.rope_scaling, m.everywhere) == (1e6, 5e3, Linear(8.0), (1, 3))


def test_a_directory_without_settings(tmp_path):
    with pytest.raises(UserError, match="has no config.json"):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json cannot be read"):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="is not a JSON object"):
        config.read(tmp_path)
