"""Which kernel runs on a GPU: where the row is kept, how wide it is cut, from rows and columns.

Thresholds carry their measurement; a device without clusters and bulk copies gets the plans that
need neither.
"""

from __future__ import annotations

import math

from ._limits import KIB, Limits
from ._ops import Op
from ._plan_cut import HIGH_THREADS, LOW_THREADS, SPLIT_PACKS, split
from ._plan_parts import clamp, clusters, lanes_of, power_of_2, unknown_columns
from ._plan_spec import (
    CHUNK,
    CLUSTER_PACKS,
    LINE,
    LOADED_PACKS,
    MAX_CLUSTER,
    MAX_SLOTS,
    MAX_THREADS,
    PACK,
    STATIC_SMEM,
    Plan,
)

# How a GPU's rows are planned. `size` counts packs of a row; behind each threshold stands a shape
# with the us of the choice and of the next best, from bench/results/NVIDIA-H200_plans.json, for ops
# other than softmax and its gradient from NVIDIA-H200_plans_of_new_ops.json, for devices without
# clusters from NVIDIA-H200_plans_without_clusters.json.

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
# Loaded rows have a start that costs more, so fewer lanes share it. bfloat16, scaled and masked:
LOADED_ONE = (
    (32, 2),
    (512, 4),  # 524288 x 1024, masked: 689 us, 722 with 8
    (2048, 8),  # more than 4 a lane hold in the threads that they allow
)
LOADED_TWO = (
    (32, 2),
    (2048, 8),  # 524288 x 1024 masked backward: 743 us, 803 with 4
)
# Ops that map nothing want many loads in flight, and no more lanes than that takes.
REGISTERS_REDUCED = (
    (32, 4),  # 1048576 x 64: 38.5, 43.8 with 2
    (1024, 8),  # 131072 x 1024: 64.3, 88.2 with 2; 32768 x 8192: 122.1, 139.0 with 4
    (2048, 16),  # 16384 x 16384: 128.3, 132.4 with 8
)
REGISTERS_MAPPED = (  # ops that fold nothing
    (256, 2),  # 1048576 x 64: 69.2; 32768 x 2048: 65.7
    (512, 4),  # 2048 x 4096: 10.5, 10.3 with 2
    (1024, 8),  # 32768 x 8192: 256.9, 261.7 with 4
    (2048, 4),  # 16384 x 16384: 256.8, 280.0 with 8
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
CLUSTER_IN_ALL_REDUCED = 4096  # 16 x 128256 logsumexp: 5.1, 5.4 cut; 64 x 128256: 9.8, 9.2 cut
CLUSTER_IN_ALL_TWO = 6144  # of more than 4096 packs; 128 x 65536 backward: 18.4, ring 17.1

# Rows in rings of shared memory: (rows up to so many packs, blocks of a cluster, slots of a block).
RING_NARROW = (  # one input of float16, bfloat16
    (2560, 1, 3),  # 16384 x 16385: 266.3, 300.9 with 2 blocks
    (3328, 1, 5),  # 8192 x 24577: 202.6, 208.8 with 2 blocks
    (4096, 2, 2),  # 8192 x 32768: 260.9, 262.5 in one block
    (5120, 2, 3),  # 8192 x 32769: 267.6, 278.7 with 5 slots
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
# Rows in two_pass that are only read: (up to so many packs, so many threads).
REDUCED_THREADS = (
    (8192, 128),  # 8192 x 50257 logsumexp: 194
    (32768, 256),  # 4096 x 128256: 240.7, 243.3 with 128
)
# Up to so many rows an SM they are cut; 128 x 151936: 15.3, 15.7 two_pass; 256 x 1048576: 130, 127.
FEW_REDUCED = 1.5

# Rows of at least so many packs, and in all up to so many an SM, of which an op folds nothing:
# 16 x 128256 logsumexp_bwd takes 4.5 us cut, 4.8 in clusters; 64 x 128256 11.0, 10.5.
MAPPED_SHORTEST, MAPPED_PACKS = 1024, 2048


def choose(
    path: str | None,
    op: Op,
    itemsize: int,
    size: int | None,
    lines: int | None,
    rows: int | None,
    on: Limits,
    *,
    loaded: bool = False,
) -> Plan:
    if size is None or lines is None:
        return unknown_columns(path, 256)
    if path is None and _spread(op, size, rows, on):
        return split(op, itemsize, size, rows, on, loaded=loaded)
    if path is None or path == "one_pass":
        held = _in_block(op, itemsize, size, rows, on, loaded=loaded)
        if on.max_cluster > 0:
            held = _in_cluster(op, itemsize, size, rows, on, loaded=loaded) or held
            if not loaded and (path is not None or not op.reduces):  # which no ring makes faster
                forced = path is not None
                held = held or _in_ring(op.inputs, itemsize, lines, rows, on, forced=forced)
        if held is not None:
            return held
        if path is not None:
            return _largest(op.inputs, size, on, loaded=loaded)
    few = rows is not None and (rows < on.sms or (on.max_cluster > 0 and on.cooperative))
    if op.reduces:
        few = rows is not None and rows < FEW_REDUCED * on.sms
    if path == "split_k" or (path is None and few and size >= SPLIT_PACKS):
        return split(op, itemsize, size, rows, on, loaded=loaded)
    if size <= 128:  # rows share a block
        width = min(32, power_of_2(math.ceil(size / 4)))
        return Plan("two_pass", 128, rows_per_block=128 // width, why="short rows")
    most = next((t for packs, t in REDUCED_THREADS if size <= packs and op.reduces), MAX_THREADS)
    return Plan("two_pass", clamp(power_of_2(math.ceil(size / 4)), 64, most), why="a long row")


def _spread(op: Op, size: int, rows: int | None, on: Limits) -> bool:
    """Whether few rows of an op that folds nothing go to blocks that know nothing of each other."""
    few = rows is not None and rows * size <= MAPPED_PACKS * on.sms
    return op.folds == 0 and few and size >= MAPPED_SHORTEST


def _depths(op: Op, itemsize: int) -> tuple[tuple[int, int], ...]:
    if op.reduces:
        return REGISTERS_REDUCED
    if op.folds == 0:
        return REGISTERS_MAPPED
    narrow = REGISTERS_NARROW if itemsize == 2 else REGISTERS_WIDE
    return narrow if op.inputs == 1 else REGISTERS_TWO_INPUTS


def _in_block(
    op: Op, itemsize: int, size: int, rows: int | None, on: Limits, *, loaded: bool
) -> Plan | None:
    """Rows in the registers of a sub-warp, a warp or a block, and, without rings, a little more."""
    k, depths = op.inputs, _depths(op, itemsize)
    if loaded:
        maps_and_folds = op.folds > 0 and not op.reduces
        longer = (LOADED_ONE, LOADED_TWO)[k - 1] if maps_and_folds else depths
        ours = [LOADED_PACKS if packs > 1024 else a_lane for packs, a_lane in longer]
        depths = tuple((row[0], min(a, LOADED_PACKS)) for row, a in zip(longer, ours, strict=True))
    elif on.max_cluster == 0 and not op.reduces:
        depths = (*depths, LONGEST_OF_A_BLOCK)
    a_lane = next((a_lane for packs, a_lane in depths if size <= packs), None)
    if a_lane is not None:
        lanes = lanes_of(size / a_lane)
        while rows is not None and rows * lanes < BUSY_LANES * on.sms and lanes < size:
            more = lanes_of(2 * lanes)
            if loaded and more > MAX_THREADS // 2:
                break
            if more > MAX_THREADS or (2 * more > MAX_THREADS and size > 4 * more):
                break  # its packs would not fit in the registers of so many threads
            lanes = more
        registers = k * power_of_2(math.ceil(size / lanes))
        each = max(1, 128 // lanes) if lanes <= 32 else 1
        return Plan("one_pass", lanes * each, each, registers, why="the row fits in registers")
    threads, registers = MAX_THREADS, 4 * k
    shared = k * math.ceil(size / threads) - registers
    two_blocks = on.smem_per_sm // 2 - KIB - STATIC_SMEM
    wide = k == 1 and itemsize > 2 and on.max_cluster == 0 and op.folds > 0
    wide = wide and not op.reduces and not loaded
    if wide and size <= WIDE_SHARED and shared * threads * PACK <= two_blocks:
        return Plan("one_pass", threads, 1, registers, shared, why="registers and shared memory")
    return None


def _in_cluster(
    op: Op, itemsize: int, size: int, rows: int | None, on: Limits, *, loaded: bool
) -> Plan | None:
    """Few rows in the registers of a cluster's blocks: what counts is the time of one row.

    Loaded rows have no rings: of those, all that no block holds.
    """
    if size < 1024 or size > CLUSTER_LONGEST or (rows is None and not loaded):
        return None
    rows = on.sms if rows is None else rows
    k, an_sm = op.inputs, rows * size / on.sms
    narrow = 2 if itemsize == 2 else 4
    most = CLUSTER_IN_ALL[narrow] if k == 1 or size <= 4096 else CLUSTER_IN_ALL_TWO
    most = CLUSTER_IN_ALL_REDUCED if op.reduces else most
    if an_sm * k <= QUICK_PACKS and size <= QUICK_LONGEST:
        a_lane, threads = (1, 256) if k == 2 and size <= 2048 else (2, 128)
    elif rows * MAX_CLUSTER <= on.sms and size > 2048:
        a_lane, threads = 4, 128
    elif 2048 < size <= 4096 and an_sm <= SHORT_PACKS[narrow] and not loaded:
        a_lane, threads = 4, MAX_THREADS
    elif size > 2048 and (an_sm <= most or loaded):
        a_lane, threads = CLUSTER_PACKS, 128 * k
    else:
        return None
    blocks = min(power_of_2(math.ceil(size / (a_lane * threads))), clusters(on))
    lanes = lanes_of(size / a_lane / blocks)
    if lanes > (MAX_THREADS if a_lane <= (2 if loaded else 4) else MAX_THREADS // 2):
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
    blocks = min(blocks, clusters(on))
    longest = LINE * math.ceil(size / blocks / LINE)
    threads = lanes_of(longest / (CHUNK * slots))
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


def _largest(k: int, size: int, on: Limits, *, loaded: bool) -> Plan:
    """For who forces one_pass: the first plan that holds the row, or the largest there is."""
    if (blocks := clusters(on)) > 0 and loaded:
        return Plan("one_pass", 256, 1, k * LOADED_PACKS, 0, blocks, why="all that fits")
    if blocks > 0:
        slot = CHUNK * k * PACK
        room = on.smem_per_block - STATIC_SMEM - KIB
        threads = next((t for t in (MAX_THREADS, 256, 128) if room >= t * slot), 64)
        slots = clamp(room // (threads * slot), 1, MAX_SLOTS)
        return Plan("one_pass", threads, 1, 0, slots * CHUNK * k, blocks, why="all that fits")
    if loaded:
        return Plan(
            "one_pass", MAX_THREADS // 2, 1, k * LOADED_PACKS, why="all that a block can hold"
        )
    for threads, registers in ((MAX_THREADS, 4 * k), (MAX_THREADS // 2, 32)):
        room = (on.smem_per_block - STATIC_SMEM) // (threads * PACK * k) * k
        need = k * math.ceil(size / threads) - registers
        if need <= room:
            break
    shared = max(min(need, room), 0)
    return Plan("one_pass", threads, 1, registers, shared, why="all that a block can hold")
