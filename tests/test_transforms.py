"""JAX's transformations give what they give with jax.nn: values and gradients of every kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxsoftmax
from jaxsoftmax import softmax
from jaxsoftmax._plan import PATHS

NAMES = (None, *PATHS)
RNG = np.random.default_rng(21)
X = RNG.standard_normal((4, 6, 33)).astype(np.float32)
W = RNG.standard_normal((4, 6, 33)).astype(np.float32)
every_path = pytest.mark.parametrize("path", NAMES, ids=str)


def close(ours, theirs, **tolerance):
    tolerance = {"rtol": 2e-5, "atol": 2e-6, **tolerance}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), ours, theirs)


def parity(transformed, *args, path=None, **tolerance):
    """transformed(softmax) against transformed(jax.nn.softmax), jitted."""
    ours = jax.jit(transformed(lambda x, axis=-1: softmax(x, axis, path=path)))(*args)
    close(ours, jax.jit(transformed(jax.nn.softmax))(*args), **tolerance)


def loss(f, axis=-1):
    return lambda x, w: jnp.sum(f(x, axis) * w) ** 2


@every_path
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None], ids=str)
def test_grad(platform, axis, path):
    parity(lambda f: jax.value_and_grad(loss(f, axis)), X, W, path=path)


def test_without_jit(platform):
    close(softmax(X), jax.nn.softmax(X))
    close(jax.grad(loss(softmax))(X, W), jax.grad(loss(jax.nn.softmax))(X, W))
    with jax.disable_jit():
        close(softmax(X), jax.nn.softmax(X))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("in_axes", [0, 1, 2, -1])
def test_vmap(platform, in_axes, axis):
    x = RNG.standard_normal((3, 4, 5, 6)).astype(np.float32)
    parity(lambda f: jax.vmap(lambda x: f(x, axis), in_axes=in_axes, out_axes=1), x)


@every_path
def test_nested_vmap(platform, path):
    def nested(f):
        return jax.vmap(jax.vmap(lambda x: f(x, -1), in_axes=1), in_axes=2, out_axes=1)

    parity(nested, X, path=path)


@every_path
def test_vmap_of_grad_and_grad_of_vmap(platform, path):
    parity(lambda f: jax.vmap(jax.grad(loss(f))), X, W, path=path)
    parity(lambda f: jax.grad(lambda x, w: jnp.sum(jax.vmap(f)(x) * w)), X, W, path=path)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 1), (2, 0)], ids=str)
def test_vmap_of_the_backward(platform, in_axes):
    """Residual and cotangent batched differently, or one of them not at all."""
    x, dy = np.ascontiguousarray(X[0, :6, :6]), np.ascontiguousarray(W[0, :6, :6])
    cube = X[:, :, :6]
    operands = [
        v if a is None else np.moveaxis(cube, 0, a) for v, a in zip((x, dy), in_axes, strict=True)
    ]

    def backward(f):
        return jax.vmap(lambda x, dy: jax.vjp(f, x)[1](dy)[0], in_axes=in_axes)

    parity(backward, *operands)


@every_path
def test_hessian(platform, path):
    parity(
        lambda f: jax.hessian(lambda x: jnp.sum(f(x) * W[0, 0, :7]) ** 2), X[0, 0, :7], path=path
    )


@pytest.mark.parametrize(
    "mode", [jax.jacrev, lambda f: jax.jacrev(jax.grad(lambda x: (f(x) ** 3).sum()))]
)
def test_jacobian(platform, mode):
    parity(mode, X[0, 0, :9])


def test_third_order(cpu):
    def third(f):
        second = jax.hessian(lambda x: (f(x) ** 2 * W[0, 0, :5]).sum())
        return jax.grad(lambda x: second(x).sum())

    parity(third, X[0, 0, :5])


def test_forward_over_reverse(platform):
    """jvp and linearize of the gradient."""
    v = np.sin(X)
    parity(
        lambda f: lambda x, v: jax.jvp(jax.grad(loss(f)), (x, W), (v, 0 * W)),
        X,
        v,
        rtol=1e-4,
        atol=1e-5,
    )
    parity(
        lambda f: lambda x, v: jax.linearize(jax.grad(lambda x: loss(f)(x, W)), x)[1](v),
        X,
        v,
        rtol=1e-4,
        atol=1e-5,
    )


def test_primitive_has_forward_mode(platform):
    """jaxsoftmax.primitive.softmax: jvp, jacfwd and the gradient."""
    ours = jaxsoftmax.primitive.softmax
    close(jax.jvp(ours, (X,), (W,)), jax.jvp(jax.nn.softmax, (X,), (W,)))
    close(jax.jacfwd(ours)(X[0, 0]), jax.jacfwd(jax.nn.softmax)(X[0, 0]))
    close(jax.grad(loss(ours))(X, W), jax.grad(loss(jax.nn.softmax))(X, W))


@pytest.mark.parametrize("policy", [None, "nothing_saveable", "everything_saveable"])
def test_checkpoint(platform, policy):
    rule = getattr(jax.checkpoint_policies, policy) if policy else None
    parity(lambda f: jax.grad(jax.checkpoint(loss(f), policy=rule)), X, W)


def test_scan_cond_while(platform):
    def scanned(f):
        def step(carry, x):
            return carry + f(x), f(carry).sum()

        return jax.value_and_grad(lambda x: lax.scan(step, x[0], x)[0].var())

    def chosen(f):
        return jax.grad(lambda x: lax.cond(x[0, 0, 0] > 0, f, lambda x: f(x, 0), x).var())

    def repeated(f):
        return lambda x: lax.fori_loop(0, 3, lambda i, x: f(x) * 9, x)

    for transformed in (scanned, chosen, repeated):
        parity(transformed, X)
