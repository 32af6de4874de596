"""What a primitive becomes in a compiled program: the kernel, the kernel a device, or the formula.

The plan is made here, where the shape is final: after vmap, and under automatic sharding on the
shape of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import _ffi, _plan
from ._ops import Loading, Op
from ._partition import partitioned

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


def in_mesh(ctx: Any) -> Any:
    """The lowering context, with the mesh of set_mesh where no operand's sharding has told it."""
    context, mesh = ctx.module_context.axis_context, jax.sharding.get_abstract_mesh()
    if getattr(context, "abstract_mesh", mesh) is not None or mesh.size != context.num_devices:
        return ctx
    context = dataclasses.replace(context, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=context))


def limits_for(platform: str) -> _plan.Limits:
    """The limits to plan with; a GPU program lowered without a GPU suits the smallest one."""
    if platform == "cpu":
        return _plan.LIMITS["cpu"]
    return _plan.device_limits() or _plan.LIMITS["a100"]


def view(shape: Sequence[Any], axes: tuple[int, ...]) -> tuple[Any, Any, Any, bool]:
    """The array as [outer, n, inner], and whether its rows lie side by side, where inner is 1.

    Dimensions of size 1 lie anywhere. inner counts what is kept after the last reduced dimension,
    outer what is kept before it, also between two that are reduced.
    """
    n = _product(shape[a] for a in axes)
    reduced = [a % len(shape) for a in axes if not _is_one(shape[a])]
    kept = [d for d, size in enumerate(shape) if d - len(shape) not in axes and not _is_one(size)]
    contiguous = not reduced or not kept or kept[-1] < reduced[0]
    last = len(shape) if contiguous else reduced[-1]
    outer, inner = (_product(shape[d] for d in kept if (d > last) == after) for after in (0, 1))
    return outer, n, inner, contiguous


def _product(sizes: Any) -> Any:
    # Not math.prod: symbolic sizes must stay symbolic and ints must stay ints.
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1  # a symbolic size may be


# The lowering.


@dataclasses.dataclass(frozen=True)
class Call:
    """An op and a primitive's parameters."""

    op: Op
    axes: tuple[int, ...]
    path: _plan.PathLike
    stats: bool
    loading: Loading

    def served(self, avals: Sequence[Any]) -> bool:
        """Whether a kernel takes rows of these dtypes and of so many dimensions."""
        dims = sum(not _is_one(size) for size in avals[0].shape)
        known = self._dtypes(avals) <= _plan.DTYPES.keys()
        return self.op.kernel and known and dims <= _plan.MAX_DIMS

    def results(self, x: Any) -> list[Any]:
        """The types of the results, from the first operand's."""
        # update() keeps the mesh axes x varies over and its sharding; a new aval would lose them.
        row = row_type(x, self.axes)
        dtype = jnp.dtype(self.loading.dtype or x.dtype)
        result = (row if self.op.reduces else x).update(dtype=dtype, weak_type=False)
        return [result] + [row.update(dtype=arithmetic(x.dtype))] * (2 if self.stats else 0)

    def plan(self, avals: Sequence[Any], limits: _plan.Limits, *, rows: bool) -> _plan.Plan:
        """The plan of a call on such operands, or without `rows` of any number of such rows."""
        outer, n, inner, _ = view(avals[0].shape, self.axes)
        dtypes = self._dtypes(avals)
        return _plan.plan(
            self.op.name,
            dtypes.pop() if len(dtypes) == 1 else "float32",
            outer if rows else None,
            n,
            inner,
            layout=self.layout(avals),
            limits=limits,
            path=self.path,
        )

    def layout(self, avals: Sequence[Any]) -> str:
        """How the rows lie, as plan() asks; a mask of its own pattern along them makes cells."""
        shape, axes = avals[0].shape, self.axes
        plain = self.loading.plain and len(self._dtypes(avals)) == 1
        mask = self.loading.split(avals)[1]
        if mask is not None:
            sizes = (*[1] * (len(shape) - mask.ndim), *mask.shape)
            spread = {_is_one(sizes[a]) for a in axes if not _is_one(shape[a])}
        if view(shape, axes)[3] and (mask is None or len(spread) < 2):
            return "rows" if plain else "loaded"
        if plain and not all(isinstance(size, int) for size in shape):
            return "columns"  # a size that is 1 in the end may make it so: room for packs
        long = [d - len(shape) for d, size in enumerate(shape) if not _is_one(size)]
        places = [i for i, a in enumerate(long) if a in axes]
        neighbours = places == list(range(places[0], places[0] + len(places)))
        return "columns" if plain and neighbours else "cells"

    def _dtypes(self, avals: Sequence[Any]) -> set[str]:
        inputs = {x.dtype.name for x in avals[: self.op.inputs]}
        return inputs | {self.loading.dtype or avals[0].dtype.name}

    def kernel(self, *operands: jax.Array, limits: _plan.Limits) -> list[jax.Array]:
        """The FFI call on the shapes given here, which are a device's own under sharding."""
        avals = [jax.typeof(a) for a in operands]
        plan = self.plan(avals, limits, rows=True)
        results = self.results(avals[0])
        if plan.path == "split_k":
            outer, _, inner, _ = view(avals[0].shape, self.axes)
            flat = NamedSharding(avals[0].sharding.mesh, PartitionSpec(None))
            words = outer * inner * (plan.splits * STATE_WORDS)
            workspace = avals[0].update(shape=(words,), dtype=np.dtype(np.uint32), sharding=flat)
            results.append(workspace)
        found = jax.ffi.ffi_call(_ffi.target(self.op.name), results)(
            *operands,
            plan={name: np.int32(value) for name, value in plan.attributes().items()},
            axes=np.int64(sum(1 << (-a - 1) for a in self.axes)),
            loading={
                "masked": np.int32(self.loading.masked),
                "scaled": np.int32(self.loading.scaled),
                "causal": np.int32(self.loading.causal),
                "columns": np.int32(self.layout(avals) in ("columns", "cells")),
            },
        )
        return list(found)[: 3 if self.stats else 1]

    def formula(self, *operands: jax.Array) -> list[jax.Array]:
        result = self.op.formula(*operands, axes=self.axes, loading=self.loading)
        if not self.stats:
            return [result]
        return [result, *self.op.stats_formula(*operands, axes=self.axes, loading=self.loading)]


def row_type(x: Any, axes: tuple[int, ...]) -> Any:
    """The type of one number a row of x."""
    kept = [d for d in range(x.ndim) if d - x.ndim not in axes]
    spec = [*x.sharding.spec, *[None] * x.ndim]
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*(spec[d] for d in kept)))
    return x.update(shape=tuple(x.shape[d] for d in kept), sharding=sharding, weak_type=False)


def arithmetic(dtype: Any) -> Any:
    """The type of arithmetic, which statistics and scales have."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def lowering(op: Op, platform: str | None) -> Callable[..., Any]:
    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        call, ctx = Call(op, **params), in_mesh(ctx)
        module = ctx.module_context
        exporting = module.lowering_parameters.for_export
        how = emission(
            served=platform is not None and call.served(ctx.avals_in),
            empty=any(isinstance(size, int) and size == 0 for size in ctx.avals_in[0].shape),
            devices=device_kind(module.axis_context, exporting),
        )
        f: Callable[..., Any] = call.formula
        if how != "formula":
            limits = limits_for(platform or "")
            f = partial(call.kernel, limits=limits)
            if how == "partition":
                # Sharding changes the rows only: refuse a forced plan here, not inside XLA.
                call.plan(ctx.avals_in, limits, rows=False)
                f = partial(partitioned, call=call, limits=limits)
        return mlir.lower_fun(f, multiple_results=True)(ctx, *operands)

    return rule
