"""The table of `python3 -m bench` and the seed's own (`--seed-table`): a line as each is timed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import jax

from . import check, peers, report, runs, scores
from .timing import Effort, TimingError, on_gpu

if TYPE_CHECKING:
    from rich.progress import Progress


def run_checks(out: report.Report, args: argparse.Namespace, progress: Progress) -> bool:
    """Every op, dtype and path against the oracle, or those asked for: a line for each."""
    task = progress.add_task("checking every path", total=None)
    results = []
    for result in check.every_path(args.quick, args.check_dtypes, args.ops):
        results.append(result)
        out.data["check"].append(vars(result) | {"ok": result.ok})
        progress.update(task, advance=1)
    progress.remove_task(task)
    for line, ok in report.check_table(results):
        out.line(line, None if ok else "bold red")
    for r in results:
        if r.error:
            out.line(f"FAILED {r.op} {r.dtype} {r.path} {r.columns}: {r.error}", "bold red")
    return all(r.ok for r in results)


def seed_line(entry: dict[str, Any]) -> str:
    cells = [entry["columns_us"].get(name) for name in runs.SEED_COLUMNS]
    text = " ".join(f"{'-' if c is None else format(c, '.2f'):>11}" for c in cells)
    worst = max(entry["ulp"].values())
    return f"{'x'.join(map(str, entry['shape'])):>14} {text} {worst:>6.2f} {entry['planner']}"


def run(out: report.Report, args: argparse.Namespace, progress: Progress) -> bool:
    """Checks, times, prints; whether all was right."""
    # About 30 ms of device time a case and round on a GPU; wall time a case on a CPU.
    rounds, budget = (1 if args.quick else 3), (0.03 if on_gpu() else 0.15 if args.quick else 0.6)
    effort = Effort(rounds, budget)
    good = run_checks(out, args, progress)
    out.save()
    seed_head = " ".join(f"{c:>11}" for c in runs.SEED_COLUMNS)
    out.line(
        f"{'shape':>14} {seed_head} {'ulp':>6} planner's choice (all in us)"
        if args.seed_table
        else report.table_head()
    )
    task = progress.add_task("timing", total=len(args.grid))
    rows: list[dict[str, Any]] = []
    for shape in args.grid:
        progress.update(task, description=f"timing {shape[0]}x{shape[1]}")
        try:
            if args.seed_table:
                entry = runs.time_seed(shape, args.dtype, effort)
            else:
                entry = runs.time_shape(shape, args.dtype, effort, args.ops)
        except (TimingError, jax.errors.JaxRuntimeError) as error:
            entry = {"shape": shape, "ok": False, "error": str(error)}
            out.line(f"{shape[0]}x{shape[1]}: {error}", "bold red")
        else:
            style = None if entry["ok"] else "bold red"
            rows += entry.get("rows", [])
            for row in entry.get("rows", []):
                out.line(report.table_row(row), style)
            out.line(seed_line(entry) if args.seed_table else report.ceilings_row(entry), style)
        good &= entry["ok"]
        out.data["shapes"].append(entry)
        out.save()
        progress.advance(task)
    means(out, rows, args.ops)
    if args.peers:
        out.data["peers"] = peers.compare(rows, args.peers, args.dtype)
        for line in peers.lines(out.data["peers"]):
            out.line(line)
    return good


def means(out: report.Report, rows: list[dict[str, Any]], ops: tuple[str, ...]) -> None:
    """The geometric means of the scores, and of what jax.nn takes over what we take."""
    for what in ops:
        mine = [row for row in rows if row["what"] == what]
        for figure, title in (("score", "score"), ("ratio", "jax.nn's time / ours")):
            if found := scores.groups(mine, figure):
                out.line(scores.line(mine, figure, f"{what} {title}"))
                out.data.setdefault("means", {})[f"{what}_{figure}"] = found
