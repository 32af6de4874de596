"""Eight devices: rows sharded anyhow need no collective, a row that is sharded is right."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import numpy as np
import pytest
from functions import every_function, ours, row_shape, theirs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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


def cotangent(name, axis=-1):
    return np.resize(W, row_shape(SHAPE, axis)) if name == "logsumexp" else W


def of_rows(name, spec, axis=-1):
    """The sharding of a result: of logsumexp without the axes."""
    kept = [s for d, s in enumerate([*spec, *[None] * 4][:4]) if d - 4 not in np.atleast_1d(axis)]
    return P(*kept) if name == "logsumexp" else spec


def both(f):
    """Value and gradient, for the cotangent given."""

    def program(x, ct):
        y, pull = jax.vjp(f, x)
        return y, pull(ct)[0]

    return program


@functools.cache
def expected(name, axis):
    return jax.jit(both(theirs(name, axis)))(X, cotangent(name, axis))


def check(name, results, axis=-1):
    for got, exact in zip(results, expected(name, axis), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=2e-6)


def compiled(name, mesh, spec, axis=-1, **options):
    """The program for inputs of that sharding (of as many axes, for the cotangent), its results."""
    x_sharding = NamedSharding(mesh, spec)
    y_sharding = NamedSharding(mesh, of_rows(name, spec, axis))
    x = jax.device_put(X, x_sharding)
    ct = jax.device_put(cotangent(name, axis), y_sharding)
    program = jax.jit(both(ours(name, axis, **options))).lower(x, ct).compile()
    results = program(x, ct)
    check(name, results, axis)
    return program.as_text(), results, (y_sharding, x_sharding)


@every_function
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_stay_where_they_are(cpus, spec, name):
    """Value and gradient; what a row leaves for the gradient stays with it."""
    text, results, shardings = compiled(name, mesh_of(cpus), spec)
    for op in (name, f"{name}_bwd"):
        assert f'custom_call_target="jaxsoftmax.{op}"' in text
    assert not COLLECTIVE.search(text), COLLECTIVE.findall(text)
    for result, sharding in zip(results, shardings, strict=True):
        assert result.sharding.is_equivalent_to(sharding, result.ndim)


@every_function
@pytest.mark.parametrize("path", PATHS)
def test_every_path(cpus, path, name):
    text, _, _ = compiled(name, mesh_of(cpus), P("a", ("b", "c")), path=path)
    assert not COLLECTIVE.search(text)


@every_function
@pytest.mark.parametrize("axis", [0, 1, (1, 3)], ids=str)
def test_other_axes(cpus, axis, name):
    """The axis is not the last; the others are sharded."""
    axis = axis - 4 if isinstance(axis, int) else tuple(a - 4 for a in axis)
    spec = P("a", None, ("b", "c")) if axis != -4 else P(None, "a", "b", "c")
    text, _, _ = compiled(name, mesh_of(cpus), spec, axis)
    assert not COLLECTIVE.search(text)


@every_function
@pytest.mark.parametrize(
    "spec",
    [P(None, None, None, "a"), P("a", None, "b", "c"), P(None, None, None, ("a", "b", "c"))],
    ids=str,
)
def test_a_sharded_row_is_right(cpus, spec, name):
    """Collectives are allowed here; a wrong result is not."""
    compiled(name, mesh_of(cpus), spec)


@every_function
def test_operands_sharded_differently(cpus, name):
    """Residuals and cotangent laid out differently are brought together."""
    mesh = mesh_of(cpus)
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    spec = of_rows(name, P(None, "c", "a", "b"))
    ct = jax.device_put(cotangent(name), NamedSharding(mesh, spec))
    check(name, jax.jit(both(ours(name)))(x, ct))


@every_function
def test_the_plan_is_local(cpus, name):
    """Each device's program is planned on, and called with, its own piece."""
    text, _, _ = compiled(name, mesh_of(cpus), P("a", "b", "c"), path="split_k")
    for op in (name, f"{name}_bwd"):
        target = f'custom_call_target="jaxsoftmax.{op}"'
        (call,) = (line for line in text.splitlines() if target in line)
        assert "f32[2,4,8,32]" in call and "f32[4,8,16,32]" not in call, call


@every_function
def test_vmap_of_sharded(cpus, name):
    x = jax.device_put(X, NamedSharding(mesh_of(cpus), P("a", "b", "c")))
    program = jax.jit(jax.vmap(ours(name), in_axes=1, out_axes=1)).lower(x).compile()
    assert not COLLECTIVE.search(program.as_text())
    np.testing.assert_allclose(program(x), theirs(name)(X), rtol=1e-5, atol=2e-6)


@every_function
@pytest.mark.parametrize(
    "spec",
    [P("a", None, None, None), P("a", "b", "c", None), P(None, ("a", "b"), None, None)],
    ids=str,
)
def test_explicit_mesh_axes(cpus, spec, name):
    """Sharding in types: nothing raises, results have the operand's sharding, no collective."""
    mesh = mesh_of(cpus, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, spec))
        ct = jax.device_put(cotangent(name), NamedSharding(mesh, of_rows(name, spec)))
        seen = []

        def noted(x, ct):
            results = both(ours(name))(x, ct)
            seen.append([jax.typeof(result).sharding.spec for result in results])
            return results

        jitted = jax.jit(noted)
        text = jitted.lower(x, ct).compile().as_text()
        results = jitted(x, ct)
        assert [tuple(s) for s in seen[0]] == [tuple(of_rows(name, spec)), tuple(spec)]
    assert not COLLECTIVE.search(text)
    check(name, results)


@every_function
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [P("a"), P("a", "b", "c"), P(None, ("a", "b"), "c")], ids=str)
def test_shard_map(cpus, spec, check_vma, name):
    specs = (spec, of_rows(name, spec))
    mapped = jax.shard_map(
        both(ours(name)),
        mesh=mesh_of(cpus),
        in_specs=specs,
        out_specs=specs[::-1],
        check_vma=check_vma,
    )
    program = jax.jit(mapped).lower(X, cotangent(name)).compile()
    assert "jaxsoftmax." in program.as_text() and not COLLECTIVE.search(program.as_text())
    check(name, jax.jit(mapped)(X, cotangent(name)))


@every_function
def test_shard_map_over_some_axes(cpus, name):
    """One mesh axis manual, two automatic: no custom_partitioning there, but a right result."""
    mesh = mesh_of(cpus)
    mapped = jax.shard_map(
        both(ours(name)), mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
    )
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    check(name, jax.jit(mapped)(x, cotangent(name)))


@every_function
def test_grad_of_shard_map(cpus, name):
    spec = P("a", "b")
    mapped = jax.shard_map(ours(name), mesh=mesh_of(cpus), in_specs=spec, out_specs=spec)
    check(name, jax.jit(both(mapped))(X, cotangent(name)))


@every_function
def test_a_cotangent_without_an_axis_of_the_mesh(cpus, name):
    """Inside shard_map, rows that vary over the mesh and a cotangent that does not."""
    mesh = mesh_of(cpus)

    def local(x):
        return jax.grad(lambda x: ours(name)(x).sum())(x)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    want = jax.grad(lambda x: theirs(name)(x).sum())(X)
    np.testing.assert_allclose(jax.jit(mapped)(X), want, rtol=1e-5, atol=2e-5)


@every_function
def test_forced_plan_is_refused_at_once(cpus, name):
    """The ValueError comes from lowering, not from inside XLA's partitioner."""
    x = jax.device_put(np.zeros((8, 40000), np.float16), NamedSharding(mesh_of(cpus, (8,)), P("a")))
    says = f"holds 32768 columns of float16 {name}, got 40000"
    with pytest.raises(ValueError, match=says):
        jax.jit(ours(name, path="packed")).lower(x)


@every_function
def test_export_for_several_devices(cpus, name):
    """custom_partitioning does not export: the formula does, and is right."""
    sharding = NamedSharding(mesh_of(cpus, (8,)), P(None, "a"))
    x = jax.device_put(X, sharding)
    exported = jax.export.export(jax.jit(both(ours(name))), platforms=["cpu"])(x, cotangent(name))
    check(name, exported.call(x, cotangent(name)))
