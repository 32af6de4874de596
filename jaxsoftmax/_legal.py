"""`Plan`, and the rules that make one legal: the twin of what the C++ handlers check."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

from . import _limits, _ops
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
CLUSTER_SMEM = 4 * KIB  # for the states that the blocks of a cluster send each other


@dataclasses.dataclass(frozen=True)
class Plan:
    """One choice of kernel. A group of `threads // rows_per_block` lanes of a block handles a row.

    `reg_packs` and `smem_packs` are the 16-byte packs a lane keeps in registers and in shared
    memory, over all inputs of the op. Shared memory without registers is a ring of slots that
    bulk copies fill (a slot is CHUNK packs a lane of every input).

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


def resident_blocks(plan: Plan, dtype: Any, device: Limits) -> int:
    """Blocks of a cooperative `plan` that fit on the device at one time."""
    by_registers = 1 if DTYPES[dtype_name(dtype)] == 8 else 2
    return device.sms * min(by_registers, device.smem_per_sm // (shared_bytes(plan) + KIB))


def check(plan: Plan, op: str, dtype: Any, n: Any, limits: str | Limits | None = None) -> None:
    """ValueError naming the limit, unless `plan` can run `op` on rows of n columns.

    The C++ handlers check the same rules; without limits, nothing is asked of a device.
    """
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
    _check_block(plan, need)
    if plan.path == "two_pass":
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
    if plan.bulk and known(n):
        piece = math.ceil(packs(n, dtype, LINE) / plan.splits)
        need(piece <= MAX_PIECE, f"a ring takes pieces of at most {MAX_PIECE} packs, got {piece}")
    if limits is not None:
        _check_device(plan, dtype, _limits.resolve(limits), need)


_Need: TypeAlias = Callable[[bool, str], None]


def _check_block(plan: Plan, need: _Need) -> None:
    threads, rows = plan.threads, plan.rows_per_block
    warps = threads % 32 == 0 and threads <= MAX_THREADS
    what = f"a power of two below 32 or a multiple of 32 up to {MAX_THREADS}"
    legal = _is_power_of_2(threads) if threads < 32 else warps
    need(legal, f"threads must be {what}, got {threads}")
    need(rows >= 1 and threads % rows == 0, f"rows_per_block must divide threads, got {rows}")
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


def _check_device(plan: Plan, dtype: str, device: Limits, need: _Need) -> None:
    name, have, largest = device.name, device.smem_per_block, device.max_cluster
    cluster = plan.splits if plan.path == "one_pass" else 1
    if device.kind == "cpu":
        what = "a cluster (splits of one_pass) or a ring (smem_packs without reg_packs)"
        need(cluster == 1 and not plan.bulk, f"{what} needs a GPU, got limits {name}")
    what = "a ring (smem_packs without reg_packs) needs bulk copies"
    need(largest > 0 or not plan.bulk, f"{what}, {name} has none: max_cluster = 0")
    what = f"needs a cluster of {cluster} blocks"
    need(cluster <= max(1, largest), f"{what}, {name} has max_cluster = {largest}")
    used = shared_bytes(plan)
    need(used <= have, f"needs {used} bytes of shared memory a block, {name} has {have}")
    if plan.path == "split_k" and plan.bulk:
        need(device.cooperative, f"needs a cooperative launch, {name} has cooperative = False")
        most = resident_blocks(plan, dtype, device)
        what = f"needs splits={plan.splits} co-resident blocks"
        need(plan.splits <= most, f"{what}, {name} holds {most} at one time")


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
