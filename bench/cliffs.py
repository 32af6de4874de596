"""`--cliffs`: time per byte of rows of c and of c + 1 columns, where MOVED bytes or more move.

c is a power of two from 1024 to 65536, or the last length before the planner changes its mind: of
whole packs, and of others (there the rows of both c and c + 1 start anywhere). The planner itself
is asked where: plan() is tried on a fine scale of lengths, and a change of kind, registers, rows a
block or cluster is narrowed down to one pack. From SHORTEST columns on: below, one more column is
itself more than a percent of the row. Times are spans, as for `--regret`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jaxsoftmax
from jaxsoftmax._limits import Limits
from jaxsoftmax._plan_spec import PACK

from . import check, ops, programs, report, runs
from .plans import describe, kind
from .timing import Sample, TimingError, in_rounds

if TYPE_CHECKING:
    from rich.progress import Progress

POWERS = tuple(1 << k for k in range(10, 17))
MOVED = 128 * 10**6  # beyond any cache; the promise is for 64 MB or more
SHORTEST, LONGEST = 64, 1 << 25
STEP = 1.03
ROUNDS = 5
PROMISED = 10.0  # percent


def rows_for(op: str, dtype: str, n: int) -> int:
    """The fewest rows of n columns that move MOVED bytes."""
    return -(-MOVED // programs.moved(op, (1, n), dtype))


def nature(op: str, dtype: str, n: int, limits: Limits) -> tuple[Any, ...]:
    """What of the planner's choice changes at a threshold, and not from pack to pack."""
    plan = jaxsoftmax.plan(op, dtype, rows_for(op, dtype, n), n, limits=limits)
    cluster = plan.splits if plan.path == "one_pass" else 0
    shared = plan.reg_packs > 0 and plan.smem_packs > 0
    return kind(plan), plan.reg_packs, plan.rows_per_block, cluster, shared


def changes(nature_of: Callable[[int], Any], longest: int) -> list[int]:
    """Every p up to `longest` on whose two sides, p and p + 1, nature_of differs.

    Lengths are tried STEP apart, so what comes and goes within a step is missed.
    """
    found = []
    last = 1
    while last < longest:
        here = min(longest, max(last + 1, int(last * STEP)))
        low, high = last, here
        while nature_of(low) != nature_of(high):
            below, above = low, high
            while above - below > 1:
                middle = (below + above) // 2
                if nature_of(middle) == nature_of(low):
                    below = middle
                else:
                    above = middle
            found.append(below)
            low = above
        last = here
    return found


def pairs(op: str, dtype: str, limits: Limits) -> dict[int, str]:
    """Each c, and why it is looked at."""
    each = PACK // jnp.dtype(dtype).itemsize  # columns of a pack
    thresholds = changes(lambda p: nature(op, dtype, p * each, limits), LONGEST // each)
    found = {c: "power of two" for c in POWERS}
    for packs in thresholds:
        found[packs * each] = "threshold"
        found[(packs - 1) * each + 1] = "any alignment"  # the longest that touches so many packs
    return {c: found[c] for c in sorted(found) if c >= SHORTEST}


def time_length(op: str, dtype: str, n: int) -> dict[str, Any]:
    """The planner's choice for rows of n columns: its plan, us, and picoseconds a byte."""
    shape = (rows_for(op, dtype, n), n)
    plan = check.plan_here(op, dtype, shape)
    buffers = runs.make_buffers(shape, dtype, ops.is_gradient(op))
    made, failures = programs.prepare(op, [plan], ops.inputs(op, buffers))
    if failures:
        raise TimingError("; ".join(f"{k}: {v}" for k, v in failures.items()))
    moved = programs.moved(op, shape, dtype)
    (sample,) = in_rounds(made, [programs.calls(moved, 2e-3, least=8)], ROUNDS).values()
    if not isinstance(sample, Sample):
        raise sample
    return {
        "shape": shape,
        "plan": str(plan),
        "name": describe(plan),
        "us": sample.span,
        "spread_percent": sample.spread,
        "ps_per_byte": 1e6 * sample.span / moved,
    }


def one_pair(op: str, dtype: str, c: int, why: str) -> dict[str, Any]:
    low, high = (time_length(op, dtype, n) for n in (c, c + 1))
    per_byte = sorted(side["ps_per_byte"] for side in (low, high))
    difference = 100 * (per_byte[1] / per_byte[0] - 1)
    return {"columns": c, "why": why, "op": op, "sides": [low, high], "percent": difference}


def line(entry: dict[str, Any]) -> str:
    low, high = entry["sides"]
    return (
        f"{entry['columns']:>9} {entry['why']:<13} {low['shape'][0]:>8} {low['name']:<24} "
        f"{low['ps_per_byte']:>8.4f} {high['name']:<24} {high['ps_per_byte']:>8.4f} "
        f"{entry['percent']:>6.1f} {max(s['spread_percent'] for s in entry['sides']):>6.1f}"
    )


def run(out: report.Report, args: argparse.Namespace, progress: Progress) -> bool:
    """Measures, prints; whether every length could be timed. A cliff is told, not a failure."""
    good = True
    for op in args.ops:
        looked = pairs(op, args.dtype, check.limits_here())
        looked = {c: w for c, w in looked.items() if not args.quick or c in POWERS[:2]}
        out.line(f"{op}, {args.dtype}, {MOVED / 1e6:g} MB or more")
        out.line(
            f"{'c':>9} {'why':<13} {'rows':>8} {'plan of c':<24} {'ps/B':>8} "
            f"{'plan of c + 1':<24} {'ps/B':>8} {'%':>6} {'spread':>6}"
        )
        task = progress.add_task("cliffs", total=len(looked))
        entries = []
        for c, why in looked.items():
            progress.update(task, description=f"cliff at {c}", advance=1)
            try:
                entry = one_pair(op, args.dtype, c, why)
            except (TimingError, jax.errors.JaxRuntimeError) as error:
                good = False
                entry = {"columns": c, "why": why, "op": op, "error": str(error)}
                out.line(f"{c:>9} {why:<13} FAILED: {error}", "bold red")
            else:
                entries.append(entry)
                out.line(line(entry), "bold red" if entry["percent"] > PROMISED else None)
            out.data.setdefault("pairs", []).append(entry)
            out.save()
        if entries:
            worst = max(entries, key=lambda e: e["percent"])
            above = sum(e["percent"] > PROMISED for e in entries)
            out.data.setdefault("summary", {})[op] = {
                "worst_percent": worst["percent"],
                "worst_columns": worst["columns"],
                "above_promised": above,
                "pairs": len(entries),
            }
            out.line(
                f"{op}: worst difference {worst['percent']:.1f} % at {worst['columns']}; "
                f"{above} of {len(entries)} pairs above {PROMISED:g} %"
            )
    return good
