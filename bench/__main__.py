"""Command line: check every path against the oracle, time softmax and its gradient, report.

    python3 -m bench [--quick] [--dtype NAME] [--shapes 128x1024,...] [--seed-table] [--out DIR]

Exit status: 0 all right, 1 a wrong result or a measurement that failed, 2 a bad option.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

try:
    import jax
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jaxsoftmax import _plan
except ImportError as error:
    sys.exit(f'{error}: run python3 -m pip install ".[bench]" first')

from . import check, report, runs, shapes
from .timing import Effort, TimingError, on_gpu


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m bench", description=__doc__.split("\n")[0])
    names = ", ".join(_plan.DTYPES)
    parser.add_argument("--quick", action="store_true", help="few shapes, under a minute")
    parser.add_argument("--dtype", help=f"{names} (default: float16 on a GPU, else float32)")
    parser.add_argument("--shapes", help="ROWSxCOLUMNS, separated by commas, instead of the grid")
    parser.add_argument("--seed-table", action="store_true", help="the seed's five kernels, forced")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of results")
    parser.add_argument("--no-plot", action="store_true", help="write the JSON alone")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("float16" if on_gpu() else "float32")
    if args.dtype not in _plan.DTYPES:
        parser.exit(2, f"unknown dtype {args.dtype!r}: one of {names}\n")
    try:
        args.grid = shapes.parse(args.shapes) if args.shapes else list(grid(args))
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    return args


def grid(args: argparse.Namespace) -> tuple[shapes.Shape, ...]:
    if not on_gpu():
        return shapes.CPU_QUICK if args.quick else shapes.CPU
    if args.quick:
        return shapes.GPU_QUICK
    return shapes.SEED if args.seed_table else shapes.GPU


def run_checks(out: report.Report, args: argparse.Namespace, progress: Progress) -> bool:
    """Every op, dtype and path against the oracle: a line for each op and dtype."""
    task = progress.add_task("checking every path", total=None)
    results = []
    for result in check.every_path(args.quick):
        results.append(result)
        out.data["check"].append(vars(result) | {"ok": result.ok})
        progress.update(task, advance=1)
    progress.remove_task(task)
    for line, ok in report.check_table(results):
        out.line(line, None if ok else "bold red")
    return all(r.ok for r in results)


def seed_line(entry: dict[str, Any]) -> str:
    cells = [entry["samples"].get(name, {}).get("median_us") for name in runs.SEED_COLUMNS]
    text = " ".join(f"{'-' if c is None else format(c, '.2f'):>11}" for c in cells)
    worst = max(entry["ulp"].values())
    return f"{'x'.join(map(str, entry['shape'])):>14} {text} {worst:>6.2f} {entry['planner']}"


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    # About 30 ms of device time a case and round on a GPU; wall time a case on a CPU.
    rounds, budget = (1 if args.quick else 3), (0.03 if on_gpu() else 0.15 if args.quick else 0.6)
    effort = Effort(rounds, budget)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    kept = {"dtype": args.dtype, "quick": args.quick, "seed_table": args.seed_table}
    name = args.dtype + ("_seed" if args.seed_table else "") + ("_quick" if args.quick else "")
    out = report.Report(args.out, name, kept, console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    good = True
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        good &= run_checks(out, args, progress)
        out.save()
        seed_head = " ".join(f"{c:>11}" for c in runs.SEED_COLUMNS)
        out.line(
            f"{'shape':>14} {seed_head} {'ulp':>6} planner's choice (all in us)"
            if args.seed_table
            else report.table_head()
        )
        task = progress.add_task("timing", total=len(args.grid))
        for shape in args.grid:
            progress.update(task, description=f"timing {shape[0]}x{shape[1]}")
            try:
                entry = (runs.time_seed if args.seed_table else runs.time_shape)(
                    shape, args.dtype, effort
                )
            except (TimingError, jax.errors.JaxRuntimeError) as error:
                entry = {"shape": shape, "ok": False, "error": str(error)}
                out.line(f"{shape[0]}x{shape[1]}: {error}", "bold red")
            else:
                style = None if entry["ok"] else "bold red"
                for row in entry.get("rows", []):
                    out.line(report.table_row(row), style)
                if args.seed_table:
                    out.line(seed_line(entry), style)
            good &= entry["ok"]
            out.data["shapes"].append(entry)
            out.save()
            progress.advance(task)
    out.data["complete"] = True
    out.save()
    out.line(f"wrote {out.path}")
    if not args.no_plot and not args.seed_table:
        picture = out.path.with_suffix(".png")
        report.plot(out.data, picture)
        out.line(f"wrote {picture}")
    if not good:
        out.line("FAILED: a result is wrong or a measurement failed (see above)", "bold red")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
