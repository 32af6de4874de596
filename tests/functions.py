"""The public functions by name, beside those of jax.nn, and both under one jit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def ours(name: str, axis=-1, **options):
    """The function along an axis (jax.nn.logsumexp takes all by default)."""
    return functools.partial(getattr(jaxsoftmax, name), axis=axis, **options)


def primitive(name: str, axis=-1, **options):
    return functools.partial(getattr(jaxsoftmax.primitive, name), axis=axis, **options)


def theirs(name: str, axis=-1, **options):
    return functools.partial(getattr(jax.nn, name), axis=axis, **options)


def weighed(y):
    """One number of a result in which every element counts differently."""
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


def loss(f, axis=-1):
    """A number whose derivatives of every order along x differ from 0."""
    return lambda x: weighed(f(x, axis)) ** 2


def values_and_vjps(functions, x: np.ndarray, ct: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Each function's value and gradient, by one program, numpy to numpy."""

    def both(function, x, ct):
        y, pull = jax.vjp(function, x)
        return y, pull(ct)[0]

    with jax.enable_x64(x.dtype == np.float64):
        program = jax.jit(lambda x, ct: [both(function, x, ct) for function in functions])
        return jax.tree.map(np.asarray, program(x, ct))


def row_shape(shape: tuple[int, ...], axis) -> tuple[int, ...]:
    """What is left of a shape without the axes."""
    dims = range(len(shape)) if axis is None else np.atleast_1d(np.asarray(axis, int)) % len(shape)
    return tuple(size for d, size in enumerate(shape) if d not in [*dims])
