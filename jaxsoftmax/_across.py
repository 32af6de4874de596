"""Rows that are cut over devices: what each device does with its parts, and what they exchange.

Forward, the reduce-only kernel gives the maximum and the sum of each part, two all-reduces of a
number a row merge them, and a map follows. A gradient all-reduces one number a row, or nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from . import _plan, reference
from ._masks import Names, causal_mask, kept, wide
from ._ops import EVERY, Loading

# runs an op on parts, with a mask and a scale: (name, operands, path, stats, loading) -> results
Run = Callable[..., Sequence[jax.Array]]


def across(
    run: Run,
    name: str,
    operands: Sequence[jax.Array],
    names: Names,
    axes: tuple[int, ...],
    path: _plan.PathLike,
    loading: Loading,
) -> list[jax.Array]:
    """The results of an op, and the statistics if it has any, on parts of rows that are cut over
    the mesh axes `names`."""
    op, path = EVERY[name], _plan.for_parts(path)
    own, mask, scale = loading.split(operands)
    x, extra = own[0], operands[len(own) :]
    rows = reference.Rows(axes, mask, scale, loading.causal, loading.dtype, names)

    def kernel(name: str, *operands: jax.Array, loading: Loading = loading) -> list[jax.Array]:
        stats = EVERY[name].stats
        return list(run(name, *operands, path=path, stats=stats, loading=loading))

    if op.residuals is None:  # a gradient
        if op.folds == 0:
            return kernel(name, *operands)
        if name == "log_softmax_bwd" and scale is not None:
            dy, of_x, top, total = own
            z = _product(of_x, scale)
            dx = reference.log_softmax_bwd(wide(dy), z, top, total, _unscaled(rows, None))
            return [kept(scale * dx, rows.mask(dx)).astype(loading.dtype or dy.dtype)]
        return [getattr(reference, name)(*own, rows)]
    alone = partial(kernel, loading=dataclasses.replace(loading, dtype=None))
    y, top, total = _logsumexp(alone, rows, loading, x, *extra)
    if name == "logsumexp":
        return [y.astype(loading.dtype or x.dtype), top, total]
    total = jnp.where(jnp.isinf(top), jnp.nan, total)  # as inf - inf is
    if scale is not None:
        # The map of softmax is a gradient's kernel, which would multiply by the scale.
        dtype = jnp.dtype(loading.dtype or x.dtype)
        x, extra = _product(x, scale), extra[:-1]
        rows = _unscaled(rows, dtype)
        loading = dataclasses.replace(loading, scaled=False).to(dtype, x.dtype)
    if name == "log_softmax":
        return [reference.log_softmax_of(x, top, total, rows), top, total]
    ones = jnp.ones_like(top, x.dtype)
    return kernel("logsumexp_bwd", x, top, total, ones, *extra, loading=loading)


def _product(x: jax.Array, scale: jax.Array) -> jax.Array:
    """scale * x, rounded as the kernels' is: fused into a difference it would not be."""
    return lax.optimization_barrier(scale * wide(x))


def _unscaled(rows: reference.Rows, dtype: Any) -> reference.Rows:
    return dataclasses.replace(rows, scale=None, dtype=dtype)


def _logsumexp(
    kernel: Run, rows: reference.Rows, loading: Loading, *operands: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logarithm of whole rows, not rounded, and their statistics. As in the ops' own rules the
    maximum counts as a constant, which the sum's derivative makes good."""

    @jax.custom_jvp
    def logsumexp(*operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        _, top, total = kernel("logsumexp", *operands)
        top, total = _merged(top, total, rows.names)
        infinite = jnp.isinf(top)
        y = jnp.where(infinite, top, top + jnp.log(total))
        return y, top, jnp.where(infinite, 1, total)

    @partial(logsumexp.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> Any:
        (x, *extra), (x_dot, *_) = primals, tangents
        y, top, total = logsumexp(*primals)
        y_dot = jnp.zeros_like(y)
        if not isinstance(x_dot, SymbolicZero):
            (part,) = kernel("logsumexp_jvp", x_dot, x, top, total, *extra)
            y_dot += lax.psum(part.astype(y.dtype), rows.names)
        if loading.scaled and not isinstance(tangents[-1], SymbolicZero):
            mask = extra[0] if loading.masked else None

            def of_scale(scale: jax.Array) -> jax.Array:
                again = dataclasses.replace(rows, where=mask, scale=scale, dtype=y.dtype)
                return reference.logsumexp(x, again)

            y_dot += jax.jvp(of_scale, primals[-1:], tangents[-1:])[1]
        return (y, top, total), (y_dot, jnp.zeros_like(top), total * y_dot)

    return logsumexp(*operands)


def _merged(top: jax.Array, total: jax.Array, names: Names) -> tuple[jax.Array, jax.Array]:
    """The statistics of rows from those of their parts."""
    highest = lax.pmax(top, names)
    d = top - highest
    part = d - top
    lost = (top - (d - part)) - (highest + part)  # in rounding d
    weight = jnp.exp(d) * (1 + jnp.where(jnp.isfinite(lost), lost, 0))
    weight = jnp.where(top == highest, 1, weight)  # also if they are infinite
    total = lax.psum(total * weight, names)
    return jnp.where(jnp.isnan(total), jnp.nan, highest), total  # pmax may overlook a NaN


def placed(
    operands: Sequence[jax.Array],
    loading: Loading,
    queries: Names,
    keys: Names,
    own: int,
) -> tuple[list[jax.Array], Loading]:
    """Causal parts as masked ones, where the queries or keys (the last two dimensions) are cut
    over these mesh axes: a kernel counts both from 0."""
    if not loading.causal or not (queries or keys):
        return list(operands), loading
    x, mask = operands[0], operands[own] if loading.masked else None
    first = [
        lax.axis_index(names) * size if names else 0
        for names, size in zip((queries, keys), x.shape[-2:], strict=True)
    ]
    rest = operands[own + loading.masked :]
    masked = dataclasses.replace(loading, causal=False, masked=True)
    return [*operands[:own], causal_mask(x.shape, mask, first), *rest], masked
