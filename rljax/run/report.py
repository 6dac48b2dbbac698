"""The curves of a run as one picture: reward, held-out accuracy, KL, entropy, length and where the time went."""

import math
import os
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

BLUE, ORANGE, GREEN, PURPLE, GRAY = "#2f6db3", "#d9822b", "#3f9b6c", "#8a63b8", "#6b7280"
COLORS = {"generate": BLUE, "reshard": PURPLE, "assess": ORANGE, "train": GREEN}
STYLE = {
    "font.size": 11, "axes.titlesize": 13, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 9, "axes.labelsize": 10.5, "axes.labelcolor": GRAY, "xtick.color": GRAY, "ytick.color": GRAY,
    "xtick.major.size": 0, "ytick.major.size": 0, "axes.edgecolor": "#c4c9d1", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e9ecf0",
    "legend.frameon": False, "legend.fontsize": 10, "lines.linewidth": 2, "lines.solid_capstyle": "round",
}  # fmt: skip


def draw(run_dir: Path, rows: list[dict]) -> Path:
    """RUN_DIR/curves.png (1500 x 850 pixels) from the rows of metrics.jsonl, over the steps of phase "train".

    If there is no such phase, over the one that came last. What was not measured says so.
    """
    phases = [row.get("phase") for row in rows]
    phase = "train" if "train" in phases or not phases else phases[-1]
    rows = [row for row in rows if row.get("phase") == phase]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 8.5), dpi=100, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.14, h_pad=0.14)
        axes = figure.subplots(2, 3).ravel()
        _curve(axes[0], rows, "Reward", "mean over completions", "reward", BLUE)
        _accuracy(axes[1], rows)
        _curve(axes[2], rows, "KL to the starting actor", "nats per token", "kl/reference", PURPLE)
        _curve(axes[3], rows, "Entropy", "nats per token", "entropy", ORANGE)
        _curve(axes[4], rows, "Response length", "tokens", "length", GREEN)
        _times(axes[5], rows)
        steps = [row["step"] for row in rows] or [0]
        edge = max(0.5, (max(steps) - min(steps)) / 50)
        for ax in axes:  # one time axis, however sparse a measurement
            ax.set_xlim(min(steps) - edge, max(steps) + edge)
        path = Path(run_dir) / "curves.png"
        partial = path.with_name("curves.partial.png")
        figure.savefig(partial)
    os.replace(partial, path)
    return path


def _curve(ax: Axes, rows: list[dict], title: str, unit: str, key: str, color: str) -> None:
    """One measured quantity; in a long run each step faintly, and its mean over the twentieth of the run around it."""
    steps, values = _series(rows, key)
    if not _frame(ax, title, unit, steps):
        return
    window = len(values) // 20
    if window < 2:
        ax.plot(steps, values, color=color, marker="o" if len(steps) == 1 else "")
        return
    ax.plot(steps, values, color=color, linewidth=1, alpha=0.3)
    near = np.ones(window)
    ax.plot(steps, np.convolve(values, near, "same") / np.convolve(np.ones_like(values), near, "same"), color=color)
    _aside(ax, f"mean of {window} steps")


def _accuracy(ax: Axes, rows: list[dict]) -> None:
    sampled, greedy = (_series(rows, key) for key in ("eval/exact_match", "eval/exact_match_greedy"))
    if not _frame(ax, "Held-out accuracy", "exact match", np.union1d(sampled[0], greedy[0])):
        return
    for (steps, values), color, label in (greedy, ORANGE, "greedy"), (sampled, BLUE, "sampled"):
        if len(steps):
            ax.plot(steps, values, color=color, marker="o", markersize=5, label=label)
    ax.set_ylim(-0.03, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.legend(loc="best")


def _times(ax: Axes, rows: list[dict]) -> None:
    """Seconds per step, stacked by stage. Rare slow steps, which compile, are cut off and told."""
    found = {key.removeprefix("seconds/") for row in rows for key in row if key.startswith("seconds/")}
    stages = [name for name in COLORS if name in found]
    rows = [row for row in rows if any(_finite(row.get(f"seconds/{name}")) for name in stages)]
    steps = np.array([row["step"] for row in rows], float)
    if not _frame(ax, "Time per step", "seconds", steps):
        return
    spent = [[row.get(f"seconds/{name}") for row in rows] for name in stages]
    parts = np.array([[value if _finite(value) else 0.0 for value in values] for values in spent])
    total = parts.sum(0)
    edges, parts = np.pad(steps, 1, "edge"), np.pad(parts, ((0, 0), (1, 1)), "edge")
    edges[[0, -1]] += -0.5, 0.5  # every step is a column one wide, the outermost too
    ax.stackplot(edges, parts, labels=stages, colors=[COLORS[name] for name in stages], step="mid", linewidth=0)
    top, peak = 1.6 * np.quantile(total, 0.75, method="lower"), total.max()
    ax.set_ylim(0, min(top, 1.25 * peak) or 1.0)
    if peak > top:
        _aside(ax, f"step {rows[total.argmax()]['step']}: {peak:.3g} s")
    ax.legend(loc="upper right", ncols=len(stages), handlelength=0.9, handletextpad=0.5, columnspacing=1.2)


def _aside(ax: Axes, text: str) -> None:
    """A remark across from the title."""
    ax.set_title(text, loc="right", color=GRAY, fontsize=10.5, fontweight="normal")


def _frame(ax: Axes, title: str, unit: str, steps: np.ndarray) -> bool:
    """Titles a panel; without data it says so instead of showing empty axes, and the answer is False."""
    ax.set_title(title)
    if len(steps) == 0:
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", va="center", color=GRAY)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.set_facecolor("#f7f8fa")
        return False
    ax.set(xlabel="step", ylabel=unit)
    ax.margins(y=0.1)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    return True


def _series(rows: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where `key` is a finite number."""
    points = [(row["step"], row[key]) for row in rows if _finite(row.get(key))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, float), np.array(values, float)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
