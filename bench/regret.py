"""`--regret`: every sensible plan of each shape (candidates.py), and what the planner loses.

Two stages: all plans once, then the few best and the planner's choice in ROUNDS rounds, in turn. A
plan's time is the span of a call (trace.py): from its first kernel's (or memset's) start to its
last one's end, with the gap between two launches, cold inputs. The loss is the choice's time over
the best one's; the spread is the larger of both plans' middle half of rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

import jax

from jaxsoftmax import Plan

from . import candidates, cases, check, ops, programs, report, runs, scores
from .plans import describe, kind
from .shapes import Shape
from .timing import Sample, TimingError, in_rounds

if TYPE_CHECKING:
    from rich.progress import Progress

FINAL = 8  # plans of the second stage at most, those within NEAR of the best
NEAR = 1.10
ROUNDS = 7


def finalists(first: dict[str, float], choice: str) -> list[str]:
    """The best of the first stage's times, and the planner's choice."""
    ranked = sorted(first, key=first.__getitem__)
    near = [name for name in ranked[:FINAL] if first[name] <= NEAR * first[ranked[0]]]
    return list(dict.fromkeys([*near, *ranked[:3], choice]))


def loss(samples: dict[str, Sample], choice: str) -> dict[str, Any]:
    """What the choice loses against the best, in percent, and how far repeats differ."""
    best = min(samples, key=lambda name: samples[name].span)
    percent = 100 * (samples[choice].span / samples[best].span - 1)
    spread = max(samples[choice].spread, samples[best].spread)
    return {
        "choice": choice,
        "best": best,
        "choice_us": samples[choice].span,
        "best_us": samples[best].span,
        "loss_percent": percent,
        "spread_percent": spread,
        "beyond_percent": max(0.0, percent - spread),
    }


def one_shape(op: str, dtype: str, shape: Shape) -> dict[str, Any]:
    """Everything about one shape; `ok` is false where a plan fails or the choice has no time."""
    buffers = runs.make_buffers(shape, dtype, ops.is_gradient(op))
    plans = candidates.candidates(op, dtype, *shape, check.limits_here())
    by_name = {programs.label(plan): plan for plan in plans}
    choice = programs.label(plans[0])
    made, failures = programs.prepare(op, plans, ops.inputs(op, buffers))
    moved = programs.moved(op, shape, dtype)
    first = _times(made, programs.calls(moved, 1e-3), 1, failures)
    names = finalists({k: s.span for k, s in first.items()}, choice) if first else []
    final = [case for case in made if case.label in names]
    ceiling = ops.OPS[op].ceiling
    ceilings = [c for c in cases.ceilings(buffers) if c.label in cases.CEILINGS[ceiling]]
    cases.compile_all(ceilings)
    for case in ceilings:
        jax.block_until_ready(case.fn(*case.next()))
    samples = _times(final + ceilings, programs.calls(moved, 6e-3), ROUNDS, failures)
    tried = {name: samples[name] for name in names if name in samples}
    entry: dict[str, Any] = {"shape": shape, "op": op, "ok": not failures, "failures": failures}
    entry["ceilings"] = cases.fastest(samples)
    entry["plans"] = [
        _fields(by_name[name])
        | {"first_us": sample.span, "first_busy_us": sample.median}
        | ({"final": tried[name].summary()} if name in tried else {})
        for name, sample in first.items()
    ]
    if choice in tried:
        entry |= loss(tried, choice)
        base = entry["ceilings"][ceiling]["us"]
        entry |= {"score": base / entry["choice_us"], "best_score": base / entry["best_us"]}
        entry |= {"bytes": moved, "choice_kind": kind(plans[0])}
        entry |= {f"{k}_name": describe(by_name[entry[k]]) for k in ("choice", "best")}
    else:
        entry["ok"] = False
        failures.setdefault(choice, "the planner's choice has no time")
    return entry


def _times(
    made: list[programs.Case], calls: int, rounds: int, failures: dict[str, str]
) -> dict[str, Sample]:
    samples = in_rounds(made, [calls] * len(made), rounds) if made else {}
    for name, sample in samples.items():
        if isinstance(sample, TimingError):
            failures[name] = str(sample)
    return {name: s for name, s in samples.items() if isinstance(s, Sample)}


def _fields(plan: Plan) -> dict[str, Any]:
    return {"plan": dataclasses.asdict(plan), "name": describe(plan), "kind": kind(plan)}


def line(entry: dict[str, Any]) -> str:
    shape = "x".join(map(str, entry["shape"]))
    if "best" not in entry:
        return f"{shape:>14} {entry['op']:<15} the planner's choice failed"
    return (
        f"{shape:>14} {entry['op']:<15} {entry['choice_name']:<24} {entry['choice_us']:>9.2f} "
        f"{entry['best_name']:<24} {entry['best_us']:>9.2f} {entry['loss_percent']:>6.1f} "
        f"{entry['spread_percent']:>6.1f} {entry['score']:>6.2f} {len(entry['plans']):>6}"
    )


HEAD = (
    f"{'shape':>14} {'op':<15} {'choice':<24} {'us':>9} {'best':<24} {'us':>9} {'loss %':>6} "
    f"{'spread':>6} {'score':>6} {'plans':>6}"
)


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst loss, the worst beyond the spread, and where."""
    worst = max(entries, key=lambda e: e["beyond_percent"])
    return {
        "shapes": len(entries),
        "median_percent": statistics.median(e["loss_percent"] for e in entries),
        "worst_percent": max(e["loss_percent"] for e in entries),
        "worst_beyond_percent": worst["beyond_percent"],
        "worst_shape": worst["shape"],
        "above_5_beyond": sum(e["beyond_percent"] > 5 for e in entries),
        "median_spread_percent": statistics.median(e["spread_percent"] for e in entries),
    }


def run(out: report.Report, args: argparse.Namespace, progress: Progress) -> bool:
    """Measures, prints; whether every plan ran, with a right result and a time."""
    good = True
    out.line(HEAD)
    task = progress.add_task("regret", total=len(args.grid) * len(args.ops))
    for op in args.ops:
        entries = []
        for shape in args.grid:
            progress.update(task, description=f"regret {shape[0]}x{shape[1]}")
            try:
                entry = one_shape(op, args.dtype, shape)
            except (TimingError, jax.errors.JaxRuntimeError) as error:
                entry = {"shape": shape, "op": op, "ok": False, "failures": {"": str(error)}}
            out.line(line(entry), None if entry["ok"] else "bold red")
            for name, why in entry["failures"].items():
                out.line(f"    FAILED {name}: {why}", "bold red")
            good &= entry["ok"]
            entries += [entry] if "best" in entry else []
            out.data["shapes"].append(entry)
            out.save()
            progress.advance(task)
        if entries:
            out.data.setdefault("summary", {})[op] = found = summary(entries)
            where = "x".join(map(str, found["worst_shape"]))
            out.line(
                f"{op}: loss median {found['median_percent']:.1f} %, worst "
                f"{found['worst_percent']:.1f} %; beyond the spread worst "
                f"{found['worst_beyond_percent']:.1f} % ({where}), above 5 % in "
                f"{found['above_5_beyond']} of {found['shapes']} shapes"
            )
            for figure, title in (("score", "planner's score"), ("best_score", "best plan's")):
                out.line(scores.line(entries, figure, f"{op} {title}"))
    return good
