"""The only file that knows JAX's machinery: one primitive an op, built from the op table.

Binding happens at the user's rank; the plan is made inside the lowering, where the shape is final.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import _ffi, _plan
from ._ops import OPS, Op

STATE_WORDS = 8  # uint32 words of one partial state in the workspace of split_k


def bind(name: str, *operands: jax.Array, axes: tuple[int, ...], path: _plan.PathLike) -> jax.Array:
    """Run an op's primitive on operands of one shape; axes are negative and sorted."""
    return PRIMITIVES[name].bind(*_same_vma(operands), axes=axes, path=path)


def _same_vma(operands: Sequence[Any]) -> list[Any]:
    """Inside shard_map, mark all operands as varying over the mesh axes that any varies over."""
    varying = [_varying(jax.typeof(x)) for x in operands]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(union - v), to="varying") if v != union else x
        for x, v in zip(operands, varying, strict=True)
    ]


def _varying(aval: Any) -> frozenset[Any]:
    # `vma` until jax 0.9, one field of `manual_axis_type` since.
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(aval.vma if manual is None else manual.varying)


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


def _kernel(
    *operands: jax.Array, op: Op, axes: tuple[int, ...], path: _plan.PathLike, limits: _plan.Limits
) -> jax.Array:
    """The FFI call on the shape given here, which is a device's own under sharding."""
    x = operands[0]
    outer, n, inner = view(x.shape, axes)
    plan = _plan.plan(op.name, x.dtype, outer, n, inner, limits=limits, path=path)
    reduced = len(axes)
    trailing = tuple(range(-reduced, 0))
    if axes != trailing:
        operands = tuple(jnp.moveaxis(a, axes, trailing) for a in operands)
    aval = jax.typeof(operands[0])
    results = [aval.update(weak_type=False)]
    if plan.path == "split_k":
        flat = NamedSharding(aval.sharding.mesh, PartitionSpec(None))
        words = outer * inner * (plan.splits * STATE_WORDS)
        results.append(aval.update(shape=(words,), dtype=np.dtype(np.uint32), sharding=flat))
    attributes = {name: np.int32(value) for name, value in plan.attributes().items()}
    call = jax.ffi.ffi_call(_ffi.target(op.name), results)
    y = call(*operands, plan=attributes, reduced=np.int32(reduced))[0]
    return y if axes == trailing else jnp.moveaxis(y, trailing, axes)


def _partitioned(
    *operands: jax.Array, kernel: Callable[..., jax.Array], axes: tuple[int, ...]
) -> jax.Array:
    """The kernel under automatic sharding: rows stay where they are, a row is gathered whole."""
    rank = operands[0].ndim
    whole = {rank + a for a in axes}

    def sharding(mesh: Any, like: Any) -> NamedSharding:
        spec = [*like.sharding.spec, *[None] * rank][:rank]
        return NamedSharding(
            mesh, PartitionSpec(*(None if d in whole else s for d, s in enumerate(spec)))
        )

    def local(*pieces: jax.Array) -> jax.Array:
        # One device's program: without the mesh of the caller, whose sharding annotations the
        # partitioner, already running, would leave in it.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return kernel(*pieces)

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        # Nothing else keeps the partitioner from handing over pieces of a row.
        rows = sharding(mesh, result_shape)
        return mesh, local, rows, (rows,) * len(operands)

    def infer(mesh: Any, arg_shapes: Any, result_shape: Any) -> NamedSharding:
        return sharding(mesh, arg_shapes[0])

    run = custom_partitioning(_positional(kernel, len(operands)))
    dims = " ".join(f"d{d}" for d in range(rank))
    run.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=f"{', '.join([dims] * len(operands))} -> {dims}",
        need_replication_factors=tuple(f"d{d}" for d in sorted(whole)),
    )
    return run(*operands)


def _positional(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """f with `count` named parameters: custom_partitioning resolves arguments by signature."""
    return (lambda a: f(a)) if count == 1 else (lambda a, b: f(a, b))


def _lowering(op: Op, platform: str | None) -> Callable[..., Any]:
    def rule(ctx: Any, *operands: Any, axes: tuple[int, ...], path: _plan.PathLike) -> Any:
        aval = ctx.avals_in[0]
        module = ctx.module_context
        exporting = module.lowering_parameters.for_export
        how = emission(
            served=platform is not None and aval.dtype.name in _plan.DTYPES,
            empty=any(isinstance(size, int) and size == 0 for size in aval.shape),
            devices=device_kind(module.axis_context, exporting),
        )
        if how == "formula":
            f: Callable[..., Any] = partial(op.formula, axes=axes)
        else:
            limits = limits_for(platform or "")
            f = partial(_kernel, op=op, axes=axes, path=path, limits=limits)
            if how == "partition":
                # Sharding changes the rows only: refuse a forced plan here, not inside XLA.
                _, n, _ = view(aval.shape, axes)
                _plan.plan(op.name, aval.dtype, None, n, limits=limits, path=path)
                f = partial(_partitioned, kernel=f, axes=axes)
        return mlir.lower_fun(f, multiple_results=False)(ctx, *operands)

    return rule


# The primitives.


def _build(op: Op) -> Primitive:
    primitive = Primitive(f"jaxsoftmax_{op.name}")

    jitted = jax.jit(
        lambda *operands, axes, path: primitive.bind(*operands, axes=axes, path=path),
        static_argnames=("axes", "path"),
    )

    @primitive.def_impl
    def impl(*operands: Any, axes: tuple[int, ...], path: _plan.PathLike) -> Any:
        with jax.disable_jit(False):  # under disable_jit this would call itself for ever
            return jitted(*operands, axes=axes, path=path)

    @primitive.def_abstract_eval
    def abstract(x: Any, *others: Any, axes: tuple[int, ...], path: _plan.PathLike) -> Any:
        for other in others:
            if (other.shape, other.dtype) != (x.shape, x.dtype):
                want, got = x.str_short(), other.str_short()
                raise TypeError(f"{op.name} takes arrays of one shape and dtype: {want}, {got}")
        # update() keeps the mesh axes x varies over and its sharding; a new aval would lose them.
        # On explicit meshes, an operand that vmap had to broadcast is sharded the least.
        like = max((x, *others), key=lambda aval: sum(s is not None for s in aval.sharding.spec))
        return like.update(weak_type=False)

    def batch(args: Any, dims: Any, *, axes: tuple[int, ...], path: _plan.PathLike) -> Any:
        size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
        front = [
            jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
            for a, d in zip(args, dims, strict=True)
        ]
        return bind(op.name, *front, axes=axes, path=path), 0

    def runner(axes: tuple[int, ...], path: _plan.PathLike) -> Callable[..., jax.Array]:
        def run(name: str, *operands: jax.Array) -> jax.Array:
            asked = path if name == op.name else _plan.for_gradient(path)
            return bind(name, *operands, axes=axes, path=asked)

        return run

    def jvp(
        primals: Any, tangents: Any, *, axes: tuple[int, ...], path: _plan.PathLike
    ) -> tuple[Any, Any]:
        out = bind(op.name, *primals, axes=axes, path=path)
        given = [None if isinstance(t, ad.Zero) else t for t in tangents]
        return out, op.jvp(runner(axes, path), out, primals, given, axes)

    linear, dual = op.linear or 0, op.transpose

    def transpose(ct: Any, *primals: Any, axes: tuple[int, ...], path: _plan.PathLike) -> Any:
        assert dual is not None
        result: list[Any] = [None] * op.inputs
        if isinstance(ct, ad.Zero):
            result[linear] = ad.Zero(primals[linear].aval)
        else:
            result[linear] = dual(runner(axes, path), ct, primals)
        return result

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    if dual is not None:
        ad.primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, _lowering(op, None))
    for platform in sorted(_ffi.PLATFORMS):
        mlir.register_lowering(primitive, _lowering(op, platform), platform=platform)
    if _ffi.PLATFORMS:
        _ffi.require_devices(primitive)
    return primitive


PRIMITIVES = {name: _build(op) for name, op in OPS.items()}
