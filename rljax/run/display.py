"""What a person sees while a run goes: a live panel on a terminal, else a plain line per step. All on stderr.

Every metric may be absent and none may stop a run: what is unknown is left out, and NaN is shown as nan.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPLIT = {"generate": "blue", "reshard": "magenta", "assess": "yellow", "train": "green"}  # stages of a step: color
PACE = 16  # steps that the remaining time is judged by
HUSH = 0.2  # seconds between plain lines, however fast the steps

HELD_OUT = (  # metric, what it is called, decimals
    ("eval/exact_match", "exact match, sampled", 3),
    ("eval/exact_match_greedy", "exact match, greedy", 3),
    ("eval/length", "mean length, tokens", 1),
)


class Display:
    """The progress of a run, as a context manager: `phase`, then `stage` and `update` as it goes, `note` for the rest.

    `plain` forces lines (True) or the panel (False); None asks whether stderr is a terminal.
    """

    def __init__(self, title: str, plain: bool | None = None):
        self.title = title
        self.console = Console(stderr=True, highlight=False)
        self.plain = not (sys.stderr.isatty() and self.console.is_interactive) if plain is None else plain
        # Prints of user code appear above the panel, but never leave a stdout that is piped: that is for JSON.
        self._live = None if self.plain else Live(
            self, console=self.console, refresh_per_second=4, redirect_stdout=sys.stdout.isatty(),
        )  # fmt: skip
        self._printed = -math.inf
        self._begin("", None)

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        self._stage = ""
        if self._live:
            self._live.stop()

    def phase(self, name: str, steps: int | None) -> None:
        """A new phase, such as warmup or train, of so many steps (None: not known); forgets the metrics of the last."""
        self._begin(name, steps)
        if self.plain:
            self.note(f"{self.title}: {name}" + ("" if steps is None else f", {steps} steps"))

    def stage(self, name: str) -> None:
        """What is happening now: generate, reshard, assess, train, evaluate, compile or save."""
        self._stage = name

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step just done. Sparse ones, such as the held-out accuracy, stay until they are renewed."""
        now = time.monotonic()
        new = not self._times or step > self._times[-1][0]
        self._metrics |= metrics
        if new:
            self._times.append((step, now))
        if self.plain and new and (now - self._printed >= HUSH or step == self._steps):
            self._printed = now
            self.note(self._line())

    def note(self, text: str) -> None:
        """A line that stays, above the panel if there is one."""
        self.console.print(Text(_printable(text)), soft_wrap=True)

    def _begin(self, name: str, steps: int | None) -> None:
        self._name, self._steps, self._stage = name, steps, ""
        self._metrics: dict[str, float] = {}
        self._times: deque[tuple[int, float]] = deque(maxlen=PACE + 1)  # (step, when it was done, in seconds)

    @property
    def _step(self) -> int:
        times = self._times
        return times[-1][0] if times else 0

    def _remaining(self) -> float | None:
        """Seconds until the phase is done, at the pace of the last steps; the first, which compiles, sets none."""
        times, steps = self._times, self._steps  # the panel is drawn by a thread of its own, phases change under it
        if steps is None or len(times) < 2:
            return None
        (first, began), (last, ended) = times[0], times[-1]
        left = (ended - began) / (last - first) * (steps - last)
        return max(0.0, left - (time.monotonic() - ended))

    def _line(self) -> str:
        shown = {label: text for label, text in _figures(self._metrics)}
        parts = [f"{self._name} {self._step}" + ("" if self._steps is None else f"/{self._steps}")]
        for label in ("reward", "loss"):
            parts += [f"{label} {shown[label]}"] if label in shown else []
        sampled, greedy = shown.get("held-out"), shown.get("greedy")
        if sampled or greedy:
            parts.append("eval " + " ".join(filter(None, [sampled, greedy and f"(greedy {greedy})"])))
        parts += [f"length {shown['length']}"] if "length" in shown else []
        parts += [f"{shown['tok/s']} tok/s"] if "tok/s" in shown else []
        if split := _split(self._metrics):
            total = sum(split.values())
            shares = " ".join(f"{name} {seconds / total:.0%}" for name, seconds in split.items())
            parts.append(f"{_number(total)} s: {shares}")
        left = self._remaining()
        return "  ".join(parts + ([] if left is None else [f"ETA {_clock(left)}"]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left, step, steps = self._remaining(), self._step, self._steps
        count = str(step) + ("" if steps is None else f"/{steps}")
        progress = Table.grid(padding=(0, 2, 0, 0), expand=True)
        progress.add_column(ratio=1)
        bar = ProgressBar(steps, step, pulse=steps is None and bool(self._stage), complete_style="cyan")
        progress.add_row(bar, Text(count, "bold"), Text("" if left is None else f"ETA {_clock(left)}", "dim"))
        body: list[RenderableType] = [progress]
        if figures := _figures(self._metrics):
            table = Table.grid(padding=(0, 3, 0, 0))
            table.add_row(*(Text(label, "dim") for label, _ in figures))
            table.add_row(*(Text(text, "bold red" if text[-3:] in ("nan", "inf") else "bold") for _, text in figures))
            body.append(table)
        if split := _split(self._metrics):
            body.append(_stack(split, options.max_width - 4))
        now = Text.assemble((self._name, "bold"), (f" · {self._stage}" if self._stage else "", "cyan"))
        yield Panel(Group(*body), title=Text(self.title, "bold"), title_align="left", subtitle=now,
                    subtitle_align="left", border_style="dim", padding=(0, 1))  # fmt: skip


def before_after(
    before: Mapping[str, float],
    after: Mapping[str, float],
    samples_before: Sequence[Mapping[str, Any]],
    samples_after: Sequence[Mapping[str, Any]],
    files: Mapping[str, str],
) -> RenderableType:
    """What a run has changed: held-out figures, the first three completions of each, and where the files are.

    A sample has prompt, completion and reward; `files` maps what a file is to its path.
    """
    scores = Table(box=SIMPLE_HEAD)
    for heading in ("held-out", "before", "after", "change"):
        scores.add_column(heading, justify="left" if heading == "held-out" else "right")
    others = [(key, key.removeprefix("eval/"), 3) for key in after if key.startswith("eval/")]
    for key, label, digits in HELD_OUT if HELD_OUT[0][0] in after else others or HELD_OUT:
        old, new = _value(before, key), _value(after, key)
        texts = ["-" if value is None else f"{value:.{digits}f}" for value in (old, new)]
        change = "" if old is None or new is None else f"{new - old:+.{digits}f}"
        scores.add_row(label, texts[0], Text(texts[1], "bold"), change)
    samples = Table(box=SIMPLE_HEAD, expand=True)
    samples.add_column("", style="dim")
    samples.add_column("prompt", ratio=2, overflow="fold")
    samples.add_column("completion", ratio=3, overflow="fold")
    samples.add_column("reward", justify="right")
    for when, rows in ("before", samples_before), ("after", samples_after):
        for row in rows[:3]:
            prompt, completion = (Text(_excerpt(str(row.get(key, "")))) for key in ("prompt", "completion"))
            reward = _value(row, "reward")
            samples.add_row(when, prompt, completion, "-" if reward is None else _number(reward))
        samples.add_section()
    paths = Table.grid(padding=(0, 2, 0, 0))
    for what, path in files.items():
        paths.add_row(Text(f"  {what}", "dim"), Text(str(path), overflow="fold"))
    return Group(scores, *([samples] if samples.row_count else []), paths)


def _figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and text of the headline figures that are known."""
    keys = ("reward", "eval/exact_match", "eval/exact_match_greedy", "length", "tokens_per_second", "loss")
    labels = ("reward", "held-out", "greedy", "length", "tok/s", "loss")
    known = [(label, _value(metrics, key)) for key, label in zip(keys, labels, strict=True)]
    return [(label, _number(value)) for label, value in known if value is not None]


def _split(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by stage; empty if they are unknown or add up to nothing."""
    known = {name: _value(metrics, f"seconds/{name}") for name in SPLIT}
    split = {name: value for name, value in known.items() if value is not None and 0 <= value < math.inf}
    return split if sum(split.values()) > 0 else {}


def _stack(split: Mapping[str, float], width: int) -> Text:
    """How the seconds of a step split: one bar cut by stage, and its legend, in `width` cells together."""
    total, done, drawn = sum(split.values()), 0.0, 0
    legend = Text(f"{_number(total)} s")
    for name, seconds in split.items():
        legend.append("  ■ ", SPLIT[name]).append(f"{name} {seconds / total:.0%}")
    cells, bar = max(0, min(40, width - len(legend) - 2)), Text()
    for name, seconds in split.items():
        done += seconds
        edge = round(cells * done / total)  # rounding the edges, not the parts, keeps the whole at `cells`
        bar.append("━" * (edge - drawn), SPLIT[name])
        drawn = edge
    return bar.append("  " if cells else "").append(legend)


def _value(metrics: Mapping[str, Any], key: str) -> float | None:
    try:
        return float(metrics[key])
    except (KeyError, TypeError, ValueError):
        return None


def _number(value: float) -> str:
    """Three significant digits or so, in at most six characters for what is not astronomical."""
    size = abs(value)
    for bound, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k")):
        if bound <= size < 1e12:
            return f"{value / divisor:.1f}{letter}"
    if value == 0 or 0.01 <= size < 1e3:
        return f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    return f"{value:.1e}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _printable(text: str) -> str:
    """A fresh model writes any byte, also those that would move the cursor."""
    return "".join(char if char.isprintable() or char == "\n" else "·" for char in text)


def _excerpt(text: str, size: int = 240) -> str:
    """On one line, the beginning and the end, which is where the answer is."""
    text = _printable(text.strip().replace("\n", "↵"))
    return text if len(text) <= size else text[: size // 2] + " … " + text[-(size // 2) :]
