"""Adapters in PEFT's files: what it saved computes here what it computes there, and it reads what is written here.

The control is the library itself where it is installed; and always transformers' own model, to whose matrices the
products are added by hand.
"""

import json
import warnings
from functools import cache
from math import sqrt
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import P
from tiny import ONE

from rljax.errors import UserError
from rljax.mesh import BATCH, Layout
from rljax.model import lora as low_rank
from rljax.model.forward import hidden
from rljax.model.lora import LoRA, adapted
from rljax.model.table import map_table, part, shardings
from rljax.run.imported import imported, is_checkpoint
from rljax.types import Tokens
from rljax.weights import config, families
from rljax.weights.load import load
from rljax.weights.names import PHI3
from rljax.weights.peft import CONFIG, WEIGHTS, export_adapter, load_adapter, read_adapter
from rljax.weights.save import save
from rljax.weights.source import SafeTensors

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.25,
)  # fmt: skip
CASES = {  # class, settings, targets
    "llama": ("Llama", {}, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "deepseek v3": (  # queries whose rows are interleaved, and a latent
        "DeepseekV3",
        dict(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, num_key_value_heads=4, n_group=4,
             n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
             topk_group=2, q_lora_rank=20),
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
}  # fmt: skip
RANK, ALPHA = 3, 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("peft")


@pytest.fixture(scope="module")
def peft():
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("peft")


@cache
def peer(case: str, folder):
    """The directory of a model of transformers."""
    import torch
    import transformers

    kind, settings, _ = CASES[case]
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    where = folder / case.replace(" ", "-")
    getattr(transformers, f"{kind}ForCausalLM")(made).float().eval().save_pretrained(where)
    return where


def of_transformers(where):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(where).float().eval()


@cache
def ours(where, layout=ONE):
    """(decoder, naming, parameters)."""
    read = config.Config(config.read(where))
    m = families.read(read)
    naming = families.family(read).naming(m)
    return m, naming, load(m.build().table, SafeTensors(where), naming, layout.mesh(), 3, np.float32).params


IDS = np.random.default_rng(0).integers(1, 96, (2, 12)).astype(np.int32)


def logits_of(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(IDS)).logits.numpy()


def logits(lm, params, layout=ONE) -> np.ndarray:
    ones = np.ones_like(IDS)
    run = jax.jit(lambda params, tokens: lm.project(params)(hidden(lm, params, tokens)[0]))
    with jax.set_mesh(layout.mesh()):
        tokens = jax.device_put(Tokens(IDS, np.cumsum(ones, 1).astype(np.int32) - 1, ones), P(BATCH, None))
        return jax.device_get(run(params, tokens))


def close(got, expected) -> bool:
    return np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()


def trained(case: str, folder, layout=ONE):
    """(model with adapters of which no B is 0, its parameters, its adapters' settings, naming)."""
    lora = LoRA(RANK, ALPHA, CASES[case][2])
    m, naming, base = ours(peer(case, folder), layout)
    lm = adapted(m.build(), lora)
    draw = np.random.default_rng(3)
    own = map_table(lambda t: 0.2 * draw.normal(size=t.shape).astype(np.float32), low_rank.adapters(lm.table))
    own = jax.device_put(own, low_rank.adapters(shardings(lm.table, layout.mesh(), 3)))
    return lm, low_rank.attached(lm.table, base, own), lora, naming


@pytest.mark.filterwarnings("ignore")  # of PEFT, about itself
@pytest.mark.parametrize("case", CASES)
def test_what_peft_saved_computes_here_what_it_computes_there(case, folder, peft, tmp_path):
    import torch

    base, targets = peer(case, folder), CASES[case][2]
    for rslora in (False, True):
        settings = peft.LoraConfig(r=RANK, lora_alpha=5, lora_dropout=0.1, target_modules=list(targets),
                                   task_type="CAUSAL_LM", use_rslora=rslora)  # fmt: skip
        torch.manual_seed(1)
        theirs = peft.get_peft_model(of_transformers(base), settings).eval()
        with torch.no_grad():
            for name, value in theirs.named_parameters():
                if "lora_B" in name:
                    value += 0.2 * torch.randn_like(value)
        where = tmp_path / str(rslora)
        theirs.save_pretrained(where)
        lora = read_adapter(where)
        assert lora == LoRA(RANK, 5 * sqrt(3) if rslora else 5.0, tuple(sorted(targets)), 0.1)
        m, naming, params = ours(base)
        lm = adapted(m.build(), lora)
        loaded = load_adapter(lm.table, where, naming, ONE.mesh(), 3)
        params = low_rank.attached(lm.table, params, loaded.params)
        expected = logits_of(theirs)
        assert close(logits(lm, params), expected)
        whole = imported(where, m, ("tokens",), ONE.mesh(), 3).params  # as a start or TARGET: with the products added
        assert close(logits(m.build(), whole), expected)
        assert not close(logits_of(of_transformers(base)), expected)  # control: the adapters say something


@pytest.mark.filterwarnings("ignore")  # of PEFT, about itself
@pytest.mark.parametrize("case", CASES)
def test_peft_reads_what_is_written_here(case, folder, peft, tmp_path):
    lm, params, lora, naming = trained(case, folder)
    export_adapter(lm.table, params, lora, naming, tmp_path / "adapter", base=str(peer(case, folder)))
    theirs = peft.PeftModel.from_pretrained(of_transformers(peer(case, folder)), tmp_path / "adapter").eval()
    assert close(logits(lm, params), logits_of(theirs))
    assert read_adapter(tmp_path / "adapter") == LoRA(RANK, ALPHA, tuple(sorted(CASES[case][2])))


@pytest.mark.pitfall("T-117")
@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_transformers_with_products_added_by_hand(case, folder, tmp_path):
    """Written as a checkpoint, on eight devices, and read by transformers: without PEFT."""
    import torch

    layout = Layout(fsdp=2, tensor=2) if case == "llama" else ONE
    lm, params, lora, naming = trained(case, folder, layout)
    before = jax.device_get(part(lm.table, params)[1])
    with jax.set_mesh(layout.mesh()):
        merged = jax.jit(low_rank.merged)(params)
    assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(jax.device_get(part(lm.table, params)[1]))))
    table = low_rank.base(lm.table)
    assert table == ours(peer(case, folder), layout)[0].build().table
    expected = logits(lm, params, layout)
    save(table, merged, naming, tmp_path / "merged", np.float32)
    (tmp_path / "merged" / "config.json").write_text((peer(case, folder) / "config.json").read_text())
    assert close(logits_of(of_transformers(tmp_path / "merged")), expected)

    export_adapter(lm.table, params, lora, naming, tmp_path / "adapter")
    from safetensors.torch import load_file

    stored, by_hand = load_file(tmp_path / "adapter" / WEIGHTS), of_transformers(peer(case, folder))
    matrices = dict(by_hand.named_parameters())
    downs = [name for name in stored if "lora_A" in name]
    assert len(downs) * 2 == len(stored) > 0
    with torch.no_grad():
        for name in downs:
            key = name.removeprefix("base_model.model.").replace("lora_A.", "")
            matrices[key] += ALPHA / RANK * stored[name.replace("lora_A", "lora_B")] @ stored[name]
    assert close(logits_of(by_hand), expected)


def test_an_adapter_read_back_is_the_same_bits_on_any_layout(folder, tmp_path):
    lm, params, lora, naming = trained("llama", folder)
    saved = export_adapter(lm.table, params, lora, naming, tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [CONFIG, WEIGHTS]
    own = low_rank.adapters(params)
    assert saved.bytes == sum(4 * x.size for x in jax.tree.leaves(own))
    for layout in (ONE, Layout(fsdp=2, tensor=2)):
        back = load_adapter(lm.table, tmp_path / "adapter", naming, layout.mesh(), 3)
        assert back.read_bytes == saved.bytes
        same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), own, back.params)
        assert jax.tree.all(same)
        there = low_rank.adapters(shardings(lm.table, layout.mesh(), 3))
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, back.params, there))


GOOD = dict(
    peft_type="LORA", r=4, lora_alpha=8, target_modules=["q_proj"], bias="none", loftq_config={}, rank_pattern={},
    megatron_core="megatron.core", use_dora=False, modules_to_save=None, init_lora_weights=True,
)  # fmt: skip
REFUSED = {
    "dora": (dict(use_dora=True), "use_dora=true is not supported"),
    "saved modules": (dict(modules_to_save=["lm_head"]), 'modules_to_save=["lm_head"] is not supported'),
    "bias": (dict(bias="all"), 'bias="all" is not supported'),
    "ranks": (dict(rank_pattern={"q_proj": 8}), 'rank_pattern={"q_proj": 8} is not supported'),
    "pissa": (dict(init_lora_weights="pissa"), 'init_lora_weights="pissa" is not supported'),
    "kind": (dict(peft_type="IA3"), 'peft_type="IA3" is not supported'),
    "pattern": (dict(target_modules=".*q_proj"), 'target_modules=".*q_proj" is not supported'),
    "layers": (dict(layers_to_transform=[0]), "layers_to_transform=[0] is not supported"),
    "unheard of": (dict(use_novelty=True), "use_novelty=true is not supported"),
    "rank": (dict(r=0), "rank=0"),
    "nothing": (dict(r=...), "lacks 'r'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_are_not_supported_are_named(case, tmp_path):
    changed, message = REFUSED[case]
    values = {key: value for key, value in (GOOD | changed).items() if value is not ...}
    (tmp_path / CONFIG).write_text(json.dumps(GOOD))
    assert read_adapter(tmp_path) == LoRA(4, 8.0, ("q_proj",))
    (tmp_path / CONFIG).write_text(json.dumps(values))
    with pytest.raises(UserError) as error:
        read_adapter(tmp_path)
    assert message in str(error.value) and CONFIG in str(error.value)


def test_files_that_are_missing_or_do_not_fit_are_named(folder, tmp_path):
    lm, params, lora, naming = trained("llama", folder)
    with pytest.raises(UserError, match=CONFIG):
        read_adapter(tmp_path)
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(UserError, match="no JSON object"):
        read_adapter(tmp_path)
    with pytest.raises(UserError, match=f"has no {WEIGHTS}"):
        load_adapter(lm.table, tmp_path, naming, ONE.mesh(), 3)
    export_adapter(lm.table, params, lora, naming, tmp_path / "adapter")
    with pytest.raises(UserError, match="has adapter_model.safetensors already"):
        export_adapter(lm.table, params, lora, naming, tmp_path / "adapter")
    other = adapted(ours(peer("llama", folder))[0].build(), LoRA(RANK, ALPHA, ("q_proj",)))
    with pytest.raises(UserError, match="not of the model"):
        load_adapter(other.table, tmp_path / "adapter", naming, ONE.mesh(), 3)
    with pytest.raises(UserError, match="have model.layers.{}.self_attn.q_proj within self_attn.qkv_proj"):
        export_adapter(lm.table, params, lora, PHI3, tmp_path / "fused")
    m = ours(peer("llama", folder))[0]
    for name in (None, "some/model", str(tmp_path)):  # of the hub, or a directory of something else
        (tmp_path / "adapter" / CONFIG).write_text(json.dumps(GOOD | {"base_model_name_or_path": name}))
        assert is_checkpoint(tmp_path / "adapter")
        with pytest.raises(UserError, match=f"base_model_name_or_path='{name or ''}' is no directory in Hugging Face"):
            imported(tmp_path / "adapter", m, ("tokens",), ONE.mesh(), 3)
    named = GOOD | {"base_model_name_or_path": str(peer("llama", folder)), "target_modules": ["q_prj"]}
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(named))
    with pytest.raises(UserError, match="targets has 'q_prj', a matrix that the model lacks"):
        imported(tmp_path / "adapter", m, ("tokens",), ONE.mesh(), 3)
    full = SimpleNamespace(path=tmp_path / "full")
    full.path.mkdir()
    (full.path / f".{CONFIG}.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        export_adapter(lm.table, params, lora, naming, full.path)
    assert not [*full.path.iterdir()]
