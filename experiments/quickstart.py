"""Think or answer at once: a 0.1M-parameter model learns by reward alone to work sums out before it answers.

Supervised warm-up shows sums of three-digit numbers, half of them worked column by column and half answered at once,
which so small a model cannot do in its head. GRPO then rewards the right answer and nothing else: accuracy rises, and
so does the length of what is said.
"""

from rljax.assess.rewards import ExactMatch
from rljax.data.problems import Addition
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.run.run import Checkpoints, Evaluation, Fresh, Reached, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import grpo, sft
from rljax.train.optimizer import AdamW

LM = Decoder(vocab=16, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=192, qk_norm="head")

COMMON = dict(
    task=Addition(digits=3),
    tokenizer=Characters("0123456789+=;#"),
    rewards=(ExactMatch(after="#"),),
    max_prompt=8,
    max_new=32,
    mesh="meshes/eight.toml",
)

WARMUP = Run(
    roles={"actor": Role(LM, start=Fresh(), optimizer=AdamW(lr=6e-3, b2=0.98, warmup=20))},
    objective=sft(),
    schedule=supervised,
    prompts=128,
    steps=500,
    until=Reached("eval/exact_match", 0.2),
    evaluation=Evaluation(every=10),
    checkpoints=Checkpoints(every=100),
    **COMMON,
)

RUN = Run(
    roles={
        "actor": Role(LM, start=WARMUP, optimizer=AdamW(lr=8e-4, b2=0.98, warmup=4, decay="linear", floor=0.1)),
        "reference": Role(LM),  # to measure how far the actor goes; objective.kl above 0 would hold it back
    },
    objective=grpo(),
    schedule=synchronous,
    prompts=48,
    n=8,
    minibatches=4,
    steps=60,
    evaluation=Evaluation(every=5),
    checkpoints=Checkpoints(every=20, best="eval/exact_match"),
    **COMMON,
)
