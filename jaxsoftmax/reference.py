"""jnp formulas of the ops: for platforms without a kernel, for masks, and for derivative rules.

16-bit (and narrower) floats are computed in float32 and rounded once. Specials are jax.nn's, and
a fully masked row is 0 with gradient 0.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

Axes = int | tuple[int, ...]


def _wide(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays in the type the arithmetic is done in."""
    narrow = jnp.issubdtype(arrays[0].dtype, jnp.floating) and arrays[0].dtype.itemsize < 4
    return [a.astype(jnp.float32) if narrow else a for a in arrays]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(x: jax.Array, axes: Axes = -1, where: jax.Array | None = None) -> jax.Array:
    """exp(x - max) / sum over `axes`; elements outside `where` are left out and give 0."""
    dtype = x.dtype
    (x,) = _wide(x)
    if where is not None:
        x = jnp.where(where, x, -jnp.inf)
    top = jnp.max(x, axes, keepdims=True, initial=-jnp.inf)
    if where is not None:
        # A row with nothing in it would subtract -inf from -inf; an unmasked -inf row must.
        where = jnp.broadcast_to(where, x.shape)
        filled = jnp.any(where, axes, keepdims=True)
        top = jnp.where(filled, top, 0)
    e = jnp.exp(x - top)
    if where is None:
        return (e / jnp.sum(e, axes, keepdims=True)).astype(dtype)
    e = jnp.where(where, e, 0)
    total = jnp.where(filled, jnp.sum(e, axes, keepdims=True), 1)
    return jnp.where(where, e / total, 0).astype(dtype)


@softmax.defjvp
def _softmax_jvp(axes, primals, tangents):  # type: ignore[no-untyped-def]
    x, where = primals
    y = softmax(x, axes, where)
    x_dot = jnp.broadcast_to(tangents[0], y.shape)
    return y, softmax_bwd(y, x_dot, axes, where)


def softmax_bwd(
    y: jax.Array, dy: jax.Array, axes: Axes = -1, where: jax.Array | None = None
) -> jax.Array:
    """y * (dy - sum(y * dy)): the gradient of softmax from its output y."""
    dtype = y.dtype
    y, dy = _wide(y, dy)
    if where is not None:
        dy = jnp.where(where, dy, 0)  # an infinite dy under the mask would make a NaN of y = 0
    total = jnp.sum(y * dy, axes, keepdims=True)
    dx = y * (dy - total)
    return (dx if where is None else jnp.where(where, dx, 0)).astype(dtype)


def softmax_bwd_y(y: jax.Array, dy: jax.Array, y_dot: jax.Array, axes: Axes = -1) -> jax.Array:
    """The tangent of softmax_bwd along y alone."""
    dtype = y.dtype
    y, dy, y_dot = _wide(y, dy, y_dot)
    total = jnp.sum(y * dy, axes, keepdims=True)
    total_dot = jnp.sum(y_dot * dy, axes, keepdims=True)
    return (y_dot * (dy - total) - y * total_dot).astype(dtype)
