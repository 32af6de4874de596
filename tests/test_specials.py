"""NaN, infinities and zeros exactly as jax.nn in every path; one-hot rows; odd shapes; any axis."""

from __future__ import annotations

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Expected, as_dtype
from plans import hand_plans, run

from jaxsoftmax import softmax
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, PATHS

NAMES = (None, *PATHS)


def value_and_vjp(function, x, dy):
    """Value and gradient under one jit, numpy to numpy."""

    def both(x, dy):
        y, pull = jax.vjp(function, x)
        return y, pull(dy)[0]

    with jax.enable_x64(x.dtype == np.float64):
        return tuple(np.asarray(a) for a in jax.jit(both)(x, dy))


def same_pattern(ours, theirs):
    for mark in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(mark(ours), mark(theirs))


def parity_rows(dtype, n):
    x = cases.batch(n, as_dtype(dtype))
    return x, cases.batch_dy(x)


@functools.lru_cache(maxsize=2)
def jax_nn_pattern(dtype, n, platform):
    return value_and_vjp(jax.nn.softmax, *parity_rows(dtype, n))


@pytest.mark.parametrize("path", NAMES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 33, 256, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_with_jax_nn(platform, dtype, n, path):
    """Which elements are NaN, infinite or zero: value and gradient, on rows of every case."""
    x, dy = parity_rows(dtype, n)
    y, dx = value_and_vjp(lambda x: softmax(x, path=path), x, dy)
    want_y, want_dx = jax_nn_pattern(dtype, n, platform)
    same_pattern(y, want_y)
    same_pattern(dx, want_dx)
    masked = np.isneginf(x) & ~np.isnan(want_y)
    assert masked.any() or n == 1
    assert (y[masked] == 0).all()
    assert (dx[masked & np.isfinite(want_dx)] == 0).all()


@pytest.mark.parametrize("path", NAMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 9, 65, 1000, 16385])
def test_one_hot(platform, dtype, n, path):
    """All -inf but one: exactly 1 there and 0 elsewhere, with gradient 0, wherever the one is."""
    spots = list(range(n)) if n <= 65 else cases.positions(n)
    x = np.full((len(spots), n), -np.inf)
    x[np.arange(len(spots)), spots] = np.linspace(-50, 50, len(spots))
    dy = np.random.default_rng(0).standard_normal(x.shape)
    x, dy = x.astype(as_dtype(dtype)), dy.astype(as_dtype(dtype))
    y, dx = value_and_vjp(lambda x: softmax(x, path=path), x, dy)
    np.testing.assert_array_equal(y, np.isfinite(x).astype(y.dtype))
    np.testing.assert_array_equal(dx, np.zeros_like(dx))


@pytest.mark.parametrize("op", OPS)
def test_one_hot_in_unusual_plans(platform, op):
    n = 300
    inputs, expected = cases.expected(
        op, cases.make("one_hot", len(cases.positions(n)), n, as_dtype("float32"))
    )
    for plan in hand_plans(op, "float32", n, platform).values():
        expected.check(run(op, *inputs, path=plan))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("path", NAMES, ids=str)
def test_a_special_spoils_its_row_only(platform, path, value):
    """A NaN or +inf, at any place, makes its own row NaN and touches no other; -inf none at all."""
    n = 257
    spots = cases.positions(n)
    x = np.zeros((2 * len(spots), n), np.float32)
    x[np.arange(0, len(x), 2), spots] = value
    y = run("softmax", x, path=path)
    assert np.isnan(y[0::2]).all() if value != -np.inf else np.isfinite(y[0::2]).all()
    assert (y[1::2] == y[1, 0]).all()
    assert abs(y[1, 0] - 1 / n) <= 4 * np.spacing(np.float32(1 / n))


SHAPES = [
    (0, 5),
    (5, 0),
    (0, 0),
    (5, 1),
    (1, 5),
    (1, 1),
    (0,),
    (1,),
    (2, 0, 3),
    (3, 2, 0),
    (2, 3, 1),
    (),
]
AXES = [-1, 0, (), None, (0,), (-1, 0)]


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_empty_and_degenerate_shapes(platform, shape, axis):
    """Value, dtype, shape and gradient as jax.nn; the same exception type where it raises."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    dy = np.cos(x)
    try:
        want = value_and_vjp(lambda x: jax.nn.softmax(x, axis), x, dy)
    except Exception as error:
        with pytest.raises(type(error)):
            softmax(x, axis)
        return
    for ours, theirs in zip(value_and_vjp(lambda x: softmax(x, axis), x, dy), want, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_empty_in_every_path(platform, op, shape, path):
    x = np.ones(shape, np.float32)
    inputs = (x,) * OPS[op].inputs
    assert run(op, *inputs, path=path).shape == shape


def test_axis_none_of_specials(cpu):
    """axis=() gives 1 for a finite element and NaN for any other."""
    x = np.array([1.0, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(softmax(x, axis=()), jax.nn.softmax(x, axis=()))


def every_axis(rank: int):
    """All axis arguments of that rank: ints of either sign, tuples in any order, None."""
    dims = range(rank)
    subsets = [c for k in range(1, rank + 1) for c in itertools.combinations(dims, k)]
    shuffled = [tuple(d - rank if i % 2 else d for i, d in enumerate(s[::-1])) for s in subsets]
    return [*dims, *range(-rank, 0), *subsets, *shuffled, None]


@pytest.mark.parametrize("axis", every_axis(3), ids=str)
def test_any_axis(platform, axis):
    """Against the oracle, the reduced dimensions moved last and flattened."""
    shape = (3, 5, 7)
    dims = tuple(range(3)) if axis is None else tuple(np.atleast_1d(axis) % 3)
    kept = [d for d in range(3) if d not in dims]

    def rows(a):
        return np.transpose(a, (*kept, *sorted(dims))).reshape(
            -1, int(np.prod([shape[d] for d in dims]))
        )

    rng = np.random.default_rng(5)
    x, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    y, dx = value_and_vjp(lambda x: softmax(x, axis), x, dy)
    Expected("softmax", (rows(x),)).check(rows(y))
    Expected("softmax_bwd", (rows(y), rows(dy))).check(rows(dx))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("axis", [0, 1, (0, 2), (1, 2)], ids=str)
def test_any_axis_in_every_path(platform, axis, path):
    x = np.random.default_rng(6).standard_normal((9, 4, 33)).astype(np.float32)
    got = value_and_vjp(lambda x: softmax(x, axis, path=path), x, x[::-1])
    want = value_and_vjp(lambda x: jax.nn.softmax(x, axis), x, x[::-1])
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=3e-7)


def test_rows_of_every_offset(platform):
    """A slice's rows start anywhere in memory."""
    x = jnp.asarray(np.random.default_rng(8).standard_normal((40, 77)), jnp.bfloat16)
    for start in range(9):
        part = np.asarray(x[3:20, start : start + 65])
        Expected("softmax", (part,)).check(
            np.asarray(jax.jit(lambda x, s=start: softmax(x[3:20, s : s + 65]))(x))
        )
