"""vmap of an op: where the batch dimension goes. It stays where the rows have it, if it can."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ._ops import Loading, Op

Dims = Sequence[int | None]


def batched(
    op: Op, args: Sequence[jax.Array], dims: Dims, axes: tuple[int, ...], loading: Loading
) -> tuple[list[jax.Array], tuple[int, ...], int, int]:
    """The operands with a batch dimension, the axes beside it, and its place in what has the rows'
    shape and in what has one number a row."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    ndim = args[0].ndim - (dims[0] is not None)
    at = _place(op, dims, ndim, loading)
    reduced = [a + ndim for a in axes]
    at_row = sum(d not in reduced for d in range(at))
    own = op.inputs + op.given
    places = [at] * op.inputs + [at_row] * op.given
    operands = [
        jnp.broadcast_to(jnp.expand_dims(a, to), (*a.shape[:to], size, *a.shape[to:]))
        if d is None
        else jnp.moveaxis(a, d, to)
        for a, d, to in zip(args[:own], dims[:own], places, strict=True)
    ]
    operands += [_broadcasting(a, d, at, ndim) for a, d in zip(args[own:], dims[own:], strict=True)]
    shifted = tuple(a - 1 if d < at else a for a, d in zip(axes, reduced, strict=True))
    return operands, shifted, at, at_row


def _place(op: Op, dims: Dims, ndim: int, loading: Loading) -> int:
    """Where the rows have the batch dimension; in front if none has it, if the scale has it (which
    kernels take a number of for each leading dimension), or if it would part query from key."""
    found = next((d for d in dims[: op.inputs] if d is not None), 0)
    scale_has_it = loading.scaled and dims[-1] is not None
    return 0 if scale_has_it or (loading.causal and found > ndim - 2) else found


def _broadcasting(a: jax.Array, d: int | None, at: int, ndim: int) -> jax.Array:
    """A mask or scale, batched in `d` or not, as it broadcasts against rows batched in `at`."""
    rank = a.ndim - (d is not None)
    before = at - (ndim - rank)  # its dimensions that come before the batch
    if d is None:
        return jnp.expand_dims(a, before) if before > 0 else a
    if before >= 0:
        return jnp.moveaxis(a, d, before)
    a = jnp.moveaxis(a, d, 0)
    return jnp.expand_dims(a, tuple(range(1, 1 - before)))
