"""The plans that `--regret` tries for a shape: every sensible one of each kind, at most MOST.

Sensible, by arithmetic alone: the row's lanes or slots are at most 4 times what it fills; a row is
cut over more blocks only while the device has too few to run, or where a block can hold no more
than twice the row. An op that only folds or only maps reads once in any kind, so two_pass gets more
plans. MOST binds seldom; where it does, the kinds give up their last plans in turn.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator

import jaxsoftmax
from jaxsoftmax import Plan, _legal, _plan, _plan_spec
from jaxsoftmax._limits import KIB, Limits
from jaxsoftmax._plan_spec import (
    CHUNK,
    MAX_SLOTS,
    MAX_THREADS,
    MIN_SLOTS,
    PACK,
    STATIC_SMEM,
)

from .plans import KINDS, kind

MOST = 48
CLUSTERS = (2, 4, 8, 16)


def candidates(op: str, dtype: str, rows: int, n: int, limits: Limits) -> list[Plan]:
    """Legal plans of one shape: the planner's choice first, then its choice of each path."""
    chosen = jaxsoftmax.plan(op, dtype, rows, n, limits=limits)
    first = [chosen]
    for path in _plan.PATHS:
        with contextlib.suppress(ValueError):
            first.append(jaxsoftmax.plan(op, dtype, rows, n, limits=limits, path=path))
    families = _cpu(rows, limits) if limits.kind == "cpu" else _gpu(op, dtype, rows, n, limits)
    of_kind: dict[str, list[Plan]] = {name: [] for name in KINDS}
    for plan in families:
        with contextlib.suppress(ValueError):
            _legal.check(plan, op, dtype, n, limits)
            of_kind[kind(plan)].append(plan)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*of_kind.values()))
    ordered = dict.fromkeys([*first, *(p for p in turns if p is not None)])  # `why` is not compared
    return list(ordered)[:MOST]


def by_kind(op: str, dtype: str, rows: int, n: int, limits: Limits) -> dict[str, Plan]:
    """One plan of each kind that can run this shape: the planner's own where there is one."""
    found: dict[str, Plan] = {}
    for plan in candidates(op, dtype, rows, n, limits):
        found.setdefault(kind(plan), plan)
    return found


def _gpu(op: str, dtype: str, rows: int, n: int, limits: Limits) -> Iterator[Plan]:
    row = _legal.find_op(op)
    shape = _Shape(row.inputs, rows, max(_plan_spec.packs(n, dtype), 1), limits)
    yield from shape.in_registers()
    yield from shape.in_registers_and_shared()
    yield from shape.in_rings()
    yield from shape.streamed(once=row.folds == 0 or row.reduces)
    yield from shape.cut()
    yield from shape.cooperative()


def _cpu(rows: int, limits: Limits) -> Iterator[Plan]:
    yield Plan("two_pass", 1)
    for splits in (2, limits.sms, 4 * limits.sms):
        if rows < limits.sms:
            yield Plan("split_k", 1, splits=splits)


def _round(lanes: int) -> int:
    """Lanes a row can have: a power of two within a warp, else whole warps."""
    return 1 << max(lanes - 1, 0).bit_length() if lanes <= 32 else 32 * math.ceil(lanes / 32)


class _Shape:
    """The kinds' plans for rows of `size` packs of each of k inputs."""

    def __init__(self, k: int, rows: int, size: int, limits: Limits) -> None:
        self.k, self.rows, self.size, self.limits = k, rows, size, limits
        self.room = limits.smem_per_block - STATIC_SMEM  # of one block alone on an SM
        self.half = limits.smem_per_sm // 2 - KIB - STATIC_SMEM  # of one of two

    def blocks(self, held: int) -> list[int]:
        """Blocks that may share a row when one holds so many packs of each input."""
        counts: list[int] = []
        for count in (1, *CLUSTERS):
            idle = self.rows * count // 2 < 2 * self.limits.sms and self.size >= 64 * count
            tight = len(counts) < 2 and 2 * self.size > held  # half the row: two blocks an SM
            if self.size <= count * held and (not counts or idle or tight):
                counts.append(count)
        return counts

    def in_registers(self) -> Iterator[Plan]:
        for depth in _plan_spec.REGISTERS:
            most = MAX_THREADS if depth <= 4 else MAX_THREADS // 2
            if self.k * depth > 32 or depth > 4 * self.size:
                continue
            for count in self.blocks(most * depth):
                lanes = _round(math.ceil(self.size / (depth * count)))
                if (count > 1 and lanes < 64) or (depth == 32 and (count > 1 or lanes < 128)):
                    continue
                if lanes > 32:
                    yield Plan("one_pass", lanes, 1, self.k * depth, splits=count)
                    continue
                few = self.rows * lanes < 256 * self.limits.sms
                for threads in (32, 128) if few else (128, 256):
                    yield Plan("one_pass", threads, threads // lanes, self.k * depth)

    def in_registers_and_shared(self) -> Iterator[Plan]:
        most, half = MAX_THREADS, MAX_THREADS // 2
        for threads, depth in ((most, 4), (half, 16), (half, 8), (half, 32)):
            room = self.room // (threads * PACK * self.k)
            for count in self.blocks(threads * (depth + room)):
                each = math.ceil(self.size / (threads * count))
                if depth < each <= depth + room and self.k * depth <= 32:
                    shared = self.k * (each - depth)
                    yield Plan("one_pass", threads, 1, self.k * depth, shared, count)

    def rings(self, threads: int, need: int, blocks: int) -> list[int]:
        """Slots of a ring: all of an SM's shared memory or half of it, for what comes next; or no
        more than the row needs."""
        slot = threads * CHUNK * self.k * PACK
        full, half = (min(MAX_SLOTS, r // slot) for r in (self.room, self.half))
        if blocks <= self.limits.sms:  # nothing comes next
            return [need] if need <= full else []
        sizes = [full, half] + [need] * (2 * need < half)
        return [s for s in dict.fromkeys(sizes) if s >= need]

    def in_rings(self) -> Iterator[Plan]:
        for threads in (MAX_THREADS // 2, MAX_THREADS, MAX_THREADS // 4):
            slot = threads * CHUNK
            held = min(MAX_SLOTS, self.room // (slot * self.k * PACK)) * slot
            for count in self.blocks(held):
                piece = math.ceil(self.size / count)
                if slot > 4 * piece or (threads == MAX_THREADS // 4 and piece > 1024):
                    continue
                for slots in self.rings(threads, math.ceil(piece / slot), self.rows * count):
                    packs = slots * CHUNK * self.k
                    yield Plan("one_pass", threads, 1, 0, packs, count)

    def streamed(self, once: bool) -> Iterator[Plan]:
        blocks, depths = ((64, 128, 256, 512), (1, 2, 4, 8)) if once else ((128, 256, 512), (2, 4))
        for threads in blocks:
            if self.size > 128 or (once and self.size >= threads):
                yield Plan("two_pass", threads)
        for depth in depths:
            if self.size <= 128:
                lanes = min(32, _round(math.ceil(self.size / depth)))
                yield Plan("two_pass", 128, 128 // lanes)

    def cut(self) -> Iterator[Plan]:
        """In two launches, so many blocks an SM in all, each with 64 packs of the row at least."""
        for an_sm, threads in ((4, 256), (2, 256), (8, 256), (1, 256), (2, 512), (16, 128)):
            splits = min(round(an_sm * self.limits.sms / self.rows), self.size // 64)
            if splits > 1:
                yield Plan("split_k", threads, splits=splits)

    def cooperative(self) -> Iterator[Plan]:
        """As many rows at a time as fill the device, or as few as fit in its shared memory."""
        for threads, room, an_sm in itertools.product((512, 256), (self.room, self.half), (1, 2)):
            slots = min(MAX_SLOTS, room // (threads * CHUNK * self.k * PACK))
            if slots < MIN_SLOTS or (an_sm == 2) != (room == self.half):
                continue
            blocks = an_sm * self.limits.sms
            whole = math.ceil(self.size / (slots * threads * CHUNK))  # all of the row on chip
            for splits in dict.fromkeys((blocks // min(self.rows, blocks), whole, blocks)):
                if splits > 1 and self.size >= splits * threads // 4 and self.rows < 4 * blocks:
                    packs = slots * CHUNK * self.k
                    yield Plan("split_k", threads, 1, 0, packs, min(splits, blocks))
