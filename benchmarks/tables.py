"""The tables of layouts: one row each, of two lines where a measured figure stands above its prediction."""

from pathlib import Path

from command import size, table
from rich.table import Table

from rljax.plan.hlo import KINDS

EQUAL = ("loss", "grad_norm", "entropy")


def tables(report: dict) -> list[Table | str]:
    """Times where steps ran; then what an update needs and sends."""
    reports = [r for r in report["layouts"] if "refused" not in r]
    if not reports:
        return report["left_out"]
    ran, where = "update_seconds" in reports[0], report.get("topology", "simulated devices")
    title = f"{report['experiment']} on {where}; of two lines the upper is measured, the lower predicted"
    shown = [needs(reports, compiled=not ran), traffic(reports)]
    shown = [times(reports), *shown, results(reports)] if ran else shown
    return [title, *shown, *(f"left out: {line}" for line in report["left_out"])]


def times(reports: list[dict]) -> Table:
    shown = table("layout, training", "step", "ms", "to first", "CPU ms", "to first", "compile, s")
    for r in reports:
        both = lambda cell, r=r: "\n".join(cell(r[f"{stage}_seconds"]) for stage in ("update", "generate"))
        cells = both(lambda t: f"{1e3 * t['wall']:.1f}"), both(lambda t: f"×{t['ratio']:.2f}")
        cells += both(lambda t: f"{1e3 * t['cpu']:.1f}"), both(lambda t: f"×{t['cpu_ratio']:.2f}")
        compiles = "\n".join(f"{r['compile_seconds'][stage]:.2f}" for stage in ("update", "generate"))
        shown.add_row(f"{stem(r)}\n{r['train']}", "update\ngenerate", *cells, compiles)
    return shown


def needs(reports: list[dict], compiled: bool) -> Table:
    """`compiled`: the table also says of which layout each row is and how long it took to compile."""
    columns = ["rows × tokens", "state", "arguments", "temporary", "peak", "GFLOP"]
    columns += ["compile, s"] * compiled
    shown = table("layout, training" if compiled else "an update needs", *columns)
    for r in reports:
        held, p = r["bytes"], r["predicted"]
        pair = lambda measured, predicted: f"{size(measured)}\n{size(predicted)}"
        state = lambda sizes: sizes["params"] + sizes["optimizer"]
        peak = state(p) + p["gradients"] + p["activations"]
        shown.add_row(
            f"{stem(r)}\n{r['train'] if compiled else ''}",
            f"{r['rows']} × {r['time']}",
            pair(state(held), state(p)),
            size(held["arguments"]),
            size(held["temporary"]),
            pair(held["peak"], peak),
            f"{r['flops'] / 1e9:.4g}\n{p['flops'] / 1e9:.4g}",
            *[f"{r['compile_seconds']['update']:.1f}"] * compiled,
        )
    return shown


def traffic(reports: list[dict]) -> Table:
    found = {kind for r in reports for kind in (*r["collectives"], *r["predicted"]["sent"])}
    kinds = [kind for kind in KINDS if kind in found]
    shown = table("an update sends", "in all", *(kind.replace("-", "\n", 1) for kind in kinds))
    for r in reports:
        expected = r["predicted"]["sent"]
        cells = [f"{size(r['sent'])}\n{size(sum(expected.values()))}"]
        for kind in kinds:
            here = r["collectives"].get(kind)
            upper = f"{here['count']}: {size(here['bytes'])}" if here else "-"
            cells.append(f"{upper}\n{size(expected[kind]) if kind in expected else '-'}")
        shown.add_row(f"{stem(r)}\n", *cells)
    return shown


def results(reports: list[dict]) -> Table:
    shown = table("first update", *EQUAL)
    for r in reports:
        shown.add_row(stem(r), *(f"{r['metrics'][name]:.6f}" for name in EQUAL))
    return shown


def stem(report: dict) -> str:
    return Path(report["mesh"]).stem
