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
from jax import export
from plans import run

import jaxsoftmax
from jaxsoftmax import _plan, softmax
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import PATHS

RNG = np.random.default_rng(23)
X = RNG.standard_normal((4, 6, 33)).astype(np.float32)
every_path = pytest.mark.parametrize("path", (None, *PATHS), ids=str)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


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
@pytest.mark.parametrize("function", [softmax, jaxsoftmax.primitive.softmax])
def test_gradient_is_two_kernel_calls(cpu, function, path):
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: (function(x, path=path) ** 2).sum()))(X)
    assert calls(jaxpr.jaxpr) == ["jaxsoftmax_softmax", "jaxsoftmax_softmax_bwd"]


def test_value_is_one_kernel_call_and_nothing_else(cpu):
    """No reshape, no transpose, no convert: the primitive at the user's rank."""
    jaxpr = jax.make_jaxpr(softmax)(X)
    assert calls(jaxpr.jaxpr) == ["jaxsoftmax_softmax"]
    assert not re.search(r"reshape|transpose|broadcast|convert", str(jaxpr))


def test_compiled_program_calls_the_kernels(platform):
    """The kernels really run: a custom call each, and no formula beside them."""
    assert len(planned(softmax, X)) == 1
    text = jax.jit(jax.grad(lambda x: jnp.sum(softmax(x) * x))).lower(X).compile().as_text()
    assert text.count('custom_call_target="jaxsoftmax.softmax"') == 1
    assert text.count('custom_call_target="jaxsoftmax.softmax_bwd"') == 1
    assert "exponential" not in text


def test_vmap_plans_for_all_rows(cpu, monkeypatch):
    """4 long rows are cut; the same call mapped 100 times is planned and compiled for 400."""
    many = dataclasses.replace(_plan.LIMITS["cpu"], sms=16)
    monkeypatch.setitem(_plan.LIMITS, "cpu", many)
    asked, real = [], _plan.plan
    monkeypatch.setattr(
        _plan, "plan", lambda *a, **k: asked.append((a, real(*a, **k))) or asked[-1][1]
    )
    n = 200_000
    few, all_rows = (real("softmax", "float32", rows, n, limits=many) for rows in (4, 400))
    assert (few.path, all_rows.path) == ("split_k", "two_pass")
    one = jax.ShapeDtypeStruct((4, n), np.float32)
    batch = jax.ShapeDtypeStruct((100, 4, n), np.float32)
    assert planned(softmax, one) == [few.attributes()]
    assert planned(jax.vmap(softmax), batch) == [all_rows.attributes()]
    gradient = jax.vmap(jax.grad(lambda x: (softmax(x) ** 2).sum()))
    backward = real("softmax_bwd", "float32", 400, n, limits=many)
    assert planned(gradient, batch) == [all_rows.attributes(), backward.attributes()]
    assert {args[2] for args, _ in asked} == {4, 400}


def test_vmap_of_a_forced_split_is_right(platform):
    x = RNG.standard_normal((50, 4, 999)).astype(np.float32)
    ours = jax.jit(jax.vmap(lambda x: softmax(x, path="split_k")))(x)
    assert np.asarray(ours).tobytes() == run("softmax", x, path="split_k").tobytes()
    close(ours, jax.nn.softmax(x))


@pytest.mark.parametrize("dims", ["b, 33", "b, 4, 7", "4, n", "b, n"])
@pytest.mark.parametrize("gradient", [False, True])
def test_export_of_symbolic_shapes(cpu, dims, gradient):
    f, theirs = (
        jax.grad(lambda x, g=g: (g(x) ** 2).sum()) if gradient else g
        for g in (softmax, jax.nn.softmax)
    )
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(dims), np.float32)
    allowed = [
        export.DisabledSafetyCheck.custom_call(f"jaxsoftmax.{op}")
        for op in ("softmax", "softmax_bwd")
    ]
    exported = export.export(jax.jit(f), platforms=["cpu"], disabled_checks=allowed)(symbolic)
    assert "jaxsoftmax.softmax" in exported.mlir_module()
    for size in (1, 5):
        x = np.cos(np.arange(size * 4 * 33 * 7, dtype=np.float32))
        x = x[: int(np.prod([d if isinstance(d, int) else size for d in symbolic.shape]))]
        x = x.reshape([d if isinstance(d, int) else size for d in symbolic.shape])
        close(exported.call(x), theirs(x))


@every_path
def test_threads_calling_at_once(platform, path):
    """Eight threads, each with its own data, share one compiled call."""
    f = jax.jit(lambda x: softmax(x, path=path))
    # Committed to the device: the default device of this thread is not that of the others.
    device = jax.devices(platform)[0]
    inputs = [
        jax.device_put(RNG.standard_normal((5, 20_001)).astype(np.float32), device)
        for _ in range(8)
    ]
    want = [np.asarray(f(x)) for x in inputs]

    def work(i):
        return all(np.array_equal(f(inputs[i]), want[i]) for _ in range(10))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


NO_MEMORY = """
import sys
sys.path[:0] = {roots!r}
import jax, numpy as np, pytest, resource
from plans import run, run_native
from jaxsoftmax import Plan
op, x = {op!r}, np.zeros((16, 4096), np.float32)
operands = (x,) * {inputs}
before = run(op, *operands)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
plan = Plan("one_pass", 512, reg_packs={inputs}, smem_packs=2**18 - 2)  # nearly 2 GiB a thread
for _ in range(2):
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as failure:
        run_native(op, *operands, **plan.attributes())
    for part in (f"jaxsoftmax.{{op}}", "scratch", "one_pass", "512", str(plan.smem_packs)):
        assert part in str(failure.value), failure.value
    np.testing.assert_array_equal(run(op, *operands), before)
"""


@pytest.mark.parametrize("op", OPS)
def test_no_memory_for_scratch(op):
    """In whichever thread it fails, the call says so, and the next one works."""
    roots = [str(Path(jaxsoftmax.__file__).parents[1]), str(Path(__file__).parent)]
    code = NO_MEMORY.format(op=op, inputs=OPS[op].inputs, roots=roots)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
