"""Which kernel runs on a GPU: where the row is kept, how wide it is cut, from rows and columns.

Thresholds carry their measurement; a device without clusters and bulk copies gets the plans that
need neither.
"""

from __future__ import annotations

import dataclasses
import math

from ._legal import (
    CHUNK,
    CLUSTER_PACKS,
    LINE,
    MAX_CLUSTER,
    MAX_PIECE,
    MAX_SLOTS,
    MAX_SPLITS,
    MAX_THREADS,
    MIN_SLOTS,
    PACK,
    STATIC_SMEM,
    Plan,
)
from ._limits import KIB, Limits

UNKNOWN_SPLITS = 8  # a forced split_k whose number of columns is symbolic

# How a GPU's rows are planned. `size` counts packs of a row; behind each threshold stands a shape
# with the us of the choice and of the next best, from bench/results/NVIDIA-H200_plans.json, or for
# devices without clusters from NVIDIA-H200_plans_without_clusters.json.

# Packs of each input that a lane keeps in registers where a block or less has the row: (rows up to
# so many packs, so many a lane).
REGISTERS_NARROW = (  # one input of float16, bfloat16
    (256, 2),  # 32768 x 2048: 66.0, 66.0 with 4
    (1024, 4),  # 32768 x 4096: 132.9, 133.1 with 2; 16384 x 8192: 132.1, 133.8 with 8
    (2048, 8),  # 16384 x 16384: 262.7, 265.5 with 4
)
REGISTERS_WIDE = ((2048, 4),)  # one input of float32, float64; 131072 x 1024: 272, 277 with 8
REGISTERS_TWO_INPUTS = (
    (256, 2),  # 32768 x 2048: 94.9, 95.1 with 4
    (1024, 4),  # 16384 x 8192: 187.2, 188.1 with 8
    (2048, 8),  # 16384 x 16384: 372.1, 375.8 with 4
)
# Without clusters and bulk copies also longer rows stay in the registers of one block.
LONGEST_OF_A_BLOCK = (4096, 16)  # 8192 x 32000 float16: 257, 301 two_pass
WIDE_SHARED = 8192  # packs, partly in shared memory; 8192 x 32768 float32: 741, 780 two_pass
# With fewer lanes than this an SM, a row gets twice as many: 64 x 4096 float16 takes 2.82 us with
# 512 lanes a row; 512 x 2048 keeps 128 (3.40; 256: 3.41), 256 x 16384 backward 256 (9.2; 10.8).
BUSY_LANES = 448

# Rows of a cluster's registers, where rows are few. Up to so many packs an SM in all, the fewest a
# lane: 4 x 16384 float16 2.2 us with 2 a lane and 8 blocks, 2.5 with 1 and 16.
QUICK_PACKS = 1024
QUICK_LONGEST = 8192  # with 2 a lane; 4 x 114688 takes 3.9 us with 4 a lane
CLUSTER_LONGEST = 32768  # 32 x 262144 float16: 14.7 with 8 a lane, 14.9 in a ring
SHORT_PACKS = {2: 2048, 4: 8192}  # packs an SM; 64 x 32768 float16: 5.6 with 4 a lane, 5.9 with 8
# Packs an SM of rows with 8 a lane; 512 x 32768 float16: 20.7; 256 x 131072: 41.7, 42.0 in rings.
CLUSTER_IN_ALL = {2: 16384, 4: 8192}
CLUSTER_IN_ALL_TWO = 6144  # of more than 4096 packs; 128 x 65536 backward: 18.4, ring 17.1

# Rows in rings of shared memory: (rows up to so many packs, blocks of a cluster, slots of a block).
RING_NARROW = (  # one input of float16, bfloat16
    (4096, 2, 2),  # 8192 x 32768: 260.9, 262.5 in one block
    (6400, 2, 5),  # 8192 x 50257: 405.6, 426.7 with 4 slots
    (8192, 2, 3),  # 4096 x 65536: 263.3, 264.4 with 4 blocks
    (16384, 8, 4),  # 4096 x 128256: 507, 511 with 4 blocks
    (24576, 8, 3),  # 128 x 151936: 28.6, 29.6 with 16 blocks
    (32768, 16, 4),  # 1024 x 262144: 269.8, 270.6 with 8 blocks
)
RING_LONGEST = 131072  # 256 x 1048576 float16: 294, 306 in a cooperative launch
FEW_PACKS = 5 << 20  # in all, of rows cut over the device; 32 x 1048576: 47.8, 50.5 in rings
# Others cut a row into pieces of about so many packs, in so many slots.
RING_WIDE = (4096, 4)  # 8192 x 32768 float32: 658, 690 in one block
RING_TWO_INPUTS = (2048, 2)  # 4096 x 65536 float16: 375.1 with 4 blocks, 373.6 with 8 of 3 slots
AHEAD_BLOCKS = 16  # an SM; up to so many, one more slot: 128 x 65536 backward 17.8 us, 19.5 without
LOW_THREADS, HIGH_THREADS = 256, 512

# Few long rows are cut over the device. Up to so many packs an SM (over the inputs) in two
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


def choose(
    path: str | None,
    k: int,
    itemsize: int,
    size: int | None,
    lines: int | None,
    rows: int | None,
    on: Limits,
) -> Plan:
    if size is None or lines is None:
        return unknown_columns(path, 256)
    if path is None or path == "one_pass":
        held = _in_block(k, itemsize, size, rows, on)
        if on.max_cluster > 0:
            quick = _in_cluster(k, itemsize, size, rows, on)
            held = quick or held or _in_ring(k, itemsize, lines, rows, on, forced=path is not None)
        if held is not None:
            return held
        if path is not None:
            return _largest(k, size, on)
    few = rows is not None and (rows < on.sms or (on.max_cluster > 0 and on.cooperative))
    if path == "split_k" or (path is None and few and size >= SPLIT_PACKS):
        return _split(k, itemsize, size, rows, on)
    if size <= 128:  # rows share a block
        width = min(32, power_of_2(math.ceil(size / 4)))
        return Plan("two_pass", 128, rows_per_block=128 // width, why="short rows")
    return Plan(
        "two_pass", clamp(power_of_2(math.ceil(size / 4)), 64, MAX_THREADS), why="a long row"
    )


def _in_block(k: int, itemsize: int, size: int, rows: int | None, on: Limits) -> Plan | None:
    """Rows in the registers of a sub-warp, a warp or a block, and, without rings, a little more."""
    narrow = REGISTERS_NARROW if itemsize == 2 else REGISTERS_WIDE
    depths = narrow if k == 1 else REGISTERS_TWO_INPUTS
    if on.max_cluster == 0:
        depths = (*depths, LONGEST_OF_A_BLOCK)
    a_lane = next((a_lane for packs, a_lane in depths if size <= packs), None)
    if a_lane is not None:
        lanes = _lanes(size / a_lane)
        while rows is not None and rows * lanes < BUSY_LANES * on.sms and lanes < size:
            more = _lanes(2 * lanes)
            if more > MAX_THREADS or (2 * more > MAX_THREADS and size > 4 * more):
                break  # its packs would not fit in the registers of so many threads
            lanes = more
        registers = k * power_of_2(math.ceil(size / lanes))
        each = max(1, 128 // lanes) if lanes <= 32 else 1
        return Plan("one_pass", lanes * each, each, registers, why="the row fits in registers")
    threads, registers = MAX_THREADS, 4 * k
    shared = k * math.ceil(size / threads) - registers
    two_blocks = on.smem_per_sm // 2 - KIB - STATIC_SMEM
    wide = k == 1 and itemsize > 2 and on.max_cluster == 0
    if wide and size <= WIDE_SHARED and shared * threads * PACK <= two_blocks:
        return Plan("one_pass", threads, 1, registers, shared, why="registers and shared memory")
    return None


def _in_cluster(k: int, itemsize: int, size: int, rows: int | None, on: Limits) -> Plan | None:
    """Few rows in the registers of a cluster's blocks: what counts is the time of one row."""
    if rows is None or size < 1024 or size > CLUSTER_LONGEST:
        return None
    an_sm = rows * size / on.sms
    narrow = 2 if itemsize == 2 else 4
    most = CLUSTER_IN_ALL[narrow] if k == 1 or size <= 4096 else CLUSTER_IN_ALL_TWO
    if an_sm * k <= QUICK_PACKS and size <= QUICK_LONGEST:
        a_lane, threads = (1, 256) if k == 2 and size <= 2048 else (2, 128)
    elif rows * MAX_CLUSTER <= on.sms and size > 2048:
        a_lane, threads = 4, 128
    elif 2048 < size <= 4096 and an_sm <= SHORT_PACKS[narrow]:
        a_lane, threads = 4, MAX_THREADS
    elif size > 2048 and an_sm <= most:
        a_lane, threads = CLUSTER_PACKS, 128 * k
    else:
        return None
    blocks = min(power_of_2(math.ceil(size / (a_lane * threads))), _clusters(on))
    lanes = _lanes(size / a_lane / blocks)
    if lanes > (MAX_THREADS if a_lane <= 4 else MAX_THREADS // 2):
        return None
    return Plan("one_pass", lanes, 1, a_lane * k, splits=blocks, why="few rows, each a cluster's")


def _in_ring(
    k: int, itemsize: int, size: int, rows: int | None, on: Limits, *, forced: bool
) -> Plan | None:
    """Rows in rings of shared memory, of a block or a cluster, if these hold them."""
    cut = rows is not None and rows * size * k < FEW_PACKS and size > CLUSTER_LONGEST
    if (size > RING_LONGEST or cut) and not forced:
        return None
    piece, slots = RING_WIDE if k == 1 else RING_TWO_INPUTS
    blocks = power_of_2(math.ceil(size / piece))
    if k == 1 and itemsize == 2:
        found = next((row for row in RING_NARROW if size <= row[0]), (0, MAX_CLUSTER, 4))
        blocks, slots = found[1:]
    blocks = min(blocks, _clusters(on))
    longest = LINE * math.ceil(size / blocks / LINE)
    threads = _lanes(longest / (CHUNK * slots))
    room = on.smem_per_block - STATIC_SMEM - KIB
    few = k == 2 and rows is not None and rows * blocks <= AHEAD_BLOCKS * on.sms
    if few and threads * CHUNK * (slots + 1) * k * PACK <= room:
        slots += 1
    if (threads > LOW_THREADS and blocks == MAX_CLUSTER) or threads > MAX_THREADS:
        threads = HIGH_THREADS if k == 1 and longest > piece else LOW_THREADS
        slots = min(room // (threads * CHUNK * k * PACK), MAX_SLOTS)
    if threads * CHUNK * slots < longest or threads * CHUNK * slots * k * PACK > room:
        return None
    why = "a ring of shared memory holds the row"
    return Plan("one_pass", max(threads, 64), 1, 0, slots * CHUNK * k, blocks, why=why)


def _split(k: int, itemsize: int, size: int, rows: int | None, on: Limits) -> Plan:
    """Rows cut over the device, in two launches or in one cooperative launch."""
    count = rows or 1
    why = f"{rows} long rows on {on.sms} SMs"
    together = _together(k, itemsize, size, count, on)
    if together is None:
        # Up to 2 blocks an SM of at least 512 packs, or 1 of 128.
        an_sm = on.sms / count
        splits = max(min(2 * an_sm, size / 512, on.sms), min(an_sm, size / 128), 1)
        threads = HIGH_THREADS if size > 65536 and count == 1 else LOW_THREADS
        return Plan("split_k", threads, splits=min(round(splits), MAX_SPLITS), why=why)
    return dataclasses.replace(together, why=why)


def _together(k: int, itemsize: int, size: int, count: int, on: Limits) -> Plan | None:
    """The cooperative launch, where the device grants it and it is worth it."""
    total = k * count * size
    if not on.cooperative or on.max_cluster == 0 or total < TWO_LAUNCHES * on.sms:
        return None
    wide, resident = k == 1 and itemsize > 2, size / on.sms > RESIDENT
    threads = HIGH_THREADS if wide else 384 if resident else LOW_THREADS
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


def _largest(k: int, size: int, on: Limits) -> Plan:
    """For who forces one_pass: the first plan that holds the row, or the largest there is."""
    if (blocks := _clusters(on)) > 0:
        slot = CHUNK * k * PACK
        room = on.smem_per_block - STATIC_SMEM - KIB
        threads = next((t for t in (MAX_THREADS, 256, 128) if room >= t * slot), 64)
        slots = clamp(room // (threads * slot), 1, MAX_SLOTS)
        return Plan("one_pass", threads, 1, 0, slots * CHUNK * k, blocks, why="all that fits")
    for threads, registers in ((MAX_THREADS, 4 * k), (MAX_THREADS // 2, 32)):
        room = (on.smem_per_block - STATIC_SMEM) // (threads * PACK * k) * k
        need = k * math.ceil(size / threads) - registers
        if need <= room:
            break
    shared = max(min(need, room), 0)
    return Plan("one_pass", threads, 1, registers, shared, why="all that a block can hold")


def _clusters(on: Limits) -> int:
    """The largest cluster of the device that a plan may have."""
    return min(MAX_CLUSTER, power_of_2(on.max_cluster + 1) // 2)


def _lanes(count: float) -> int:
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
