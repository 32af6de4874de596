"""Masked, scaled, causal calls on eight devices and exported: the same values, no collective."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from functions import every_function, ours, theirs
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from loading import Call, Data, both, make
from test_sharding import COLLECTIVE, mesh_of

SHAPE = (4, 8, 16, 32)
SCALE = 0.37
# A call and where its rows may lie: on which dimensions of x the mesh axes are.
LAYOUTS = {
    "heads": (P("a", ("b", "c")), -1),
    "queries": (P("a", None, ("b", "c")), -1),
    "all rows": (P("a", "b", "c"), -1),
    "columns": (P("a", None, "b", "c"), 1),
    "two apart": (P(None, "a", None, ("b", "c")), (0, 2)),
}


def sharded(mesh, spec: P, call: Call, d: Data):
    """The operands laid out as x is: of a mask the dimensions that it has."""
    spec = [*spec, *[None] * 4][:4]
    of_mask = None
    if d.mask is not None:
        last = spec[4 - d.mask.ndim :]
        of_mask = P(*(s if size > 1 else None for s, size in zip(last, d.mask.shape, strict=True)))
    axes = call.axes(4)
    of_rows = P(*(s for i, s in enumerate(spec) if i - 4 not in axes))
    specs = P(*spec), of_mask, P(), of_rows if call.name == "logsumexp" else P(*spec)
    return [
        None if a is None else jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(d.operands(), specs, strict=True)
    ], specs


@functools.cache
def expected(call: Call):
    d = make(call, SHAPE, "float32", "random", SCALE)
    with jax.default_device(jax.devices("cpu")[0]):
        return d, jax.tree.map(np.asarray, jax.jit(lambda *a: both(call, *a))(*d.operands()))


def check(call: Call, results) -> None:
    """As on one device, whose results other tests hold against the oracle."""
    for got, want in zip(results, expected(call)[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def calls(name: str, axis=-1):
    scaled = name != "logsumexp"
    masks = (None, "key", "query_key", "last", "full")
    return [Call(name, axis, mask, scaled and mask != "last") for mask in masks]


@pytest.mark.multidevice
@pytest.mark.parametrize("layout", LAYOUTS)
@every_function
def test_rows_stay_where_they_are(cpus, name, layout):
    """Every mask, by automatic sharding: the mask lies as the rows do, or whole on each device."""
    mesh, (spec, axis) = mesh_of(cpus), LAYOUTS[layout]
    listed = calls(name, axis)
    laid = [sharded(mesh, spec, call, expected(call)[0])[0] for call in listed]
    whole = [[x, expected(c)[0].mask, s, ct] for c, (x, _, s, ct) in zip(listed, laid, strict=True)]
    program = jax.jit(lambda all: [both(c, *a) for c, a in zip(listed, all, strict=True)])
    for operands in (laid, whole):
        compiled = program.lower(operands).compile()
        text = compiled.as_text()
        assert not COLLECTIVE.search(text), COLLECTIVE.findall(text)
        assert text.count('custom_call_target="jaxsoftmax.') == 2 * len(listed)
        for call, (x, *_), results in zip(listed, operands, compiled(operands), strict=True):
            check(call, results)
            assert results[1].sharding.is_equivalent_to(x.sharding, 4)


@pytest.mark.multidevice
@pytest.mark.parametrize("spec", [P("a", "b"), P("a", None, "c"), P(None, None, ("a", "b", "c"))])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_causal_queries_know_their_number(cpus, name, spec):
    """Where the queries are sharded, each device has others: a device's first is not the first."""
    for axis in (-1, 1):
        call = Call(name, axis, "key", True, causal=True)
        operands, _ = sharded(
            mesh_of(cpus), spec if axis == -1 else P("a"), call, expected(call)[0]
        )
        compiled = jax.jit(lambda *a, c=call: both(c, *a)).lower(*operands).compile()
        assert not COLLECTIVE.search(compiled.as_text())
        check(call, compiled(*operands))


@pytest.mark.multidevice
@pytest.mark.parametrize("mask_spec", [P("a", None, None, "b"), P(None, "c", "b", "a")], ids=str)
@every_function
def test_a_mask_that_lies_elsewhere_is_brought(cpus, name, mask_spec):
    mesh, call = mesh_of(cpus), Call(name, -1, "full", name != "logsumexp")
    (x, _, scale, ct), _ = sharded(mesh, P("a", "b", "c"), call, expected(call)[0])
    mask = jax.device_put(expected(call)[0].mask, NamedSharding(mesh, mask_spec))
    check(call, jax.jit(lambda *a: both(call, *a))(x, mask, scale, ct))


@pytest.mark.multidevice
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@every_function
def test_shard_map(cpus, name, layout, check_vma):
    mesh, (spec, axis) = mesh_of(cpus), LAYOUTS[layout]
    for call in (Call(name, axis, "key", name != "logsumexp"), Call(name, axis, "query_key")):
        d = expected(call)[0]
        given = [a for a in d.operands() if a is not None]
        _, specs = sharded(mesh, spec, call, d)
        in_specs = tuple(s for a, s in zip(d.operands(), specs, strict=True) if a is not None)

        def program(*operands, c=call, scaled=d.scale is not None):
            x, mask, *scale, ct = operands
            return both(c, x, mask, scale[0] if scaled else None, ct)

        mapped = jax.shard_map(
            program,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=(specs[3], specs[0]),
            check_vma=check_vma,
        )
        compiled = jax.jit(mapped).lower(*given).compile()
        text = compiled.as_text()
        assert "jaxsoftmax." in text and not COLLECTIVE.search(text)
        check(call, jax.jit(mapped)(*given))


@pytest.mark.multidevice
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_the_scale_inside_shard_map(cpus, name):
    """Its gradient adds up over the mesh axes that x varies over and it does not."""
    rng = np.random.default_rng(5)
    x, ct = (rng.standard_normal((8, 32)).astype(np.float32) for _ in range(2))

    def slope(make, local):
        def loss(s, x, ct):
            y = make(name, scale=s)(x) if make is ours else theirs(name)(x * s)
            total = (y * ct).sum()
            return jax.lax.psum(total, "a") if local else total

        return jax.grad(loss)

    mesh = mesh_of(cpus, (8,))
    specs = (P(), P("a"), P("a"))
    mapped = jax.shard_map(slope(ours, True), mesh=mesh, in_specs=specs, out_specs=P())
    got, want = jax.jit(mapped)(0.5, x, ct), slope(theirs, False)(0.5, x, ct)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.multidevice
@every_function
def test_explicit_mesh_axes(cpus, name):
    """Sharding in types: the result has that of x, whatever the mask has."""
    mesh, spec, listed = mesh_of(cpus, kind=AxisType.Explicit), P("a", "b", "c", None), calls(name)
    _ = [expected(call) for call in listed]  # without a mesh
    with jax.set_mesh(mesh):
        for call in listed:
            operands, _ = sharded(mesh, spec, call, expected(call)[0])
            results = jax.jit(lambda *a, c=call: both(c, *a))(*operands)
            check(call, results)
            assert results[1].sharding.is_equivalent_to(operands[0].sharding, 4)


@pytest.mark.multidevice
@every_function
def test_vmap_of_sharded(cpus, name):
    """Batched where the mesh axis is, the mask not."""
    x = jax.device_put(
        make(Call(name), SHAPE, "float32", "random", 1).x,
        NamedSharding(mesh_of(cpus), P("a", ("b", "c"))),
    )
    mask = np.arange(32) % 3 > 0
    options = {} if name == "logsumexp" else {"scale": 0.5}
    f = jax.vmap(ours(name, where=mask, **options), in_axes=1, out_axes=1)
    compiled = jax.jit(f).lower(x).compile()
    assert not COLLECTIVE.search(compiled.as_text())
    want = theirs(name, where=mask)(np.asarray(x) * options.get("scale", 1))
    np.testing.assert_allclose(compiled(x), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dims", ["b, 2, q, k", "b, h, 5, 33", "3, 2, q, 33"])
@every_function
def test_export_of_symbolic_shapes(cpu, name, dims):
    """Value and gradient of a masked call, in kernels; causal rows too."""
    x = jax.ShapeDtypeStruct(export.symbolic_shape(dims), np.float32)
    causal = [False] if name == "logsumexp" else [False, True]
    listed = [Call(name, axis, "key", name != "logsumexp", c) for axis in (-1, 1) for c in causal]

    def program(x, mask, scale):
        return [both(c, x, mask, scale, jax.numpy.cos(c.function(mask, scale)(x))) for c in listed]

    mask = jax.ShapeDtypeStruct((x.shape[0], 1, 1, x.shape[-1]), bool)
    scale = jax.ShapeDtypeStruct((), np.float32)
    targets = [f"jaxsoftmax.{op}" for op in (name, f"{name}_bwd")]
    allowed = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
    exporter = export.export(jax.jit(program), platforms=["cpu"], disabled_checks=allowed)
    exported = exporter(x, mask, scale)
    assert all(f"@{target}(" in exported.mlir_module() for target in targets)
    for size in (1, 3, 6):
        shape = tuple(d if isinstance(d, int) else size for d in x.shape)
        d = make(Call(name, -1, "key", True), shape, "float32", "random", SCALE)
        got, want = exported.call(d.x, d.mask, d.scale), jax.jit(program)(d.x, d.mask, d.scale)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.multidevice
@every_function
def test_export_for_several_devices(cpus, name):
    """Custom partitioning does not export: the formula does, and is right."""
    call = Call(name, -1, "key", name != "logsumexp")
    operands, _ = sharded(mesh_of(cpus), P("a", "b", "c"), call, expected(call)[0])
    exported = export.export(jax.jit(lambda *a: both(call, *a)), platforms=["cpu"])(*operands)
    for got, want in zip(exported.call(*operands), expected(call)[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
