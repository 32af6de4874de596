"""What a primitive becomes in a compiled program: the kernel, the kernel a device, or the formula.

The plan is made here, where the shape is final: after vmap, and under automatic sharding on the
shape of one device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import _ffi, _plan
from ._ops import Op

STATE_WORDS = 8  # uint32 words of one partial state in the workspace of split_k


# The decision: what a lowering emits. Pure functions, so that tests can walk the table.


def emission(*, served: bool, empty: bool, devices: str) -> str:
    """What to emit: "formula", "call" (the kernel on what it is given) or "partition".

    devices is "one" (also: every mesh axis is manual, so each device runs its own program), "many"
    under automatic sharding, or "opaque": many, where custom_partitioning cannot work. There the
    formula is right and shards like any jnp code.
    """
    if not served or empty or devices == "opaque":
        return "formula"
    return "call" if devices == "one" else "partition"


def device_kind(context: Any, exporting: bool) -> str:
    """The `devices` of emission(), from the lowering's axis context."""
    if isinstance(context, mlir.SPMDAxisContext):  # inside shard_map
        sizes = context.mesh.shape
        auto = [a for a in context.mesh.axis_names if a not in context.manual_axes]
        return "one" if all(sizes[a] == 1 for a in auto) else "opaque"
    count = getattr(context, "num_devices", 1)  # pmap's context has none: a program a device
    if count == 1:
        return "one"
    # The partitioner calls back into this process, which an exported program has left behind.
    known = context.device_assignment is not None and context.abstract_mesh is not None
    return "many" if known and not exporting else "opaque"


def limits_for(platform: str) -> _plan.Limits:
    """The limits to plan with; a GPU program lowered without a GPU suits the smallest one."""
    if platform == "cpu":
        return _plan.LIMITS["cpu"]
    return _plan.device_limits() or _plan.LIMITS["a100"]


def view(shape: Sequence[Any], axes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The array as [outer, n, inner]; axes that are not neighbours count all rows as outer."""
    n = _product(shape[a] for a in axes)
    first, last = len(shape) + axes[0], len(shape) + axes[-1]
    if last - first + 1 != len(axes):
        rest = [size for d, size in enumerate(shape) if d - len(shape) not in axes]
        return _product(rest), n, 1
    return _product(shape[:first]), n, _product(shape[last + 1 :])


def _product(sizes: Any) -> Any:
    # Not math.prod: symbolic sizes must stay symbolic and ints must stay ints.
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


# The lowering.


def results_of(op: Op, x: Any, axes: tuple[int, ...], stats: bool) -> list[Any]:
    """The types of an op's results, from its first operand's."""
    # update() keeps the mesh axes x varies over and its sharding; a new aval would lose them.
    row = row_type(x, axes)
    result = row if op.reduces else x.update(weak_type=False)
    return [result] + [row.update(dtype=arithmetic(x.dtype))] * (2 if stats else 0)


def row_type(x: Any, axes: tuple[int, ...]) -> Any:
    """The type of one number a row of x."""
    kept = [d for d in range(x.ndim) if d - x.ndim not in axes]
    spec = [*x.sharding.spec, *[None] * x.ndim]
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*(spec[d] for d in kept)))
    return x.update(shape=tuple(x.shape[d] for d in kept), sharding=sharding, weak_type=False)


def arithmetic(dtype: Any) -> Any:
    """The type of arithmetic, which statistics have."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _kernel(
    *operands: jax.Array,
    op: Op,
    axes: tuple[int, ...],
    path: _plan.PathLike,
    stats: bool,
    limits: _plan.Limits,
) -> list[jax.Array]:
    """The FFI call on the shape given here, which is a device's own under sharding."""
    x = operands[0]
    outer, n, inner = view(x.shape, axes)
    plan = _plan.plan(op.name, x.dtype, outer, n, inner, limits=limits, path=path)
    trailing = tuple(range(-len(axes), 0))
    rows, given = operands[: op.inputs], operands[op.inputs :]
    if axes != trailing:
        rows = tuple(jnp.moveaxis(a, axes, trailing) for a in rows)
    aval = jax.typeof(rows[0])
    results = results_of(op, aval, trailing, stats)
    if plan.path == "split_k":
        flat = NamedSharding(aval.sharding.mesh, PartitionSpec(None))
        words = outer * inner * (plan.splits * STATE_WORDS)
        results.append(aval.update(shape=(words,), dtype=np.dtype(np.uint32), sharding=flat))
    attributes = {name: np.int32(value) for name, value in plan.attributes().items()}
    call = jax.ffi.ffi_call(_ffi.target(op.name), results)
    found = list(call(*rows, *given, plan=attributes, reduced=np.int32(len(axes))))
    if axes != trailing and not op.reduces:
        found[0] = jnp.moveaxis(found[0], trailing, axes)
    return found[: 3 if stats else 1]


def _formula(*operands: jax.Array, op: Op, axes: tuple[int, ...], stats: bool) -> list[jax.Array]:
    result = op.formula(*operands, axes=axes)
    return [result, *op.stats_formula(operands[0], axes)] if stats else [result]


def _partitioned(
    *operands: jax.Array,
    kernel: Callable[..., list[jax.Array]],
    op: Op,
    axes: tuple[int, ...],
    stats: bool,
) -> list[jax.Array]:
    """The kernel under automatic sharding: rows stay where they are, a row is gathered whole."""
    rank = operands[0].ndim
    whole = {rank + a for a in axes}
    names = [f"d{d}" for d in range(rank)]
    of_elements, of_rows = (
        " ".join(names),
        " ".join(n for d, n in enumerate(names) if d not in whole),
    )
    # Which operands and results have one number a row.
    takes = [False] * op.inputs + [True] * op.given
    gives = [op.reduces] + [True] * (2 if stats else 0)

    def shardings(mesh: Any, like: Any, a_row: bool) -> tuple[list[NamedSharding], ...]:
        spec = [*like.sharding.spec, *[None] * rank][: rank - (len(whole) if a_row else 0)]
        kept = iter(spec if a_row else [s for d, s in enumerate(spec) if d not in whole])
        rows = [None if d in whole else next(kept) for d in range(rank)]
        short = [s for d, s in enumerate(rows) if d not in whole]
        both = [NamedSharding(mesh, PartitionSpec(*s)) for s in (rows, short)]
        return [both[r] for r in takes], [both[r] for r in gives]

    def local(*pieces: jax.Array) -> list[jax.Array]:
        # One device's program: without the mesh of the caller, whose sharding annotations the
        # partitioner, already running, would leave in it.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return kernel(*pieces)

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        # Nothing else keeps the partitioner from handing over pieces of a row.
        operands, results = shardings(mesh, result_shapes[0], op.reduces)
        return mesh, local, results, tuple(operands)

    def infer(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        return shardings(mesh, arg_shapes[0], False)[1]

    run = custom_partitioning(_positional(kernel, len(operands)))
    rule = [", ".join(of_rows if r else of_elements for r in side) for side in (takes, gives)]
    run.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=" -> ".join(rule),
        need_replication_factors=tuple(f"d{d}" for d in sorted(whole)),
    )
    return run(*operands)


def _positional(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """f with `count` named parameters: custom_partitioning resolves arguments by signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [inspect.Parameter(f"operand_{i}", kind) for i in range(count)]

    def g(*operands: Any) -> Any:
        return f(*operands)

    g.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return g


def lowering(op: Op, platform: str | None) -> Callable[..., Any]:
    def rule(
        ctx: Any, *operands: Any, axes: tuple[int, ...], path: _plan.PathLike, stats: bool
    ) -> Any:
        aval = ctx.avals_in[0]
        module = ctx.module_context
        exporting = module.lowering_parameters.for_export
        how = emission(
            served=platform is not None and op.kernel and aval.dtype.name in _plan.DTYPES,
            empty=any(isinstance(size, int) and size == 0 for size in aval.shape),
            devices=device_kind(module.axis_context, exporting),
        )
        if how == "formula":
            f: Callable[..., Any] = partial(_formula, op=op, axes=axes, stats=stats)
        else:
            limits = limits_for(platform or "")
            f = partial(_kernel, op=op, axes=axes, path=path, stats=stats, limits=limits)
            if how == "partition":
                # Sharding changes the rows only: refuse a forced plan here, not inside XLA.
                _, n, _ = view(aval.shape, axes)
                _plan.plan(op.name, aval.dtype, None, n, limits=limits, path=path)
                f = partial(_partitioned, kernel=f, op=op, axes=axes, stats=stats)
        return mlir.lower_fun(f, multiple_results=True)(ctx, *operands)

    return rule
