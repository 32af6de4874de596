"""`Plan`, and the rules that make one legal: the twin of what the C++ handlers check."""

from __future__ import annotations

import dataclasses
import math
from numbers import Integral
from typing import Any, TypeGuard

from . import _limits, _ops
from ._limits import KIB, Limits

PATHS = ("one_pass", "two_pass", "split_k")  # the order is the C++ enum's
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

PACK = 16  # bytes of one vector load
STATIC_SMEM = 2 * KIB  # shared memory every kernel may need beside its packs
MAX_THREADS = 512
REGISTERS = (1, 2, 4, 8, 16, 32)  # packs of each input a lane can keep in registers
MAX_SPLITS = 65535


@dataclasses.dataclass(frozen=True)
class Plan:
    """One choice of kernel. A group of `threads // rows_per_block` lanes handles a row.

    `reg_packs` and `smem_packs` are the 16-byte packs a lane keeps in registers and in shared
    memory, over all inputs of the op. On a CPU, `threads` only scales the scratch of one_pass.
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


def packs(n: int, dtype: Any) -> int:
    """Packs a row of n columns touches; a length that is no multiple may start anywhere."""
    each = PACK // DTYPES[dtype_name(dtype)]
    return n // each if n % each == 0 else math.ceil((n + each - 1) / each)


def columns(held: int, dtype: Any, n: int) -> int:
    """Columns that fit in `held` packs, for rows of the alignment that n implies."""
    each = PACK // DTYPES[dtype_name(dtype)]
    return held * each if n % each == 0 else held * each - each + 1


def check(plan: Plan, op: str, dtype: Any, n: Any, limits: str | Limits | None = None) -> None:
    """ValueError naming the limit, unless `plan` can run `op` on rows of n columns.

    The C++ handlers check the same rules; without limits, no device's shared memory is asked.
    """
    k = find_op(op).inputs
    dtype = dtype_name(dtype)
    held = plan.reg_packs + plan.smem_packs
    bare = dataclasses.replace(plan, why="")

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"illegal plan {bare!s} for {op}: {what}")

    if plan.path not in PATHS:
        raise ValueError(f"unknown path {plan.path!r}; valid paths: {', '.join(PATHS)}")
    for field, value in plan.attributes().items():
        need(known(value) and value >= 0, f"{field} must be an int >= 0, got {value!r}")
    threads, rows = plan.threads, plan.rows_per_block
    legal = (
        _is_power_of_2(threads) if threads < 32 else threads % 32 == 0 and threads <= MAX_THREADS
    )
    what = f"a power of two below 32 or a multiple of 32 up to {MAX_THREADS}"
    need(legal, f"threads must be {what}, got {threads}")
    need(rows >= 1 and threads % rows == 0, f"rows_per_block must divide threads, got {rows}")
    narrow = _is_power_of_2(plan.width) and plan.width <= 32
    need(rows == 1 or narrow, f"rows that share a block take 1 to 32 lanes each, not {plan.width}")
    need(1 <= plan.splits <= MAX_SPLITS, f"splits must be 1 to {MAX_SPLITS}, got {plan.splits}")
    need(plan.splits == 1 or plan.path == "split_k", "only split_k has splits")
    if plan.path != "one_pass":
        need(held == 0, f"{plan.path} keeps no packs on chip, got {held}")
        need(rows == 1 or plan.path != "split_k", f"split_k takes rows_per_block=1, got {rows}")
        return
    each, rest = divmod(plan.reg_packs, k)
    legal = rest == 0 and each in REGISTERS and plan.reg_packs <= 32
    kept = ", ".join(str(k * r) for r in REGISTERS if k * r <= 32)
    need(legal, f"reg_packs must be one of {kept}, got {plan.reg_packs}")
    need(plan.smem_packs % k == 0, f"smem_packs must be a multiple of {k}, got {plan.smem_packs}")
    shared = threads * plan.smem_packs * PACK
    need(shared < 2**31, f"smem_packs of all threads must be < 2 GiB, got {plan.smem_packs}")
    need(rows == 1 or plan.smem_packs == 0, "rows that share a block have no shared memory")
    most = MAX_THREADS if each <= 4 else MAX_THREADS // 2
    need(threads <= most, f"{plan.reg_packs} packs in registers allow {most} threads")
    if not known(n):
        raise ValueError("plan one_pass needs a known number of columns, got a symbolic one")
    capacity = plan.width * (held // k)
    if packs(n, dtype) > capacity:
        most = columns(capacity, dtype, n)
        raise ValueError(f"plan one_pass holds {most} columns of {dtype} {op}, got {n}")
    if limits is not None:
        device = _limits.resolve(limits)
        used = shared + STATIC_SMEM
        have = device.smem_per_block
        need(used <= have, f"needs {used} bytes of shared memory a block, {device.name} has {have}")


def find_op(op: str) -> _ops.Op:
    if op not in _ops.OPS:
        raise ValueError(f"unknown op {op!r}; valid ops: {', '.join(_ops.OPS)}")
    return _ops.OPS[op]


def dtype_name(dtype: Any) -> str:
    # np.dtype and scalar types call their name differently; jnp.float32 has neither, but a dtype.
    name = getattr(getattr(dtype, "dtype", dtype), "name", None)
    name = name if isinstance(name, str) else getattr(dtype, "__name__", dtype)
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; valid dtypes: {', '.join(DTYPES)}")
    return name


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
