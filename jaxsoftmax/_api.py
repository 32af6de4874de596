"""The public functions: axis, where and dtype in jax.nn's ways, then the op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import _arguments, _plan, reference
from ._arguments import Axis, array, canonical_axes
from ._lowering import arithmetic, view
from ._masks import causal_mask
from ._ops import Loading
from ._primitive import MIXABLE, same_vma
from ._vjp import WITH_VJP, Function, How


def softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    path: _plan.PathLike = None,
) -> jax.Array:
    """Softmax of z = scale * x over axis: y_i = exp(z_i - max z) / sum_j exp(z_j - max z).

    Args:
      x: array of any shape; float16, bfloat16, float32 and float64 run kernels. Integers are
        computed in float32; complex numbers and narrower floats take a jnp formula.
      axis: an axis, a tuple of axes, or None for all.
      where: boolean array that broadcasts against x: the elements to include. The others give 0,
        with gradient 0, whatever they hold, and so does a row without any. The
        kernels read it in its own shape.
      scale: a real number, also a traced one: z = scale * x is formed in float32 (float64 for
        float64) and never rounded to 16 bits. It has a gradient.
      is_causal: with True, the last two dimensions are (query, key), and keys after their query are
        not included; over the last axis, their half is not even read.
      dtype: the result's, a float's. The gradient has x's, and is that of the result as rounded.
      path: forces a kernel: "one_pass", "two_pass", "split_k", a seed kernel's name ("packed",
        "medium", "extreme", "arbitrary", "splitk") or a `Plan`. A name forces the gradient too; a
        `Plan` was made for this op, and the gradient takes its path, planned anew. None lets
        `plan()` choose. Where a jnp formula runs, path is checked but changes nothing.

    Returns:
      An array of x's shape (and where's, if that has more) and of `dtype` (None: x's, float32 for
      integers).

    Raises:
      TypeError: x or where is no array, x is bool, axis is no int, scale is no real number,
        is_causal no bool, dtype no float's, path is of another type.
      ValueError: axis is out of range or repeated, where is not boolean or does not broadcast,
        scale is more than one number, x has fewer than 2 dimensions for is_causal, path is unknown
        or cannot hold the row; for a forced name also while tracing a gradient, which has two
        inputs to hold.

    Differs from `jax.nn.softmax` in accuracy (within 1 ulp in 16 bits, 4 in 32 and 64), in `scale`,
    `is_causal`, `dtype` and `path`, in the gradient of a row without elements (0, not NaN), and in
    forward mode: jvp and jacfwd over this function are impossible, but possible over
    `jaxsoftmax.primitive.softmax`. hessian, and jvp of a gradient, are possible here.
    Online softmax: Milakov and Gimelshein, arXiv:1805.02867.
    """
    return call("softmax", x, axis, where, path, WITH_VJP, scale, is_causal, dtype)


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    path: _plan.PathLike = None,
) -> jax.Array:
    """Logarithm of softmax, of z = scale * x: y_i = z_i - max z - log sum_j exp(z_j - max z).

    Args:
      x, axis, path: as for `softmax`.
      where: boolean array that broadcasts against x: the elements to include. The others give -inf,
        with gradient 0, whatever they hold, and so does a row without any.
      scale: a real number that multiplies x, as for `softmax`.
      is_causal: with True, keys after their query are not included, as for `softmax`.
      dtype: the result's, a float's.

    Returns:
      An array as `softmax`'s.

    Raises:
      TypeError, ValueError: as `softmax`.

    Differs from `jax.nn.log_softmax` as `softmax` differs from its own (results within 1 ulp in 16
    bits, 4 in 32 and 64, and near 0 within 2^-23), and in the gradient, which is computed from x
    and two numbers a row: no output is kept for it, and none of its rounding enters.
    """
    return call("log_softmax", x, axis, where, path, WITH_VJP, scale, is_causal, dtype)


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
      path: as for `softmax`. b and return_sign take a jnp formula, where path is checked but
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
        _arguments.mask("logsumexp", where)
        return jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where)
    return call_logsumexp(a, axis, keepdims, where, path, WITH_VJP)


def call_logsumexp(
    a: Any, axis: Axis, keepdims: bool, where: Any, path: Any, kernels: dict[str, Function]
) -> jax.Array:
    """logsumexp, by its kernel or its formula, on arguments as the user gave them."""
    a = array("logsumexp", "a", a)
    if a.dtype == jnp.bool_:
        a = a.astype(jnp.float32)
    where = _arguments.mask("logsumexp", where)
    if where is not None:  # the axes are those of the two together
        a = _arguments.broadcast("logsumexp", a, where)
    y = call("logsumexp", a, axis, where, path, kernels)
    return jnp.expand_dims(y, canonical_axes("logsumexp", axis, a.ndim)) if keepdims else y


def call(
    name: str,
    x: Any,
    axis: Axis,
    where: Any,
    path: Any,
    kernels: dict[str, Function],
    scale: Any = None,
    is_causal: Any = False,
    dtype: Any = None,
) -> jax.Array:
    """One op, by its kernel or its formula, on arguments as the user gave them."""
    _plan.check_path(path)
    x = array(name, "x", x)
    canonical_axes(name, axis, x.ndim)  # which a mask of more dimensions would stretch
    where, scale = _arguments.mask(name, where), _arguments.factor(name, scale)
    causal = _arguments.flag(name, "is_causal", is_causal)
    dtype = _arguments.float_dtype(name, dtype)
    if where is None and x.dtype == jnp.bool_:
        raise TypeError(f"{name}: x must be of a number type (float, integer, complex), got bool")
    if causal and x.ndim < 2:
        raise ValueError(f"{name}: is_causal takes x[..., query, key], got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # promotes as jax.nn's arithmetic does
        is_bool = x.dtype == jnp.bool_
        x = x.astype(float if is_bool else jax.eval_shape(jnp.exp, x).dtype)
    if where is not None:
        x = _arguments.broadcast(name, x, where)
    axes = canonical_axes(name, axis, x.ndim)
    if causal and axes != (-1,):
        where, causal = causal_mask(x.shape, where), False
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _of_complex(name, x, axes, where, causal, scale, dtype)
    wanted = x.dtype if dtype is None else dtype
    served = bool(axes) and x.dtype.name in _plan.DTYPES
    if served and wanted == jnp.float64:
        x = x.astype(jnp.float64)
    if scale is not None:
        scale = jax.lax.convert_element_type(scale, arithmetic(x.dtype))
    if not served:
        return getattr(reference, name)(x, axes, where, scale, causal, wanted)
    loading = Loading(where is not None, scale is not None, causal)
    if {x.dtype.name, wanted.name} <= MIXABLE:
        loading = loading.to(wanted, x.dtype)
    _check_forced(name, x, axes, path, loading)
    x = jax.lax.convert_element_type(x, x.dtype)  # drops a weak type, as jax.nn does
    x, *extra = same_vma([a for a in (x, where, scale) if a is not None])
    where, scale = (None if a is None else extra.pop(0) for a in (where, scale))
    return kernels[name](x, where, scale, How(axes, path, loading, x.dtype)).astype(wanted)


def _of_complex(
    name: str, x: jax.Array, axes: Axis, where: Any, causal: bool, scale: Any, dtype: Any
) -> jax.Array:
    if dtype is not None:
        raise TypeError(f"{name}: dtype must be None for {x.dtype.name}, got {dtype.name}")
    where = causal_mask(x.shape, where) if causal else where
    x = x if scale is None else scale.astype(x.real.dtype) * x
    return getattr(jax.nn, name)(x, axes, where=where)


def _check_forced(
    name: str, x: jax.Array, axes: tuple[int, ...], path: _plan.PathLike, loading: Loading
) -> None:
    """Refuse, before tracing goes on, a plan that no device could run on plain rows."""
    if path is None or not (isinstance(path, _plan.Plan) or path in _plan.SEED_PLANS):
        return
    _, n, _, contiguous = view(x.shape, axes)
    if contiguous and loading.plain:
        _plan.check(_plan.fixed(path, x.dtype, n), name, x.dtype, n)
