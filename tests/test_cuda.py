"""What only a GPU shows: graph capture, CUDA errors, many rows, beyond 2^31 elements."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import devices_of
from oracle import Expected, as_dtype, wide
from plans import GPU_ONLY, capacity, granted, hand_plans, limits_on, run, run_native

import jaxsoftmax
from jaxsoftmax import Plan, _native, softmax
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, PATHS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    devices = devices_of("cuda")
    if not devices:
        pytest.skip("no cuda device")
    with jax.default_device(devices[0]):
        yield devices[0]


CAPTURE = """
import sys
sys.path[:0] = {roots!r}
import jax, numpy as np
from oracle import assert_close
from jaxsoftmax import Plan
from jaxsoftmax._ops import OPS
from jaxsoftmax._primitive import bind
op, path = {op!r}, {path!r}
f = jax.jit(lambda *a: bind(op, *a, axes=(-1,), path=path))
for seed in range(4):  # capture, then replay with other data in other buffers
    rng = np.random.default_rng(seed)
    x = [rng.standard_normal((6, 5003)).astype(np.float32) for _ in range(OPS[op].inputs)]
    keep = jax.device_put(np.zeros(1000 * (seed + 1), np.float32))
    assert_close(op, f(*x), x)
"""


@pytest.mark.parametrize("path", (*PATHS, "cluster_sixteen", "bulk_cluster", "cooperative"))
@pytest.mark.parametrize("op", OPS)
def test_captured_in_a_graph_and_replayed(tmp_path, op, path):
    """A program of nothing but the call becomes a command buffer, and replays with new data."""
    if path in GPU_ONLY:
        path = hand_plans(op, "float32", 5003, "cuda").get(path)
        if path is None:
            pytest.skip("not on this device")
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    roots = [str(Path(jaxsoftmax.__file__).parents[1]), str(Path(__file__).parent)]
    code = CAPTURE.format(op=op, path=path, roots=roots)
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    thunks = tmp_path.glob("*lambda*thunk_sequence_after_thunk_passes.txt")
    found = {path.name: "kCommandBuffer" in path.read_text() for path in thunks}
    assert any(found.values()), found or sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("op", OPS)
def test_a_cuda_failure_surfaces_and_the_process_lives(op):
    """More shared memory than any GPU has, past Python: the error names kernel, shape and plan."""
    k = OPS[op].inputs
    x = np.zeros((2, 256), np.float32)
    plan = Plan("one_pass", 256, reg_packs=4 * k, smem_packs=4096 * k)
    with pytest.raises(ValueError, match="shared memory"):
        run(op, *(x,) * k, path=plan)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as failure:
            run_native(op, *(x,) * k, **plan.attributes())
        for part in (op, "one_pass", "2 rows", "256 columns", f"smem_packs={4096 * k}"):
            assert part in str(failure.value), failure.value
        np.testing.assert_allclose(run("softmax", x), 1 / 256)
        np.testing.assert_allclose(jnp.arange(4.0).sum(), 6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_agrees_with_the_cpu(op, dtype, path):
    """Each is within the contract, so the two are within twice its bounds."""
    inputs, expected = cases.expected(op, cases.batch(2000, as_dtype(dtype), tuple(cases.FINITE)))
    on_gpu = run(op, *inputs, path=path)
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = run(op, *inputs, path=path)
    expected.check(on_gpu)
    expected.check(on_cpu)
    with np.errstate(invalid="ignore"):
        apart = np.abs(wide(on_gpu) - wide(on_cpu))
    near = (apart <= 2 * expected.bound) | (np.abs(expected.want) <= expected.tiny)
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
        expected.check(run(op, *inputs, path=plan))


@pytest.mark.parametrize("rows", [65535, 65536, 70000])
@pytest.mark.parametrize("op", OPS)
def test_many_rows(op, rows):
    """Beyond what a grid's second dimension holds, in every path and way to share a block."""
    x = cases.make("normal", rows, 19, as_dtype("float32"))
    inputs = (x,) if OPS[op].inputs == 1 else (np.abs(x) / 100, x[::-1].copy())
    expected = Expected(op, inputs)
    for path in (None, *PATHS, *hand_plans(op, "float32", 19, "cuda").values()):
        expected.check(run(op, *inputs, path=path))


@pytest.mark.large
@pytest.mark.parametrize("path", PATHS)
def test_more_than_2_31_elements_in_many_rows(path):
    """Every row is the same: each must get the same bits as a row alone, the last ones too."""
    n, rows = 8192, 2**31 // 8192 + 3
    row = jnp.asarray(cases.make("normal", 1, n, as_dtype("bfloat16")))
    f = jax.jit(
        lambda x: softmax(x, path=jaxsoftmax.plan("softmax", "bfloat16", rows, n, path=path))
    )
    want = f(row)
    right = jax.jit(lambda y: (y == want).all(axis=-1))(
        f(jax.jit(lambda r: jnp.tile(r, (rows, 1)))(row))
    )
    assert right.shape == (rows,) and bool(right.all()), int(jnp.argmin(right))


@pytest.mark.large
@pytest.mark.parametrize("path", ["two_pass", "split_k"])
def test_a_row_of_more_than_2_31_elements(path):
    """All -inf but eight: exactly 1/8 each, on both sides of 2^31; the gradient is theirs alone."""
    ends = jnp.asarray([0, 0, 0, 0, -np.inf], jnp.bfloat16)
    n = 2**31 + 10
    make = jax.jit(lambda e: jnp.concatenate([e, jnp.full((n - 10,), -jnp.inf, e.dtype), e[::-1]]))
    x = make(ends)
    y = jax.jit(lambda x: softmax(x, path=path))(x)
    # Static slices, compiled: an index past 2^31 - 1 cannot be an argument, nor a scatter's.
    ends = jax.jit(lambda y: (jax.lax.slice(y, (0,), (5,)), jax.lax.slice(y, (n - 5,), (n,))))(y)
    first, last = (np.asarray(e, np.float32) for e in ends)
    np.testing.assert_array_equal(first, [0.125] * 4 + [0])
    np.testing.assert_array_equal(last, first[::-1])
    assert int(jax.jit(lambda y: (y != 0).sum(dtype=jnp.int32))(y)) == 8
    del x
    nine = jnp.full((1,), 9, y.dtype)
    dy = jax.jit(
        lambda y: jnp.concatenate(
            [nine, jnp.where(jax.lax.slice(y, (1,), (n,)) != 0, 1, 3).astype(y.dtype)]
        )
    )(y)
    dx = jax.jit(
        lambda y, dy: jaxsoftmax._primitive.bind("softmax_bwd", y, dy, axes=(-1,), path=path)
    )(y, dy)
    got = np.asarray(jax.jit(lambda dx: jax.lax.slice(dx, (0,), (5,)))(dx), np.float32)
    np.testing.assert_array_equal(got, [0.125 * 7, -0.125, -0.125, -0.125, 0])  # t = (9 + 7) / 8
    assert int(jax.jit(lambda d: (d != 0).sum(dtype=jnp.int32))(dx)) == 8
