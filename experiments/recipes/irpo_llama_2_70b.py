"""Iterative reasoning preference optimization of Llama-2-70B-Chat on GSM8K (arXiv:2404.19733, section 3.1).

An iteration samples 30 completions of a problem at temperature 0.8, pairs right with wrong ones, at most 10 a problem,
and trains on DPO (beta 0.1) plus the likelihood of the chosen (alpha 1) at 7e-7, 16 pairs an update. Each iteration
starts from the last, its reference too. Here a step samples 64 problems and makes up to 40 updates of their pairs.
Needs the checkpoint and the problems as JSON Lines (`prompt`, `answer`).
"""

from dataclasses import replace

from rljax.assess.rewards import LastNumber
from rljax.data.files import Problems
from rljax.data.pretrained import Pretrained
from rljax.generate.sampling import Sampling
from rljax.model.presets import LLAMA_2_70B
from rljax.run.run import Checkpoints, Evaluation, Pairing, Role, Run
from rljax.run.schedules import paired
from rljax.train.algorithms import irpo
from rljax.train.optimizer import AdamW

START = "models/Llama-2-70b-chat-hf"

FIRST = Run(
    roles={
        "actor": Role(LLAMA_2_70B, start=START, optimizer=AdamW(lr=7e-7)),
        "reference": Role(LLAMA_2_70B),
    },
    task=Problems("data/gsm8k.jsonl"),
    tokenizer=Pretrained(START),
    objective=irpo(beta=0.1, alpha=1.0),
    schedule=paired,
    rewards=(LastNumber(),),
    sampling=Sampling(temperature=0.8),
    pairs=Pairing(of="reference", per_prompt=10),
    prompts=64,
    n=30,
    minibatches=40,
    max_prompt=512,
    max_new=512,
    chunk=128,
    steps=117,  # once over 7473 problems
    evaluation=Evaluation(every=20, problems=512),
    checkpoints=Checkpoints(every=20),
    mesh="meshes/v5p_128.toml",
)


def after(run: Run, temperature: float) -> Run:
    """The iteration that starts from a run."""
    roles = run.roles | {"actor": replace(run.roles["actor"], start=run)}
    return replace(run, roles=roles, sampling=Sampling(temperature=temperature))


RUN = after(after(after(FIRST, 0.8), 1.3), 1.3)
