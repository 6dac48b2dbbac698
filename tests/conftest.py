"""A strict laboratory: simulated devices, no silent broadcasting, warnings are errors, compiles are kept."""

import gc
import os
from pathlib import Path

FLAGS = {
    "--xla_cpu_collective_call_terminate_timeout_seconds": "120",  # two busy cores may be slow to gather 8 devices
    "--xla_backend_optimization_level": "0",  # of LLVM alone: halves compile time, sharding and fusion stay the same
}
stated = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([stated, *(f"{k}={v}" for k, v in FLAGS.items() if k not in stated)]).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 32)  # a mesh takes the first n
jax.config.update("jax_numpy_rank_promotion", "raise")
if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

import tiny  # noqa: E402
from trial import BUILT, folder, here  # noqa: E402, F401


def pytest_collection_finish():
    """What was imported and collected stays, and tracing makes many objects: not to look at them all so often saves a
    fifth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", params=tiny.DENSE)
def model(request) -> str:
    """Name of a tiny dense model: each law holds for both."""
    return request.param


MAPS = 40_000  # memory maps of a process, of the 65530 that Linux allows it: with more, XLA crashes
SOMETIMES = 10  # so many tests between two counts


@pytest.fixture(scope="module", autouse=True)
def programs(request):
    """Forgets what a module compiled: a program of XLA:CPU has hundreds of memory maps."""
    yield
    forget(request.module)


@pytest.fixture(autouse=True)
def room(request, ran=[0]):  # noqa: B006
    """Forgets what a module compiled so far, where there is hardly room for more."""
    yield
    ran[0] += 1
    maps = Path("/proc/self/maps")
    if ran[0] % SOMETIMES == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        forget(request.module)


def forget(module) -> None:
    for each in (module, tiny):
        for value in vars(each).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    BUILT.clear()
    jax.clear_caches()
    gc.collect()
