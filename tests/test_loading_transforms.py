"""Masked, scaled, causal calls under JAX's transformations: values and gradients as jax.nn."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import as_dtype
from functions import every_function, ours, primitive, theirs
from jax import lax

from jaxsoftmax._plan import PATHS

elementwise = pytest.mark.parametrize("name", ["softmax", "log_softmax"])
RNG = np.random.default_rng(51)
X, CT = (RNG.standard_normal((3, 4, 5, 24)).astype(np.float32) for _ in range(2))
MASK = RNG.random((3, 4, 5, 24)) < 0.8
VALUES = (0.37, 0.0, -2.0)


def close(got, want, rtol=2e-5):
    assert got.dtype == want.dtype
    rtol = 1e-2 if got.dtype == jnp.bfloat16 else rtol
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=2e-5)


@every_function
def test_vmap_in_other_ways(platform, name):
    """Batches that lie differently, nested ones, only the mask's or only the cotangent's: the
    values are jax.nn's."""

    def each(make, x, mask, small, ct):
        def f(x, mask, axis=-1):
            return make(name, axis, where=mask)(x)

        def slope(x, mask, ct):
            return jax.vjp(lambda x: f(x, mask), x)[1](ct)[0]

        turned = mask.swapaxes(0, 1)
        return [
            jax.vmap(f, (0, 1))(x, turned),
            jax.vmap(f, (1, 0))(x, turned),
            jax.vmap(f, (None, 0))(x[0], small),
            jax.vmap(f, (0, 1))(x, small.T),
            jax.vmap(jax.vmap(f, (0, None)), (1, 0))(x[:, :3], small),
            jax.vmap(jax.vmap(f, (1, 0)), (0, 0), 1)(x, mask.swapaxes(1, 2)),
            jax.vmap(lambda x, m: f(x, m, 0), (2, None))(x, small[:, None]),
            jax.vmap(slope, (None, None, 0))(x[0], mask[0], ct),
            jax.vmap(slope, (None, 0, None))(x[0], mask, ct[0]),
            jax.vmap(slope, (1, 0, None))(x, turned, ct[:, 0]),
        ]

    program = jax.jit(lambda *operands: [each(g, *operands) for g in (ours, theirs)])
    given = X, MASK, MASK[:, 0, 0], CT[..., 0] if name == "logsumexp" else CT
    jax.tree.map(close, *program(*given))


@elementwise
def test_a_batched_scale(platform, name):
    """One scale a batch element, beside x batched or not, masks batched or not: values and all
    gradients as of a loop."""
    rng = np.random.default_rng(6)
    x, ct = (rng.standard_normal((5, 3, 4, 33)).astype(np.float32) for _ in range(2))
    mask, scales = rng.random((5, 4, 33)) < 0.8, np.linspace(-1, 1, 5, dtype=np.float32)

    def one(x, mask, scale, ct, axis=-1, **options):
        def f(x, s):
            return ours(name, axis, where=mask, scale=s, **options)(x)

        y, pull = jax.vjp(f, x, scale)
        return y, *pull(ct)

    cases = [
        ((0, 0, 0, 0), {}),
        ((None, None, 0, 0), {"is_causal": True}),
        ((0, None, 0, None), {"axis": 1}),
        ((1, 0, 0, 2), {"axis": (0, 2)}),
        ((0, None, None, 0), {"axis": 0}),
        ((3, 2, 0, 3), {"path": "split_k", "dtype": "bfloat16"}),
    ]

    def operands(axes):
        whole = [jnp.asarray(a) for a in (x, mask, scales, ct)]
        return [
            a[0] if d is None else jnp.moveaxis(a, 0, d) for a, d in zip(whole, axes, strict=True)
        ]

    def program(looped):
        found = []
        for axes, options in cases:
            given = operands(axes)
            if options.get("dtype"):
                given[3] = given[3].astype(as_dtype(options["dtype"]))

            def f(*a, o=options):
                return one(*a, **o)

            if not looped:
                found.append(jax.vmap(f, in_axes=axes)(*given))
                continue
            rows = [
                f(
                    *(
                        a if d is None else jnp.take(a, i, d)
                        for a, d in zip(given, axes, strict=True)
                    )
                )
                for i in range(5)
            ]
            found.append(jax.tree.map(lambda *a: jnp.stack(a), *rows))
        return found

    got, want = (jax.jit(program, static_argnums=0)(looped) for looped in (False, True))
    jax.tree.map(close, got, want)


@elementwise
def test_nested_batches_of_scales(platform, name):
    """Two vmaps, each with a scale of its own beside one of x."""
    x = np.random.default_rng(7).standard_normal((3, 4, 17)).astype(np.float32)
    scales = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)

    def f(x, s):
        return ours(name, scale=s)(x)

    nested = jax.jit(jax.vmap(jax.vmap(f)))(x, scales)
    crossed = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (0, 0)))(x[:, 0], scales)
    within = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (1, None), 1))(x[0, :, :].T, scales[0])
    close(nested, theirs(name)(x * scales[..., None]))
    close(crossed, theirs(name)(x[:, None, 0] * scales[..., None]))
    close(within, theirs(name)(x[0] * scales[0][:, None, None]))


@elementwise
def test_every_order(platform, name):
    """Second derivatives in x and scale, masked and causal; forward mode over the primitive."""
    rng = np.random.default_rng(8)
    x, v = (rng.standard_normal((3, 7)).astype(np.float32) for _ in range(2))
    mask = np.array([1, 1, 0, 1, 1, 1, 1], bool)
    keep = mask & np.tri(3, 7, dtype=bool)

    def reference(x, scale):
        return theirs(name, where=keep)(x * scale)

    def kernel(x, scale, make=ours, path=None):
        return make(name, where=mask, scale=scale, is_causal=True, path=path)(x)

    def orders(f, value, forward):
        def loss(x, scale):
            return jnp.sum(jnp.where(keep, f(x, scale), 0) ** 2 * v)

        gradient = jax.grad(loss, (0, 1))
        at, along = (x, value), (v, 1.5)
        found = [gradient(*at), jax.jvp(gradient, at, along), jax.hessian(loss, (0, 1))(*at)]
        if forward:
            y, tangent = jax.jvp(f, at, along)
            found += [jnp.where(keep, y, 0), jnp.where(keep, tangent, 0)]
            found += [jax.jacfwd(jax.jacfwd(loss, 1), 0)(*at)]
        return found

    def program(value):
        ways = [orders(lambda x, s, p=p: kernel(x, s, path=p), value, False) for p in PATHS]
        forward = [lambda x, s: kernel(x, s, primitive), reference]
        return ways + [orders(f, value, True) for f in forward]

    jitted = jax.jit(program)
    for value in VALUES:
        *found, want = jitted(value)
        for got in found:
            jax.tree.map(functools.partial(close, rtol=1e-4), got, want[: len(got)])


@elementwise
def test_inside_control_flow_and_checkpoints(platform, name):
    """A scale that is carried, chosen, recomputed, kept constant."""
    keep = MASK[:, :1] & np.tri(5, 24, dtype=bool)

    def functions(f):
        def step(carry, factor):
            return carry + (f(X * factor, carry) * CT).mean(), f(X, factor).sum()

        def chosen(s):
            return lax.cond(s > 0, lambda: (f(X, s) * CT).sum(), lambda: (f(X, 2 * s) * CT).sum())

        return [
            lambda s: lax.scan(step, s, jnp.arange(1.0, 4.0))[0],
            chosen,
            lambda s: jax.checkpoint(lambda s: (f(X, s) * CT).sum())(s),
            lambda s: (f(X * s, lax.stop_gradient(s)) * CT).sum(),
            lambda s: lax.fori_loop(0, 3, lambda i, x: jnp.sin(f(x, s)) * x, X).sum(),
        ]

    def kernel(x, s):
        y = ours(name, where=MASK[:, :1], scale=s, is_causal=True)(x)
        return jnp.where(keep, y, 0)

    def reference(x, s):
        return jnp.where(keep, theirs(name, where=keep)(x * s), 0)

    def program(s):
        return [[jax.grad(g)(s) for g in functions(f)] for f in (kernel, reference)]

    got, want = jax.jit(program)(0.7)
    jax.tree.map(functools.partial(close, rtol=2e-4), got, want)


@pytest.mark.parametrize("axis", [-1, (0, 2)], ids=str)
def test_forward_mode_of_a_masked_logsumexp(platform, axis):
    """Over the primitive, in every path, and the transpose of its tangent."""

    def each(f):
        y, tangent = jax.jvp(f, (X,), (CT,))
        return y, tangent, jax.linear_transpose(jax.linearize(f, X)[1], X)(jnp.cos(y))[0]

    ways = [primitive("logsumexp", axis, where=MASK, path=path) for path in (None, *PATHS)]
    *found, want = jax.jit(
        lambda: [each(f) for f in (*ways, theirs("logsumexp", axis, where=MASK))]
    )()
    for got in found:
        jax.tree.map(close, got, want)
