"""Rows of the table of transformations: batches and control flow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from functions import loss, weighed
from jax import lax
from transformations import NAMES, V, X, row

ROWS = X[0, :2, :8]
X4 = np.random.default_rng(23).standard_normal((3, 4, 5, 6)).astype(np.float32)


# Batches.


@row("vmap", X4)
def vmap(f):
    return lambda x: [
        jax.vmap(lambda x, a=axis: f(x, a), in_axes=d, out_axes=to)(x)
        for axis in (0, 1, -1)
        for d, to in ((0, 1), (1, 0), (2, -1), (-1, 0))
    ]


@row("vmap, mixed in_axes", X[..., :6], V[..., :6])
def vmap_mixed(f):
    """Residuals and cotangent batched differently, or one of them not at all."""

    def program(x, ct):
        ct = ct if f(x).ndim == x.ndim else ct[..., 0]
        found = []
        for axes in [(0, None), (None, 0), (0, 1), (1, 0)]:
            given = [
                a[0] if d is None else jnp.moveaxis(a, 0, d)
                for a, d in zip((x, ct), axes, strict=True)
            ]
            found.append(jax.vmap(lambda x, ct: jax.vjp(f, x)[1](ct)[0], axes)(*given))
        return found

    return program


@row("vmap, nested", paths=NAMES)
def vmap_nested(f):
    return jax.vmap(jax.vmap(lambda x: f(x), in_axes=1), in_axes=2, out_axes=1)


@row("vmap of grad, grad of vmap", paths=NAMES)
def vmap_and_grad(f):
    each = jax.vmap(lambda x: f(x))
    return lambda x: (jax.vmap(jax.grad(loss(f)))(x), jax.grad(lambda x: weighed(each(x)))(x))


@row("vmap, axis_name and axis_size")
def vmap_named(f):
    each = jax.vmap(lambda x: f(x - lax.pmean(x, "i")) * lax.axis_index("i"), axis_name="i")
    same = jax.vmap(lambda x: f(x), in_axes=None, axis_size=3)
    return lambda x: (each(x), jax.grad(lambda x: weighed(each(x)))(x), same(x))


@row("vmap of size 0 and 1")
def vmap_of_few(f):
    def few(x):
        batches = jax.vmap(lambda x: f(x))(x), jax.vmap(lambda x: f(x, 0), 0, -1)(x)
        return batches, jax.vmap(jax.grad(loss(f)))(x)

    return lambda x: (few(x[:0]), few(x[:1]))


@row("custom_vmap and sequential_vmap")
def custom_vmap(f):
    def program(x):
        g = jax.custom_batching.custom_vmap(lambda x: f(x))
        g.def_vmap(lambda size, batched, x: (jax.vmap(lambda x: f(x))(x), True))
        return jax.vmap(g)(x), jax.vmap(jax.custom_batching.sequential_vmap(lambda x: f(x)))(x)

    return program


@row("jnp.vectorize")
def vectorized(f):
    def program(x):
        out = "(n)" if f(x).ndim == x.ndim else "()"
        return jnp.vectorize(lambda x: f(x), signature=f"(n)->{out}")(x)

    return program


# Control flow.


def fixed_point(f):
    """z = sin(weighed(f(x + z))) / 9, by iteration."""

    def root(x):
        def residual(z):
            return z - jnp.sin(weighed(f(x + z))) / 9

        def solve(g, z):
            return lax.fori_loop(0, 20, lambda i, z: z - g(z), z)

        return lax.custom_root(residual, 0.0, solve, lambda g, y: y / g(jnp.ones_like(y)))

    return root


@row("custom_root", ROWS)
def custom_root(f):
    return fixed_point(f)


@row("custom_linear_solve", ROWS)
def custom_linear_solve(f):
    """Of the system (2 + tanh(weighed(f(x)))) y = x."""

    def divide(matvec, b):
        return b / matvec(jnp.ones_like(b))

    def solve(x):
        def matvec(v):
            return (2 + jnp.tanh(weighed(f(x)))) * v

        return lax.custom_linear_solve(matvec, x, divide, divide)

    return lambda x: (solve(x), jax.grad(lambda x: weighed(solve(x)))(x))


@row("scan", tolerance=1e-4)
def scan(f):
    """Its gradient; also in reverse, with a checkpoint in each step."""

    def step(carry, x):
        return carry + weighed(f(x)) * jnp.tanh(x), f(carry).sum()

    def total(step, **options):
        return lambda x: sum(jnp.var(a) for a in lax.scan(step, x[0], x, **options))

    steps = jax.checkpoint(step)
    backwards = jax.grad(total(steps, reverse=True))
    return lambda x: (jax.value_and_grad(total(step))(x), backwards(x))


@row("while_loop", tolerance=1e-4)
def while_loop(f):
    def step(carry):
        i, x = carry
        return i + 1, jnp.sin(x + weighed(f(x)) / 99)

    return lambda x: lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]


@row("fori_loop", tolerance=1e-4)
def fori_loop(f):
    """As many times as is known, which has a gradient, and as a number says."""

    def times(n, x):
        return lax.fori_loop(0, n, lambda i, x: jnp.sin(x + weighed(f(x)) / 99), x)

    def program(x):
        some = times(jnp.where(x.size > 0, 2, x.argmax()), x)
        return some, jax.value_and_grad(lambda x: weighed(times(3, x)))(x)

    return program


@row("cond")
def cond(f):
    """Also with a batched predicate, which makes it a select of both."""

    def chosen(x):
        return lax.cond(x[0, 0] > 0, lambda x: weighed(f(x)), lambda x: weighed(f(x, 0)), x)

    both = jax.value_and_grad(chosen)
    return lambda x: (both(x[0]), jax.vmap(both)(x))


@row("switch")
def switch(f):
    def chosen(i, x):
        return lax.switch(i, [lambda x, a=a: weighed(f(x, a)) for a in (-1, 0, None)], x)

    def program(x):
        each = jnp.arange(3)
        return jax.vmap(chosen, (0, None))(each, x), lax.map(
            lambda i: jax.grad(chosen, 1)(i, x), each
        )

    return program


@row("map")
def mapped(f):
    """Also in batches, of which the last is smaller."""

    def program(x):
        every = [lax.map(lambda x: f(x), x, batch_size=size) for size in (None, 3)]
        batches = jax.grad(lambda x: weighed(lax.map(lambda x: f(x), x, batch_size=3)))
        return every, batches(x)

    return program


@row("associative_scan")
def associative_scan(f):
    return lambda x: lax.associative_scan(lambda a, b: a + b * jnp.tanh(weighed(f(a)) / 9), x)
