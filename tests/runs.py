"""How tests run an op: through its primitive, or its FFI target past Python, numpy to numpy."""

from __future__ import annotations

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


def run_native(
    op: str,
    *inputs: np.ndarray,
    reduced: int = 1,
    workspace: int | None = None,
    stats: bool = False,
    results: list | None = None,
    **plan: int,
) -> list[np.ndarray]:
    """The op's FFI target called directly with these plan fields: nothing in Python checks them.
    `results` replaces the types of what it is told to write, but for the workspace."""
    x = inputs[0]
    rows = x.shape[: max(x.ndim - reduced, 0)]
    if results is None:
        results = [jax.ShapeDtypeStruct(rows if OPS[op].reduces else x.shape, x.dtype)]
        results += [jax.ShapeDtypeStruct(rows, arithmetic(x.dtype))] * (2 if stats else 0)
    count = len(results)
    if plan["path"] == PATHS.index("split_k"):
        size = int(np.prod(rows)) * plan["splits"] * 8 if workspace is None else workspace
        results = [*results, jax.ShapeDtypeStruct((size,), np.uint32)]
    attribute = {name: np.int32(value) for name, value in plan.items()}
    with jax.enable_x64(x.dtype == np.float64):
        call = jax.ffi.ffi_call(f"jaxsoftmax.{op}", results)
        jitted = jax.jit(lambda *a: call(*a, plan=attribute, reduced=np.int32(reduced)))
        return [np.asarray(a) for a in jitted(*inputs)[:count]]
