"""How a config.json says the base of rotary embedding and what stretches it, and how it is said there."""

import json

from rljax.errors import UserError
from rljax.model.decoder import Decoder
from rljax.model.rope import Linear, Llama3, Yarn, magnitude
from rljax.weights.config import Config


def rope(c: Config, theta: float = 10_000.0, layers: str | None = None):
    """Base and scaling; of version 5's settings for each kind of layer, those of `layers`."""
    new, old, old_theta = c.get("rope_parameters", None), c.get("rope_scaling", None), c.get("rope_theta", None)
    found = new if new and layers is None else (new or {}).get(layers)
    found = dict(found or {}) | dict(old or {})
    theta = float(found.pop("rope_theta", None) or old_theta or theta)
    kind = found.pop("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    if kind not in SCALINGS:
        raise c.refusal("rope_scaling", kind, ", ".join(SCALINGS))
    partial = found.pop("partial_rotary_factor", c.get("partial_rotary_factor", None))
    if partial not in (None, 1):
        raise c.refusal("partial_rotary_factor", partial, "1.0")
    try:
        scaling = SCALINGS[kind](c, found)
    except KeyError as lacking:
        raise UserError(f"{c.where} lacks rope_scaling.{lacking.args[0]}, which {kind!r} needs") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{c.where}: rope_scaling={json.dumps(old or new)}: {error}") from None
    if found:
        key, value = next(iter(found.items()))
        raise c.refusal(f"rope_scaling.{key}", value, "nothing")
    return theta, scaling


def _llama3(c: Config, s: dict) -> Llama3:
    low, high = s.pop("low_freq_factor"), s.pop("high_freq_factor")
    return Llama3(s.pop("factor"), low, high, s.pop("original_max_position_embeddings"))


def _yarn(c: Config, s: dict) -> Yarn:
    """With `mscale` as DeepSeek has it, or an amplitude that follows from the factor."""
    original = s.pop("original_max_position_embeddings", None) or c.get("max_position_embeddings")
    factor = s.pop("factor")
    mscale, every, amplitude = s.pop("mscale", None), s.pop("mscale_all_dim", None), s.pop("attention_factor", None)
    if amplitude is None:
        amplitude = magnitude(factor, mscale) / magnitude(factor, every) if mscale and every else magnitude(factor)
    fast, slow = s.pop("beta_fast", None) or 32, s.pop("beta_slow", None) or 1
    return Yarn(factor, original, float(fast), float(slow), amplitude, s.pop("truncate", True))


SCALINGS = {
    "default": lambda c, s: None,
    "linear": lambda c, s: Linear(s.pop("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
}


def rope_written(m: Decoder) -> dict | None:
    """`rope_scaling` of config.json."""
    s = m.rope_scaling
    match s:
        case None:
            return None
        case Linear():
            return {"rope_type": "linear", "factor": s.factor}
        case Llama3():
            ends = {"low_freq_factor": s.low, "high_freq_factor": s.high}
            return {"rope_type": "llama3", "factor": s.factor, **ends, "original_max_position_embeddings": s.original}
        case Yarn():
            ends = {"beta_fast": s.fast, "beta_slow": s.slow, "truncate": s.rounded, "attention_factor": s.amplitude}
            return {"rope_type": "yarn", "factor": s.factor, "original_max_position_embeddings": s.original, **ends}
