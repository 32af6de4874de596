"""The plans that tests force, the illegal ones, and how to run an op: with Python or past it."""

from __future__ import annotations

import jax
import numpy as np

import jaxsoftmax
from jaxsoftmax import Plan
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, PATHS, SEED_PLANS
from jaxsoftmax._primitive import bind

# Legal corners the planner may never visit. k is the op's number of inputs: packs count them all.
HAND_PLANS = {
    "lane_a_row": lambda k: Plan("one_pass", threads=32, rows_per_block=32, reg_packs=k),
    "quarter_warp": lambda k: Plan("one_pass", threads=64, rows_per_block=8, reg_packs=4 * k),
    "warp_a_row": lambda k: Plan("one_pass", threads=128, rows_per_block=4, reg_packs=8 * k),
    "one_thread": lambda k: Plan("one_pass", threads=1, reg_packs=16 * k),
    "mostly_shared": lambda k: Plan("one_pass", threads=32, reg_packs=k, smem_packs=16 * k),
    "wide_block": lambda k: Plan("one_pass", threads=512, reg_packs=4 * k),
    "two_pass_rows": lambda k: Plan("two_pass", threads=256, rows_per_block=16),
    "two_pass_wide": lambda k: Plan("two_pass", threads=512),
    "split_one": lambda k: Plan("split_k", threads=64, splits=1),
    "split_seven": lambda k: Plan("split_k", threads=32, splits=7),
    "split_too_many": lambda k: Plan("split_k", threads=256, splits=300),  # some chunks stay empty
}
NAMES = (None, *PATHS, *SEED_PLANS)  # what a user may force by name; None is the planner's choice

# What breaks each rule (256 float32 columns forward), and what its refusal must say.
ILLEGAL = {
    "no threads": (dict(path="two_pass", threads=0), "threads"),
    "too many threads": (dict(path="two_pass", threads=544), "threads"),
    "no whole warps": (dict(path="two_pass", threads=48), "threads"),
    "not a power of two": (dict(path="two_pass", threads=12), "threads"),
    "no rows": (dict(path="two_pass", threads=64, rows_per_block=0), "rows_per_block"),
    "rows do not divide": (dict(path="two_pass", threads=64, rows_per_block=3), "rows_per_block"),
    "more than a warp a row": (
        dict(path="two_pass", threads=256, rows_per_block=2),
        "rows.* block",
    ),
    "no registers": (dict(path="one_pass", threads=256, reg_packs=0), "reg_packs"),
    "odd registers": (dict(path="one_pass", threads=256, reg_packs=3), "reg_packs"),
    "too many registers": (dict(path="one_pass", threads=256, reg_packs=64), "reg_packs"),
    "negative shared": (
        dict(path="one_pass", threads=256, reg_packs=8, smem_packs=-1),
        "smem_packs",
    ),
    "too much shared": (
        dict(path="one_pass", threads=256, reg_packs=8, smem_packs=2**20),
        "smem_packs",
    ),
    "shared rows": (
        dict(path="one_pass", threads=64, rows_per_block=2, reg_packs=8, smem_packs=8),
        "smem_packs",
    ),
    "threads against registers": (dict(path="one_pass", threads=512, reg_packs=16), "threads"),
    "one_pass splits": (dict(path="one_pass", threads=256, reg_packs=8, splits=2), "splits"),
    "row does not fit": (
        dict(path="one_pass", threads=32, reg_packs=1),
        "holds 128 columns.*got 256",
    ),
    "two_pass registers": (dict(path="two_pass", threads=256, reg_packs=1), "reg_packs"),
    "two_pass shared": (dict(path="two_pass", threads=256, smem_packs=1), "smem_packs"),
    "two_pass splits": (dict(path="two_pass", threads=256, splits=2), "splits"),
    "split_k rows": (
        dict(path="split_k", threads=64, rows_per_block=2, splits=2),
        "rows_per_block",
    ),
    "no splits": (dict(path="split_k", threads=256, splits=0), "splits"),
    "too many splits": (dict(path="split_k", threads=256, splits=65536), "splits"),
    "split_k registers": (dict(path="split_k", threads=256, splits=2, reg_packs=4), "reg_packs"),
}


def capacity(plan: Plan, op: str, dtype: str, n: int) -> int:
    """Columns a one-pass plan holds, written a second time: odd rows start at any alignment."""
    lane = 16 // DTYPES[dtype]
    packs = (
        plan.threads // plan.rows_per_block * (plan.reg_packs + plan.smem_packs) // OPS[op].inputs
    )
    return packs * lane - (lane - 1 if n % lane else 0)


def hand_plans(op: str, dtype: str, n: int) -> dict[str, Plan]:
    """The hand-made plans that hold such a row."""
    plans = {name: make(OPS[op].inputs) for name, make in HAND_PLANS.items()}
    return {
        name: plan
        for name, plan in plans.items()
        if plan.path != "one_pass" or capacity(plan, op, dtype, n) >= n
    }


def plan_on(platform: str, op: str, dtype: str, rows: int | None, n: int, path=None) -> Plan:
    """The planner's answer for the platform a test runs on, whatever GPU is attached beside it."""
    limits = "cpu" if platform == "cpu" else None
    return jaxsoftmax.plan(op, dtype, rows, n, limits=limits, path=path)


def run(op: str, *inputs: np.ndarray, path=None, axes: tuple[int, ...] = (-1,)) -> np.ndarray:
    """The op through its primitive, under jit, numpy to numpy."""
    with jax.enable_x64(inputs[0].dtype == np.float64):
        call = jax.jit(lambda *operands: bind(op, *operands, axes=axes, path=path))
        return np.asarray(call(*inputs))


def run_native(
    op: str, *inputs: np.ndarray, reduced: int = 1, workspace: int | None = None, **plan: int
) -> np.ndarray:
    """The op's FFI target called directly with these plan fields: nothing in Python checks them."""
    x = inputs[0]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if plan["path"] == PATHS.index("split_k"):
        rows = int(np.prod(x.shape[: x.ndim - reduced]))
        size = rows * plan["splits"] * 8 if workspace is None else workspace
        results.append(jax.ShapeDtypeStruct((size,), np.uint32))
    attribute = {name: np.int32(value) for name, value in plan.items()}
    with jax.enable_x64(x.dtype == np.float64):
        call = jax.ffi.ffi_call(f"jaxsoftmax.{op}", results)
        jitted = jax.jit(lambda *a: call(*a, plan=attribute, reduced=np.int32(reduced)))
        return np.asarray(jitted(*inputs)[0])
