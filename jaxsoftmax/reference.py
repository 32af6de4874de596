"""jnp formulas of the ops: for platforms and cases without a kernel, and for derivative rules.

16-bit (and narrower) floats are computed in float32 and rounded once, to `dtype` if there is one.
Elements outside `where` (a mask) or, if `causal`, after the query of the last two dimensions
(query, key) are left out of every sum, whatever they hold. Specials are jax.nn's; a fully masked
row gives 0 (softmax) or -inf, with gradient 0. A `scale` multiplies x, and so a gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ._masks import Axes, Mask, Scale, kept, mask_of, scaled, spread, wide

# The ops of x: z = scale * x, then a core whose derivative is its own.


def softmax(
    x: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """exp(z - max) / sum over `axes`; elements outside the mask are left out and give 0."""
    mask = mask_of(x, where, causal)
    return _softmax(scaled(wide(x, mask), scale), axes, mask).astype(dtype or x.dtype)


def log_softmax(
    x: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """z - max - log(sum of exp(z - max)) over `axes`; elements outside the mask give -inf."""
    mask = mask_of(x, where, causal)
    return _log_softmax(scaled(wide(x, mask), scale), axes, mask).astype(dtype or x.dtype)


def logsumexp(
    x: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """max + log(sum of exp(z - max)) over `axes`, which it removes, of the elements in the mask."""
    mask = mask_of(x, where, causal)
    return _logsumexp(scaled(wide(x, mask), scale), axes, mask).astype(dtype or x.dtype)


def log_softmax_stats(
    x: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Each row's maximum and its sum of exp(z - maximum), in the type of arithmetic."""
    mask = mask_of(x, where, causal)
    _, total, top = _shifted(scaled(wide(x, mask), scale), axes, mask)
    return jnp.squeeze(top, axes), jnp.squeeze(total, axes)


def logsumexp_stats(
    x: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The same, but beside an infinite maximum the sum is 1: finite elements have a gradient."""
    mask = mask_of(x, where, causal)
    return _logsumexp_stats(scaled(wide(x, mask), scale), axes, mask)


def _logsumexp_stats(z: jax.Array, axes: Axes, mask: Mask) -> tuple[jax.Array, jax.Array]:
    z = kept(z, mask, -jnp.inf)
    _, *stats = _shifted(z, axes, None)
    total, top = (jnp.squeeze(stat, axes) for stat in stats)
    top = jnp.where(jnp.any(jnp.isnan(z), axes), jnp.nan, top)  # XLA's maximum may overlook one
    return top, jnp.where(jnp.isinf(top), 1, total)


def _shifted(z: jax.Array, axes: Axes, mask: Mask) -> tuple[jax.Array, jax.Array, jax.Array]:
    """z - max, the sum of its exponentials, and the maximum: of the elements in the mask."""
    z = kept(z, mask, -jnp.inf)
    top = jnp.max(z, axes, keepdims=True, initial=-jnp.inf)
    base = top
    if mask is not None:
        # A row with nothing in it would subtract -inf from -inf; an unmasked -inf row must.
        filled = jnp.any(jnp.broadcast_to(mask, z.shape), axes, keepdims=True)
        base = jnp.where(filled, top, 0)
    d = z - base
    return d, jnp.sum(kept(jnp.exp(d), mask), axes, keepdims=True), top


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _softmax(z: jax.Array, axes: Axes, mask: Mask) -> jax.Array:
    d, total, _ = _shifted(z, axes, mask)
    return kept(jnp.exp(d) / _divisor(total, mask), mask)


@_softmax.defjvp
def _softmax_jvp(axes, primals, tangents):  # type: ignore[no-untyped-def]
    y = _softmax(primals[0], axes, primals[1])
    return y, softmax_bwd(y, tangents[0], axes, primals[1])


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _log_softmax(z: jax.Array, axes: Axes, mask: Mask) -> jax.Array:
    d, total, _ = _shifted(z, axes, mask)
    return kept(d - jnp.log(total), mask, -jnp.inf)


@_log_softmax.defjvp
def _log_softmax_jvp(axes, primals, tangents):  # type: ignore[no-untyped-def]
    z, mask = primals
    p, z_dot = _softmax(z, axes, mask), kept(tangents[0], mask)
    y_dot = z_dot - jnp.sum(p * z_dot, axes, keepdims=True)
    return _log_softmax(z, axes, mask), kept(y_dot, mask)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _logsumexp(z: jax.Array, axes: Axes, mask: Mask) -> jax.Array:
    top, total = _logsumexp_stats(z, axes, mask)
    return jnp.where(jnp.isinf(top), top, top + jnp.log(total))


@_logsumexp.defjvp
def _logsumexp_core_jvp(axes, primals, tangents):  # type: ignore[no-untyped-def]
    z, mask = primals
    y_dot = logsumexp_jvp(tangents[0], z, *_logsumexp_stats(z, axes, mask), axes, mask)
    return _logsumexp(z, axes, mask), y_dot


# Their gradients and tangents, from the rows' statistics.


def _divisor(total: jax.Array, mask: Mask) -> jax.Array:
    """A row's sum; of a fully masked row 1."""
    return total if mask is None else jnp.where(total == 0, 1, total)


def _probability(
    x: jax.Array, top: jax.Array, total: jax.Array, axes: Axes, mask: Mask, scale: Scale
) -> jax.Array:
    top, total = (spread(stat, axes, x.ndim) for stat in (top, total))
    d = kept(scaled(wide(x, mask), scale) - top, mask, -jnp.inf)
    return jnp.exp(d) / _divisor(total, mask)


def softmax_bwd(
    y: jax.Array,
    dy: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """scale * y * (dy - sum(y * dy)): the gradient of softmax from its output y."""
    dtype, mask = dtype or y.dtype, mask_of(y, where, causal)
    y, dy = wide(y, mask), wide(dy, mask)
    dx = y * (dy - jnp.sum(y * dy, axes, keepdims=True))
    return kept(scaled(dx, scale), mask).astype(dtype)


def log_softmax_bwd(
    dy: jax.Array,
    x: jax.Array,
    top: jax.Array,
    total: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """scale * (dy - exp(z - top) / total * sum(dy)): the gradient of log_softmax."""
    dtype, mask = dtype or dy.dtype, mask_of(x, where, causal)
    dy, p = wide(dy, mask), _probability(x, top, total, axes, mask, scale)
    dx = dy - p * jnp.sum(dy, axes, keepdims=True)
    return kept(scaled(dx, scale), mask).astype(dtype)


def log_softmax_jvp(
    x_dot: jax.Array,
    x: jax.Array,
    top: jax.Array,
    total: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """scale * (x_dot - sum(exp(z - top) / total * x_dot)): the tangent of log_softmax."""
    dtype, mask = dtype or x_dot.dtype, mask_of(x, where, causal)
    x_dot, p = wide(x_dot, mask), _probability(x, top, total, axes, mask, scale)
    y_dot = x_dot - jnp.sum(p * x_dot, axes, keepdims=True)
    return kept(scaled(y_dot, scale), mask).astype(dtype)


def logsumexp_bwd(
    x: jax.Array,
    top: jax.Array,
    total: jax.Array,
    g: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """scale * exp(z - top) / total * g: the gradient of logsumexp."""
    mask = mask_of(x, where, causal)
    p = _probability(x, top, total, axes, mask, scale)
    dx = scaled(spread(wide(g), axes, x.ndim) * p, scale)
    return kept(dx, mask).astype(dtype or x.dtype)


def logsumexp_jvp(
    x_dot: jax.Array,
    x: jax.Array,
    top: jax.Array,
    total: jax.Array,
    axes: Axes = -1,
    where: Mask = None,
    scale: Scale = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """sum(exp(z - top) / total * scale * x_dot): the tangent of logsumexp."""
    dtype, mask = dtype or x_dot.dtype, mask_of(x, where, causal)
    p = _probability(x, top, total, axes, mask, scale)
    return jnp.sum(p * scaled(wide(x_dot, mask), scale), axes).astype(dtype)
