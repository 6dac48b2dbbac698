"""The `rljax` command. JSON goes alone to stdout, everything else to stderr; exit 2 means a mistake of the user's."""

import json
import logging
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Experiment = Annotated[
    Path, typer.Argument(metavar="EXPERIMENT", help="Python file that defines RUN", show_default=False)
]
Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="run directory, or one in Hugging Face format", show_default=False)
]
Mesh = Annotated[
    Path | None,
    typer.Option("--mesh", metavar="FILE", help="mesh file [default: the experiment's]", show_default=False),
]
Step = Annotated[
    int | None, typer.Option("--step", metavar="N", help="checkpoint of step N [default: latest]", show_default=False)
]
Compute = Annotated[
    str | None,
    typer.Option(
        "--compute", metavar="DTYPE", help="of a checkpoint: float32 or bfloat16 [default: float32]", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False) -> None:
    """Reinforcement learning of reasoning language models on any JAX device mesh."""


@app.command()
def train(
    experiment: Experiment,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIELD=VALUE]...", help="changed fields, as in steps=80", show_default=False),
    ] = None,
    mesh: Mesh = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="[default: runs/NAME-TIME]", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the run in DIR from its latest checkpoint")
    ] = False,
) -> None:
    """Train a run, and write what happened to its directory."""
    from rljax.config import load_experiment, override, validate
    from rljax.errors import UserError
    from rljax.run import devices, directory, loop
    from rljax.run.display import Display, before_after
    from rljax.run.export import keep

    run = override(load_experiment(str(experiment)), overrides or [])
    validate(run)
    run.check()
    file, text = directory.find_mesh(str(mesh or run.mesh), experiment)
    if resume and run_dir is None:
        raise UserError("--resume needs --run-dir DIR, the run to continue")
    where = run_dir or Path("runs") / f"{experiment.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    devices.configure(file)
    loop.fits(run, file)
    with directory.claim(where, resume):
        config = directory.same_run(where, run) if resume else directory.describe(where, run, file, text, experiment)
        if not resume:
            keep(run, where)
        with Display(f"{experiment.stem} on {file.path}") as display:
            summary = loop.train(run, file, where, config, display)
        files = {
            "metrics": "metrics.jsonl",
            "samples": "samples.jsonl",
            "curves": "curves.png",
            "checkpoints": "checkpoints/",
        }
        shown = summary["samples"]
        display.console.print(before_after(summary["before"], summary["after"], shown["before"], shown["after"],
                                           {name: str(where / path) for name, path in files.items()}))  # fmt: skip


@app.command("eval")
def evaluate(
    target: Target,
    experiment: Annotated[
        Path | None,
        typer.Option(
            "--experiment",
            metavar="FILE",
            help="whose task and rewards to use [default: the run's own]",
            show_default=False,
        ),
    ] = None,
    mesh: Mesh = None,
    step: Step = None,
    compute: Compute = None,
    as_json: AsJson = False,
) -> None:
    """Measure held-out accuracy, sampled and greedy."""
    from rich.console import Console
    from rich.table import Table

    from rljax.run import serve
    from rljax.run.evaluate import evaluate as measure

    with reading() as progress:
        run, stages, params, at = serve.load(target, mesh, step, experiment, compute=compute, progress=progress)
    metrics, _ = measure(run, stages, params)
    metrics = {**metrics, "step": at}
    if as_json:
        print(json.dumps(metrics))
        return
    table = Table("metric", "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


@app.command()
def generate(
    target: Target,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="a prompt; may be repeated", show_default=False)
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option("--ids", metavar='"1 2 3"', help="a prompt as token ids; may be repeated", show_default=False),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="completions per prompt")] = 1,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy")] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="the likeliest token always")] = False,
    max_new: Annotated[
        int | None, typer.Option("--max-new", min=1, help="tokens [default: the run's]", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1)] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="prompts as they are, not in the chat format")] = False,
    mesh: Mesh = None,
    step: Step = None,
    compute: Compute = None,
    as_json: AsJson = False,
) -> None:
    """Complete prompts: with --json one object per line and completion."""
    from rljax.generate.sampling import Sampling
    from rljax.run import serve

    with reading() as progress:
        run, stages, params, _ = serve.load(
            target, mesh, step, None, max_new, compute=compute, chat=not raw, progress=progress
        )
    if raw:
        prompt, ids = None, [*(" ".join(map(str, run.tokenizer.encode(text))) for text in prompt or []), *(ids or [])]
    sampling = Sampling(temperature=0.0 if greedy else temperature)
    for row in serve.complete(run, stages, params, prompt or [], ids or [], sampling, n, seed):
        print(json.dumps(row) if as_json else f"{row['prompt']}{row['text']}", flush=True)


@app.command()
def mesh(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="mesh file", show_default=False)],
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="EXPERIMENT", help="also place this experiment's tensors", show_default=False),
    ] = None,
    schedule: Annotated[bool, typer.Option("--schedule", help="draw training's pipeline schedule instead")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw which device holds what, or what it does when."""
    from rich.console import Console

    from rljax.config import load_experiment
    from rljax.errors import UserError
    from rljax.mesh.file import load
    from rljax.plan import draw, draw_schedule

    if schedule and model:
        raise UserError("--schedule draws time and --model memory: give one of them")
    roles = None
    if model:
        run = load_experiment(str(model))
        roles = {name: (role.build(), role.optimizer is not None) for name, role in run.roles.items()}
    description = draw_schedule.describe(load(file)) if schedule else draw.describe(load(file), roles)
    if as_json:
        print(json.dumps(description))
    else:
        Console().print((draw_schedule if schedule else draw).draw(description))


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run directory", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="directory to write", show_default=False)],
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16")] = "bfloat16",
    step: Step = None,
    role: Annotated[str, typer.Option("--role", help="actor, or another role that is trained")] = "actor",
    head: Annotated[
        str | None,
        typer.Option("--head", help="tokens or value [default: the first that the role has]", show_default=False),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="only what LoRA trained, as PEFT reads it")] = False,
    mesh: Mesh = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as transformers and vLLM read it."""
    from rljax.mesh.file import load
    from rljax.run import export as exported

    with reading("write") as progress:
        file = load(mesh) if mesh else None
        saved, at = exported.export(run, str(out), dtype, step, role, head, adapter, file, progress)
    if as_json:
        print(json.dumps({"step": at, "files": saved.files, "bytes": saved.bytes}))
    else:
        print(f"{out}: step {at}, {saved.bytes / 1e9:.3g} GB in {len(saved.files)} files")


@contextmanager
def reading(what: str = "read"):
    """A bar of the bytes read or written, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, size: bar.update(task, completed=done, total=size, visible=True)


def main(args: list[str] | None = None) -> int:
    """Runs a command; the process's exit status. One line for what a user can mend, a traceback only with --debug."""
    from rljax.errors import Interrupted, RunFailed, UserError

    args = sys.argv[1:] if args is None else args
    debug = "--debug" in args
    logging.getLogger("absl").setLevel(logging.WARNING if debug else logging.CRITICAL)  # orbax logs all that it raises
    args = [arg for arg in args if arg != "--debug"] or ["--help"]
    try:
        return app(args, prog_name="rljax", standalone_mode=False) or 0  # typer makes Ctrl-C an exit status, 130
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return 130
    except UserError as error:
        failure, code = error, 2
    except RunFailed as error:
        failure, code = error, 1
    except Interrupted as error:
        failure, code = error, error.code
    except KeyboardInterrupt as error:
        failure, code = error, 130
    except OSError as error:
        failure, code = error, 2
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # click's usage errors
            failure, code = error.format_message(), error.exit_code
        else:
            failure, code = error, 1
    if debug and isinstance(failure, BaseException):
        raise failure
    print(f"rljax: {' '.join(str(failure).split()) or type(failure).__name__}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
