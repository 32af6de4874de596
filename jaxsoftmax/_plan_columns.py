"""Which kernel runs on a GPU where a row's elements do not lie side by side: [outer, n, inner].

A block takes a tile: `rows_per_block` lanes stand side by side along inner, each on the rows of one
pack, or of one element ("cells"), the others along n.
"""

from __future__ import annotations

import math

from ._limits import Limits
from ._ops import Op
from ._plan_parts import UNKNOWN_SPLITS, clamp, clusters, power_of_2
from ._plan_spec import (
    COLUMN_PACKS,
    COLUMN_THREADS,
    MAX_SPLITS,
    PACK,
    Plan,
    columns_smem,
)

# Behind each threshold stand times of NVIDIA-H200_plans_of_loaded_rows_and_columns.json.
WIDE = 8  # packs of a tile side by side: a line of L2
DEPTH = 16  # packs of a lane, over the inputs; (16, 1000, 64, 64) bfloat16, axis 1: 79 us
# Up to so many elements a row (threads, lanes along n: None is as DEPTH has it).
SHORT = (
    (32, 64, 1),  # (64, 19, 256, 256), axis 1: 83 us, 116 with two lanes a row
    (256, 128, None),  # (256, 128, 512), axis 1: 24.9 us, 27.8 with 256 threads
)
FEW_LONGEST = 4096  # elements of rows that few tiles may keep to few SMs; estimate


def choose(
    path: str | None,
    op: Op,
    itemsize: int,
    slot: int,
    n: int | None,
    inner: int | None,
    outer: int | None,
    on: Limits,
) -> Plan:
    """`slot` is what a lane reads at one time: a pack's bytes, or an element's."""
    line = WIDE * PACK // slot  # lanes that read a line of L2
    units = line if inner is None else max(inner * itemsize // slot, 1)
    wide = min(line, power_of_2(units))
    tiles = None if outer is None or inner is None else max(outer, 1) * math.ceil(units / wide)
    if n is None:
        if path == "one_pass":
            raise ValueError("plan one_pass needs a known number of columns, got a symbolic one")
        splits = UNKNOWN_SPLITS if path == "split_k" else 1
        why = "columns unknown while tracing"
        return Plan(path or "two_pass", COLUMN_THREADS, wide, splits=splits, why=why)
    if path is None or path == "one_pass":
        held = _held(op.inputs, slot, n, units, on.sms if outer is None else outer, on)
        if held is not None:
            return held
        if path is not None:  # the most there is: check() names what it holds
            blocks = max(clusters(on), 1)
            room = on.smem_per_block - columns_smem(COLUMN_THREADS, 1, blocks, slot)
            packs = min(room // (COLUMN_THREADS * slot), COLUMN_PACKS) // op.inputs * op.inputs
            return Plan("one_pass", COLUMN_THREADS, 1, 0, packs, blocks)
    few = tiles is not None and tiles < 2 * on.sms
    if path == "split_k" or (path is None and few):
        # (32768, 8192), axis 0: 449 us with 4 pieces of 2 lines; backward 658, 705 with 5 of one.
        wide = min(2 * line, power_of_2(units)) if tiles is not None else wide
        across = max(outer or 1, 1) * math.ceil(units / wide)
        splits = round(2 * on.sms / across)
        splits = clamp(splits, 1, min(MAX_SPLITS, max(n // 64, 1)))
        return Plan("split_k", COLUMN_THREADS, wide, splits=splits, why="few long columns")
    return Plan("two_pass", COLUMN_THREADS, wide, why="long columns")


def _held(inputs: int, slot: int, n: int, units: int, outer: int, on: Limits) -> Plan | None:
    """The tile in shared memory, of a block or a cluster."""
    a_pack = PACK // slot  # lanes that read a pack
    most = power_of_2(units)
    for longest, threads, along in SHORT:
        if n <= longest:
            lanes = along or power_of_2(math.ceil(n * inputs / (DEPTH * a_pack)))
            width = min(max(threads // lanes, 1), most)
            break
    else:
        # Half a line of one input, (4096, 8192) axis 0 forward 52 us, 56 with a line; a line of
        # two, backward 63 us, 69 with half of one.
        threads, width = COLUMN_THREADS, min(WIDE * inputs // 2 * a_pack, most)
    blocks = 1
    if n > SHORT[-1][0]:
        blocks = _blocks(inputs, n, threads // width, a_pack)
        while blocks > max(clusters(on), 1):
            if on.max_cluster > 0 or width == 1:
                return None
            width //= 2
            blocks = _blocks(inputs, n, threads // width, a_pack)
    tiles = outer * math.ceil(units / width)
    if n > FEW_LONGEST and 2 * tiles * blocks < on.sms:
        return None
    packs = math.ceil(n / (threads // width * blocks))
    why = "shared memory holds the tile"
    return Plan("one_pass", threads, width, 0, inputs * packs, blocks, why=why)


def _blocks(inputs: int, n: int, lanes: int, a_pack: int) -> int:
    """Blocks of a cluster, of so many lanes along n each, that hold rows of n elements."""
    return power_of_2(math.ceil(n * inputs / (DEPTH * a_pack) / lanes))
