"""Rows of the table of transformations: derivatives of every kind, reverse and forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from functions import loss, weighed
from jax.ad_checkpoint import checkpoint_name
from transformations import NAMES, V, X, row
from transformations_loops import fixed_point, while_loop

ROW, ROWS, ROWS_V = X[0, 0, :7], X[0, :2, :8], V[0, :2, :8]


@row("grad and value_and_grad", paths=NAMES)
def grad(f):
    found = [jax.value_and_grad(loss(f, axis)) for axis in (-1, 0, (0, 2), None)]
    return lambda x: (jax.grad(lambda x: weighed(f(x)))(x), [g(x) for g in found])


@row("jacrev", ROWS)
def jacrev(f):
    slope = jax.grad(lambda x: (f(x) ** 3).sum())
    return lambda x: (jax.jacrev(f)(x), jax.jacrev(slope)(x[0]))


@row("vjp of vjp", X, V)
def vjp_of_vjp(f):
    """The pulled-back cotangent's own derivatives, along x and along the cotangent."""

    def program(x, v):
        y = f(x)
        dx, pull = jax.vjp(lambda x, ct: jax.vjp(f, x)[1](ct)[0], x, jnp.cos(y))
        return dx, pull(v)

    return program


@row("hessian", ROW, paths=NAMES)
def hessian(f):
    return jax.hessian(loss(f))


@row("jacrev of jacrev", ROW)
def jacrev_of_jacrev(f):
    return jax.jacrev(jax.jacrev(lambda x: f(x)))


@row("jvp and linearize of grad", X, V, tolerance=1e-4)
def forward_over_reverse(f):
    gradient = jax.grad(loss(f))

    def program(x, v):
        slope = jax.linearize(gradient, x)[1]
        return jax.jvp(gradient, (x,), (v,)), slope(v), jax.linear_transpose(slope, x)(v)

    return program


@row("third order", ROW[:5])
def third_order(f):
    second = jax.hessian(lambda x: weighed(f(x) ** 2))
    return jax.grad(lambda x: second(x).sum())


@row("third order along a direction", ROWS, ROWS_V, tolerance=2e-4)
def third_order_along(f):
    """jvp of jvp of the gradient, and the gradient of a jvp of it: every rule's own rule."""

    def slope(x, v):
        return jax.jvp(jax.grad(loss(f)), (x,), (v,))[1]

    def program(x, v):
        curved = jax.jvp(lambda x: slope(x, v), (x,), (v,))[1]
        return curved, jax.grad(lambda x: weighed(slope(x, v)))(x)

    return program


@row("checkpoint and its policies")
def checkpoint(f):
    named = jax.checkpoint_policies.save_only_these_names
    policies = [
        None,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.dots_saveable,
        named("probabilities"),
        named("nothing of that name"),
    ]

    def one(x):
        return weighed(checkpoint_name(f(jnp.sin(x)), "probabilities")) ** 2

    return lambda x: [jax.grad(jax.checkpoint(one, policy=p))(x) for p in policies]


@row("custom_jvp of the user")
def users_jvp(f):
    """A rule that calls f's gradient gives forward mode, whatever f is."""

    def program(x):
        g = jax.custom_jvp(loss(f))
        g.defjvp(lambda at, along: (loss(f)(*at), jnp.vdot(jax.grad(loss(f))(*at), *along)))
        return jax.jvp(g, (x,), (jnp.cos(x),)), jax.grad(g)(x), jax.vmap(g)(x)

    return program


@row("custom_vjp of the user")
def users_vjp(f):
    def program(x):
        g = jax.custom_vjp(lambda x: f(x))
        g.defvjp(lambda x: jax.vjp(f, x), lambda pull, ct: pull(jnp.clip(ct, -0.1, 0.1)))
        return jax.grad(loss(lambda x, axis: g(x)))(x), jax.vmap(jax.vjp(g, x)[1])(f(x)[None])

    return program


# Forward mode: JAX has none over a custom_vjp.


@row("jvp", X, V, paths=NAMES, works="primitive")
def jvp(f):
    return lambda x, v: [jax.jvp(lambda x, a=axis: f(x, a), (x,), (v,)) for axis in (-1, (0, 2))]


@row("linearize", X, V, works="primitive")
def linearize(f):
    """Also its transpose, and along another axis."""

    def program(x, v):
        found = []
        for axis in (-1, (0, 2)):
            y, slope = jax.linearize(lambda x, a=axis: f(x, a), x)
            found += [y, slope(v), jax.linear_transpose(slope, x)(y)]
        return found

    return program


@row("vmap of jvp", X, V, works="primitive")
def vmap_of_jvp(f):
    def each(x, v):
        return jax.jvp(lambda x: f(x), (x,), (v,))

    return lambda x, v: (jax.vmap(each)(x, v), jax.vmap(each, (None, 0), -1)(x[0], v))


@row("jacfwd", ROWS, works="primitive")
def jacfwd(f):
    return lambda x: (jax.jacfwd(f)(x), jax.jacfwd(lambda x: f(x, 0))(x))


@row("jacfwd of jacfwd", ROWS, works="primitive")
def jacfwd_of_jacfwd(f):
    return jax.jacfwd(jax.jacfwd(lambda x: weighed(f(x))))


@row("grad and jacrev of forward mode", ROWS, ROWS_V, works="primitive")
def reverse_over_forward(f):
    def program(x, v):
        along = jax.grad(lambda x: weighed(jax.jvp(lambda x: f(x), (x,), (v,))[1]))(x)
        return along, jax.jacrev(jax.jacfwd(lambda x: f(x)))(x[0])

    return program


@row("jvp of a while_loop", ROWS, ROWS_V, works="primitive", tolerance=1e-4)
def jvp_of_a_loop(f):
    return lambda x, v: jax.jvp(while_loop(f), (x,), (v,))


@row("derivatives of a custom_root", ROWS, ROWS_V, works="primitive")
def grad_of_custom_root(f):
    """JAX pushes forward through the residual, for both."""
    return lambda x, v: (jax.grad(fixed_point(f))(x), jax.jvp(fixed_point(f), (x,), (v,)))
