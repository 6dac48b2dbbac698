"""Families of checkpoints: what their config.json says of a decoder, and what a decoder says in theirs.

Defaults are those of transformers, which writes settings out only since its version 5.
"""

from collections.abc import Callable
from dataclasses import replace
from math import log, sqrt
from typing import NamedTuple

from rljax.errors import UserError, nearest
from rljax.model.decoder import Decoder
from rljax.model.latent import Latent
from rljax.model.moe import Experts
from rljax.model.rope import magnitude
from rljax.weights.config import Config
from rljax.weights.names import LLAMA, MIXTRAL, PHI3, Naming, deepseek
from rljax.weights.scaling import rope, rope_written

GELU = "gelu_pytorch_tanh"


class Family(NamedTuple):
    """How one kind of checkpoint tells its settings, and stores its tensors."""

    architecture: str
    model_type: str
    read: Callable[[Config], Decoder]
    write: Callable[[Decoder], dict]  # what is peculiar to the family; see `written`
    naming: Callable[[Decoder], Naming] = lambda m: LLAMA


def read(config: Config) -> Decoder:
    """The decoder that a config.json describes. UserError naming what in it is not supported."""
    try:
        m = family(config).read(config)
    except (ValueError, ZeroDivisionError) as error:  # of settings that are none of a model
        raise UserError(f"{config.where}: {error}") from None
    config.only("attention_dropout", 0.0)
    config.only("quantization_config", None)
    config.done()
    return m


def family(config: Config) -> Family:
    """By `model_type`."""
    kind = config.get("model_type", None)
    known = {each.model_type: each for each in FAMILIES}
    if kind not in known:
        raise UserError(f"{config.where}: model_type={kind!r} is not supported; {nearest(str(kind), known)}")
    return known[kind]


def family_of(m: Decoder) -> Family:
    """The first family whose config.json can say all that a decoder is. UserError where none can."""
    for each in FAMILIES:
        try:
            if essence(each.read(Config(written(each, m)))) == essence(m):
                return each
        except (UserError, ValueError, TypeError, AttributeError):
            continue
    raise UserError(f"no family of Hugging Face checkpoints has a model with these options: {m}")


def essence(m: Decoder) -> Decoder:
    """A decoder without what concerns how it is computed or trained."""
    e = m.experts and replace(
        m.experts, capacity=None, dispatch="gather", balance=0.0, z=0.0, replay=False,
        bias_rate=None if m.experts.bias_rate is None else 0.0,
    )  # fmt: skip
    return replace(m, compute="float32", attention="auto", experts=e)


def written(f: Family, m: Decoder) -> dict:
    """config.json of a decoder, but for tokens and lengths."""
    return {
        "architectures": [f.architecture],
        "model_type": f.model_type,
        "vocab_size": m.vocab,
        "hidden_size": m.width,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "intermediate_size": m.ffn,
        "hidden_act": {"silu": "silu", "gelu": GELU}[m.activation],
        "rms_norm_eps": m.norm_eps,
        "tie_word_embeddings": m.tied,
        "rope_theta": m.rope_theta,
        "rope_scaling": rope_written(m),
        "attention_bias": False,
        "attention_dropout": 0.0,
        **f.write(m),
    }


def _decoder(c: Config, eps: float = 1e-6, tied: bool = False, theta: float = 10_000.0, **options) -> Decoder:
    """What all families say alike. `options` of Decoder come before what is read."""
    heads, width = c.get("num_attention_heads"), c.get("hidden_size")
    base, scaling = options.pop("rope", None) or rope(c, theta)
    if "activation" not in options:
        c.only("hidden_act", "silu")
    c.only("attention_bias", False)
    return Decoder(
        **dict(
            vocab=c.get("vocab_size"),
            width=width,
            layers=c.get("num_hidden_layers"),
            heads=heads,
            kv_heads=c.get("num_key_value_heads", None) or heads,
            head_dim=c.get("head_dim", None) or width // heads,
            ffn=c.get("intermediate_size"),
            rope_theta=base,
            rope_scaling=scaling,
            norm_eps=c.get("rms_norm_eps", eps),
            tied=c.get("tie_word_embeddings", tied),
        )
        | options
    )


def _llama(c: Config) -> Decoder:
    c.only("mlp_bias", False)
    return _decoder(c)


def _mistral(c: Config) -> Decoder:
    return _decoder(c, window=c.get("sliding_window", 4096))


def _qwen2(c: Config, **options) -> Decoder:
    if not c.get("use_sliding_window", False):
        c.get("sliding_window", None)
        c.get("layer_types", None)
        return _decoder(c, **options)
    layers, first = c.get("num_hidden_layers"), c.get("max_window_layers", 28)
    everywhere = tuple(range(min(first, layers))) if "layer_types" not in c.values else _everywhere(c, ())
    return _decoder(c, window=c.get("sliding_window", 4096), everywhere=everywhere, **options)


def _qwen3(c: Config, **options) -> Decoder:
    return _qwen2(c, qk_norm="head", **{"head_dim": c.get("head_dim", 128)} | options)


def _everywhere(c: Config, default: tuple[int, ...]) -> tuple[int, ...]:
    """The layers that see everything."""
    kinds = c.get("layer_types", None)
    if kinds is None:
        return default
    known = ("full_attention", "sliding_attention")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise c.refusal("layer_types", unknown[0], " or ".join(known))
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")


def _gemma(c: Config, **options) -> Decoder:
    """What versions 2 and 3 have in common."""
    activation = c.get("hidden_activation", None) or c.get("hidden_act", GELU)
    if activation != GELU:
        raise c.refusal("hidden_activation", activation, GELU)
    c.get("hidden_act", None)
    c.only("use_bidirectional_attention", None, False)
    width, head = c.get("hidden_size"), c.get("head_dim", 256)
    scalar = c.get("query_pre_attn_scalar", 256)
    return _decoder(
        c, tied=True, norms="both", norm_offset=True, activation="gelu", embed_scale=sqrt(width), head_dim=head,
        query_scale=None if scalar == head else scalar**-0.5, window=c.get("sliding_window", 4096), **options,
    )  # fmt: skip


def _gemma2(c: Config) -> Decoder:
    layers = c.get("num_hidden_layers")
    caps = dict(score_cap=c.get("attn_logit_softcapping", 50.0), logit_cap=c.get("final_logit_softcapping", 30.0))
    return _gemma(c, everywhere=_everywhere(c, tuple(range(1, layers, 2))), **caps)


def _gemma3(c: Config) -> Decoder:
    layers, every = c.get("num_hidden_layers"), c.get("sliding_window_pattern", 6)
    caps = dict(score_cap=c.get("attn_logit_softcapping", None), logit_cap=c.get("final_logit_softcapping", None))
    near = (c.get("rope_parameters", None) or {}).get("sliding_attention") or {}
    near_theta = c.get("rope_local_base_freq", 10_000.0)
    if near.get("rope_type", "default") != "default":
        raise c.refusal("rope_parameters.sliding_attention", near, "an unscaled one")
    return _gemma(
        c, qk_norm="head", everywhere=_everywhere(c, tuple(range(every - 1, layers, every))),
        rope=rope(c, 1_000_000.0, "full_attention"),
        window_theta=float(near.get("rope_theta") or near_theta), **caps,
    )  # fmt: skip


def _gemma_written(m: Decoder) -> dict:
    kinds = ["sliding_attention" if near else "full_attention" for near in m.near]
    scalar = m.head_dim if m.query_scale is None else round(m.query_scale**-2, 9)
    return {
        "hidden_activation": GELU, "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "sliding_window": m.window, "layer_types": kinds, "attn_logit_softcapping": m.score_cap,
        "final_logit_softcapping": m.logit_cap,
    }  # fmt: skip


def _gemma3_written(m: Decoder) -> dict:
    far = {"rope_theta": m.rope_theta, **(rope_written(m) or {"rope_type": "default"})}
    near = {"rope_theta": m.window_theta, "rope_type": "default"}
    new = {"rope_parameters": {"full_attention": far, "sliding_attention": near}}
    return _gemma_written(m) | {"rope_local_base_freq": m.window_theta} | new


def _qwen_written(m: Decoder) -> dict:
    kinds = ["sliding_attention" if near else "full_attention" for near in m.near]
    return {"use_sliding_window": m.window is not None, "sliding_window": m.window, "layer_types": kinds}


def _olmo2(c: Config) -> Decoder:
    return _decoder(c, eps=1e-5, norms="post", qk_norm="all")


def _phi3(c: Config) -> Decoder:
    for name in ("resid_pdrop", "embd_pdrop"):
        c.only(name, 0.0)
    return _decoder(c, eps=1e-5, window=c.get("sliding_window", None))


def _mixtral(c: Config) -> Decoder:
    c.only("router_jitter_noise", 0.0)
    experts = Experts(c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2), c.get("intermediate_size"))
    return _decoder(c, eps=1e-5, theta=1e6, window=c.get("sliding_window", None), experts=experts)


def _mixtral_written(m: Decoder) -> dict:
    e = m.experts
    return {"num_local_experts": e.count, "num_experts_per_tok": e.top_k, "intermediate_size": e.width,
            "sliding_window": m.window}  # fmt: skip


def _qwen3_moe(c: Config) -> Decoder:
    c.only("decoder_sparse_step", 1)
    dense = c.get("mlp_only_layers", None) or []
    if [*dense] != [*range(len(dense))]:
        raise c.refusal("mlp_only_layers", dense, "only the first layers")
    count = c.get("num_experts", None) or c.get("num_local_experts", 128)
    c.get("num_local_experts", None)
    width, normalize = c.get("moe_intermediate_size", 768), c.get("norm_topk_prob", False)
    experts = Experts(count, c.get("num_experts_per_tok", 8), width, normalize=normalize)
    head = c.get("head_dim", None) or c.get("hidden_size") // c.get("num_attention_heads")
    return _qwen3(c, head_dim=head, experts=experts, dense=len(dense))


def _qwen3_moe_written(m: Decoder) -> dict:
    e = m.experts
    return _qwen_written(m) | {
        "num_experts": e.count, "num_experts_per_tok": e.top_k, "moe_intermediate_size": e.width,
        "norm_topk_prob": e.normalize, "decoder_sparse_step": 1, "mlp_only_layers": [*range(m.dense)],
    }  # fmt: skip


def _deepseek(c: Config, **routing) -> Decoder:
    """What versions 2 and 3 have in common: latent attention, and experts that all tokens share."""
    c.only("rms_norm_eps", 1e-6)
    c.only("moe_layer_freq", 1)
    c.only("mlp_bias", False)
    turned, plain, dense = c.get("qk_rope_head_dim"), c.get("qk_nope_head_dim"), c.get("first_k_dense_replace", 0)
    latent = Latent(c.get("kv_lora_rank"), plain, turned, c.get("v_head_dim"), c.get("q_lora_rank", None) or 0)
    for derived in ("head_dim", "qk_head_dim"):
        c.get(derived, None)
    width = c.get("moe_intermediate_size")
    experts = Experts(
        c.get("n_routed_experts"), c.get("num_experts_per_tok"), width, shared=width * (c.get("n_shared_experts") or 0),
        scale=c.get("routed_scaling_factor", 1.0), **routing,
    )  # fmt: skip
    theta, scaling = rope(c)
    every = (c.get("rope_parameters", None) or c.get("rope_scaling", None) or {}).get("mscale_all_dim")
    scale = magnitude(scaling.factor, every) ** 2 / sqrt(plain + turned) if scaling and every else None
    return _decoder(
        c,
        rope=(theta, scaling),
        latent=latent,
        head_dim=plain + turned,
        query_scale=scale,
        experts=experts,
        dense=dense,
    )


def _deepseek_v2(c: Config) -> Decoder:
    c.only("scoring_func", "softmax")
    c.only("norm_topk_prob", False)
    method = c.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise c.refusal("topk_method", method, "greedy or group_limited_greedy")
    groups, best = c.get("n_group", None), c.get("topk_group", None)
    grouped = dict(groups=groups, top_groups=best, group_by=1) if method != "greedy" else {}
    return _deepseek(c, normalize=False, **grouped)


def _deepseek_v3(c: Config) -> Decoder:
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    c.only("rope_interleave", True)
    return _deepseek(
        c, score="sigmoid", normalize=c.get("norm_topk_prob", True), groups=c.get("n_group", 8) or 1,
        top_groups=c.get("topk_group", 4) or 1, bias_rate=0.0,
    )  # fmt: skip


def _deepseek_written(m: Decoder) -> dict:
    l, e = m.latent, m.experts
    scaling = rope_written(m)
    if scaling and m.query_scale is not None:
        every = (sqrt(m.query_scale * sqrt(m.head_dim)) - 1) / (0.1 * log(m.rope_scaling.factor))
        scaling["mscale_all_dim"] = round(every, 6)
    shared = e.shared // e.width
    return {
        "rope_scaling": scaling, "head_dim": l.turned, "kv_lora_rank": l.keys, "q_lora_rank": l.queries or None,
        "qk_nope_head_dim": l.plain, "qk_rope_head_dim": l.turned, "v_head_dim": l.value,
        "n_routed_experts": e.count, "num_experts_per_tok": e.top_k, "moe_intermediate_size": e.width,
        "n_shared_experts": shared, "routed_scaling_factor": e.scale, "norm_topk_prob": e.normalize,
        "n_group": e.groups, "topk_group": e.top_groups, "first_k_dense_replace": m.dense,
    }  # fmt: skip


def _deepseek_v2_written(m: Decoder) -> dict:
    method = "greedy" if m.experts.groups == 1 else "group_limited_greedy"
    return _deepseek_written(m) | {"topk_method": method}


def _deepseek_naming(m: Decoder) -> Naming:
    return deepseek(m.layers, m.latent.keys, m.latent.plain, m.latent.turned)


def _windowed(m: Decoder) -> dict:
    return {"sliding_window": m.window}


FAMILIES = (
    Family("LlamaForCausalLM", "llama", _llama, lambda m: {"mlp_bias": False}),
    Family("MistralForCausalLM", "mistral", _mistral, _windowed),
    Family("Qwen2ForCausalLM", "qwen2", lambda c: _qwen2(c, qkv_bias=True), _qwen_written),
    Family("Qwen3ForCausalLM", "qwen3", _qwen3, _qwen_written),
    Family("Gemma2ForCausalLM", "gemma2", _gemma2, _gemma_written),
    Family("Gemma3ForCausalLM", "gemma3_text", _gemma3, _gemma3_written),
    Family("Olmo2ForCausalLM", "olmo2", _olmo2, lambda m: {}),
    Family("Phi3ForCausalLM", "phi3", _phi3, _windowed, lambda m: PHI3),
    Family("MixtralForCausalLM", "mixtral", _mixtral, _mixtral_written, lambda m: MIXTRAL),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, _qwen3_moe_written),
    Family("DeepseekV2ForCausalLM", "deepseek_v2", _deepseek_v2, _deepseek_v2_written, _deepseek_naming),
    Family("DeepseekV3ForCausalLM", "deepseek_v3", _deepseek_v3, _deepseek_written, _deepseek_naming),
)
