"""The public functions: axis, where and dtype in jax.nn's ways, then the op."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _plan, _primitive, reference

Axis = int | tuple[int, ...] | None


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
    return _softmax(x, axis, where, path, _softmax_vjp)


def primitive_softmax(
    x: jax.typing.ArrayLike, axis: Axis = -1, *, path: _plan.PathLike = None
) -> jax.Array:
    """`softmax` without its custom_vjp: forward mode works, and grad runs the same two kernels."""
    return _softmax(x, axis, None, path, partial(_bind, "softmax"))


def _softmax(x: Any, axis: Axis, where: Any, path: Any, kernel: Callable[..., jax.Array]) -> Any:
    _plan.check_path(path)
    x = _array("softmax", "x", x)
    axes = _axes("softmax", axis, x.ndim)
    if where is not None:
        where = _array("softmax", "where", where)
        if where.dtype != jnp.bool_:
            got = where.dtype.name
            raise ValueError(f"softmax: where must be None or a boolean array, got {got}")
    elif x.dtype == jnp.bool_:
        raise TypeError("softmax: x must be of a number type (float, integer, complex), got bool")
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # promotes as jax.nn's arithmetic does
        is_bool = x.dtype == jnp.bool_
        x = x.astype(float if is_bool else jax.eval_shape(jnp.exp, x).dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.nn.softmax(x, axis, where)
    if where is not None:
        try:
            shape = jnp.broadcast_shapes(x.shape, where.shape)
        except ValueError:
            shapes = f"{where.shape} to x's {x.shape}"
            raise ValueError(f"softmax: where cannot be broadcast from {shapes}") from None
        x, where = jnp.broadcast_to(x, shape), jnp.broadcast_to(where, shape)
        return reference.softmax(x, _axes("softmax", axis, x.ndim), where)
    if not axes or x.dtype.name not in _plan.DTYPES:
        return reference.softmax(x, axes, None)
    _check_forced("softmax", x, axes, path)
    x = jax.lax.convert_element_type(x, x.dtype)  # drops a weak type, as jax.nn does
    return kernel(x, axes, path)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _softmax_vjp(x: jax.Array, axes: tuple[int, ...], path: _plan.PathLike) -> jax.Array:
    return _bind("softmax", x, axes, path)


def _softmax_fwd(x: jax.Array, axes: tuple[int, ...], path: _plan.PathLike) -> Any:
    y = _bind("softmax", x, axes, path)
    return y, y


def _softmax_bwd(axes: tuple[int, ...], path: _plan.PathLike, y: jax.Array, dy: jax.Array) -> Any:
    return (_primitive.bind("softmax_bwd", y, dy, axes=axes, path=_plan.for_gradient(path)),)


_softmax_vjp.defvjp(_softmax_fwd, _softmax_bwd)


def _bind(name: str, x: jax.Array, axes: tuple[int, ...], path: _plan.PathLike) -> jax.Array:
    return _primitive.bind(name, x, axes=axes, path=path)


def _array(function: str, name: str, value: Any) -> jax.Array:
    """value as an array; TypeError for what jax.nn refuses too (lists, strings, None, keys)."""
    scalar = isinstance(value, (bool, int, float, complex, np.generic, np.ndarray))
    if scalar or isinstance(value, jax.Array) or hasattr(value, "__jax_array__"):
        try:
            array = jnp.asarray(value)
        except TypeError:
            pass  # NumPy arrays of strings, dates, objects
        else:
            if not jnp.issubdtype(array.dtype, jax.dtypes.extended):
                return array
    kind = f"{type(value).__name__} {value!r}"
    raise TypeError(f"{function}: {name} must be an array or a number, got {kind:.200}")


def _axes(function: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """axis as sorted negative ints."""
    if axis is None:
        return tuple(range(-ndim, 0))
    what = f"{function}: axis must be an int, a tuple of ints or None, got {axis!r}"
    if isinstance(axis, jax.core.Tracer):
        raise jax.errors.ConcretizationTypeError(axis, f"{what}; it must be known while tracing")
    if isinstance(axis, str):
        raise NameError(f"{what}; named axes are not supported")
    listed = isinstance(axis, Iterable) and getattr(axis, "ndim", 1) > 0
    axes = []
    for given in axis if listed else (axis,):
        try:
            a = operator.index(given)
        except TypeError:
            raise TypeError(what) from None
        if not -ndim <= a < ndim:
            allowed = f"{-ndim} to {ndim - 1}" if ndim else "() or None"
            raise ValueError(
                f"{function}: axis {a} is out of bounds for an array of dimension {ndim}; "
                f"allowed: {allowed}"
            )
        axes.append(a % ndim - ndim)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{function}: duplicate value in axis {axis!r}; each may appear once")
    return tuple(sorted(axes))


def _check_forced(op: str, x: jax.Array, axes: tuple[int, ...], path: _plan.PathLike) -> None:
    """Refuse, before tracing goes on, a plan that no device could run on these rows."""
    if not isinstance(path, _plan.Plan) and path not in _plan.SEED_PLANS:
        return
    n: Any = 1
    for a in axes:
        n = n * x.shape[a]
    _plan.check(_plan.fixed(path, x.dtype, n), op, x.dtype, n)
