"""jnp formulas of the ops: for platforms and cases without a kernel, and for derivative rules.

16-bit (and narrower) floats are computed in float32 and rounded once. Specials are jax.nn's; a
fully masked row gives 0 (softmax) or -inf, with gradient 0. `Rows` says which rows they are of.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ._masks import Mask, Over, kept, wide
from ._masks import Rows as Rows

_LAST = Rows()

# The ops of x: z = scale * x, then a core whose derivative is its own.


def softmax(x: jax.Array, rows: Rows = _LAST) -> jax.Array:
    """exp(z - max) / sum; elements outside the mask are left out and give 0."""
    mask = rows.mask(x)
    return rows.cast(_softmax(rows.scaled(x, mask), rows.over, mask), x)


def log_softmax(x: jax.Array, rows: Rows = _LAST) -> jax.Array:
    """z - max - log(sum of exp(z - max)); elements outside the mask give -inf."""
    mask = rows.mask(x)
    return rows.cast(_log_softmax(rows.scaled(x, mask), rows.over, mask), x)


def logsumexp(x: jax.Array, rows: Rows = _LAST) -> jax.Array:
    """max + log(sum of exp(z - max)) of the elements in the mask, without the axes."""
    mask = rows.mask(x)
    return rows.cast(_logsumexp(rows.scaled(x, mask), rows.over, mask), x)


def log_softmax_stats(x: jax.Array, rows: Rows = _LAST) -> tuple[jax.Array, jax.Array]:
    """Each row's maximum and its sum of exp(z - maximum), in the type of arithmetic."""
    mask = rows.mask(x)
    _, total, top = _shifted(rows.scaled(x, mask), rows.over, mask)
    return rows.over.squeeze(top), rows.over.squeeze(total)


def logsumexp_stats(x: jax.Array, rows: Rows = _LAST) -> tuple[jax.Array, jax.Array]:
    """The same, but beside an infinite maximum the sum is 1: finite elements have a gradient."""
    mask = rows.mask(x)
    return _logsumexp_stats(rows.scaled(x, mask), rows.over, mask)


def _logsumexp_stats(z: jax.Array, over: Over, mask: Mask) -> tuple[jax.Array, jax.Array]:
    z = kept(z, mask, -jnp.inf)
    _, total, top = _shifted(z, over, None)
    top = jnp.where(over.any(jnp.isnan(z)), jnp.nan, top)  # XLA's maximum may overlook one
    return over.squeeze(top), over.squeeze(jnp.where(jnp.isinf(top), 1, total))


def _shifted(z: jax.Array, over: Over, mask: Mask) -> tuple[jax.Array, jax.Array, jax.Array]:
    """z - max, the sum of its exponentials, and the maximum: of the elements in the mask."""
    z = kept(z, mask, -jnp.inf)
    top = over.max(z)
    base = top
    if mask is not None:
        # A row with nothing in it would subtract -inf from -inf; an unmasked -inf row must.
        base = jnp.where(over.any(jnp.broadcast_to(mask, z.shape)), top, 0)
    d = z - base
    return d, over.sum(kept(jnp.exp(d), mask)), top


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _softmax(z: jax.Array, over: Over, mask: Mask) -> jax.Array:
    d, total, _ = _shifted(z, over, mask)
    return kept(jnp.exp(d) / _divisor(total, mask), mask)


@_softmax.defjvp
def _softmax_jvp(over, primals, tangents):  # type: ignore[no-untyped-def]
    y = _softmax(primals[0], over, primals[1])
    return y, softmax_bwd(y, tangents[0], Rows(over.axes, primals[1], names=over.names))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _log_softmax(z: jax.Array, over: Over, mask: Mask) -> jax.Array:
    d, total, _ = _shifted(z, over, mask)
    return kept(d - jnp.log(total), mask, -jnp.inf)


@_log_softmax.defjvp
def _log_softmax_jvp(over, primals, tangents):  # type: ignore[no-untyped-def]
    z, mask = primals
    p, z_dot = _softmax(z, over, mask), kept(tangents[0], mask)
    return _log_softmax(z, over, mask), kept(z_dot - over.sum(p * z_dot), mask)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _logsumexp(z: jax.Array, over: Over, mask: Mask) -> jax.Array:
    top, total = _logsumexp_stats(z, over, mask)
    return jnp.where(jnp.isinf(top), top, top + jnp.log(total))


@_logsumexp.defjvp
def _logsumexp_core_jvp(over, primals, tangents):  # type: ignore[no-untyped-def]
    z, mask = primals
    rows = Rows(over.axes, mask, names=over.names)
    y_dot = logsumexp_jvp(tangents[0], z, *_logsumexp_stats(z, over, mask), rows)
    return _logsumexp(z, over, mask), y_dot


# The same, their gradients and tangents, from the rows' statistics.


def log_softmax_of(x: jax.Array, top: jax.Array, total: jax.Array, rows: Rows = _LAST) -> jax.Array:
    """z - top - log(total)."""
    mask, (top, total) = rows.mask(x), (rows.over.spread(a, x.ndim) for a in (top, total))
    y = rows.scaled(x, mask) - top - jnp.log(total)
    return rows.cast(kept(y, mask, -jnp.inf), x)


def _divisor(total: jax.Array, mask: Mask) -> jax.Array:
    """A row's sum; of a fully masked row 1."""
    return total if mask is None else jnp.where(total == 0, 1, total)


def _probability(
    x: jax.Array, top: jax.Array, total: jax.Array, mask: Mask, rows: Rows
) -> jax.Array:
    top, total = (rows.over.spread(stat, x.ndim) for stat in (top, total))
    d = kept(rows.scaled(x, mask) - top, mask, -jnp.inf)
    return jnp.exp(d) / _divisor(total, mask)


def softmax_bwd(y: jax.Array, dy: jax.Array, rows: Rows = _LAST) -> jax.Array:
    """scale * y * (dy - sum(y * dy)): the gradient of softmax from its output y."""
    like, mask = y, rows.mask(y)
    y, dy = wide(y, mask), wide(dy, mask)
    dx = y * (dy - rows.over.sum(y * dy))
    return rows.cast(kept(rows.times(dx), mask), like)


def log_softmax_bwd(
    dy: jax.Array, x: jax.Array, top: jax.Array, total: jax.Array, rows: Rows = _LAST
) -> jax.Array:
    """scale * (dy - exp(z - top) / total * sum(dy)): the gradient of log_softmax."""
    like, mask = dy, rows.mask(x)
    dy, p = wide(dy, mask), _probability(x, top, total, mask, rows)
    dx = dy - p * rows.over.sum(dy)
    return rows.cast(kept(rows.times(dx), mask), like)


def log_softmax_jvp(
    x_dot: jax.Array, x: jax.Array, top: jax.Array, total: jax.Array, rows: Rows = _LAST
) -> jax.Array:
    """scale * (x_dot - sum(exp(z - top) / total * x_dot)): the tangent of log_softmax."""
    like, mask = x_dot, rows.mask(x)
    x_dot, p = wide(x_dot, mask), _probability(x, top, total, mask, rows)
    y_dot = x_dot - rows.over.sum(p * x_dot)
    return rows.cast(kept(rows.times(y_dot), mask), like)


def logsumexp_bwd(
    x: jax.Array, top: jax.Array, total: jax.Array, g: jax.Array, rows: Rows = _LAST
) -> jax.Array:
    """scale * exp(z - top) / total * g: the gradient of logsumexp."""
    mask = rows.mask(x)
    p = _probability(x, top, total, mask, rows)
    dx = rows.times(rows.over.spread(wide(g), x.ndim) * p)
    return rows.cast(kept(dx, mask), x)


def logsumexp_jvp(
    x_dot: jax.Array, x: jax.Array, top: jax.Array, total: jax.Array, rows: Rows = _LAST
) -> jax.Array:
    """sum(exp(z - top) / total * scale * x_dot): the tangent of logsumexp."""
    mask = rows.mask(x)
    p = _probability(x, top, total, mask, rows)
    y_dot = rows.over.sum(p * rows.scaled(x_dot, mask))
    return rows.cast(rows.over.squeeze(y_dot), x_dot)
