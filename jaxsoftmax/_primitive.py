"""One primitive an op, built from the op table: types, batching, derivatives.

With _lowering.py, _partition.py and _batching.py the only place that knows JAX's machinery. Binding
happens at the user's rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import _ffi, _plan
from ._batching import batched
from ._lowering import Call, arithmetic, lowering, row_type
from ._ops import EVERY, Loading, Op

_PLAIN = Loading()
MIXABLE = {"float16", "bfloat16", "float32"}


def bind(
    name: str,
    *operands: jax.Array,
    axes: tuple[int, ...],
    path: _plan.PathLike,
    stats: bool = False,
    loading: Loading = _PLAIN,
) -> Any:
    """Run an op's primitive; axes are negative and sorted. With `stats`, (result, max, sum)."""
    found = PRIMITIVES[name].bind(
        *same_vma(operands), axes=axes, path=path, stats=stats, loading=loading
    )
    return tuple(found) if stats else found[0]


def same_vma(operands: Sequence[Any]) -> list[Any]:
    """Inside shard_map, mark all operands as varying over the mesh axes that any varies over."""
    sets = [varying(jax.typeof(x)) for x in operands]
    union = frozenset().union(*sets)
    return [
        jax.lax.pcast(x, tuple(union - v), to="varying") if v != union else x
        for x, v in zip(operands, sets, strict=True)
    ]


def varying(aval: Any) -> frozenset[Any]:
    """The mesh axes an array varies over, as shard_map's types say."""
    # `vma` until jax 0.9, one field of `manual_axis_type` since.
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(aval.vma if manual is None else manual.varying)


def _build(op: Op) -> Primitive:
    primitive = Primitive(f"jaxsoftmax_{op.name}")
    primitive.multiple_results = True

    jitted = jax.jit(
        lambda *operands, **params: primitive.bind(*operands, **params),
        static_argnames=("axes", "path", "stats", "loading"),
    )

    @primitive.def_impl
    def impl(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # under disable_jit this would call itself for ever
            return jitted(*operands, **params)

    @primitive.def_abstract_eval
    def abstract(*operands: Any, **params: Any) -> Any:
        call = Call(op, **params)
        _check_types(call, operands)
        own, _, _ = call.loading.split(operands)
        return call.results(own[0].update(sharding=_sharding(call, own)))

    def batch(args: Any, dims: Any, *, axes: Any, loading: Loading, **params: Any) -> Any:
        operands, axes, at, at_row = batched(op, args, dims, axes, loading)
        found = primitive.bind(*same_vma(operands), axes=axes, loading=loading, **params)
        return found, [at_row if op.reduces else at, at_row, at_row][: len(found)]

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        call = Call(op, **params)
        given = [None if isinstance(t, ad.Zero) else t for t in tangents]
        if op.linear is None:
            return _jvp_of_x(call, primals, given)
        return [_again(call, primals)], [_jvp_of_linear(call, primals, given)]

    def transpose(cts: Any, *operands: Any, **params: Any) -> Any:
        assert op.transpose is not None and op.linear is not None
        call = Call(op, **params)
        result: list[Any] = [None] * len(operands)
        aval = operands[op.linear].aval
        if isinstance(cts[0], ad.Zero):
            result[op.linear] = ad.Zero(aval)
        else:
            own, *_ = call.loading.split(operands)
            result[op.linear] = op.transpose(_runner(call, operands, aval.dtype), own, cts[0])
        return result

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    if op.transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, lowering(op, None))
    if op.kernel:
        for platform in sorted(_ffi.PLATFORMS):
            mlir.register_lowering(primitive, lowering(op, platform), platform=platform)
        if _ffi.PLATFORMS:
            _ffi.require_devices(primitive)
    return primitive


# Types.


def _check_types(call: Call, operands: Sequence[Any]) -> None:
    op, loading, x = call.op, call.loading, operands[0]
    own = op.inputs + op.given
    if len(operands) != own + loading.extra:
        raise TypeError(f"{op.name} takes {own + loading.extra} operands, got {len(operands)}")
    dtypes = {x.dtype.name, loading.dtype or x.dtype.name}
    if len(dtypes) > 1 and not dtypes <= MIXABLE:
        raise TypeError(f"{op.name} has no result of {loading.dtype} for {x.dtype.name}")
    for i, other in enumerate(operands):
        shape, dtype = x.shape, arithmetic(x.dtype)
        if i < op.inputs:
            dtype = other.dtype if {x.dtype.name, other.dtype.name} <= MIXABLE else x.dtype
        elif i < own:
            shape = row_type(x, call.axes).shape
            dtype = x.dtype if op.pulled and i == own - 1 else dtype
        else:
            sizes = zip(reversed(x.shape), reversed(other.shape), strict=False)
            fits = other.ndim <= x.ndim and all(size in (1, full) for full, size in sizes)
            shape = other.shape if fits else shape
            dtype = jnp.dtype(bool) if loading.masked and i == own else dtype
        if (other.shape, other.dtype) != (shape, dtype):
            want = x.update(shape=shape, dtype=dtype, sharding=None).str_short()
            raise TypeError(f"{op.name} takes for operand {i} {want}, got {other.str_short()}")


def _sharding(call: Call, own: Sequence[Any]) -> NamedSharding:
    """On explicit meshes, that of the operand that is sharded most: one that vmap had to broadcast
    is sharded the least."""
    kept = [d for d in range(own[0].ndim) if d - own[0].ndim not in call.axes]

    def spec(i: int) -> list[Any]:
        found: list[Any] = [None] * own[0].ndim
        dims = range(own[0].ndim) if i < call.op.inputs else kept
        for d, names in zip(dims, own[i].sharding.spec, strict=False):  # a spec may be shorter
            found[d] = names
        return found

    most = max(map(spec, range(len(own))), key=lambda names: sum(n is not None for n in names))
    return NamedSharding(own[0].sharding.mesh, PartitionSpec(*most))


# Derivatives.


def _runner(call: Call, operands: Sequence[Any], dtype: Any) -> Callable[..., jax.Array]:
    """Runs another op with the call's mask and scale, for a result of a dtype."""
    extra = operands[call.op.inputs + call.op.given :]

    def run(name: str, *operands: jax.Array) -> jax.Array:
        path = call.path if name == call.op.name else _plan.for_gradient(call.path)
        loading = call.loading.to(dtype, operands[0].dtype)
        return bind(name, *operands, *extra, axes=call.axes, path=path, loading=loading)

    return run


def _again(call: Call, operands: Sequence[Any], stats: bool = False) -> Any:
    """Runs the call's own op."""
    return bind(
        call.op.name, *operands, axes=call.axes, path=call.path, stats=stats, loading=call.loading
    )


def _jvp_of_x(call: Call, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Results and tangents of an op of x. The maximum counts as a constant of its row: statistics
    are used together, and their tangents agree in the end."""
    op, x, x_dot = call.op, primals[0], tangents[0]
    assert op.residuals is not None and op.tangent is not None
    found = _again(call, primals, stats=op.stats)
    result, *rest = found if op.stats else (found,)
    parts = _along_others(call, primals, tangents, but=0)
    if x_dot is not None:
        run = _runner(call, primals, result.dtype)
        parts.append(op.tangent(run, op.residuals(result, x, rest), x_dot))
    if not call.stats:
        return [result], [_total(parts)]
    top, total = rest
    logarithm = dataclasses.replace(
        call, op=EVERY["logsumexp"], loading=dataclasses.replace(call.loading, dtype=None)
    )
    moved = _along_others(logarithm, primals, tangents, but=0)
    if x_dot is not None:
        moved.append(_runner(call, primals, x.dtype)("logsumexp_jvp", x_dot, x, top, total))
    moved = total * _total(moved).astype(total.dtype)
    still = ad.Zero(jax.typeof(top).to_tangent_aval())
    return [result, top, total], [_total(parts), still, moved]


def _jvp_of_linear(call: Call, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangent of an op that is linear in one operand: itself along that one, its formula's
    derivative along the others."""
    linear = call.op.linear
    assert linear is not None
    parts = _along_others(call, primals, tangents, but=linear)
    if tangents[linear] is not None:
        operands = list(primals)
        operands[linear] = tangents[linear]
        parts.append(_again(call, operands))
    return _total(parts)


def _along_others(
    call: Call, primals: Sequence[Any], tangents: Sequence[Any], *, but: int
) -> list[Any]:
    """The derivative of the formula along all operands that move, but one; nothing if none does."""
    moving = [i for i, t in enumerate(tangents) if t is not None and i != but]

    def formula(*values: Any) -> Any:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return call.op.formula(*operands, axes=call.axes, loading=call.loading)

    if not moving:
        return []
    return [jax.jvp(formula, [primals[i] for i in moving], [tangents[i] for i in moving])[1]]


def _total(parts: Sequence[Any]) -> Any:
    return sum(parts[1:], parts[0])


PRIMITIVES = {name: _build(op) for name, op in EVERY.items()}
