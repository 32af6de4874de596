"""Masks, scale, causal rows, any axis, the result's dtype: values and gradients, every path."""

from __future__ import annotations

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from contracts import arithmetic, as_dtype
from functions import every_function, theirs
from loading import (
    PATTERNS,
    SCALES,
    Call,
    Data,
    Oracle,
    both,
    check_calls,
    noted,
    paths_for,
    variants,
)

from jaxsoftmax._plan import DTYPES, PATHS, SEED_PLANS

SHAPE = (2, 3, 5, 19)
AXES = (-1, 0, 2, (1, 2), (0, 2), (1, -1), (-1, -2), None)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
two_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@functools.cache
def like_jax(name: str, axis):
    """jax.nn's value and gradient in float32."""

    def program(x, keep, scale, ct):
        y, pull = jax.vjp(lambda x: theirs(name, axis, where=keep)(x * scale), x)
        return y, pull(ct)[0]

    return jax.jit(program)


def parity(call: Call, d: Data, y: np.ndarray, dx: np.ndarray) -> None:
    """Of rows that have something: of the others jax.nn's gradient is NaN in places."""
    scale = 1 if d.scale is None else d.scale
    x, ct, *_ = (np.asarray(a, np.float32) for a in (d.x, d.ct))
    want, slope = like_jax(call.name, call.axis)(x, d.keep, np.float32(scale), ct)
    axes = call.axes(d.x.ndim)
    filled = d.keep.any(axes, keepdims=True)
    row = filled.reshape(y.shape) if call.name == "logsumexp" else filled
    epsilon = max(float(ml_dtypes.finfo(a.dtype).eps) for a in (y, dx))
    terms = abs(scale) * np.abs(ct).max()
    for got, exact, size in (
        (y, want, np.abs(y[np.isfinite(y)]).max(initial=0)),
        (dx, slope, terms),
    ):
        use = row if got is y else filled & d.keep
        got, exact = (np.where(use, np.asarray(a, np.float32), 0) for a in (got, exact))
        tolerance = 1e-5 + 4 * epsilon
        np.testing.assert_allclose(got, exact, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("axis", AXES, ids=str)
@every_dtype
@every_function
def test_every_combination(platform, name, dtype, axis):
    """Axis kind x mask shape x dtype x scale: within the contracts, and as jax.nn."""
    calls = variants(name, axis)
    for call, data, y, dx in check_calls(calls, SHAPE, dtype):
        if data.x.max() < 100:  # farther from 0 jax.nn's own product and difference round
            with noted(call, data.scale):
                parity(call, data, y, dx)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@every_function
def test_every_path(platform, name, dtype):
    shape, masks = (2, 4, 5, 67), (None, "key", "full")
    calls = [c for axis in (-1, 1, (0, 2), (1, 3)) for c in variants(name, axis, masks, PATHS)]
    for axis in (-1, 1):  # and the seed kernels' names
        names = paths_for(platform, Call(name, axis), shape, dtype, (*PATHS, *SEED_PLANS))
        calls += variants(name, axis, ("last",), names)
    check_calls(calls, shape, dtype, PATTERNS[:2], (0.37,))


@two_dtypes
@every_function
def test_long_rows(platform, name, dtype):
    """Of several blocks, pieces and chunks, an odd number of columns."""
    shape = (2, 70_001)
    paths = paths_for(platform, Call(name), shape, dtype)
    calls = [
        Call(name, mask=mask, scaled=name != "logsumexp" and mask != "last", path=path)
        for mask in (None, "last", "full")
        for path in (None, *paths)
    ]
    check_calls(calls, shape, dtype, PATTERNS[:2], (0.37,))


# outer, n, inner: a row's elements lie `inner` apart.
COLUMNS = [
    *((1, 1, 3), (3, 5, 130), (2, 37, 7), (1, 129, 64), (2, 257, 2), (1, 999, 8), (1, 1000, 65)),
    *((1, 5000, 1), (1, 5000, 3), (1, 4999, 8), (1, 3001, 17)),
]


@pytest.mark.parametrize("shape", COLUMNS, ids=str)
@two_dtypes
@every_function
def test_columns(platform, name, dtype, shape):
    """The axis in the middle, in every path that holds it: masks along it, across it, of both."""
    calls = []
    for path in (None, *paths_for(platform, Call(name, 1), shape, dtype)):
        for mask in (None, "query", "last", "full"):
            scaled = name != "logsumexp" and mask in ("query", "full")
            calls.append(Call(name, 1, mask, scaled, path=path))
    check_calls(calls, shape, dtype, PATTERNS[:1], (0.37,))


CAUSAL = [(5, 19), (16, 16), (33, 7), (1, 9), (9, 1), (20, 70)]


@pytest.mark.parametrize(
    "dtype, sizes",
    [*((dtype, s) for dtype in ("float32", "bfloat16") for s in CAUSAL)]
    + [(dtype, (20, 70)) for dtype in ("float16", "float64")],
    ids=str,
)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_causal(platform, name, dtype, sizes):
    """Fewer queries than keys, as many, more; the keys' axis and others; beside a mask or not."""
    axes = (-1, -2, (1, -1))
    calls = [c for a in axes for c in variants(name, a, (None, "key", "full"), causal=True)]
    check_calls(calls, (2, 2, *sizes), dtype, PATTERNS[:2], (-0.37,))


@two_dtypes
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_long_causal_rows(platform, name, dtype):
    """Rows of many chunks of which the last are not read, in every path."""
    shape = (401, 1501)
    paths = paths_for(platform, Call(name), shape, dtype)
    assert len(paths) == len(PATHS)
    calls = [Call(name, -1, None, True, True, path=path) for path in (None, *paths)]
    calls += [Call(name, -1, "last", False, True, path=path) for path in paths]
    check_calls(calls, shape, dtype, ("random",), (0.37,), every=13)


@pytest.mark.parametrize(
    "given, result",
    [
        *(("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")),
        *(("float32", "float16"), ("bfloat16", "float16"), ("float16", "bfloat16")),
        ("float32", "float32"),
    ],
)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_dtype_of_the_result(platform, name, given, result):
    """Within the contract of the result's dtype; the gradient has x's."""
    calls = []
    for axis in (-1, 1, (0, 2)):
        calls += variants(name, axis, (None, "key"), dtype=result)
        calls += [Call(name, axis, "full", True, axis == -1, result, path) for path in PATHS]
    check_calls(calls, (2, 4, 9, 133), given, PATTERNS[:2], (0.37,))


SPECIAL_ROWS = {  # what counts, what does not
    "-inf": ([-np.inf] * 4, [1, 2, 0, -1]),
    "-inf beside -inf": ([-np.inf] * 4, [-np.inf] * 4),
    "some -inf": ([-np.inf, 1, 2, -np.inf], [9, np.inf, np.nan, 3]),
    "inf": ([1, np.inf, 0, -np.inf], [1, 2, 3, 4]),
    "NaN": ([1, np.nan, 0, -np.inf], [np.inf, 2, 3, 4]),
    "zeros": ([0, 0, -0.0, 0], [np.nan, np.inf, -np.inf, 9]),
}


@every_dtype
@every_function
def test_special_rows(platform, name, dtype):
    """Rows with NaN and infinities that count, beside what does not, along both axes; a scale of 0
    or below makes of them what the product is."""
    x = np.array([np.ravel(parts, order="F") for parts in SPECIAL_ROWS.values()])
    x, ct = (a.astype(as_dtype(dtype)) for a in (x, np.cos(np.arange(x.size)).reshape(x.shape)))
    keep = np.broadcast_to(np.arange(x.shape[1]) % 2 == 0, x.shape)
    calls, data = [], []
    for axis, scale in ((a, s) for a in (-1, 0) for s in (None, *SCALES)):
        a, w, c = (x, keep, ct) if axis else (x.T, keep.T, ct.T)
        factor = None if scale is None else arithmetic(x.dtype).type(scale)
        for path in (None, *PATHS):
            if name == "logsumexp" and scale is not None:
                continue
            calls.append(Call(name, axis, "full", scale is not None, path=path))
            c = np.ones(len(x), x.dtype) if name == "logsumexp" else c
            data.append(Data(a, w, factor, c, w))
    with jax.enable_x64(dtype == "float64"):
        program = jax.jit(lambda all: [both(c, *a) for c, a in zip(calls, all, strict=True)])
        found = program([d.operands() for d in data])
    for call, d, results in zip(calls, data, found, strict=True):
        with noted(call, d.scale):
            Oracle(call, d).check(*map(np.asarray, results))
