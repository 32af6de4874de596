"""Any axis, empty and degenerate shapes, rows that start anywhere in memory."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import every_function, ours, row_shape, theirs, values_and_vjps
from oracle import Expected
from runs import plain_operands, run, run_each

from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import PATHS

SHAPES = [
    *((0, 5), (5, 0), (0, 0), (5, 1), (1, 5), (1, 1), (0,), (1,)),
    *((2, 0, 3), (3, 2, 0), (2, 3, 1), ()),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_function
def test_empty_and_degenerate_shapes(platform, name, shape):
    """Value, dtype, shape and gradient as jax.nn; the same exception type where it raises."""
    x, taken = np.arange(np.prod(shape), dtype=np.float32).reshape(shape), []
    for axis in (-1, 0, (), None, (0,), (-1, 0)):
        try:
            jax.eval_shape(theirs(name, axis), x)
        except Exception as error:
            with pytest.raises(type(error)):
                ours(name, axis)(x)
        else:
            taken.append(axis)

    def both(f, x):
        y, pull = jax.vjp(f, x)
        ct = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        return y, pull(ct)[0]

    def program(x):
        return [[both(make(name, axis), x) for axis in taken] for make in (ours, theirs)]

    got, want = jax.jit(program)(x)
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, want)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, got, want)
    assert None in taken and () in taken


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_empty_in_every_path(platform, op, shape):
    """Also of the gradients; logsumexp of nothing is -inf, and its statistics are still written."""
    inputs = plain_operands(op, np.ones(shape, np.float32))
    for y, *stats in run_each(op, *inputs, paths=PATHS, stats=OPS[op].stats):
        assert y.shape == shape[: 1 if OPS[op].reduces else 2]
        assert [s.shape for s in stats] == [shape[:1]] * len(stats)
        if op == "logsumexp" and shape[1] == 0:
            assert (y == -np.inf).all() and (stats[0] == -np.inf).all() and (stats[1] == 1).all()


@every_function
def test_no_axes(cpu, name):
    """axis=() takes each element for a row: 1 of a finite one for softmax, and NaN of any other."""
    x = np.array([1.0, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(ours(name, ())(x), theirs(name, ())(x))


def every_axis(rank: int):
    """All axis arguments of that rank: ints of either sign, tuples in any order, None."""
    dims = range(rank)
    subsets = [c for k in range(1, rank + 1) for c in itertools.combinations(dims, k)]
    shuffled = [tuple(d - rank if i % 2 else d for i, d in enumerate(s[::-1])) for s in subsets]
    return [*dims, *range(-rank, 0), *subsets, *shuffled, None]


@pytest.mark.parametrize("axis", every_axis(3), ids=str)
@every_function
def test_any_axis(platform, name, axis):
    """Against the oracle, the reduced dimensions moved last and flattened."""
    shape = (3, 5, 7)
    dims = tuple(range(3)) if axis is None else tuple(np.atleast_1d(axis) % 3)
    kept = [d for d in range(3) if d not in dims]

    def rows(a):
        if a.ndim < 3:
            return a.reshape(-1)
        return np.transpose(a, (*kept, *sorted(dims))).reshape(
            -1, np.prod([shape[d] for d in dims])
        )

    rng = np.random.default_rng(5)
    x, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    if name == "logsumexp":
        dy = rng.standard_normal(row_shape(shape, axis)).astype(np.float32)
    ((y, dx),) = values_and_vjps([ours(name, axis)], x, dy)
    forward = Expected(name, (rows(x),))
    forward.check(rows(y))
    if name == "softmax":
        Expected("softmax_bwd", (rows(y), rows(dy))).check(rows(dx))
        return
    stats = run(name, rows(x), stats=True)[1:]
    residuals = (rows(x), *stats)
    operands = (rows(dy), *residuals) if name == "log_softmax" else (*residuals, rows(dy))
    Expected(f"{name}_bwd", operands).check(rows(dx))


@pytest.mark.parametrize("axis", [0, 1, (0, 2), (1, 2)], ids=str)
@every_function
def test_any_axis_in_every_path(platform, name, axis):
    x = np.random.default_rng(6).standard_normal((9, 4, 33)).astype(np.float32)
    ct = x[::-1]
    if name == "logsumexp":
        ct = np.resize(ct, row_shape(x.shape, axis))
    functions = [*(ours(name, axis, path=path) for path in PATHS), theirs(name, axis)]
    *results, want = values_and_vjps(functions, x, ct)
    for got in results:
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=3e-6, atol=2e-6)


@every_function
def test_rows_of_every_offset(platform, name):
    """A slice's rows start anywhere in memory."""
    x = jnp.asarray(np.random.default_rng(8).standard_normal((40, 77)), jnp.bfloat16)
    f = jax.jit(lambda x: [ours(name)(x[3:20, s : s + 65]) for s in range(9)])
    for start, y in enumerate(f(x)):
        part = np.asarray(x[3:20, start : start + 65])
        Expected(name, (part,)).check(np.asarray(y))
