"""On-policy distillation (GKD with lambda 1 and reverse KL, arXiv:2306.13649): Qwen3-32B teaches Qwen3-8B.

The student answers, the teacher says how likely each of its tokens is, as in the last stage of the small Qwen3 models
(arXiv:2505.09388, section 4.5). Neither paper gives a learning rate for models of this size: it, and the batch, are
ours. Needs both checkpoints and problems as JSON Lines (`prompt`, `answer`); answers are for evaluation alone.
"""

from rljax.assess.rewards import LastNumber
from rljax.data.files import Problems
from rljax.data.pretrained import Pretrained
from rljax.model.presets import QWEN3_8B, QWEN3_32B
from rljax.run.run import Checkpoints, Evaluation, Role, Run
from rljax.run.schedules import synchronous
from rljax.train.algorithms import distillation
from rljax.train.optimizer import AdamW

START = "models/Qwen3-8B"

RUN = Run(
    roles={
        "actor": Role(QWEN3_8B, start=START, optimizer=AdamW(lr=2e-6, warmup=20)),
        "teacher": Role(QWEN3_32B, start="models/Qwen3-32B"),
    },
    task=Problems("data/math.jsonl"),
    tokenizer=Pretrained(START, thinking=False),
    objective=distillation(),
    schedule=synchronous,
    rewards=(LastNumber(),),
    prompts=256,
    n=4,
    max_prompt=1024,
    max_new=4096,
    chunk=256,
    pack=8192,
    steps=500,
    evaluation=Evaluation(every=20, problems=512),
    checkpoints=Checkpoints(every=50, best="eval/exact_match"),
    mesh="meshes/v5p_128.toml",
)
