"""A run's model as a directory in Hugging Face format: weights, settings, tokenizer."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

from rljax.data.pretrained import Pretrained
from rljax.data.tokenizer_files import tokenizer_files
from rljax.errors import UserError
from rljax.mesh.file import MeshFile
from rljax.run import devices
from rljax.run.checkpoint import parameters
from rljax.run.directory import recall, run_directory
from rljax.run.imported import base_of, is_checkpoint
from rljax.run.place import place
from rljax.run.run import Run
from rljax.weights import config, families
from rljax.weights.load import Progress
from rljax.weights.peft import export_adapter, is_adapter
from rljax.weights.save import Saved, new_folder, save

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json",
)  # fmt: skip
ORIGIN = "model"  # folder of a run directory
DTYPES = ("float32", "bfloat16", "float16")


def keep(run: Run, where: Path) -> None:
    """Copies what an export needs besides weights: the settings of the checkpoint that the actor starts from, and the
    files of its tokenizer."""
    sources = {}
    if folder := origin_of(run):
        sources = {name: folder / name for name in ("config.json", *TOKENIZER)}
    if isinstance(run.tokenizer, Pretrained):
        sources |= {name: Path(run.tokenizer.path) / name for name in TOKENIZER}
    for name, source in sources.items():
        if source.is_file():
            (where / ORIGIN).mkdir(exist_ok=True)
            shutil.copyfile(source, where / ORIGIN / name)


def origin_of(run: Run) -> Path | None:
    """The directory in Hugging Face format of the model that the actor starts from, by way of other runs or not."""
    start = run.roles["actor"].start
    if isinstance(start, Run):
        return origin_of(start)
    if not isinstance(start, str):
        return None
    if is_checkpoint(start):
        return base_of(start)
    return folder if is_checkpoint(folder := Path(start) / ORIGIN) else None


def export(
    target: str, out: str, dtype: str = "bfloat16", step: int | None = None, role: str = "actor",
    head: str | None = None, adapter: bool = False, mesh: MeshFile | None = None, progress: Progress | None = None,
) -> tuple[Saved, int]:  # fmt: skip
    """Writes `out` whole or not at all; what was written, and the step that it is of.

    `head` "value" makes it a model for sequence classification, with one label: what critics and reward models are.
    `adapter`: what was trained of a role with LoRA alone, in PEFT's format.
    """
    where = run_directory(target)
    _, run, file = recall(where)
    heads = _heads(run, role)
    head = head or heads[0]
    if head not in heads:
        raise UserError(f"--head {head}: roles.{role} has {' and '.join(heads)}")
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: must be {', '.join(DTYPES)}")
    own = "actor" if role == "critic" and run.shared else role
    if adapter and (run.roles[own].lora is None or head == "value"):
        raise UserError(f"--adapter: roles.{role} has no adapters to a model of tokens, lora and head say")
    model = run.roles[own].lm
    family, built = families.family_of(model), run.roles[own] if adapter else model
    with written(Path(out)) as partial:
        file = mesh or file
        devices.configure(file)
        lm = built.build((head,))
        at = place(file, lm, "train", own)
        found = parameters(where, built, (head,), at.mesh, at.placement.zero, step, role=own)
        naming = family.naming(model)
        if adapter:
            start = run.roles[own].start
            named = isinstance(start, str) and is_checkpoint(start) and not is_adapter(start)
            whole = start if named else None  # what else it starts from is no directory that PEFT could load
            return export_adapter(
                lm.table, found.params, run.roles[own].lora, naming, partial, whole, dtype
            ), found.step
        saved = save(lm.table, found.params, naming, partial, dtype, progress=progress)
        files = files_of(run, where / ORIGIN, model, family, head, dtype)
        for name, text in files.items():
            (partial / name).write_text(text, "utf-8")
        for name in TOKENIZER:
            if name not in files and (source := where / ORIGIN / name).is_file():
                shutil.copyfile(source, partial / name)
    return saved, found.step


def _heads(run: Run, role: str) -> tuple[str, ...]:
    if role == "critic" and run.shared:
        return ("value",)
    if role not in run.roles or run.roles[role].optimizer is None:
        trained = [name for name, each in run.roles.items() if getattr(each, "optimizer", None)]
        raise UserError(f"--role {role}: the run trains {', '.join(trained)}")
    return run.heads(role)


def files_of(run: Run, origin: Path, model, family: families.Family, head: str, dtype: str) -> dict[str, str]:
    """The files that are made rather than copied, by name."""
    files = tokenizer_files(run.tokenizer)
    stop = run.tokenizer.stop
    settings = families.written(family, model) | {
        "max_position_embeddings": run.max_prompt + run.max_new, "bos_token_id": None, "pad_token_id": None,
        "eos_token_id": stop[0] if len(stop) == 1 else [*stop],
    }  # fmt: skip
    if is_checkpoint(origin):
        values = config.read(origin)
        if families.essence(families.read(config.Config(values))) == families.essence(model):
            settings = values
    if not (origin / "generation_config.json").is_file():
        tokens = {name: settings.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        files["generation_config.json"] = _json({name: ids for name, ids in tokens.items() if ids is not None})
    settings = {**settings, "dtype": dtype, "torch_dtype": dtype}
    if head == "value":
        causal = settings["architectures"][0]
        settings |= {
            "architectures": [causal.replace("ForCausalLM", "ForSequenceClassification")],
            "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1,
        }  # fmt: skip
        settings["pad_token_id"] = settings.get("pad_token_id") or 0
    return files | {"config.json": _json(settings)}


def _json(values: dict) -> str:
    return json.dumps(values, indent=2) + "\n"


@contextmanager
def written(directory: Path):
    """A folder that takes a directory's name once it is whole. UserError where that is taken, or cannot be written."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is there already and not empty; choose another, or remove it")
    try:
        with new_folder(directory) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror}; choose another") from None
