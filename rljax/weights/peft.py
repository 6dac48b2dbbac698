"""Adapters in the format of the PEFT library: `adapter_config.json` and `adapter_model.safetensors` in a directory."""

import json
from math import sqrt
from pathlib import Path

import jax
import numpy as np

from rljax.errors import UserError
from rljax.model.lora import PREFIX, LoRA, adapters
from rljax.model.table import is_tensor
from rljax.weights.config import Config
from rljax.weights.load import Loaded, load
from rljax.weights.names import Naming
from rljax.weights.save import Saved, save
from rljax.weights.source import SafeTensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNSAID = (  # what says nothing of the function that base and adapters compute
    "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "megatron_core", "peft_version",
    "qalora_group_size", "task_type",
)  # fmt: skip
BEGUN = True, False, "gaussian"  # initializations that leave the base as it is


def is_adapter(directory) -> bool:
    return (Path(directory) / CONFIG).is_file()


def base_name(directory) -> str:
    """What the model is called that adapters belong to; "" where that is not said."""
    return _settings(Path(directory) / CONFIG).get("base_model_name_or_path", None) or ""


def _settings(path: Path) -> Config:
    try:
        values = json.loads(path.read_text("utf-8"))
        return Config({key: value for key, value in values.items() if value not in ({}, [])}, str(path))
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON object"
        raise UserError(f"{path} cannot be read: {reason}; give a directory that PEFT saved an adapter to") from None


def read_adapter(directory) -> LoRA:
    """What `adapter_config.json` says. UserError naming an option that is not supported."""
    path = Path(directory) / CONFIG
    config = _settings(path)
    config.only("peft_type", "LORA")
    config.only("bias", "none")
    config.only("init_lora_weights", *BEGUN)
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if isinstance(targets, str):
        raise config.refusal("target_modules", targets, "a list of names")
    if config.get("use_rslora", False):  # scaled by alpha / sqrt(rank): Kalajdzievski 2023, arXiv:2312.03732
        alpha *= sqrt(rank)
    dropout = config.get("lora_dropout", 0.0)
    for key in UNSAID:
        config.get(key, None)
    config.done()
    try:
        return LoRA(rank, float(alpha), tuple(sorted(targets)), float(dropout))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None


def load_adapter(table, directory, naming: Naming, mesh: jax.sharding.Mesh, zero: int, dtype=np.float32) -> Loaded:
    """The adapters of a table, which has those of `read_adapter`, as `load` loads a model; None for the rest.

    `lora.attached` joins them with the parameters of the table without.
    """
    if not (Path(directory) / WEIGHTS).is_file():
        raise UserError(f"{directory} has no {WEIGHTS}; save the adapter in that format, with PEFT 0.7 or newer")
    return load(_alone(table, naming), SafeTensors(directory, WEIGHTS), naming, mesh, zero, dtype)


def export_adapter(
    table, params, lora: LoRA, naming: Naming, directory, base: str | None = None, dtype=np.float32
) -> Saved:
    """Writes the adapters alone of a table and its parameters, as `save` writes a model. `base` is what PEFT finds the
    model by that they belong to. A value head, for which the format has no place, is left out."""
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(lora.targets),
        "task_type": "CAUSAL_LM",
    }
    beside = {CONFIG: json.dumps(config, indent=2) + "\n"}
    own = _alone(table, naming)
    return save(own, adapters(params), naming, directory, dtype, shard_bytes=2**62, single=WEIGHTS, beside=beside)


def _alone(table, naming: Naming):
    """The adapters of a table. UserError where a checkpoint has no matrix of its own for one to be of."""
    own = adapters(table)
    for t in jax.tree.leaves(own, is_leaf=is_tensor):
        module = t.name.removeprefix(PREFIX).rsplit(".", 2)[0]
        if whole := next((whole for whole, parts in naming.fused if module.endswith(parts)), None):
            others = "; add what adapters say to the matrices, and save these"
            raise UserError(f"targets: checkpoints of this family have {module} within {whole}, not on its own{others}")
    return own
