"""Rows that are cut over devices: what each device does with its parts, and what they exchange.

Forward, the reduce-only kernel gives the maximum and the sum of each part, two all-reduces of a
number a row merge them, and a map follows. A gradient all-reduces one number a row, or nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from . import _plan, reference
from ._masks import Names, causal_mask
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

    def kernel(
        name: str, *own: jax.Array, loading: Loading = loading, extra: Sequence[jax.Array] = extra
    ) -> list[jax.Array]:
        stats = EVERY[name].stats
        return list(run(name, *own, *extra, path=path, stats=stats, loading=loading))

    if op.residuals is None:  # a gradient
        if op.folds == 0:
            return kernel(name, *own)
        return [getattr(reference, name)(*own, rows)]
    _, top, total = kernel("logsumexp", x, loading=dataclasses.replace(loading, dtype=None))
    top, total = _merged(top, total, names)
    infinite = jnp.isinf(top)
    if name == "logsumexp":
        y = jnp.where(infinite & ~jnp.isnan(total), top, top + jnp.log(total))
        return [y.astype(loading.dtype or x.dtype), top, jnp.where(infinite, 1, total)]
    total = jnp.where(infinite, jnp.nan, total)  # as inf - inf is
    if name == "log_softmax":
        return [reference.log_softmax_of(x, top, total, rows), top, total]
    if loading.scaled:  # the kernel below is of a gradient: it would multiply by the scale
        if x.dtype.itemsize < 4:
            return [reference.softmax_of(x, top, total, rows)]
        # XLA must not fuse this product into a difference: it would not be rounded.
        x = lax.optimization_barrier(scale * x)
        loading, extra = dataclasses.replace(loading, scaled=False), extra[:-1]
    ones = jnp.ones_like(top, x.dtype)
    return kernel("logsumexp_bwd", x, top, total, ones, extra=extra, loading=loading)


def _merged(top: jax.Array, total: jax.Array, names: Names) -> tuple[jax.Array, jax.Array]:
    """The statistics of rows from those of their parts. The maximum counts as a constant, as in
    the ops' own rules: the sum's derivative makes it good."""
    top = lax.stop_gradient(top)
    highest = lax.pmax(top, names)
    d = top - highest
    part = d - top
    lost = (top - (d - part)) - (highest + part)  # in rounding d
    weight = jnp.exp(d) * (1 + jnp.where(jnp.isfinite(lost), lost, 0))
    weight = jnp.where(top == highest, 1, weight)  # also if they are infinite
    return highest, lax.psum(total * weight, names)


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
