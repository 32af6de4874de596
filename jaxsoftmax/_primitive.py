"""One primitive an op, built from the op table: types, batching, derivatives.

With _lowering.py the only place that knows JAX's machinery. Binding happens at the user's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _ffi, _plan
from ._lowering import arithmetic, lowering, results_of, row_type
from ._ops import EVERY, Op


def bind(
    name: str,
    *operands: jax.Array,
    axes: tuple[int, ...],
    path: _plan.PathLike,
    stats: bool = False,
) -> Any:
    """Run an op's primitive; axes are negative and sorted. With `stats`, (result, max, sum)."""
    found = PRIMITIVES[name].bind(*_same_vma(operands), axes=axes, path=path, stats=stats)
    return tuple(found) if stats else found[0]


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


def _build(op: Op) -> Primitive:
    primitive = Primitive(f"jaxsoftmax_{op.name}")
    primitive.multiple_results = True

    jitted = jax.jit(
        lambda *operands, **params: primitive.bind(*operands, **params),
        static_argnames=("axes", "path", "stats"),
    )

    @primitive.def_impl
    def impl(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # under disable_jit this would call itself for ever
            return jitted(*operands, **params)

    @primitive.def_abstract_eval
    def abstract(*operands: Any, axes: tuple[int, ...], path: _plan.PathLike, stats: bool) -> Any:
        x, row = operands[0], row_type(operands[0], axes)
        for i, other in enumerate(operands):
            stat = i >= op.inputs and not (op.pulled and i == len(operands) - 1)
            like = row.update(dtype=arithmetic(x.dtype)) if stat else row if i >= op.inputs else x
            if (other.shape, other.dtype) != (like.shape, like.dtype):
                want, got = like.str_short(), other.str_short()
                raise TypeError(f"{op.name} takes for operand {i} {want}, got {got}")
        # On explicit meshes, an operand that vmap had to broadcast is sharded the least.
        inputs = operands[: op.inputs]
        most = max(inputs, key=lambda aval: sum(s is not None for s in aval.sharding.spec))
        return results_of(op, most, axes, stats)

    def batch(args: Any, dims: Any, *, axes: Any, path: _plan.PathLike, stats: bool) -> Any:
        size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
        front = [
            jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
            for a, d in zip(args, dims, strict=True)
        ]
        found = primitive.bind(*_same_vma(front), axes=axes, path=path, stats=stats)
        return found, [0] * len(found)

    def runner(axes: tuple[int, ...], path: _plan.PathLike) -> Callable[..., jax.Array]:
        def run(name: str, *operands: jax.Array) -> jax.Array:
            asked = path if name == op.name else _plan.for_gradient(path)
            return bind(name, *operands, axes=axes, path=asked)

        return run

    def jvp(
        primals: Any, tangents: Any, *, axes: tuple[int, ...], path: _plan.PathLike, stats: bool
    ) -> tuple[Any, Any]:
        run = runner(axes, path)
        if op.linear is None:
            return _jvp_of_x(op, run, primals[0], tangents[0], axes, path, stats)
        (out,) = primitive.bind(*_same_vma(primals), axes=axes, path=path, stats=False)
        return [out], [_jvp_of_linear(op, run, primals, tangents, axes)]

    linear, dual = op.linear or 0, op.transpose

    def transpose(cts: Any, *operands: Any, axes: Any, path: _plan.PathLike, stats: bool) -> Any:
        assert dual is not None
        result: list[Any] = [None] * len(operands)
        if isinstance(cts[0], ad.Zero):
            result[linear] = ad.Zero(operands[linear].aval)
        else:
            result[linear] = dual(runner(axes, path), operands, cts[0])
        return result

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    if dual is not None:
        ad.primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, lowering(op, None))
    if op.kernel:
        for platform in sorted(_ffi.PLATFORMS):
            mlir.register_lowering(primitive, lowering(op, platform), platform=platform)
        if _ffi.PLATFORMS:
            _ffi.require_devices(primitive)
    return primitive


def _jvp_of_x(
    op: Op, run: Any, x: Any, x_dot: Any, axes: tuple[int, ...], path: _plan.PathLike, stats: bool
) -> tuple[Any, Any]:
    """Results and tangents of an op of x. The maximum counts as a constant of its row: statistics
    are used together, and their tangents agree in the end."""
    found = bind(op.name, x, axes=axes, path=path, stats=op.stats)
    result, *rest = found if op.stats else (found,)
    assert op.residuals is not None and op.tangent is not None
    tangent = op.tangent(run, op.residuals(result, x, rest), x_dot)
    if not stats:
        return [result], [tangent]
    top, total = rest
    moved = total * run("logsumexp_jvp", x_dot, x, top, total).astype(total.dtype)
    return [result, top, total], [tangent, ad.Zero(jax.typeof(top).to_tangent_aval()), moved]


def _jvp_of_linear(
    op: Op, run: Any, primals: Sequence[Any], tangents: Sequence[Any], axes: tuple[int, ...]
) -> Any:
    """The tangent of an op that is linear in one operand: itself along that one, its formula's
    derivative along the others."""
    assert op.linear is not None
    given = [None if isinstance(t, ad.Zero) else t for t in tangents]
    parts = []
    moving = [i for i, t in enumerate(given) if t is not None and i != op.linear]
    if moving:

        def formula(*values: Any) -> Any:
            operands = list(primals)
            for i, value in zip(moving, values, strict=True):
                operands[i] = value
            return op.formula(*operands, axes=axes)

        of_others = jax.jvp(formula, [primals[i] for i in moving], [given[i] for i in moving])
        parts.append(of_others[1])
    if given[op.linear] is not None:
        operands = list(primals)
        operands[op.linear] = given[op.linear]
        parts.append(run(op.name, *operands))
    return sum(parts[1:], parts[0])


PRIMITIVES = {name: _build(op) for name, op in EVERY.items()}
