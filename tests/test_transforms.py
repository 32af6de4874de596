"""JAX's transformations: what they give against jax.nn, how many kernels they call, and what is planned under them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re

import jax
import jax.numpy as jnp
import jaxsoftmax
import numpy as np
import pytest
from jax import export, lax
from jaxsoftmax import _plan, softmax
from jaxsoftmax._plan import PATHS
from plans import run

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


def calls(jaxpr) -> list[str]:
    """The primitives of the package, wherever they are nested."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("jaxsoftmax"):
            found.append(eqn.primitive.name)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
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
def test_gradient_is_two_kernel_calls(cpu, path):
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: (softmax(x, path=path) ** 2).sum()))(X)
    assert calls(jaxpr.jaxpr) == ["jaxsoftmax_softmax", "jaxsoftmax_softmax_bwd"]


def test_value_is_one_kernel_call_and_nothing_else(cpu):
    """No reshape, no transpose, no convert: the primitive at the user's rank."""
    jaxpr = jax.make_jaxpr(softmax)(X)
    assert calls(jaxpr.jaxpr) == ["jaxsoftmax_softmax"]
    assert not re.search(r"reshape|transpose|broadcast|convert", str(jaxpr))


def test_compiled_program_calls_the_kernels(platform):
    """The kernels really run: a custom call each, and no formula beside them."""
    assert len(planned(softmax, X)) == 1
    text = jax.jit(jax.grad(loss(softmax))).lower(X, W).compile().as_text()
    assert text.count('custom_call_target="jaxsoftmax.softmax"') == 1
    assert text.count('custom_call_target="jaxsoftmax.softmax_bwd"') == 1
    assert "exponential" not in text


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
    operands = [v if a is None else np.moveaxis(cube, 0, a) for v, a in zip((x, dy), in_axes, strict=True)]

    def backward(f):
        return jax.vmap(lambda x, dy: jax.vjp(f, x)[1](dy)[0], in_axes=in_axes)

    parity(backward, *operands)


@every_path
def test_hessian(platform, path):
    parity(lambda f: jax.hessian(lambda x: jnp.sum(f(x) * W[0, 0, :7]) ** 2), X[0, 0, :7], path=path)


@pytest.mark.parametrize("mode", [jax.jacrev, lambda f: jax.jacrev(jax.grad(lambda x: (f(x) ** 3).sum()))])
def test_jacobian(platform, mode):
    parity(mode, X[0, 0, :9])


def test_third_order(cpu):
    third = lambda f: jax.grad(lambda x: jax.hessian(lambda x: (f(x) ** 2 * W[0, 0, :5]).sum())(x).sum())  # noqa: E731
    parity(third, X[0, 0, :5])


def test_forward_over_reverse(platform):
    """jvp and linearize of the gradient."""
    v = np.sin(X)
    parity(lambda f: lambda x, v: jax.jvp(jax.grad(loss(f)), (x, W), (v, 0 * W)), X, v, rtol=1e-4, atol=1e-5)
    parity(lambda f: lambda x, v: jax.linearize(jax.grad(lambda x: loss(f)(x, W)), x)[1](v), X, v, rtol=1e-4, atol=1e-5)


def test_primitive_has_forward_mode(platform):
    """jaxsoftmax.primitive.softmax: jvp, jacfwd, and a gradient of the same two kernels."""
    ours = jaxsoftmax.primitive.softmax
    close(jax.jvp(ours, (X,), (W,)), jax.jvp(jax.nn.softmax, (X,), (W,)))
    close(jax.jacfwd(ours)(X[0, 0]), jax.jacfwd(jax.nn.softmax)(X[0, 0]))
    close(jax.grad(loss(ours))(X, W), jax.grad(loss(jax.nn.softmax))(X, W))
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: (ours(x) ** 2).sum()))(X)
    assert calls(jaxpr.jaxpr) == ["jaxsoftmax_softmax", "jaxsoftmax_softmax_bwd"]


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


def test_vmap_plans_for_all_rows(cpu, monkeypatch):
    """4 long rows are cut; the same call mapped 100 times is planned, and compiled, for 400 rows."""
    many = dataclasses.replace(_plan.LIMITS["cpu"], sms=16)
    monkeypatch.setitem(_plan.LIMITS, "cpu", many)
    asked, real = [], _plan.plan
    monkeypatch.setattr(_plan, "plan", lambda *a, **k: asked.append((a, real(*a, **k))) or asked[-1][1])
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
    f = jax.grad(lambda x: (softmax(x) ** 2).sum()) if gradient else softmax
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(dims), np.float32)
    allowed = [export.DisabledSafetyCheck.custom_call(f"jaxsoftmax.{op}") for op in ("softmax", "softmax_bwd")]
    exported = export.export(jax.jit(f), platforms=["cpu"], disabled_checks=allowed)(symbolic)
    assert "jaxsoftmax.softmax" in exported.mlir_module()
    for size in (1, 5):
        x = np.cos(np.arange(size * 4 * 33 * 7, dtype=np.float32))
        x = x[: int(np.prod([d if isinstance(d, int) else size for d in symbolic.shape]))]
        x = x.reshape([d if isinstance(d, int) else size for d in symbolic.shape])
        close(exported.call(x), f(x))


@every_path
def test_threads_calling_at_once(platform, path):
    """Eight threads, each with its own data, share one compiled call."""
    f = jax.jit(lambda x: softmax(x, path=path))
    inputs = [RNG.standard_normal((5, 20_001)).astype(np.float32) for _ in range(8)]
    want = [np.asarray(f(x)) for x in inputs]

    def work(i):
        return all(np.array_equal(f(inputs[i]), want[i]) for _ in range(10))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
