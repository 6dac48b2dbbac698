"""Presets are the models whose names they have: as many parameters as published, and as transformers makes of them."""

import pytest

from rljax.model import presets
from rljax.model.decoder import Decoder
from rljax.model.table import count
from rljax.plan.parts import parameters
from rljax.weights import families

VISION = lambda width: 416_866_032 + 1152 * width + 1152  # what Gemma 3 sees with, and its projection
PUBLISHED = {
    "SMOLLM2_135M": 134_515_008, "SMOLLM2_360M": 361_821_120, "SMOLLM2_1_7B": 1_711_376_384,
    "LLAMA_2_7B": 6_738_415_616, "LLAMA_2_13B": 13_015_864_320, "LLAMA_2_70B": 68_976_648_192,
    "LLAMA_3_1_8B": 8_030_261_248, "LLAMA_3_1_70B": 70_553_706_496, "LLAMA_3_2_1B": 1_235_814_400,
    "LLAMA_3_2_3B": 3_212_749_824, "MISTRAL_7B_V0_1": 7_241_732_096, "MISTRAL_7B_V0_3": 7_248_023_552,
    "MIXTRAL_8X7B": 46_702_792_704, "MIXTRAL_8X22B": 140_620_634_112, "QWEN2_5_0_5B": 494_032_768,
    "QWEN2_5_1_5B": 1_543_714_304, "QWEN2_5_3B": 3_085_938_688, "QWEN2_5_7B": 7_615_616_512,
    "QWEN2_5_14B": 14_770_033_664, "QWEN2_5_32B": 32_763_876_352, "QWEN2_5_72B": 72_706_203_648,
    "QWEN3_0_6B": 596_049_920, "QWEN3_1_7B": 1_720_574_976, "QWEN3_4B": 4_022_468_096, "QWEN3_8B": 8_190_735_360,
    "QWEN3_14B": 14_768_307_200, "QWEN3_32B": 32_762_123_264, "QWEN3_30B_A3B": 30_532_122_624,
    "QWEN3_235B_A22B": 235_093_634_560, "GEMMA_2_2B": 2_614_341_888, "GEMMA_2_9B": 9_241_705_984,
    "GEMMA_2_27B": 27_227_128_320, "GEMMA_3_270M": 268_098_176, "GEMMA_3_1B": 999_885_952,
    "GEMMA_3_4B": 4_300_079_472 - VISION(2560), "GEMMA_3_12B": 12_187_325_040 - VISION(3840),
    "GEMMA_3_27B": 27_432_406_640 - VISION(5376), "OLMO_2_7B": 7_298_617_344, "OLMO_2_13B": 13_716_198_400,
    "PHI_3_MINI_4K": 3_821_079_552, "DEEPSEEK_LLM_7B": 6_910_365_696,
    "DEEPSEEK_V2_LITE": 15_706_484_224, "DEEPSEEK_V3": 671_026_419_200,
}  # fmt: skip
ALL = {name: value for name, value in vars(presets).items() if isinstance(value, Decoder)}
FAMILY = dict(
    SMOLLM2="llama", LLAMA="llama", MISTRAL="mistral", MIXTRAL="mixtral", QWEN2="qwen2", QWEN3="qwen3",
    GEMMA_2="gemma2", GEMMA_3="gemma3_text", OLMO="olmo2", PHI="phi3", DEEPSEEK_LLM="llama", DEEPSEEK_V2="deepseek_v2",
    DEEPSEEK_V3="deepseek_v3",
)  # fmt: skip


def test_every_preset_is_here():
    assert {*ALL} == {*PUBLISHED}


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_as_many_as_published(name):
    m = ALL[name]
    assert count(m.build().table) == parameters(m).total == PUBLISHED[name]
    assert m.compute == "bfloat16"


def own(name: str) -> families.Family:
    kind = next(kind for start, kind in FAMILY.items() if name.startswith(start))
    kind = "qwen3_moe" if kind == "qwen3" and ALL[name].experts else kind
    return next(family for family in families.FAMILIES if family.model_type == kind)


@pytest.mark.parametrize("name", ALL)
def test_transformers_makes_as_many(name):
    """Of the settings that an export writes, on no device; deep models of two layers for each kind."""
    from dataclasses import replace

    import torch
    import transformers

    m = ALL[name]
    layers = min(m.layers, m.dense + 2)
    m = replace(m, layers=layers, everywhere=tuple(i for i in m.everywhere if i < layers))
    if m.experts and m.experts.count > 64:
        m = replace(m, experts=replace(m.experts, count=64))
    family = own(name)
    assert families.essence(families.read(families.Config(families.written(family, m)))) == families.essence(m)
    kind = getattr(transformers, family.architecture.replace("ForCausalLM", "Config").replace("Gemma3C", "Gemma3TextC"))
    settings = {k: v for k, v in families.written(family, m).items() if k not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = getattr(transformers, family.architecture)(kind(**settings, pad_token_id=0))
    buffers = sum(b.numel() for name, b in model.named_buffers() if name.endswith("correction_bias"))
    assert sum(p.numel() for p in model.parameters()) + buffers == count(m.build().table)
