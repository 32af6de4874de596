"""How tests run an op: through its primitive, or its FFI target past Python, numpy to numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from contracts import arithmetic
from oracle import Expected

from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import PATHS
from jaxsoftmax._primitive import bind


def plain_operands(op: str, x: np.ndarray) -> list[np.ndarray]:
    """x for each input, and ones for what is given of a row (all float32 or float64)."""
    return [x] * OPS[op].inputs + [np.ones(x.shape[:-1], x.dtype)] * OPS[op].given


def run(
    op: str, *inputs: np.ndarray, path=None, axes: tuple[int, ...] = (-1,), stats: bool = False
):
    """The op through its primitive, under jit, numpy to numpy; with `stats` (result, max, sum)."""
    ((result, *rest),) = run_each(op, *inputs, paths=[path], axes=axes, stats=stats)
    return (result, *rest) if stats else result


def run_each(
    op: str, *inputs: np.ndarray, paths, axes: tuple[int, ...] = (-1,), stats: bool = False
) -> list[tuple[np.ndarray, ...]]:
    """The results of each path, by one program: compiling is what takes a test its time."""

    def program(*operands):
        each = [bind(op, *operands, axes=axes, path=path, stats=stats) for path in paths]
        return each if stats else [(result,) for result in each]

    with jax.enable_x64(inputs[0].dtype == np.float64):
        return jax.tree.map(np.asarray, jax.jit(program)(*inputs))


def check_each(op: str, inputs, expected: Expected, paths, stats: bool | None = None) -> None:
    """Each path's result against the contract, and its statistics if the op has any. The same
    bits as another path's are checked once."""
    stats, checked = OPS[op].stats if stats is None else stats, []
    for path, found in zip(paths, run_each(op, *inputs, paths=paths, stats=stats), strict=True):
        if any(all(map(same_bits, found, other)) for other in checked):
            continue
        checked.append(found)
        try:
            expected.check(*found)
        except AssertionError as error:
            error.add_note(f"path: {path}")
            raise


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


def run_native(op: str, *operands: np.ndarray, **options: Any) -> list[np.ndarray]:
    """The op's FFI target called directly; the options are native()'s."""
    (found,) = run_native_each(op, *operands, each=[options])
    return found


def run_native_each(
    op: str, *operands: np.ndarray, each: Sequence[dict[str, Any]]
) -> list[list[np.ndarray]]:
    """The same several times, by one program."""
    with jax.enable_x64(operands[0].dtype == np.float64):
        calls = [native(op, operands[0], **options) for options in each]
        return jax.tree.map(np.asarray, jax.jit(lambda *a: [f(*a) for f in calls])(*operands))


def native(
    op: str,
    x: np.ndarray,
    *,
    axes: tuple[int, ...] = (-1,),
    masked: bool = False,
    scaled: bool = False,
    causal: bool = False,
    columns: bool = False,
    dtype: np.dtype | None = None,
    workspace: int | None = None,
    stats: bool = False,
    results: list | None = None,
    **plan: int,
) -> Callable[..., list[jax.Array]]:
    """A call of the op's FFI target with these plan fields: nothing in Python checks them.

    A mask and a scale are the last operands; `dtype` is that of the result. `results` replaces the
    types of what it is told to write, but for the workspace.
    """
    rows = tuple(size for d, size in enumerate(x.shape) if d - x.ndim not in axes)
    if results is None:
        shape = rows if OPS[op].reduces else x.shape
        results = [jax.ShapeDtypeStruct(shape, x.dtype if dtype is None else dtype)]
        results += [jax.ShapeDtypeStruct(rows, arithmetic(x.dtype))] * (2 if stats else 0)
    count = len(results)
    if plan["path"] == PATHS.index("split_k"):
        size = int(np.prod(rows)) * plan["splits"] * 8 if workspace is None else workspace
        results = [*results, jax.ShapeDtypeStruct((size,), np.uint32)]
    loading = {"masked": masked, "scaled": scaled, "causal": causal, "columns": columns}
    attributes = {
        "plan": {name: np.int32(value) for name, value in plan.items()},
        "axes": np.int64(sum(1 << -axis - 1 for axis in axes)),
        "loading": {name: np.int32(value) for name, value in loading.items()},
    }
    call = jax.ffi.ffi_call(f"jaxsoftmax.{op}", results)
    return lambda *operands: call(*operands, **attributes)[:count]
