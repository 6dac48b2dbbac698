"""The devices that a mesh file asks for, configured before JAX first uses any."""

import ctypes
import os
import platform
from pathlib import Path

import jax

from rljax.errors import UserError
from rljax.mesh.file import MeshFile


def configure(mesh: MeshFile) -> None:
    """Points JAX at the file's platform, simulates its CPU devices, and checks real ones against what JAX sees."""
    jax.config.update("jax_platforms", {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}[mesh.platform])
    cache_compilations()
    if mesh.platform == "cpu":
        keep_freed_memory()
        try:
            jax.config.update("jax_num_cpu_devices", mesh.devices)
        except RuntimeError:  # JAX has started; what matters is whether enough devices are there
            pass
    try:
        seen = jax.devices()
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{mesh.path}: platform={mesh.platform!r} but JAX cannot start it: {reason}") from None
    found = f"JAX sees {len(seen)} {seen[0].device_kind} ({seen[0].platform})"
    if seen[0].platform != mesh.platform:
        extra = {"gpu": "; is rljax[cuda] installed?", "tpu": "; is rljax[tpu] installed?"}.get(mesh.platform, "")
        raise UserError(f"{mesh.path}: platform={mesh.platform!r}, but {found}{extra}")
    if mesh.platform == "cpu" and len(seen) < mesh.devices:
        raise UserError(f"{mesh.path}: devices={mesh.devices}, but this process already simulates {len(seen)}")
    if mesh.platform != "cpu" and len(seen) != mesh.devices:
        remedy = f"set devices={len(seen)} and layouts of that product"
        raise UserError(f"{mesh.path}: devices={mesh.devices}, but {found}; {remedy}")


def keep_freed_memory() -> None:
    """Has glibc keep what XLA:CPU frees. By default each step maps and faults in its buffers anew."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for option, value in (
        (-4, 0),
        (-8, 1),
        (-1, 2**31 - 1),
        (-2, 2**28),
    ):  # MMAP_MAX, ARENA_MAX, TRIM_THRESHOLD, TOP_PAD
        libc.mallopt(option, value)


def cache_compilations() -> None:
    """Compiled programs are kept in $JAX_COMPILATION_CACHE_DIR, by default in ~/.cache/rljax; "" turns that off."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(home / "rljax" / platform.machine()))
    jax.config.update("jax_compilation_cache_dir", where or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
