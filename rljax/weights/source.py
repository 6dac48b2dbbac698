"""Where stored tensors are read from, slice by slice, and the safetensors files of a Hugging Face directory.

https://github.com/huggingface/safetensors: eight bytes with the length of a JSON header, the header, the numbers.
"""

import json
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from rljax.errors import UserError

# In the library's order, by which a file that it writes has its tensors: later ones come first.
DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I16": np.int16, "U16": np.uint16,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I32": np.int32, "U32": np.uint32, "F32": np.float32,
    "C64": np.complex64, "F64": np.float64, "I64": np.int64, "U64": np.uint64,
}  # fmt: skip
DTYPES = {code: np.dtype(dtype) for code, dtype in DTYPES.items()}
CODES = {dtype: code for code, dtype in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHERS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.safetensors")  # weights, but not to be read here
LIMIT = 10**8  # bytes of a header, as in the library


class Entry(NamedTuple):
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype  # of ml_dtypes for bfloat16 and float8


class Source(Protocol):
    """Tensors by their names in a Hugging Face checkpoint."""

    path: str  # for error messages
    tensors: dict[str, Entry]
    read_bytes: int  # of the files, so far

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """That slice and no more: start, stop and a step above 0 for each dimension. It may be a view of a file."""


class SafeTensors:
    """The tensors of `model.safetensors`, or another file, or of those that `model.safetensors.index.json` names.

    Numbers come from the disk when a slice is copied, and are not checked before. UserError where the headers are not
    what the format demands, or the index not what the headers say.
    """

    def __init__(self, directory, single: str = SINGLE):
        directory = Path(directory)
        self.path, self.read_bytes, self.tensors, self._data = str(directory), 0, {}, {}
        if (directory / single).is_file():
            self._open(directory / single, None)
        elif (directory / INDEX).is_file():
            for file, names in _index(directory).items():
                self._open(directory / file, names)
        else:
            raise _nothing(directory)

    def _open(self, path: Path, names: list[str] | None) -> None:
        """Adds the tensors of a file, or those of its tensors that an index names."""
        data = _map(path)
        found, start = _header(path, data)
        for name in found if names is None else names:
            if name not in found:
                raise UserError(f"{path.with_name(INDEX)}: {name} is not in {path.name}, where the index has it")
            entry, offset = found[name]
            self.tensors[name] = entry
            self._data[name] = np.ndarray(entry.shape, entry.dtype, data, start + offset)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = self._data[name][index]
        self.read_bytes += part.nbytes
        return part


def _index(directory: Path) -> dict[str, list[str]]:
    """File -> the names of its tensors."""
    path, files = directory / INDEX, {}
    try:
        places = json.loads(path.read_bytes())["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} must be JSON with a weight_map from tensors to files; download it again") from None
    for name, file in places:
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{path}: {name} is in {file!r}, which must be the name of a file beside it")
        files.setdefault(file, []).append(name)
    missing = [file for file in files if not (directory / file).is_file()]
    if missing or not files:
        lacks = f"{missing[0]} is missing, one of {len(missing)}" if missing else "it names no file"
        raise UserError(f"{path}: {lacks} (of {len(files)}); download the checkpoint again, whole")
    return files


def _map(path: Path) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: nothing in it
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is empty'}") from None


def _header(path: Path, data: np.ndarray) -> tuple[dict[str, tuple[Entry, int]], int]:
    """Name -> its tensor and where its numbers begin, and where all numbers begin. They must tile what is left."""
    broken = lambda rule: UserError(f"{path} is no intact safetensors file: {rule}; download it again")
    if bytes(data[:8]) == b"version ":
        raise UserError(f"{path} is a pointer of Git LFS, not the file itself; run git lfs pull there")
    size = int.from_bytes(bytes(data[:8]), "little")
    if len(data) < 8 or size > min(LIMIT, len(data) - 8):
        raise broken(f"a header of {size} bytes in a file of {len(data)}")
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        header.pop("__metadata__", None)
        stated = []
        for name, t in header.items():
            begin, end = map(int, t["data_offsets"])
            stated.append((begin, end, name, str(t["dtype"]), tuple(map(int, t["shape"]))))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise broken("its header is not JSON with a dtype, a shape and two data_offsets for each tensor") from None
    found, last = {}, 0
    for begin, end, name, code, shape in sorted(stated):
        if code not in DTYPES:
            raise UserError(f"{path}: {name} has dtype {code!r}, which is not one of {', '.join(DTYPES)}")
        if begin != last or min(shape, default=0) < 0 or end - begin != prod(shape) * DTYPES[code].itemsize:
            rule = f"{name}, {code} {list(shape)}, is at bytes {begin} to {end}, behind others that end at {last}"
            raise broken(rule)
        found[name], last = (Entry(shape, DTYPES[code]), begin), end
    if last != len(data) - 8 - size:
        raise broken(f"its tensors have {last} bytes, and the file has {len(data) - 8 - size} for them")
    return found, 8 + size


def _nothing(directory: Path) -> UserError:
    """What is in place of the files that could be read, and what makes them of it."""
    if not directory.is_dir():
        return UserError(f"{directory} is not a directory; it must be one with {SINGLE} or {INDEX}")
    others = sorted({path.name for pattern in OTHERS for path in directory.glob(pattern)})
    has = f"it has {', '.join(others[:3])}" + (" and others" if others[3:] else "") if others else "nor other weights"
    convert = f"transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(OUT)"
    remedy = f"; convert with {convert}" if any(name.endswith((".bin", ".pt", ".pth")) for name in others) else ""
    return UserError(f"{directory} has no {SINGLE} and no {INDEX}; {has}{remedy}")
