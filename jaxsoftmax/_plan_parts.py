"""What the planners of a GPU share: lanes, clusters, and plans without a known length."""

from __future__ import annotations

import math

from ._limits import Limits
from ._plan_spec import MAX_CLUSTER, Plan

UNKNOWN_SPLITS = 8  # a forced split_k whose number of columns is symbolic


def clusters(on: Limits) -> int:
    """The largest cluster of the device that a plan may have."""
    return min(MAX_CLUSTER, power_of_2(on.max_cluster + 1) // 2)


def lanes_of(count: float) -> int:
    """Lanes a row can have: a power of two within a warp, else whole warps."""
    return power_of_2(math.ceil(count)) if count <= 32 else 32 * math.ceil(count / 32)


def unknown_columns(path: str | None, threads: int) -> Plan:
    if path == "one_pass":
        raise ValueError("plan one_pass needs a known number of columns, got a symbolic one")
    splits = UNKNOWN_SPLITS if path == "split_k" else 1
    return Plan(path or "two_pass", threads, splits=splits, why="columns unknown while tracing")


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def power_of_2(value: int) -> int:
    """The smallest power of two that is at least value."""
    return 1 << max(value - 1, 0).bit_length()
