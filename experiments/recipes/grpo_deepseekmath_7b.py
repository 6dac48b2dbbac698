"""GRPO as it was published: DeepSeekMath-Instruct 7B on problems of GSM8K and MATH (arXiv:2402.03300, section 4.2).

64 completions of each of 16 problems, one update a step at 1e-6, KL to the start of 0.04. The paper trained a reward
model; here the right answer is the reward. Needs the checkpoint and problems as JSON Lines (`prompt`, `answer`).
"""

from rljax.assess.rewards import LastNumber
from rljax.data.files import Problems
from rljax.data.pretrained import Pretrained
from rljax.model.presets import DEEPSEEK_LLM_7B
from rljax.run.run import Checkpoints, Evaluation, Role, Run
from rljax.run.schedules import synchronous
from rljax.train.algorithms import deepseek_grpo
from rljax.train.optimizer import AdamW

START = "models/deepseek-math-7b-instruct"

RUN = Run(
    roles={
        "actor": Role(DEEPSEEK_LLM_7B, start=START, optimizer=AdamW(lr=1e-6)),
        "reference": Role(DEEPSEEK_LLM_7B),
    },
    task=Problems("data/math.jsonl"),
    tokenizer=Pretrained(START),
    objective=deepseek_grpo(kl=0.04),
    schedule=synchronous,
    rewards=(LastNumber(),),
    prompts=16,
    n=64,
    max_prompt=512,
    max_new=1024,
    chunk=128,
    steps=9000,  # once over 144k problems
    evaluation=Evaluation(every=100, problems=512),
    checkpoints=Checkpoints(every=100, best="eval/exact_match"),
    mesh="meshes/v5p_8.toml",
)
