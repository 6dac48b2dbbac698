"""A reward model is trained on pairs, and reinforcement learning then asks it instead of a verifier.

Of each pair, a sum worked out is better: half the time than its answer alone, else than the same with a digit changed.
The reward model (Bradley-Terry) starts from the actor that was shown sums, with a scalar head. The actor then seeks its
score until it works sums out; exact match is only reported. So small a model of what is right is no verifier: with
`steps=40 until=null` its score goes on rising while answers go wrong, as Gao et al. 2022 (arXiv:2210.10760) describe.
"""

from dataclasses import dataclass, replace

import numpy as np

from rljax.assess.models import ModelReward
from rljax.assess.rewards import ExactMatch
from rljax.data.examples import Pair
from rljax.data.problems import Addition
from rljax.data.tokenizer import Characters
from rljax.model.decoder import Decoder
from rljax.run.run import Checkpoints, Evaluation, Fresh, Reached, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import gdpo, reward_model, sft
from rljax.train.optimizer import AdamW


@dataclass(frozen=True)
class Preferred:
    """A sum worked out, and its answer alone or the same with another digit in one place."""

    of: Addition = Addition(digits=3, think=1.0)

    def batch(self, count: int, seed: int, step: int, held_out: bool = False) -> list[Pair]:
        rng = np.random.default_rng([seed, step, held_out, 1])
        return [self.pair(p, rng) for p in self.of.batch(count, seed, step, held_out)]

    def pair(self, p, rng) -> Pair:
        at = int(rng.choice([i for i, character in enumerate(p.solution) if character.isdigit()]))
        other = str((int(p.solution[at]) + int(rng.integers(1, 10))) % 10)
        changed = p.solution[:at] + other + p.solution[at + 1 :]
        rejected = "#" + p.answer if rng.random() < 0.5 else changed
        return Pair(p.prompt, p.answer, chosen=p.solution, rejected=rejected)


LM = Decoder(vocab=16, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=192, qk_norm="head")
COMMON = dict(
    tokenizer=Characters("0123456789+=;#"), max_prompt=8, max_new=32, checkpoints=Checkpoints(every=0),
    mesh="meshes/eight.toml",
)  # fmt: skip

WARMUP = Run(
    roles={"actor": Role(LM, Fresh(), AdamW(lr=6e-3, b2=0.98, warmup=20))},
    task=Addition(digits=3),
    rewards=(ExactMatch(after="#"),),
    objective=sft(),
    schedule=supervised,
    prompts=128,
    steps=500,
    until=Reached("eval/exact_match", 0.2),
    **COMMON,
)

REWARD = Run(
    roles={"actor": Role(LM, WARMUP, AdamW(lr=3e-3, b2=0.98, warmup=10), head="value")},
    task=Preferred(),
    objective=reward_model(center=0.01),
    schedule=supervised,
    prompts=128,
    steps=300,
    until=Reached("eval/preference/accuracy", 0.95),
    evaluation=Evaluation(every=20),
    **COMMON,
)

RUN = Run(
    roles={
        "actor": Role(LM, WARMUP, AdamW(lr=4e-4, b2=0.98, warmup=4)),
        "reward": Role(LM, REWARD),
        "reference": Role(LM),
    },
    task=Addition(digits=3),
    rewards=(ModelReward(), ExactMatch(after="#")),
    objective=replace(gdpo(weights=(1.0, 0.0)), kl=0.1),
    schedule=synchronous,
    prompts=48,
    n=8,
    minibatches=4,
    steps=10,
    until=Reached("eval/length", 29.0),
    evaluation=Evaluation(every=1),
    **COMMON,
)
