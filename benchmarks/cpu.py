"""What each measure for XLA on CPUs is worth: steps with and without it, in turns, on one device and on eight.

    python benchmarks/cpu.py [EXPERIMENT] [--only NAME ...] [--devices 1 8] [--rounds 7] [--json] [FIELD=VALUE ...]

Times are medians; the speedup is the median over rounds of time without / time with, on the wall and in CPU time (all
threads), which other work on the machine disturbs less. "product" says whether rljax does it. Each number of devices
is a process of its own, and so is each side of the measure of the allocator.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
from bench import Bench
from command import Parser, count, show, table
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from timing import Compiles, Spent, interleave, middle, ratio, timed

from rljax.errors import RunFailed, UserError, nearest
from rljax.mesh import spec_of
from rljax.mesh.file import parse
from rljax.model import attention, cached, nn, order, stack
from rljax.run import devices

KEPT = '[train]\nremat = "none"\n'  # as the quickstart trains
MESHES = {1: KEPT, 8: KEPT + "data = 2\nfsdp = 2\ntensor = 2\n[generate]\ndata = 8\n"}
SHARDED = "[train]\nfsdp = {n}\n[generate]\n{generate}\n"


class Row(NamedTuple):
    """One step without and with a measure: seconds, and the speedups that the rounds agree on."""

    measure: str
    devices: int
    step: str
    before: float
    after: float
    speedup: float
    cpu_speedup: float | None
    product: bool


class Lab:
    """A run on so many devices: the product's programs, which measures share, and variants of them."""

    def __init__(self, args, count: int):
        self.run, self.rounds, self.words, self.devices = args.run, args.rounds, args.arguments, count
        self.compiles = Compiles()

    def mesh(self, tables: str):
        return parse(f'platform = "cpu"\ndevices = {self.devices}\n{tables}', "cpu.py")

    def bench(self, *patches, tables: str = "") -> Bench:
        return Bench(self.run, self.mesh(tables or MESHES[self.devices]), patches)

    @cached_property
    def product(self) -> Bench:
        return self.bench()

    @cached_property
    def batch(self):
        return self.product.batch()

    def call(self, bench: Bench, step: str) -> Callable:
        """A step of a bench, its program compiled as its patches say."""
        call = {"update": lambda: bench.update(self.batch), "generate": bench.generate}[step]
        with bench.compiling():
            call()
        return call

    def compare(self, measure: str, before: Bench, after: Bench, steps: tuple[str, ...], product=True) -> Iterator[Row]:
        for step in steps:
            calls = {"before": self.call(before, step), "after": self.call(after, step)}
            yield self.row(measure, step, interleave(calls, self.rounds), product)

    def row(self, measure: str, step: str, spent: dict[str, list[Spent]], product: bool) -> Row:
        gain = ratio(spent["before"], spent["after"])
        times = (middle(spent[side]).wall for side in ("before", "after"))
        return Row(measure, self.devices, step, *times, gain.wall, gain.cpu, product)


def allocator(lab: Lab) -> Iterator[Row]:
    """glibc keeps freed memory, instead of returning it and faulting it in anew at every step"""
    sides = {side: Worker(lab, side) for side in ("default", "keep")}
    try:
        for step in ("update", "generate"):
            take = lambda side, step=step: lambda: sides[side](step)
            calls = {"before": take("default"), "after": take("keep")}
            yield lab.row("allocator", step, interleave(calls, lab.rounds, lambda call: call()), True)
    finally:
        for side in sides.values():
            side.close()


def matmul(lab: Lab) -> Iterator[Row]:
    """matmuls on rows of tokens flattened to two dimensions, instead of on [B T D]"""
    whole = lambda x, w, out=None: jnp.einsum("btd,df->btf", x, w, out_sharding=out)
    yield from lab.compare("matmul", lab.bench((nn, "matmul", whole)), lab.product, ("update", "generate"))


def rope(lab: Lab) -> Iterator[Row]:
    """the rotary table behind a barrier, instead of recomputed in every fusion that reads it"""

    def free(positions, frequency, amplitude):
        angle = positions[..., None].astype(jnp.float32) * frequency[None, None]
        return jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude

    yield from lab.compare("rope", lab.bench((nn, "turn", free)), lab.product, ("update", "generate"))


def unrolled(lab: Lab) -> Iterator[Row]:
    """so few layers unrolled, instead of scanned"""
    scanned = lab.bench((stack, "UNROLL", 0), (cached, "UNROLL", 0))
    yield from lab.compare("unrolled", scanned, lab.product, ("update", "generate"))


def gathered(lab: Lab) -> Iterator[Row]:
    """generation from weights gathered once a step, which is timed with it, instead of from ZeRO-3 shards"""
    if lab.devices == 1:
        return
    tables = lambda generate: SHARDED.format(n=lab.devices, generate=generate)
    before = lab.bench(tables=tables(f"fsdp = {lab.devices}\nzero = 3"))
    after = lab.bench(tables=tables(f"data = {lab.devices}"))
    step = lambda bench: lambda: (bench.publish(), bench.generate())
    spent = interleave({"before": step(before), "after": step(after)}, lab.rounds)
    yield lab.row("gathered", "reshard, generate", spent, True)


def append(lab: Lab) -> Iterator[Row]:
    """a token's key and value written into the cache in place, instead of selected into a copy of the layer's"""

    def select(cache, new, layer, lengths):
        old = lax.dynamic_index_in_dim(cache, layer, keepdims=False)
        here = jnp.arange(old.shape[2])[None] == lengths[:, None]
        new = jax.reshard(new[:, None], spec_of(old))
        return lax.dynamic_update_index_in_dim(cache, jnp.where(here[:, None, :, None, None], new, old), layer, 0)

    yield from lab.compare("append", lab.bench((order, "append", select)), lab.product, ("generate",))


def decode_attention(lab: Lab) -> Iterator[Row]:
    """attention of one query a row by elementwise multiply and sum, instead of by einsum"""

    def elementwise(q, k, v, mask, rule):
        (b, _, n, h), (k, v) = q.shape, (x.reshape(len(x), -1, *x.shape[3:]) for x in (k, v))
        q = q.reshape(b, 1, k.shape[2], -1, h)
        scores = rule.score(jnp.sum((q * k[:, :, :, None]).astype(jnp.float32), -1))
        mask = mask.reshape(*mask.shape[:2], -1)[:, 0, :, None, None]
        weights = jax.nn.softmax(jnp.where(mask, scores, attention.MASKED), 1).astype(v.dtype)
        return jnp.sum(weights[..., None] * v[:, :, :, None], 1, keepdims=True).reshape(b, 1, n, h)

    after = lab.bench((attention, "striped", elementwise))
    yield from lab.compare("decode_attention", lab.product, after, ("generate",), product=False)


def compile_cache(lab: Lab) -> Iterator[Row]:
    """programs taken from the persistent cache, instead of compiled (seconds in XLA)"""
    batch, spent = lab.batch, {}
    old = jax.config.jax_compilation_cache_dir
    with tempfile.TemporaryDirectory() as folder:
        try:
            use_cache(folder)
            for lab.compiles.stage in ("cold", "warm"):
                bench = lab.bench()
                bench.update(batch)
                bench.generate()
                spent[lab.compiles.stage] = lab.compiles.seconds[lab.compiles.stage]
        finally:
            use_cache(old)
    cold, warm = spent["cold"], spent["warm"]
    yield Row("compile_cache", lab.devices, "compile", cold, warm, cold / warm, None, True)


def use_cache(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # JAX opens a cache once


ALL = allocator, matmul, rope, unrolled, gathered, append, decode_attention, compile_cache
MEASURES = {measure.__name__: measure for measure in ALL}


def start(args, lab_devices: int, allocator: str) -> Lab:
    """A lab in this process, which no other has used JAX in yet."""
    if allocator == "default":
        devices.keep_freed_memory = lambda: None
    if not args.cache:
        command.measure_compiles()
    lab = Lab(args, lab_devices)
    devices.configure(lab.mesh(MESHES[lab_devices]))
    return lab


class Worker:
    """A process whose allocator is set one way, told over a pipe which step to take."""

    def __init__(self, lab: Lab, side: str):
        self.process = child([*lab.words, "--devices", str(lab.devices), "--serve", side], stdin=subprocess.PIPE)
        self.answer()

    def __call__(self, step: str) -> Spent:
        self.process.stdin.write(step + "\n")
        self.process.stdin.flush()
        return Spent(*self.answer())

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RunFailed(f"the process of one allocator setting ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve(lab: Lab) -> None:
    """Steps as they are asked for, one a line, each answered by the time it took."""
    calls = {step: lab.call(lab.product, step) for step in ("update", "generate")}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(calls[line.strip()])), flush=True)


def child(words: list[str], **pipes) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, **pipes)


def results(args) -> Iterator[Row]:
    """Rows of all numbers of devices, as their processes find them."""
    for n in args.devices:
        with child([*args.arguments, "--only", *args.only, "--devices", str(n), "--lab"]) as process:
            for line in process.stdout:
                yield Row(*json.loads(line))
        if process.returncode:
            raise RunFailed(f"the process of {n} devices ended with status {process.returncode}")


def body() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(MEASURES), help=", ".join(MEASURES))
    parser.add_argument("--devices", nargs="+", type=int, choices=MESHES, default=list(MESHES), help="[1 8]")
    parser.add_argument("--rounds", type=count, default=7, help="times that each step is timed [7]")
    parser.add_argument("--cache", action="store_true", help="use the persistent cache, but for its own measure")
    parser.add_argument("--lab", action="store_true", help="measure in this process, a JSON line a row")
    parser.add_argument("--serve", choices=("default", "keep"), help="take steps as standard input says")
    args = parser.read()
    if wrong := [name for name in args.only if name not in MEASURES]:
        raise UserError(f"--only {wrong[0]}: no such measure; {nearest(wrong[0], MEASURES)}")
    args.arguments = [str(args.experiment), *args.overrides, "--rounds", str(args.rounds)]
    args.arguments += ["--cache"] if args.cache else []
    if args.serve:
        return serve(start(args, args.devices[0], args.serve))
    if args.lab:
        lab = start(args, args.devices[0], "keep")
        for name in args.only:
            for row in MEASURES[name](lab):
                print(json.dumps(row), flush=True)
        return None
    rows = []
    for row in results(args):
        print(f"{row.measure} on {row.devices}, {row.step}: ×{row.speedup:.2f}", file=sys.stderr)
        rows.append(row)
    shown = table("measure", "devices", "step", "without, ms", "with, ms", "speedup", "in CPU time", "product")
    gain = lambda value: f"×{value:.2f}" if value else ""
    for r in rows:
        times = f"{1e3 * r.before:.1f}", f"{1e3 * r.after:.1f}", gain(r.speedup), gain(r.cpu_speedup)
        shown.add_row(r.measure, str(r.devices), r.step, *times, "yes" if r.product else "no")
    said = [f"{name}: {MEASURES[name].__doc__}" for name in args.only]
    rows_of = f"{args.run.prompts} × {args.run.n} rows of {args.run.max_prompt} + {args.run.max_new} tokens"
    report = {"experiment": args.experiment.stem, "rows": [row._asdict() for row in rows]}
    show(report, [f"{args.experiment.stem}: {rows_of}", shown, *said], args.json)


if __name__ == "__main__":
    sys.exit(command.main(body))
