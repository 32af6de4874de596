"""Masks, and what else logsumexp takes: values and gradients as jax.nn, nothing masked leaks."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import every_function, ours, theirs, values_and_vjps
from test_api import X, close, raised, same_error

import jaxsoftmax
from jaxsoftmax._plan import PATHS

pytestmark = pytest.mark.usefixtures("cpu")
MASKS = {
    "row": np.array([True, False, True, True]),
    "each": np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool),
    "column": np.array([[True], [False], [True]]),
    "scalar": np.array(True),
    "python": True,
    "more dims": np.array([[[1, 0, 1, 0]], [[0, 0, 0, 0]]], bool),
}
EMPTY = {"softmax": 0, "log_softmax": -np.inf, "logsumexp": -np.inf}  # of a row fully masked


@pytest.mark.parametrize("where", ["float", "int", "shape", "string", "list"])
@every_function
def test_bad_where(name, where):
    masks = {
        "float": np.ones(4, np.float32),
        "int": np.ones((3, 1), int),
        "shape": np.ones(3, bool),
    }
    mask = masks.get(where, "q" if where == "string" else [True] * 4)
    same_error(name, X, where=mask, says="where")


@pytest.mark.parametrize("mask", MASKS)
@every_function
def test_where(name, mask):
    """Values as jax.nn; gradients as without a mask of rows whose masked elements are so low that
    they count for nothing. A row fully masked has gradient 0 (jax.nn has NaN in places)."""
    shape = np.broadcast_shapes(X.shape, np.shape(MASKS[mask]))
    where = np.broadcast_to(MASKS[mask], shape)

    def low(axis):
        keep = where.any(axis=axis, keepdims=name != "logsumexp")
        keep = keep if name == "logsumexp" else keep & where
        return lambda x: jnp.where(keep, theirs(name, axis)(jnp.where(where, x, -1e4)), EMPTY[name])

    def both(f, x):
        y, pull = jax.vjp(f, x)
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]

    def program(x, axis):
        # jax.nn itself reduces the wrong axis of a mask with more dimensions.
        exact = theirs(name, axis, where=where)(jnp.broadcast_to(x, shape))
        mine = both(ours(name, axis, where=MASKS[mask]), x)
        return mine, (exact, both(low(axis), x)[1])

    axes = (-1, 0, None)
    for found in jax.jit(lambda x: [program(x, axis) for axis in axes])(X):
        jax.tree.map(close, *found)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 3, -4, (0, -1), None], ids=str)
def test_axes_of_logsumexp_are_those_of_the_mask_too(axis, keepdims):
    a, where = X[:, None, :], np.arange(2)[:, None, None, None] + np.arange(4) > 0
    assert a.ndim < where.ndim
    options = {"where": where, "keepdims": keepdims}
    close(ours("logsumexp", axis, **options)(a), theirs("logsumexp", axis, **options)(a))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every_function
def test_what_is_masked_does_not_leak(name, bad):
    """What is under the mask changes nothing, forward or backward."""
    where = MASKS["each"]
    dirty, ct = np.where(where, X, bad).astype(np.float32), np.cos(X)
    functions = [ours(name, where=where, path=path) for path in (None, *PATHS)]
    clean = values_and_vjps(functions, X, ct[:, 0] if name == "logsumexp" else ct)
    ct = ct[:, 0] if name == "logsumexp" else np.where(where, ct, bad).astype(np.float32)
    for (y, dx), (want, want_dx) in zip(values_and_vjps(functions, dirty, ct), clean, strict=True):
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(dx, want_dx)
        assert (dx[~where] == 0).all() and (dx[1] == 0).all() and (dx[2] != 0).any()
        assert (y[1] == EMPTY[name]).all() and np.isfinite(y[2]).all()
        if name != "logsumexp":
            assert (y[~where] == EMPTY[name]).all()


@every_function
def test_specials_that_a_mask_keeps(name):
    """Rows with NaN, infinities or both, longer than XLA's vectors: value and gradient as jax.nn
    without the mask."""
    x = np.concatenate([cases.make(case, 5, 333, np.dtype("float32")) for case in cases.SPECIAL])
    where = np.ones(333, bool)
    ct = np.ones(x.shape[: 1 if name == "logsumexp" else 2], np.float32)
    (y, dx), (want_y, want_dx) = values_and_vjps([ours(name, where=where), theirs(name)], x, ct)
    for got, want in ((y, want_y), (dx, want_dx)):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))


@every_function
def test_where_as_a_tracer(name):
    f, want = (jax.jit(lambda x, w, g=g: g(name, where=w)(x)) for g in (ours, theirs))
    close(f(X, MASKS["each"]), want(X, MASKS["each"]))


@every_function
def test_where_under_transformations(name):
    """vmap, forward mode and second derivatives of masked rows: none is fully masked here."""
    where = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]], bool)

    def each(g, x, where):
        def loss(x):
            y = g(name, where=where)(x)
            return jnp.sum(jnp.where(jnp.isfinite(y), y, 0) ** 2)

        masked = jax.vmap(lambda x, w: g(name, where=w)(x))(x, where)
        tangent = jax.jvp(jax.grad(loss), (x,), (jnp.sin(x),))[1]
        return masked, tangent, jax.hessian(loss)(x)

    got, want = jax.jit(lambda *args: [each(g, *args) for g in (ours, theirs)])(X, where)
    jax.tree.map(functools.partial(close, atol=2e-6), got, want)


FACTORS = {
    "positive": np.array([0.5, 2, 1, 3], np.float32),
    "zeros": np.array([0, 2, 0, 1], np.float32),
    "negative": np.array([[-1], [-2], [0.5]], np.float32),
    "all zero": np.zeros(4, np.float32),
    "number": 2.0,
    "int": np.array([1, 2, 3, 4]),
}


@pytest.mark.parametrize("return_sign", [False, True])
@pytest.mark.parametrize("options", [{}, {"keepdims": True}, {"where": MASKS["each"]}], ids=str)
@pytest.mark.parametrize("axis", [0, None], ids=str)
def test_logsumexp_options(axis, options, return_sign):
    """b, return_sign, keepdims and where together: value, NaN of a negative sum, gradient."""

    def each(g, b):
        def total(x):
            found = g("logsumexp", axis, b=b, return_sign=return_sign, **options)(x)
            value = found[0] if return_sign else found
            return jnp.sum(jnp.where(jnp.isfinite(value), value, 0)), found

        return jax.grad(total, has_aux=True)(X)

    factors = (None, *FACTORS.values())
    got, want = jax.jit(lambda: [[each(g, b) for b in factors] for g in (ours, theirs)])()
    jax.tree.map(close, got, want)


@pytest.mark.parametrize("axis", [-1, 0, None, (1, 0), ()], ids=str)
def test_keepdims(axis):
    """The kernel's result with the axes kept, and its gradient."""
    like = theirs("logsumexp", axis, keepdims=True)
    functions = [ours("logsumexp", axis, keepdims=True, path=path) for path in (None, *PATHS)]
    *results, want = values_and_vjps([*functions, like], X, np.cos(like(X)))
    for got in results:
        jax.tree.map(close, got, want)


def test_logsumexp_positional():
    """Every parameter by position, in jax.nn's order; the axis is all of them by default."""
    for arguments in ((X,), (X, 1), (X, 1, None, True, False, X > -1), (X, 0, X > 0, True, True)):
        got, want = (g(*arguments) for g in (jaxsoftmax.logsumexp, jax.nn.logsumexp))
        jax.tree.map(close, got, want)


@pytest.mark.parametrize("b", [[1.0], {}, np.ones(3, np.float32)], ids=lambda b: type(b).__name__)
def test_bad_factors(b):
    assert type(raised(ours("logsumexp", b=b), X)) is type(raised(theirs("logsumexp", b=b), X))
