"""Law: a checkpoint that is written, read and written again is the same bits, on every layout and in every family's
names; and each device's part of it is all that is read.

What files hold is compared with the safetensors library and with transformers, which made them.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from jax import P

from rljax.errors import UserError
from rljax.mesh import Layout
from rljax.model.table import Tensor, completed, init, is_tensor, map_table, shardings
from rljax.weights.load import load
from rljax.weights.names import LLAMA, MIXTRAL, PHI3, Interleaved, Naming, deepseek, pieces, stored
from rljax.weights.save import header, save
from rljax.weights.source import Entry, SafeTensors

ONE = Layout()
V, D, F, L, N, K, H, E = 40, 16, 24, 2, 4, 2, 4, 4  # of the models of transformers, and of their tables by hand
Q, KV = N * H, K * H
KEYS, QUERIES, PLAIN, TURNED, VALUE, MOE = 8, 10, 6, 4, 6, 8  # of latent attention, and the width of experts


def table(first=0, layers=L, **shapes):
    """A table by hand: shapes without the layer, by names without dots and without `weight`."""
    made = {}
    for key, shape in shapes.items():
        name = key.replace("__", ".")
        matrix = len(shape) - ("{}" in name) == 2
        spec = P("fsdp", None if "_a_" in name else "tensor") if matrix else P("tensor") if "bias" in name else P(None)
        dims = " ".join("XY"[: 1 + matrix])
        if "{}" in name:
            spec, dims = P("expert", *spec), "E " + dims
        name += "" if "bias" in name else ".weight"
        if name.startswith(("model.", "lm_head.", "score.")):
            made[key] = Tensor(name, dims, shape, spec, 0)
        else:
            made[key] = Tensor(f"model.layers.{{}}.{name}", f"L {dims}", (layers, *shape), P("pipe", *spec), 0, first)
    return made


EMBED = dict(model__embed_tokens=(V, D), model__norm=(D,))
HEAD = EMBED | dict(lm_head=(D, V))
OUT = dict(self_attn__o_proj=(Q, D))
ATTENTION = OUT | dict(self_attn__q_proj=(D, Q), self_attn__k_proj=(D, KV), self_attn__v_proj=(D, KV))
BIASES = dict(self_attn__q_proj__bias=(Q,), self_attn__k_proj__bias=(KV,), self_attn__v_proj__bias=(KV,))
HEAD_NORMS = dict(self_attn__q_norm=(H,), self_attn__k_norm=(H,))
NORMS = dict(input_layernorm=(D,), post_attention_layernorm=(D,))
MORE_NORMS = dict(pre_feedforward_layernorm=(D,), post_feedforward_layernorm=(D,))
MLP = dict(mlp__gate_proj=(D, F), mlp__up_proj=(D, F), mlp__down_proj=(F, D))
LATENT = dict(
    self_attn__q_a_proj=(D, QUERIES), self_attn__q_a_layernorm=(QUERIES,),
    self_attn__q_b_proj=(QUERIES, N * (PLAIN + TURNED)), self_attn__kv_a_proj_with_mqa=(D, KEYS + TURNED),
    self_attn__kv_a_layernorm=(KEYS,), self_attn__kv_b_proj=(KEYS, N * (PLAIN + VALUE)),
    self_attn__o_proj=(N * VALUE, D),
)  # fmt: skip
SHARED = {f"mlp__shared_experts__{name}": shape for name, shape in
          dict(gate_proj=(D, MOE), up_proj=(D, MOE), down_proj=(MOE, D)).items()}  # fmt: skip
LLAMAS = table(**HEAD, **ATTENTION, **NORMS, **MLP)
DEEPSEEK = deepseek(L, KEYS, PLAIN, TURNED)


def experts(width):
    shapes = dict(gate_proj=(E, D, width), up_proj=(E, D, width), down_proj=(E, width, D))
    return {f"mlp__experts__{{}}__{name}": shape for name, shape in shapes.items()} | dict(mlp__gate=(D, E))


BASE = dict(
    vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=L, num_attention_heads=N,
    num_key_value_heads=K, head_dim=H, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MOES = dict(num_local_experts=E, num_experts=E, moe_intermediate_size=MOE)
FAMILIES = {  # name in transformers, settings, table, naming
    "llama": ("Llama", {}, LLAMAS, LLAMA),
    "llama tied": ("Llama", dict(tie_word_embeddings=True), table(**EMBED, **ATTENTION, **NORMS, **MLP), LLAMA),
    "qwen2": ("Qwen2", {}, table(**HEAD, **ATTENTION, **BIASES, **NORMS, **MLP), LLAMA),
    "qwen3": ("Qwen3", {}, table(**HEAD, **ATTENTION, **HEAD_NORMS, **NORMS, **MLP), LLAMA),
    "qwen3 moe": ("Qwen3Moe", MOES, table(**HEAD, **ATTENTION, **HEAD_NORMS, **NORMS, **experts(MOE)), LLAMA),
    "mixtral": ("Mixtral", MOES, table(**HEAD, **ATTENTION, **NORMS, **experts(F)), MIXTRAL),
    "phi3": ("Phi3", {}, LLAMAS, PHI3),
    "gemma2": ("Gemma2", {}, table(**EMBED, **ATTENTION, **NORMS, **MORE_NORMS, **MLP), LLAMA),
    "gemma3": ("Gemma3Text", {}, table(**EMBED, **ATTENTION, **HEAD_NORMS, **NORMS, **MORE_NORMS, **MLP), LLAMA),
    "olmo2": ("Olmo2", {}, table(
        **HEAD, **ATTENTION, self_attn__q_norm=(Q,), self_attn__k_norm=(KV,), post_attention_layernorm=(D,),
        post_feedforward_layernorm=(D,), **MLP), LLAMA),
    "deepseek": ("DeepseekV3", dict(
        n_routed_experts=E, moe_intermediate_size=MOE, n_shared_experts=1, first_k_dense_replace=1, n_group=2,
        topk_group=1, num_experts_per_tok=2, kv_lora_rank=KEYS, q_lora_rank=QUERIES, qk_rope_head_dim=TURNED,
        qk_nope_head_dim=PLAIN, v_head_dim=VALUE), [
            table(**HEAD), table(layers=1, **LATENT, **NORMS, **MLP),
            table(first=1, layers=1, **LATENT, **NORMS, **SHARED, **experts(MOE),
                  mlp__gate__e_score_correction_bias=(E,)),
        ], DEEPSEEK),
}  # fmt: skip


@pytest.fixture(scope="module")
def peers():
    """torch, transformers and the safetensors library, which are in the test extra."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        from safetensors.torch import load_file, save_file

        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(0)
        yield SimpleNamespace(torch=torch, transformers=transformers, load=load_file, save=save_file)


def same(ours, theirs) -> bool:
    """An array of ours and a tensor of torch: the dtype, the shape and every bit."""
    dtype, shape = str(theirs.dtype).removeprefix("torch."), tuple(theirs.shape)
    bits = theirs.contiguous().view(-1).view(__import__("torch").uint8).numpy().tobytes()
    return (str(ours.dtype), ours.shape, np.asarray(ours).tobytes()) == (dtype, shape, bits)


def whole(source, name):
    return source.read(name, tuple(slice(0, n) for n in source.tensors[name].shape))


def put(table, values, layout, zero=3):
    return jax.device_put(values, shardings(table, layout.mesh(), zero))


def values(table, dtype=np.float32):
    draw = np.random.default_rng(1)
    return map_table(lambda t: draw.normal(size=t.shape).astype(np.float32).astype(dtype), table)


def fresh(table, source, naming=LLAMA, dtype=np.float32, layout=ONE, zero=3, **settings):
    return load(table, source, naming, layout.mesh(), zero, dtype, **settings)


# ---- files


def test_slices_are_the_librarys(peers, tmp_path):
    """Rows, strided columns and steps, of every dtype; and no byte more than the slice is counted."""
    torch = peers.torch
    draw = lambda *shape: torch.randn(*shape)
    there = dict(
        a=draw(6, 10), b=draw(6, 10).bfloat16(), c=draw(5, 3).half(), d=draw(4, 4).to(torch.float8_e4m3fn), e=draw(7),
        f=draw(2, 3, 4).double(), g=torch.arange(9), h=torch.tensor([True, False]), i=draw(4, 4).to(torch.float8_e5m2),
        empty=draw(0, 3), scalar=torch.tensor(2.5),
    )  # fmt: skip
    peers.save(there, tmp_path / "model.safetensors", {"format": "pt", "note": "ü"})
    source = SafeTensors(tmp_path)
    assert source.tensors.keys() == there.keys() and source.read_bytes == 0
    assert source.tensors["b"] == Entry((6, 10), np.dtype(ml_dtypes.bfloat16))
    assert all(same(whole(source, name), tensor) for name, tensor in there.items())
    assert source.read_bytes == sum(tensor.nbytes for tensor in there.values())
    for name in "ab":
        for index in ((slice(1, 3), slice(0, 10)), (slice(0, 6), slice(2, 9)), (slice(1, 6, 2), slice(3, 4))):
            before, part = source.read_bytes, source.read(name, index)
            assert same(part, there[name][index])
            assert source.read_bytes - before == there[name][index].nbytes


def test_shards_and_index_are_those_of_transformers(peers, tmp_path):
    config = peers.transformers.LlamaConfig(**BASE)
    model = peers.transformers.LlamaForCausalLM(config).to(peers.torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    assert len([*tmp_path.glob("model-*-of-*.safetensors")]) > 3
    source = SafeTensors(tmp_path)
    assert source.tensors.keys() == model.state_dict().keys()
    assert all(same(whole(source, name), tensor) for name, tensor in model.state_dict().items())


GOOD = {"x": Entry((2, 3), np.dtype(np.float32)), "y": Entry((4,), np.dtype(np.float16))}


def written(path, text=None, numbers=32):
    """A file of GOOD, or of a header as text."""
    text = header(GOOD)[8:].strip() if text is None else text.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(numbers))
    return path


def test_the_intact_file_is_accepted(tmp_path):
    written(tmp_path / "model.safetensors")
    assert SafeTensors(tmp_path).tensors == GOOD


def one(dtype="F32", shape="[2]", offsets="[0,8]"):
    return f'{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'


TWO = '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"y":{"dtype":"F32","shape":[2],"data_offsets":%s}}'
BROKEN = {
    "empty": (b"", "it is empty"),
    "short": (b"\1\0\0", "a header of 1 bytes in a file of 3"),
    "header beyond the end": ((99).to_bytes(8, "little") + b"{}", "a header of 99 bytes in a file of 10"),
    "no JSON": (("{", 0), "header is not JSON"),
    "not UTF-8": ((2).to_bytes(8, "little") + b"\xff\xfe", "header is not JSON"),
    "no object": (("[]", 0), "header is not JSON"),
    "no shape": (('{"x":{"dtype":"F32","data_offsets":[0,4]}}', 4), "header is not JSON"),
    "three offsets": ((one(offsets="[0,4,8]"), 8), "header is not JSON"),
    "another dtype": ((one("F7"), 8), "x has dtype 'F7', which is not one of BOOL, U8"),
    "of another size": ((one(shape="[3]"), 8), r"x, F32 \[3\], is at bytes 0 to 8"),
    "negative": ((one(shape="[-1,-2]"), 8), r"x, F32 \[-1, -2\], is at bytes 0 to 8"),
    "overlapping": ((TWO % "[4,12]", 12), r"y, F32 \[2\], is at bytes 4 to 12, behind others that end at 8"),
    "a hole": ((TWO % "[12,20]", 20), "y, F32 .* is at bytes 12 to 20, behind others that end at 8"),
    "truncated": ((one(), 7), "tensors have 8 bytes, and the file has 7"),
    "too long": ((one(), 9), "tensors have 8 bytes, and the file has 9"),
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "pointer of Git LFS.*git lfs pull",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case, tmp_path):
    """By the library too, but for its words."""
    content, message = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content) if isinstance(content, bytes) else written(path, *content)
    with pytest.raises(UserError, match=f"model.safetensors.*{message}"):
        SafeTensors(tmp_path)
    safetensors = pytest.importorskip("safetensors")
    with pytest.raises((safetensors.SafetensorError, OSError, ValueError)):  # an empty file cannot be mapped
        with safetensors.safe_open(path, "np") as opened:
            opened.keys()


INDEXES = {
    "no JSON": ("{", "must be JSON with a weight_map"),
    "no map": ('{"metadata": {}}', "must be JSON with a weight_map"),
    "a missing file": ('{"weight_map": {"x": "a.safetensors", "z": "c.safetensors"}}', "c.safetensors is missing, one"),
    "a missing tensor": ('{"weight_map": {"x": "a.safetensors", "z": "a.safetensors"}}', "z is not in a.safetensors"),
    "elsewhere": ('{"weight_map": {"x": "../a.safetensors"}}', "'../a.safetensors', which must be the name of a file"),
    "nothing": ('{"weight_map": {}}', "names no file"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_a_broken_index_is_refused(case, tmp_path):
    text, message = INDEXES[case]
    written(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=f"index.json.*{message}"):
        SafeTensors(tmp_path)


def test_an_index_chooses_of_what_files_have(tmp_path):
    written(tmp_path / "a.safetensors"), written(tmp_path / "b.safetensors")
    places = {"x": "a.safetensors", "y": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert SafeTensors(tmp_path).tensors == GOOD


@pytest.mark.parametrize("there, message", {
    (): "nor other weights$",
    ("pytorch_model.bin",): "it has pytorch_model.bin; convert with transformers.*save_pretrained",
    ("adapter_model.safetensors",): "it has adapter_model.safetensors$",
    ("a.gguf", "b.gguf", "c.gguf", "d.gguf"): "it has a.gguf, b.gguf, c.gguf and others$",
}.items(), ids=str)  # fmt: skip
def test_what_lies_there_instead_is_said(there, message, tmp_path):
    for name in there:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"has no model.safetensors and no .*; {message}"):
        SafeTensors(tmp_path)
    with pytest.raises(UserError, match="absent is not a directory"):
        SafeTensors(tmp_path / "absent")


# ---- names


@pytest.mark.parametrize("head, first, size, heads", [(10, 6, 4, 4), (8, 0, 8, 2), (12, 8, 4, 1), (8, 0, 4, 3)])
def test_rows_of_rotary_pairs(head, first, size, heads):
    """Any slice of rows: in the part that is turned, what transformers makes by view(size // 2, 2).transpose."""
    rows = np.arange(head * heads).reshape(heads, head)
    turned = rows[:, first : first + size].reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(heads, size)
    rows[:, first : first + size] = turned
    t = Tensor("model.layers.{}.self_attn.q_proj.bias", "L Q", (1, head * heads), P(None, None), 0)
    (piece,) = pieces(t, Naming(interleaved=(Interleaved("self_attn.q_proj", head, first, size),)), [t])
    there = np.arange(head * heads)
    for start in range(head * heads):
        for stop in range(start + 1, head * heads + 1):
            found = np.full(stop - start, -1)
            for mine, (theirs,) in piece.windows((slice(start, stop),)):
                found[mine] = there[theirs]
            assert (found == rows.reshape(-1)[start:stop]).all()


def test_renames_are_made_all_at_once():
    t = Tensor("model.layers.{}.a.b.weight", "L D", (1, 2), P(None, None), 0, 3)
    naming = Naming(renames=(("a.", "b."), ("b.", "a."), ("ayers.", "never.")))
    assert [piece.name for piece in pieces(t, naming, [t])] == ["model.layers.3.b.a.weight"]


@pytest.mark.parametrize("change, message", [
    (dict(fused=(("self_attn.qkv", ("self_attn.q_proj", "self_attn.z_proj")),)), "qkv needs .*z_proj.*lacks"),
    (dict(interleaved=(Interleaved("self_attn.q_proj", 5, 0, 4),)), "q_proj.weight has 16 rows, .* heads of 5"),
    (dict(renames=(("self_attn.q_proj.", "x."), ("self_attn.k_proj.", "x."))), "x.weight has 8 rows, .*k_proj.*q_proj"),
    (dict(renames=(("layers.{}.mlp.gate_proj.", "gate."),)), "gate.weight has 24 rows, .* together 48"),
])  # fmt: skip
def test_a_naming_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        stored(LLAMAS, Naming(**change))


# ---- what transformers stores


def model_of(peers, family):
    name, settings, table, naming = FAMILIES[family]
    config = getattr(peers.transformers, f"{name}Config")(**BASE | settings)
    kind = getattr(peers.transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = kind(config).to(peers.torch.bfloat16)
    for parameter in [*model.parameters(), *model.buffers()]:
        if parameter.is_floating_point():
            parameter.data.normal_()  # norms and biases too
    return model, table, naming


@pytest.mark.pitfall("T-93")
@pytest.mark.pitfall("T-76")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_stores_comes_and_goes(family, peers, tmp_path):
    """All names and bits, of each family; a tied head is neither asked for nor written."""
    model, table, naming = model_of(peers, family)
    model.save_pretrained(tmp_path / "there")
    there = peers.load(tmp_path / "there" / "model.safetensors")
    source = SafeTensors(tmp_path / "there")
    dtype = lambda t: source.tensors[pieces(t, naming, table)[0].name].dtype
    layout = Layout(fsdp=2, expert=2)
    found = fresh(table, source, naming, dtype, layout)
    save(table, found.params, naming, tmp_path / "here", dtype)
    here = peers.load(tmp_path / "here" / "model.safetensors")
    assert here.keys() == there.keys()
    assert ("lm_head.weight" in here) == (family not in ("llama tied", "gemma2", "gemma3"))
    assert all(here[name].dtype == there[name].dtype and peers.torch.equal(here[name], there[name]) for name in there)


def test_where_its_parts_are(peers, tmp_path):
    """Every kind of piece against its definition, on the tensors of transformers."""
    loaded = {}
    for family in ("llama", "mixtral", "phi3", "deepseek"):
        model, table, naming = model_of(peers, family)
        model.save_pretrained(tmp_path / family)
        there = peers.load(tmp_path / family / "model.safetensors")
        params = fresh(table, SafeTensors(tmp_path / family), naming, jnp.float32).params
        loaded[family] = params, {name: tensor.float().numpy() for name, tensor in there.items()}
    ours, theirs = loaded["llama"]
    layer = "model.layers.1."
    equal = lambda a, b: a.shape == b.shape and (np.asarray(a) == b).all()
    assert equal(ours["model__embed_tokens"], theirs["model.embed_tokens.weight"])
    assert equal(ours["lm_head"], theirs["lm_head.weight"].T)
    assert equal(ours["self_attn__q_proj"][1], theirs[layer + "self_attn.q_proj.weight"].T)
    assert equal(ours["input_layernorm"][1], theirs[layer + "input_layernorm.weight"])
    ours, theirs = loaded["mixtral"]
    assert equal(ours["mlp__gate"][1], theirs[layer + "block_sparse_moe.gate.weight"].T)
    for name, key in dict(gate_proj="w1", up_proj="w3", down_proj="w2").items():  # w2(silu(w1 x) * w3 x)
        assert equal(
            ours[f"mlp__experts__{{}}__{name}"][1, 2], theirs[f"{layer}block_sparse_moe.experts.2.{key}.weight"].T
        )
    ours, theirs = loaded["phi3"]
    qkv, gate_up = theirs[layer + "self_attn.qkv_proj.weight"], theirs[layer + "mlp.gate_up_proj.weight"]
    for name, rows in dict(q=qkv[:Q], k=qkv[Q : Q + KV], v=qkv[Q + KV :]).items():
        assert equal(ours[f"self_attn__{name}_proj"][1], rows.T)
    assert equal(ours["mlp__gate_proj"][1], gate_up[:F].T) and equal(ours["mlp__up_proj"][1], gate_up[F:].T)
    (_, _, ours), theirs = loaded["deepseek"]
    halves = lambda x: np.concatenate([x[..., 0::2, :], x[..., 1::2, :]], -2)
    heads = theirs[layer + "self_attn.q_b_proj.weight"].reshape(N, PLAIN + TURNED, QUERIES)
    heads = np.concatenate([heads[:, :PLAIN], halves(heads[:, PLAIN:])], 1).reshape(-1, QUERIES)
    assert equal(ours["self_attn__q_b_proj"][0], heads.T)
    down = theirs[layer + "self_attn.kv_a_proj_with_mqa.weight"]
    assert equal(ours["self_attn__kv_a_proj_with_mqa"][0], np.concatenate([down[:KEYS], halves(down[KEYS:])]).T)
    assert equal(ours["mlp__gate__e_score_correction_bias"][0], theirs[layer + "mlp.gate.e_score_correction_bias"])


@pytest.mark.pitfall("T-93")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_what_is_written(tied, peers, tmp_path):
    """Strictly, from several files: no key is missing or left over, and parameters are those that were trained."""
    torch, transformers = peers.torch, peers.transformers
    shapes = FAMILIES["llama tied" if tied else "llama"][2]
    params = values(shapes)
    saved = save(shapes, put(shapes, params, Layout(fsdp=2, tensor=2)), LLAMA, tmp_path, np.float32, shard_bytes=4000)
    assert len(saved.files) > 3
    transformers.LlamaConfig(**BASE, tie_word_embeddings=tied).save_pretrained(tmp_path)
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    state = model.state_dict()
    assert same(params["self_attn__k_proj"][1].T, state["model.layers.1.self_attn.k_proj.weight"])
    assert same(params["model__embed_tokens"], state["model.embed_tokens.weight"])
    assert same(params["model__embed_tokens"] if tied else params["lm_head"].T, state["lm_head.weight"])
    assert sum(p.numel() for p in model.parameters()) == sum(x.size for x in params.values())


# ---- laws


class Watched(SafeTensors):
    """How often each number of each tensor was read."""

    def __init__(self, directory):
        super().__init__(directory)
        self.reads = {name: np.zeros(entry.shape, int) for name, entry in self.tensors.items()}

    def read(self, name, index):
        self.reads[name][index] += 1
        return super().read(name, index)


LATENTS = table(layers=4, **EMBED, **LATENT)
LAWS = {  # table, naming, layout and ZeRO that are saved from, and loaded onto
    "one device": ("plain", LLAMA, (ONE, 3), (ONE, 0)),
    "fsdp tensor": ("plain", LLAMA, (tiny.FSDP_TENSOR, 3), (tiny.ALL, 3)),
    "tied, ZeRO-1": ("rich", LLAMA, (tiny.ALL, 1), (tiny.FSDP, 1)),
    "fused": ("rich", PHI3, (tiny.ALL, 3), (tiny.FSDP_TENSOR, 3)),
    "experts, pipe": ("experts", MIXTRAL, (Layout(pipe=2, fsdp=2, expert=2), 3), (Layout(expert=4, tensor=2), 1)),
    "dense first": ("deepseek", LLAMA, (Layout(fsdp=2, tensor=2, expert=2), 1), (Layout(pipe=2, expert=2), 3)),
    "interleaved, within heads": (LATENTS, DEEPSEEK, (Layout(pipe=2, tensor=2), 3), (Layout(tensor=8), 3)),
    "interleaved, pipe": (LATENTS, DEEPSEEK, (Layout(tensor=4), 3), (Layout(fsdp=2, pipe=2, tensor=2), 3)),
}


@pytest.mark.pitfall("T-120")
@pytest.mark.parametrize("case", LAWS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_there_and_back_is_bit_identical(case, dtype, tmp_path):
    """And every number is read once, though several devices hold it, into buffers no larger than a device's shard."""
    shapes, naming, (source, above), (target, zero) = LAWS[case]
    shapes = tiny.MODELS[shapes].build().table if isinstance(shapes, str) else shapes
    params = values(shapes, dtype)
    saved = save(shapes, put(shapes, params, source, above), naming, tmp_path, dtype, shard_bytes=20_000)
    leaves = jax.tree.leaves(shapes, is_leaf=is_tensor)
    size = np.dtype(dtype).itemsize
    assert saved.bytes == size * sum(t.size for t in leaves)
    assert saved.staging_bytes == size * max(prod(of[0][1].shape) for of in stored(shapes, naming).values())
    watched, told = Watched(tmp_path), []
    found = fresh(shapes, watched, naming, dtype, target, zero, progress=lambda *counts: told.append(counts))
    assert tiny.identical(jax.device_get(found.params), params)
    where = shardings(shapes, target.mesh(), zero)
    assert all(x.sharding == s for x, s in zip(jax.tree.leaves(found.params), jax.tree.leaves(where), strict=True))
    assert all((reads == 1).all() for reads in watched.reads.values())
    assert found.read_bytes == watched.read_bytes == saved.bytes
    shard = lambda t, s: size * prod(s.shard_shape(t.shape))
    assert found.staging_bytes == max(map(shard, leaves, jax.tree.leaves(where)))
    assert [*told] == sorted(told) and told[-1] == (saved.bytes, saved.bytes)


def test_replicas_do_not_share_a_buffer_that_is_written(tmp_path):
    """Donated parameters of one load leave those of another, and the other devices' copies, as they were."""
    params = values(LLAMAS)
    save(LLAMAS, put(LLAMAS, params, ONE), LLAMA, tmp_path, np.float32)
    layout = Layout(data=4)
    one, other = (fresh(LLAMAS, SafeTensors(tmp_path), layout=layout).params for _ in range(2))
    with jax.set_mesh(layout.mesh()):
        more = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(one)
    for shard in range(4):
        for x, y, z in zip(*map(jax.tree.leaves, (params, other, more)), strict=True):
            assert (np.asarray(y.addressable_shards[shard].data) == x).all()
            assert (np.asarray(z.addressable_shards[shard].data) == x + np.float32(1)).all()


def test_the_file_is_the_librarys(peers, tmp_path):
    """Byte for byte: the order of tensors of two dtypes, the header, its padding and the numbers."""
    params = values(LLAMAS)
    mixed = lambda t: np.float32 if "norm" in t.name else jnp.bfloat16
    save(LLAMAS, put(LLAMAS, params, Layout(tensor=2)), LLAMA, tmp_path / "ours", mixed)
    there = {}
    for key, x in params.items():
        for part in pieces(LLAMAS[key], LLAMA, LLAMAS):
            tensor = peers.torch.tensor(np.ascontiguousarray(part.turn(x[part.at])))
            there[part.name] = tensor if "norm" in part.name else tensor.bfloat16()
    peers.save(there, tmp_path / "library", {"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "library").read_bytes()


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_rounding_is_torchs(dtype, peers, tmp_path):
    """To nearest, ties to even, both ways; a dtype may be chosen for each tensor."""
    torch = peers.torch
    shapes = dict(model__embed_tokens=Tensor("model.embed_tokens.weight", "V D", (256, 4), P("tensor", "fsdp"), 0))
    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    x[:2] = [[1 + 2**-8, 1 + 3 * 2**-8, 0, -0.0], [np.inf, -np.inf, 1e-8, np.nan]]
    save(shapes, put(shapes, dict(model__embed_tokens=x), ONE), LLAMA, tmp_path / "full", np.float32)
    save(shapes, put(shapes, dict(model__embed_tokens=x), ONE), LLAMA, tmp_path / "half", lambda t: dtype)
    theirs = torch.tensor(x).to(getattr(torch, np.dtype(dtype).name))
    loaded = fresh(shapes, SafeTensors(tmp_path / "full"), dtype=lambda t: dtype)
    for ours in (
        loaded.params["model__embed_tokens"],
        whole(SafeTensors(tmp_path / "half"), "model.embed_tokens.weight"),
    ):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs.float().numpy())


# ---- what a checkpoint has and a table does not, and the reverse


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """edit(function) -> the source of a Llama whose tensors the function has changed."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save(LLAMAS, put(LLAMAS, values(LLAMAS), ONE), LLAMA, folder, np.float32)
    base = {name: np.array(whole(SafeTensors(folder), name)) for name in SafeTensors(folder).tensors}

    def edit(change=lambda tensors: None):
        tensors = dict(base)
        change(tensors)
        entries = {name: Entry(x.shape, x.dtype) for name, x in tensors.items()}
        where = folder / "edited"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        (where / "model.safetensors").write_bytes(header(entries) + b"".join(x.tobytes() for x in tensors.values()))
        return Watched(where)

    return edit


def test_what_does_not_fit_is_listed_in_one_error(checkpoint):
    """With what it may have been meant for; before anything is read."""

    def change(tensors):
        for layer in range(L):
            tensors[f"model.layers.{layer}.self_attn.W_q.weight"] = tensors.pop(
                f"model.layers.{layer}.self_attn.q_proj.weight"
            )
        tensors["model.norm.weight"] = tensors["model.norm.weight"][1:]
        tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].T.copy()
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].astype(np.int8)
        for key in ("zz", "yy", "xx", "ww", "vv"):
            tensors[key] = np.ones(1, np.float32)

    source = checkpoint(change)
    with pytest.raises(UserError) as error:
        fresh(LLAMAS, source)
    text = str(error.value)
    assert "\n" not in text and text.startswith(f"{source.path} is not a checkpoint of this model: ")
    for said in (
        "2 missing: model.layers.0.self_attn.q_proj.weight and 1 like it "
        "(there: model.layers.{}.self_attn.W_q.weight?); ",
        "7 not of the model: model.layers.0.self_attn.W_q.weight and 1 like it "
        "(here: model.layers.{}.self_attn.q_proj.weight?), ",
        ", and 2 more; ",
        "2 of another shape: ",
        f"model.layers.0.mlp.down_proj.weight: [{F}, {D}] there, [{D}, {F}] here",
        f"model.norm.weight: [{D - 1}] there, [{D}] here",
        "1 not of floating point: model.layers.1.mlp.up_proj.weight: int8",
        "quantized",
    ):
        assert said in text, said
    assert source.read_bytes == 0


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight_scale_inv", "model.layers.0.mlp.up_proj.qweight"])
def test_a_quantized_checkpoint_is_refused(checkpoint, name):
    source = checkpoint(lambda tensors: tensors.update({name: np.ones((1, 1), np.float32)}))
    with pytest.raises(
        UserError, match="1 not of the model: .*it is quantized: load the checkpoint that it was made of"
    ):
        fresh(LLAMAS, source)


def test_only_what_is_not_needed_is_ignored(checkpoint):
    """Frequencies that older checkpoints store, layers that a naming leaves out; anything else is refused."""

    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors[f"model.layers.{L}.enorm.weight"] = np.ones(4, np.float32)

    with pytest.raises(UserError, match=rf"1 not of the model: model.layers.{L}.enorm.weight"):
        fresh(LLAMAS, checkpoint(change))
    source = checkpoint(change)
    found = fresh(LLAMAS, source, Naming(ignored=(f"model.layers.{L}.*",)))
    assert set(found.ignored) == {"model.layers.0.self_attn.rotary_emb.inv_freq", f"model.layers.{L}.enorm.weight"}
    assert all((source.reads[name] == 0).all() for name in found.ignored)
    assert tiny.identical(jax.device_get(found.params), values(LLAMAS))


@pytest.mark.pitfall("T-93")
def test_a_tied_head_may_be_stored_and_is_not_read(checkpoint):
    tied = FAMILIES["llama tied"][2]
    source = checkpoint(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    found = fresh(tied, source)
    assert found.ignored == ("lm_head.weight",) and (source.reads["lm_head.weight"] == 0).all()
    assert (np.asarray(found.params["model__embed_tokens"]) == values(LLAMAS)["model__embed_tokens"]).all()


def test_a_head_may_be_missing(checkpoint):
    """An actor with a value head, from a checkpoint without one: the rest is loaded, and the head is grafted on."""
    both = LLAMAS | map_table(lambda t: replace(t, std=0.5), table(score=(D,)))
    with pytest.raises(UserError, match=r"1 missing: score.weight; use the model"):
        fresh(both, checkpoint())
    found = fresh(both, checkpoint(), optional=("score.weight",))
    assert found.params["score"] is None and found.table == both | dict(score=None)
    params = jax.device_get(completed(both, found.table, found.params, ONE.mesh(), 3, seed=5))
    with jax.set_mesh(ONE.mesh()):
        score = jax.device_get(init(both, jax.random.key(5))["score"])
    assert np.abs(score).max() > 0 and tiny.identical(params, values(LLAMAS) | dict(score=score))
    with pytest.raises(UserError, match=r"1 missing: lm_head.weight"):  # only what may be
        fresh(both, checkpoint(lambda t: t.pop("lm_head.weight")), optional=("score.weight",))


def test_a_value_head_is_a_linear_of_one_output(checkpoint):
    """A critic: its head is [1, D] there, and the checkpoint's other head is left out."""
    critic = {key: t for key, t in LLAMAS.items() if key != "lm_head"} | table(score=(D,))
    weight = np.arange(D, dtype=np.float32)
    source = checkpoint(lambda t: t.update({"score.weight": weight[None]}))
    found = fresh(critic, source, layout=Layout(fsdp=2), optional=("score.weight",))  # may be missing, but is there
    assert (np.asarray(found.params["score"]) == weight).all() and found.ignored == ("lm_head.weight",)
    with pytest.raises(UserError, match=rf"score.weight: \[{D}\] there, \[1, {D}\] here"):
        fresh(critic, checkpoint(lambda t: t.update({"score.weight": weight})))


# ---- writing


@pytest.mark.pitfall("T-92")
def test_nothing_is_left_of_what_could_not_be_written(tmp_path):
    params = put(LLAMAS, values(LLAMAS), ONE)

    def full(done, total):
        if done > total / 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="out: weights cannot be written: No space left on device; mend"):
        save(LLAMAS, params, LLAMA, tmp_path / "out", np.float32, 4000, full)
    assert [*(tmp_path / "out").iterdir()] == []
    save(LLAMAS, params, LLAMA, tmp_path / "out", np.float32, 4000)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    count = len(names) - 1
    shards = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert names == [*shards, "model.safetensors.index.json"] and count > 3
    with pytest.raises(UserError, match="out has model-00001-of-.* already; choose another directory"):
        save(LLAMAS, params, LLAMA, tmp_path / "out", np.float32)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: weights cannot be written: File exists"):
        save(LLAMAS, params, LLAMA, tmp_path / "file", np.float32)


def test_other_parameters_than_the_tables_are_refused(tmp_path):
    params = put(LLAMAS, values(LLAMAS), ONE)
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(16, 39\), and \(16, 40\) in the table"):
        save(LLAMAS, params | dict(lm_head=params["lm_head"][:, :39]), LLAMA, tmp_path, np.float32)


def test_files_fill_up_in_the_order_of_layers(tmp_path):
    """As many tensors as a file may hold, or one that is larger; layer 2 before layer 10. The index has the sum."""
    deep = table(layers=12, **HEAD, **NORMS)
    vector, matrix = 4 * D, 4 * V * D
    saved = save(deep, put(deep, values(deep), ONE), LLAMA, tmp_path, np.float32, shard_bytes=8 * vector)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": saved.bytes} == {"total_size": 2 * matrix + 25 * vector}
    where = lambda name: saved.files.index(index["weight_map"][name])
    assert [where(f"model.layers.{i}.input_layernorm.weight") for i in range(12)] == [2] * 4 + [3] * 4 + [4] * 4
    assert [where(name) for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")] == [0, 1, 5]


PROCESS = """
import sys, jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from rljax.mesh import Layout
from rljax.errors import UserError
from rljax.weights.load import load
from rljax.weights.names import LLAMA
from rljax.weights.save import save
from rljax.weights.source import SafeTensors
from test_weights import LLAMAS
found = load(LLAMAS, SafeTensors(sys.argv[3]), LLAMA, Layout(fsdp=4, tensor=2).mesh(), 3, np.float32)
print("read", found.read_bytes, found.staging_bytes)
print("sum", sum(float(np.asarray(s.data).sum()) for s in found.params["lm_head"].addressable_shards))
try:
    save(LLAMAS, found.params, LLAMA, sys.argv[3] + "/out", np.float32)
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_reads_what_its_devices_hold(tmp_path):
    """Two processes of four devices each: half of every matrix, and all of what is replicated."""
    import socket

    params = values(LLAMAS)
    save(LLAMAS, put(LLAMAS, params, ONE), LLAMA, tmp_path, np.float32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])}
    command = lambda i: [sys.executable, "-c", PROCESS, address, str(i), str(tmp_path)]
    started = [subprocess.Popen(command(i), env=env, stdout=subprocess.PIPE, text=True) for i in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    matrices = sum(x.size for x in params.values() if x.ndim - (x.shape[0] == L) == 2)
    vectors = sum(x.size for x in params.values()) - matrices
    largest = max(L * D * F, V * D) // 8
    for i, output in enumerate(outputs):
        lines = output.splitlines()
        assert lines[0] == f"read {4 * (matrices // 2 + vectors)} {4 * largest}"
        mine = params["lm_head"][i * D // 2 : (i + 1) * D // 2]
        assert float(lines[1].removeprefix("sum ")) == pytest.approx(mine.sum(), rel=1e-4, abs=1e-4)
        assert "lies on devices of other processes too" in lines[2]
