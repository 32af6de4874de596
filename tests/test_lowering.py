"""What is traced, planned and compiled: kernel calls, plans under vmap, export, threads, memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import every_function, ours, primitive, theirs
from jax import export
from plans import plan_on
from runs import run

import jaxsoftmax
from jaxsoftmax import _plan
from jaxsoftmax._plan import PATHS

RNG = np.random.default_rng(23)
X = RNG.standard_normal((4, 6, 33)).astype(np.float32)
every_path = pytest.mark.parametrize("path", (None, *PATHS), ids=str)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def weighed(y):
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


def calls(jaxpr) -> list[str]:
    """The primitives of the package, wherever they are nested."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("jaxsoftmax"):
            found.append(eqn.primitive.name)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += calls(inner)
    return found


def planned(function, *args) -> list[dict[str, int]]:
    """The plans of the custom calls in the compiled program."""
    text = jax.jit(function).lower(*args).compile().as_text()
    names = [f.name for f in dataclasses.fields(jaxsoftmax.Plan) if f.name != "why"]
    found = []
    for line in text.splitlines():
        if 'custom_call_target="jaxsoftmax.' in line:
            found.append({n: int(re.search(rf"\b{n} = (-?\d+)", line)[1]) for n in names})
    return found


@every_path
@every_function
@pytest.mark.parametrize("make", [ours, primitive])
def test_gradient_is_two_kernel_calls(cpu, make, name, path):
    """Also of the value and the gradient together: one forward, one backward, no formula."""
    f = make(name, path=path)
    for transformed in (jax.grad, jax.value_and_grad):
        jaxpr = jax.make_jaxpr(transformed(lambda x: (f(x) ** 2).sum()))(X)
        assert calls(jaxpr.jaxpr) == [f"jaxsoftmax_{name}", f"jaxsoftmax_{name}_bwd"]


@every_function
def test_value_is_one_kernel_call_and_nothing_else(cpu, name):
    """No reshape, no transpose, no convert: the primitive at the user's rank, no statistics."""
    jaxpr = jax.make_jaxpr(ours(name))(X)
    assert calls(jaxpr.jaxpr) == [f"jaxsoftmax_{name}"]
    assert not re.search(r"reshape|transpose|broadcast|convert|stats=True", str(jaxpr))


@every_function
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_program_calls_the_kernels(platform, name, dtype):
    """The kernels really run: a custom call each, and no formula beside them."""
    x = jnp.asarray(X, dtype)
    assert len(planned(ours(name), x)) == 1
    text = jax.jit(jax.grad(lambda x: weighed(ours(name)(x)))).lower(x).compile().as_text()
    for op in (name, f"{name}_bwd"):
        assert text.count(f'custom_call_target="jaxsoftmax.{op}"') == 1
    assert "exponential" not in text


@every_function
@every_path
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_value_and_gradient(platform, name, path, dtype):
    """Beside its inputs and outputs a program holds a few numbers a row (statistics, cotangent) and
    the workspaces: nothing of the rows' size."""
    rows, n = 64, 4096
    x = jax.ShapeDtypeStruct((rows, n), dtype)
    ct = jax.ShapeDtypeStruct((rows,), dtype) if name == "logsumexp" else x

    def both(x, ct):
        y, pull = jax.vjp(ours(name, path=path), x)
        return y, pull(ct)[0]

    memory = jax.jit(both).lower(x, ct).compile().memory_analysis()
    if memory is None:
        pytest.skip("the backend does not tell")
    numbers, workspaces = 3 * 4 * rows, 0
    for op in (name, f"{name}_bwd"):
        plan = plan_on(platform, op, dtype, rows, n, path)
        workspaces += 32 * rows * plan.splits if plan.path == "split_k" else 0
    assert memory.temp_size_in_bytes <= numbers + workspaces + 2048  # alignment
    assert numbers + workspaces + 2048 < rows * n * x.dtype.itemsize / 2
    outputs = 2 * rows * n if ct is x else rows * (n + 1)
    assert memory.output_size_in_bytes <= outputs * x.dtype.itemsize + 2048


@every_function
def test_vmap_plans_for_all_rows(cpu, monkeypatch, name):
    """4 long rows are cut; the same call mapped 100 times is planned and compiled for 400."""
    many = dataclasses.replace(_plan.LIMITS["cpu"], sms=16)
    monkeypatch.setitem(_plan.LIMITS, "cpu", many)
    asked, real = [], _plan.plan
    monkeypatch.setattr(
        _plan, "plan", lambda *a, **k: asked.append((a, real(*a, **k))) or asked[-1][1]
    )
    n = 200_000
    few, all_rows = (real(name, "float32", rows, n, limits=many) for rows in (4, 400))
    assert (few.path, all_rows.path) == ("split_k", "two_pass")
    one = jax.ShapeDtypeStruct((4, n), np.float32)
    batch = jax.ShapeDtypeStruct((100, 4, n), np.float32)
    assert planned(ours(name), one) == [few.attributes()]
    assert planned(jax.vmap(ours(name)), batch) == [all_rows.attributes()]
    gradient = jax.vmap(jax.grad(lambda x: (ours(name)(x) ** 2).sum()))
    backward = real(f"{name}_bwd", "float32", 400, n, limits=many)
    assert planned(gradient, batch) == [all_rows.attributes(), backward.attributes()]
    assert {args[2] for args, _ in asked} == {4, 400}


@every_function
def test_vmap_of_a_forced_split_is_right(platform, name):
    x = RNG.standard_normal((50, 4, 999)).astype(np.float32)
    result = jax.jit(jax.vmap(ours(name, path="split_k")))(x)
    assert np.asarray(result).tobytes() == run(name, x, path="split_k").tobytes()
    close(result, theirs(name)(x))


@pytest.mark.parametrize("dims", ["b, 33", "b, 4, 7", "4, n", "b, n"])
@every_function
def test_export_of_symbolic_shapes(cpu, dims, name):
    """Value and gradient."""

    def both(make):
        f = make(name)
        return lambda x: (f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x))

    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(dims), np.float32)
    targets = [f"jaxsoftmax.{op}" for op in (name, f"{name}_bwd")]
    allowed = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
    exported = export.export(jax.jit(both(ours)), platforms=["cpu"], disabled_checks=allowed)(
        symbolic
    )
    assert all(f"@{target}(" in exported.mlir_module() for target in targets)
    for size in (1, 5):
        x = np.cos(np.arange(size * 4 * 33 * 7, dtype=np.float32))
        x = x[: int(np.prod([d if isinstance(d, int) else size for d in symbolic.shape]))]
        x = x.reshape([d if isinstance(d, int) else size for d in symbolic.shape])
        jax.tree.map(close, exported.call(x), jax.jit(both(theirs))(x))


@every_function
def test_threads_calling_at_once(platform, name):
    """Eight threads, each with its own data, share one compiled call: every path, both ways."""
    f = jax.jit(
        lambda x: [jax.value_and_grad(lambda x, g=g: weighed(g(x)))(x) for g in paths_of(name)]
    )
    # Committed to the device: the default device of this thread is not that of the others.
    device = jax.devices(platform)[0]
    inputs = [
        jax.device_put(RNG.standard_normal((5, 20_001)).astype(np.float32), device)
        for _ in range(8)
    ]
    want = [jax.tree.map(np.asarray, f(x)) for x in inputs]

    def work(i):
        same = jax.tree.map(np.array_equal, [f(inputs[i]) for _ in range(10)], [want[i]] * 10)
        return jax.tree.all(same)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def paths_of(name: str):
    return [ours(name, path=path) for path in (None, *PATHS)]


NO_MEMORY = """
import sys
sys.path[:0] = {roots!r}
import jax, numpy as np, pytest, resource
from runs import plain_operands, run, run_native
from jaxsoftmax import Plan
from jaxsoftmax._ops import OPS
operands = {{name: plain_operands(name, np.zeros((16, 4096), np.float32)) for name in OPS}}
before = {{name: run(name, *operands[name]) for name in OPS}}
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name, op in OPS.items():
    # nearly 2 GiB a thread
    plan = Plan("one_pass", 512, reg_packs=op.inputs, smem_packs=2**18 - 2)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as failure:
            run_native(name, *operands[name], **plan.attributes())
        for part in (f"jaxsoftmax.{{name}}:", "scratch", "one_pass", "512", str(plan.smem_packs)):
            assert part in str(failure.value), failure.value
        np.testing.assert_array_equal(run(name, *operands[name]), before[name])
"""


def test_no_memory_for_scratch():
    """In whichever thread it fails, the call of any op says so, and the next one works."""
    roots = [str(Path(jaxsoftmax.__file__).parents[1]), str(Path(__file__).parent)]
    code = NO_MEMORY.format(roots=roots)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
