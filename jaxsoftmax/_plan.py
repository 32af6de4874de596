"""Which kernel runs: `plan()` picks a `Plan` from the op, the shape and the device's `Limits`.

Pure Python without jax. Python plans, the C++ handlers re-check the same rules and refuse; nobody
clamps. Thresholds marked "first estimate" are not measured yet.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

from . import _limits
from ._legal import DTYPES as DTYPES
from ._legal import MAX_SPLITS, PACK, STATIC_SMEM, Plan, check, dtype_name, find_op, known, packs
from ._legal import PATHS as PATHS
from ._limits import KIB, Limits
from ._limits import LIMITS as LIMITS
from ._limits import device_limits as device_limits

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
UNKNOWN_SPLITS = 8  # a forced split_k whose number of columns is symbolic


def plan(
    op: str,
    dtype: Any,
    outer: Any,
    n: Any,
    inner: Any = 1,
    *,
    limits: str | Limits | None = None,
    path: PathLike = None,
) -> Plan:
    """The plan for `op` over n columns of an array seen as [outer, n, inner].

    outer is None (or symbolic) when the number of rows is unknown; a symbolic n takes two_pass.
    limits is None (the attached GPU, else the CPU), a preset's name or a `Limits`. path forces a
    path, a seed kernel or a whole Plan; ValueError if it cannot hold the row.
    """
    inputs = find_op(op).inputs
    dtype = dtype_name(dtype)
    device = _limits.resolve(limits)
    path = check_path(path)
    rows = max(int(outer * inner), 1) if known(outer) and known(inner) else None
    size = max(packs(n, dtype), 1) if known(n) else None
    if isinstance(path, Plan) or path in SEED_PLANS:
        chosen = fixed(path, dtype, n)
    else:
        choose = _choose_cpu if device.kind == "cpu" else _choose_gpu
        chosen = choose(path, inputs, size, rows, device)
        if path is not None:
            chosen = dataclasses.replace(chosen, why=f"forced by path={path!r}")
    check(chosen, op, dtype, n, device)
    return chosen


def fixed(path: str | Plan, dtype: Any, n: Any) -> Plan:
    """The plan of a seed's name (or a Plan itself): it depends on no device."""
    if isinstance(path, Plan):
        return path
    seed = SEED_PLANS[path]
    if path != "splitk":
        return seed
    splits = math.ceil(packs(n, dtype) / SPLITK_CHUNK) if known(n) else UNKNOWN_SPLITS
    return dataclasses.replace(seed, splits=min(max(splits, 1), MAX_SPLITS))


def _choose_gpu(path: str | None, k: int, size: int | None, rows: int | None, on: Limits) -> Plan:
    if size is None:
        return _unknown_columns(path, 256)
    row_bytes = k * size * PACK
    # Too few rows to fill the device: cut long ones. First estimate: half the SMs, 128 KiB.
    few_long = rows is not None and 2 * rows < on.sms and row_bytes >= 128 * KIB
    if path == "split_k" or (path is None and few_long):
        # About 4 blocks an SM over all rows, a chunk of at least 16 KiB each. First estimate.
        splits = _clamp(math.ceil(4 * on.sms / (rows or 1)), 1, max(size * PACK // (16 * KIB), 1))
        return Plan("split_k", 512, splits=splits, why=f"{rows} long rows on {on.sms} SMs")
    if path != "two_pass":
        held = _one_pass_gpu(k, size, on, forced=path is not None)
        if path is not None or held.width * (held.reg_packs + held.smem_packs) >= k * size:
            return held
    if size <= 128:  # at most 4 packs a lane of a warp: rows share a block. First estimate
        width = min(32, _power_of_2(size))
        return Plan("two_pass", 128, rows_per_block=128 // width, why="short rows")
    return Plan("two_pass", _block_threads(size), why="too long to stay on chip")


def _one_pass_gpu(k: int, size: int, on: Limits, forced: bool) -> Plan:
    """The one-pass plan that holds the row, or the largest there is."""
    if size <= 128 // k:  # at most 4 packs a lane of one warp. First estimate
        width = min(32, _power_of_2(math.ceil(k * size / 4)))
        registers = k * _power_of_2(math.ceil(size / width))
        return Plan("one_pass", 128, 128 // width, registers, why=f"a row in {width} lanes")
    threads = _block_threads(size)
    registers = k * _power_of_2(math.ceil(size / threads))
    if registers <= 8:
        return Plan("one_pass", threads, 1, registers, why="the row fits in registers")
    # Two blocks an SM, so that one loads while the other stores; who forces one_pass gets it all,
    # at last with 256 threads, whose 32 packs in registers leave room for one block an SM only.
    shared = on.smem_per_block if forced else on.smem_per_sm // 2 - KIB
    for threads, registers in ((512, 8), (256, 32))[: 2 if forced else 1]:
        room = (shared - STATIC_SMEM) // (threads * PACK * k) * k
        need = k * math.ceil(size / threads) - registers
        if need <= room:
            break
    why = "the row fits in registers and shared memory"
    return Plan("one_pass", threads, 1, registers, max(min(need, room), 0), why=why)


def _choose_cpu(path: str | None, k: int, size: int | None, rows: int | None, on: Limits) -> Plan:
    if size is None:
        return _unknown_columns(path, 1)
    row_bytes = k * size * PACK
    # Half of L2 leaves room for the output. First estimate.
    if path == "one_pass" or (path is None and row_bytes <= on.l2_bytes // 2):
        room = (on.smem_per_block - STATIC_SMEM) // (PACK * k) * k
        scratch = min(k * (size - 1), room)
        return Plan("one_pass", 1, 1, k, scratch, why="the row fits in half of L2")
    few_long = rows is not None and rows < on.sms and row_bytes >= 64 * KIB  # first estimate
    if path == "split_k" or (path is None and few_long):
        splits = _clamp(on.sms, 1, max(size * PACK // (16 * KIB), 1))
        return Plan("split_k", 1, splits=splits, why=f"{rows} long rows on {on.sms} cores")
    return Plan("two_pass", 1, why="the row is longer than half of L2")


def _unknown_columns(path: str | None, threads: int) -> Plan:
    if path == "one_pass":
        raise ValueError("plan one_pass needs a known number of columns, got a symbolic one")
    splits = UNKNOWN_SPLITS if path == "split_k" else 1
    return Plan(path or "two_pass", threads, splits=splits, why="columns unknown while tracing")


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


def _block_threads(size: int) -> int:
    """About 4 packs a lane, 2 to 16 warps. First estimate."""
    return _clamp(_power_of_2(math.ceil(size / 4)), 64, 512)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def _power_of_2(value: int) -> int:
    """The smallest power of two that is at least value."""
    return 1 << max(value - 1, 0).bit_length()
