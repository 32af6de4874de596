"""What only a GPU shows: CUDA errors, full clusters and rings, many rows, beyond 2^31 elements."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import devices_of
from contracts import as_dtype, wide
from functions import every_function
from plans import GPU_ONLY, capacity, granted, hand_plans, limits_on
from runs import check_each, plain_operands, run, run_each, run_native

import jaxsoftmax
from jaxsoftmax import Plan, _native
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, PATHS
from jaxsoftmax._primitive import bind

pytestmark = pytest.mark.gpu
ELEMENTS, COLUMNS = 2**31, 8192


@pytest.fixture(autouse=True)
def gpu():
    devices = devices_of("cuda")
    if not devices:
        pytest.skip("no cuda device")
    with jax.default_device(devices[0]):
        yield devices[0]


@pytest.mark.parametrize("op", OPS)
def test_a_cuda_failure_surfaces_and_the_process_lives(op):
    """More shared memory than any GPU has, past Python: the error names kernel, shape and plan."""
    k, x = OPS[op].inputs, np.zeros((2, 256), np.float32)
    operands = plain_operands(op, x)
    plan = Plan("one_pass", 256, reg_packs=4 * k, smem_packs=4096 * k)
    with pytest.raises(ValueError, match="shared memory"):
        run(op, *operands, path=plan)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as failure:
            run_native(op, *operands, **plan.attributes())
        for part in (op, "one_pass", "2 rows", "256 columns", f"smem_packs={4096 * k}"):
            assert part in str(failure.value), failure.value
        np.testing.assert_allclose(run("softmax", x), 1 / 256)
        np.testing.assert_allclose(jnp.arange(4.0).sum(), 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_agrees_with_the_cpu(op, dtype):
    """Each is within the contract, so the two are within twice its bounds."""
    inputs, expected = cases.expected(op, cases.batch(2000, as_dtype(dtype), tuple(cases.FINITE)))
    stats = OPS[op].stats
    on_gpu = run_each(op, *inputs, paths=PATHS, stats=stats)
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = run_each(op, *inputs, paths=PATHS, stats=stats)
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        expected.check(*ours)
        expected.check(*theirs)
        with np.errstate(invalid="ignore"):
            apart = np.abs(wide(ours[0]) - wide(theirs[0])).reshape(expected.want.shape)
        near = (apart <= 2 * expected.bound) | expected.may_flush
        assert near[expected.finite].all()


def test_limits_of_the_attached_device():
    limits, found = limits_on("cuda"), _native.device_limits()
    assert limits.kind == "gpu" and limits.name == found["name"]
    assert limits.max_cluster in ((0, 1, 2, 4, 8, 16) if found["capability"] >= (9, 0) else (0,))


@pytest.mark.parametrize("name", GPU_ONLY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_full_clusters_and_rings(op, dtype, name):
    """Rows as long as the plan can hold, whole packs and odd; pieces that go round their ring."""
    plan = GPU_ONLY[name](OPS[op].inputs)
    if not granted(plan, dtype, limits_on("cuda")):
        pytest.skip("not on this device")
    whole, odd = capacity(plan, op, dtype, 0), capacity(plan, op, dtype, 1)
    beyond = (whole + 1, 5 * whole // 4 + 1, 3 * whole) if plan.path == "split_k" else ()
    # The second of two rows of odd - 2 starts at the last column of a pack or line.
    for n in (whole, odd, odd - 2, whole // 2 + 1, *beyond):
        inputs, expected = cases.expected(op, cases.make("used_range", 2, n, as_dtype(dtype)))
        check_each(op, inputs, expected, [plan])


@pytest.mark.parametrize("rows", [65535, 65536, 70000])
@pytest.mark.parametrize("op", OPS)
def test_many_rows(op, rows):
    """Beyond what a grid's second dimension holds, in every path and way to share a block."""
    inputs, expected = cases.expected(op, cases.make("normal", rows, 19, as_dtype("float32")))
    plans = (None, *PATHS, *hand_plans(op, "float32", 19, "cuda").values())
    check_each(op, inputs, expected, plans)


@pytest.mark.large
@pytest.mark.parametrize("path", PATHS)
@every_function
def test_more_than_2_31_elements_in_many_rows(name, path):
    """Every row is the same: each must get the same bits as a row alone, the last ones too."""
    n, rows = COLUMNS, ELEMENTS // COLUMNS + 3
    row = jnp.asarray(cases.make("normal", 1, n, as_dtype("bfloat16")))
    plan = jaxsoftmax.plan(name, "bfloat16", rows, n, path=path)
    f = jax.jit(lambda x: bind(name, x, axes=(-1,), path=plan, stats=OPS[name].stats))
    want, got = f(row), f(jax.jit(lambda r: jnp.tile(r, (rows, 1)))(row))
    for one, every in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert every.shape[0] == rows
        right = jax.jit(lambda y, one: (y == one).reshape(rows, -1).all(axis=-1))(every, one)
        assert bool(right.all()), int(jnp.argmin(right))


def long_row(*ends: float) -> jax.Array:
    """A row of more than 2^31 elements: these, then many like the last of them, then these in
    reverse order."""
    make = jax.jit(
        lambda e: jnp.concatenate([e, jnp.broadcast_to(e[-1], ELEMENTS + 10 - 2 * e.size), e[::-1]])
    )
    return make(jnp.asarray(ends, jnp.bfloat16))


def is_long_row(row: jax.Array, *ends: float) -> bool:
    """Whether it is that row, by static slices, compiled: an index past 2^31 - 1 cannot be an
    argument, nor a scatter's."""

    def same(row, want):
        k, n = want.size, row.shape[0]
        parts = [(0, k, want), (k, n - k, want[-1]), (n - k, n, want[::-1])]
        return [(jax.lax.slice(row, (a,), (b,)) == e).all() for a, b, e in parts]

    return row.shape == (ELEMENTS + 10,) and all(jax.jit(same)(row, jnp.asarray(ends, row.dtype)))


@pytest.mark.large
@pytest.mark.parametrize("path", ["two_pass", "split_k"])
def test_a_row_of_more_than_2_31_elements(path):
    """Eight zeros among -inf: a probability of 1/8 each, on both sides of 2^31, and gradients."""

    def call(op, *operands, stats=False):
        f = jax.jit(lambda *a: bind(op, *a, axes=(-1,), path=path, stats=stats))
        return f(*operands)

    x = long_row(0, 0, 0, 0, -np.inf)
    dy = long_row(9, 1, 1, 1, 0)  # sum 24, weighed 3
    y = call("softmax", x)
    assert is_long_row(y, *[0.125] * 4, 0)
    assert is_long_row(call("softmax_bwd", y, dy), 0.75, *[-0.25] * 3, 0)
    del y
    y, *stats = call("log_softmax", x, stats=True)
    assert is_long_row(y, *[-np.log(8)] * 4, -np.inf)
    del y
    total, *same = call("logsumexp", x, stats=True)
    for found in (stats, same):
        np.testing.assert_allclose([float(s) for s in found], [0, 8], rtol=2.0**-15)
    assert total == jnp.asarray(np.log(8), x.dtype)
    assert is_long_row(call("log_softmax_bwd", dy, x, *stats), 6, *[-2] * 3, 0)
    del dy
    four = jnp.asarray(4, x.dtype)
    assert is_long_row(call("logsumexp_bwd", x, *stats, four), *[0.5] * 4, 0)
