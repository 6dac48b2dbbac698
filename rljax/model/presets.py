"""Models that people use, by the sizes of their checkpoints: values to start from, as in `replace(QWEN3_8B, ...)`.

They compute in bfloat16. A checkpoint that differs in a setting, such as a fine-tuned one of another context, is read
by `rljax.run.imported.decoder(directory)`.
"""

from functools import partial
from math import sqrt

from rljax.model.decoder import Decoder
from rljax.model.latent import Latent
from rljax.model.moe import Experts
from rljax.model.rope import Linear, Llama3, Yarn, magnitude

# vocab, width, layers, heads, kv_heads, head_dim, ffn
_decoder = partial(Decoder, compute="bfloat16")

_smollm = partial(_decoder, rope_theta=1e5, norm_eps=1e-5, tied=True)
SMOLLM2_135M = _smollm(49152, 576, 30, 9, 3, 64, 1536)
SMOLLM2_360M = _smollm(49152, 960, 32, 15, 5, 64, 2560)
SMOLLM2_1_7B = _decoder(49152, 2048, 24, 32, 32, 64, 8192, rope_theta=130_000.0, norm_eps=1e-5, tied=True)

LLAMA_2_7B = _decoder(32000, 4096, 32, 32, 32, 128, 11008, norm_eps=1e-5)
LLAMA_2_13B = _decoder(32000, 5120, 40, 40, 40, 128, 13824, norm_eps=1e-5)
LLAMA_2_70B = _decoder(32000, 8192, 80, 64, 8, 128, 28672, norm_eps=1e-5)
_llama3 = partial(_decoder, 128256, rope_theta=5e5, rope_scaling=Llama3(8.0), norm_eps=1e-5)
LLAMA_3_1_8B = _llama3(4096, 32, 32, 8, 128, 14336)
LLAMA_3_1_70B = _llama3(8192, 80, 64, 8, 128, 28672)
_small = partial(_decoder, 128256, rope_theta=5e5, rope_scaling=Llama3(32.0), norm_eps=1e-5, tied=True)
LLAMA_3_2_1B = _small(2048, 16, 32, 8, 64, 8192)
LLAMA_3_2_3B = _small(3072, 28, 24, 8, 128, 8192)

MISTRAL_7B_V0_1 = _decoder(32000, 4096, 32, 32, 8, 128, 14336, norm_eps=1e-5, window=4096)
MISTRAL_7B_V0_3 = _decoder(32768, 4096, 32, 32, 8, 128, 14336, norm_eps=1e-5, rope_theta=1e6)
MIXTRAL_8X7B = _decoder(32000, 4096, 32, 32, 8, 128, 14336, norm_eps=1e-5, rope_theta=1e6, experts=Experts(8, 2, 14336))
MIXTRAL_8X22B = _decoder(
    32000, 6144, 56, 48, 8, 128, 16384, norm_eps=1e-5, rope_theta=1e6, experts=Experts(8, 2, 16384)
)

_qwen2 = partial(_decoder, rope_theta=1e6, qkv_bias=True)
QWEN2_5_0_5B = _qwen2(151936, 896, 24, 14, 2, 64, 4864, tied=True)
QWEN2_5_1_5B = _qwen2(151936, 1536, 28, 12, 2, 128, 8960, tied=True)
QWEN2_5_3B = _qwen2(151936, 2048, 36, 16, 2, 128, 11008, tied=True)
QWEN2_5_7B = _qwen2(152064, 3584, 28, 28, 4, 128, 18944)
QWEN2_5_14B = _qwen2(152064, 5120, 48, 40, 8, 128, 13824)
QWEN2_5_32B = _qwen2(152064, 5120, 64, 40, 8, 128, 27648)
QWEN2_5_72B = _qwen2(152064, 8192, 80, 64, 8, 128, 29568)

_qwen3 = partial(_decoder, 151936, rope_theta=1e6, qk_norm="head")
QWEN3_0_6B = _qwen3(1024, 28, 16, 8, 128, 3072, tied=True)
QWEN3_1_7B = _qwen3(2048, 28, 16, 8, 128, 6144, tied=True)
QWEN3_4B = _qwen3(2560, 36, 32, 8, 128, 9728, tied=True)
QWEN3_8B = _qwen3(4096, 36, 32, 8, 128, 12288)
QWEN3_14B = _qwen3(5120, 40, 40, 8, 128, 17408)
QWEN3_32B = _qwen3(5120, 64, 64, 8, 128, 25600)
QWEN3_30B_A3B = _qwen3(2048, 48, 32, 4, 128, 6144, experts=Experts(128, 8, 768))
QWEN3_235B_A22B = _qwen3(4096, 94, 64, 4, 128, 12288, experts=Experts(128, 8, 1536))


def _gemma(vocab: int, width: int, layers: int, *sizes: int, every: int, window: int, **options) -> Decoder:
    return _decoder(
        vocab, width, layers, *sizes, norms="both", norm_offset=True, tied=True, activation="gelu",
        embed_scale=sqrt(width), window=window, everywhere=tuple(range(every - 1, layers, every)), **options,
    )  # fmt: skip


_gemma2 = partial(_gemma, 256000, every=2, window=4096, score_cap=50.0, logit_cap=30.0)
GEMMA_2_2B = _gemma2(2304, 26, 8, 4, 256, 9216)
GEMMA_2_9B = _gemma2(3584, 42, 16, 8, 256, 14336)
GEMMA_2_27B = _gemma2(4608, 46, 32, 16, 128, 36864, query_scale=144**-0.5)
_gemma3 = partial(_gemma, every=6, qk_norm="head", rope_theta=1e6, window_theta=1e4)
GEMMA_3_270M = _gemma3(262144, 640, 18, 4, 1, 256, 2048, window=512)
GEMMA_3_1B = _gemma3(262144, 1152, 26, 4, 1, 256, 6912, window=512)
_text = partial(_gemma3, 262208, window=1024, rope_scaling=Linear(8.0))  # of models that also see
GEMMA_3_4B = _text(2560, 34, 8, 4, 256, 10240)
GEMMA_3_12B = _text(3840, 48, 16, 8, 256, 15360)
GEMMA_3_27B = _text(5376, 62, 32, 16, 128, 21504, query_scale=168**-0.5)

_olmo2 = partial(_decoder, 100352, rope_theta=5e5, norms="post", qk_norm="all")
OLMO_2_7B = _olmo2(4096, 32, 32, 32, 128, 11008)
OLMO_2_13B = _olmo2(5120, 40, 40, 40, 128, 13824)

PHI_3_MINI_4K = _decoder(32064, 3072, 32, 32, 32, 96, 8192, norm_eps=1e-5, window=2047)


DEEPSEEK_LLM_7B = _decoder(102400, 4096, 30, 32, 32, 128, 11008)  # and DeepSeekMath


def _deepseek(vocab: int, width: int, layers: int, heads: int, ffn: int, mscale: float, queries: int, **options):
    return _decoder(
        vocab, width, layers, heads, heads, 192, ffn, rope_scaling=Yarn(40.0, 4096),
        query_scale=magnitude(40.0, mscale) ** 2 / sqrt(192), latent=Latent(512, 128, 64, 128, queries), **options,
    )  # fmt: skip


DEEPSEEK_V2_LITE = _deepseek(
    102400, 2048, 27, 16, 10944, 0.707, 0, dense=1, experts=Experts(64, 6, 1408, shared=2816, normalize=False)
)
DEEPSEEK_V3 = _deepseek(
    129280, 7168, 61, 128, 18432, 1.0, 1536, dense=3,
    experts=Experts(256, 8, 2048, shared=2048, score="sigmoid", scale=2.5, groups=8, top_groups=4, bias_rate=0.0),
)  # fmt: skip
