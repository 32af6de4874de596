"""Gradients end to end, from x alone: long rows in 16 bits, large offsets, cross-entropy."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import ULPS, as_dtype, spacing
from functions import every_function, ours, theirs, values_and_vjps
from oracle import Expected
from runs import run

from jaxsoftmax._plan import PATHS

NAMES = (None, *PATHS)


def exact(name: str, x: np.ndarray, ct: np.ndarray) -> np.ndarray:
    """The gradient in float64 of these x and cotangents."""
    x, ct = x.astype(np.float64), ct.astype(np.float64)
    terms = np.exp(x - x.max(axis=-1, keepdims=True))
    p = terms / terms.sum(axis=-1, keepdims=True)
    if name == "softmax":
        return p * (ct - (p * ct).sum(axis=-1, keepdims=True))
    return p * ct[:, None] if name == "logsumexp" else ct - p * ct.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["labels", "dense", "positive"])
@pytest.mark.parametrize("n", [50257, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_log_softmax_is_as_accurate_as_jax_nn(platform, dtype, n, kind):
    """The largest and the mean error of the gradient, against float64 of the same inputs."""
    rng = np.random.default_rng(41)
    x = (rng.standard_normal((6, n)) * 3).astype(as_dtype(dtype))
    dy = rng.standard_normal((6, n)) if kind == "dense" else rng.uniform(0, 1, (6, n))
    if kind == "labels":
        dy = (np.arange(n) == rng.integers(0, n, (6, 1))) / -6
    dy = dy.astype(as_dtype(dtype))
    want = exact("log_softmax", x, dy)
    functions = [*(ours("log_softmax", path=path) for path in NAMES), theirs("log_softmax")]
    errors = [np.abs(dx.astype(float) - want) for _, dx in values_and_vjps(functions, x, dy)]
    for ours_ in errors[:-1]:
        assert ours_.max() <= errors[-1].max() * 1.0001
        assert ours_.mean() <= errors[-1].mean() * 1.0001
        assert (ours_ <= 0.51 * spacing(want, x.dtype) + 2.0**-24 * np.abs(want).max()).all()


@pytest.mark.parametrize("n", [65537, 131072])
@every_function
def test_float16_beyond_its_largest_number_of_columns(platform, name, n):
    """A row's sum is above 65504; gradients are finite and right."""
    x = cases.make("normal", 3, n, as_dtype("float16"))
    ct = np.ones((3, n) if name != "logsumexp" else 3, np.float16)
    ct[1] = 3
    want = exact(name, x, ct)
    for y, dx in values_and_vjps([ours(name, path=path) for path in (None, *PATHS[1:])], x, ct):
        assert np.isfinite(dx).all() and np.isfinite(y).all()
        Expected(name, (x,)).check(y)
        if name != "softmax":  # its gradient starts from a y that is rounded
            # p errs by what the statistics may, 2^-15: half a float16 ulp's thirtieth.
            allowed = 0.6 * spacing(want, x.dtype) + 2.0**-13 * np.abs(want - ct.reshape(3, -1))
            assert (np.abs(dx.astype(float) - want) <= allowed).all()


@pytest.mark.parametrize("path", NAMES, ids=str)
@every_function
def test_float32_rows_far_from_0(platform, name, path):
    """Rows near 1e7, where float32 has whole numbers only: value and gradient are those of the same
    rows near 0, bit for bit where nothing else enters."""
    x = np.random.default_rng(42).integers(-30, 1, (8, 1000)).astype(np.float32)
    x[:, 7] = 0
    ct = np.random.default_rng(43).standard_normal(8 if name == "logsumexp" else x.shape)
    ct = ct.astype(np.float32)
    f = ours(name, path=path)
    near_y, near_dx = values_and_vjps([f], x, ct)[0]
    for offset in (np.float32(-1e7), np.float32(1e7)):
        far = x + offset
        assert (far - offset == x).all()
        y, dx = values_and_vjps([f], far, ct)[0]
        np.testing.assert_array_equal(dx, near_dx)
        if name != "logsumexp":
            np.testing.assert_array_equal(y, near_y)
        Expected(name, (far,)).check(y)
        np.testing.assert_allclose(dx, exact(name, far, ct), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy(platform, dtype):
    """Two ways to write it, by log_softmax and by logsumexp: loss and gradient in float64."""
    rng = np.random.default_rng(44)
    x = rng.standard_normal((32, 777)).astype(as_dtype(dtype))
    labels = rng.integers(0, 777, 32)

    def by_log_softmax(x):
        y = ours("log_softmax")(x)
        return -jnp.take_along_axis(y, labels[:, None], axis=-1).astype(jnp.float32).mean()

    def by_logsumexp(x):
        chosen = jnp.take_along_axis(x, labels[:, None], axis=-1)[:, 0]
        return (ours("logsumexp")(x) - chosen).astype(jnp.float32).mean()

    wide = x.astype(np.float64)
    log = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    want = -log[np.arange(32), labels].mean(), (np.exp(log) - np.eye(777)[labels]) / 32
    tolerance = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
    for loss in (by_log_softmax, by_logsumexp):
        value, gradient = jax.jit(jax.value_and_grad(loss))(x)
        np.testing.assert_allclose(value, want[0], rtol=tolerance)
        np.testing.assert_allclose(
            np.asarray(gradient).astype(float), want[1], rtol=tolerance, atol=tolerance / 32
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["log_softmax", "logsumexp"])
def test_statistics_and_result_agree(platform, name, dtype):
    """The result with the statistics asked for is, bit for bit, the one without."""
    x = cases.batch(4097, as_dtype(dtype), cases.HARDEST)
    for path in PATHS:
        alone = run(name, x, path=path)
        y, _, total = run(name, x, path=path, stats=True)
        assert y.tobytes() == alone.tobytes()
        assert (np.asarray(total) >= 1 - 2 * ULPS["float32"] * 2.0**-24).all()
