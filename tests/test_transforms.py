"""JAX's transformations give what they give with jax.nn: values and gradients of every kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import every_function, ours, primitive, theirs
from jax import lax

from jaxsoftmax._plan import PATHS

NAMES = (None, *PATHS)
X, V = (
    np.random.default_rng(seed).standard_normal((4, 6, 33)).astype(np.float32) for seed in (21, 22)
)


def close(got, want, tolerance=2e-5):
    def near(a, b):
        scale = max(1, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale / 10)

    jax.tree.map(near, got, want)


def parity(name, transformed, *args, paths=(None,), tolerance=2e-5):
    """transformed(ours) in each path against transformed(jax.nn's), by one program."""

    def function(make, **options):
        return lambda x, axis=-1: make(name, axis, **options)(x)

    functions = [*(function(ours, path=path) for path in paths), function(theirs)]
    program = jax.jit(lambda *args: [transformed(f)(*args) for f in functions])
    *results, want = program(*args)
    for got in results:
        close(got, want, tolerance)


def weighed(y):
    """One number of a result in which every element counts differently."""
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


def loss(f, axis=-1):
    return lambda x: weighed(f(x, axis)) ** 2


@every_function
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None], ids=str)
def test_grad(platform, axis, name):
    parity(name, lambda f: jax.value_and_grad(loss(f, axis)), X, paths=NAMES)


@every_function
def test_without_jit(platform, name):
    close(ours(name)(X), theirs(name)(X))
    gradients = [jax.grad(lambda x, g=g: weighed(g(name)(x)) ** 2)(X) for g in (ours, theirs)]
    close(*gradients)
    with jax.disable_jit():
        close(ours(name)(X), theirs(name)(X))


@every_function
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap(platform, axis, name):
    x = np.random.default_rng(23).standard_normal((3, 4, 5, 6)).astype(np.float32)

    def mapped(f):
        return lambda x: [
            jax.vmap(lambda x: f(x, axis), in_axes=d, out_axes=1)(x) for d in (0, 1, 2, -1)
        ]

    parity(name, mapped, x)


@every_function
def test_nested_vmap(platform, name):
    def nested(f):
        return jax.vmap(jax.vmap(lambda x: f(x, -1), in_axes=1), in_axes=2, out_axes=1)

    parity(name, nested, X, paths=NAMES)


@every_function
def test_vmap_of_grad_and_grad_of_vmap(platform, name):
    parity(name, lambda f: jax.vmap(jax.grad(loss(f))), X, paths=NAMES)
    parity(name, lambda f: jax.grad(lambda x: weighed(jax.vmap(f)(x))), X, paths=NAMES)


@every_function
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 1), (2, 0)], ids=str)
def test_vmap_of_the_backward(platform, in_axes, name):
    """Residuals and cotangent batched differently, or one of them not at all."""
    x, ct = X[:, :, :6], V[:, :, 0] if name == "logsumexp" else V[:, :, :6]
    operands = [
        a[0] if d is None else np.moveaxis(a, 0, min(d, a.ndim - 1))
        for a, d in zip((x, ct), in_axes, strict=True)
    ]
    given = tuple(
        d if d is None else min(d, a.ndim - 1) for a, d in zip((x, ct), in_axes, strict=True)
    )

    def backward(f):
        return jax.vmap(lambda x, ct: jax.vjp(f, x)[1](ct)[0], in_axes=given)

    parity(name, backward, *operands)


@every_function
def test_hessian(platform, name):
    parity(name, lambda f: jax.hessian(loss(f)), X[0, 0, :7], paths=NAMES)


@every_function
def test_jacobian(platform, name):
    parity(name, jax.jacrev, X[0, :2, :9])
    parity(name, lambda f: jax.jacrev(jax.grad(lambda x: (f(x) ** 3).sum())), X[0, 0, :9])


@every_function
def test_third_order(cpu, name):
    def third(f):
        second = jax.hessian(lambda x: weighed(f(x) ** 2))
        return jax.grad(lambda x: second(x).sum())

    parity(name, third, X[0, 0, :5])


@every_function
def test_third_order_along_a_direction(cpu, name):
    """jvp of jvp of the gradient, and the gradient of a jvp of it: every rule's own rule."""

    def along(f):
        def slope(x, v):
            return jax.jvp(jax.grad(loss(f)), (x,), (v,))[1]

        def twice(x, v):
            curved = jax.jvp(lambda x: slope(x, v), (x,), (v,))[1]
            return curved, jax.grad(lambda x: weighed(slope(x, v)))(x)

        return twice

    parity(name, along, X[0, :2, :8], V[0, :2, :8], tolerance=2e-4)


@every_function
def test_forward_over_reverse(platform, name):
    """jvp and linearize of the gradient."""

    def both(f):
        gradient = jax.grad(loss(f))
        return lambda x, v: (jax.jvp(gradient, (x,), (v,)), jax.linearize(gradient, x)[1](v))

    parity(name, both, X, V, tolerance=1e-4)


@every_function
@pytest.mark.parametrize("axis", [-1, (0, 2)], ids=str)
def test_primitive_has_forward_mode(platform, axis, name):
    """jvp, jacfwd, linearize and its transpose, vmap of a jvp, the gradient."""

    def each(make):
        f = make(name, axis)

        def program(x, v):
            tangents = [jax.jvp(f, (x,), (v,)), jax.linearize(f, x)[1](v)]
            inner = make(name)
            mapped = jax.vmap(lambda x, v: jax.jvp(inner, (x,), (v,))[1])(x, v)
            pulled = jax.linear_transpose(jax.linearize(f, x)[1], x)(f(x))
            small = x[0, :2, :5]
            second = jax.jacfwd(jax.jacfwd(lambda x: weighed(inner(x))))(small)
            both = jax.jacfwd(inner)(small), jax.jacrev(jax.jacfwd(inner))(small[0]), second
            return tangents, mapped, pulled, both, jax.grad(lambda x: weighed(f(x)) ** 2)(x)

        return program

    got, want = jax.jit(lambda x, v: [each(g)(x, v) for g in (primitive, theirs)])(X, V)
    close(got, want)


@every_function
def test_primitive_in_every_path(platform, name):
    def program(x, v):
        functions = [*(primitive(name, path=path) for path in PATHS), theirs(name)]
        return [jax.jvp(f, (x,), (v,)) for f in functions]

    *results, want = jax.jit(program)(X, V)
    for got in results:
        close(got, want)


@every_function
@pytest.mark.parametrize("policy", [None, "nothing_saveable", "everything_saveable"])
def test_checkpoint(platform, policy, name):
    rule = getattr(jax.checkpoint_policies, policy) if policy else None
    parity(name, lambda f: jax.grad(jax.checkpoint(loss(f), policy=rule)), X)


@every_function
def test_scan_cond_while(platform, name):
    def scanned(f):
        def step(carry, x):
            return carry + weighed(f(x)) * jnp.tanh(x), f(carry).sum()

        return jax.value_and_grad(lambda x: lax.scan(step, x[0], x)[0].var())

    def chosen(f):
        return jax.grad(
            lambda x: lax.cond(
                x[0, 0, 0] > 0, lambda x: weighed(f(x)), lambda x: weighed(f(x, 0)), x
            )
        )

    def repeated(f):
        return lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) * weighed(f(x)) / 9, x)

    for transformed in (scanned, chosen, repeated):
        parity(name, transformed, X, tolerance=1e-4)


@every_function
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(platform, name, dtype):
    """Statistics, factors and tangents in other types than the rows': every order of derivative
    has jax.nn's dtype, and about its value in float64."""

    def each(make, x, v):
        f = make(name)

        def squared(x):
            return weighed(f(x).astype(jnp.float64) ** 2)

        gradient = jax.grad(squared)
        value, pull = jax.vjp(f, x)
        return value, pull(value)[0], gradient(x), jax.jvp(gradient, (x,), (v,))[1]

    with jax.enable_x64(True):
        x, v = (jnp.asarray(a[0, :3, :9], dtype) for a in (X, V))
        exact = x.astype(jnp.float64), v.astype(jnp.float64)
        got = jax.jit(lambda: each(ours, x, v))()
        like, want = jax.jit(lambda: (each(theirs, x, v), each(theirs, *exact)))()
        assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, like)
        tolerance = {"float16": 4e-3, "bfloat16": 4e-2, "float64": 1e-12}[dtype]
        for a, b in zip(got, want, strict=True):
            scale = float(jnp.abs(b).max())
            np.testing.assert_allclose(a.astype(float), b, rtol=0, atol=tolerance * scale)
