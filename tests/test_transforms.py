"""JAX's transformations give what they give with jax.nn: every function, every row of a table."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformations_derivatives  # noqa: F401  this and the next two fill the table
import transformations_devices  # noqa: F401
import transformations_loops  # noqa: F401
from functions import every_function, ours, primitive, theirs, weighed
from transformations import REFUSED, RELEASES, TABLE, V, X

from jaxsoftmax import _ffi

DOC = Path(__file__).parents[1] / "docs" / "transformations.md"
QUICK = {"xla_backend_optimization_level": 0}  # of what XLA itself makes; kernels are compiled
SINCE = re.compile(r"since JAX ([\d.]+\d)")
FORWARD = [name for name, row in TABLE.items() if row.works == "primitive"]


def function(make, name, **options):
    """Of x and axis, as the rows of the table take it."""
    return lambda x, axis=-1: make(name, axis, **options)(x)


def functions(name, row):
    """By the names that a failure shall have: ours in each path, where it can be, and jax.nn's."""
    made = {}
    for path in row.paths:
        if row.works != "primitive":
            made[f"{name}, path={path}"] = function(ours, name, path=path)
        if path is None or row.works == "primitive":
            made[f"primitive.{name}, path={path}"] = function(primitive, name, path=path)
    return made, function(theirs, name)


def skip_before_its_release(name):
    since, reason = RELEASES.get(name, ("0", ""))
    if jax.__version_info__ < tuple(map(int, since.split("."))):
        pytest.skip(f"before jax {since}: {reason}")


def check(label, got, want, tolerance):
    """The same tree of the same types, element by element."""
    assert jax.tree.structure(got) == jax.tree.structure(want), label

    def near(a, b):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), label
        scale = max(1, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, tolerance, tolerance * scale / 10, err_msg=label)

    jax.tree.map(near, got, want)


@every_function
@pytest.mark.parametrize("transformation", TABLE)
def test_as_jax_nn(platform, transformation, name):
    row = TABLE[transformation]
    if len(jax.devices(platform)) < row.devices:
        pytest.skip(f"needs {row.devices} devices")
    skip_before_its_release(transformation)
    made, reference = functions(name, row)

    def program(*inputs):
        found = {}
        for label, f in made.items():
            try:
                found[label] = row.program(f)(*inputs)
            except Exception as error:
                error.add_note(f"{transformation} of {label}")
                raise
        return found, row.program(reference)(*inputs)

    if row.jit:
        program = jax.jit(program).lower(*row.inputs).compile(QUICK if platform == "cpu" else {})
        called = 'custom_call_target="jaxsoftmax.' in program.as_text()
        assert called == (platform in _ffi.PLATFORMS and row.works != "formula")
    found, want = program(*row.inputs)
    for label, got in found.items():
        check(f"{transformation} of {label}", got, want, row.tolerance)


@every_function
@pytest.mark.parametrize("transformation", FORWARD)
def test_forward_mode_over_a_custom_vjp_raises(cpu, transformation, name):
    """Which is why jaxsoftmax.primitive is there: no wrong derivative, no silent formula."""
    row = TABLE[transformation]
    with pytest.raises((TypeError, NotImplementedError), match=r"forward-mode|custom_lin"):
        jax.jit(row.program(function(ours, name))).lower(*row.inputs)


@every_function
@pytest.mark.parametrize("what", REFUSED)
def test_refused(cpu, what, name):
    """It raises, for those for whom it is said to, and for nobody else."""
    program, whose, error, says = REFUSED[what]
    if whose == "kernels" and not _ffi.PLATFORMS:
        pytest.skip("formulas run, which do as jax.nn does")
    skip_before_its_release(what)
    for make in (ours, primitive, theirs):
        call = program(function(make, name))
        if whose == "jax" or make is not theirs:
            with pytest.raises(error, match=says):
                call(X)
        else:
            call(X)


def test_the_docs_list_the_table():
    """Row by row, and say of each whether it works, and since which release."""
    cells = re.findall(r"^\| ([^|]+) \| (yes|formula|primitive|no)\b(.*)", DOC.read_text(), re.M)
    listed = {name.replace("`", ""): (works, note) for name, works, note in cells}
    works = {**{name: row.works for name, row in TABLE.items()}, **dict.fromkeys(REFUSED, "no")}
    assert {name: works for name, (works, _) in listed.items()} == works
    assert len(cells) == len(works)
    since = {name: found[1] for name, (_, note) in listed.items() if (found := SINCE.search(note))}
    assert since == {name: release for name, (release, _) in RELEASES.items()}


@every_function
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(platform, name, dtype):
    """Statistics, factors and tangents in other types than the rows': every order of derivative
    has jax.nn's dtype, and about its value in float64."""

    def each(make, x, v):
        f = make(name)

        def squared(x):
            return weighed(f(x).astype(jnp.float64) ** 2)

        gradient = jax.grad(squared)
        value, pull = jax.vjp(f, x)
        return value, pull(value)[0], gradient(x), jax.jvp(gradient, (x,), (v,))[1]

    with jax.enable_x64(True):
        x, v = (jnp.asarray(a[0, :3, :9], dtype) for a in (X, V))
        exact = x.astype(jnp.float64), v.astype(jnp.float64)
        got = jax.jit(lambda: each(ours, x, v))()
        like, want = jax.jit(lambda: (each(theirs, x, v), each(theirs, *exact)))()
        assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, like)
        tolerance = {"float16": 4e-3, "bfloat16": 4e-2, "float64": 1e-12}[dtype]
        for a, b in zip(got, want, strict=True):
            scale = float(jnp.abs(b).max())
            np.testing.assert_allclose(a.astype(float), b, rtol=0, atol=tolerance * scale)
