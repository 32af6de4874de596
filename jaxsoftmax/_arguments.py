"""Arguments in jax.nn's ways: what counts as an array, an axis in any form, their errors."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Axis = int | tuple[int, ...] | None


def array(function: str, name: str, value: Any) -> jax.Array:
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


def canonical_axes(function: str, axis: Any, ndim: int) -> tuple[int, ...]:
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
