"""GGUF files, made here byte by byte: numbers by hand, slices, the rows of queries and keys, and directories of which
transformers and tokenizers make the same model and text."""

import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from real import smollm2  # noqa: F401
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rljax.errors import UserError
from rljax.mesh import Layout
from rljax.model.decoder import Decoder
from rljax.weights.gguf import Gguf
from rljax.weights.load import load
from rljax.weights.names import LLAMA
from rljax.weights.prepare import prepare

F32, F16, Q4_0, Q4_1, Q8_0, Q6_K, BF16 = 0, 1, 2, 3, 8, 14, 30
D, LENGTH, HEADS, KV, F, LAYERS = 64, 32, 2, 1, 96, 2

TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "What is 23 + 45? Answer",
    "naïve café 你好\n\t 1.5",
    "  two  spaces",
    "it's 12345",
    "<|im_start|>user\n7<|im_end|>",
]


# A writer: the documented format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md


def text(s: str) -> bytes:
    return struct.pack("<Q", len(s.encode())) + s.encode()


def typed(value) -> tuple[int, bytes]:
    """Type and bytes of a value; a (type, bytes) pair stands for itself."""
    match value:
        case tuple():
            return value
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
        case list():
            kinds, parts = zip(*map(typed, value))
            return 9, struct.pack("<IQ", kinds[0], len(parts)) + b"".join(parts)


def numbers(x: np.ndarray, kind: int = F32) -> tuple:
    """A tensor that is not quantized, as the writer takes it."""
    return x.shape, kind, x.astype({F32: "<f4", F16: "<f2", BF16: ml_dtypes.bfloat16}[kind]).tobytes()


def gguf(path: Path, metadata: dict, tensors: dict, version: int = 3, magic: bytes = b"GGUF", shift: int = 0) -> Path:
    """Writes metadata, and tensors of (shape, type, bytes); offsets are `shift` bytes off."""
    out, data = magic + struct.pack("<IQQ", version, len(tensors), len(metadata)), b""
    alignment = metadata.get("general.alignment", 32) or 32
    for key, value in metadata.items():
        kind, content = typed(value)
        out += text(key) + struct.pack("<I", kind) + content
    for name, (shape, kind, content) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        out += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out += struct.pack("<IQ", kind, len(data) + shift)
        data += content
    path.write_bytes(out + b"\xff" * (-len(out) % alignment) + data)
    return path


def trained() -> Tokenizer:
    """A byte-level BPE tokenizer that takes digits apart, by the tokenizers library."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["What is the answer? it's two answers"] * 3, trainer)
    return tokenizer


TRAINED = trained()
VOCABULARY = sorted(TRAINED.get_vocab(), key=TRAINED.get_vocab().get)
MERGES = [" ".join(pair) for pair in json.loads(TRAINED.to_str())["model"]["merges"]]
V = len(VOCABULARY)

METADATA = {
    "general.architecture": "llama", "general.name": "Tiny", "general.alignment": 64,
    "llama.block_count": LAYERS, "llama.context_length": 128, "llama.embedding_length": D,
    "llama.feed_forward_length": F, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV,
    "llama.rope.freq_base": 5000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": V, "llama.rope.dimension_count": LENGTH,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": VOCABULARY, "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (V - len(SPECIAL)),
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0, "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip


def zeros() -> dict:
    """The tensors of a model, tied."""
    found = {"token_embd.weight": numbers(np.zeros((V, D))), "output_norm.weight": numbers(np.ones(D))}
    for i in range(LAYERS):
        shapes = dict(
            attn_norm=(D,), attn_q=(HEADS * LENGTH, D), attn_k=(KV * LENGTH, D), attn_v=(KV * LENGTH, D),
            attn_output=(D, HEADS * LENGTH), ffn_norm=(D,), ffn_gate=(F, D), ffn_up=(F, D), ffn_down=(D, F),
        )  # fmt: skip
        found |= {f"blk.{i}.{name}.weight": numbers(np.zeros(shape)) for name, shape in shapes.items()}
    return found


def tiny(tmp_path, metadata=(), tensors=(), without=(), **options) -> Path:
    """The file of a model of zeros, changed."""
    keep = lambda items: {name: value for name, value in items.items() if name not in without}
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
    return gguf(path, keep(METADATA | dict(metadata)), keep(zeros() | dict(tensors)), **options)


def every(shape) -> tuple[slice, ...]:
    return (slice(None),) * len(shape)


# Numbers


def half(x: float) -> bytes:
    return struct.pack("<e", x)


RAMP = bytes(i | (15 - i) << 4 for i in range(16))  # lower halves 0 to 15, upper ones 15 to 0
LOW, HIGH = np.arange(16), np.arange(15, -1, -1)
BLOCKS = {  # one block by hand: its bytes, and its numbers
    Q4_0: (half(0.25) + RAMP, 0.25 * np.r_[LOW - 8, HIGH - 8]),
    Q4_1: (half(0.5) + half(-1.0) + RAMP, np.r_[LOW * 0.5 - 1, HIGH * 0.5 - 1]),
    Q8_0: (half(-0.125) + bytes([*range(16), *range(240, 256)]), -0.125 * np.r_[LOW, LOW - 16]),
}
V_PROJ = "model.layers.0.self_attn.v_proj.weight"


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_by_hand(tmp_path, kind):
    block, by_hand = BLOCKS[kind]
    shape = (KV * LENGTH, D)  # two blocks a row; the second of row 5 is the one by hand
    nothing = bytes(len(block))
    content = nothing * 11 + block + nothing * (2 * shape[0] - 12)
    source = Gguf(tiny(tmp_path, tensors={"blk.0.attn_v.weight": (shape, kind, content)}))
    expected = np.zeros(shape)
    expected[5, 32:] = by_hand
    assert source.tensors[V_PROJ] == (shape, np.float32)
    found = source.read(V_PROJ, every(shape))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind, code, dtype, bits", [
    (F32, "<I", np.float32, [0x3F800000, 0xC0400000, 0x3E000000]), (F16, "<H", np.float16, [0x3C00, 0xC200, 0x3000]),
    (BF16, "<H", ml_dtypes.bfloat16, [0x3F80, 0xC040, 0x3E00]),
])  # fmt: skip
def test_plain_numbers_by_hand(tmp_path, kind, code, dtype, bits):
    shape = (KV * LENGTH, D)
    content = b"".join(struct.pack(code, b) for b in bits).ljust(shape[0] * D * struct.calcsize(code), b"\0")
    source = Gguf(tiny(tmp_path, tensors={"blk.0.attn_v.weight": (shape, kind, content)}))
    found = source.read(V_PROJ, every(shape))
    assert found.dtype == source.tensors[V_PROJ].dtype == dtype
    np.testing.assert_array_equal(found.reshape(-1)[:4].astype(float), [1, -3, 0.125, 0])


def quantized(shape, seed: int) -> tuple:
    """Q4_1 of random bytes, with scales and offsets from 0.01 to 1."""
    rng, blocks = np.random.default_rng(seed), shape[0] * shape[1] // 32
    parts = [np.array(rng.uniform(0.01, 1, (blocks, 2)), "<f2").view(np.uint8), rng.integers(0, 256, (blocks, 16))]
    return shape, Q4_1, np.concatenate(parts, 1).astype(np.uint8).tobytes()


@pytest.mark.parametrize("rows, columns, blocks", [
    (slice(3, 5), slice(31, 33), 4), (slice(3, 5), slice(32, 64), 2), (slice(0, 32), slice(0, 64), 64),
    (slice(None), slice(63, None), 32), (slice(1, 30, 7), slice(2, 60, 9), 10), (slice(4, 4), slice(0, 64), 0),
    (slice(0, 9), slice(40, 40), None), (slice(30, 99), slice(-1, 99), 2),
])  # fmt: skip
@pytest.mark.parametrize("name", ["v", "k"])  # k is permuted
def test_a_slice_is_part_of_the_whole_and_reads_no_more_blocks(tmp_path, name, rows, columns, blocks):
    shape, name = (KV * LENGTH, D), f"model.layers.1.self_attn.{name}_proj.weight"
    changed = {f"blk.1.attn_{n}.weight": quantized(shape, 3) for n in "vk"}
    source = Gguf(tiny(tmp_path, tensors=changed))
    assert source.read_bytes == 0
    part = source.read(name, (rows, columns))
    assert blocks is None or source.read_bytes == blocks * 20
    whole = source.read(name, every(shape))
    assert len(np.unique(whole)) > 800  # of 64 blocks of 16, so that none is taken for another
    np.testing.assert_array_equal(part, whole[rows, columns])


def test_a_slice_of_a_vector(tmp_path):
    weights = np.arange(D, dtype=np.float32)
    source = Gguf(tiny(tmp_path, tensors={"output_norm.weight": numbers(weights)}))
    np.testing.assert_array_equal(source.read("model.norm.weight", (slice(5, 9),)), [5, 6, 7, 8])
    assert source.read_bytes == 16


# The model


def interleaved(x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of a head as llama.cpp computes it for Llama: pairs (2 j, 2 j + 1) turn by angle j."""
    turned = x[0::2] + 1j * x[1::2]
    turned = turned * np.exp(1j * position * 5000.0 ** (-np.arange(len(x) // 2) / (len(x) / 2)))
    return np.stack((turned.real, turned.imag), -1).reshape(-1)


def halves(x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of a head as transformers computes it: pairs (j, j + H / 2) turn by angle j."""
    inverse = 5000.0 ** (-np.arange(len(x) // 2) / (len(x) / 2))
    cos, sin = (np.tile(f(position * inverse), 2) for f in (np.cos, np.sin))
    half = len(x) // 2
    return x * cos + np.concatenate((-x[half:], x[:half])) * sin


def test_attention_scores_are_those_of_llama_cpp(tmp_path):
    """Rows as stored, rotated in neighboring pairs, give the scores that rows as read give, rotated in halves."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(HEADS * LENGTH, D)), rng.normal(size=(KV * LENGTH, D))
    source = Gguf(tiny(tmp_path, tensors={"blk.0.attn_q.weight": numbers(q), "blk.0.attn_k.weight": numbers(k)}))
    read = lambda name: source.read(f"model.layers.0.self_attn.{name}_proj.weight", every(q.shape)).astype(float)
    x, y = rng.normal(size=(2, D))
    for head in range(HEADS):
        rows = slice(head * LENGTH, (head + 1) * LENGTH)
        stored = interleaved(q[rows] @ x, 7) @ interleaved(k @ y, 3)
        ours = halves(read("q")[rows] @ x, 7) @ halves(read("k") @ y, 3)
        assert abs(stored) > 1
        np.testing.assert_allclose(ours, stored, rtol=1e-5)


def as_converted(state: dict, kinds: dict) -> dict:
    """Tensors of a state of transformers, as llama.cpp's converter names and permutes them."""
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    alone = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found = {}
    for name, weight in state.items():
        name, weight = name.removesuffix(".weight"), weight.numpy()
        own = alone.get(name)
        if own is None:
            _, _, layer, piece = name.split(".", 3)
            own = f"blk.{layer}.{names[piece]}"
        if heads := dict(attn_q=HEADS, attn_k=KV).get(own.split(".")[-1]):  # LlamaModel.permute of the converter
            weight = weight.reshape(heads, 2, LENGTH // 2, D).swapaxes(1, 2).reshape(weight.shape)
        found[f"{own}.weight"] = numbers(weight, kinds.get(own.split(".")[-1], F32))
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_same_from_what_is_prepared(tmp_path, tied, monkeypatch):
    monkeypatch.setattr("rljax.weights.prepare.CHUNK", 1000)  # so that tensors are written in several
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, head_dim=LENGTH, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # so that 16 bits hold them
            weight.copy_((torch.ones_like(weight) + 0.5 * torch.rand_like(weight)) if "norm" in name else weight)
            weight.copy_(weight.bfloat16().float().clamp(-2, 2))
            if "up_proj" in name:
                weight.copy_(weight.half().float())
    state = {name: w for name, w in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    tensors = as_converted(state, {"attn_q": BF16, "attn_v": BF16, "ffn_up": F16, "token_embd": BF16})
    directory = prepare(tiny(tmp_path, tensors=tensors), tmp_path / "model")
    read, loading = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    for name, weight in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
    ids = torch.arange(3, 27).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(read(ids).logits, model(ids).logits)
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(state) and file.metadata() == {"format": "pt"}
        dtypes = {name.split(".")[-2]: file.get_tensor(name).dtype for name in file.keys()}
    assert dtypes["q_proj"] == dtypes["v_proj"] == torch.bfloat16 and dtypes["up_proj"] == torch.float16
    assert dtypes["k_proj"] == dtypes["norm"] == torch.float32


def test_a_mesh_loads_it(tmp_path):
    """Straight from the file: each device the blocks of its shard."""
    shape = HEADS * LENGTH, D
    changed = {f"blk.{i}.attn_q.weight": quantized(shape, i) for i in range(LAYERS)}
    table = Decoder(V, D, LAYERS, HEADS, KV, LENGTH, F, tied=True).build().table
    source = Gguf(tiny(tmp_path, tensors=changed))
    loaded = load(table, source, LLAMA, Layout(fsdp=2, tensor=2).mesh(), 3, np.float32)
    plain = sum(len(content) for _, kind, content in zeros().values())
    assert loaded.read_bytes == plain - LAYERS * HEADS * LENGTH * D * 4 + LAYERS * HEADS * LENGTH * D // 32 * 20
    assert loaded.params.unembed is None and np.all(np.asarray(loaded.params.norm) == 1)
    for i, wq in enumerate(np.asarray(loaded.params.layers.wq)):
        np.testing.assert_array_equal(wq, source.read(f"model.layers.{i}.self_attn.q_proj.weight", every(shape)).T)


def test_config_is_the_metadata(tmp_path):
    said = Gguf(tiny(tmp_path)).config()
    config = transformers.LlamaConfig(**said)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim) == (V, D, F, LENGTH)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (LAYERS, HEADS, KV)
    assert config.rms_norm_eps == 1e-5 and config.rope_parameters["rope_theta"] == 5000 and config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.max_position_embeddings == 128 and said["torch_dtype"] == "float32"
    halved = {name: numbers(np.zeros(shape), BF16) for name, (shape, *_) in zeros().items() if len(shape) == 2}
    assert Gguf(tiny(tmp_path, tensors=halved)).config()["torch_dtype"] == "bfloat16"


def test_settings_that_may_be_absent(tmp_path):
    absent = ["llama.attention.head_count_kv", "llama.rope.freq_base", "llama.vocab_size", "llama.rope.dimension_count"]
    wide = {f"blk.{i}.attn_{n}.weight": numbers(np.zeros((D, D))) for i in range(LAYERS) for n in "kv"}
    config = Gguf(tiny(tmp_path, tensors=wide, without=absent)).config()
    assert (config["num_key_value_heads"], config["rope_theta"], config["vocab_size"]) == (HEADS, 10_000, V)
    longer = {"llama.attention.key_length": 16, "llama.rope.dimension_count": 16}
    with pytest.raises(UserError, match=r"'blk.0.attn_q.weight' has shape \(64, 64\), but .* makes it \(32, 64\)"):
        Gguf(tiny(tmp_path, longer))


def test_metadata_of_every_type(tmp_path):
    pack = lambda kind, code, value: (kind, struct.pack("<" + code, value))
    given = {
        "u8": pack(0, "B", 255), "i8": pack(1, "b", -128), "u16": pack(2, "H", 65535), "i16": pack(3, "h", -32768),
        "u32": pack(4, "I", 2**32 - 1), "i32": pack(5, "i", -(2**31)), "f32": pack(6, "f", 0.5),
        "bool": pack(7, "?", True), "text": "né", "u64": pack(10, "Q", 2**64 - 1), "i64": pack(11, "q", -(2**63)),
        "f64": pack(12, "d", 0.1), "texts": ["a", "", "bc"], "nested": [[1, 2], [3]], "none": (9, bytes(12)),
    }  # fmt: skip
    found = Gguf(tiny(tmp_path, given)).metadata
    assert {name: found[name] for name in given} == {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.5,
        "bool": True, "text": "né", "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1, "texts": ["a", "", "bc"],
        "nested": [[1, 2], [3]], "none": [],
    }  # fmt: skip


# The tokenizer


def test_the_tokenizer_is_that_of_the_vocabulary(tmp_path):
    directory = prepare(tiny(tmp_path), tmp_path / "model")
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(directory)
    assert plain.get_vocab() == TRAINED.get_vocab() and len(auto) == V
    for sample in TEXTS:
        ids = TRAINED.encode(sample).ids
        assert plain.encode(sample).ids == auto(sample).input_ids == ids
        assert auto.decode(ids) == sample and plain.decode(ids, skip_special_tokens=False) == sample
    assert [TRAINED.id_to_token(i) for i in auto("12").input_ids] == ["1", "2"]
    assert auto.all_special_tokens and (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (1, 2, 2)
    assert auto.decode([1, 2], skip_special_tokens=True) == "" and auto.model_max_length == 128
    asked = auto.apply_chat_template([{"role": "user", "content": "1+1?"}], tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    generation = transformers.GenerationConfig.from_pretrained(directory)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_tokens_that_surround_a_text_and_words_of_the_user(tmp_path):
    word = VOCABULARY.index("sw")
    kinds = [3, 3, 3] + [4 if i == word else 1 for i in range(3, V)]
    given = {"add_bos_token": True, "add_eos_token": True, "token_type": kinds, "eot_token_id": 0}
    path = tiny(tmp_path, {f"tokenizer.ggml.{name}": value for name, value in given.items()})
    files = Gguf(path).tokenizer_files()
    found = Tokenizer.from_str(files["tokenizer.json"])
    assert TRAINED.encode("answer").tokens == ["an", "swer"]
    assert found.encode("answer").tokens == ["<|im_start|>", "an", "sw", "er", "<|im_end|>"]
    assert found.decode([word]) == "sw" and found.decode([1]) == ""
    assert found.encode("a", "b").ids == [1, TRAINED.token_to_id("a"), 2, 1, TRAINED.token_to_id("b"), 2]
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [0, 2]


# What is refused


@pytest.mark.parametrize("changes, message", [
    (dict(magic=b"GGML"), "begins with b'GGML', not b'GGUF'"),
    (dict(version=2), "GGUF version 2; convert it to 3"),
    (dict(version=3 << 24), "version 3, big-endian"),
    (dict(metadata={"x": (13, b"")}), "metadata 'x' has value type 13; GGUF 3 has 0, 1, .*12"),
    (dict(metadata={"x": (8, struct.pack("<Q", 2) + b"\xc3\x28")}), "metadata 'x' is not UTF-8"),
    (dict(metadata={"x": (9, struct.pack("<IQ", 4, 2**60))}), "ends at byte .* before the end of metadata 'x'"),
    (dict(metadata={"general.alignment": 12}), "general.alignment=12 must be a multiple of 8"),
    (dict(metadata={"general.alignment": 0}), "general.alignment=0 must"),
    (dict(shift=32), "'token_embd.weight' at offset 32, which 64 does not divide"),
    (dict(shift=1 << 40), "before the end of tensor 'token_embd.weight'; it is truncated"),
    (dict(tensors={"blk.1.ffn_up.weight": ((F, D), Q6_K, bytes(F * D))}),
     "'blk.1.ffn_up.weight' is stored as Q6_K, but only F32, F16, BF16, Q8_0, Q4_0, Q4_1 are read; convert"),
    (dict(tensors={"blk.1.ffn_up.weight": ((F, D), 99, bytes(F * D))}), "is stored as type 99"),
    (dict(tensors={"blk.0.attn_v.weight": ((64, 48), Q8_0, bytes(6000))}), r"48\): rows of Q8_0 are blocks of 32"),
    (dict(tensors={"blk.0.ffn_up.weight": numbers(np.zeros((D, F)))}), r"'blk.0.ffn_up.weight' has shape \(64, 96\)"),
    (dict(tensors={"rope_freqs.weight": numbers(np.ones(16))}), "'rope_freqs.weight' is no weight of a plain Llama"),
    (dict(without=["blk.1.attn_k.weight", "blk.1.attn_q.weight"]), r"'blk.1.attn_k.weight' \(and 1 more\) is missing"),
    (dict(metadata={"general.architecture": "qwen2"}), "general.architecture='qwen2'; .* only 'llama'"),
    (dict(without=["general.architecture"]), "general.architecture=None"),
    (dict(metadata={"llama.rope.scaling.type": "yarn"}), "llama.rope.scaling.type='yarn' is not imported"),
    (dict(metadata={"llama.expert_count": 8}), "llama.expert_count=8 is not imported"),
    (dict(metadata={"llama.attention.head_count": [2, 2]}), r"head_count=\[2, 2\] must be one integer above 0"),
    (dict(metadata={"llama.attention.layer_norm_rms_epsilon": 0.0}), "epsilon=0.0 must be a number above 0"),
    (dict(metadata={"llama.rope.dimension_count": 16}), "llama.rope.dimension_count=16 differs from the 32 of a head"),
    (dict(metadata={"llama.attention.key_length": 33}, without=["llama.rope.dimension_count"]), "=33 must be even"),
    (dict(metadata={"llama.block_count": 10**9}), "llama.block_count=1000000000, but there are 20 tensors"),
    (dict(without=["llama.context_length"]), "metadata lacks llama.context_length"),
])  # fmt: skip
def test_a_file_that_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        Gguf(tiny(tmp_path, **changes))
    assert ".gguf" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("metadata, message", [
    ({"model": "llama"}, "tokenizer.ggml.model='llama': only 'gpt2'"),
    ({"pre": "llama-bpe"}, "tokenizer.ggml.pre='llama-bpe' is no known split of text; .*one of gpt-2, smollm"),
    ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of str"),
    ({"tokens": VOCABULARY[:-1]}, f"tokens has {V - 1} entries and token_type {V}"),
    ({"tokens": [*VOCABULARY[:-1], "a"]}, "tokens has 'a' twice"),
    ({"merges": ["a b", "q zz"]}, "merges has 'a b', which does not make a token"),
    ({"merges": ["abc"]}, "merges has 'abc'"),
    ({"eos_token_id": V}, f"eos_token_id={V} must be a number of the {V} tokens"),
])  # fmt: skip
def test_a_tokenizer_that_is_refused(tmp_path, metadata, message):
    path = tiny(tmp_path, {f"tokenizer.ggml.{name}": value for name, value in metadata.items()})
    with pytest.raises(UserError, match=message):
        prepare(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(UserError, match="tokenizer.ggml.bos_token_id=None"):
        without = ["tokenizer.ggml.bos_token_id"]
        Gguf(tiny(tmp_path, {"tokenizer.ggml.add_bos_token": True}, without=without)).tokenizer_files()


def test_what_is_there_twice_is_refused(tmp_path):
    path = tiny(tmp_path, {"one": 1, "two": 1})
    path.write_bytes(path.read_bytes().replace(text("two"), text("one")))
    with pytest.raises(UserError, match="'one' is there twice"):
        Gguf(path)
    path = tiny(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q", b"blk.0.attn_q"))
    with pytest.raises(UserError, match="'blk.0.attn_q.weight' is there twice"):
        Gguf(path)


def test_no_part_of_a_file_is_taken_for_a_whole_one(tmp_path):
    whole = tiny(tmp_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    Gguf(tiny(tmp_path))
    for size in [*range(0, 200, 3), *np.linspace(200, len(whole) - 1, 40).astype(int)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(UserError, match="cut.gguf"):
            Gguf(cut)
    with pytest.raises(UserError, match="absent.gguf cannot be read: No such file"):
        Gguf(tmp_path / "absent.gguf")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        Gguf(tmp_path)


# The directory


def test_a_directory_that_is_there_is_left_alone(tmp_path):
    path, directory = tiny(tmp_path), tmp_path / "deep" / "model"
    directory.mkdir(parents=True)  # an empty one is none
    assert prepare(path, directory) == directory and os.listdir(tmp_path / "deep") == ["model"]
    files = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in directory.iterdir()}
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in files) == names
    prepare(str(path), str(directory))
    assert files == {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in directory.iterdir()}
    with pytest.raises(UserError, match=r"config.json is not that of .*\.gguf; remove it, or name another directory"):
        prepare(tiny(tmp_path, {"general.name": "Other"}), directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="model is there, but without tokenizer.json; remove it"):
        prepare(path, directory)
    with pytest.raises(UserError, match="0.gguf is there, but without config.json"):
        prepare(path, path)


@pytest.mark.pitfall("T-92")
def test_a_directory_is_whole_or_not_there(tmp_path, monkeypatch):
    path, folder, whole = tiny(tmp_path), tmp_path / "models", Gguf.read
    folder.mkdir()
    for error, seen in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), UserError)):

        def fails(source, name, index, error=error):
            if "layers.1" in name:
                raise error
            return whole(source, name, index)

        monkeypatch.setattr(Gguf, "read", fails)
        with pytest.raises(seen):
            prepare(path, folder / "model")
        assert not list(folder.iterdir())

    def another_was_first(source, name, index):
        monkeypatch.setattr(Gguf, "read", whole)
        prepare(path, folder / "model")
        return whole(source, name, index)

    monkeypatch.setattr(Gguf, "read", another_was_first)
    assert prepare(path, folder / "model") == folder / "model"
    assert os.listdir(folder) == ["model"]


# The real file


@pytest.mark.slow
def test_a_real_model_speaks(tmp_path, smollm2):  # noqa: F811
    directory = prepare(smollm2, tmp_path / "smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    say = lambda prompt, count: tokenizer.decode(
        model.generate(
            **(given := tokenizer(prompt, return_tensors="pt")), max_new_tokens=count, do_sample=False
        )[0, given.input_ids.shape[1] :]
    )  # fmt: skip
    assert say("The capital of France is", 2) == " Paris."
    asked = [{"role": "user", "content": "What is 30 + 20? Answer with just the number."}]
    asked = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert asked.endswith("just the number.<|im_end|>\n<|im_start|>assistant\n")
    assert say(asked, 12) == "30 + 20 = 50<|im_end|>"
    for sample in TEXTS:
        assert tokenizer.decode(tokenizer(sample).input_ids) == sample


@pytest.mark.slow
def test_a_real_file_is_read_as_transformers_reads_it(smollm2):  # noqa: F811
    pytest.importorskip("gguf", reason="transformers reads GGUF files by the package gguf")
    peer = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name).state_dict()
    source = Gguf(smollm2)
    assert peer.keys() == source.tensors.keys() | {"lm_head.weight"}
    for name, (shape, _) in source.tensors.items():
        np.testing.assert_array_equal(source.read(name, every(shape)), peer[name].numpy(), name)
