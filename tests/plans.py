"""The plans that tests force, the illegal ones, and what a device must have for a plan."""

from __future__ import annotations

import jaxsoftmax
from jaxsoftmax import Plan
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, LIMITS, PATHS, SEED_PLANS, Limits, device_limits
from jaxsoftmax._plan_spec import CHUNK

# Legal corners the planner may never visit. k is the op's number of inputs: packs count them all.
EVERYWHERE = {
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
# Clusters, and rings that bulk copies fill: `SLOT * k` packs a lane are one slot.
SLOT = CHUNK
GPU_ONLY = {
    "cluster_two": lambda k: Plan("one_pass", threads=128, reg_packs=4 * k, splits=2),
    "cluster_shared": lambda k: Plan(
        "one_pass", threads=64, reg_packs=k, smem_packs=5 * k, splits=4
    ),
    "cluster_eight": lambda k: Plan("one_pass", threads=32, reg_packs=8 * k, splits=8),
    "cluster_sixteen": lambda k: Plan("one_pass", threads=256, reg_packs=2 * k, splits=16),
    "bulk_slot": lambda k: Plan("one_pass", threads=96, smem_packs=SLOT * k),
    "bulk_block": lambda k: Plan("one_pass", threads=128, smem_packs=8 * SLOT * k),
    "bulk_slots": lambda k: Plan("one_pass", threads=32, smem_packs=64 * SLOT),  # the most for k=1
    "bulk_wide": lambda k: Plan("one_pass", threads=512, smem_packs=2 * SLOT * k),
    "bulk_cluster": lambda k: Plan("one_pass", threads=64, smem_packs=4 * SLOT * k, splits=8),
    "bulk_sixteen": lambda k: Plan("one_pass", threads=32, smem_packs=3 * SLOT * k, splits=16),
    "cooperative": lambda k: Plan("split_k", threads=128, smem_packs=8 * SLOT * k, splits=7),
    "cooperative_one": lambda k: Plan("split_k", threads=32, smem_packs=4 * SLOT * k),
    "cooperative_two": lambda k: Plan("split_k", threads=256, smem_packs=4 * SLOT * k, splits=2),
    "cooperative_slots": lambda k: Plan("split_k", threads=32, smem_packs=64 * SLOT, splits=3),
    "cooperative_many": lambda k: Plan("split_k", threads=64, smem_packs=5 * SLOT * k, splits=100),
}
HAND_PLANS = {**EVERYWHERE, **GPU_ONLY}
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
    "three in a cluster": (dict(path="one_pass", threads=256, reg_packs=8, splits=3), "splits.* 3"),
    "no cluster": (dict(path="one_pass", threads=256, reg_packs=8, splits=0), "splits.* 0"),
    "too large a cluster": (
        dict(path="one_pass", threads=256, reg_packs=8, splits=32),
        "splits.* 16, got 32",
    ),
    "rows of a cluster": (
        dict(path="one_pass", threads=64, rows_per_block=4, reg_packs=8, splits=2),
        "rows_per_block.* 4",
    ),
    "a cluster of lanes": (
        dict(path="one_pass", threads=16, reg_packs=8, splits=2),
        "cluster.*threads.* 16",
    ),
    "registers of a cluster": (
        dict(path="one_pass", threads=32, reg_packs=16, splits=2),
        "reg_packs of a cluster .* 8, got 16",
    ),
    "no whole slots": (
        dict(path="one_pass", threads=64, smem_packs=2 * SLOT + 1),
        f"multiple of {SLOT}.*got {2 * SLOT + 1}",
    ),
    "too many slots": (
        dict(path="one_pass", threads=32, smem_packs=65 * SLOT),
        f" {SLOT} to {64 * SLOT}, got {65 * SLOT}",
    ),
    "a ring of lanes": (
        dict(path="one_pass", threads=16, smem_packs=8 * SLOT),
        "ring.*threads.* 16",
    ),
    "rows of a ring": (
        dict(path="one_pass", threads=64, rows_per_block=2, smem_packs=8 * SLOT),
        "ring.*rows_per_block",
    ),
    "three rings in a cluster": (
        dict(path="one_pass", threads=64, smem_packs=8 * SLOT, splits=3),
        "splits.* 3",
    ),
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
    "split_k registers and ring": (
        dict(path="split_k", threads=256, splits=2, reg_packs=4, smem_packs=8 * SLOT),
        "reg_packs",
    ),
    "no whole slots of a piece": (
        dict(path="split_k", threads=64, splits=2, smem_packs=8 * SLOT + 1),
        f"multiple of {SLOT}.*got {8 * SLOT + 1}",
    ),
    "too few slots of a piece": (
        dict(path="split_k", threads=64, splits=2, smem_packs=3 * SLOT),
        f" {4 * SLOT} to {64 * SLOT}, got {3 * SLOT}",
    ),
    "too many slots of a piece": (
        dict(path="split_k", threads=64, splits=2, smem_packs=65 * SLOT),
        f" {4 * SLOT} to {64 * SLOT}, got {65 * SLOT}",
    ),
    "a piece's ring of lanes": (
        dict(path="split_k", threads=8, splits=2, smem_packs=8 * SLOT),
        "ring.*threads.* 8",
    ),
}


def capacity(plan: Plan, op: str, dtype: str, n: int) -> int:
    """Columns a one-pass plan holds, written a second time.

    Rows start anywhere in a pack, in a ring anywhere in a line of 8, unless n is a multiple of it.
    """
    lane = 16 // DTYPES[dtype]
    lanes = plan.splits * (plan.threads // plan.rows_per_block)
    packs = lanes * ((plan.reg_packs + plan.smem_packs) // OPS[op].inputs)
    unit = lane if plan.reg_packs else 8 * lane
    return packs * lane - (unit - 1 if n % unit else 0)


def granted(plan: Plan, dtype: str, limits: Limits) -> bool:
    """Whether a device has what a plan asks for beyond its kernel, written a second time."""
    ring = plan.reg_packs == 0 and plan.smem_packs > 0
    shared = plan.threads * plan.smem_packs * 16 + 3072
    if plan.path == "one_pass" and plan.splits > 1 and not ring:
        shared += 4096  # where a cluster's blocks put each other's states
    if shared > limits.smem_per_block or (ring and limits.max_cluster == 0):
        return False
    if plan.path == "one_pass" and plan.splits > 1:
        return plan.splits <= limits.max_cluster
    if plan.path == "split_k" and ring:
        an_sm = min(limits.smem_per_sm // (shared + 1024), 1 if dtype == "float64" else 2)
        return limits.cooperative and plan.splits <= an_sm * limits.sms
    return True


def limits_on(platform: str) -> Limits:
    return (None if platform == "cpu" else device_limits()) or LIMITS["cpu"]


def hand_plans(op: str, dtype: str, n: int, platform: str | None = None) -> dict[str, Plan]:
    """The hand-made plans that hold such a row, and that the platform's device can run."""
    plans = {name: make(OPS[op].inputs) for name, make in HAND_PLANS.items()}
    return {
        name: plan
        for name, plan in plans.items()
        if (plan.path != "one_pass" or capacity(plan, op, dtype, n) >= n)
        and (platform is None or granted(plan, dtype, limits_on(platform)))
    }


def plan_on(platform: str, op: str, dtype: str, rows: int | None, n: int, path=None) -> Plan:
    """The planner's answer for the platform a test runs on, whatever GPU is attached beside it."""
    return jaxsoftmax.plan(op, dtype, rows, n, limits=limits_on(platform), path=path)
