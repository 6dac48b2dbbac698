"""GGUF files (version 3) of the Llama family: a source of tensors by their Hugging Face names, and their settings.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only what is asked for is read and dequantized. What a file
holds and the import would lose (rope scaling, experts, biases, other architectures) is refused by name.
"""

import struct
from math import prod
from typing import NamedTuple

import numpy as np

from rljax.errors import UserError, nearest
from rljax.weights import gguf_tokenizer
from rljax.weights.ggml import FORMATS, NAMES, Format
from rljax.weights.source import Entry

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # value type -> code of `struct`
STRING, ARRAY = 8, 9

# Name of a tensor, in a block or alone -> name in a Hugging Face checkpoint, and its dimensions: V vocabulary, D width,
# Q and K the queries and keys of all heads, F feed-forward.
BLOCK = {
    "attn_norm": ("input_layernorm", "D"),
    "attn_q": ("self_attn.q_proj", "Q D"),
    "attn_k": ("self_attn.k_proj", "K D"),
    "attn_v": ("self_attn.v_proj", "K D"),
    "attn_output": ("self_attn.o_proj", "D Q"),
    "ffn_norm": ("post_attention_layernorm", "D"),
    "ffn_gate": ("mlp.gate_proj", "F D"),
    "ffn_up": ("mlp.up_proj", "F D"),
    "ffn_down": ("mlp.down_proj", "D F"),
}
ALONE = {
    "token_embd": ("model.embed_tokens", "V D"),
    "output_norm": ("model.norm", "D"),
    "output": ("lm_head", "V D"),  # absent where embeddings are tied
}

# Settings of an architecture that are understood. Any other is refused, as the model computes something else by it.
SETTINGS = (
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
)  # fmt: skip


class Stored(NamedTuple):
    """A tensor in the file."""

    shape: tuple[int, ...]
    format: Format
    start: int  # byte of the file
    heads: int | None = None  # whose rows are permuted in each of so many heads

    @property
    def blocks(self) -> tuple[int, ...]:
        """The shape of its bytes, with blocks and the bytes of one as the last dimensions."""
        return *self.shape[:-1], self.shape[-1] // self.format.block, self.format.size


class Gguf:
    """The tensors of a file, and what goes with them in a Hugging Face directory. UserError names what is wrong.

    llama.cpp rotates neighboring pairs of a head where Hugging Face rotates its halves, so its converter permutes the
    rows of queries and keys; here they are as they were.
    """

    def __init__(self, path):
        self.path, self.read_bytes = str(path), 0
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # ValueError: nothing in it
            raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is empty'}") from None
        self.metadata, stored = _contents(self.path, self._data)
        self._settings = _settings(self.path, self.metadata, stored)
        self._stored = _named(self.path, self._settings, stored)
        self.tensors = {name: Entry(s.shape, s.format.dtype) for name, s in self._stored.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor, of steps above 0; bytes are read for the rows and the blocks of columns that it is in.

        Numbers that were not quantized may be a read-only view of the file.
        """
        shape, format, start, heads = stored = self._stored[name]
        *rows, columns = index
        low, high, step = columns.indices(shape[-1])
        first, last = low // format.block, -(-high // format.block)
        if heads is not None:
            rows = [_rows(shape[0], heads)[rows[0]]]
        whole = self._data[start : start + prod(stored.blocks)].reshape(stored.blocks)
        raw = np.ascontiguousarray(whole[(*rows, slice(first, last))])
        self.read_bytes += raw.nbytes
        numbers = format.decode(raw).reshape(*raw.shape[:-2], raw.shape[-2] * format.block)
        return numbers[..., low - first * format.block : high - first * format.block : step]

    def config(self) -> dict:
        """What config.json says."""
        setting, dtypes = self._settings, {e.dtype.name for e in self.tensors.values() if len(e.shape) == 2}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "_name_or_path": self.metadata.get("general.name", ""),
            "vocab_size": self.tensors["model.embed_tokens.weight"].shape[0],
            "hidden_size": setting["embedding_length"],
            "intermediate_size": setting["feed_forward_length"],
            "num_hidden_layers": setting["block_count"],
            "num_attention_heads": setting["attention.head_count"],
            "num_key_value_heads": setting["attention.head_count_kv"],
            "head_dim": setting["attention.key_length"],
            "max_position_embeddings": setting["context_length"],
            "rms_norm_eps": _decimal(setting["attention.layer_norm_rms_epsilon"]),
            "rope_theta": _decimal(setting["rope.freq_base"]),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "torch_dtype": dtypes.pop() if len(dtypes) == 1 else "float32",
            **gguf_tokenizer.special_ids(self.metadata),
        }

    def tokenizer_files(self) -> dict[str, str]:
        """Contents of tokenizer.json, tokenizer_config.json and generation_config.json."""
        return gguf_tokenizer.files(self.path, self.metadata, self._settings["context_length"])


def _decimal(x: float) -> float:
    """The shortest number that is x in single precision, as files store it: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(x)))


def _rows(rows: int, heads: int) -> np.ndarray:
    """Where in the file each row is: row j of half i of a head of H rows is its row 2 j + i."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows)


class Cursor:
    """Takes values from the front of a file. UserError where it ends too early."""

    def __init__(self, path: str, data: np.ndarray):
        self.path, self.data, self.at = path, data, 0

    def bytes(self, size: int, what: str) -> bytes:
        if size > len(self.data) - self.at:
            raise _truncated(self.path, self.data, what)
        self.at += size
        return self.data[self.at - size : self.at].tobytes()

    def numbers(self, codes: str, what: str) -> tuple:
        return struct.unpack("<" + codes, self.bytes(struct.calcsize("<" + codes), what))

    def string(self, what: str) -> str:
        try:
            return self.bytes(*self.numbers("Q", what), what).decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: {what} is not UTF-8 text; the file is corrupt, fetch it again") from None

    def value(self, kind: int, what: str):
        """A number, a string, or a list of either or of lists."""
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            kind, count = self.numbers("IQ", what)
            if count > len(self.data) - self.at:  # none is smaller than a byte
                raise _truncated(self.path, self.data, what)
            if kind in SCALARS:
                return list(self.numbers(f"{count}{SCALARS[kind]}", what))
            return [self.value(kind, what) for _ in range(count)]
        if kind not in SCALARS:
            known = ", ".join(map(str, sorted((*SCALARS, STRING, ARRAY))))
            raise UserError(f"{self.path}: {what} has value type {kind}; GGUF 3 has {known}")
        return self.numbers(SCALARS[kind], what)[0]


def _truncated(path: str, data: np.ndarray, what: str) -> UserError:
    return UserError(f"{path}: ends at byte {len(data)}, before the end of {what}; it is truncated, fetch it again")


def _contents(path: str, data: np.ndarray) -> tuple[dict, dict[str, Stored]]:
    """Metadata and tensors by their names in the file."""
    cursor = Cursor(path, data)
    if (magic := bytes(data[:4])) != b"GGUF":
        raise UserError(f"{path}: begins with {magic!r}, not b'GGUF'; it is no GGUF file")
    cursor.at = 4
    (version,) = cursor.numbers("I", "the version")
    if version != 3:
        big = version == 3 << 24
        raise UserError(f"{path}: GGUF version {'3, big-endian' if big else version}; convert it to 3, little-endian")
    tensors, entries = cursor.numbers("QQ", "the header")
    metadata, infos = {}, {}
    for i in range(entries):
        key = _new(path, metadata, cursor.string(f"the name of metadata {i}"))
        metadata[key] = cursor.value(*cursor.numbers("I", f"metadata {key!r}"), f"metadata {key!r}")
    for i in range(tensors):
        name = _new(path, infos, cursor.string(f"the name of tensor {i}"))
        what = f"what is said of tensor {name!r}"
        shape = cursor.numbers(f"{cursor.numbers('I', what)[0]}Q", what)[::-1]  # the fastest dimension is first
        infos[name] = shape, *cursor.numbers("IQ", what)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise UserError(f"{path}: general.alignment={alignment!r} must be a multiple of 8")
    start = -(-cursor.at // alignment) * alignment
    return metadata, {name: _located(path, data, start, alignment, name, *info) for name, info in infos.items()}


def _new(path: str, known: dict, name: str) -> str:
    if name in known:
        raise UserError(f"{path}: {name!r} is there twice; the file is corrupt, fetch it again")
    return name


def _located(path, data, start: int, alignment: int, name: str, shape, kind: int, offset: int) -> Stored:
    format = FORMATS.get(NAMES.get(kind))
    if format is None:
        raise UserError(
            f"{path}: tensor {name!r} is stored as {NAMES.get(kind, f'type {kind}')}, but only {', '.join(FORMATS)} "
            f"are read; convert it: llama-quantize --allow-requantize {path} OUT.gguf Q8_0"
        )
    if not shape or shape[-1] % format.block:
        raise UserError(f"{path}: tensor {name!r} of shape {shape}: rows of {format.name} are blocks of {format.block}")
    if offset % alignment:
        raise UserError(f"{path}: tensor {name!r} at offset {offset}, which {alignment} does not divide; it is corrupt")
    stored = Stored(shape, format, start + offset)
    if stored.start + prod(stored.blocks) > len(data):
        raise _truncated(path, data, f"tensor {name!r}")
    return stored


def _settings(path: str, metadata: dict, stored: dict[str, Stored]) -> dict:
    """Of the architecture, by their names without it; those that may be absent filled in."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{path}: general.architecture={architecture!r}; of GGUF files, only 'llama' is imported")
    settings = {k.removeprefix("llama."): value for k, value in metadata.items() if k.startswith("llama.")}
    for name, value in settings.items():
        if name not in SETTINGS:
            raise UserError(
                f"{path}: llama.{name}={value!r} is not imported, and without it the model would be another; use a "
                f"checkpoint in Hugging Face format. Of settings, {nearest(name, SETTINGS)} are known"
            )
        real = name in ("attention.layer_norm_rms_epsilon", "rope.freq_base")
        if isinstance(value, bool) or not isinstance(value, int | float if real else int) or not value > 0:
            raise UserError(f"{path}: llama.{name}={value!r} must be {'a number' if real else 'one integer'} above 0")
    for name in (*SETTINGS[1:6], "attention.layer_norm_rms_epsilon"):
        if name not in settings:
            raise UserError(f"{path}: metadata lacks llama.{name}; it is no whole model, fetch another")
    heads, width = settings["attention.head_count"], settings["embedding_length"]
    absent = {"attention.head_count_kv": heads, "attention.key_length": width // heads, "rope.freq_base": 1e4}
    settings = absent | settings
    for name in ("attention.value_length", "rope.dimension_count"):
        if settings.get(name, length := settings["attention.key_length"]) != length:
            raise UserError(f"{path}: llama.{name}={settings[name]} differs from the {length} of a head: not imported")
    if length % 2:
        raise UserError(f"{path}: llama.attention.key_length={length} must be even: rotary embedding turns pairs")
    if settings["block_count"] > len(stored):
        raise UserError(f"{path}: llama.block_count={settings['block_count']}, but there are {len(stored)} tensors")
    return settings


def _named(path: str, settings: dict, stored: dict[str, Stored]) -> dict[str, Stored]:
    """Tensors by Hugging Face names: all that the settings ask for, of the shapes they ask for, and no other."""
    heads = {"attn_q": settings["attention.head_count"], "attn_k": settings["attention.head_count_kv"]}
    embed, length = stored.get("token_embd.weight"), settings["attention.key_length"]
    sizes = dict(
        V=embed.shape[0] if embed else 0, D=settings["embedding_length"],
        Q=heads["attn_q"] * length, K=heads["attn_k"] * length, F=settings["feed_forward_length"],
    )  # fmt: skip
    expected = {f"{own}.weight": (f"{name}.weight", dims, None) for own, (name, dims) in ALONE.items()}
    for i in range(settings["block_count"]):
        for own, (name, dims) in BLOCK.items():
            expected[f"blk.{i}.{own}.weight"] = f"model.layers.{i}.{name}.weight", dims, heads.get(own)
    for tensors, said in (
        (stored.keys() - expected, "no weight of a plain Llama model"),
        (expected.keys() - stored.keys() - {"output.weight"}, "missing"),
    ):
        if tensors:
            more = f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else ""
            raise UserError(f"{path}: tensor {min(tensors)!r}{more} is {said}; use a checkpoint in Hugging Face format")
    named = {}
    for own, tensor in stored.items():
        name, dims, permuted = expected[own]
        if tensor.shape != (shape := tuple(sizes[d] for d in dims.split())):
            raise UserError(f"{path}: tensor {own!r} has shape {tensor.shape}, but the metadata makes it {shape}")
        named[name] = tensor._replace(heads=permuted)
    return named
