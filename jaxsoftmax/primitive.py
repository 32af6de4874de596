"""The same functions directly on their primitives, for forward mode: jvp, jacfwd, linearize.

JAX cannot give a function with a custom_vjp a forward mode. These have one, and their gradient runs
the same two kernels (of rows cut over devices, a kernel forward and a formula).
"""

from __future__ import annotations

import jax

from . import _api
from ._arguments import Axis, AxisName
from ._plan import PathLike
from ._vjp import WITHOUT_VJP

__all__ = ["log_softmax", "logsumexp", "softmax"]


def softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    axis_name: AxisName = None,
    path: PathLike = None,
) -> jax.Array:
    """`jaxsoftmax.softmax` without its custom_vjp; arguments, result and errors are the same."""
    return _api.call(
        "softmax", x, axis, where, path, WITHOUT_VJP, scale, is_causal, dtype, axis_name
    )


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    axis_name: AxisName = None,
    path: PathLike = None,
) -> jax.Array:
    """`jaxsoftmax.log_softmax` without its custom_vjp; arguments and result are the same."""
    return _api.call(
        "log_softmax", x, axis, where, path, WITHOUT_VJP, scale, is_causal, dtype, axis_name
    )


def logsumexp(
    a: jax.typing.ArrayLike,
    axis: Axis = None,
    keepdims: bool = False,
    where: jax.typing.ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
    path: PathLike = None,
) -> jax.Array:
    """`jaxsoftmax.logsumexp` without its custom_vjp; arguments and result are the same."""
    return _api.call_logsumexp(a, axis, keepdims, where, path, WITHOUT_VJP, axis_name)
