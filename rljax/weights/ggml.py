"""Numbers as GGML stores them: plain, or quantized in blocks that share a scale (llama.cpp, ggml-common.h)."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Format(NamedTuple):
    """How the numbers of a tensor are stored: in blocks along its last dimension."""

    name: str
    block: int  # numbers in a block
    size: int  # bytes of a block
    dtype: np.dtype  # of the numbers read; quantized ones are float32, which is what llama.cpp makes of them
    decode: Callable  # uint8 [... size] -> dtype [... block]


# Of every number that a file may give; those without a Format below are refused by these names.
NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def _plain(name: str, dtype) -> Format:
    dtype = np.dtype(dtype)
    return Format(name, 1, dtype.itemsize, dtype, lambda raw: raw.view(dtype))


def _quantized(name: str, size: int, decode: Callable) -> Format:
    return Format(name, 32, size, np.dtype(np.float32), decode)


def _scale(raw: np.ndarray, at: int) -> np.ndarray:
    """float32 [... 1]: the half-precision number at a byte of each block."""
    return raw[..., at : at + 2].view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """float32 [... 32]: of 16 bytes, first the lower halves and then the upper ones, 0 to 15."""
    return np.concatenate((raw & 15, raw >> 4), -1).astype(np.float32)


FORMATS = {
    format.name: format
    for format in (
        _plain("F32", "<f4"),
        _plain("F16", "<f2"),
        _plain("BF16", ml_dtypes.bfloat16),
        _quantized("Q8_0", 34, lambda raw: _scale(raw, 0) * raw[..., 2:].view(np.int8)),
        _quantized("Q4_0", 18, lambda raw: _scale(raw, 0) * (_nibbles(raw[..., 2:]) - 8)),
        _quantized("Q4_1", 20, lambda raw: _scale(raw, 0) * _nibbles(raw[..., 4:]) + _scale(raw, 2)),
    )
}
