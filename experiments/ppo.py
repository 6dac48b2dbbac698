"""PPO: a critic of its own learns what a state is worth, and advantages are estimated from it token by token.

The quickstart's task and warm-up. Before the actor moves, the critic learns alone for a few steps, from the actor's
backbone with a new head. With `'roles.critic={"$": "rljax.run.run:Shared"}' objective.critic.warmup=0` it is a value
head on the actor instead: one forward serves both.
"""

from dataclasses import replace

from rljax.assess.rewards import ExactMatch
from rljax.data.problems import Addition
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.run.run import Checkpoints, Evaluation, Fresh, Reached, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import ppo, sft
from rljax.train.losses import ValueLoss
from rljax.train.objectives import Critic
from rljax.train.optimizer import AdamW

LM = Decoder(vocab=16, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=192, qk_norm="head")
COMMON = dict(
    task=Addition(digits=3), tokenizer=Characters("0123456789+=;#"), rewards=(ExactMatch(after="#"),),
    max_prompt=8, max_new=32, mesh="meshes/eight.toml",
)  # fmt: skip

WARMUP = Run(
    roles={"actor": Role(LM, Fresh(), AdamW(lr=6e-3, b2=0.98, warmup=20))},
    objective=sft(),
    schedule=supervised,
    prompts=128,
    steps=500,
    until=Reached("eval/exact_match", 0.2),
    checkpoints=Checkpoints(every=0),
    **COMMON,
)

RUN = Run(
    roles={
        "actor": Role(LM, WARMUP, AdamW(lr=8e-4, b2=0.98, warmup=4, decay="linear", floor=0.1)),
        "critic": Role(LM, optimizer=AdamW(lr=2e-3, b2=0.98)),
        "reference": Role(LM),
    },
    objective=replace(ppo(lam=1.0, kl_in_reward=0.001), critic=Critic(ValueLoss(clip=None), warmup=3)),
    schedule=synchronous,
    prompts=384,
    n=1,
    minibatches=4,
    steps=60,
    evaluation=Evaluation(every=10),
    checkpoints=Checkpoints(every=0),
    **COMMON,
)
