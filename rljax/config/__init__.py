"""Experiments as values: loaded from a Python file, overridden field by field, checked, written as JSON and read back.

Generic over frozen dataclasses: it knows neither JAX nor what a run consists of.
"""

from rljax.config.experiment import load_experiment
from rljax.config.overrides import override, validate
from rljax.config.values import from_json, to_json

__all__ = ["from_json", "load_experiment", "override", "to_json", "validate"]
