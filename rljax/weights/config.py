"""A config.json, read so that nothing in it is ignored unknowingly."""

import json
from pathlib import Path

from rljax.errors import UserError

# What says nothing of the function that the weights compute: sizes of buffers, initialization, training, serving.
SILENT = {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "_sliding_window_pattern", "architectures",
    "attn_implementation", "auto_map", "aux_loss_alpha", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "classifier_dropout", "dtype", "eos_token_id", "ep_size", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "language", "max_position_embeddings",
    "max_window_layers", "model_type", "num_labels", "num_nextn_predict_layers", "original_max_position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "router_aux_loss_coef", "seq_aux", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache", "use_mla",
}  # fmt: skip
_INTEGERS = """
    first_k_dense_replace head_dim hidden_size intermediate_size kv_lora_rank max_position_embeddings max_window_layers
    moe_intermediate_size n_group n_routed_experts n_shared_experts num_attention_heads num_experts num_experts_per_tok
    num_hidden_layers num_key_value_heads num_local_experts q_lora_rank qk_nope_head_dim qk_rope_head_dim r
    sliding_window topk_group v_head_dim vocab_size
"""
_NUMBERS = """
    attn_logit_softcapping final_logit_softcapping lora_alpha lora_dropout query_pre_attn_scalar rms_norm_eps
    rope_local_base_freq rope_theta routed_scaling_factor
"""
_SWITCHES = "norm_topk_prob tie_word_embeddings use_rslora use_sliding_window"
KINDS = {  # of settings, where they are said at all
    **dict.fromkeys(_INTEGERS.split(), ((int,), "an integer")),
    **dict.fromkeys(_NUMBERS.split(), ((int, float), "a number")),
    **dict.fromkeys(_SWITCHES.split(), ((bool,), "true or false")),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ((dict,), "an object")),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), ((list,), "a list")),
}
ABSENT = object()


class Config:
    """The settings of a checkpoint. What was not asked for is found at the end, and refused."""

    def __init__(self, values: dict, where: str = "config.json"):
        self.values, self.where, self.asked = values, where, set()

    def get(self, key: str, default=ABSENT):
        """A setting; UserError where it must be there and is not, or is of another type."""
        self.asked.add(key)
        value = self.values.get(key, default)
        if value is ABSENT or value is None and default is ABSENT:
            raise UserError(f"{self.where} lacks {key!r}, which {self.kind} needs")
        types, named = KINDS.get(key, ((type(value),), ""))
        if value is not None and type(value) not in types:
            raise UserError(f"{self.where}: {key}={json.dumps(value)[:60]} must be {named}")
        return value

    def only(self, key: str, *known) -> None:
        """UserError where a setting is there and none of those that are computed here."""
        if (value := self.get(key, known[0])) not in known:
            raise self.refusal(key, value, " or ".join(json.dumps(each) for each in known))

    def refusal(self, key: str, value, known: str) -> UserError:
        return UserError(f"{self.where}: {key}={json.dumps(value)} is not supported for {self.kind}: {known} is")

    @property
    def kind(self) -> str:
        return repr(self.values.get("model_type", "a model"))

    def done(self) -> None:
        """UserError where a setting was not asked for, unless it says nothing, or nothing is what it says."""
        for key, value in self.values.items():
            if key not in self.asked and key not in SILENT and value not in (None, False):
                rule = "nobody here knows what it does to the model; remove it if it does nothing"
                raise UserError(
                    f"{self.where}: {key}={json.dumps(value)[:60]} is not supported for {self.kind}: {rule}"
                )


def read(directory: Path) -> dict:
    """What a directory's config.json says."""
    path = Path(directory) / "config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory} has no config.json: give a directory in Hugging Face format") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object")
    return values
