"""Which kernel runs: `plan()` picks a `Plan` from the op, the shape and the device's `Limits`.

Pure Python without jax. Python plans, the C++ handlers re-check the same rules and refuse; nobody
clamps. GPU thresholds carry their measurement; those of the CPU are first estimates.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

from . import _limits, _plan_columns, _plan_gpu, _plan_parts
from ._legal import check, find_op
from ._limits import KIB, Limits
from ._limits import LIMITS as LIMITS
from ._limits import device_limits as device_limits
from ._ops import Op
from ._plan_spec import DTYPES as DTYPES
from ._plan_spec import (
    LAYOUTS,
    LINE,
    MAX_SPLITS,
    PACK,
    STATIC_SMEM,
    Plan,
    dtype_name,
    known,
    packs,
    slot_bytes,
)
from ._plan_spec import MAX_DIMS as MAX_DIMS
from ._plan_spec import PATHS as PATHS

PathLike: TypeAlias = str | Plan | None

# The kernels of the article this library started from, as points among the plans.
# splitk cuts a row into chunks of SPLITK_CHUNK packs, so its splits depend on the row.
SEED_PLANS = {
    "packed": Plan("one_pass", 256, reg_packs=16, why="seed kernel: row in registers"),
    "medium": Plan("one_pass", 256, reg_packs=8, smem_packs=8, why="seed kernel: half shared"),
    "extreme": Plan("one_pass", 256, reg_packs=32, smem_packs=24, why="seed kernel: long rows"),
    "arbitrary": Plan("two_pass", 256, why="seed kernel: any length"),
    "splitk": Plan("split_k", 256, why="seed kernel: chunks of 4096 packs"),
}
SPLITK_CHUNK = 256 * 16


def plan(
    op: str,
    dtype: Any,
    outer: Any,
    n: Any,
    inner: Any = 1,
    *,
    layout: str | None = None,
    limits: str | Limits | None = None,
    path: PathLike = None,
) -> Plan:
    """The plan for `op` over n columns of an array seen as [outer, n, inner].

    layout says how the rows lie: "rows" (side by side), "loaded" (side by side, and masked, scaled,
    causal or of mixed dtypes, which count as float32), "columns" (plain ones of which inner lie
    side by side) or "cells" (anything else); None is "rows" if inner is 1, else "columns".
    outer is None (or symbolic) when the number of rows is unknown; a symbolic n takes two_pass.
    limits is None (the attached GPU, else the CPU; whatever JAX_PLATFORMS says), a preset's name or
    a `Limits`. path forces a path, a seed kernel or a whole Plan; ValueError if it cannot hold the
    row.
    """
    asked = find_op(op)
    dtype = dtype_name(dtype)
    device = _limits.resolve(limits)
    path = check_path(path)
    if layout is None:
        layout = "rows" if known(inner) and inner == 1 else "columns"
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; valid layouts: {', '.join(LAYOUTS)}")
    if layout == "columns" and known(inner) and inner * DTYPES[dtype] % PACK != 0:
        layout = "cells"  # of no whole packs; an unknown inner may come as packs: room for these
    rows = max(int(outer * inner), 1) if known(outer) and known(inner) else None
    size = max(packs(n, dtype), 1) if known(n) else None
    lines = max(packs(n, dtype, LINE), 1) if known(n) else None
    if isinstance(path, Plan) or path in SEED_PLANS:
        chosen = fixed(path, dtype, n)
    else:
        if device.kind == "cpu":
            chosen = _choose_cpu(path, asked, size, rows, device)
        elif layout in ("columns", "cells"):
            a, b, c = (int(v) if known(v) else None for v in (n, inner, outer))
            slot = slot_bytes(layout, dtype)
            chosen = _plan_columns.choose(path, asked, DTYPES[dtype], slot, a, b, c, device)
        else:
            loaded = layout == "loaded"
            chosen = _plan_gpu.choose(
                path, asked, DTYPES[dtype], size, lines, rows, device, loaded=loaded
            )
        if path is not None:
            chosen = dataclasses.replace(chosen, why=f"forced by path={path!r}")
    check(chosen, op, dtype, n, device, layout)
    return chosen


def fixed(path: str | Plan, dtype: Any, n: Any) -> Plan:
    """The plan of a seed's name (or a Plan itself): it depends on no device."""
    if isinstance(path, Plan):
        return path
    seed = SEED_PLANS[path]
    if path != "splitk":
        return seed
    splits = math.ceil(packs(n, dtype) / SPLITK_CHUNK) if known(n) else _plan_parts.UNKNOWN_SPLITS
    return dataclasses.replace(seed, splits=min(max(splits, 1), MAX_SPLITS))


def for_parts(path: PathLike) -> str | None:
    """What a forced path asks of parts of rows: its sizes were made for whole ones."""
    path = SEED_PLANS.get(path, path) if isinstance(path, str) else path
    return path.path if isinstance(path, Plan) else path


def _choose_cpu(path: str | None, op: Op, size: int | None, rows: int | None, on: Limits) -> Plan:
    if size is None:
        return _plan_parts.unknown_columns(path, 1)
    k = op.inputs
    row_bytes = k * size * PACK
    twice = op.folds > 0 and not op.reduces  # whether another path reads the row twice
    # Half of L2 leaves room for the output. First estimate.
    if path == "one_pass" or (path is None and twice and row_bytes <= on.l2_bytes // 2):
        room = (on.smem_per_block - STATIC_SMEM) // (PACK * k) * k
        scratch = min(k * (size - 1), room)
        return Plan("one_pass", 1, 1, k, scratch, why="the row fits in half of L2")
    few_long = rows is not None and rows < on.sms and row_bytes >= 64 * KIB  # first estimate
    if path == "split_k" or (path is None and few_long):
        splits = _plan_parts.clamp(on.sms, 1, max(size * PACK // (16 * KIB), 1))
        return Plan("split_k", 1, splits=splits, why=f"{rows} long rows on {on.sms} cores")
    why = "the row is longer than half of L2" if twice else "the row is read once"
    return Plan("two_pass", 1, why=why)


def check_path(path: Any) -> PathLike:
    """`path` itself; ValueError for an unknown name, TypeError for another type."""
    names = (*PATHS, *SEED_PLANS)
    if path is None or isinstance(path, Plan):
        return path
    if not isinstance(path, str):
        got = f"{path!r} of type {type(path).__name__}"
        raise TypeError(f"path must be None, a name ({', '.join(names)}) or a Plan, got {got}")
    if path not in names:
        raise ValueError(f"unknown path {path!r}; valid names: {', '.join(names)}")
    return path


def for_gradient(path: PathLike) -> PathLike:
    """What a forced path asks of the gradient: a Plan was made for one op, its path is for all."""
    return path.path if isinstance(path, Plan) else path
