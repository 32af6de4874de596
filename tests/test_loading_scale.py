"""The derivative along the scale: against float64, in the scale's dtype; what is kept for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import as_dtype, spacing
from functions import ours, theirs
from loading import Call, Data, make, noted

from jaxsoftmax._plan import DTYPES

SHAPE = (3, 4, 9, 33)
VALUES = (0.37, 0.0, -2.0)
elementwise = pytest.mark.parametrize("name", ["softmax", "log_softmax"])


def exact(call: Call, d: Data) -> tuple[float, float]:
    """The derivative along the scale of sum(ct * y), and the sum of its terms' magnitudes."""
    axes = call.axes(d.x.ndim)
    x = np.where(d.keep, d.x.astype(np.float64), 0)
    ct = np.where(d.keep, d.ct.astype(np.float64), 0)
    z = np.where(d.keep, float(d.scale) * x, -np.inf)
    top = z.max(axes, keepdims=True)
    terms = np.exp(z - np.where(np.isinf(top), 0, top))
    total = terms.sum(axes, keepdims=True)
    p = terms / np.where(total == 0, 1, total)
    if call.name == "softmax":
        parts = p * (ct - (p * ct).sum(axes, keepdims=True)) * x
        most = p * (np.abs(ct) + (p * np.abs(ct)).sum(axes, keepdims=True)) * np.abs(x)
    else:
        parts = (ct - p * ct.sum(axes, keepdims=True)) * x
        most = (np.abs(ct) + p * np.abs(ct).sum(axes, keepdims=True)) * np.abs(x)
    return parts.sum(), most.sum()


CALLS = [
    Call(name, axis, mask, True, causal)
    for name in ("softmax", "log_softmax")
    for axis, mask, causal in (
        *((-1, None, False), (-1, "key", False), (-1, "key", True), (-1, None, True)),
        *(
            (1, "full", False),
            (-2, "query_key", True),
            (None, "last", False),
            ((0, 2), None, False),
        ),
    )
] + [
    Call(name, axis, "key", True, axis == -1, "float32")
    for name in ("softmax", "log_softmax")
    for axis in (-1, 1)
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_along_the_scale(platform, dtype):
    """Also at 0 and below, masked and causal, whatever lies under the mask; beside the gradient
    along x, which stays as it is."""

    def gradients(call, x, mask, scale, ct):
        def f(x, scale):
            return call.function(mask, scale)(x)

        along_x = jax.vjp(lambda x: f(x, scale), x)[1](ct)
        return *jax.vjp(f, x, scale)[1](ct), *along_x

    calls = [c for c in CALLS if (dtype, c.dtype) not in [("float32",) * 2, ("float64", "float32")]]
    jitted = jax.jit(lambda all: [gradients(c, *a) for c, a in zip(calls, all, strict=True)])
    epsilon = max(float(spacing(np.asarray(1.0), as_dtype(dtype))), 2.0**-23)
    for value in VALUES:
        for poison in (False, True):
            clean = [make(call, SHAPE, dtype, "random", value) for call in calls]
            data = [d.poisoned() for d in clean] if poison else clean
            with jax.enable_x64(dtype == "float64"):
                found = jax.tree.map(np.asarray, jitted([d.operands() for d in data]))
            for call, d, (dx, ds, dx_alone) in zip(calls, clean, found, strict=True):
                with noted(call, value, poison):
                    want, terms = exact(call, d)
                    assert ds.dtype == d.scale.dtype and ds.shape == ()
                    assert abs(float(ds) - want) <= 8 * epsilon * terms
                    np.testing.assert_array_equal(dx, dx_alone)


@elementwise
def test_a_scale_of_python_and_of_other_dtypes(cpu, name):
    """jax.grad takes a float, and gives its dtype back."""
    x = np.cos(np.arange(24, dtype=np.float32)).reshape(4, 6)

    def loss(make, scaled):
        return lambda s: (scaled(make, s) * x).sum()

    def each(make, s):
        return (make(name, scale=s)(x)) if make is ours else theirs(name)(x * s)

    for scale in (0.5, np.float32(-1), jnp.bfloat16(0.5), np.float16(2)):
        got, want = (jax.grad(loss(make, each))(scale) for make in (ours, theirs))
        assert got.dtype == jnp.result_type(scale)
        np.testing.assert_allclose(float(got), float(want), rtol=1e-2)


def residuals(function, *primals) -> list[tuple[int, ...]]:
    """The shapes of the arrays that are kept for the gradient along those primals."""
    pull = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *primals)
    return [leaf.shape for leaf in jax.tree.leaves(pull)]


@elementwise
@pytest.mark.parametrize("axis", [-1, 1], ids=str)
def test_x_is_kept_only_for_the_scale(cpu, name, axis):
    """softmax keeps y, log_softmax x and its statistics; with a mask that is not broadcast."""
    x = jnp.ones((4, 6, 40), jnp.bfloat16)
    mask, scale = jnp.ones((4, 1, 40), bool), jnp.float32(0.5)
    large = x.shape

    def f(x, scale):
        return ours(name, axis, where=mask, scale=scale)(x)

    assert residuals(lambda x: f(x, scale), x).count(large) == 1
    assert residuals(lambda x: f(x, 0.5), x).count(large) == 1
    both = residuals(f, x, scale)
    assert both.count(large) == (2 if name == "softmax" else 1)
    assert large not in residuals(lambda x: ours("logsumexp", axis, where=mask)(x), x)[1:]
