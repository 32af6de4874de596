"""The jnp formulas where no kernel runs: the same specials, statistics and derivatives."""

from __future__ import annotations

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import as_dtype, compute_epsilon
from functions import every_function, ours, theirs, values_and_vjps
from oracle import Expected
from runs import run
from test_specials import cotangents, same_pattern

from jaxsoftmax import _lowering
from jaxsoftmax._ops import EVERY, OPS
from jaxsoftmax._plan import DTYPES


@pytest.fixture(autouse=True)
def formulas(cpu, monkeypatch):
    """Every program that is compiled here takes the formulas."""
    monkeypatch.setattr(_lowering, "emission", lambda **known: "formula")


def near(got: np.ndarray, expected: Expected) -> None:
    """A formula has XLA's arithmetic, where x - max is rounded: within 2^6 epsilons."""
    got = np.asarray(got).astype(np.float64).reshape(expected.want.shape)
    allowed = 4 * expected.bound + 64 * compute_epsilon(expected.dtype) * np.abs(expected.want)
    with np.errstate(invalid="ignore"):
        fine = np.abs(got - expected.want) <= allowed
    assert (fine | expected.may_flush)[expected.finite].all()
    same_pattern(got, expected.want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_formulas_keep_the_contract(op, dtype):
    """Roughly; in 16 bits they compute in float32, as the kernels do."""
    names = tuple(n for n in cases.CASES if n not in ("wide", "used_range", "huge", "huge_mixed"))
    inputs, expected = cases.expected(op, cases.batch(333, as_dtype(dtype), names))
    y, *stats = run(op, *inputs, stats=True) if OPS[op].stats else [run(op, *inputs)]
    assert y.dtype == as_dtype(dtype)
    near(y, expected)
    if stats:
        top, total = expected.rounded_stats()
        spoilt = np.isnan(top)  # XLA's maximum may overlook a NaN: either says so
        assert np.isnan(sum(stats)[spoilt]).all()
        np.testing.assert_array_equal(stats[0][~spoilt], top[~spoilt])
        rows = np.isfinite(total)
        np.testing.assert_allclose(stats[1][rows], total[rows], rtol=1e-5)


@every_function
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_with_jax_nn(name, dtype):
    """Where NaN and infinities are; rows with finite cotangents, value and gradient."""
    x = cases.batch(333, as_dtype(dtype))
    ct = cotangents(name, x)
    ct = np.where(np.isinf(ct), 1, ct).astype(ct.dtype)
    (y, dx), (want_y, want_dx) = values_and_vjps([ours(name), theirs(name)], x, ct)
    same_pattern(y, want_y)
    same_pattern(dx, want_dx)


@every_function
def test_no_kernel_is_called(name):
    x = np.ones((3, 5), np.float32)
    program = jax.jit(jax.value_and_grad(lambda x: ours(name)(x).sum())).lower(x).compile()
    assert 'custom_call_target="jaxsoftmax.' not in program.as_text()


@pytest.mark.parametrize("op", EVERY)
def test_types_of_every_op(op):
    """The formula's types are those that the primitive promises, in every dtype and of any axes."""
    what = EVERY[op]
    for dtype, axes in itertools.product(DTYPES, ((-1,), (-3, -1), (-2,))):
        with jax.enable_x64(True):
            x = jnp.ones((2, 3, 4), dtype)
            a_row = jnp.ones([s for d, s in enumerate(x.shape) if d - 3 not in axes])
            wide = jnp.float64 if dtype == "float64" else jnp.float32
            given = [a_row.astype(wide)] * what.given
            if what.pulled:
                given[-1] = a_row.astype(dtype)
            formula = functools.partial(what.formula, axes=axes)
            y = jax.eval_shape(formula, *[x] * what.inputs, *given)
            assert y.dtype == x.dtype and y.shape == (a_row if what.reduces else x).shape
            if what.stats:
                stats = jax.eval_shape(functools.partial(what.stats_formula, axes=axes), x)
                assert [(s.dtype, s.shape) for s in stats] == [(wide, a_row.shape)] * 2
