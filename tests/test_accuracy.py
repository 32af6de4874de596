"""The accuracy contract: every op, dtype and path, on hard rows of 1 to 1,000,000 columns."""

from __future__ import annotations

import functools
import itertools

import cases
import numpy as np
import pytest
from contracts import as_dtype
from plans import HAND_PLANS, NAMES, capacity, granted, hand_plans, limits_on, plan_on
from runs import check_each, run

from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, PATHS, SEED_PLANS

SHORT = (1, 2, 3, 1000, *(p + d for p in (8, 32, 64, 128, 256, 1024) for d in (-1, 0, 1)))
MIDDLE = (4095, 4096, 4097, 16385, 50257)
LONG = (114688, 131075, 1_000_000)
HAND_COLUMNS = (1, 2, 3, 7, 9, 33, 65, 129, 257, 1000, 4097)


@functools.lru_cache(maxsize=1)
def rows(dtype: str, n: int) -> np.ndarray:
    if n not in LONG:
        return cases.batch(n, as_dtype(dtype), boundaries=n <= 4097)
    names = cases.HARDEST[: 5 if n == max(LONG) else None]
    x = cases.batch(n, as_dtype(dtype), names, boundaries=False)[: 5 if n == max(LONG) else None]
    return x[::2] if dtype == "float64" else x  # whose oracle, in long double, takes its time


@functools.lru_cache(maxsize=4)
def prepared(op: str, dtype: str, n: int):
    """Inputs and the oracle's result; a gradient's inputs come from those of its op."""
    forward = op.removesuffix("_bwd")
    known = None if op == forward else prepared(forward, dtype, n)[1]
    return cases.expected(op, rows(dtype, n), known)


def may_refuse(path: str, op: str, dtype: str, n: int) -> bool:
    """Whether a row of n columns is beyond what the forced path is there for."""
    if path == "one_pass":
        return n > 4097
    seed = SEED_PLANS.get(path)
    return seed is not None and seed.path == "one_pass" and capacity(seed, op, dtype, n) < n


def size(n: int):
    return pytest.param(n, id=f"n{n}")


@pytest.mark.parametrize("op", OPS)  # the fastest to vary: they share inputs and oracles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [size(n) for n in (*SHORT, *MIDDLE, *LONG)])
def test_contract(platform, op, dtype, n):
    """The planner's own choice and every path that has a name, with the rows' statistics."""
    if n in LONG and not OPS[op].folds:
        pytest.skip("each element for itself: long rows show nothing more")
    inputs, expected = prepared(op, dtype, n)
    held = []
    for path in NAMES:
        try:
            plan = plan_on(platform, op, dtype, inputs[0].shape[0], n, path)
        except ValueError as refusal:
            assert may_refuse(path, op, dtype, n), refusal
            assert f"of {dtype} {op}, got {n}" in str(refusal)
            with pytest.raises(ValueError, match=f"got {n}"):
                run(op, *inputs, path=path)
            continue
        assert path not in PATHS or plan.path == path
        held.append(path)
    assert held[0] is None and {"two_pass", "split_k"} <= {*held}
    check_each(op, inputs, expected, held)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [size(n) for n in HAND_COLUMNS])
def test_contract_of_unusual_plans(platform, op, dtype, n):
    inputs, expected = prepared(op, dtype, n)
    held = hand_plans(op, dtype, n, platform)
    for name, make in HAND_PLANS.items():
        plan = make(OPS[op].inputs)
        if name not in held and granted(plan, dtype, limits_on(platform)):
            with pytest.raises(ValueError, match=f"of {dtype} {op}, got {n}"):
                run(op, *inputs, path=plan)
    check_each(op, inputs, expected, [*held.values()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_full_used_range(platform, op, dtype):
    """Rows of a maximum and one other, at every depth until exp is 0: the map's own error."""
    lowest = {"float64": 746.0, "float16": 18.0}.get(dtype, 105.0)
    depth = np.linspace(0, lowest, 3001)
    x = np.full((3 * depth.size, 5), -np.inf)
    x[:, 2] = np.repeat([0, 0.3, 1000], depth.size)
    x[:, 4] = x[:, 2] - np.tile(depth, 3)
    inputs, expected = cases.expected(op, x.astype(as_dtype(dtype)))
    check_each(op, inputs, expected, PATHS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_random_rows(platform, op, dtype):
    """Many rows of random length-333 data: odd alignments, and values no generator chose."""
    rng = np.random.default_rng(11)
    scale = np.exp2(rng.uniform(-10, 8, (300, 1)))
    x = (rng.standard_normal((300, 333)) * scale + rng.standard_normal((300, 1))).astype(
        as_dtype(dtype)
    )
    inputs, expected = cases.expected(op, x)
    check_each(op, inputs, expected, PATHS)
    check_each(op, inputs, expected, PATHS, stats=False)


@pytest.mark.parametrize("n", [3, 65, 257, 2446])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["log_softmax", "logsumexp"])
def test_one_element_outweighs_the_others(cpu, op, dtype, n):
    """Near 0 the logarithm is what the others add to a term of 1, in which they are rounded.
    On a GPU 16-bit rows err here by up to 2^-21, twice what is allowed (a simulation says)."""
    rng = np.random.default_rng(n)
    x = rng.choice([0, 3, -7, 1.37, 4.47], (400, 1)) + rng.choice([0, 1], (400, 1)) * (
        rng.standard_normal((400, n))
    )
    x[np.arange(400), rng.integers(0, n, 400)] += rng.uniform(1, 40, 400)
    inputs, expected = cases.expected(op, x.astype(as_dtype(dtype)))
    for path in PATHS:
        expected.check(run(op, *inputs, path=path))


def test_the_grid_covers_the_contract():
    """The columns span 1 to 1,000,000, and every unusual plan holds rows of some length."""
    assert min(SHORT) == 1 and max(LONG) == 1_000_000
    every = itertools.product(OPS, DTYPES, HAND_COLUMNS)
    seen = {name for op, dtype, n in every for name in hand_plans(op, dtype, n)}
    assert seen == {*HAND_PLANS}
