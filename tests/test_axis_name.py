"""axis_name: rows cut over a mapped axis, by shard_map, vmap and pmap; its errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import FUNCTIONS, every_function, ours, primitive, theirs
from jax.sharding import PartitionSpec as P
from test_cut_rows import check_exchange, close
from test_sharding import mesh_of

import jaxsoftmax

RNG = np.random.default_rng(41)
X, V = (RNG.standard_normal((8, 64)).astype(np.float32) * 3 for _ in range(2))
MASK = RNG.random(X.shape) < 0.7
WHOLE = P(None, ("a", "b"))
every_kind = pytest.mark.parametrize("make", [ours, primitive], ids=["custom_vjp", "primitive"])


def of_result(name: str, spec: P = WHOLE) -> P:
    return P(spec[0]) if name == "logsumexp" else spec


def mapped(name: str, cpus, make=ours, spec: P = WHOLE, check_vma: bool = True, **options):
    """The function of whole rows that shard_map makes of the one of parts."""
    mesh = mesh_of(cpus, (4, 2))
    f = make(name, axis_name=spec[1], **options)
    out = of_result(name, spec)
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out, check_vma=check_vma)


def squared(f):
    return lambda x: (jnp.sin(f(x)) ** 2).sum()


@pytest.mark.multidevice
@every_kind
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [WHOLE, P("a", "b"), P(None, ("b", "a"))], ids=str)
@every_function
def test_shard_map(cpus, name, spec, check_vma, make):
    """Value and gradient; what is exchanged is a number a row."""
    f = mapped(name, cpus, make, spec, check_vma)
    program = jax.jit(lambda x: (f(x), jax.grad(squared(f))(x)))
    check_exchange(program.lower(X).compile().as_text(), 4 * len(X))
    close(program(X), (theirs(name)(X), jax.grad(squared(theirs(name)))(X)))


TRANSFORMS = {
    "hessian": lambda f: jax.hessian(squared(f)),
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(squared(f)), (x,), (jnp.cos(x),))[1],
    "checkpoint": lambda f: jax.grad(jax.checkpoint(squared(f))),
    "scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c + jnp.sin(squared(f)(c)), None), x, length=2)[
            0
        ].var()
    ),
    "vmap": lambda f: jax.vmap(jax.grad(squared(lambda x: f(x[None])))),
}


@pytest.mark.multidevice
@every_kind
@pytest.mark.parametrize("transform", TRANSFORMS)
@every_function
def test_transformations(cpus, name, transform, make):
    x, t = X[:2, :16], TRANSFORMS[transform]
    close(jax.jit(t(mapped(name, cpus, make)))(x), jax.jit(t(theirs(name)))(x), 1e-5)


@pytest.mark.multidevice
@every_kind
@every_function
def test_gradient_inside(cpus, name, make):
    """jax.grad within shard_map, of a loss that all devices share."""

    def local(x):
        def loss(x):
            y = squared(make(name, axis_name="a"))(x)
            return y if name == "logsumexp" else jax.lax.psum(y, "a")

        return jax.grad(loss)(x)

    mesh = mesh_of(cpus, (8,))
    f = jax.shard_map(local, mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a"))
    close(jax.jit(f)(X), jax.grad(squared(theirs(name)))(X))


@pytest.mark.multidevice
@every_function
def test_forward_mode(cpus, name):
    def both(f):
        return lambda x, v: (
            jax.jvp(f, (x,), (v,)),
            jax.linearize(f, x)[1](v),
            jax.jacfwd(f)(x[:1]),
        )

    close(jax.jit(both(mapped(name, cpus, primitive)))(X, V), jax.jit(both(theirs(name)))(X, V))
    if name != "logsumexp":
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(mapped(name, cpus), (X,), (V,))


@pytest.mark.multidevice
@every_kind
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS[:2])
def test_mask_scale_and_causal(cpus, name, causal, make):
    """The mask is cut as x is; queries and keys are numbered over all devices; the scale's
    gradient is that of all parts."""
    mesh = mesh_of(cpus, (4, 2))

    def cut(x, mask, scale):
        y = make(name, where=mask, scale=scale, is_causal=causal, axis_name=("a", "b"))(x)
        return jnp.where(mask, y, 0)

    def whole(x, mask, scale):
        keep = mask & (np.arange(64) <= np.arange(8)[:, None] if causal else True)
        y = theirs(name, where=keep)(x * scale)
        return jnp.where(mask, y, 0)

    specs = WHOLE, WHOLE, P()
    f = jax.shard_map(cut, mesh=mesh, in_specs=specs, out_specs=WHOLE)
    mask = MASK.copy()
    mask[:, 0] = True  # so that no row is empty, which jax.nn gives no gradient

    def gradients(f):
        loss = lambda x, s: jnp.where(jnp.isfinite(y := f(x, mask, s)), y, 0).var()  # noqa: E731
        return lambda x, s: (f(x, mask, s), jax.grad(loss, (0, 1))(x, s))

    close(jax.jit(gradients(f))(X, 0.37), jax.jit(gradients(whole))(X, 0.37))


@every_kind
@every_function
def test_vmap_and_pmap_bind_names_too(cpu, name, make):
    """Eight parts, one above the other."""
    parts = np.moveaxis(X.reshape(8, 8, 8), 1, 0)
    f, out = make(name, axis_name="i"), None if name == "logsumexp" else 1
    maps = [functools.partial(jax.vmap, axis_name="i", out_axes=out)]
    if len(jax.devices("cpu")) >= 8:
        pmap = functools.partial(jax.pmap, axis_name="i", out_axes=out, backend="cpu")
        maps.append(pmap)
    for each in maps:
        y = each(f)(parts)
        close(np.reshape(y, theirs(name)(X).shape), theirs(name)(X))
    want = jax.grad(squared(theirs(name)))(X)
    got = jax.grad(lambda x: squared(jax.vmap(f, axis_name="i", out_axes=out))(x))(parts)
    close(np.moveaxis(got, 0, 1).reshape(8, 64), want)


@pytest.mark.multidevice
@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "bool"])
def test_types_without_a_kernel(cpus, dtype):
    x = (X > 0).astype(dtype) if dtype == "bool" else jnp.asarray(X, dtype)
    names = ["logsumexp"] if dtype == "bool" else FUNCTIONS
    for name in names:
        want = theirs(name)(x.astype(jnp.float32))
        got = mapped(name, cpus)(x)
        rtol = 0.2 if "8" in dtype else 1e-5
        np.testing.assert_allclose(np.asarray(got, float), want, rtol=rtol, atol=0.2 * (rtol > 0.1))


@pytest.mark.multidevice
@pytest.mark.parametrize("return_sign", [False, True])
@pytest.mark.parametrize("factors", [np.cos(np.arange(64.0)), 1 + np.arange(64.0)], ids=["+-", "+"])
def test_factors(cpus, factors, return_sign):
    """b and return_sign of logsumexp, and keepdims."""
    b = factors.astype(np.float32)

    def both(f):
        return lambda x: (
            f(x),
            jax.grad(lambda x: jnp.nan_to_num(jax.tree.leaves(f(x))[0]).sum())(x),
        )

    options = {"axis": -1, "keepdims": True, "return_sign": return_sign}

    def part(x, b):
        return jaxsoftmax.logsumexp(x, b=b, axis_name="a", **options)

    mesh = mesh_of(cpus, (8,))
    specs = P(None, "a"), P("a")
    f = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())
    got = jax.jit(both(lambda x: f(x, b)))(X)
    close(got, jax.jit(both(lambda x: jax.nn.logsumexp(x, b=b, **options)))(X))


@pytest.mark.multidevice
@pytest.mark.parametrize("masked", [False, True])
def test_factors_of_parts_without_a_sum(cpus, masked):
    """A part of nothing but -inf, of factors 0, and one that cancels: a gradient all the same."""
    x, b, mesh = X.copy(), np.ones_like(X), mesh_of(cpus, (8,))
    x[0, :8] = -np.inf
    b[1, 8:16] = 0
    b[2, 16:24:2] = -1
    x[2, 16:24] = np.repeat(x[2, 16:24:2], 2)
    where = MASK if masked else np.ones_like(MASK)

    def both(f):
        def program(x, b):
            y = f(x, b, where)
            loss = lambda x, b: sum(jnp.sin(y).sum() for y in f(x, b, where))  # noqa: E731
            return y, jax.grad(loss, (0, 1))(x, b)

        return program

    def part(x, b, where):
        return jaxsoftmax.logsumexp(x, -1, b, return_sign=True, where=where, axis_name="a")

    def whole(x, b, where):
        return jax.nn.logsumexp(x, -1, b, return_sign=True, where=where)

    f = jax.shard_map(part, mesh=mesh, in_specs=(P(None, "a"),) * 3, out_specs=(P(), P()))
    close(jax.jit(both(f))(x, b), jax.jit(both(whole))(x, b), 1e-5)


@pytest.mark.multidevice
@every_kind
@every_function
def test_special_rows(cpus, name, make):
    """Infinities, NaN and parts of nothing but -inf, in any device's part."""
    x = np.tile(X[:1], (40, 1))
    for row, value in enumerate([np.nan, np.inf, -np.inf] * 8):
        x[row, row * 3 % 64] = value
    x[24:32, :8] = -np.inf
    x[32:34] = -np.inf
    x[34, ::9] = np.inf
    x[35, 8:16] = -np.inf
    x[35, 0] = np.inf
    both = lambda f: lambda x: (f(x), jax.vjp(f, x)[1](f(x) * 0 + 1)[0])  # noqa: E731
    got, want = (jax.jit(both(f))(x) for f in (mapped(name, cpus, make), make(name)))
    close(got[0], want[0])
    close(got[1][24:32], want[1][24:32])
    np.testing.assert_array_equal(np.isnan(got[1]), np.isnan(want[1]))


def part(**options):
    return lambda x: jaxsoftmax.softmax(x, **({"axis_name": "i"} | options))


@pytest.mark.parametrize(
    ("error", "says", "f"),
    [
        (NameError, "softmax: axis_name .* 'j'", part(axis_name="j")),
        (NameError, "'j'", part(axis_name=("i", "j"))),
        (ValueError, "each once", part(axis_name=("i", "i"))),
        (TypeError, "axis_name .* got", part(axis_name=[["i"]])),
        (TypeError, "softmax: axis_name .* got 0", part(axis_name=0)),
        (ValueError, "is_causal with axis_name takes one axis", part(axis=None, is_causal=True)),
        (TypeError, "axis_name must be None for complex64", lambda x: part()(x + 1j)),
        (
            TypeError,
            "axis_name must be None for complex64",
            lambda x: jaxsoftmax.logsumexp(x, b=1j, axis_name="i"),
        ),
    ],
)
def test_errors(cpu, error, says, f):
    with pytest.raises(error, match=says):
        jax.vmap(f, axis_name="i")(X.reshape(8, 8, 8))


@every_function
def test_outside_of_a_map(cpu, name):
    for make in (ours, primitive):
        with pytest.raises(NameError, match=f"{name}: axis_name .* 'i'"):
            make(name, axis_name="i")(X)
