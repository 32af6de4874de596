"""The public functions' manners: signatures, bad input as jax.nn, dtypes, forced paths."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import FUNCTIONS, every_function, ours, theirs
from plans import ILLEGAL

import jaxsoftmax
from jaxsoftmax import Plan
from jaxsoftmax._plan import PATHS, SEED_PLANS

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
pytestmark = [
    pytest.mark.usefixtures("cpu"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast"),  # jax.nn, of integers
]


def raised(function, *args, **kwargs) -> Exception:
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError(f"nothing raised, got {result}")


def same_error(name, *args, says: str, **kwargs):
    """The exception type of jax.nn's function (a subclass will do), with a message that says more
    and names the function."""
    theirs = raised(getattr(jax.nn, name), *args, **kwargs)
    ours = raised(getattr(jaxsoftmax, name), *args, **kwargs)
    assert isinstance(ours, type(theirs)), f"{ours!r}, jax.nn raises {theirs!r}"
    assert re.search(says, str(ours)), str(ours)
    assert re.search(rf"\b{name}\b", str(ours)), str(ours)


def close(got, want, **tolerance):
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = (np.asarray(a).astype(complex) for a in (got, want))  # also of narrow floats
    np.testing.assert_allclose(got, want, **{"rtol": 1e-6, "atol": 1e-6, **tolerance})


@every_function
def test_signature(name):
    """jax.nn's parameters, then our own by keyword only."""
    function, *functions = (getattr(m, name) for m in (jaxsoftmax, jax.nn))
    every = inspect.signature(function).parameters.values()
    same = [p for p in every if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    own = {p.name: p.default for p in every if p not in same}
    expected = inspect.signature(functions[0]).parameters.values()
    assert [(p.name, p.default, p.kind) for p in same] == [
        (p.name, p.default, p.kind) for p in expected
    ]
    more = {} if name == "logsumexp" else {"scale": None, "is_causal": False, "dtype": None}
    assert own == {**more, "axis_name": None, "path": None}
    assert function.__name__ == name and function.__module__.startswith("jaxsoftmax")
    for part in ("Args:", "Returns:", "Raises:", "path", "jax.nn"):
        assert part in function.__doc__
    direct = getattr(jaxsoftmax.primitive, name)
    assert direct.__name__ == name and name in direct.__doc__
    parameters = inspect.signature(direct).parameters
    shared = [p for p in same if p.name in parameters]
    assert [*parameters] == [*(p.name for p in shared), *own]
    assert all(parameters[option].default == own[option] for option in own)
    assert all(parameters[p.name].default == p.default for p in shared)


def test_what_is_public():
    assert {*FUNCTIONS, "plan", "primitive", "Plan", "Limits"} < {*jaxsoftmax.__all__}
    assert {*jaxsoftmax.primitive.__all__} == {*FUNCTIONS}
    assert all(hasattr(jaxsoftmax, name) for name in jaxsoftmax.__all__)
    assert isinstance(jaxsoftmax.__version__, str)


@pytest.mark.parametrize("axis", [2, -3, 17, (0, 5), (-4,)], ids=str)
@every_function
def test_axis_out_of_range(name, axis):
    number = axis[-1] if isinstance(axis, tuple) else axis
    same_error(name, X, axis, says=rf"{number}(?!\d).*-?2")


@pytest.mark.parametrize("axis", [(0, 0), (0, -2), (1, 0, -1)], ids=str)
@every_function
def test_axis_repeated(name, axis):
    same_error(name, X, axis, says=re.escape(str(axis)))


@pytest.mark.parametrize("axis", [1.0, (1.5,), (None,), object()], ids=lambda a: type(a).__name__)
@every_function
def test_axis_not_an_integer(name, axis):
    same_error(name, X, axis, says="axis.*int")


@pytest.mark.parametrize("axis", [np.int64(1), np.int8(-1), [0], [1, 0], True], ids=repr)
@every_function
def test_unusual_axis_that_jax_takes(name, axis):
    hashable = tuple(axis) if isinstance(axis, list) else axis  # jax.nn.log_softmax asks for it
    close(ours(name, axis)(X), theirs(name, hashable)(X))


@pytest.mark.parametrize(
    "x",
    [[1.0, 2.0], (1.0,), None, "a", {}, object(), np.array(["a"])],
    ids=lambda x: type(x).__name__,
)
@every_function
def test_not_an_array(name, x):
    same_error(name, x, says=re.escape(type(x).__name__))


@pytest.mark.parametrize("x", [1.0, 3, np.float32(2), np.zeros(())], ids=repr)
@every_function
def test_zero_dimensions(name, x):
    same_error(name, x, -1, says="-1")
    close(ours(name, None)(x), theirs(name, None)(x))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_bool_raises(name):
    same_error(name, X > 0, says="(?=.*bool)(?=.*float)")


def test_bool_that_jax_takes():
    close(ours("logsumexp")(X > 0), theirs("logsumexp")(X > 0))
    for name in FUNCTIONS:
        where = X < 1
        close(ours(name, where=where)(X > 0), theirs(name, where=where)(X > 0))


INTEGERS = ["int8", "uint8", "int16", "uint32", "int32", "int4", "uint4"]
FORMULA = ["complex64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FORMULA])
@every_function
def test_dtypes_without_a_kernel(name, dtype):
    """Shape and dtype as jax.nn; values as of the same numbers in float32 (jax.nn itself wraps
    unsigned differences round, makes NaN of float8_e4m3fn and refuses log_softmax of 4 bits)."""
    x = jnp.asarray(np.abs(X) * 1.5 if "u" in dtype else X * 1.5).astype(dtype)
    if dtype == "complex64":
        x = x + 1j
    got, like = ours(name)(x), "softmax" if "int4" in dtype and name == "log_softmax" else name
    want = theirs(like)(x)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.dtype == jnp.float32 or dtype in FORMULA
    if dtype != "complex64":
        want = theirs(name)(x.astype(jnp.float32)).astype(got.dtype)
    close(got, want, rtol=0.13 if "float8" in dtype else 1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.int64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("x64", [False, True])
@every_function
def test_64_bit_input(name, dtype, x64):
    with jax.enable_x64(x64):
        close(ours(name)(X.astype(dtype)), theirs(name)(X.astype(dtype)))


@pytest.mark.parametrize("x", [1.0, 2, np.float16(1), jnp.bfloat16(1)], ids=repr)
@every_function
def test_weak_types(name, x):
    weak = jnp.full((4,), x) if isinstance(x, (int, float)) else jnp.asarray([x] * 4)
    got, want = ours(name)(weak), theirs(name)(weak)
    assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
    assert (got * jnp.float16(1)).dtype == (want * jnp.float16(1)).dtype


@pytest.mark.parametrize("path", ["onepass", "", "ONE_PASS", "auto"])
@every_function
def test_unknown_path(name, path):
    error = raised(ours(name, path=path), X)
    assert isinstance(error, ValueError)
    assert repr(path) in str(error) and all(path in str(error) for path in (*PATHS, *SEED_PLANS))


@pytest.mark.parametrize("path", [3, 1.5, b"one_pass", ("one_pass",)], ids=repr)
@every_function
def test_path_of_a_wrong_type(name, path):
    error = raised(ours(name, path=path), X)
    assert isinstance(error, TypeError)
    assert repr(path) in str(error) and "Plan" in str(error)


@pytest.mark.parametrize("options", [{"where": X > 0}, {"b": 2.0}, {"return_sign": True}], ids=str)
def test_path_is_checked_where_a_formula_runs(options):
    for path, kind in (("auto", ValueError), (3, TypeError)):
        assert isinstance(raised(ours("logsumexp", path=path, **options), X), kind)
    ours("logsumexp", path="one_pass", **options)(X)


@pytest.mark.parametrize("rule", ILLEGAL)
@every_function
def test_illegal_plan_raises_before_anything_runs(name, rule):
    """Tracing alone is enough: no compilation, no execution."""
    numbers, says = ILLEGAL[rule]
    function, x = ours(name, path=Plan(**numbers)), np.zeros((2, 256), np.float32)
    with pytest.raises(ValueError, match=says):
        function(x)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(function, x)


@pytest.mark.parametrize("path", PATHS)
@every_function
def test_paths_and_plans_are_taken(name, path):
    chosen = jaxsoftmax.plan(name, "float32", 3, 4, path=path)
    assert chosen.path == path
    for given in (path, chosen):
        close(ours(name, path=given)(X), theirs(name)(X))


@every_function
def test_a_row_too_long_names_what_the_plan_holds(name):
    x = np.zeros((1, 40000), np.float16)
    says = f"one_pass holds 32768 columns of float16 {name}, got 40000"
    with pytest.raises(ValueError, match=says):
        ours(name, path="packed")(x)
