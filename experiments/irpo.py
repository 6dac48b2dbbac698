"""Iterative reasoning preference optimization: generate, verify, pair right with wrong, train; once more from there.

Each iteration is a run that starts from the one before, draws completions from the model as it began, and prefers right
ones to wrong ones by DPO and the likelihood of the right one (arXiv:2404.19733). DPO alone, with pairs of the actor as
it is, would be `objective=dpo()` and `pairs=Pairing()`.
"""

from rljax.assess.rewards import ExactMatch
from rljax.data.problems import Addition
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.run.run import Checkpoints, Evaluation, Fresh, Pairing, Reached, Role, Run
from rljax.run.schedules import paired, supervised
from rljax.train.algorithms import irpo, sft
from rljax.train.optimizer import AdamW

LM = Decoder(vocab=16, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=192, qk_norm="head")
COMMON = dict(
    task=Addition(digits=3), tokenizer=Characters("0123456789+=;#"), rewards=(ExactMatch(after="#"),),
    max_prompt=8, max_new=32, checkpoints=Checkpoints(every=0), mesh="meshes/eight.toml",
)  # fmt: skip

WARMUP = Run(
    roles={"actor": Role(LM, Fresh(), AdamW(lr=6e-3, b2=0.98, warmup=20))},
    objective=sft(),
    schedule=supervised,
    prompts=128,
    steps=500,
    until=Reached("eval/exact_match", 0.2),
    **COMMON,
)


def iteration(start: Run) -> Run:
    return Run(
        roles={
            "actor": Role(LM, start, AdamW(lr=4e-4, b2=0.98, warmup=4, decay="linear", floor=0.1)),
            "reference": Role(LM),
        },
        objective=irpo(),
        schedule=paired,
        pairs=Pairing(of="reference", per_prompt=4),
        prompts=64,
        n=8,
        minibatches=4,
        steps=15,
        evaluation=Evaluation(every=5),
        **COMMON,
    )


RUN = iteration(iteration(iteration(WARMUP)))
