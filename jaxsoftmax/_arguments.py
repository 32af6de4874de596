"""Arguments in jax.nn's ways: arrays, axes in any form, masks, scales, dtypes, their errors."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Axis = int | tuple[int, ...] | None
AxisName = Any  # what JAX's maps take: mostly a string; a tuple of them; None


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


def mask(function: str, where: Any) -> jax.Array | None:
    """where as an array; ValueError unless it is boolean."""
    if where is None:
        return None
    where = array(function, "where", where)
    if where.dtype != jnp.bool_:
        got = where.dtype.name
        raise ValueError(f"{function}: where must be None or a boolean array, got {got}")
    return where


def broadcast(function: str, x: jax.Array, where: jax.Array) -> jax.Array:
    """x in the shape of the two together; where is left as it is."""
    try:
        shape = jnp.broadcast_shapes(x.shape, where.shape)
    except ValueError:
        shapes = f"{where.shape} to x's {x.shape}"
        raise ValueError(f"{function}: where cannot be broadcast from {shapes}") from None
    return x if shape == x.shape else jnp.broadcast_to(x, shape)


def factor(function: str, scale: Any) -> jax.Array | None:
    """scale as an array; TypeError unless it is real, ValueError unless it is one number."""
    if scale is None:
        return None
    scale = array(function, "scale", scale)
    what = f"{function}: scale must be None, a real number or a real array of shape ()"
    if scale.shape != ():
        raise ValueError(f"{what}, got shape {scale.shape}")
    if not (jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)):
        raise TypeError(f"{what}, got {scale.dtype.name}")
    return scale


def mesh_axes(function: str, axis_name: Any) -> tuple[Any, ...]:
    """axis_name as a tuple of names; NameError for one that no surrounding map binds."""
    if axis_name is None:
        return ()
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    what = f"{function}: axis_name must be None, the name of a mapped axis or a tuple of names"
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what}, each once, got {axis_name!r:.200}")
        try:
            if isinstance(name, int):  # to psum a position
                raise TypeError
            hash(name)
            jax.lax.axis_size(name)
        except NameError as error:
            raise NameError(f"{what}, got {name!r:.200}: {error}") from None
        except TypeError:
            raise TypeError(f"{what}, got {axis_name!r:.200}") from None
    return names


def flag(function: str, name: str, value: Any) -> bool:
    """value as a bool; TypeError for what is none."""
    if isinstance(value, jax.core.Tracer):
        what = f"{function}: {name} must be known while tracing"
        raise jax.errors.ConcretizationTypeError(value, what)
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {name} must be True or False, got {value!r:.200}")
    return bool(value)


def float_dtype(function: str, dtype: Any) -> np.dtype[Any] | None:
    """dtype as JAX has it (float64 may be float32); TypeError unless it is a float's."""
    if dtype is None:
        return None
    try:
        found = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        got = f"{dtype!r:.200}"
        raise TypeError(f"{function}: dtype must be None or a floating-point type, got {got}")
    return np.dtype(found)
