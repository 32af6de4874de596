"""The planner: legal plans, right for any rows; each path reads as often as it says."""

from __future__ import annotations

import dataclasses
import itertools

import cases
import jax
import numpy as np
import pytest
from contracts import as_dtype
from jax import export
from plans import GPU_ONLY, NAMES, capacity, granted, hand_plans, plan_on
from runs import check_each, run_each

import jaxsoftmax
from jaxsoftmax import Plan, _native
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, LIMITS, PATHS, check

COLUMNS = (
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    33,
    100,
    1000,
    1024,
    1025,
    4096,
    16385,
    50257,
    131072,
    1_000_003,
    2**31 + 5,
)
ROWS = (None, 0, 1, 3, 100, 70000, 2**33)
READS = {"one_pass": 1, "two_pass": 2, "split_k": 2}


@pytest.mark.parametrize("preset", LIMITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_plan_is_legal(op, dtype, preset):
    """Whatever the shape, the planner's own choice passes check, within the device's limits."""
    limits = LIMITS[preset]
    for rows, n in itertools.product(ROWS, COLUMNS):
        plan = jaxsoftmax.plan(op, dtype, rows, n, limits=preset)
        check(plan, op, dtype, n, limits)
        assert plan == jaxsoftmax.plan(op, dtype, rows, n, limits=limits)
        assert plan.why
        if plan.path == "one_pass":
            assert capacity(plan, op, dtype, n) >= n
        assert granted(plan, dtype, limits)


@pytest.mark.parametrize("preset", LIMITS)
@pytest.mark.parametrize("path", NAMES[1:])
@pytest.mark.parametrize("op", OPS)
def test_forced_plans_are_legal_or_refused(op, path, preset):
    for dtype, rows, n in itertools.product(DTYPES, ROWS, COLUMNS):
        try:
            plan = jaxsoftmax.plan(op, dtype, rows, n, limits=preset, path=path)
        except ValueError as refusal:
            assert "holds" in str(refusal) or "shared memory" in str(refusal), refusal
            assert path not in ("two_pass", "split_k", "arbitrary", "splitk")
            continue
        check(plan, op, dtype, n, LIMITS[preset])
        assert path not in PATHS or plan.path == path


def test_printing():
    plan = jaxsoftmax.plan("softmax", "float32", 4, 1000, limits="h200")
    text = str(plan)
    assert plan.path in text and plan.why in text and str(plan.threads) in text
    assert hash(plan) == hash(dataclasses.replace(plan, why="another")) and plan != Plan(
        "two_pass", 32
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.threads = 3


@pytest.mark.parametrize(
    "dtype", [np.float32, np.dtype("float32"), "float32", jax.numpy.float32], ids=repr
)
def test_dtype_spellings(dtype):
    assert jaxsoftmax.plan("softmax", dtype, 4, 100) == jaxsoftmax.plan(
        "softmax", "float32", 4, 100
    )


@pytest.mark.parametrize(
    "arguments, valid",
    [
        (dict(op="gelu"), OPS),
        (dict(dtype="int32"), DTYPES),
        (dict(limits="b9000"), LIMITS),
        (dict(path="three_pass"), PATHS),
    ],
    ids=lambda a: next(iter(a)),
)
def test_bad_arguments_name_what_is_valid(arguments, valid):
    call = {"op": "softmax", "dtype": "float32", "outer": 4, "n": 100, **arguments}
    with pytest.raises(ValueError, match=repr(next(iter(arguments.values())))) as refusal:
        jaxsoftmax.plan(**call)
    assert all(name in str(refusal.value) for name in valid)


def thresholds(platform: str, op: str, dtype: str, rows: int) -> list[int]:
    """Columns (whole packs) from which on the planner answers differently, found by bisection."""
    lane = 16 // DTYPES[dtype]

    def kind(size):
        plan = plan_on(platform, op, dtype, rows, size * lane)
        return plan.path, plan.threads, plan.rows_per_block, plan.reg_packs, min(plan.splits, 2)

    found, grid = [], [1 << k for k in range(18)]
    for low, high in itertools.pairwise(grid):
        while kind(low) != kind(high):
            left, right = low, high
            while right - left > 1:
                middle = (left + right) // 2
                left, right = (middle, right) if kind(middle) == kind(low) else (left, middle)
            found.append(left * lane)
            low = right
    return found


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_either_side_of_every_threshold(platform, op, dtype, rows):
    """The last columns of one choice, one fewer and one more (which starts unaligned)."""
    for n in thresholds(platform, op, dtype, rows):
        for columns in (n - 1, n, n + 1):
            x = cases.make("shifted_rest", 2 if rows > 1 else 1, columns, as_dtype(dtype))
            inputs, expected = cases.expected(op, x)
            check_each(op, inputs, expected, [plan_on(platform, op, dtype, rows, columns)])


@pytest.mark.parametrize("op", OPS)
def test_rows_unknown(platform, op):
    """The plan made without knowing the rows runs right on any number of them."""
    x = cases.make("used_range", 19, 777, as_dtype("float32"))
    plans = [plan_on(platform, op, "float32", None, 777, name) for name in NAMES]
    for rows in (1, 19):
        inputs, expected = cases.expected(op, x[:rows])
        check_each(op, inputs, expected, plans)


def test_symbolic_sizes():
    """Symbolic rows count as unknown; symbolic columns take two_pass, which holds any."""
    b, n = export.symbolic_shape("b, n")
    for op, dtype in itertools.product(OPS, DTYPES):
        assert jaxsoftmax.plan(op, dtype, b, 1000) == jaxsoftmax.plan(op, dtype, None, 1000)
        assert jaxsoftmax.plan(op, dtype, 4, n).path == "two_pass"
        with pytest.raises(ValueError, match="symbolic"):
            jaxsoftmax.plan(op, dtype, 4, n, path="one_pass")


@pytest.mark.parametrize("n", [1, 2, 7, 31, 32, 33, 100, 257, 1000, 4096, 5001])
@pytest.mark.parametrize("op", OPS)
def test_each_path_reads_as_often_as_it_says(op, n):
    """one_pass reads every element of every input once; two_pass and split_k once to fold it and
    once to map it: what is only folded, or only mapped, once."""
    plans = [jaxsoftmax.plan(op, "float32", 3, n, limits="cpu", path=path) for path in PATHS]
    plans += hand_plans(op, "float32", n, "cpu").values()
    assert {plan.path for plan in plans} == {*READS} == {*PATHS}
    for plan in plans:
        counts = _native.count_reads(op, 3, n, plan.attributes())
        assert len(counts) == OPS[op].inputs
        for i, count in enumerate(counts):
            passes = (i < OPS[op].folds) + (not OPS[op].reduces)
            assert count == [min(READS[plan.path], passes)] * (3 * n), plan


@pytest.mark.parametrize("n", [1001, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_same_plan_same_bits(platform, op, dtype, n):
    """The same bits twice; and alone or among other rows, where rows are whole 16-byte packs."""
    inputs, _ = cases.expected(op, cases.make("used_range", 17, n, as_dtype(dtype)))
    plans = [plan_on(platform, op, dtype, 17, n, name) for name in (*PATHS, "medium")]
    held = hand_plans(op, dtype, n, platform)
    plans += [held[name] for name in GPU_ONLY if name in held]
    whole = run_each(op, *inputs, paths=plans, stats=OPS[op].stats)
    for rows in (17, 3, 1) if n == 1024 else (17,):
        part = run_each(op, *(a[-rows:] for a in inputs), paths=plans, stats=OPS[op].stats)
        for plan, some, every in zip(plans, part, whole, strict=True):
            for a, b in zip(some, every, strict=True):
                assert a.tobytes() == b[-rows:].tobytes(), (plan, rows)
