"""The checker's own tests: it accepts the correctly rounded result and rejects wrong ones."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from oracle import (
    CONTRACTS,
    SOFTMAX_ULPS,
    Expected,
    as_dtype,
    assert_close,
    compute_epsilon,
    smallest_normal,
    spacing,
    wide,
)

from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", [as_dtype(d) for d in DTYPES], ids=list(DTYPES))
FINITE = tuple(cases.FINITE)


def rejects(op, inputs, wrong):
    with pytest.raises(AssertionError):
        assert_close(op, wrong.astype(inputs[0].dtype), inputs)


def normal_rows(op, dtype, rows=6, n=40):
    inputs, expected = cases.expected(op, cases.make("normal", rows, n, dtype))
    if len(inputs) > 1:  # plain cotangents, so that each fault below shows in every row
        dy = np.random.default_rng(3).standard_normal((rows, n)).astype(dtype)
        inputs = (*inputs[:-1], dy)
        expected = Expected(op, inputs)
    return inputs, expected.rounded()


def test_every_op_has_a_contract():
    assert set(CONTRACTS) == set(OPS)


@every_op
@every_dtype
@pytest.mark.parametrize("n", [1, 2, 40, 1000, 70001])
def test_accepts_the_rounded_oracle(op, dtype, n):
    _, expected = cases.expected(op, cases.batch(n, dtype, boundaries=n <= 1000))
    assert expected.check(expected.rounded()) <= 0.5001


@every_op
@every_dtype
def test_rejects_gross_faults(op, dtype):
    inputs, right = normal_rows(op, dtype)
    assert_close(op, right, inputs)
    rejects(op, inputs, np.zeros_like(right))
    rejects(op, inputs, right[::-1])
    rejects(op, inputs, np.roll(right, 1, axis=-1))
    rejects(op, inputs, -right)
    rejects(op, inputs, right * right.dtype.type(1.1))
    with pytest.raises(AssertionError, match="shape"):
        assert_close(op, right[:-1], inputs)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(op, right.astype(np.complex64), inputs)


@every_op
@every_dtype
def test_rejects_transposed(op, dtype):
    inputs, right = normal_rows(op, dtype, 16, 16)
    assert_close(op, right, inputs)
    rejects(op, inputs, right.T)


@every_op
@every_dtype
def test_rejects_truncated_tail(op, dtype):
    """A row reduced without its last elements, or whose last elements were never written."""
    inputs, right = normal_rows(op, dtype)
    unwritten = right.copy()
    unwritten[:, -3:] = 0
    rejects(op, inputs, unwritten)
    short = tuple(a[:, :-8] for a in inputs)
    rejects(op, inputs, np.concatenate([Expected(op, short).rounded(), right[:, -8:]], axis=1))


@every_op
@every_dtype
@pytest.mark.parametrize("where", [0, -1])
def test_rejects_one_swapped_pair_and_one_bad_element(op, dtype, where):
    inputs, right = normal_rows(op, dtype)
    swapped = right.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    rejects(op, inputs, swapped)
    bad = right.copy()
    bad[where, where] = bad[where, where] * 2 + dtype.type(0.5)
    rejects(op, inputs, bad)


@every_op
@every_dtype
def test_rejects_nan_mismatches(op, dtype):
    inputs, right = normal_rows(op, dtype)
    for bad_value in (np.nan, np.inf, -np.inf):
        bad = right.copy()
        bad[2, 5] = bad_value
        rejects(op, inputs, bad)
    poisoned = tuple(a.copy() for a in inputs)
    poisoned[-1][2, 5] = np.nan
    rejects(op, poisoned, right)  # a NaN that should have spread
    spread = Expected(op, poisoned).rounded()
    assert np.isnan(spread[2]).all() and not np.isnan(spread[:2]).any()
    assert_close(op, spread, poisoned)


@every_dtype
def test_softmax_bound_is_tight(dtype):
    """One step beyond the allowed ulps fails, the allowed ones (here with the sum kept) pass."""
    x = cases.make("normal", 4, 256, dtype)
    expected = Expected("softmax", (x,))
    ulp = spacing(expected.want, dtype)
    right, allowed = expected.rounded(), SOFTMAX_ULPS[dtype.name]
    above = right.copy()
    column = int(np.argmin(right[0]))  # small: the row's sum does not notice it
    error = float((wide(right) - expected.want)[0, column] / ulp[0, column])
    for ulps, fine in ((allowed - abs(error), True), (allowed + 1, False)):
        step = np.floor(ulps) * np.sign(error or 1) * (1 if not fine else -1)
        above[0, column] = (wide(right)[0, column] + step * ulp[0, column]).astype(dtype)
        if fine:
            expected.check(above)
        else:
            rejects("softmax", (x,), above)


@every_dtype
def test_softmax_rejects_a_biased_sum(dtype):
    """Every element within its ulps, all of them to the same side: the row's sum shows it."""
    x = np.zeros((1, 1000), dtype)  # 1/1000 is not representable
    expected = Expected("softmax", (x,))
    right, ulp = expected.rounded(), spacing(expected.want, dtype)
    away = np.sign(wide(right) - expected.want)
    steps = np.floor(SOFTMAX_ULPS[dtype.name] - np.abs(wide(right) - expected.want) / ulp)
    if not steps.any():  # one ulp a side leaves no room beyond the rounding itself
        steps = np.ones_like(steps)
    rejects("softmax", (x,), wide(right) + (away + (away == 0)) * steps * ulp)


@every_dtype
def test_backward_bound_is_tight(dtype):
    inputs, right = normal_rows("softmax_bwd", dtype, 4, 64)
    expected = Expected("softmax_bwd", inputs)
    expected.check(right)
    for factor, fine in ((0.5, True), (1.5, False)):
        actual = right.copy()
        column = int(np.argmin(np.abs(right[1])))
        actual[1, column] = (expected.want[1, column] + factor * expected.bound[1, column]).astype(
            dtype
        )
        if fine:
            expected.check(actual)
        else:
            rejects("softmax_bwd", inputs, actual)


@every_dtype
def test_flush_to_zero_is_allowed_below_the_smallest_normal_only(dtype):
    tiny = smallest_normal(dtype)
    x = np.array([[0, np.log(tiny) - 2, np.log(tiny) + 2]]).astype(dtype)
    right = Expected("softmax", (x,)).rounded()
    assert_close("softmax", np.where([[1, 0, 1]], right, right.dtype.type(0)), (x,))
    rejects("softmax", (x,), np.where([[1, 1, 0]], right, right.dtype.type(0)))


@every_dtype
def test_spacing_and_epsilon(dtype):
    one = np.ones((), wide(np.zeros(1, dtype)).dtype)
    after = np.nextafter(dtype.type(1), dtype.type(2))
    assert spacing(one, dtype) == wide(np.asarray(after)) - 1
    assert spacing(one * 1.5, dtype) == spacing(one, dtype)
    assert spacing(one * 0.75, dtype) == spacing(one, dtype) / 2
    tiny = smallest_normal(dtype)
    assert (
        spacing(one * 0, dtype) == spacing(one * tiny, dtype) == spacing(one * tiny / 4, dtype) > 0
    )
    assert compute_epsilon(dtype) <= spacing(one, dtype)


def test_the_oracle_carries_the_rounding_of_the_difference():
    """0.1 - 5.3 in float64: the oracle keeps what the subtraction alone would lose."""
    import math
    from fractions import Fraction

    x = np.array([[0.1, 0.1 - 5.3]])
    d = Fraction(float(x[0, 1])) - Fraction(float(x[0, 0]))
    e = math.exp(float(d)) * (1 + float(d - Fraction(float(d))))
    want = Expected("softmax", (x,)).want
    assert abs(float(want[0, 1]) - e / (1 + e)) < 1e-18
