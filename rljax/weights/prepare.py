"""A directory in Hugging Face format, made once of a GGUF file."""

import json
from math import prod
from pathlib import Path

from rljax.errors import UserError
from rljax.weights.gguf import Gguf
from rljax.weights.save import RANK, header, new_folder
from rljax.weights.source import SINGLE

CHUNK = 2**24  # bytes, about, that are dequantized and written at a time


def prepare(path, directory) -> Path:
    """The directory, with the model, tokenizer and chat template of the GGUF file at `path`.

    Where it is there already, nothing is done; a UserError if it is of another model. It appears whole or not at all.
    Weights are exact: float16 and bfloat16 stay so, and quantized ones are float32, as the sum of a scaled 4-bit number
    and an offset has more bits than a 16-bit one holds.
    """
    gguf, directory = Gguf(path), Path(directory)
    files = {"config.json": json.dumps(gguf.config(), indent=2) + "\n", **gguf.tokenizer_files()}
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        return _made(gguf.path, directory, files)
    try:
        with new_folder(directory) as partial:
            for name, content in files.items():
                (partial / name).write_text(content, "utf-8")
            _write(gguf, partial / SINGLE)
    except OSError as error:
        if directory.is_dir() and any(directory.iterdir()):  # another process was first
            return _made(gguf.path, directory, files)
        raise UserError(f"{directory} cannot be written: {error.strerror}") from None
    return directory


def _made(path: str, directory: Path, files: dict[str, str]) -> Path:
    """The directory, if it is what `prepare` makes of a file."""
    lacking = [name for name in (*files, SINGLE) if not (directory / name).is_file()]
    if lacking:
        raise UserError(f"{directory} is there, but without {', '.join(lacking)}; remove it, or name another directory")
    if (directory / "config.json").read_text("utf-8") != files["config.json"]:
        raise UserError(f"{directory}/config.json is not that of {path}; remove it, or name another directory")
    return directory


def _write(source: Gguf, path: Path) -> None:
    """A safetensors file of all tensors, in the order that the library has: wide numbers first."""
    tensors = dict(sorted(source.tensors.items(), key=lambda item: (-RANK[item[1].dtype], item[0])))
    with path.open("wb") as file:
        file.write(header(tensors))
        for name, (shape, dtype) in tensors.items():
            rows = max(1, CHUNK // (prod(shape[1:]) * dtype.itemsize))
            for row in range(0, shape[0], rows):
                index = slice(row, row + rows), *[slice(None)] * (len(shape) - 1)
                file.write(source.read(name, index).tobytes())
