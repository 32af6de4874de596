"""What is done with one shape: check it, time it, and put the numbers together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from jaxsoftmax import _plan

from . import check, report, shapes
from .timing import Effort, measure, on_gpu, ratio

SEED_COLUMNS = ("copy_kernel", "jax_fwd", *_plan.SEED_PLANS, "planner")


def describe(plan: Any) -> str:
    """A plan in a few letters: path, threads, then what it holds or cuts."""
    extra = f" s{plan.splits}" if plan.splits > 1 else ""
    held = f" r{plan.reg_packs}+{plan.smem_packs}" if plan.path == "one_pass" else ""
    each = f"/{plan.rows_per_block}" if plan.rows_per_block > 1 else ""
    return f"{plan.path} {plan.threads}{each}{held}{extra}"


def shape_errors(shape: shapes.Shape, buffers: shapes.Buffers) -> dict[str, float]:
    """Worst ulp forward and backward on this shape: infinite where a row is not near jnp's."""
    x, dy = buffers.x[0], buffers.dy[0]
    y, pull = jax.jit(lambda x: jax.vjp(jaxsoftmax.softmax, x))(x)
    dx = jax.jit(lambda pull, dy: pull(dy)[0])(pull, dy)
    x_, y_, dy_, dx_ = (np.asarray(check.sampled(a)) for a in (x, y, dy, dx))
    near, near_bwd = bool(check.like_jax(x, y)), bool(check.gradient_like_jnp(y, dy, dx))
    return {
        "fwd": check.forward_error(x_, y_) if near else float("inf"),
        "bwd": check.backward_error(y_, dy_, dx_) if near_bwd else float("inf"),
    }


def make_buffers(shape: shapes.Shape, dtype: str) -> shapes.Buffers:
    return shapes.Buffers.make(shape, dtype, report.cache_bytes(), 1024 if on_gpu() else 16)


def time_shape(shape: shapes.Shape, dtype: str, effort: Effort) -> dict[str, Any]:
    """Checks and times softmax, its gradient, jax.nn's and the copies on one shape."""
    buffers = make_buffers(shape, dtype)
    errors = shape_errors(shape, buffers)
    cases = shapes.copies(buffers)
    cases += shapes.gradients(buffers, jaxsoftmax.softmax, "ours")
    cases += shapes.gradients(buffers, jax.nn.softmax, "jax")
    samples = measure(cases, effort)
    copy = min((samples["copy_kernel"], samples["copy_runtime"]), key=lambda s: s.median)
    triad = samples["triad"]
    size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    plans = {op: check.plan_here(op, dtype, shape) for op in ("softmax", "softmax_bwd")}
    path, path_bwd = (describe(p) for p in plans.values())
    rows = []
    for what, moved, base, name in (
        ("fwd", 2, copy.median, path),
        ("bwd", 3, triad.median, path_bwd),
        ("fwd+bwd", 5, copy.median + triad.median, ""),
    ):
        key = "both" if what == "fwd+bwd" else what
        ours, theirs = samples[f"ours_{key}"], samples[f"jax_{key}"]
        rows.append(
            {"shape": shape, "what": what, "path": name, "ulp": errors.get(what)}
            | {"ours_us": ours.median, "jax_us": theirs.median, "copy_us": base}
            | {"ratio": ratio(theirs, ours), "percent_of_copy": 100 * base / ours.median}
            | {"bytes": moved * size, "gb_per_s": moved * size / ours.median / 1e3}
        )
    return {
        "shape": shape,
        "plans": {op: str(p) for op, p in plans.items()},
        "rows": rows,
        "ok": errors["fwd"] <= check.FORWARD_BOUND[dtype] and errors["bwd"] <= check.BACKWARD_BOUND,
        "samples": {label: s.summary() for label, s in samples.items()},
    }


def time_seed(shape: shapes.Shape, dtype: str, effort: Effort) -> dict[str, Any]:
    """Checks and times the seed's kernels as forced plans, beside what the planner chooses."""
    buffers = make_buffers(shape, dtype)
    plans = shapes.seed_plans(shape, dtype)
    plans["planner"] = check.plan_here("softmax", dtype, shape)
    cases = shapes.forced(buffers, plans)
    x = buffers.x[0]
    x_ = np.asarray(check.sampled(x))
    errors = {}
    for case in cases:
        y = case.fn(x)
        near = bool(check.like_jax(x, y))
        errors[case.label] = (
            check.forward_error(x_, np.asarray(check.sampled(y))) if near else float("inf")
        )
    cases += shapes.copies(buffers)[:1] + shapes.gradients(buffers, jax.nn.softmax, "jax")[:1]
    samples = measure(cases, effort)
    return {
        "shape": shape,
        "plans": {name: str(p) for name, p in plans.items()},
        "planner": describe(plans["planner"]),
        "ulp": errors,
        "ok": max(errors.values()) <= check.FORWARD_BOUND[dtype],
        "samples": {label: s.summary() for label, s in samples.items()},
    }
