"""A reward model and PPO against it, as Llama 2 was tuned (arXiv:2307.09288, sections 3.2.2 and 3.2.3), with 13B.

The reward model starts from the chat model with a scalar head: pairs with margins, 512 an update, once over the data at
1e-5 with a cosine to a tenth. PPO then: 512 prompts a step in minibatches of 64, at 1e-6, KL 0.01, weight decay 0.1.
The paper's second reward model, for safety, and its whitened logits of rewards are left out. Needs the checkpoint,
pairs (`prompt`, `chosen`, `rejected`, `margin`) and prompts (`prompt`, `answer`, which may be empty) as JSON Lines.
"""

from rljax.assess.models import ModelReward
from rljax.data.files import Pairs, Problems
from rljax.data.pretrained import Pretrained
from rljax.model.presets import LLAMA_2_13B
from rljax.run.run import Checkpoints, Evaluation, Role, Run
from rljax.run.schedules import supervised, synchronous
from rljax.train.algorithms import ppo, reward_model
from rljax.train.optimizer import AdamW

START = "models/Llama-2-13b-chat-hf"
COMMON = dict(
    tokenizer=Pretrained(START), max_prompt=1024, max_new=1024, checkpoints=Checkpoints(every=100),
    mesh="meshes/v5p_128.toml",
)  # fmt: skip

REWARD = Run(
    roles={
        "actor": Role(
            LLAMA_2_13B, start=START, head="value",
            optimizer=AdamW(lr=1e-5, b2=0.95, weight_decay=0.1, warmup=60, decay="cosine", floor=0.1),
        )
    },
    task=Pairs("data/preferences.jsonl", margin="margin"),
    objective=reward_model(),
    schedule=supervised,
    prompts=512,
    steps=2000,
    evaluation=Evaluation(every=100, problems=1024),
    **COMMON,
)  # fmt: skip

RUN = Run(
    roles={
        "actor": Role(LLAMA_2_13B, start=START, optimizer=AdamW(lr=1e-6, b2=0.95, weight_decay=0.1)),
        "critic": Role(LLAMA_2_13B, optimizer=AdamW(lr=1e-6, b2=0.95, weight_decay=0.1)),
        "reference": Role(LLAMA_2_13B),
        "reward": Role(LLAMA_2_13B, start=REWARD),
    },
    task=Problems("data/prompts.jsonl"),
    objective=ppo(kl_in_reward=0.01),
    schedule=synchronous,
    rewards=(ModelReward(),),
    prompts=512,
    n=1,
    minibatches=8,
    steps=400,
    evaluation=Evaluation(every=50, problems=512),
    **COMMON,
)
