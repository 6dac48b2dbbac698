"""A checkpoint comes in, is trained, and goes out: transformers reads what is written, and so do we, bit for bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import chats
import jax
import numpy as np
import pytest
import trial
from tiny import ONE
from trial import experiment, mesh, rljax, train

from rljax.model.forward import outputs
from rljax.run import directory
from rljax.run.checkpoint import Saver, parameters
from rljax.run.imported import decoder, imported
from rljax.run.run import Checkpoints, Shared
from rljax.train.algorithms import ppo
from rljax.types import Tokens
from rljax.weights.source import SafeTensors

pytestmark = pytest.mark.usefixtures("here")
KIND = "chatml"


def saved(where: Path, change=lambda run: run) -> Path:
    """A run directory with a checkpoint of what training starts from, which nobody trained."""
    folder = where.parent
    run, file = change(experiment(folder, "roles.actor.start=rljax.run.run:Fresh")), mesh(folder, "one")
    with directory.claim(where, resume=False):
        directory.describe(where, run, file, (folder / "one.toml").read_text(), folder / "small.py")
    saver = Saver(where / "checkpoints", Checkpoints())
    states = {role: player.begin(7) for role, player in trial.built(run, file).trained.items()}
    saver.save(2, states, {"reached": False, "seconds": {}}, {})
    saver.finish()
    saver.close()
    return where


@pytest.fixture(scope="module")
def run(folder):
    return saved(folder / "run")


@pytest.fixture(scope="module")
def peer(folder):
    """What transformers wrote: a Qwen3 in bfloat16 with its tokenizer and chat template."""
    import torch
    import transformers

    torch.manual_seed(0)
    where = folder / "peer"
    tokenizer = chats.trained(KIND)
    template, _, _, eos, end = chats.KINDS[KIND]
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=eos, chat_template=template
    )
    settings = transformers.Qwen3Config(
        vocab_size=len(wrapped), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
        eos_token_id=tokenizer.token_to_id(eos), bos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(settings).to(torch.bfloat16)
    model.generation_config.eos_token_id = [tokenizer.token_to_id(end), tokenizer.token_to_id(eos)]
    model.save_pretrained(where)
    wrapped.save_pretrained(where)
    return where


def likelihoods(where, rows: list[dict], kind="AutoModelForCausalLM"):
    """transformers' log-probabilities of the completions of rows that `rljax generate` printed."""
    import torch
    import transformers

    model, report = getattr(transformers, kind).from_pretrained(where, dtype=torch.float32, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["ids"]])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0, :-1].double(), -1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(logp[len(row["prompt_ids"]) - 1 :].numpy())
    return found


def generated(capsys, *args) -> list[dict]:
    capsys.readouterr()
    assert rljax("generate", *args, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


PROMPTS = "--ids", "2 3 4", "--ids", "9", "--ids", "5 6 7 8 9 10", "--max-new", "12", "--n", "2"


def test_transformers_computes_what_the_run_does(run, folder, capsys):
    """Strictly loaded. The characters' tokenizer goes along."""
    import transformers

    assert rljax("export", run, "out", "--dtype", "float32") == 0
    assert "step 2" in capsys.readouterr().out
    rows = generated(capsys, run, *PROMPTS)
    for row, logp in zip(rows, likelihoods("out", rows), strict=True):
        assert np.abs(np.array(row["logprobs"]) - logp).max() < 1e-4
    assert generated(capsys, "out", *PROMPTS) == rows
    settings = json.loads(Path("out/config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"] and settings["eos_token_id"] == 1
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    ours = experiment(folder).tokenizer
    text = "12+34=#0046;"
    assert theirs(text)["input_ids"] == ours.encode(text) and theirs.decode(ours.encode(text)) == text
    assert (theirs.pad_token_id, theirs.eos_token_id, len(theirs)) == (0, 1, ours.vocab)


def test_import_of_an_export_is_the_identity(run, folder):
    m = experiment(folder).roles["actor"].lm
    at = ONE.mesh()
    exact = parameters(run, m, ("tokens",), at, 3).params
    for dtype in ("float32", "bfloat16"):
        assert rljax("export", run, f"same-{dtype}", "--dtype", dtype, "--json") == 0
        assert decoder(f"same-{dtype}") == m
        back = imported(f"same-{dtype}", m, ("tokens",), at, 3, dtype=dtype).params
        same = jax.tree.map(lambda a, b, d=dtype: bool((a.astype(d) == b).all()) and b.dtype == d, exact, back)
        assert all(jax.tree.leaves(same))
        assert {entry.dtype.name for entry in SafeTensors(f"same-{dtype}").tensors.values()} == {dtype}


def test_a_value_head_travels_as_sequence_classification(folder, capsys):
    """A critic that is a head of the actor: the score of the last token."""
    import torch
    import transformers

    shared = lambda run: replace(run, roles=run.roles | {"critic": Shared()}, objective=ppo())
    where = saved(folder / "shared", shared)
    assert rljax("export", where, "critic", "--role", "critic", "--dtype", "float32") == 0
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained("critic", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = np.array([[3, 4, 5, 6, 7, 8]], np.int32)
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits[0].double().numpy()
    m = experiment(folder).roles["actor"].lm
    lm, at = m.build(("value",)), ONE.mesh()
    params = imported("critic", m, ("value",), at, 3).params
    with jax.set_mesh(at):
        tokens = Tokens(ids, np.arange(6, dtype=np.int32)[None], np.ones_like(ids))
        ours = jax.jit(lambda p, t: outputs(lm, p, t, t.segments > 0)[0].scores)(params, tokens)
    assert theirs.shape == (1,) and abs(theirs[0] - float(ours[0, -1])) < 1e-5
    assert rljax("export", where, "both", "--head", "tokens", "--dtype", "float32") == 0  # and the actor without it
    rows = generated(capsys, "both", "--ids", "3 4", "--max-new", "4")
    assert np.abs(np.array(rows[0]["logprobs"]) - likelihoods("both", rows)[0]).max() < 1e-4


def test_a_checkpoint_is_trained_and_goes_out_as_what_it_was(peer, folder, capsys):
    """Its settings, tokenizer, template and stop ids; a critic's head, which it lacks, is fresh."""
    import transformers

    text = (folder / "small.py").read_text()
    (folder / "chat.py").write_text(
        text.replace('Characters("0123456789+=;#")', f'Pretrained("{peer}")').replace("max_prompt=6", "max_prompt=40")
        .replace("Role(LM, WARMUP, AdamW(lr=3e-3))", f'Role(LM, "{peer}", AdamW(lr=3e-3)), "critic": Shared()')
        .replace("LM = Decoder(vocab=16", f'LM = decoder("{peer}")\nIGNORED = Decoder(vocab=16')
        .replace("Evaluation, Fresh, Role, Run", "Evaluation, Fresh, Role, Run, Shared")
        .replace("objective=grpo()", "objective=ppo()").replace("import grpo, sft", "import grpo, ppo, sft")
        .replace("import Characters", "import Characters\nfrom rljax.data.pretrained import Pretrained\n"
                 "from rljax.run.imported import decoder")
    )  # fmt: skip
    assert rljax("train", "chat.py", "--run-dir", "trained", "steps=1", "checkpoints.every=0") == 0
    assert rljax("export", "trained", "back", "--head", "tokens", "--dtype", "float32") == 0
    old, new = (json.loads((Path(where) / "config.json").read_text()) for where in (peer, "back"))
    assert new == old | {"dtype": "float32", "torch_dtype": "float32"}
    assert (Path("back") / "generation_config.json").read_text() == (peer / "generation_config.json").read_text()
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(where) for where in ("back", peer))
    talk = [{"role": "user", "content": "What is 1 + 2?"}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk)
    rows = generated(capsys, "trained", "--prompt", "What is 1 + 2?", "--max-new", "9")
    assert np.abs(np.array(rows[0]["logprobs"]) - likelihoods("back", rows)[0]).max() < 1e-4
    assert rows[0]["prompt"] == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert generated(capsys, "back", "--prompt", "What is 1 + 2?", "--max-new", "9") == rows
    raw = generated(capsys, "back", "--prompt", "What is 1 + 2?", "--max-new", "3", "--raw")
    assert raw[0]["prompt_ids"] == theirs("What is 1 + 2?")["input_ids"] and raw[0]["prompt"] == "What is 1 + 2?"
    assert rljax("eval", "back", "--experiment", "chat.py", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] is None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft calling transformers
def test_adapters_travel_alone_or_merged(run, capsys):
    """peft on the checkpoint that training began with computes what the merged export does."""
    peft = pytest.importorskip("peft")
    import torch
    import transformers

    lora = 'roles.actor.lora={"$": "rljax.model.lora:LoRA", "rank": 2, "targets": ["q_proj", "down_proj"]}'
    start = f'roles.actor.start="{peer_of(run)}"', "steps=2", "checkpoints.every=2"
    assert train("adapted", *start, lora, "roles.actor.optimizer.lr=0.1") == 0
    assert rljax("export", "adapted", "alone", "--adapter", "--dtype", "float32") == 0
    assert rljax("export", "adapted", "together", "--dtype", "float32") == 0
    rows = generated(capsys, "adapted", *PROMPTS)
    for row, logp in zip(rows, likelihoods("together", rows), strict=True):
        assert np.abs(np.array(row["logprobs"]) - logp).max() < 1e-4
    base, whole = (transformers.AutoModelForCausalLM.from_pretrained(where) for where in ("plain", "together"))
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    with torch.no_grad():
        plain, wanted = base(ids).logits, whole(ids).logits
        got = peft.PeftModel.from_pretrained(base, "alone")(ids).logits
    assert (got - wanted).abs().max() < 1e-4 < 1e-3 < (plain - wanted).abs().max()
    assert rljax("export", run, "never", "--adapter") == 2
    assert "--adapter: roles.actor has no adapters" in capsys.readouterr().err


def test_ids_need_no_tokenizer(run, folder, capsys):
    shutil.copytree(peer_of(run), "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    rows = generated(capsys, "bare", "--ids", "2 3", "--greedy", "--max-new", "3")
    assert rows[0]["text"].split() == [str(i) for i in rows[0]["ids"] if i != 1]
    assert rljax("generate", "bare", "--prompt", "hello") == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def peer_of(run) -> str:
    if not Path("plain").exists():
        assert rljax("export", run, "plain", "--dtype", "float32") == 0
    return "plain"


def test_mistakes_are_one_line_and_leave_nothing(run, folder, capsys):
    def wrong(*args) -> str:
        capsys.readouterr()
        assert rljax(*args) == 2
        return capsys.readouterr().err.splitlines()[-1]

    plain = peer_of(run)
    assert "plain is there already and not empty; choose another" in wrong("export", run, plain)
    assert "--dtype int8: must be float32, bfloat16, float16" in wrong("export", run, "never", "--dtype", "int8")
    assert "--role reference: the run trains actor" in wrong("export", run, "never", "--role", "reference")
    assert "--head value: roles.actor has tokens" in wrong("export", run, "never", "--head", "value")
    assert "--step 5: run keeps checkpoints of steps 2" in wrong("export", "run", "never", "--step", "5")
    assert "plain is no run directory" in wrong("export", plain, "never")
    assert "--step 5: plain is a checkpoint, which has no steps" in wrong(
        "generate", plain, "--ids", "1", "--step", "5"
    )
    assert "is a run, which says what it computes in" in wrong("generate", run, "--ids", "1", "--compute", "bfloat16")
    assert "give --experiment FILE" in wrong("eval", plain)
    assert not [path for path in folder.iterdir() if "never" in path.name]
    start = 'roles.actor.start="plain"'
    assert "roles.actor.lm.width=16, but plain/config.json says 32" in wrong(*started("wide", start, hidden_size=32))
    assert 'hidden_act="relu" is not supported' in wrong(*started("odd", start, hidden_act="relu"))
    Path("plain/config.json").write_text(Path("kept.json").read_text())
    Path("plain/model.safetensors").rename("away")
    assert "plain" in (said := wrong("train", "small.py", "--run-dir", "w", start)) and "safetensors" in said
    Path("away").rename("plain/model.safetensors")
    assert not any(Path(name).exists() for name in ("w", "wide", "odd"))


def started(name: str, start: str, **settings):
    """A command that starts from settings changed."""
    path, kept = Path("plain/config.json"), Path("kept.json")
    if not kept.exists():
        shutil.copyfile(path, kept)
    path.write_text(json.dumps(json.loads(kept.read_text()) | settings))
    return "train", "small.py", "--run-dir", name, start


def test_a_checkpoint_is_trained_on_eight_devices(run):
    """From the files, and written from there: a step that is too small to see."""
    peer_of(run)
    changed = 'roles.actor.start="plain"', "steps=1", "roles.actor.optimizer.lr=1e-9"
    assert train("wide8", "--mesh", "eight.toml", *changed) == 0
    assert rljax("export", "wide8", "wide-out", "--dtype", "float32") == 0
    one, other = SafeTensors("plain"), SafeTensors("wide-out")
    assert one.tensors == other.tensors
    for key, entry in one.tensors.items():
        whole = tuple(slice(0, n) for n in entry.shape)
        assert np.abs(one.read(key, whole) - other.read(key, whole)).max() < 1e-6
