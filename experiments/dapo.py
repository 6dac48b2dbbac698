"""DAPO: clip-higher, the token mean, prompts resampled until each has right and wrong answers, soft length penalty.

The quickstart's task and warm-up. Other algorithms of its kind differ in one value: `objective=` any of
rljax.train.algorithms, such as `gspo()`, `cispo()`, `dr_grpo(40)` or `rloo()`.
"""

from rljax.assess.rewards import ExactMatch, Overlong
from rljax.data.problems import Addition
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.run.run import Checkpoints, Evaluation, Fresh, Reached, Resample, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import dapo, sft
from rljax.train.optimizer import AdamW

LM = Decoder(vocab=16, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=192, qk_norm="head")
COMMON = dict(
    task=Addition(digits=3), tokenizer=Characters("0123456789+=;#"), max_prompt=8, max_new=40, mesh="meshes/eight.toml"
)

WARMUP = Run(
    roles={"actor": Role(LM, Fresh(), AdamW(lr=6e-3, b2=0.98, warmup=20))},
    objective=sft(),
    schedule=supervised,
    rewards=(ExactMatch(after="#"),),
    prompts=128,
    steps=500,
    until=Reached("eval/exact_match", 0.2),
    checkpoints=Checkpoints(every=0),
    **COMMON,
)

RUN = Run(
    roles={"actor": Role(LM, WARMUP, AdamW(lr=8e-4, b2=0.98, warmup=4, decay="linear", floor=0.1))},
    objective=dapo(),
    schedule=synchronous,
    rewards=(ExactMatch(after="#"), Overlong(limit=40, cache=8)),
    resample=Resample(rounds=10),
    prompts=32,
    n=8,
    minibatches=4,
    steps=40,
    evaluation=Evaluation(every=10),
    checkpoints=Checkpoints(every=0),
    **COMMON,
)
