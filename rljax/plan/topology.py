"""Chips that are not there: their compilers run on any machine, and tell what a program will need of them.

A process that compiles for chips has no devices but the CPU, so commands and tests start one of its own: `apart`.
"""

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec

import jax
from jax.experimental import topologies

from rljax.errors import RunFailed, UserError, nearest
from rljax.plan.hlo import collectives, traffic

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPUS = {"h100": 8}  # by node; targets/*.txtpb holds what XLA has to know of each
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is not compiled warns of nothing
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may compile, or hold real chips
    "TPU_SKIP_MDS_QUERY": "1",  # this is no cloud machine to ask about its chips
    "TPU_STDERR_LOG_LEVEL": "1",  # libtpu keeps its warnings in files
    "TPU_LOG_DIR": "disabled",
}


def topology(name: str) -> list[jax.Device]:
    """Devices to compile for: "v5e:2x4" are 8 TPUs of a torus 2 × 4, "h100:16" are 16 GPUs in nodes of 8."""
    chip, _, shape = name.partition(":")
    if chip not in TPUS and chip not in GPUS:
        raise UserError(f"{name}: chip {chip!r} is not known: {nearest(chip, [*TPUS, *GPUS])}")
    if not re.fullmatch(r"\d+(x\d+)*" if chip in TPUS else r"\d+", shape):
        raise UserError(f"{name}: write CHIP:SHAPE for TPUs and CHIP:COUNT for GPUs, such as v5e:2x4 and h100:8")
    if os.environ.get("JAX_PLATFORMS") != "cpu" and jax.config.jax_platforms != "cpu":
        raise UserError(f"{name}: compile for absent chips in a process with JAX_PLATFORMS=cpu")
    try:
        return _tpus(name) if chip in TPUS else _gpus(chip, int(shape))
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"{name}: {str(error).splitlines()[0]}") from None


def _tpus(name: str) -> list[jax.Device]:
    if not (find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
        raise UserError(f"{name}: needs libtpu, the compiler for TPUs: pip install rljax[compile]")
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def _gpus(chip: str, count: int) -> list[jax.Device]:
    node = min(count, GPUS[chip])
    if count < 1 or count % node:
        raise UserError(f"{chip}:{count}: must be at most {GPUS[chip]} GPUs, or whole nodes of {GPUS[chip]}")
    if not find_spec("jax_cuda12_plugin"):
        raise UserError(f"{chip}:{count}: needs jax-cuda12-plugin, the compiler for GPUs: pip install rljax[compile]")
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=chip,
        target_config=files("rljax.plan").joinpath(f"targets/{chip}.txtpb").read_text(),
        topology=f"{count // node}x1x{node}",  # nodes × processes × GPUs
    ).devices


def report(compiled) -> dict:
    """What a compiled program needs of each device: bytes, and collectives by kind with the bytes they send.

    XLA:CPU reports a peak that leaves temporaries out, so the peak is at least arguments, temporaries and results.
    """
    memory, found = compiled.memory_analysis(), collectives(compiled.as_text())
    held = dict(
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        alias=memory.alias_size_in_bytes,  # outputs that take the place of arguments
    )
    least = held["arguments"] + held["temporary"] + held["outputs"] - held["alias"]
    return {
        "bytes": held | {"peak": max(memory.peak_memory_in_bytes, least)},
        "collectives": {kind: each._asdict() for kind, each in traffic(found).items() if each.count},
        "exact": all(c.exact for c in found),
    }


def apart(*words: str, timeout: float | None = None) -> dict:
    """Runs `python WORDS` where `topology` works: the JSON in its last line, and what XLA had to rematerialize.

    "rematerialized" are the compiler's warnings of a resharding that it could only do by making the whole array on
    every device.
    """
    environment = os.environ | ENVIRONMENT
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        errors = re.findall(r"^[\w.]*(?:Error|Exception|Failed)\b.*$", done.stderr, re.M)
        raise RunFailed((errors or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1]) | {"rematerialized": rematerialized(done.stderr)}


def rematerialized(log: str) -> list[str]:
    """The lines of a compiler's log on involuntary full rematerialization."""
    return [line for line in log.splitlines() if "nvoluntary full rematerialization" in line]
