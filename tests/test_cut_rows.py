"""Rows cut over several devices, by automatic sharding: the contract, and a number a row exchanged.

16-bit results keep the contract as it is. In float32 and float64 XLA adds up a gradient's row and
merges the parts: twice the bounds, and what its sums round.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager

import cases
import jax
import numpy as np
import pytest
from contracts import as_dtype, compute_epsilon, wide
from functions import every_function, ours, theirs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from loading import Call, Data, both, make
from loading_oracle import Oracle
from oracle import Expected
from test_sharding import COLLECTIVE, mesh_of

from bench.scaling_hlo import collectives
from jaxsoftmax import _plan
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, PATHS, SEED_PLANS
from jaxsoftmax._primitive import bind

pytestmark = pytest.mark.multidevice
SPECS = (P(None, None, None, ("a", "b", "c")), P("a", None, "b", "c"), P("b", None, None, "a"))


def close(got, want, of_largest=1e-6):
    """Within so much of the largest number there is."""

    def near(a, b):
        largest = np.abs(b).max(initial=0.1, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=of_largest * largest)

    jax.tree.map(near, got, want)


def of_cut_rows(expected: Expected, dtype: np.dtype, p=None, terms=None) -> Expected:
    """Its bounds, of rows that XLA adds up: `terms`, times p in the result."""
    if dtype.itemsize >= 4:
        with np.errstate(all="ignore"):
            more = 0 if p is None else np.abs(p) * terms[..., None] * 4 * compute_epsilon(dtype)
        expected.bound = 2 * expected.bound + more
        if expected.total_bound is not None:
            expected.total_bound = 2 * expected.total_bound + np.sum(more, axis=-1)
    return expected


@contextmanager
def x64(on: bool):
    """For all threads: jax 0.10 calls the partitioner's rules from one without the context's."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", on)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def check_exchange(text: str, most: int, any: bool = True) -> None:
    """All-reduces alone, together of no more than `most` numbers each; `any` at all."""
    found = {kind: one for kind, one in collectives(text).items() if one["count"]}
    assert {*COLLECTIVE.findall(text)} == ({"all-reduce"} if any else set())
    assert [*found] == ["all_reduce"] * any
    for one in found.values():
        numbers = [s.partition("[")[2].rstrip("]").split(",") for s in one["shapes"]]
        sizes = [np.prod([int(n or 1) for n in each]) for each in numbers]
        assert max(sizes) <= most and sum(sizes) <= one["count"] * most, found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_the_contract(several, op, dtype):
    """Every kind of row, special values too; most parts of a row do not hold its maximum."""
    names = [n for n in cases.CASES if "huge" not in n or dtype.endswith("16")]
    x = cases.batch(264, as_dtype(dtype), names)
    inputs, expected = cases.expected(op, x)
    mesh, stats = mesh_of(several, (len(several),)), OPS[op].stats
    layout = [P(None, "a") if a.shape == x.shape else P() for a in inputs]
    with x64(dtype == "float64"):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(inputs, layout, strict=True)
        ]
        program = jax.jit(lambda *a: bind(op, *a, axes=(-1,), path=None, stats=stats))
        compiled = program.lower(*placed).compile()
        y, *rest = jax.tree.map(np.asarray, jax.tree.leaves(compiled(*placed)))
    check_exchange(compiled.as_text(), 2 * x.shape[0], any=OPS[op].folds > 0)
    p = terms = None
    if op in ("softmax_bwd", "log_softmax_bwd"):
        with np.errstate(all="ignore"):
            if op == "softmax_bwd":
                p = wide(inputs[0])
                terms = np.abs(p * wide(inputs[1])).sum(axis=-1)
            else:
                top, total = (wide(s)[:, None] for s in inputs[2:])
                p = np.exp(wide(inputs[1]) - top) / total
                terms = np.abs(wide(inputs[0])).sum(axis=-1)
    of_cut_rows(expected, x.dtype, p, terms).check(y)
    if rest and op == "logsumexp":
        expected.check_stats(*rest)


@functools.cache
def data(call: Call, dtype: str):
    return make(call, (4, 6, 8, 32), dtype, "random", 0.37)


def check_call(call: Call, d: Data, y: np.ndarray, dx: np.ndarray) -> None:
    oracle = Oracle(call, d)
    of_cut_rows(oracle.value, d.x.dtype).check(oracle.rows(y))
    expected, p, terms = oracle._gradient(y), None, None
    if call.name != "logsumexp":
        with np.errstate(all="ignore"):
            p = wide(oracle.rows(y))
            p = np.where(oracle.masked, 0, np.exp(p) if call.name == "log_softmax" else p)
        terms = np.abs(wide(oracle.rows(d.ct))).sum(axis=-1)
    of_cut_rows(expected, d.x.dtype, p, terms).check(oracle.rows(dx))


CALLS = [
    Call("softmax", -1, "key", True),
    Call("softmax", -1, "full"),
    Call("softmax", (-2, -1), "query_key"),
    Call("softmax", -2, "last", True),
    Call("softmax", -1, "key", True, causal=True),
    Call("softmax", -2, None, False, causal=True),
    Call("log_softmax", -1, "key", True),
    Call("log_softmax", -1, "query_key", causal=True),
    Call("log_softmax", (-1, -2), "full", True, causal=True),
    Call("logsumexp", -1, "full"),
    Call("logsumexp", (-1, -3), "key"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_masked_and_scaled(several, call, spec):
    """Values and gradients in 16 and 32 bits, keys and queries cut; masks lie as x does."""
    mesh = mesh_of(several, (2, 2, 2) if len(several) == 8 else (1, 1, len(several)))
    for dtype in ("float32", "bfloat16"):
        d = data(call, dtype)
        of_rows = [s for i, s in enumerate(spec) if i - 4 not in call.axes(4)]
        of_mask = None
        if d.mask is not None:
            last = list(spec)[4 - d.mask.ndim :]
            of_mask = P(*(s if n > 1 else None for s, n in zip(last, d.mask.shape, strict=True)))
        specs = spec, of_mask, P(), P(*of_rows) if call.name == "logsumexp" else spec
        operands = [
            None if a is None else jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip(d.operands(), specs, strict=True)
        ]
        compiled = jax.jit(lambda *a: both(call, *a)).lower(*operands).compile()
        most = 2 * d.x.size // min(d.x.shape[a] for a in call.axes(4))
        names = [np.atleast_1d(spec[a]) for a in call.axes(4) if spec[a] is not None]
        is_cut = any(mesh.shape[name] > 1 for each in names for name in each)
        check_exchange(compiled.as_text(), most, is_cut)
        results = jax.tree.map(np.asarray, compiled(*operands))
        check_call(call, d, *results)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_scale_of_large_numbers(several, name, dtype):
    """The product is rounded once, in kernels and formulas alike: an ulp of it is 2^-10 here."""
    if name == "log_softmax" and jax.__version_info__ < (0, 11):
        pytest.skip("XLA of jax 0.10 drops the barrier and fuses the product, unrounded, on a CPU")
    rng = np.random.default_rng(7)
    x = rng.uniform(-1, 1, (64, 1)) * 1e4 + rng.standard_normal((64, 64)) * 1.5
    call = Call(name, -1, None, True)
    d = Data(x.astype(as_dtype(dtype)), None, np.float32(1.7), *[None] * 2)
    d.ct, d.keep = rng.standard_normal(x.shape).astype(d.x.dtype), np.full(x.shape, True)
    mesh = mesh_of(several, (len(several),))
    specs = P(None, "a"), None, P(), P(None, "a")
    operands = [
        None if a is None else jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(d.operands(), specs, strict=True)
    ]
    results = jax.jit(lambda *a: both(call, *a))(*operands)
    check_call(call, d, *jax.tree.map(np.asarray, results))


@every_function
@pytest.mark.parametrize("path", [*PATHS, *SEED_PLANS, "plan"])
def test_forced_paths_are_of_the_parts(cpus, path, name):
    """A path's name runs the parts so; a plan's or seed's sizes were made for whole rows."""
    import jaxsoftmax

    x = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    plan = jaxsoftmax.plan(name, "float32", 16, 64, limits="cpu") if path == "plan" else path
    cut = jax.device_put(x, NamedSharding(mesh_of(cpus, (8,)), P(None, "a")))
    f = jax.jit(jax.value_and_grad(lambda x: (ours(name, path=plan)(x) ** 2).sum()))
    got, want = f(cut), jax.value_and_grad(lambda x: (theirs(name)(x) ** 2).sum())(x)
    text = f.lower(cut).compile().as_text()
    kernels = [line for line in text.splitlines() if 'custom_call_target="jaxsoftmax.' in line]
    number = PATHS.index(_plan.for_parts(plan))
    assert 'target="jaxsoftmax.logsumexp"' in text
    assert all(f"plan = {{path = {number} :" in line for line in kernels), kernels
    close(got, want)


@every_function
def test_uneven_parts(cpus, name):
    """33 columns over 8 devices, and 30 rows: XLA pads pieces, and nothing of that is seen."""
    mesh = mesh_of(cpus, (8,))
    x = np.random.default_rng(4).standard_normal((30, 33)).astype(np.float32)

    def program(x, spec):
        y = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        f = ours(name)
        return f(y), jax.grad(lambda y: (f(y) ** 2).sum())(y)

    f = theirs(name)
    want = f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x)
    x = jax.device_put(x, NamedSharding(mesh, P()))
    for spec in (P(None, "a"), P("a")):
        got = jax.jit(program, static_argnums=1)(x, spec)
        close(got, want)


@every_function
def test_explicit_mesh_axes(cpus, name):
    """A cut axis in types: the result has it, a reduction not; exchanged are row numbers alone."""
    mesh = mesh_of(cpus, kind=AxisType.Explicit)
    x = np.random.default_rng(5).standard_normal((4, 8, 64)).astype(np.float32)
    spec = P("a", None, ("b", "c"))
    want = theirs(name)(x), jax.grad(lambda x: (theirs(name)(x) ** 2).sum())(x)
    with jax.set_mesh(mesh):
        cut = jax.device_put(x, NamedSharding(mesh, spec))

        def program(x):
            y, pull = jax.vjp(ours(name), x)
            expected = P("a", None) if name == "logsumexp" else spec
            assert jax.typeof(y).sharding.spec == expected
            return y, pull(2 * y)[0]

        compiled = jax.jit(program).lower(cut).compile()
        check_exchange(compiled.as_text(), 64)
        got = compiled(cut)
    close(got, want)


@every_function
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_set_mesh_alone(cpus, kind, name):
    """Operands that tell no mesh: the context's, and a kernel."""
    x = np.random.default_rng(6).standard_normal((8, 64)).astype(np.float32)
    with jax.set_mesh(mesh_of(cpus, kind=kind)):
        compiled = jax.jit(ours(name)).lower(x).compile()
        got = compiled(x)
    assert f'custom_call_target="jaxsoftmax.{name}"' in compiled.as_text()
    close(got, theirs(name)(x))
