"""where, scale, is_causal and dtype as arguments: what each accepts, what it refuses, and how."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import every_function, ours, primitive, theirs
from test_api import close, raised

import jaxsoftmax

pytestmark = pytest.mark.usefixtures("cpu")
X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
MASK = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool)
elementwise = pytest.mark.parametrize("name", ["softmax", "log_softmax"])


@elementwise
def test_signature(name):
    """What jax.nn has not is by keyword only, and without effect by default."""
    for function in (getattr(m, name) for m in (jaxsoftmax, jaxsoftmax.primitive)):
        parameters = inspect.signature(function).parameters
        assert [*parameters][:2] == ["x", "axis"] and parameters["where"].default is None
        extra = [*parameters.values()][-5:]
        assert [(p.name, p.default) for p in extra] == [
            *(("scale", None), ("is_causal", False), ("dtype", None)),
            *(("axis_name", None), ("path", None)),
        ]
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in extra)
    for word in ("where:", "scale", "is_causal", "dtype"):
        assert word in getattr(jaxsoftmax, name).__doc__


BAD_MASKS = {  # jax.nn raises for each, too
    "too long": (np.ones(5, bool), ValueError, r"\(5,\).*\(3, 4\)"),
    "rows too many": (np.ones((2, 1), bool), ValueError, r"\(2, 1\).*\(3, 4\)"),
    "of more dimensions": (np.ones((7, 3, 5), bool), ValueError, r"\(7, 3, 5\).*\(3, 4\)"),
    "int": (np.ones(4, int), ValueError, "boolean.*int"),
    "float": (np.ones((3, 1), np.float32), ValueError, "boolean.*float32"),
    "number": (1, ValueError, "boolean.*int"),
    "list": ([True] * 4, TypeError, "where.*list"),
    "string": ("q", TypeError, "where.*str"),
}
BAD = {
    **{
        f"{kind} scale of shape {shape}": (
            {"scale": np.ones(shape, kind)},
            X,
            (TypeError, ValueError),
            rf"scale.*{re.escape(str(shape))}",
        )
        for kind in ("float32", "int32")
        for shape in ((1,), (4,), (3, 1), (3, 4), (0,))
    },
    "bool scale": ({"scale": True}, X, TypeError, "scale.*bool"),
    "bool array scale": ({"scale": np.array(True)}, X, TypeError, "scale.*bool"),
    "complex scale": ({"scale": 1j}, X, TypeError, "scale.*complex"),
    "complex array scale": ({"scale": np.complex64(1)}, X, TypeError, "scale.*complex"),
    "string scale": ({"scale": "0.5"}, X, TypeError, "scale.*str"),
    "list scale": ({"scale": [0.5]}, X, TypeError, "scale.*list"),
    "object scale": ({"scale": object()}, X, TypeError, "scale.*object"),
    "causal row": ({"is_causal": True}, X[0], ValueError, r"is_causal.*(\(4,\)|1)"),
    "causal number": (
        {"is_causal": True, "axis": None},
        X[0, 0],
        ValueError,
        r"is_causal.*(\(\)|0)",
    ),
    "causal int": ({"is_causal": 1}, X, TypeError, "is_causal.*1"),
    "causal string": ({"is_causal": "yes"}, X, TypeError, "is_causal.*yes"),
    "causal array": ({"is_causal": np.ones(2, bool)}, X, TypeError, "is_causal"),
    "int dtype": ({"dtype": np.int32}, X, TypeError, "dtype.*int32"),
    "bool dtype": ({"dtype": bool}, X, TypeError, "dtype.*bool"),
    "complex dtype": ({"dtype": "complex64"}, X, TypeError, "dtype.*complex64"),
    "unknown dtype": ({"dtype": "float33"}, X, TypeError, "float33"),
}


def refused(function, x, error, says, name):
    """At once, without a compilation; and the message names the function."""
    for run in (function, lambda x: jax.eval_shape(function, x)):
        found = raised(run, x)
        assert isinstance(found, error), repr(found)
        assert re.search(says, str(found)), str(found)
        assert re.search(rf"\b{name}\b", str(found)), str(found)


@pytest.mark.parametrize("make", [ours, primitive])
@pytest.mark.parametrize("bad", BAD_MASKS)
@every_function
def test_bad_mask(name, bad, make):
    mask, error, says = BAD_MASKS[bad]
    refused(make(name, where=mask), X, error, says, name)
    if make is ours:
        assert isinstance(raised(theirs(name, where=mask), X), error)


@pytest.mark.parametrize("make", [ours, primitive])
@pytest.mark.parametrize("bad", BAD)
@elementwise
def test_bad_arguments(name, bad, make):
    options, x, error, says = BAD[bad]
    refused(make(name, **options), x, error, says, name)


@elementwise
def test_a_traced_argument_that_must_be_known(name):
    with pytest.raises((jax.errors.ConcretizationTypeError, TypeError)):
        jax.jit(lambda flag: ours(name, is_causal=flag)(X))(True)


@pytest.mark.parametrize(
    "option", [{"scale": 2.0}, {"is_causal": True}, {"dtype": "float32"}], ids=str
)
def test_logsumexp_has_none_of_them(option):
    with pytest.raises(TypeError, match="unexpected keyword"):
        jaxsoftmax.logsumexp(X, **option)


SCALES = {
    "int": 3,
    "float": 0.37,
    "negative": -2,
    "zero": 0,
    "NumPy float64": np.float64(0.37),
    "NumPy int8": np.int8(3),
    "NumPy float16": np.float16(0.37),
    "bfloat16": jnp.bfloat16(0.37),
    "0-d array": np.array(0.37),
    "JAX array": jnp.float32(0.37),
    "weak": jnp.asarray(0.37),
    "uint8 array": jnp.uint8(3),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@elementwise
def test_scales(name, dtype):
    """Any real number, in its own precision: float32, if it has more; the result has x's dtype."""
    x = jnp.asarray(X * 20, dtype)
    run = jax.jit(lambda x, factors: [ours(name, scale=s)(x) for s in factors])
    values = [np.float32(s) for s in SCALES.values()]
    static = jax.jit(lambda x: [ours(name, scale=s)(x) for s in SCALES.values()])(x)
    for key, a, b, c in zip(
        SCALES, run(x, [*SCALES.values()]), run(x, values), static, strict=True
    ):
        assert a.dtype == ours(name)(x).dtype and not a.weak_type, key
        np.testing.assert_array_equal(a, b, err_msg=key)
        np.testing.assert_array_equal(a, c, err_msg=key)
    exact = jax.nn.softmax if name == "softmax" else jax.nn.log_softmax
    want = exact(np.asarray(x, np.float32) * np.float32(0.37))
    got = ours(name, scale=0.37)(x).astype(np.float32)
    np.testing.assert_allclose(
        got, want, rtol=1e-5 if dtype in ("float32", "int32") else 1e-2, atol=1e-6
    )


@elementwise
def test_scale_of_float64(name):
    """Is not rounded to float32 where the arithmetic is float64's."""
    with jax.enable_x64(True):
        x = X.astype(np.float64) * 20
        for scale in (0.37, np.float64(0.37), jnp.asarray(0.37)):
            close(ours(name, scale=scale)(x), theirs(name)(x * 0.37), rtol=1e-13, atol=0)
        got = ours(name, scale=np.float64(0.37))(x.astype(np.float32))
        assert got.dtype == np.float32


@pytest.mark.parametrize(
    "dtype",
    [
        np.float32,
        "float32",
        jnp.bfloat16,
        "float16",
        np.dtype("float16"),
        "float8_e5m2",
        np.float64,
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["float32", "bfloat16", "int32", "float8_e5m2"])
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@elementwise
def test_dtypes(name, given, dtype):
    """In any form, of any x: also where there is no kernel. The gradient has x's."""
    x = jnp.asarray(X * 1.5, given)
    want_dtype = jax.dtypes.canonicalize_dtype(dtype)
    y = ours(name, dtype=dtype)(x)
    assert y.dtype == want_dtype
    want = theirs(name)(x.astype(np.float32)).astype(want_dtype).astype(np.float32)
    narrow = any("float8" in str(d) for d in (want_dtype, given))
    close(y.astype(np.float32), want, rtol=0.3 if narrow else 1e-2, atol=1e-3)
    if given != "int32":
        dx = jax.grad(lambda x: (ours(name, dtype=dtype)(x).astype(np.float32) * X).sum())(x)
        assert dx.dtype == x.dtype and np.isfinite(dx.astype(np.float32)).all()


@pytest.mark.parametrize("given, result", [("float32", "float64"), ("float64", "bfloat16")])
@elementwise
def test_dtypes_of_64_bits(name, given, result):
    with jax.enable_x64(True):
        options = {"dtype": result, "scale": 0.37, "where": MASK}
        y, pull = jax.vjp(ours(name, **options), X.astype(given))
        assert y.dtype == result and pull(y)[0].dtype == given
        want = theirs(name, where=MASK)(X * 0.37)
        close(
            np.where(MASK.any(1, keepdims=True), y, 0).astype("f4"),
            np.where(MASK.any(1, keepdims=True), want, 0),
            rtol=1e-2,
        )
