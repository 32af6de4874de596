"""The table of transformations: what each makes of a function f(x, axis).

A row is a program of f, whose results are compared with those of the same program of jax.nn's
function. docs/transformations.md lists every row for the user, under the same name. Here are the
ways of calling it; transformations_loops.py, transformations_derivatives.py and
transformations_devices.py enter the others, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from functions import loss, weighed
from jax.experimental import checkify, sparse
from jax.extend.core import jaxpr_as_fun

from jaxsoftmax._plan import PATHS

NAMES = (None, *PATHS)
X, V = (
    np.random.default_rng(seed).standard_normal((4, 6, 33)).astype(np.float32) for seed in (21, 22)
)


class Row(NamedTuple):
    """One transformation: program(f) is a function of the inputs that gives what is compared."""

    program: Callable[..., Any]
    inputs: tuple[Any, ...] = (X,)
    paths: tuple[Any, ...] = (None,)  # each is forced once
    tolerance: float = 2e-5
    jit: bool = True  # or the program is called as it is
    works: str = "yes"  # or "formula": not by kernels; or "primitive": that is forward mode
    devices: int = 1


class Refusal(NamedTuple):
    """What raises, and for whom: "jax" (jax.nn's functions too), "jaxsoftmax", "kernels" (that is
    where formulas do not run instead)."""

    program: Callable[..., Any]
    whose: str
    error: type[Exception] | tuple[type[Exception], ...]
    says: str = ""


TABLE: dict[str, Row] = {}
REFUSED: dict[str, Refusal] = {}

# What older releases of JAX cannot do: from which one they can, and what happens before.
RELEASES = {
    "ensure_compile_time_eval": ("0.9", "a custom_vjp is traced all the same"),
    "sparsify": ("0.12", "KeyError, of any custom_vjp"),
    "vmap of shard_map, spmd_axis_name": ("0.10", "mesh axes do not match, with jax.nn neither"),
    "debug_nans where a NaN arises": ("0.10", "RecursionError, not FloatingPointError"),
}


def row(name: str, *inputs: Any, **options: Any):
    """Enters a program in the table."""

    def enter(program):
        TABLE[name] = Row(program, inputs or (X,), **options)
        return program

    return enter


def refused(name: str, *reason: Any):
    """The same for what raises."""

    def enter(program):
        REFUSED[name] = Refusal(program, *reason)
        return program

    return enter


def plain(f):
    """A value, a gradient and a batch, for the ways of calling."""
    return lambda x: (f(x), jax.grad(loss(f))(x), jax.vmap(f, 1, -1)(x))


# How it is called.


@row("eager", jit=False)
def eager(f):
    return lambda x: (plain(f)(x), f(x, None))


@row("disable_jit", jit=False)
def disable_jit(f):
    def program(x):
        with jax.disable_jit():
            return eager(f)(x)

    return program


@row("jit")
def jit(f):
    return lambda x: [jax.jit(lambda x, a=axis: f(x, a))(x) for axis in (-1, 0, (0, 2), None)]


@row("lower and compile", jit=False)
def ahead_of_time(f):
    return lambda x: jax.jit(plain(f)).lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()(x)


@row("eval_shape", jit=False)
def eval_shape(f):
    return lambda x: jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), jax.eval_shape(plain(f), x))


@row("make_jaxpr and jaxpr_as_fun")
def round_trip(f):
    def program(x):
        again = jaxpr_as_fun(jax.make_jaxpr(lambda x: f(x))(X))
        return again(x), jax.grad(lambda x: weighed(*again(x)))(x), jax.vmap(again)(x[None])

    return program


@row("donate_argnums", jit=False)
def donated(f):
    """The buffer is given away where a result takes its place; the caller's array is then gone."""

    def program(x):
        given, also = jnp.array(x), jnp.array(x)
        moved = jax.jit(lambda x: x - jax.grad(loss(f))(x), donate_argnums=0)(given)
        found = jax.jit(lambda x: (f(x), x + 1), donate_argnums=0)(also)
        assert given.is_deleted() and also.is_deleted()
        return moved, found

    return program


@row("ensure_compile_time_eval")
def compile_time(f):
    def program(x):
        with jax.ensure_compile_time_eval():
            known = f(X), jax.grad(lambda x: f(x).sum())(X)
        assert not any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(known))
        return known, f(x)

    return program


@row("named_call and named_scope")
def named(f):
    def program(x):
        with jax.named_scope("scope"):
            return plain(jax.named_call(f, name="call"))(x)

    return program


@row("debug_nans and debug_infs", jit=False)
def debugged(f):
    """Where no number is bad, nothing raises."""

    def program(x):
        with jax.debug_nans(True), jax.debug_infs(True):
            return jax.jit(plain(f))(x)

    return program


@row("enable_x64", jit=False, tolerance=1e-12)
def x64(f):
    def program(x):
        with jax.enable_x64(True):
            return jax.jit(plain(f))(x.astype(float))

    return program


@row("enable_x64 on and off", jit=False)
def x64_switched(f):
    """Without it float64 is float32, before and after; with it float32 stays float32."""

    def program(x):
        found = [f(x.astype(float))]
        with jax.enable_x64(True):
            found += [f(x), jax.jit(jax.grad(loss(f)))(x)]
        return found, f(x.astype(float)), jax.jit(jax.grad(loss(f)))(x.astype(float))

    return program


@row("checkify", jit=False)
def checked(f):
    def program(x):
        both = jax.jit(jax.value_and_grad(loss(f)))
        errors, found = checkify.checkify(both, errors=checkify.all_checks)(jnp.array(x))
        errors.throw()
        return found

    return program


@row("sparsify")
def sparsified(f):
    return lambda x: (sparse.sparsify(f)(x), sparse.sparsify(jax.grad(loss(f)))(x))
