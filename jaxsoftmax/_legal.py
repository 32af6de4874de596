"""The rules that make a `Plan` legal: the twin of what the C++ handlers check (cpp/rules.h)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from . import _limits, _ops
from ._limits import Limits
from ._plan_spec import (
    CHUNK,
    CLUSTER_PACKS,
    COLUMN_PACKS,
    COLUMN_THREADS,
    LINE,
    LOADED_PACKS,
    MAX_CLUSTER,
    MAX_PIECE,
    MAX_SLOTS,
    MAX_SPLITS,
    MAX_THREADS,
    MIN_SLOTS,
    PACK,
    PATHS,
    REGISTERS,
    Plan,
    columns,
    columns_smem,
    dtype_name,
    known,
    packs,
    resident_blocks,
    shared_bytes,
    slot_bytes,
)


def check(
    plan: Plan,
    op: str,
    dtype: Any,
    n: Any,
    limits: str | Limits | None = None,
    layout: str = "rows",
) -> None:
    """ValueError naming the limit, unless `plan` can run `op` on rows of n columns.

    The C++ handlers check the same rules; without limits, nothing is asked of a device. On a CPU
    every layout obeys the rules of rows.
    """
    device = None if limits is None else _limits.resolve(limits)
    k = find_op(op).inputs
    dtype = dtype_name(dtype)
    bare = dataclasses.replace(plan, why="")

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"illegal plan {bare!s} for {op}: {what}")

    if plan.path not in PATHS:
        raise ValueError(f"unknown path {plan.path!r}; valid paths: {', '.join(PATHS)}")
    for field, value in plan.attributes().items():
        need(known(value) and value >= 0, f"{field} must be an int >= 0, got {value!r}")
    tiles = layout in ("columns", "cells") and (device is None or device.kind == "gpu")
    if layout == "loaded" and (device is None or device.kind == "gpu"):
        need(plan.smem_packs == 0, f"loaded rows have smem_packs=0, got {plan.smem_packs}")
        most = LOADED_PACKS * k
        need(plan.reg_packs <= most, f"reg_packs of loaded rows must be at most {most}")
        few = plan.reg_packs <= 2 * k or plan.threads <= MAX_THREADS // 2
        need(few, f"{plan.reg_packs} reg_packs of loaded rows allow {MAX_THREADS // 2} threads")
    _check_block(plan, need, tiles=tiles)
    if tiles:
        _check_columns(plan, k, dtype, n, op, need)
    elif plan.path == "two_pass":
        held = plan.reg_packs + plan.smem_packs
        need(held == 0, f"two_pass keeps no packs on chip, got {held}")
        need(plan.splits == 1, f"two_pass has splits=1, got {plan.splits}")
    elif plan.path == "split_k":
        _check_split_k(plan, k, need)
    else:
        _check_one_pass(plan, k, need)
        if not known(n):
            raise ValueError("plan one_pass needs a known number of columns, got a symbolic one")
        capacity = plan.splits * plan.width * (plan.reg_packs + plan.smem_packs) // k
        align = LINE if plan.bulk else 1
        if packs(n, dtype, align) > capacity:
            most = columns(capacity, dtype, n, align)
            raise ValueError(f"plan one_pass holds {most} columns of {dtype} {op}, got {n}")
    if plan.bulk and known(n) and not tiles:
        piece = math.ceil(packs(n, dtype, LINE) / plan.splits)
        need(piece <= MAX_PIECE, f"a ring takes pieces of at most {MAX_PIECE} packs, got {piece}")
    if device is not None:
        _check_device(plan, dtype, device, need, slot=slot_bytes(layout, dtype) if tiles else 0)


_Need: TypeAlias = Callable[[bool, str], None]


def _check_block(plan: Plan, need: _Need, *, tiles: bool) -> None:
    threads, rows = plan.threads, plan.rows_per_block
    most = COLUMN_THREADS if tiles else MAX_THREADS
    warps = threads % 32 == 0 and threads <= most
    what = f"a power of two below 32 or a multiple of 32 up to {most}"
    legal = _is_power_of_2(threads) if threads < 32 else warps
    need(legal, f"threads must be {what}, got {threads}")
    need(rows >= 1 and threads % rows == 0, f"rows_per_block must divide threads, got {rows}")
    if tiles:
        legal = _is_power_of_2(rows)
        return need(legal, f"rows_per_block of columns must be a power of two, got {rows}")
    narrow = _is_power_of_2(plan.width) and plan.width <= 32
    need(rows == 1 or narrow, f"rows that share a block take 1 to 32 lanes each, not {plan.width}")


def _check_one_pass(plan: Plan, k: int, need: _Need) -> None:
    splits, rows = plan.splits, plan.rows_per_block
    legal = _is_power_of_2(splits) and splits <= MAX_CLUSTER
    need(legal, f"splits of one_pass must be a power of two up to {MAX_CLUSTER}, got {splits}")
    need(splits == 1 or rows == 1, f"a cluster takes rows_per_block=1, got {rows}")
    warps = plan.threads % 32 == 0
    need(splits == 1 or warps, f"a cluster takes whole warps of threads, got {plan.threads}")
    if plan.bulk:
        return _check_ring(plan, k, 1, need)
    each, rest = divmod(plan.reg_packs, k)
    most = CLUSTER_PACKS * k
    few = splits == 1 or plan.reg_packs <= most
    need(few, f"reg_packs of a cluster must be at most {most}, got {plan.reg_packs}")
    kept = ", ".join(str(k * r) for r in REGISTERS if k * r <= 32)
    legal = rest == 0 and each in REGISTERS and plan.reg_packs <= 32
    what = f"reg_packs must be one of {kept}, or 0 beside a ring in smem_packs"
    need(legal, f"{what}, got {plan.reg_packs}")
    need(plan.smem_packs % k == 0, f"smem_packs must be a multiple of {k}, got {plan.smem_packs}")
    fits = plan.threads * plan.smem_packs * PACK < 2**31
    need(fits, f"smem_packs of all threads must be < 2 GiB, got {plan.smem_packs}")
    need(rows == 1 or plan.smem_packs == 0, "rows that share a block have no shared memory")
    most = MAX_THREADS if each <= 4 else MAX_THREADS // 2
    need(plan.threads <= most, f"{plan.reg_packs} packs in registers allow {most} threads")


def _check_columns(plan: Plan, k: int, dtype: str, n: Any, op: str, need: _Need) -> None:
    need(plan.reg_packs == 0, f"columns have reg_packs=0, got {plan.reg_packs}")
    if plan.path != "one_pass":
        need(plan.smem_packs == 0, f"{plan.path} keeps no packs of columns, got {plan.smem_packs}")
    if plan.path == "split_k":
        legal = 1 <= plan.splits <= MAX_SPLITS
        return need(legal, f"splits must be 1 to {MAX_SPLITS}, got {plan.splits}")
    legal = _is_power_of_2(plan.splits) and plan.splits <= MAX_CLUSTER
    need(legal, f"splits of {plan.path} must be a power of two up to {MAX_CLUSTER}")
    warps = plan.splits == 1 or plan.threads % 32 == 0
    need(warps, f"a cluster takes whole warps of threads, got {plan.threads}")
    if plan.path == "two_pass":
        return
    legal = k <= plan.smem_packs <= COLUMN_PACKS and plan.smem_packs % k == 0
    what = f"smem_packs of columns must be a multiple of {k} up to {COLUMN_PACKS}"
    need(legal, f"{what}, got {plan.smem_packs}")
    if not known(n):
        raise ValueError("plan one_pass needs a known number of columns, got a symbolic one")
    held = plan.splits * plan.width * (plan.smem_packs // k)
    if n > held:
        raise ValueError(f"plan one_pass holds {held} columns of {dtype} {op}, got {n}")


def _check_split_k(plan: Plan, k: int, need: _Need) -> None:
    rows, splits = plan.rows_per_block, plan.splits
    need(plan.reg_packs == 0, f"split_k keeps no packs in registers, got {plan.reg_packs}")
    need(rows == 1, f"split_k takes rows_per_block=1, got {rows}")
    need(1 <= splits <= MAX_SPLITS, f"splits must be 1 to {MAX_SPLITS}, got {splits}")
    if plan.bulk:
        _check_ring(plan, k, MIN_SLOTS, need)


def _check_ring(plan: Plan, k: int, least: int, need: _Need) -> None:
    slot, rows = CHUNK * k, plan.rows_per_block
    need(plan.threads % 32 == 0, f"a ring takes whole warps of threads, got {plan.threads}")
    need(rows == 1, f"a ring takes rows_per_block=1, got {rows}")
    legal = plan.smem_packs % slot == 0 and least <= plan.smem_packs // slot <= MAX_SLOTS
    what = f"a multiple of {slot} from {least * slot} to {MAX_SLOTS * slot}"
    need(legal, f"smem_packs of a ring must be {what}, got {plan.smem_packs}")


def _check_device(plan: Plan, dtype: str, device: Limits, need: _Need, *, slot: int) -> None:
    name, have, largest = device.name, device.smem_per_block, device.max_cluster
    cluster = plan.splits if plan.path != "split_k" else 1
    if device.kind == "cpu":
        what = "a cluster (splits of one_pass) or a ring (smem_packs without reg_packs)"
        need(cluster == 1 and not plan.bulk, f"{what} needs a GPU, got limits {name}")
    what = "a ring (smem_packs without reg_packs) needs bulk copies"
    need(largest > 0 or not plan.bulk or slot > 0, f"{what}, {name} has none: max_cluster = 0")
    what = f"needs a cluster of {cluster} blocks"
    need(cluster <= max(1, largest), f"{what}, {name} has max_cluster = {largest}")
    used = shared_bytes(plan)
    if slot > 0:
        merged = columns_smem(plan.threads, plan.rows_per_block, cluster, slot)
        used = plan.threads * plan.smem_packs * slot + merged
    need(used <= have, f"needs {used} bytes of shared memory a block, {name} has {have}")
    if plan.path == "split_k" and plan.bulk and slot == 0:
        need(device.cooperative, f"needs a cooperative launch, {name} has cooperative = False")
        most = resident_blocks(plan, dtype, device)
        what = f"needs splits={plan.splits} co-resident blocks"
        need(plan.splits <= most, f"{what}, {name} holds {most} at one time")


def find_op(op: str) -> _ops.Op:
    if op not in _ops.OPS:
        raise ValueError(f"unknown op {op!r}; valid ops: {', '.join(_ops.OPS)}")
    return _ops.OPS[op]


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
