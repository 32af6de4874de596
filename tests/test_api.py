"""The public function's manners: bad input as jax.nn.softmax, dtypes, where=, forced paths."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import ILLEGAL

import jaxsoftmax
from jaxsoftmax import Plan, softmax
from jaxsoftmax._plan import PATHS, SEED_PLANS

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
pytestmark = pytest.mark.usefixtures("cpu")


def raised(function, *args, **kwargs) -> Exception:
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError(f"nothing raised, got {result}")


def same_error(*args, says: str, **kwargs):
    """The exception type of jax.nn.softmax (a subclass will do), with a message that says more."""
    theirs, ours = raised(jax.nn.softmax, *args, **kwargs), raised(softmax, *args, **kwargs)
    assert isinstance(ours, type(theirs)), f"{ours!r}, jax.nn raises {theirs!r}"
    assert re.search(says, str(ours)), str(ours)
    assert "softmax" in str(ours), str(ours)


@pytest.mark.parametrize("axis", [2, -3, 17, (0, 5), (-4,)], ids=str)
def test_axis_out_of_range(axis):
    number = axis[-1] if isinstance(axis, tuple) else axis
    same_error(X, axis, says=rf"{number}(?!\d).*-?2")


@pytest.mark.parametrize("axis", [(0, 0), (0, -2), (1, 0, -1)], ids=str)
def test_axis_repeated(axis):
    same_error(X, axis, says=re.escape(str(axis)))


@pytest.mark.parametrize("axis", [1.0, (1.5,), (None,), object()], ids=lambda a: type(a).__name__)
def test_axis_not_an_integer(axis):
    same_error(X, axis, says="axis.*int")


@pytest.mark.parametrize("axis", [np.int64(1), np.int8(-1), [0], [1, 0], True], ids=repr)
def test_unusual_axis_that_jax_takes(axis):
    np.testing.assert_allclose(softmax(X, axis), jax.nn.softmax(X, axis), rtol=1e-6)


@pytest.mark.parametrize(
    "x",
    [[1.0, 2.0], (1.0,), None, "a", {}, object(), np.array(["a"])],
    ids=lambda x: type(x).__name__,
)
def test_not_an_array(x):
    same_error(x, says=re.escape(type(x).__name__))


@pytest.mark.parametrize("x", [1.0, 3, np.float32(2), np.zeros(())], ids=repr)
def test_zero_dimensions(x):
    same_error(x, says="-1")
    np.testing.assert_array_equal(softmax(x, axis=None), jax.nn.softmax(x, axis=None))
    assert softmax(x, axis=None).dtype == jax.nn.softmax(x, axis=None).dtype


def test_bool_raises():
    same_error(X > 0, says="(?=.*bool)(?=.*float)")


@pytest.mark.parametrize("where", ["float", "int", "shape", "string", "list"])
def test_bad_where(where):
    masks = {
        "float": np.ones(4, np.float32),
        "int": np.ones((3, 1), int),
        "shape": np.ones(3, bool),
    }
    mask = masks.get(where, "q" if where == "string" else [True] * 4)
    same_error(X, where=mask, says="where")


INTEGERS = ["int8", "uint8", "int16", "uint32", "int32", "int4", "uint4"]
FORMULA = ["complex64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FORMULA])
def test_dtypes_without_a_kernel(dtype):
    """Shape and dtype as jax.nn; values as of the same numbers in float32 (jax.nn itself wraps
    unsigned differences round and makes NaN of float8_e4m3fn)."""
    x = jnp.asarray(np.abs(X) * 1.5 if "u" in dtype else X * 1.5).astype(dtype)
    if dtype == "complex64":
        x = x + 1j
    ours, theirs = softmax(x), jax.nn.softmax(x)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert ours.dtype == jnp.float32 or dtype in FORMULA
    if dtype == "complex64":
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    else:
        want = jax.nn.softmax(x.astype(jnp.float32))
        np.testing.assert_allclose(
            ours.astype(jnp.float32), want, rtol=0.13 if "float8" in dtype else 1e-6
        )


@pytest.mark.parametrize("dtype", [np.float64, np.int64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("x64", [False, True])
def test_64_bit_input(dtype, x64):
    with jax.enable_x64(x64):
        ours, theirs = softmax(X.astype(dtype)), jax.nn.softmax(X.astype(dtype))
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("x", [1.0, 2, np.float16(1), jnp.bfloat16(1)], ids=repr)
def test_weak_types(x):
    weak = jnp.full((4,), x) if isinstance(x, (int, float)) else jnp.asarray([x] * 4)
    ours, theirs = softmax(weak), jax.nn.softmax(weak)
    assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
    assert (ours * jnp.float16(1)).dtype == (theirs * jnp.float16(1)).dtype


MASKS = {
    "row": np.array([True, False, True, True]),
    "each": np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool),
    "column": np.array([[True], [False], [True]]),
    "scalar": np.array(True),
    "python": True,
    "more dims": np.array([[[1, 0, 1, 0]], [[0, 0, 0, 0]]], bool),
}


@pytest.mark.parametrize("axis", [-1, 0, None], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_where(mask, axis):
    """Values and gradients as jax.nn, with rows fully masked among them."""
    where = MASKS[mask]

    def broadcast(x, axis, where):  # jax.nn itself reduces the wrong axis then
        return jax.nn.softmax(
            jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, np.shape(where))), axis, where
        )

    def both(f):
        y, pull = jax.vjp(lambda x: f(x, axis, where), jnp.asarray(X))
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]

    for ours, theirs in zip(both(softmax), both(broadcast), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert not np.isnan(ours).any()
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("path", [None, *PATHS], ids=str)
def test_what_is_masked_does_not_leak(path, bad):
    """What is under the mask changes nothing, forward or backward; a row fully masked is 0."""
    where = MASKS["each"]
    clean, dirty = X.copy(), np.where(where, X, bad).astype(np.float32)

    def both(x, dy):
        y, pull = jax.vjp(lambda x: softmax(x, where=where, path=path), x)
        return y, pull(jnp.asarray(dy))[0]

    for got, want in zip(both(dirty, dirty), both(clean, clean), strict=True):
        np.testing.assert_array_equal(got, want)
        assert (np.asarray(got)[~where] == 0).all()


def test_where_as_a_tracer():
    f = jax.jit(lambda x, w: softmax(x, where=w))
    np.testing.assert_allclose(
        f(X, MASKS["each"]), jax.nn.softmax(X, where=MASKS["each"]), rtol=1e-6
    )


@pytest.mark.parametrize("path", ["onepass", "", "ONE_PASS", "auto"])
def test_unknown_path(path):
    error = raised(softmax, X, path=path)
    assert isinstance(error, ValueError)
    assert repr(path) in str(error) and all(name in str(error) for name in (*PATHS, *SEED_PLANS))


@pytest.mark.parametrize("path", [3, 1.5, b"one_pass", ("one_pass",)], ids=repr)
def test_path_of_a_wrong_type(path):
    error = raised(softmax, X, path=path)
    assert isinstance(error, TypeError)
    assert repr(path) in str(error) and "Plan" in str(error)


@pytest.mark.parametrize("rule", ILLEGAL)
def test_illegal_plan_raises_before_anything_runs(rule):
    """Tracing alone is enough: no compilation, no execution."""
    numbers, says = ILLEGAL[rule]
    plan, x = Plan(**numbers), np.zeros((2, 256), np.float32)
    with pytest.raises(ValueError, match=says):
        softmax(x, path=plan)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(lambda x: softmax(x, path=plan), x)


@pytest.mark.parametrize("path", PATHS)
def test_paths_and_plans_are_taken(path):
    chosen = jaxsoftmax.plan("softmax", "float32", 3, 4, path=path)
    assert chosen.path == path
    for given in (path, chosen):
        np.testing.assert_allclose(softmax(X, path=given), jax.nn.softmax(X), rtol=1e-6)


def test_a_row_too_long_names_what_the_plan_holds():
    x = np.zeros((1, 40000), np.float16)
    with pytest.raises(
        ValueError, match="one_pass holds 32768 columns of float16 softmax, got 40000"
    ):
        softmax(x, path="packed")


def test_signature():
    ours = list(inspect.signature(softmax).parameters.values())
    theirs = list(inspect.signature(jax.nn.softmax).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[:3]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert ours[3].name == "path" and ours[3].kind is inspect.Parameter.KEYWORD_ONLY
    assert isinstance(jaxsoftmax.__version__, str) and softmax.__doc__
