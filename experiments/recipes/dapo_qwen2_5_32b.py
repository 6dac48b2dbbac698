"""DAPO with Qwen2.5-32B, to 50 points on AIME 2024 in the paper (arXiv:2503.14476, section 4.1).

16 completions of each of 512 problems, of which none is kept that all got right or none; 16 updates a step at 1e-6,
warmed up over 20 steps. Completions are meant to end within 16384 tokens and are cut at 20480. Needs the checkpoint and
the problems, DAPO-Math-17k, as JSON Lines (`prompt`, `answer`).
"""

from rljax.assess.rewards import LastNumber, Overlong
from rljax.data.files import Problems
from rljax.data.pretrained import Pretrained
from rljax.model.presets import QWEN2_5_32B
from rljax.run.run import Checkpoints, Evaluation, Resample, Role, Run
from rljax.run.schedules import synchronous
from rljax.train.algorithms import dapo
from rljax.train.optimizer import AdamW

START = "models/Qwen2.5-32B"

RUN = Run(
    roles={"actor": Role(QWEN2_5_32B, start=START, optimizer=AdamW(lr=1e-6, weight_decay=0.1, warmup=20 * 16))},
    task=Problems("data/dapo_math_17k.jsonl"),
    tokenizer=Pretrained(START),
    objective=dapo(),
    schedule=synchronous,
    rewards=(LastNumber(), Overlong(limit=20480, cache=4096)),
    resample=Resample(rounds=10),
    prompts=512,
    n=16,
    minibatches=16,
    max_prompt=2048,
    max_new=20480,
    chunk=512,
    pack=22528,
    steps=500,
    evaluation=Evaluation(every=10, problems=512),
    checkpoints=Checkpoints(every=20, best="eval/exact_match"),
    mesh="meshes/v5p_128.toml",
)
