"""The public functions: axis, where and dtype in jax.nn's ways, then the op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _arguments, _plan, reference
from ._arguments import Axis, AxisName, array, canonical_axes
from ._lowering import arithmetic, view
from ._masks import Names, Over, causal_mask, wide
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
    axis_name: AxisName = None,
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
      axis_name: the mapped axis (of shard_map, vmap or pmap), or a tuple of them, over which the
        rows are cut: x and where are this device's parts of them, of equal size. Devices exchange
        two numbers a row, for the gradient one. A sharded array under jit alone needs no name.
        For is_causal the named dimension is numbered over all devices, the other from this one's.
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
      NameError: axis_name is bound by no surrounding map.
      ValueError: axis is out of range or repeated, where is not boolean or does not broadcast,
        scale is more than one number, x has fewer than 2 dimensions for is_causal (or axis_name is
        given and more than one axis), path is unknown or cannot hold the row; for a forced name
        also while tracing a gradient, which has two inputs to hold.

    Differs from `jax.nn.softmax` in accuracy (within 1 ulp in 16 bits, 4 in 32 and 64), in `scale`,
    `is_causal`, `dtype`, `axis_name` and `path`, in the gradient of a row without elements (0, not
    NaN), and in forward mode: jvp and jacfwd over this function are impossible, but possible over
    `jaxsoftmax.primitive.softmax`. hessian, and jvp of a gradient, are possible here.
    Online softmax: Milakov and Gimelshein, arXiv:1805.02867.
    """
    return call("softmax", x, axis, where, path, WITH_VJP, scale, is_causal, dtype, axis_name)


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    axis_name: AxisName = None,
    path: _plan.PathLike = None,
) -> jax.Array:
    """Logarithm of softmax, of z = scale * x: y_i = z_i - max z - log sum_j exp(z_j - max z).

    Args:
      x, axis, axis_name, path: as for `softmax`.
      where: boolean array that broadcasts against x: the elements to include. The others give -inf,
        with gradient 0, whatever they hold, and so does a row without any.
      scale: a real number that multiplies x, as for `softmax`.
      is_causal: with True, keys after their query are not included, as for `softmax`.
      dtype: the result's, a float's.

    Returns:
      An array as `softmax`'s.

    Raises:
      TypeError, NameError, ValueError: as `softmax`.

    Differs from `jax.nn.log_softmax` as `softmax` differs from its own (results within 1 ulp in 16
    bits, 4 in 32 and 64, and near 0 within 2^-23), and in the gradient, which is computed from x
    and two numbers a row: no output is kept for it, and none of its rounding enters.
    """
    return call("log_softmax", x, axis, where, path, WITH_VJP, scale, is_causal, dtype, axis_name)


def logsumexp(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    b: jax.typing.ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: jax.typing.ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
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
      axis_name: as for `softmax`; all devices have the result.
      path: as for `softmax`. b and return_sign take a jnp formula, where path is checked but
        changes nothing.

    Returns:
      An array of a's dtype (float32 for integers) and of a's shape without the axes.

    Raises:
      TypeError: a, b or where is no array, axis is no int, path is of another type.
      NameError: axis_name is bound by no surrounding map.
      ValueError: axis is out of range or repeated, where is not boolean, path is unknown or cannot
        hold the row.

    Differs from `jax.nn.logsumexp` in accuracy (the error is relative to the larger of |max a| and
    the logarithm), in `axis_name` and `path`, and in forward mode, as `softmax` does
    (with `axis_name`, forward mode is possible).
    """
    if b is not None or return_sign:
        _plan.check_path(path)
        _arguments.mask("logsumexp", where)
        names = _arguments.mesh_axes("logsumexp", axis_name)
        return _with_factors(a, axis, b, keepdims, return_sign, where, names)
    return call_logsumexp(a, axis, keepdims, where, path, WITH_VJP, axis_name)


def _with_factors(
    a: Any, axis: Axis, b: Any, keepdims: bool, return_sign: bool, where: Any, names: Names
) -> Any:
    """jax.nn's logsumexp, of parts of rows if there are names."""
    if not names:
        return jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where)
    a = array("logsumexp", "a", a)
    dtype = jax.eval_shape(lambda a: jax.nn.logsumexp(a, axis, b), a).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"logsumexp: axis_name must be None for {dtype.name}, got {names}")
    b = jnp.ones(()) if b is None else array("logsumexp", "b", b)
    counts = True if where is None else where
    a, b, counts = jnp.broadcast_arrays(wide(a.astype(dtype)), wide(b.astype(dtype)), counts)
    over = Over(canonical_axes("logsumexp", axis, a.ndim), names)
    a = jnp.where(counts & (b != 0), a, -jnp.inf)
    top = over.max(a)
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = over.sum(jnp.where(counts, b, 0) * jnp.exp(a - top))
    sign, y = jnp.sign(total), jnp.log(jnp.abs(total)) + top
    if not keepdims:
        sign, y = over.squeeze(sign), over.squeeze(y)
    if return_sign:
        return y.astype(dtype), sign.astype(dtype)
    return jnp.where(sign < 0, jnp.nan, y).astype(dtype)


def call_logsumexp(
    a: Any,
    axis: Axis,
    keepdims: bool,
    where: Any,
    path: Any,
    kernels: dict[str, Function],
    axis_name: AxisName,
) -> jax.Array:
    """logsumexp, by its kernel or its formula, on arguments as the user gave them."""
    a = array("logsumexp", "a", a)
    if a.dtype == jnp.bool_:
        a = a.astype(jnp.float32)
    where = _arguments.mask("logsumexp", where)
    if where is not None:  # the axes are those of the two together
        a = _arguments.broadcast("logsumexp", a, where)
    y = call("logsumexp", a, axis, where, path, kernels, axis_name=axis_name)
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
    axis_name: AxisName = None,
) -> jax.Array:
    """One op, by its kernel or its formula, on arguments as the user gave them."""
    _plan.check_path(path)
    x = array(name, "x", x)
    canonical_axes(name, axis, x.ndim)  # which a mask of more dimensions would stretch
    where, scale = _arguments.mask(name, where), _arguments.factor(name, scale)
    causal = _arguments.flag(name, "is_causal", is_causal)
    dtype, names = _arguments.float_dtype(name, dtype), _arguments.mesh_axes(name, axis_name)
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
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    if causal and (names or is_complex or axes != (-1,)):
        where, causal = _causal(name, x.shape, axes, where, names), False
    if is_complex:
        return _of_complex(name, x, axes, where, scale, dtype, names)
    wanted = x.dtype if dtype is None else dtype
    served = bool(axes) and x.dtype.name in _plan.DTYPES
    if served and wanted == jnp.float64:
        x = x.astype(jnp.float64)
    if scale is not None:
        scale = jax.lax.convert_element_type(scale, arithmetic(x.dtype))
    if not served:
        rows = reference.Rows(axes, where, scale, causal, wanted, names)
        return getattr(reference, name)(x, rows)
    loading = Loading(where is not None, scale is not None, causal)
    if {x.dtype.name, wanted.name} <= MIXABLE:
        loading = loading.to(wanted, x.dtype)
    if not names:  # parts take a plan's path alone
        _check_forced(name, x, axes, path, loading)
    x = jax.lax.convert_element_type(x, x.dtype)  # drops a weak type, as jax.nn does
    x, *extra = same_vma([a for a in (x, where, scale) if a is not None])
    where, scale = (None if a is None else extra.pop(0) for a in (where, scale))
    return kernels[name](x, where, scale, How(axes, path, loading, x.dtype, names)).astype(wanted)


def _causal(name: str, shape: Any, axes: tuple[int, ...], where: Any, names: Names) -> jax.Array:
    """The mask of causal rows of another axis than the last, or of parts of rows."""
    if names and len(axes) != 1:
        raise ValueError(f"{name}: is_causal with axis_name takes one axis, got {axes}")
    first = [lax.axis_index(names) * shape[d] if names and axes == (d,) else 0 for d in (-2, -1)]
    return causal_mask(shape, where, first)


def _of_complex(
    name: str, x: jax.Array, axes: Axis, where: Any, scale: Any, dtype: Any, names: Names
) -> jax.Array:
    for what, given in (("dtype", dtype and dtype.name), ("axis_name", names)):
        if given:
            raise TypeError(f"{name}: {what} must be None for {x.dtype.name}, got {given}")
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
