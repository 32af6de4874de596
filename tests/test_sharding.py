"""Eight devices: rows sharded anyhow need no collective, a sharded softmax axis is right."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax import softmax
from jaxsoftmax._plan import PATHS

pytestmark = pytest.mark.multidevice
SHAPE = (4, 8, 16, 32)
COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
RNG = np.random.default_rng(31)
X, W = (RNG.standard_normal(SHAPE).astype(np.float32) for _ in range(2))


def mesh_of(cpus, sizes=(2, 2, 2), kind=AxisType.Auto):
    names = "abc"[: len(sizes)]
    return jax.make_mesh(sizes, tuple(names), axis_types=(kind,) * len(sizes), devices=cpus)


def subsets():
    """Every way to lay the mesh axes a, b, c over a subset of the three row dimensions."""
    for dims in itertools.chain.from_iterable(
        itertools.combinations(range(3), k) for k in range(4)
    ):
        spec = [None] * 4
        for axis, d in zip("abc", dims, strict=False):
            spec[d] = axis
        yield P(*spec)


SPECS = [*subsets(), P(None, None, ("a", "b", "c")), P(("a", "b"), "c"), P(None, ("c", "a"), "b")]


def value(path=None, axis=-1):
    return lambda x, w: softmax(x, axis, path=path) + 0 * w


def gradient(path=None, axis=-1):
    return jax.grad(lambda x, w: jnp.sum(softmax(x, axis, path=path) * w))


def reference(make, axis=-1):
    if make is value:
        return jax.nn.softmax(X, axis)
    return jax.grad(lambda x: jnp.sum(jax.nn.softmax(x, axis) * W))(X)


def compiled(make, mesh, spec, **kwargs):
    """The program for inputs of that sharding, and its result."""
    sharding = NamedSharding(mesh, spec)
    x, w = jax.device_put((X, W), sharding)
    program = jax.jit(make(**kwargs)).lower(x, w).compile()
    return program.as_text(), program(x, w), sharding


@pytest.mark.parametrize("make", [value, gradient])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_stay_where_they_are(cpus, spec, make):
    text, result, sharding = compiled(make, mesh_of(cpus), spec)
    assert "jaxsoftmax.softmax" in text
    assert not COLLECTIVE.search(text), COLLECTIVE.findall(text)
    assert result.sharding.is_equivalent_to(sharding, 4)
    np.testing.assert_allclose(result, reference(make), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [value, gradient])
@pytest.mark.parametrize("path", PATHS)
def test_every_path(cpus, path, make):
    text, result, _ = compiled(make, mesh_of(cpus), P("a", ("b", "c")), path=path)
    assert not COLLECTIVE.search(text)
    np.testing.assert_allclose(result, reference(make), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [value, gradient])
@pytest.mark.parametrize("axis", [0, 1, (1, 3)], ids=str)
def test_other_axes(cpus, axis, make):
    """The softmax axis is not the last; the others are sharded."""
    spec = P("a", None, ("b", "c")) if axis != 0 else P(None, "a", "b", "c")
    text, result, _ = compiled(make, mesh_of(cpus), spec, axis=axis)
    assert not COLLECTIVE.search(text)
    np.testing.assert_allclose(result, reference(make, axis), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [value, gradient])
@pytest.mark.parametrize(
    "spec", [P(None, None, None, "a"), P("a", None, "b", "c"), P(None, None, None, ("a", "b", "c"))]
)
def test_a_sharded_softmax_axis_is_right(cpus, spec, make):
    """Collectives are allowed here; a wrong result is not."""
    _, result, _ = compiled(make, mesh_of(cpus), spec)
    np.testing.assert_allclose(result, reference(make), rtol=1e-5, atol=1e-6)


def test_operands_sharded_differently(cpus):
    """Residual and cotangent laid out differently are brought together."""
    mesh = mesh_of(cpus)
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    w = jax.device_put(W, NamedSharding(mesh, P(None, "c", "a", "b")))
    np.testing.assert_allclose(jax.jit(gradient())(x, w), reference(gradient), rtol=1e-5, atol=1e-6)


def test_the_plan_is_local(cpus):
    """Each device's program is planned on, and called with, its own piece."""
    text, _, _ = compiled(value, mesh_of(cpus), P("a", "b", "c"), path="split_k")
    call = next(
        line for line in text.splitlines() if 'custom_call_target="jaxsoftmax.softmax"' in line
    )
    assert "f32[2,4,8,32]" in call, call


def test_vmap_of_sharded(cpus):
    mesh = mesh_of(cpus)
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b", "c")))
    program = jax.jit(jax.vmap(softmax, in_axes=1, out_axes=1)).lower(x).compile()
    assert not COLLECTIVE.search(program.as_text())
    np.testing.assert_allclose(program(x), jax.nn.softmax(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [value, gradient])
@pytest.mark.parametrize(
    "spec",
    [P("a", None, None, None), P("a", "b", "c", None), P(None, ("a", "b"), None, None)],
    ids=str,
)
def test_explicit_mesh_axes(cpus, spec, make):
    """Sharding in types: nothing raises, the result has the operand's sharding, no collective."""
    mesh = mesh_of(cpus, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w = jax.device_put((X, W), NamedSharding(mesh, spec))
        seen = []
        f = make()
        jitted = jax.jit(lambda x, w: seen.append(jax.typeof(y := f(x, w)).sharding.spec) or y)
        text = jitted.lower(x, w).compile().as_text()
        result = jitted(x, w)
        assert tuple(seen[0]) == tuple(spec)
    assert not COLLECTIVE.search(text)
    np.testing.assert_allclose(result, reference(make), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [value, gradient])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [P("a"), P("a", "b", "c"), P(None, ("a", "b"), "c")], ids=str)
def test_shard_map(cpus, spec, check_vma, make):
    mesh = mesh_of(cpus)
    mapped = jax.shard_map(
        make(), mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=check_vma
    )
    text = jax.jit(mapped).lower(X, W).compile().as_text()
    assert "jaxsoftmax.softmax" in text and not COLLECTIVE.search(text)
    np.testing.assert_allclose(jax.jit(mapped)(X, W), reference(make), rtol=1e-5, atol=1e-6)


def test_shard_map_over_some_axes(cpus):
    """One mesh axis manual, two automatic: no custom_partitioning there, but a right result."""
    mesh = mesh_of(cpus)
    mapped = jax.shard_map(softmax, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    np.testing.assert_allclose(jax.jit(mapped)(x), jax.nn.softmax(X), rtol=1e-5, atol=1e-6)


def test_grad_of_shard_map(cpus):
    mesh = mesh_of(cpus)
    mapped = jax.shard_map(softmax, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))
    got = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x) * W)))(X)
    np.testing.assert_allclose(got, reference(gradient), rtol=1e-5, atol=1e-6)


def test_forced_plan_is_refused_at_once(cpus):
    """The ValueError comes from lowering, not from inside XLA's partitioner."""
    x = jax.device_put(np.zeros((8, 40000), np.float16), NamedSharding(mesh_of(cpus, (8,)), P("a")))
    with pytest.raises(ValueError, match="holds 32768 columns of float16 softmax, got 40000"):
        jax.jit(lambda x: softmax(x, path="packed")).lower(x)


def test_export_for_several_devices(cpus):
    """custom_partitioning does not export: the formula does, and is right."""
    x = jax.device_put(X, NamedSharding(mesh_of(cpus, (8,)), P(None, "a")))
    exported = jax.export.export(jax.jit(softmax), platforms=["cpu"])(x)
    np.testing.assert_allclose(exported.call(x), jax.nn.softmax(X), rtol=1e-5, atol=1e-6)
