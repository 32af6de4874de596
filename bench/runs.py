"""What is done with one shape of the tables: check it, time it, put the numbers together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from jaxsoftmax import _plan

from . import cases, check, report, shapes
from .plans import describe
from .timing import Effort, measure, on_gpu, ratio

OPS = ("softmax", "softmax_bwd")
SEED_COLUMNS = ("copy", "jax_fwd", *_plan.SEED_PLANS, "planner")


def shape_errors(
    shape: shapes.Shape, buffers: shapes.Buffers, ops: tuple[str, ...]
) -> dict[str, float]:
    """Worst ulp forward and backward on this shape: infinite where a row is not near jnp's."""
    x, errors = buffers.x[0], {}
    y, pull = jax.jit(lambda x: jax.vjp(jaxsoftmax.softmax, x))(x)
    x_, y_ = (np.asarray(check.sampled(a)) for a in (x, y))
    if "softmax" in ops:
        near = bool(check.like_jax(x, y))
        errors["fwd"] = check.forward_error(x_, y_) if near else float("inf")
    if "softmax_bwd" in ops:
        dy = buffers.dy[0]
        dx = jax.jit(lambda pull, dy: pull(dy)[0])(pull, dy)
        dy_, dx_ = (np.asarray(check.sampled(a)) for a in (dy, dx))
        near = bool(check.gradient_like_jnp(y, dy, dx))
        errors["bwd"] = check.backward_error(y_, dy_, dx_) if near else float("inf")
    return errors


def make_buffers(shape: shapes.Shape, dtype: str, gradient: bool = True) -> shapes.Buffers:
    most = 1024 if on_gpu() else 16
    return shapes.Buffers.make(shape, dtype, report.cache_bytes(), most, gradient)


def time_shape(
    shape: shapes.Shape, dtype: str, effort: Effort, ops: tuple[str, ...] = OPS
) -> dict[str, Any]:
    """Checks and times softmax, its gradient, jax.nn's and the ceilings on one shape."""
    buffers = make_buffers(shape, dtype, "softmax_bwd" in ops)
    errors = shape_errors(shape, buffers, ops)
    timed = cases.ceilings(buffers)
    timed += cases.gradients(buffers, jaxsoftmax.softmax, "ours", ops)
    timed += cases.gradients(buffers, jax.nn.softmax, "jax", ops)
    cases.compile_all(timed)
    samples = measure(timed, effort)
    ceilings = cases.fastest(samples)
    copy, triad = ceilings["copy"]["us"], ceilings["triad"]["us"]
    size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    plans = {op: check.plan_here(op, dtype, shape) for op in ops}
    names = {op: describe(plan) for op, plan in plans.items()}
    kinds = [
        ("fwd", 2, copy, names.get("softmax")),
        ("bwd", 3, triad, names.get("softmax_bwd")),
        ("fwd+bwd", 5, copy + triad, "" if ops == OPS else None),
    ]
    rows = []
    for what, moved, base, name in kinds:
        if name is None:
            continue
        key = "both" if what == "fwd+bwd" else what
        ours, theirs = samples[f"ours_{key}"], samples[f"jax_{key}"]
        rows.append(
            {"shape": shape, "what": what, "path": name, "ulp": errors.get(what)}
            | {"ours_us": ours.median, "jax_us": theirs.median, "copy_us": base}
            | {"ratio": ratio(theirs, ours), "percent_of_copy": 100 * base / ours.median}
            | {"score": base / ours.median}
            | {"bytes": moved * size, "gb_per_s": moved * size / ours.median / 1e3}
        )
    good = {"fwd": check.FORWARD_BOUND[dtype], "bwd": check.BACKWARD_BOUND}
    return {
        "shape": shape,
        "plans": {op: str(p) for op, p in plans.items()},
        "ceilings": ceilings,
        "rows": rows,
        "ok": all(error <= good[what] for what, error in errors.items()),
        "samples": {label: s.summary() for label, s in samples.items()},
    }


def time_seed(shape: shapes.Shape, dtype: str, effort: Effort) -> dict[str, Any]:
    """Checks and times the seed's kernels as forced plans, beside what the planner chooses."""
    buffers = make_buffers(shape, dtype, gradient=False)
    plans = cases.seed_plans(shape, dtype)
    plans["planner"] = check.plan_here("softmax", dtype, shape)
    timed = cases.forced(buffers, plans)
    x = buffers.x[0]
    x_ = np.asarray(check.sampled(x))
    errors = {}
    for case in timed:
        y = case.fn(x)
        near = bool(check.like_jax(x, y))
        errors[case.label] = (
            check.forward_error(x_, np.asarray(check.sampled(y))) if near else float("inf")
        )
    timed += cases.ceilings(buffers) + cases.gradients(buffers, jax.nn.softmax, "jax", OPS[:1])
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
        "ok": max(errors.values()) <= check.FORWARD_BOUND[dtype],
        "samples": {label: s.summary() for label, s in samples.items()},
    }
