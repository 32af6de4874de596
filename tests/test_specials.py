"""NaN, infinities and zeros exactly as jax.nn in every path; one-hot rows; specials in a row."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from contracts import as_dtype, smallest_normal, spacing
from functions import every_function, ours, theirs, values_and_vjps
from plans import hand_plans
from runs import check_each, run_each

from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, PATHS

NAMES = (None, *PATHS)
FORWARD = [name for name in OPS if not name.endswith("_bwd")]


def same_pattern(got, want, where=True):
    for mark in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(mark(got) & where, mark(want) & where)


def cotangents(name: str, x: np.ndarray) -> np.ndarray:
    """For x, in its dtype; of log_softmax in float16 so small that jax.nn's sum holds them."""
    if name == "logsumexp":
        return cases.batch_g(x)
    dy = cases.batch_dy(x)
    if name == "log_softmax" and x.dtype == np.float16:
        dy = np.where(np.isfinite(dy), dy.clip(-8, 8), dy)
    return dy


def probabilities(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        terms = np.exp(x.astype(float) - x.astype(float).max(axis=-1, keepdims=True))
        return terms / terms.sum(axis=-1, keepdims=True)


@every_function
@pytest.mark.parametrize("n", [1, 33, 256, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_with_jax_nn(platform, dtype, n, name):
    """Which elements are NaN, infinite or zero: value and gradient, on rows of every case."""
    x = cases.batch(n, as_dtype(dtype))
    ct = cotangents(name, x)
    functions = [ours(name, path=path) for path in NAMES]
    *results, (want_y, want_dx) = values_and_vjps([*functions, theirs(name)], x, ct)
    # An infinity times what may have underflowed, in one float or the other, is no fixed thing.
    p = probabilities(x)
    infinite = np.isinf(ct).reshape(len(x), -1).any(axis=-1, keepdims=True)
    certain = ~infinite | np.isneginf(x) | (p > 2 * smallest_normal(x.dtype))
    masked = np.isneginf(x) & np.isfinite(want_dx)
    assert masked.any() or n == 1
    for y, dx in results:
        same_pattern(y, want_y)
        same_pattern(dx, want_dx, True if name == "softmax" else certain)
        np.testing.assert_array_equal(dx[masked], ct[masked] if name == "log_softmax" else 0)
        if name == "softmax":
            assert (y[np.isneginf(x) & ~np.isnan(want_y)] == 0).all()


@every_function
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 9, 65, 1000, 16385])
def test_one_hot(platform, dtype, n, name):
    """All -inf but one, wherever it is: exactly that one's probability, value and gradient."""
    spots = list(range(n)) if n <= 65 else cases.positions(n)
    hot = np.zeros((len(spots), n), bool)
    hot[np.arange(len(spots)), spots] = True
    x = np.where(hot, np.linspace(-50, 50, len(spots))[:, None], -np.inf).astype(as_dtype(dtype))
    # Numbers whose sums are exact.
    ct = np.random.default_rng(0).integers(-2, 3, x.shape[: 1 if name == "logsumexp" else 2])
    ct = ct.astype(x.dtype)
    for y, dx in values_and_vjps([ours(name, path=path) for path in NAMES], x, ct):
        if name == "softmax":
            np.testing.assert_array_equal(y, hot.astype(y.dtype))
            np.testing.assert_array_equal(dx, np.zeros_like(dx))
        elif name == "log_softmax":
            np.testing.assert_array_equal(y, np.where(hot, 0, -np.inf))
            total = ct.astype(float).sum(axis=-1, keepdims=True)
            want = ct - hot * total  # which a product rounds where x is finite
            off = np.abs(dx.astype(float) - want)
            assert (off <= hot * spacing(want, x.dtype)).all()
        else:
            np.testing.assert_array_equal(y, x[hot])
            np.testing.assert_array_equal(dx, hot * ct[:, None])


@pytest.mark.parametrize("op", OPS)
def test_one_hot_in_unusual_plans(platform, op):
    n = 300
    inputs, expected = cases.expected(
        op, cases.make("one_hot", len(cases.positions(n)), n, as_dtype("float32"))
    )
    check_each(op, inputs, expected, [*hand_plans(op, "float32", n, platform).values()])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("op", FORWARD)
def test_a_special_spoils_its_row_only(platform, op, value):
    """A NaN or +inf, at any place, makes its own row NaN (+inf that row's logsumexp) and touches no
    other; -inf none at all."""
    n = 257
    spots = cases.positions(n)
    x = np.zeros((2 * len(spots), n), np.float32)
    x[np.arange(0, len(x), 2), spots] = value
    want = {"softmax": 1 / n, "log_softmax": -np.log(n), "logsumexp": np.log(n)}[op]
    for (y,) in run_each(op, x, paths=NAMES):
        if value == -np.inf:
            y = y.reshape(len(x), -1)[0::2]
            assert (np.isfinite(y).sum(axis=-1) == y.shape[1] - (op == "log_softmax")).all()
        elif op == "logsumexp":
            np.testing.assert_array_equal(y[0::2], np.full(len(spots), value))
        else:
            assert np.isnan(y[0::2]).all()
        clean = y[1::2]
        if value != -np.inf:
            assert (clean == clean.flat[0]).all()
            assert abs(clean.flat[0] - want) <= 4 * np.spacing(np.float32(abs(want)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logsumexp_of_infinities(platform, dtype):
    """+inf beside numbers gives +inf and a gradient there only; beside a NaN it is NaN."""
    inf, nan = np.inf, np.nan
    rows = [[inf, 1, -inf, 2], [-inf] * 4, [inf, nan, 0, 1], [nan, -inf, 0, 1], [inf, inf, 0, 5]]
    value = [inf, -inf, nan, nan, inf]
    gradient = [[nan, 0, 0, 0], [nan] * 4, [nan] * 4, [nan] * 4, [nan, nan, 0, 0]]
    x, ct = np.array(rows).astype(as_dtype(dtype)), np.ones(5).astype(as_dtype(dtype))
    functions = [ours("logsumexp", path=path) for path in NAMES]
    for y, dx in values_and_vjps([*functions, theirs("logsumexp")], x, ct):
        np.testing.assert_array_equal(y.astype(float), value)
        np.testing.assert_array_equal(dx.astype(float), gradient)


@every_function
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_cotangents(platform, dtype, value, name):
    """Of rows without an underflow: the gradient is infinite or NaN where jax.nn's is."""
    x = np.random.default_rng(9).standard_normal((7, 50)).astype(as_dtype(dtype))
    x[3, 10:20] = -np.inf
    ct = np.ones(x.shape[: 1 if name == "logsumexp" else 2], x.dtype)
    ct[(3, 5)[: ct.ndim]] = ct[(4, 0)[: ct.ndim]] = ct[(5, 49)[: ct.ndim]] = value
    functions = [ours(name, path=path) for path in NAMES]
    *results, (_, want) = values_and_vjps([*functions, theirs(name)], x, ct)
    assert np.isnan(want[3, 12]) and not np.isfinite(want[4:6]).all()
    for _, dx in results:
        same_pattern(dx, want)
