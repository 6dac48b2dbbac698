"""PPO from a base model: Open-Reasoner-Zero with Qwen2.5-7B (arXiv:2503.24290, sections 2 and 3).

Gamma and lambda are 1, so that a token's return is the answer's reward; no KL, no entropy bonus. 64 completions of each
of 128 problems, one update of the actor a step at 1e-6 and of the critic at 5e-6, which the paper gives twelve. Needs
the checkpoint and problems as JSON Lines (`prompt`, in the paper's template, and `answer`).
"""

from rljax.assess.rewards import LastNumber
from rljax.data.files import Problems
from rljax.data.pretrained import Pretrained
from rljax.model.presets import QWEN2_5_7B
from rljax.run.run import Checkpoints, Evaluation, Role, Run
from rljax.run.schedules import synchronous
from rljax.train.algorithms import ppo
from rljax.train.optimizer import AdamW

START = "models/Qwen2.5-7B"

RUN = Run(
    roles={
        "actor": Role(QWEN2_5_7B, start=START, optimizer=AdamW(lr=1e-6, b2=0.95, warmup=50)),
        "critic": Role(QWEN2_5_7B, optimizer=AdamW(lr=5e-6, b2=0.95, warmup=50)),
    },
    task=Problems("data/orz_57k.jsonl"),
    tokenizer=Pretrained(START, chat=False),
    objective=ppo(kl_in_reward=0.0, lam=1.0),
    schedule=synchronous,
    rewards=(LastNumber(),),
    prompts=128,
    n=64,
    max_prompt=1024,
    max_new=8192,
    chunk=256,
    pack=16384,
    steps=1000,
    evaluation=Evaluation(every=20, problems=500),
    checkpoints=Checkpoints(every=50, best="eval/exact_match"),
    mesh="meshes/v5p_8.toml",
)
