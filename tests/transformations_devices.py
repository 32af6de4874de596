"""Rows of the table of transformations: several devices and export; and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from functions import FUNCTIONS, loss, weighed
from jax import export, lax
from jax.experimental import checkify, jet
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import refused, row


def mesh(kind=AxisType.Auto):
    """2 x 2 devices of the platform that the test runs on."""
    platform = jax.config.jax_default_device.platform
    return jax.make_mesh((2, 2), ("a", "b"), (kind,) * 2, devices=jax.devices(platform)[:4])


def both(f):
    return lambda x: (f(x), jax.grad(loss(f))(x))


# Several devices. Rows that are cut, and more of it: test_sharding.py.


@row("jit of a sharded array", devices=4)
def automatic(f):
    def program(x):
        return both(f)(lax.with_sharding_constraint(x, NamedSharding(mesh(), P("a", "b"))))

    return program


@row("explicit mesh axes", devices=4, jit=False)
def explicit(f):
    def program(x):
        with jax.set_mesh(mesh(AxisType.Explicit)):
            found = jax.jit(both(f))(jax.device_put(x, P("a", "b")))
        return jax.tree.map(np.asarray, found)

    return program


def mapped(f, **options):
    cut = P("a", "b")
    return jax.shard_map(lambda x: f(x), mesh=mesh(), in_specs=cut, out_specs=cut, **options)


def inside_and_outside(f, **options):
    """The gradient taken inside and outside, and of what all devices have alike."""

    def local(x):
        return jax.grad(lambda x: weighed(f(x)) + (f(x) ** 2).sum())(x)

    def program(x):
        outside = jax.grad(loss(lambda x, axis: mapped(f, **options)(x)))
        return mapped(f, **options)(x), mapped(local, **options)(x), outside(x)

    return program


@row("shard_map, check_vma=True", devices=4)
def shard_map(f):
    return inside_and_outside(f)


@row("shard_map, check_vma=False", devices=4)
def shard_map_unchecked(f):
    return inside_and_outside(f, check_vma=False)


@row("shard_map over some mesh axes", devices=4, works="formula")
def shard_map_partial(f):
    """One axis manual, one automatic, over which x is sharded too."""

    def program(x):
        part = jax.shard_map(
            both(f), mesh=mesh(), in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
        )
        return part(lax.with_sharding_constraint(x, NamedSharding(mesh(), P("a", "b"))))

    return program


@row("vmap, spmd_axis_name", devices=4)
def vmap_spmd(f):
    def program(x):
        def each(x):
            return f(lax.with_sharding_constraint(x, NamedSharding(mesh(), P("b"))))

        batch = jax.vmap(each, spmd_axis_name="a")
        return batch(x), jax.grad(lambda x: weighed(batch(x)))(x)

    return program


@row("vmap of shard_map, spmd_axis_name", devices=4)
def vmap_of_shard_map(f):
    def program(x):
        cut = jax.shard_map(lambda x: f(x), mesh=mesh(), in_specs=P("b"), out_specs=P("b"))
        batch = jax.vmap(cut, spmd_axis_name="a")
        return batch(x), jax.grad(lambda x: weighed(batch(x)))(x)

    return program


@row("pmap", devices=4, jit=False)
def pmap(f):
    devices = mesh().devices.ravel().tolist()

    def program(x):
        each = jax.pmap(lambda x: f(x) + lax.psum(weighed(f(x)), "i"), "i", devices=devices)
        y, pull = jax.vjp(each, x)
        return jax.tree.map(np.asarray, (y, pull(y)))

    return program


# Export.

ALLOWED = [
    export.DisabledSafetyCheck.custom_call(f"jaxsoftmax.{name}{suffix}")
    for name in FUNCTIONS
    for suffix in ("", "_bwd")
]


def exported(f, *kinds, platforms=None):
    return export.export(jax.jit(f), platforms=platforms, disabled_checks=ALLOWED)(*kinds)


@row("export, symbolic batch, several platforms", jit=False)
def export_symbolic(f):
    def program(x):
        kind = jax.ShapeDtypeStruct(export.symbolic_shape("b, 6, 33"), x.dtype)
        ready = exported(both(f), kind, platforms=["cpu", "cuda"])
        assert ready.platforms == ("cpu", "cuda")
        return ready.call(x)

    return program


@row("export, serialized", jit=False)
def export_serialized(f):
    """With its gradient."""
    pytest.importorskip("flatbuffers", reason="JAX serializes with it")

    def program(x):
        kind = jax.ShapeDtypeStruct(export.symbolic_shape("b, 6, 33"), x.dtype)
        data = exported(f, kind, platforms=["cpu", "cuda"]).serialize(vjp_order=1)
        again = export.deserialize(data).call
        y, pull = jax.vjp(again, x)
        return y, pull(y)

    return program


@row("export for several devices", jit=False, devices=4, works="formula")
def export_sharded(f):
    def program(x):
        x = jax.device_put(x, NamedSharding(mesh(), P("a", "b")))
        platform = jax.config.jax_default_device.platform
        ready = exported(both(f), x, platforms=["cuda" if platform == "gpu" else platform])
        assert "@jaxsoftmax." not in ready.mlir_module()
        return jax.tree.map(np.asarray, ready.call(x))

    return program


# What raises.


@refused("grad of a while_loop", "jax", ValueError, "Reverse-mode differentiation")
def grad_of_while(f):
    def repeated(x):
        return lax.while_loop(lambda x: (x > 9).any(), lambda x: x - weighed(f(x)), x)

    return lambda x: jax.eval_shape(jax.grad(lambda x: repeated(x).sum()), x)


NOT_LINEAR = (NotImplementedError, RuntimeError, AssertionError)  # by JAX's release, of jax.nn's


@refused("linear_transpose of the function itself", "jax", NOT_LINEAR)
def transposed(f):
    return lambda x: jax.linear_transpose(f, x)(f(x))


@refused("debug_nans where a NaN arises", "jax", FloatingPointError, "nan")
def nan_found(f):
    def program(x):
        with jax.debug_nans(True):
            return jax.jit(f)(np.where(x > 0, x, np.nan))

    return program


@refused("jet", "jaxsoftmax", (KeyError, AttributeError, TypeError))
def taylor(f):
    return lambda x: jet.jet(f, (x,), ((x, x),))


@refused("checkify's nan_checks inside a kernel", "jaxsoftmax", AssertionError, "not seen")
def nan_checked(f):
    """checkify asks a fixed list of JAX's own primitives."""

    def program(x):
        errors, _ = checkify.checkify(f, errors=checkify.nan_checks)(x * np.nan)
        assert errors.get(), "not seen"

    return program


@refused("export without disabled_checks", "kernels", ValueError, "custom call")
def export_unnamed(f):
    return lambda x: export.export(jax.jit(f), platforms=["cpu"])(x)


@refused("lowering for an AbstractMesh", "kernels", ValueError, "require devices")
def abstract_mesh(f):
    def program(x):
        sharding = NamedSharding(AbstractMesh((4,), ("a",)), P("a"))
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.jit(f).trace(kind).lower(lowering_platforms=("cpu",))

    return program
