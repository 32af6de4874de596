"""The contracts' own tests: bounds are tight and as stated, and the oracle is exact enough."""

from __future__ import annotations

import math
from fractions import Fraction

import cases
import numpy as np
import pytest
from contracts import ULPS, arithmetic, compute_epsilon, smallest_normal, spacing, wide
from oracle import Expected, assert_close
from test_oracle import every_dtype, every_op, normal_rows, rejects

SHARES = ("softmax", "logsumexp_bwd")  # parts of a whole: their rows have a sum, each is rounded


def share_inputs(op, x):
    """x and, for the gradient, the row's statistics and a cotangent of 1."""
    if op == "softmax":
        return (x,)
    return *cases.op_inputs("logsumexp_bwd", x)[:3], np.ones(len(x), x.dtype)


@every_op
@every_dtype
def test_bounds_are_tight(op, dtype):
    """Half the bound passes, twice the bound does not: at a small element, which a row's sum does
    not notice."""
    inputs, right = normal_rows(op, dtype, 4, 64)
    expected = Expected(op, inputs)
    column = int(np.argmin(np.abs(expected.want[1])))
    for factor, fine in ((0.5, True), (2, False)):
        for side in (-1, 1):
            actual = expected.want.copy()
            actual[1, column] += side * factor * expected.bound[1, column]
            actual = np.where(actual == expected.want, wide(right).reshape(actual.shape), actual)
            actual = actual.astype(dtype).reshape(right.shape)
            if fine:
                expected.check(actual)
            else:
                rejects(op, inputs, actual)


@every_dtype
@pytest.mark.parametrize(
    "op, x, largest",
    [
        ("softmax", [0, 0, 0], 1 / 3),
        ("log_softmax", [0, 0, 0], math.log(3)),
        ("log_softmax", [3, -900], 903),
        ("logsumexp", [900, 0, 0], 900),
        ("logsumexp", [0, 0, 0], math.log(3)),
        ("logsumexp", [-0.6875, -0.6875], math.log(2)),  # the result itself is nearly 0
        ("logsumexp_bwd", [0, 0, 0], 1 / 3),
    ],
)
def test_bounds_are_as_stated(op, x, largest, dtype):
    """In ulps of the result, of logsumexp in those of the largest number on the way."""
    x = np.array([x]).astype(dtype)
    expected = Expected(op, share_inputs(op, x) if op in SHARES else (x,))
    stated = ULPS[dtype.name] * spacing(np.asarray(largest), dtype)
    if op.startswith("log_") or op == "logsumexp":
        stated = stated + (2.0**-51 if dtype == np.float64 else 2.0**-23)
    if op == "logsumexp_bwd":
        stated = stated + smallest_normal(arithmetic(dtype))
    assert expected.bound[0, -1] == stated


@every_dtype
def test_a_logarithm_near_0(dtype):
    """What the others add to the largest element may be lost below an epsilon only, and nothing
    is flushed (float16's smallest normal is far above that)."""
    epsilon = compute_epsilon(dtype)
    for op, at in (("log_softmax", (0, 0)), ("logsumexp", 0)):
        for size, fine in ((epsilon / 3, True), (20 * epsilon, False)):
            x = np.array([[0, math.log(size)]]).astype(dtype)
            lost = Expected(op, (x,)).rounded()
            lost[at] = 0
            if fine:
                assert_close(op, lost, (x,))
            else:
                rejects(op, (x,), lost)


@every_dtype
@pytest.mark.parametrize("op", SHARES)
def test_rejects_a_biased_sum(op, dtype):
    """Every element within its ulps, all of them to the same side: the row's sum shows it."""
    inputs = share_inputs(op, np.zeros((1, 1000), dtype))  # 1/1000 is not representable
    expected = Expected(op, inputs)
    right, ulp = expected.rounded(), spacing(expected.want, dtype)
    away = np.sign(wide(right) - expected.want)
    steps = np.floor(ULPS[dtype.name] - np.abs(wide(right) - expected.want) / ulp)
    if not steps.any():  # one ulp a side leaves no room beyond the rounding itself
        steps = np.ones_like(steps)
    rejects(op, inputs, wide(right) + (away + (away == 0)) * steps * ulp)


@every_dtype
@pytest.mark.parametrize("op", SHARES)
def test_flush_to_zero_is_allowed_below_the_smallest_normal_only(op, dtype):
    tiny = smallest_normal(dtype)
    x = np.array([[0, np.log(tiny) - 2, np.log(tiny) + 2]]).astype(dtype)
    inputs = share_inputs(op, x)
    right = Expected(op, inputs).rounded()
    assert_close(op, np.where([[1, 0, 1]], right, right.dtype.type(0)), inputs)
    rejects(op, inputs, np.where([[1, 1, 0]], right, right.dtype.type(0)))


@every_dtype
def test_a_gradient_without_its_sum_is_rejected(dtype):
    """sum(dy) taken of all but one element, or with a sum of exponentials that is not the row's."""
    (dy, x, top, total), _ = normal_rows("log_softmax_bwd", dtype)
    fewer = dy.copy()
    fewer[:, 7] = 0
    wrong = Expected("log_softmax_bwd", (fewer, x, top, total)).want
    wrong[:, 7] += wide(dy)[:, 7]
    rejects("log_softmax_bwd", (dy, x, top, total), wrong)
    other = Expected("log_softmax_bwd", (dy, x, top, total * 1.1)).want
    rejects("log_softmax_bwd", (dy, x, top, total), other)


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
    x = np.array([[0.1, 0.1 - 5.3]])
    d = Fraction(float(x[0, 1])) - Fraction(float(x[0, 0]))
    e = math.exp(float(d)) * (1 + float(d - Fraction(float(d))))
    want = Expected("softmax", (x,)).want
    assert abs(float(want[0, 1]) - e / (1 + e)) < 1e-18
    log = Expected("log_softmax", (x,)).want
    assert (
        abs(float(log[0, 1] - (d.numerator / np.longdouble(d.denominator))) + math.log1p(e)) < 1e-17
    )
