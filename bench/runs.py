"""What is done with one shape of the tables: check it, time it, put the numbers together."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

import jaxsoftmax
from jaxsoftmax import _plan

from . import cases, check, judge, report, shapes
from .ops import OPS, inputs, is_gradient, rows_of
from .plans import describe
from .timing import Case, Effort, measure, on_gpu, ratio

SEED_COLUMNS = ("copy", "jax_softmax", *_plan.SEED_PLANS, "planner")


def shape_errors(
    buffers: shapes.Buffers, timed: list[Case], ops: Iterable[str]
) -> dict[str, float]:
    """Worst ulp of each op of ours on this shape: infinite where a row is not near jnp's."""
    errors = {}
    for op in ops:
        (case,) = (c for c in timed if c.label == f"ours_{op}")
        errors[op] = check.error(op, inputs(op, buffers)[0], case.fn(*case.inputs[0]))
    return errors


def make_buffers(shape: shapes.Shape, dtype: str, gradient: bool = True) -> shapes.Buffers:
    most = 1024 if on_gpu() else 16
    return shapes.Buffers.make(shape, dtype, report.cache_bytes(), most, gradient)


def time_shape(
    shape: shapes.Shape, dtype: str, effort: Effort, ops: tuple[str, ...] = ("softmax",)
) -> dict[str, Any]:
    """Checks and times ours, jax.nn's and the ceilings on one shape."""
    buffers = make_buffers(shape, dtype, any(is_gradient(op) for op in ops))
    timed = cases.ceilings(buffers)
    timed += cases.op_cases(buffers, jaxsoftmax, "ours", ops)
    timed += cases.op_cases(buffers, jax.nn, "jax", ops)
    cases.compile_all(timed)
    errors = shape_errors(buffers, timed, ops)
    samples = measure(timed, effort)
    ceilings = cases.fastest(samples)
    size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    plans = {op: check.plan_here(op, dtype, shape) for op in ops}
    rows = []
    for what, of in rows_of(ops).items():
        base = sum(ceilings[OPS[op].ceiling]["us"] for op in of)
        moved = sum(OPS[op].units for op in of) * size
        ours, theirs = samples[f"ours_{what}"], samples[f"jax_{what}"]
        path = describe(plans[what]) if what in plans else ""
        rows.append(
            {"shape": shape, "what": what, "path": path, "ulp": errors.get(what)}
            | {"ours_us": ours.median, "jax_us": theirs.median, "ratio": ratio(theirs, ours)}
            | {"ceiling": " + ".join(OPS[op].ceiling for op in of), "ceiling_us": base}
            | {"score": base / ours.median}
            | {"bytes": moved, "gb_per_s": moved / ours.median / 1e3}
        )
    return {
        "shape": shape,
        "plans": {op: str(p) for op, p in plans.items()},
        "ceilings": ceilings,
        "rows": rows,
        "ok": all(error <= judge.bound(op, dtype) for op, error in errors.items()),
        "samples": {label: s.summary() for label, s in samples.items()},
    }


def time_seed(shape: shapes.Shape, dtype: str, effort: Effort) -> dict[str, Any]:
    """Checks and times the seed's kernels as forced plans, beside what the planner chooses."""
    buffers = make_buffers(shape, dtype, gradient=False)
    plans = cases.seed_plans(shape, dtype)
    plans["planner"] = check.plan_here("softmax", dtype, shape)
    timed = cases.forced(buffers, plans)
    x = buffers.x[0]
    errors = {case.label: check.error("softmax", (x,), case.fn(x)) for case in timed}
    timed += cases.ceilings(buffers) + cases.op_cases(buffers, jax.nn, "jax", ["softmax"])
    cases.compile_all(timed)
    samples = measure(timed, effort)
    columns = {label: s.median for label, s in samples.items() if label in SEED_COLUMNS}
    ceilings = cases.fastest(samples)
    return {
        "shape": shape,
        "plans": {name: str(p) for name, p in plans.items()},
        "planner": describe(plans["planner"]),
        "ceilings": ceilings,
        "columns_us": {"copy": ceilings["copy"]["us"]} | columns,
        "ulp": errors,
        "ok": max(errors.values()) <= judge.bound("softmax", dtype),
        "samples": {label: s.summary() for label, s in samples.items()},
    }
