"""The checker's own tests: it accepts the correctly rounded result and rejects wrong ones."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from contracts import CONTRACTS, as_dtype, total_bound, wide
from oracle import Expected, assert_close

from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", [as_dtype(d) for d in DTYPES], ids=list(DTYPES))
WITH_STATS = [name for name, op in OPS.items() if op.stats]


def rejects(op, inputs, wrong):
    with pytest.raises(AssertionError):
        assert_close(op, wrong.astype(inputs[0].dtype), inputs)


def normal_rows(op, dtype, rows=6, n=40):
    """Inputs with plain cotangents, so that each fault below shows in every row, and the result."""
    inputs = list(cases.op_inputs(op, cases.make("normal", rows, n, dtype)))
    rng = np.random.default_rng(3)
    for i, operand in enumerate(inputs):
        if (op, i) in (("softmax_bwd", 1), ("log_softmax_bwd", 0), ("logsumexp_bwd", 3)):
            inputs[i] = rng.standard_normal(operand.shape).astype(operand.dtype)
    return tuple(inputs), Expected(op, inputs).rounded()


def test_every_op_has_a_contract():
    assert set(CONTRACTS) == set(OPS)


@every_op
@every_dtype
@pytest.mark.parametrize("n", [1, 2, 40, 1000, 70001])
def test_accepts_the_rounded_oracle(op, dtype, n):
    names = tuple(cases.CASES) if n <= 1000 else cases.HARDEST
    _, expected = cases.expected(op, cases.batch(n, dtype, names, boundaries=n <= 1000))
    stats = expected.rounded_stats() if OPS[op].stats else ()
    assert expected.check(expected.rounded(), *stats) <= 0.5001


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
    with pytest.raises(AssertionError, match="shape"):
        assert_close(op, right[..., None], inputs)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(op, right.astype(np.complex64), inputs)


@every_op
@every_dtype
def test_rejects_transposed(op, dtype):
    inputs, right = normal_rows(op, dtype, 16, 16)
    assert_close(op, right, inputs)
    if not OPS[op].reduces:
        rejects(op, inputs, right.T)


@every_op
@every_dtype
def test_rejects_truncated_tail(op, dtype):
    """A row reduced without its last elements, or whose last elements were never written."""
    inputs, right = normal_rows(op, dtype)
    unwritten = right.copy()
    unwritten[..., -3:] = 0
    rejects(op, inputs, unwritten)
    if not OPS[op].folds:
        return
    short = tuple(a[:, :-8] if a.ndim == 2 else a for a in inputs)
    wrong = Expected(op, short).rounded()
    rejects(op, inputs, wrong if wrong.ndim == 1 else np.concatenate([wrong, right[:, -8:]], 1))


@every_op
@every_dtype
@pytest.mark.parametrize("where", [0, -1])
def test_rejects_one_swapped_pair_and_one_bad_element(op, dtype, where):
    inputs, right = normal_rows(op, dtype)
    swapped = right.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    rejects(op, inputs, swapped)
    bad = right.copy()
    at = (where,) * bad.ndim
    bad[at] = bad[at] * 2 + dtype.type(0.5)
    rejects(op, inputs, bad)


@every_op
@every_dtype
def test_rejects_nan_mismatches(op, dtype):
    inputs, right = normal_rows(op, dtype)
    for bad_value in (np.nan, np.inf, -np.inf):
        bad = right.copy()
        bad[(2, 5)[: bad.ndim]] = bad_value
        rejects(op, inputs, bad)
    for i, operand in enumerate(inputs):
        poisoned = [a.copy() for a in inputs]
        poisoned[i][(2, 5)[: operand.ndim]] = np.nan
        rejects(op, poisoned, right)  # a NaN that should have spread
        spread = Expected(op, poisoned).rounded()
        assert not np.isnan(spread[:2]).any() and not np.isnan(spread[3:]).any()
        whole = i < OPS[op].folds or operand.ndim == 1
        assert np.isnan(spread[2]).sum() == (spread[2].size if whole else 1)
        assert_close(op, spread, poisoned)


@every_dtype
@pytest.mark.parametrize("op", WITH_STATS)
def test_rejects_wrong_statistics(op, dtype):
    """A maximum that is the next number, a sum of one element too few or just beyond its bound."""
    (x,), right = normal_rows(op, dtype)
    expected = Expected(op, (x,))
    top, total = expected.rounded_stats()
    expected.check(right, top, total)
    error = total_bound(dtype, wide(total))
    fine, less, more = total.copy(), total.copy(), total.copy()
    fine[2] += 0.8 * error[2]
    more[2] += 1.3 * error[2]
    less[2] -= np.exp(wide(x)[2, 5] - wide(x)[2].max())
    expected.check(right, top, fine)
    above, nan = np.nextafter(top, np.inf), np.full_like(total, np.nan)
    one_below = np.where(np.arange(len(top)) == 2, top - 1, top)
    wrong = [(top, more), (top, less), (top, nan), (top, total[::-1]), (top, 0 * total)]
    wrong += [(above, total), (one_below, total), (top[:, None], total), (top, total[:-1])]
    for stats in [*wrong, (top.astype(np.float16), total), (top, total.astype(np.float16))]:
        with pytest.raises(AssertionError):
            expected.check(right, *stats)


@pytest.mark.parametrize("op", WITH_STATS)
def test_statistics_of_special_rows(op):
    """The maximum always; the sum beside an infinite one where the gradient is made from it."""
    x = np.array([[1, np.inf, 0], [-np.inf] * 3, [np.nan, np.inf, 0]], np.float32)
    expected = Expected(op, (x,))
    top, total = np.array([np.inf, -np.inf, np.nan], np.float32), np.ones(3, np.float32)
    expected.check_stats(top, total)
    with pytest.raises(AssertionError):
        expected.check_stats(-top, total)
    if op == "logsumexp":
        with pytest.raises(AssertionError):
            expected.check_stats(top, 0 * total)
