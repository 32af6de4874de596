"""`Plan`, what a plan counts in, and the sizes that follow from one."""

from __future__ import annotations

import dataclasses
from numbers import Integral
from typing import Any, TypeGuard

from ._limits import KIB, Limits

PATHS = ("one_pass", "two_pass", "split_k")  # the order is the C++ enum's
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

PACK = 16  # bytes of one vector load
STATIC_SMEM = 3 * KIB  # shared memory every kernel may need beside its packs
MAX_THREADS = 512
REGISTERS = (1, 2, 4, 8, 16, 32)  # packs of each input a lane can keep in registers
MAX_SPLITS = 65535
MAX_CLUSTER = 16
CHUNK = 4  # packs of each input that a lane takes from a slot of the ring
MAX_SLOTS = 64
MIN_SLOTS = 4  # of a ring that a piece may go round, which reads again
LINE = 8  # packs of a line of L2: in a ring, rows begin at one
MAX_PIECE = 2**27  # packs of a block's piece in a ring
CLUSTER_PACKS = 8  # of each input in a lane's registers, where blocks share a row
LOADED_PACKS = 8  # the same of rows that are loaded (masked, scaled, causal, of mixed dtypes)
STATES, STATE = 64, 24  # bytes of the states of a pack's rows, or of one, on their way to others
COLUMN_THREADS = 256  # of a block of columns
COLUMN_PACKS = 4096  # packs a lane may keep of them
# How rows lie: side by side, plain or loaded, or as columns [outer, n, inner], whole packs of plain
# neighbours along inner or cells of any kind.
LAYOUTS = ("rows", "loaded", "columns", "cells")
MAX_DIMS = 8  # of an array, those of size 1 not counted
CLUSTER_SMEM = 4 * KIB  # for the states that the blocks of a cluster send each other


@dataclasses.dataclass(frozen=True)
class Plan:
    """One choice of kernel. A group of `threads // rows_per_block` lanes of a block handles a row.

    `reg_packs` and `smem_packs` are the 16-byte packs a lane keeps in registers and in shared
    memory, over all inputs of the op. Shared memory without registers is a ring of slots that
    bulk copies fill (a slot is CHUNK packs a lane of every input).

    Of columns, which do not lie side by side, `rows_per_block` counts the lanes beside each other,
    the packs (of cells: single elements) a lane keeps are all in shared memory, and two_pass may be
    cut over a cluster of `splits` blocks too.

    `splits` blocks share a row. In one_pass they are a cluster and hold all of it; in split_k each
    takes a piece, in two launches, or with `smem_packs` in one cooperative launch: what its ring
    does not hold is read again. Clusters and rings are a GPU's. On a CPU, `threads` only scales the
    scratch of one_pass.
    """

    path: str
    threads: int
    rows_per_block: int = 1
    reg_packs: int = 0
    smem_packs: int = 0
    splits: int = 1
    why: str = dataclasses.field(default="", compare=False)

    @property
    def width(self) -> int:
        """Lanes that share a row."""
        return self.threads // self.rows_per_block

    @property
    def bulk(self) -> bool:
        """Whether a ring of slots in shared memory holds a block's part of the row."""
        return self.reg_packs == 0 and self.smem_packs > 0

    def attributes(self) -> dict[str, int]:
        """The fields the handlers see, in the C++ struct's order."""
        fields = dataclasses.asdict(self)
        del fields["why"]
        return {**fields, "path": PATHS.index(self.path)}

    def __str__(self) -> str:
        text = f"{self.path}(threads={self.threads}"
        for name in ("rows_per_block", "reg_packs", "smem_packs", "splits"):
            if (value := getattr(self, name)) != Plan.__dataclass_fields__[name].default:
                text += f", {name}={value}"
        return f"{text})" + (f": {self.why}" if self.why else "")


def known(size: Any) -> TypeGuard[int]:
    """Whether a size is a number, of Python or NumPy, rather than symbolic or None."""
    return isinstance(size, Integral)


def packs(n: int, dtype: Any, align: int = 1) -> int:
    """Packs from the last boundary of `align` packs before a row of n columns to its end.

    A length that is no multiple of `align` packs may start anywhere.
    """
    each = PACK // DTYPES[dtype_name(dtype)]
    return n // each if n % (align * each) == 0 else (n + (align + 1) * each - 2) // each


def columns(held: int, dtype: Any, n: int, align: int = 1) -> int:
    """Columns that fit in `held` packs, for rows of the alignment that n implies."""
    each = PACK // DTYPES[dtype_name(dtype)]
    return held * each if n % (align * each) == 0 else (held - align) * each + 1


def shared_bytes(plan: Plan) -> int:
    """Shared memory that a block of `plan` may use, in bytes."""
    mail = CLUSTER_SMEM if plan.path == "one_pass" and plan.splits > 1 else 0
    return plan.threads * plan.smem_packs * PACK + STATIC_SMEM + (0 if plan.bulk else mail)


def columns_smem(threads: int, width: int, blocks: int, slot: int = PACK) -> int:
    """Shared memory for the states of a tile's rows while they are merged, at most, in bytes."""
    parts = max(threads // max(width, 32), 1)
    mail = 2 * blocks if blocks > 1 else 0
    a_lane = STATES if slot == PACK else STATE
    return KIB + max(width * parts * a_lane, STATE * threads) + width * (1 + mail) * a_lane


def slot_bytes(layout: str, dtype: Any) -> int:
    """Shared memory of one of `smem_packs` of a tile: a pack, or of cells one element."""
    return PACK if layout == "columns" else DTYPES[dtype_name(dtype)]


def resident_blocks(plan: Plan, dtype: Any, device: Limits) -> int:
    """Blocks of a cooperative `plan` that fit on the device at one time."""
    by_registers = 1 if DTYPES[dtype_name(dtype)] == 8 else 2
    return device.sms * min(by_registers, device.smem_per_sm // (shared_bytes(plan) + KIB))


def dtype_name(dtype: Any) -> str:
    # np.dtype and scalar types call their name differently; jnp.float32 has neither, but a dtype.
    name = getattr(getattr(dtype, "dtype", dtype), "name", None)
    name = name if isinstance(name, str) else getattr(dtype, "__name__", dtype)
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; valid dtypes: {', '.join(DTYPES)}")
    return name
