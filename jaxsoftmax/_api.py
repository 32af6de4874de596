"""The public functions: axis, where and dtype in jax.nn's ways, then the op."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import _plan, _primitive, reference
from ._arguments import Axis, array, canonical_axes
from ._ops import OPS


def softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    path: _plan.PathLike = None,
) -> jax.Array:
    """Softmax of x over axis: y_i = exp(x_i - max x) / sum_j exp(x_j - max x).

    Args:
      x: array of any shape; float16, bfloat16, float32 and float64 run kernels. Integers are
        computed in float32; complex numbers and narrower floats take a jnp formula.
      axis: an axis, a tuple of axes, or None for all.
      where: boolean array that broadcasts against x: the elements to include. The others give 0,
        and so does a row without any.
      path: forces a kernel: "one_pass", "two_pass", "split_k", a seed kernel's name ("packed",
        "medium", "extreme", "arbitrary", "splitk") or a `Plan`. A name forces the gradient too; a
        `Plan` was made for this op, and the gradient takes its path, planned anew. None lets
        `plan()` choose. Where a jnp formula runs, path is checked but changes nothing.

    Returns:
      An array of x's shape and dtype (float32 for integers).

    Raises:
      TypeError: x or where is no array, x is bool, axis is no int, path is of another type.
      ValueError: axis is out of range or repeated, where is not boolean, path is unknown or cannot
        hold the row; for a forced name also while tracing a gradient, which has two inputs to hold.

    Differs from `jax.nn.softmax` in accuracy (within 1 ulp in 16 bits, 4 in 32 and 64), in `path`,
    and in forward mode: jvp and jacfwd over this function are impossible, but possible over
    `jaxsoftmax.primitive.softmax`. hessian, and jvp of a gradient, are possible here.
    Online softmax: Milakov and Gimelshein, arXiv:1805.02867.
    """
    return call("softmax", x, axis, where, path, WITH_VJP)


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    path: _plan.PathLike = None,
) -> jax.Array:
    """Logarithm of softmax: y_i = x_i - max x - log sum_j exp(x_j - max x).

    Args:
      x, axis, path: as for `softmax`.
      where: boolean array that broadcasts against x: the elements to include. The others give -inf,
        with gradient 0.

    Returns:
      An array of x's shape and dtype (float32 for integers).

    Raises:
      TypeError, ValueError: as `softmax`.

    Differs from `jax.nn.log_softmax` as `softmax` differs from its own (results within 1 ulp in 16
    bits, 4 in 32 and 64, and near 0 within 2^-23), and in the gradient, which is computed from x
    and two numbers a row: no output is kept for it, and none of its rounding enters.
    """
    return call("log_softmax", x, axis, where, path, WITH_VJP)


def logsumexp(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    b: jax.typing.ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: jax.typing.ArrayLike | None = None,
    *,
    path: _plan.PathLike = None,
) -> Any:
    """Logarithm of a sum of exponentials over axis: y = log sum_i exp(a_i).

    Args:
      a: array of any shape; float16, bfloat16, float32 and float64 run kernels. Integers and bool
        are computed in float32; complex numbers and narrower floats take a jnp formula.
      axis: an axis, a tuple of axes, or None for all.
      b: factors of the exponentials, which broadcast against a: log sum_i b_i exp(a_i).
      keepdims: keeps the reduced axes with size 1.
      return_sign: returns (log of the sum's magnitude, its sign).
      where: boolean array that broadcasts against a: the elements to include; none gives -inf.
      path: as for `softmax`. b, return_sign and where take a jnp formula, where path is checked but
        changes nothing.

    Returns:
      An array of a's dtype (float32 for integers) and of a's shape without the axes.

    Raises:
      TypeError: a, b or where is no array, axis is no int, path is of another type.
      ValueError: axis is out of range or repeated, where is not boolean, path is unknown or cannot
        hold the row.

    Differs from `jax.nn.logsumexp` in accuracy (the error is relative to the larger of |max a| and
    the logarithm), in `path`, and in forward mode, as `softmax` does.
    """
    if b is not None or return_sign:
        _plan.check_path(path)
        _check_where("logsumexp", where)
        return jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where)
    return call_logsumexp(a, axis, keepdims, where, path, WITH_VJP)


def call_logsumexp(
    a: Any, axis: Axis, keepdims: bool, where: Any, path: Any, kernels: dict[str, Any]
) -> jax.Array:
    """logsumexp, by its kernel or its formula, on arguments as the user gave them."""
    a = array("logsumexp", "a", a)
    if a.dtype == jnp.bool_:
        a = a.astype(jnp.float32)
    where = _check_where("logsumexp", where)
    if where is not None:  # whose axes are those of the two together
        a, where = _broadcast("logsumexp", a, where)
    y = call("logsumexp", a, axis, where, path, kernels)
    return jnp.expand_dims(y, canonical_axes("logsumexp", axis, a.ndim)) if keepdims else y


def call(
    name: str, x: Any, axis: Axis, where: Any, path: Any, kernels: dict[str, Callable[..., Any]]
) -> jax.Array:
    """One op, by its kernel or its formula, on arguments as the user gave them."""
    _plan.check_path(path)
    x = array(name, "x", x)
    axes = canonical_axes(name, axis, x.ndim)
    where = _check_where(name, where)
    if where is None and x.dtype == jnp.bool_:
        raise TypeError(f"{name}: x must be of a number type (float, integer, complex), got bool")
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # promotes as jax.nn's arithmetic does
        is_bool = x.dtype == jnp.bool_
        x = x.astype(float if is_bool else jax.eval_shape(jnp.exp, x).dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return getattr(jax.nn, name)(x, axis, where=where)
    formula = getattr(reference, name)
    if where is not None:
        x, where = _broadcast(name, x, where)
        return formula(x, canonical_axes(name, axis, x.ndim), where)
    if not axes or x.dtype.name not in _plan.DTYPES:
        return formula(x, axes, None)
    _check_forced(name, x, axes, path)
    x = jax.lax.convert_element_type(x, x.dtype)  # drops a weak type, as jax.nn does
    return kernels[name](x, axes, path)


def _check_where(name: str, where: Any) -> Any:
    if where is None:
        return None
    where = array(name, "where", where)
    if where.dtype != jnp.bool_:
        got = where.dtype.name
        raise ValueError(f"{name}: where must be None or a boolean array, got {got}")
    return where


def _broadcast(name: str, x: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    try:
        shape = jnp.broadcast_shapes(x.shape, where.shape)
    except ValueError:
        shapes = f"{where.shape} to x's {x.shape}"
        raise ValueError(f"{name}: where cannot be broadcast from {shapes}") from None
    return jnp.broadcast_to(x, shape), jnp.broadcast_to(where, shape)


def _check_forced(name: str, x: jax.Array, axes: tuple[int, ...], path: _plan.PathLike) -> None:
    """Refuse, before tracing goes on, a plan that no device could run on these rows."""
    if not isinstance(path, _plan.Plan) and path not in _plan.SEED_PLANS:
        return
    n: Any = 1
    for a in axes:
        n = n * x.shape[a]
    _plan.check(_plan.fixed(path, x.dtype, n), name, x.dtype, n)


def _with_vjp(name: str) -> Callable[..., jax.Array]:
    """The op as a custom_vjp: its own gradient kernel, from the residuals that the op names."""
    op = OPS[name]

    @partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def function(x: jax.Array, axes: tuple[int, ...], path: _plan.PathLike) -> jax.Array:
        return _primitive.bind(name, x, axes=axes, path=path)

    def forward(x: jax.Array, axes: tuple[int, ...], path: _plan.PathLike) -> Any:
        assert op.residuals is not None
        if not op.stats:
            y = _primitive.bind(name, x, axes=axes, path=path)
            return y, op.residuals(y, x, ())
        y, *stats = _primitive.bind(name, x, axes=axes, path=path, stats=True)
        return y, op.residuals(y, x, stats)

    def backward(axes: tuple[int, ...], path: _plan.PathLike, residuals: Any, ct: Any) -> Any:
        def run(other: str, *operands: jax.Array) -> jax.Array:
            return _primitive.bind(other, *operands, axes=axes, path=_plan.for_gradient(path))

        assert op.cotangent is not None
        return (op.cotangent(run, residuals, ct),)

    function.defvjp(forward, backward)
    return function


WITH_VJP = {name: _with_vjp(name) for name, op in OPS.items() if op.residuals}
WITHOUT_VJP = {
    name: lambda x, axes, path, n=name: _primitive.bind(n, x, axes=axes, path=path)
    for name in WITH_VJP
}
