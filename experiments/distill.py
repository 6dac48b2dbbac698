"""On-policy distillation: a small model writes, a larger one judges every token, and the small one moves towards it.

The teacher is trained on worked sums first. The student sees no solution but the few of its own warm-up: its advantage
is the teacher's log-probability of each of its tokens less its own, the reverse KL (arXiv:2306.13649).
"""

from rljax.assess.rewards import ExactMatch
from rljax.data.problems import Addition
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.run.run import Checkpoints, Evaluation, Fresh, Reached, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import distillation, sft
from rljax.train.optimizer import AdamW

TEACHER = Decoder(vocab=16, width=96, layers=2, heads=4, kv_heads=2, head_dim=24, ffn=256, qk_norm="head")
STUDENT = Decoder(vocab=16, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=192, qk_norm="head")
COMMON = dict(
    tokenizer=Characters("0123456789+=;#"), rewards=(ExactMatch(after="#"),), max_prompt=8, max_new=32,
    checkpoints=Checkpoints(every=0), mesh="meshes/eight.toml",
)  # fmt: skip


def shown(lm: Decoder, think: float, accuracy: float) -> Run:
    """A model trained on sums, of which a share is worked out, until it gets so many right."""
    return Run(
        roles={"actor": Role(lm, Fresh(), AdamW(lr=6e-3, b2=0.98, warmup=20))},
        task=Addition(digits=3, think=think),
        objective=sft(),
        schedule=supervised,
        prompts=128,
        steps=500,
        until=Reached("eval/exact_match", accuracy),
        **COMMON,
    )


RUN = Run(
    roles={
        "actor": Role(STUDENT, shown(STUDENT, 0.5, 0.2), AdamW(lr=2e-4, b2=0.98, warmup=4)),
        "teacher": Role(TEACHER, shown(TEACHER, 1.0, 0.95)),
    },
    task=Addition(digits=3),
    objective=distillation(),
    schedule=synchronous,
    prompts=512,
    n=1,
    steps=60,
    evaluation=Evaluation(every=10),
    **COMMON,
)
