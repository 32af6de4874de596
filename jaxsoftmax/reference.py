"""jnp formulas of the ops: for platforms without a kernel, for masks, and for derivative rules.

16-bit (and narrower) floats are computed in float32 and rounded once. Specials are jax.nn's; a
fully masked row gives 0 (softmax) or -inf, with gradient 0.
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


def _rows(row: jax.Array, axes: Axes, ndim: int) -> jax.Array:
    """A number a row as an array that broadcasts against the rows."""
    axes = (axes,) if isinstance(axes, int) else axes
    return jnp.expand_dims(row, tuple(sorted(a % ndim for a in axes)))


def _squeeze(row: jax.Array, axes: Axes) -> jax.Array:
    return jnp.squeeze(row, axes)


def log_softmax_stats(x: jax.Array, axes: Axes = -1) -> tuple[jax.Array, jax.Array]:
    """Each row's maximum and its sum of exp(x - maximum), in the type of arithmetic."""
    _, total, top = _shifted(_wide(x)[0], axes, None)
    return _squeeze(top, axes), _squeeze(total, axes)


def logsumexp_stats(x: jax.Array, axes: Axes = -1) -> tuple[jax.Array, jax.Array]:
    """The same, but beside an infinite maximum the sum is 1: finite elements have a gradient."""
    (x,) = _wide(x)
    top, total = log_softmax_stats(x, axes)
    top = jnp.where(jnp.any(jnp.isnan(x), axes), jnp.nan, top)  # XLA's maximum may overlook one
    return top, jnp.where(jnp.isinf(top), 1, total)


def _shifted(
    x: jax.Array, axes: Axes, where: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x - max, the sum of its exponentials, and the maximum: of the elements in `where`."""
    if where is not None:
        x = jnp.where(where, x, -jnp.inf)
    top = jnp.max(x, axes, keepdims=True, initial=-jnp.inf)
    base = top
    if where is not None:
        # A row with nothing in it would subtract -inf from -inf; an unmasked -inf row must.
        filled = jnp.any(jnp.broadcast_to(where, x.shape), axes, keepdims=True)
        base = jnp.where(filled, top, 0)
    d = x - base
    e = jnp.exp(d)
    if where is not None:
        e = jnp.where(where, e, 0)
    return d, jnp.sum(e, axes, keepdims=True), top


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(x: jax.Array, axes: Axes = -1, where: jax.Array | None = None) -> jax.Array:
    """exp(x - max) / sum over `axes`; elements outside `where` are left out and give 0."""
    dtype = x.dtype
    d, total, _ = _shifted(_wide(x)[0], axes, where)
    if where is None:
        return (jnp.exp(d) / total).astype(dtype)
    return jnp.where(where, jnp.exp(d) / jnp.where(total == 0, 1, total), 0).astype(dtype)


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


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def log_softmax(x: jax.Array, axes: Axes = -1, where: jax.Array | None = None) -> jax.Array:
    """x - max - log(sum of exp(x - max)) over `axes`; elements outside `where` give -inf."""
    dtype = x.dtype
    d, total, _ = _shifted(_wide(x)[0], axes, where)
    y = d - jnp.log(total)
    return (y if where is None else jnp.where(where, y, -jnp.inf)).astype(dtype)


@log_softmax.defjvp
def _log_softmax_jvp(axes, primals, tangents):  # type: ignore[no-untyped-def]
    x, where = primals
    p, (x_dot,) = softmax(_wide(x)[0], axes, where), _wide(tangents[0])
    if where is not None:
        x_dot = jnp.where(where, x_dot, 0)
    y_dot = x_dot - jnp.sum(p * x_dot, axes, keepdims=True)
    y_dot = y_dot if where is None else jnp.where(where, y_dot, 0)
    return log_softmax(x, axes, where), jnp.broadcast_to(y_dot, p.shape).astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def logsumexp(x: jax.Array, axes: Axes = -1, where: jax.Array | None = None) -> jax.Array:
    """max + log(sum of exp(x - max)) over `axes`, which it removes, of the elements in `where`."""
    dtype = x.dtype
    if where is not None:
        x = jnp.where(where, x, -jnp.inf)
    top, total = logsumexp_stats(x, axes)
    return jnp.where(jnp.isinf(top), top, top + jnp.log(total)).astype(dtype)


@logsumexp.defjvp
def _logsumexp_jvp(axes, primals, tangents):  # type: ignore[no-untyped-def]
    x, where = primals
    (wide,), (x_dot,) = _wide(x), _wide(tangents[0])
    if where is not None:
        wide, x_dot = jnp.where(where, wide, -jnp.inf), jnp.where(where, x_dot, 0)
    p = _probability(wide, *logsumexp_stats(wide, axes), axes)
    if where is not None:
        p = jnp.where(where, p, 0)
    return logsumexp(x, axes, where), jnp.sum(p * x_dot, axes).astype(x.dtype)


def _probability(x: jax.Array, top: jax.Array, total: jax.Array, axes: Axes) -> jax.Array:
    ndim = x.ndim
    return jnp.exp(_wide(x)[0] - _rows(top, axes, ndim)) / _rows(total, axes, ndim)


def log_softmax_bwd(
    dy: jax.Array, x: jax.Array, top: jax.Array, total: jax.Array, axes: Axes = -1
) -> jax.Array:
    """dy - exp(x - top) / total * sum(dy): the gradient of log_softmax from x and its stats."""
    dtype, p = dy.dtype, _probability(x, top, total, axes)
    (dy,) = _wide(dy)
    return (dy - p * jnp.sum(dy, axes, keepdims=True)).astype(dtype)


def log_softmax_jvp(
    x_dot: jax.Array, x: jax.Array, top: jax.Array, total: jax.Array, axes: Axes = -1
) -> jax.Array:
    """x_dot - sum(exp(x - top) / total * x_dot): the tangent of log_softmax."""
    dtype, p = x_dot.dtype, _probability(x, top, total, axes)
    (x_dot,) = _wide(x_dot)
    return (x_dot - jnp.sum(p * x_dot, axes, keepdims=True)).astype(dtype)


def logsumexp_bwd(
    x: jax.Array, top: jax.Array, total: jax.Array, g: jax.Array, axes: Axes = -1
) -> jax.Array:
    """g * exp(x - top) / total: the gradient of logsumexp from x and its stats."""
    (g,) = _wide(g)
    return (_rows(g, axes, x.ndim) * _probability(x, top, total, axes)).astype(x.dtype)


def logsumexp_jvp(
    x_dot: jax.Array, x: jax.Array, top: jax.Array, total: jax.Array, axes: Axes = -1
) -> jax.Array:
    """sum(exp(x - top) / total * x_dot): the tangent of logsumexp."""
    dtype, p = x_dot.dtype, _probability(x, top, total, axes)
    (x_dot,) = _wide(x_dot)
    return jnp.sum(p * x_dot, axes).astype(dtype)
