"""Operands as the formulas take them: widened, masked, scaled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Axes = int | tuple[int, ...]
Mask = jax.Array | None
Scale = jax.typing.ArrayLike | None


def causal_mask(shape: tuple[Any, ...], where: Mask = None) -> jax.Array:
    """The mask [query, key] of the keys up to each query, together with another mask."""
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape[-2:], d) for d in (0, 1))
    return key <= query if where is None else where & (key <= query)


def mask_of(x: jax.Array, where: Mask, causal: bool) -> Mask:
    return causal_mask(x.shape, where) if causal else where


def wide(x: jax.Array, mask: Mask = None) -> jax.Array:
    """x in the type the arithmetic is done in; 0 where masked, so that no NaN from there meets a
    factor of 0 in a derivative."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        x = x.astype(jnp.float32)
    return x if mask is None else jnp.where(mask, x, 0)


def scaled(x: jax.Array, scale: Scale) -> jax.Array:
    return x if scale is None else jnp.multiply(scale, x)


def kept(x: jax.Array, mask: Mask, other: float = 0) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, other)


def spread(row: jax.Array, axes: Axes, ndim: int) -> jax.Array:
    """A number a row as an array that broadcasts against the rows."""
    axes = (axes,) if isinstance(axes, int) else axes
    return jnp.expand_dims(row, tuple(sorted(a % ndim for a in axes)))
