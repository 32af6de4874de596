"""Few long rows on a GPU: cut over its blocks, in two launches or in one cooperative launch."""

from __future__ import annotations

import dataclasses
import math

from ._limits import KIB, Limits
from ._ops import Op
from ._plan_parts import clamp
from ._plan_spec import (
    CHUNK,
    LINE,
    MAX_PIECE,
    MAX_SLOTS,
    MAX_SPLITS,
    MIN_SLOTS,
    PACK,
    STATIC_SMEM,
    Plan,
)

LOW_THREADS, HIGH_THREADS = 256, 512

# `size` counts packs of a row. Up to so many packs an SM (over the inputs) in two
# launches: 1 x 524288 float16 takes 5.7 us, 6.9 in one, which clears memory first; 4 x 1048576
# 11.2 and 11.1.
TWO_LAUNCHES = 3972
# Packs of a piece in one launch: 256 x 1048576 backward takes 433 us with 16 pieces, 443 with 22.
PIECE = 8192
# float32 forward is bound by arithmetic: 256 x 1048576 takes 768 us with 12 pieces, 783 with 22.
PIECE_WIDE = 22000
RESIDENT = 12288  # packs of a piece beyond which one block of an SM takes it; 1 x 33554432: 51, 53
# Fewer rows than SMs of so many packs are cut where there are no clusters. 4 x 32768 float16: 6.0
# us, 6.3 one_pass; 64 x 128256: 17, 23 two_pass.
SPLIT_PACKS = 4096
# Ops that only fold or only map: (threads, blocks an SM). logsumexp 1 x 33554432: 22.4; its
# backward 37.6, 39.2 in one launch of fewer blocks.
REDUCED = (256, 4)
MAPPED = (512, 8)


def split(
    op: Op, itemsize: int, size: int, rows: int | None, on: Limits, *, loaded: bool = False
) -> Plan:
    """Rows cut over the device, in two launches or, plain ones, in one cooperative launch."""
    count = rows or 1
    why = f"{rows} long rows on {on.sms} SMs"
    if op.reduces or op.folds == 0:
        return _once(op, size, count, on, why)
    together = None if loaded else _together(op, itemsize, size, count, on)
    if together is None:
        # Up to 2 blocks an SM of at least 512 packs, or 1 of 128.
        an_sm = on.sms / count
        splits = max(min(2 * an_sm, size / 512, on.sms), min(an_sm, size / 128), 1)
        threads = HIGH_THREADS if size > 65536 and count == 1 else LOW_THREADS
        return Plan("split_k", threads, splits=min(round(splits), MAX_SPLITS), why=why)
    return dataclasses.replace(together, why=why)


def _once(op: Op, size: int, count: int, on: Limits, why: str) -> Plan:
    """Ops that read once whatever the plan: in two launches, or in one if nothing is folded."""
    threads, an_sm = REDUCED if op.reduces else MAPPED
    splits = clamp(round(an_sm * on.sms / count), 1, min(max(size // 64, 1), MAX_SPLITS))
    if size // splits < 2 * threads and not op.reduces:
        threads = 128  # 4 x 1048576 logsumexp_bwd: 6.6, 7.1 with 256 in fewer pieces
    return Plan("split_k", threads, splits=splits, why=why)


def _together(op: Op, itemsize: int, size: int, count: int, on: Limits) -> Plan | None:
    """The cooperative launch, where the device grants it and it is worth it."""
    k, total = op.inputs, op.inputs * count * size
    if not on.cooperative or on.max_cluster == 0 or total < TWO_LAUNCHES * on.sms:
        return None
    wide, resident = k == 1 and itemsize > 2, size / on.sms > RESIDENT
    # Whose fold reads one of two inputs: 256 x 1048576 log_softmax_bwd takes 420 us, 451 with 256.
    lean = op.folds < k
    threads = HIGH_THREADS if wide else 384 if resident or lean else LOW_THREADS
    an_sm = 1 if wide or resident or k == 2 or itemsize == 8 else 2
    room = min(on.smem_per_block - 8 * KIB, on.smem_per_sm // an_sm - KIB) - STATIC_SMEM
    slot = CHUNK * k * PACK  # bytes a thread
    fitting = [t for t in (threads, 256, 128, 64) if room >= t * slot * MIN_SLOTS]
    if not fitting or size < SPLIT_PACKS:
        return None
    threads = fitting[0]
    slots = min(room // (threads * slot), MAX_SLOTS)
    blocks = an_sm * on.sms
    least = min(max(blocks / count, size / (PIECE_WIDE if wide else PIECE), 1), on.sms)
    splits = min(blocks // max(int(blocks // least), 1), on.sms)  # a whole number of groups
    splits = max(splits, min(2, math.ceil(least)))  # a row that is cut is not left to one block
    if math.ceil((size + LINE) / splits) > MAX_PIECE:
        return None
    return Plan("split_k", threads, 1, 0, slots * CHUNK * k, splits)
