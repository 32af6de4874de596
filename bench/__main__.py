"""Command line: check every path against the oracle, time the ops and their gradients, report.

    python3 -m bench [--quick] [--dtype NAME] [--op OP] [--shapes 128x1024,...] [--out DIR]
    python3 -m bench --seed-table | --regret | --cliffs | --traffic | --loss | --patterns
    python3 -m bench --scaling [--devices N]
    python3 -m bench --peers FILE.csv [--from RESULT.json]

Exit status: 0 all right, 1 a wrong result or a measurement that failed, 2 a bad option.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

try:
    import jax
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jaxsoftmax import _plan
except ImportError as error:
    sys.exit(f'{error}: run python3 -m pip install ".[bench]" first')

from . import (
    cliffs,
    loss,
    ops,
    pattern_cases,
    patterns,
    peers,
    regret,
    report,
    scaling,
    scaling_cases,
    scaling_report,
    shapes,
    table,
    traffic,
)
from .timing import on_gpu

MODES = {
    "seed_table": (table.run, "the seed's five kernels, forced, and the planner's choice"),
    "regret": (regret.run, "every sensible plan of each shape: what the planner loses"),
    "cliffs": (cliffs.run, "time a byte on both sides of powers of two and of thresholds"),
    "traffic": (traffic.run, "DRAM bytes of each kind of plan, counted by ncu"),
    "loss": (loss.run, "a language model's loss and its gradient, in two forms, ours and jax.nn's"),
    "patterns": (patterns.run, "scaled, masked, causal attention, other axes: ours and jax.nn's"),
    "scaling": (scaling.run, "softmax cut by rows and by columns over the devices of this host"),
}
OF_THEIR_OWN = ("loss", "patterns", "scaling")  # ops, in bfloat16
PLOTS = {None: report.plot, "scaling": scaling_report.plot}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m bench", description=__doc__.split("\n")[0])
    names = ", ".join(_plan.DTYPES)
    parser.add_argument("--quick", action="store_true", help="few shapes, under a minute")
    text = (
        "default: float16 on a GPU, else float32; bfloat16: --loss, --patterns, on GPUs --scaling"
    )
    parser.add_argument("--dtype", help=f"{names} ({text})")
    text = "both: softmax and softmax_bwd, the default; with --regret and --cliffs softmax"
    parser.add_argument("--op", choices=tuple(ops.CHOICES), help=text)
    text = "ROWSxCOLUMNS,... instead of the grid; with --patterns and --scaling some of theirs"
    parser.add_argument("--shapes", help=text)
    modes = parser.add_mutually_exclusive_group()
    for name, (_, text) in MODES.items():
        modes.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    text = "with --scaling: so many, a power of two (default: as many as there are)"
    parser.add_argument("--devices", type=int, metavar="N", help=text)
    parser.add_argument("--peers", type=Path, metavar="CSV", help="figures to print ours beside")
    text = "with --peers: an earlier run's result; nothing is timed"
    parser.add_argument("--from", type=Path, dest="source", metavar="JSON", help=text)
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of results")
    parser.add_argument("--no-plot", action="store_true", help="write the JSON alone")
    args = parser.parse_args(argv)
    args.mode = next((name for name in MODES if getattr(args, name)), None)
    args.check_dtypes = [args.dtype] if args.dtype else list(_plan.DTYPES)
    of_their_own = args.mode in OF_THEIR_OWN
    wide = args.scaling and not on_gpu()
    default = "bfloat16" if of_their_own and not wide else "float16" if on_gpu() else "float32"
    args.dtype = args.dtype or default
    if args.dtype not in _plan.DTYPES:
        parser.exit(2, f"unknown dtype {args.dtype!r}: one of {names}\n")
    if args.source and not args.peers:
        parser.exit(2, "--from is for --peers\n")
    if args.op and of_their_own:
        parser.exit(2, f"--{args.mode} has ops of its own: --op is for the other tables\n")
    if args.devices is not None and not args.scaling:
        parser.exit(2, "--devices is for --scaling\n")
    args.ops = ops.CHOICES[args.op or ("softmax" if args.mode in ("regret", "cliffs") else "both")]
    try:
        args.devices = scaling_cases.counts(args.devices) if args.scaling else []
        args.grid = list(grid(args))
        if args.shapes:
            of_grid = args.patterns or args.scaling
            parse = partial(pattern_cases.parse, known=args.grid) if of_grid else shapes.parse
            args.grid = parse(args.shapes)
        args.peers = peers.read(args.peers) if args.peers else None
        args.source = json.loads(args.source.read_text()) if args.source else None
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    return args


def grid(args: argparse.Namespace) -> tuple[Any, ...]:
    """Shapes, or with --patterns groups, with --scaling families."""
    if args.scaling:
        return tuple(scaling_cases.grid(on_gpu(), args.quick))
    if args.patterns:
        return pattern_cases.grid(on_gpu(), args.quick)
    if args.loss:
        return shapes.loss(on_gpu(), args.quick)
    if not on_gpu():
        return shapes.CPU_QUICK if args.quick else shapes.CPU
    if args.quick:
        return shapes.GPU_QUICK
    return shapes.SEED if args.seed_table else shapes.GPU


def compare(args: argparse.Namespace, console: Console) -> int:
    """An earlier result beside the peers' figures."""
    rows = [row for shape in args.source["shapes"] for row in shape.get("rows", [])]
    environment, dtype = args.source["environment"], args.source["options"]["dtype"]
    console.print(f"{environment['device']}, {dtype}, commit {environment['commit']}")
    for text in peers.lines(peers.compare(rows, args.peers, dtype)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if args.source:
        return compare(args, console)
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    kept = {"dtype": args.dtype, "ops": args.ops, "quick": args.quick, "mode": args.mode}
    kept["seed_table"] = args.seed_table
    suffix = {None: "", "seed_table": "_seed"}.get(args.mode, f"_{args.mode}")
    op = f"_{args.op}" if args.op else ""
    name = args.dtype + suffix + op + ("_quick" if args.quick else "")
    out = report.Report(args.out, name, kept, console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    run = MODES[args.mode][0] if args.mode else table.run
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        good = run(out, args, progress)
    out.data["complete"] = True
    out.save()
    out.line(f"wrote {out.path}")
    if not args.no_plot and args.mode in PLOTS:
        picture = out.path.with_suffix(".png")
        PLOTS[args.mode](out.data, picture)
        out.line(f"wrote {picture}")
    if not good:
        out.line("FAILED: a result is wrong or a measurement failed (see above)", "bold red")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
