"""`--scaling`: softmax cut by rows and by columns (a vocabulary) over the devices of one host.

Automatic sharding on 1, 2, 4, ... devices and, of columns, `axis_name` in a shard_map. Speed-up is
over one device's plain call, a weak one of as many times its work as there are devices. `same code`
is over one device that runs what several run: of columns that reads x twice, which a plain call may
not. Efficiency is that over the number of devices. `x copy` is the time over that of copies of as
many bytes on the slowest device. Results are compared with one device's, collectives read in the
HLO.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from . import cases, judge, report, scaling_cases, scaling_hlo, scaling_trace, timing
from .scaling_cases import ARRAYS, PLAIN
from .scaling_report import HEAD, add_figures, good, line, target_line, targets
from .timing import Case, Effort, Sample, TimingError

if TYPE_CHECKING:
    from rich.progress import Progress

COPY = "copy"
ALLOWED: dict[str, tuple[str, ...]] = {"rows": (), "columns": ("all_reduce",)}  # collectives

Timings = dict[str, tuple[Sample, list[float] | None] | TimingError]


# --- one shape on one number of devices ---


def times(made: Sequence[Case], effort: Effort, devices: Sequence[jax.Device]) -> Timings:
    """A sample of each case, and on GPUs each device's own time."""
    if not timing.on_gpu():
        return {k: (s, None) for k, s in timing.measure(list(made), effort).items()}
    calls = []
    for case in made:
        cost = min(timing._once(case, 1) for _ in range(3))
        calls.append(
            max(scaling_trace.LEAST, min(most(case, devices), int(effort.budget_s / cost)))
        )
    return {**scaling_trace.in_rounds(made, calls, effort.rounds, tuple(devices))}


def most(case: Case, devices: Sequence[jax.Device]) -> int:
    """Calls of a group: outputs of all may be alive at once, in half the memory."""
    memory = (devices[0].memory_stats() or {}).get("bytes_limit", 1 << 34)
    outputs = sum(x.nbytes for x in case.inputs[0]) / len(devices)  # as large as its inputs
    return min(timing.GROUP, int(memory / 2 / outputs))


def one_count(
    kind: str, shape: tuple[int, int], devices: Sequence[jax.Device], dtype: str, effort: Effort
) -> list[dict[str, Any]]:
    """Checks every form, reads its program and times it."""
    one = scaling_cases.OneDevice(
        *scaling_cases.inputs(shape, dtype, scaling_cases.sharding(kind, devices[:1])), devices[0]
    )
    x, dy = (one.x, one.dy)
    if len(devices) > 1:
        x, dy = scaling_cases.inputs(shape, dtype, scaling_cases.sharding(kind, devices))
    made = scaling_cases.programs(kind, x, dy, devices)
    copy = Case(COPY, cases.named(lambda x: jnp.copy(x), "scaling_copy"), [(x,)])
    cases.compile_all([*made.values(), copy])
    oracle = one.against_oracle() if len(devices) == 1 else {}
    points = []
    for (form, what), case in made.items():
        fn: Any = case.fn
        results = case.fn(*case.inputs[0])
        results = results if isinstance(results, tuple) else (results,)
        found = scaling_hlo.collectives(fn.as_text())
        point = {"devices": len(devices), "shape": shape, "form": form, "what": what}
        point |= {"errors": one.errors(results), "collectives": found}
        point["stays"] = all(r.sharding.is_equivalent_to(x.sharding, 2) for r in results)
        if form == PLAIN:
            point["oracle"] = oracle
        points.append(point | {"wrong": wrong(kind, point, dtype)})
    del one, results
    try:
        timed = times([*made.values(), copy], effort, devices)
    except TimingError as error:  # what was checked stays
        timed = {case.label: error for case in [*made.values(), copy]}
    for point in points:
        add_times(point, timed[f"{point['form']} {point['what']}"], timed[COPY])
    return points


def wrong(kind: str, point: dict[str, Any], dtype: str) -> list[str]:
    """What is wrong with a program: nothing, mostly."""
    limits = scaling_cases.bounds(dtype)
    found = [
        f"{name} is {ulp:g} ulp from one device's, at most {limits[name]:g} are right"
        for name, ulp in point["errors"].items()
        if not ulp <= limits[name]
    ]
    found += [
        f"{op} of one device is off by {ulp:g} ulp"
        for op, ulp in point.get("oracle", {}).items()
        if not ulp <= judge.bound(op, dtype)
    ]
    found += [
        f"{one['count']} x {name}: {', '.join(one['shapes'])}"
        for name, one in point["collectives"].items()
        if one["count"] and name not in ALLOWED[kind]
    ]
    return found + ([] if point["stays"] else ["a result is not laid out as x is"])


def add_times(point: dict[str, Any], timed: Any, copy: Any) -> None:
    if isinstance(timed, TimingError):
        point["error"] = str(timed)
        return
    sample, by_device = timed
    point |= {"us": sample.median, "by_device_us": by_device, "sample": sample.summary()}
    if not isinstance(copy, TimingError):
        point |= {"copy_us": copy[0].median, "copy_by_device_us": copy[1]}
        point["of_copy"] = sample.median / (copy[0].median * ARRAYS[point["what"]] / 2)


# --- all of them ---


def run(out: report.Report, args: argparse.Namespace, progress: Progress) -> bool:
    """Checks, measures, prints; whether all was right. A missed target is told, not a failure."""
    devices, effort = jax.local_devices(), Effort(1 if args.quick else 5, 0.05)
    out.data["environment"] |= {
        "devices": [str(d) for d in devices],
        "flags": {k: v for k, v in os.environ.items() if k.startswith(("XLA_FLAGS", "NCCL_"))},
        "topology": report._output("nvidia-smi", "topo", "-m") if timing.on_gpu() else None,
    }
    out.line(f"{len(devices)} devices found; on {', '.join(map(str, args.devices))} of them")
    out.line(HEAD)
    done: dict[Any, list[dict[str, Any]]] = {}
    right = True
    task = progress.add_task("scaling", total=len(args.grid) * len(args.devices))
    for family in args.grid:
        entry: dict[str, Any] = {"name": str(family), "scaling": family.scaling}
        entry |= {"kind": family.kind, "shape": family.shape, "points": [], "failures": []}
        entry["seconds"] = []  # that each number of devices took, compilation included
        out.data["shapes"].append(entry)
        for n in args.devices:
            progress.update(task, description=f"{family} on {n}")
            unit, start = (family.kind, family.whole(n), n), time.perf_counter()
            try:
                if unit not in done:
                    done[unit] = one_count(*unit[:2], devices[:n], args.dtype, effort)
            except Exception as error:  # whatever it is: other shapes may run
                entry["failures"].append(
                    {"devices": n, "error": f"{type(error).__name__}: {error}"}
                )
                out.line(f"{family} on {n}: {type(error).__name__}: {error}", "bold red")
                right = False
            else:
                points = [dict(p) for p in done[unit]]
                entry["points"] += points
                add_figures(entry["points"], family)
                for p in points:
                    out.line(line(p, family), None if good([p]) else "bold red")
                right &= good(points)
            entry["seconds"].append(time.perf_counter() - start)
            out.save()
            progress.advance(task)
    out.data["targets"] = targets(out.data["shapes"]) if timing.on_gpu() else []
    for found in out.data["targets"]:
        out.line(target_line(found))
    return right
