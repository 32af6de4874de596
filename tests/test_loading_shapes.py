"""Masked, scaled, causal calls of unusual shapes: broadcast, empty, of many dimensions, complex."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import every_function, ours, theirs
from test_api import close
from test_loading_api import X, elementwise

pytestmark = pytest.mark.usefixtures("cpu")


@elementwise
def test_causal_is_the_lower_triangle(name):
    """Of more queries or fewer, beside a mask, on each axis."""
    for x in (X, X.T, X[:1], X[:, :1]):
        lower = np.tri(*x.shape, dtype=bool)
        for axis in (-1, 0, None):
            for mask in (None, x > -1):
                want = ours(name, axis, where=lower if mask is None else lower & mask)(x)
                close(ours(name, axis, where=mask, is_causal=True)(x), want)


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 1, 1), (1, 1, 1, 4), (2, 1, 3, 1)], ids=str)
@every_function
def test_a_mask_of_more_dimensions_broadcasts_x(name, shape):
    """As in jax.nn; the gradient is that of the broadcast, added up."""
    where = np.arange(np.prod(shape)).reshape(shape) % 3 != 1
    both = np.broadcast_shapes(shape, X.shape)
    options = {"where": where} if name == "logsumexp" else {"where": where, "scale": 0.37}

    def each(f):
        y, pull = jax.vjp(f, X)
        return y, pull(jnp.where(jnp.isfinite(y), jnp.cos(y), 1))[0]

    got = each(ours(name, **options))
    want = each(
        lambda x: ours(name, **{**options, "where": np.broadcast_to(where, both)})(
            jnp.broadcast_to(x, both)
        )
    )
    assert got[0].shape == both[: -1 if name == "logsumexp" else None]
    jax.tree.map(close, got, want)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 1), (1, 1), (2, 0, 3)], ids=str)
@every_function
def test_empty_and_degenerate_shapes(name, shape):
    """Of one element a row, of none, of no rows: shapes as without a mask; masked rows empty."""
    extra = {} if name == "logsumexp" else {"scale": 0.5, "is_causal": True}
    masks = np.ones(shape, bool), np.zeros(shape[-1:], bool), np.array(False)

    def both(x, axis, mask):
        y, pull = jax.vjp(ours(name, axis, where=mask, **extra), x)
        return y, pull(jnp.ones_like(y))[0]

    def program(x):
        return [[both(x, axis, mask) for mask in masks] for axis in axes]

    x, axes = np.ones(shape, np.float32), (-1, 0, None, ())
    for axis, found in zip(axes, jax.jit(program)(x), strict=True):
        like = jax.eval_shape(theirs(name, axis), x)
        for (y, dx), mask in zip(found, masks, strict=True):
            assert (y.shape, y.dtype, dx.shape) == (like.shape, np.float32, shape)
            if not mask.any():
                np.testing.assert_array_equal(y, 0 if name == "softmax" else -np.inf)
                np.testing.assert_array_equal(dx, 0)
            elif mask.shape == (3, 1) and axis == -1 and name != "logsumexp":
                first = [1, 1, 1] if name == "softmax" else [0, 0, 0]
                np.testing.assert_array_equal(y[:, 0], first)


@every_function
def test_more_dimensions_than_a_kernel_has(name):
    """Nine, none of which is 1: as of the same rows with fewer."""
    x = np.random.default_rng(3).standard_normal((2,) * 9).astype(np.float32)
    mask = np.random.default_rng(4).random((2,) * 9) < 0.7
    options = {} if name == "logsumexp" else {"scale": 0.37}
    got = ours(name, (1, 3, 8), where=mask, **options)(x)
    rows, keep = (np.moveaxis(a, (1, 3, 8), (6, 7, 8)).reshape(64, 8) for a in (x, mask))
    want = np.asarray(ours(name, where=keep, **options)(rows))
    if name != "logsumexp":
        got = np.moveaxis(got, (1, 3, 8), (6, 7, 8))
    close(np.reshape(got, want.shape), want)


@elementwise
def test_formulas_of_complex_numbers(name):
    x = X + 1j * X[::-1]
    close(ours(name, scale=0.5)(x), theirs(name)(x * 0.5))
    lower = np.tri(3, 4, dtype=bool)
    close(ours(name, is_causal=True)(x), theirs(name, where=lower)(x))
