"""Which kernel runs: `plan()` picks a `Plan` from the op, the shape and the device's `Limits`.

Pure Python without jax. Python plans, the C++ handlers re-check the same rules and refuse; nobody
clamps. GPU thresholds carry their measurement; those of the CPU are first estimates.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

from . import _limits
from ._legal import DTYPES as DTYPES
from ._legal import (
    MAX_SPLITS,
    MAX_THREADS,
    PACK,
    STATIC_SMEM,
    Plan,
    check,
    dtype_name,
    find_op,
    known,
    packs,
)
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
    limits is None (the attached GPU, else the CPU; whatever JAX_PLATFORMS says), a preset's name or
    a `Limits`. path forces a
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
        if device.kind == "cpu":
            chosen = _choose_cpu(path, inputs, size, rows, device)
        else:
            chosen = _choose_gpu(path, inputs, DTYPES[dtype], size, rows, device)
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


# Packs of each input that a lane of one_pass keeps in registers: (rows up to so many packs, about
# so many a lane). Behind each, from bench/results/NVIDIA-H200_plans.json: a shape, us of the
# choice, us of the next best.
ONE_PASS_NARROW = (  # one input of float16, bfloat16
    (8, 2),  # 1048576 x 64: 70, 74 with 4 a lane
    (128, 4),  # 65536 x 512: 36.1, 37.2 with 8
    (256, 8),  # 32768 x 2048: 69, 71 with 16
    (512, 4),  # 2048 x 4096: 11.1, 12.9 two_pass
    (2048, 8),  # 32768 x 8192: 260, 262 with 4
    (4096, 16),  # 8192 x 32000: 257, 301 two_pass
)
ONE_PASS_WIDE = (  # one input of float32, float64
    (128, 4),  # 262144 x 128: 71, 76 with 8
    (256, 8),  # 2048 x 1024: 7.3, 8.8 with 2
    (2048, 4),  # 16384 x 8192: 302, 336 with 8
    (4096, 16),  # 8192 x 16384: 326, 363 with 4 and 12 in shared memory
)
WIDE_SHARED = 8192  # packs, beyond registers in shared memory; 8192 x 32768: 741, 780 two_pass
ONE_PASS_TWO_INPUTS = (  # two inputs of any dtype
    (64, 2),  # 1048576 x 64: 95.1, 95.3 two_pass
    (128, 4),  # 131072 x 1024: 188, 189 with 8
    (256, 2),  # 32768 x 2048: 95, 97 with 8
    (1024, 4),  # 2048 x 8192: 27.2, 27.2 with 2
    (2048, 8),  # 16384 x 16384: 371, 371 with 16
    (4096, 16),  # 8192 x 32000: 370, 449 two_pass
)
# With fewer lanes than this an SM, a row gets twice as many: 2048 x 1024 takes 4.5 us with 64 lanes
# a row, 4.8 with 32; 32 x 4096 2.8 with 512, 3.2 with 128; 1024 x 4096 keeps 128 (6.9; 256: 7.7).
BUSY_LANES = 512
# Fewer rows than SMs of so many packs are cut. 4 x 32768 float16: 6.0 us, 6.3 one_pass, and
# backward 5.3 and 5.8; 4 x 16384 stays whole: 3.3, cut 5.2; 64 x 128256: 17, 23 two_pass.
SPLIT_PACKS = 4096


def _choose_gpu(
    path: str | None, k: int, itemsize: int, size: int | None, rows: int | None, on: Limits
) -> Plan:
    if size is None:
        return _unknown_columns(path, 256)
    few_long = rows is not None and rows < on.sms and size >= SPLIT_PACKS
    if path == "split_k" or (path is None and few_long):
        # About 4 blocks an SM of at least 512 packs, or 1 of 128: 4 x 1048576 takes 12.0 us with
        # 528 blocks, 12.3 with 264; 4 x 65536 6.2 with 132, 6.4 with 264.
        an_sm = on.sms / (rows or 1)
        splits = max(min(4 * an_sm, size / 512), min(an_sm, size / 128), 1)
        splits = min(round(splits), MAX_SPLITS)
        return Plan("split_k", 256, splits=splits, why=f"{rows} long rows on {on.sms} SMs")
    if path != "two_pass":
        if (held := _one_pass_gpu(k, itemsize, size, rows, on)) is not None:
            return held
        if path == "one_pass":
            return _one_pass_largest(k, size, on)
    if size <= 128:  # rows share a block
        width = min(32, _power_of_2(math.ceil(size / 4)))
        return Plan("two_pass", 128, rows_per_block=128 // width, why="short rows")
    return Plan(
        "two_pass", _clamp(_power_of_2(math.ceil(size / 4)), 64, MAX_THREADS), why="a long row"
    )


def _one_pass_gpu(k: int, itemsize: int, size: int, rows: int | None, on: Limits) -> Plan | None:
    """The one-pass plan for rows that it serves best, if these are."""
    narrow = ONE_PASS_NARROW if itemsize == 2 else ONE_PASS_WIDE
    depths = narrow if k == 1 else ONE_PASS_TWO_INPUTS
    a_lane = next((a_lane for packs, a_lane in depths if size <= packs), None)
    if a_lane is not None:
        lanes = _lanes(math.ceil(size / a_lane))
        while rows is not None and rows * lanes < BUSY_LANES * on.sms and lanes < size:
            more = _lanes(2 * lanes)
            if more > MAX_THREADS or (2 * more > MAX_THREADS and size > 4 * more):
                break  # its packs would not fit in the registers of so many threads
            lanes = more
        registers = k * _power_of_2(math.ceil(size / lanes))
        each = max(1, 128 // lanes) if lanes <= 32 else 1
        return Plan("one_pass", lanes * each, each, registers, why="the row fits in registers")
    threads, registers = MAX_THREADS, 4 * k
    shared = k * math.ceil(size / threads) - registers
    two_blocks = on.smem_per_sm // 2 - KIB - STATIC_SMEM
    if depths is ONE_PASS_WIDE and size <= WIDE_SHARED and shared * threads * PACK <= two_blocks:
        return Plan("one_pass", threads, 1, registers, shared, why="registers and shared memory")
    return None


def _one_pass_largest(k: int, size: int, on: Limits) -> Plan:
    """For who forces one_pass: the first plan that holds the row, or the largest there is."""
    for threads, registers in ((MAX_THREADS, 4 * k), (MAX_THREADS // 2, 32)):
        room = (on.smem_per_block - STATIC_SMEM) // (threads * PACK * k) * k
        need = k * math.ceil(size / threads) - registers
        if need <= room:
            break
    shared = max(min(need, room), 0)
    return Plan("one_pass", threads, 1, registers, shared, why="all that a block can hold")


def _lanes(count: int) -> int:
    """Lanes a row can have: a power of two within a warp, else whole warps."""
    return _power_of_2(count) if count <= 32 else 32 * math.ceil(count / 32)


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


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def _power_of_2(value: int) -> int:
    """The smallest power of two that is at least value."""
    return 1 << max(value - 1, 0).bit_length()
