"""Named generators of hard rows, (rng, rows, n, dtype) -> x of shape (rows, n); batches of them.

Many cases travel as rows of one array, so that one compiled call tries them all: batch() for x,
batch_dy() and batch_g() for the cotangents that go with it, op_inputs() for the operands of an op.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from contracts import as_dtype, smallest_normal
from oracle import Expected

Case = Callable[[np.random.Generator, int, int, np.dtype], np.ndarray]
HUGE = {"float16": 65504.0, "bfloat16": 1e30, "float32": 1e30, "float64": 1e300}


def positions(n: int) -> list[int]:
    """Both ends and both sides of powers of two from 8 on: where packs, warps and chunks meet."""
    steps = [1 << k for k in range(3, 21)]
    return sorted({0, n - 1, *(p for s in steps for p in (s - 1, s) if p < n)})


def normal(rng, rows, n, dtype):
    return rng.standard_normal((rows, n)) * 3


def wide(rng, rows, n, dtype):
    return rng.uniform(-1e4, 1e4, (rows, n))


def used_range(rng, rows, n, dtype):
    """Differences over the whole range where exp is not 0, on a large offset."""
    return 1000 + rng.uniform(-60, 30, (rows, n))


def ties(rng, rows, n, dtype):
    return rng.integers(-2, 3, (rows, n)).astype(float)


def equal_runs(rng, rows, n, dtype):
    """Long runs of equal terms: a plain float32 sum drifts here."""
    return np.repeat(rng.standard_normal((rows, n // 512 + 1)), 512, axis=1)[:, :n]


def constant(rng, rows, n, dtype):
    return np.broadcast_to(rng.standard_normal((rows, 1)) * 10, (rows, n))


def one_and_rest(rng, rows, n, dtype):
    """One 0 and the rest -0.357: many equal terms whose exponential is inexact."""
    x = np.full((rows, n), -0.357)
    x[np.arange(rows), rng.integers(0, n, rows)] = 0
    return x


def shifted_rest(rng, rows, n, dtype):
    """The same with m = 0.1 and the rest m - 5.3: their difference rounds, alike in every term."""
    x = np.full((rows, n), as_dtype(dtype.name).type(0.1 - 5.3))
    x[np.arange(rows), rng.integers(0, n, rows)] = 0.1
    return x


def ramp_up(rng, rows, n, dtype):
    """The maximum rises in every chunk: an online sum rescales each time."""
    return np.broadcast_to(np.linspace(-20, 0.1, n), (rows, n)) + rng.standard_normal((rows, 1))


def ramp_down(rng, rows, n, dtype):
    return ramp_up(rng, rows, n, dtype)[:, ::-1]


def staircase(step: float) -> Case:
    """Zeros, then a maximum in each of ten chunks: what an online sum holds is rescaled each time,
    by a factor that rounds."""

    def case(rng, rows, n, dtype):
        x = np.zeros((rows, n))
        chunk = max(1, min(32, n // 12))
        steps = min(10, n // chunk)
        x[:, n - steps * chunk :] = -np.inf
        x[:, n - steps * chunk :: chunk] = step * np.arange(1, steps + 1)
        return x

    return case


def pattern(rng, rows, n, dtype):
    """One 0 and 32 random values repeated: each chunk's sum rounds alike."""
    x = np.tile(rng.uniform(-1, 0, (rows, 32)), n // 32 + 1)[:, :n]
    x[np.arange(rows), rng.integers(0, n, rows)] = 0
    return x


def lane_maxima(rng, rows, n, dtype):
    """Blocks of 8, 16, 32 and 64 columns, each 32nd at one offset: lanes' maxima lie far apart."""
    x = rng.uniform(-1, 0, (rows, n))
    for row, offsets in enumerate(rng.uniform(-80, 0, (rows, 32))):
        x[row] += offsets[np.arange(n) // (8 << row % 4) % 32]
    return x


def max_first(rng, rows, n, dtype):
    x = rng.standard_normal((rows, n))
    x[:, 0] = 9
    return x


def max_last(rng, rows, n, dtype):
    return max_first(rng, rows, n, dtype)[:, ::-1]


def some_neg_inf(rng, rows, n, dtype):
    x = rng.standard_normal((rows, n))
    x[rng.random((rows, n)) < 0.5] = -np.inf
    x[np.arange(rows), rng.integers(0, n, rows)] = 1
    return x


def neg_inf_slices(rng, rows, n, dtype):
    """Whole slices of -inf, as a mask leaves them: only the first or last quarter is finite."""
    x = rng.standard_normal((rows, n))
    quarter = max(1, n // 4)
    x[0::2, quarter:] = -np.inf
    x[1::2, :-quarter] = -np.inf
    return x


def one_hot(rng, rows, n, dtype):
    """All -inf but one finite element, at every position class in turn."""
    x = np.full((rows, n), -np.inf)
    spots = positions(n)
    x[np.arange(rows), [spots[i % len(spots)] for i in range(rows)]] = rng.standard_normal(rows)
    return x


def all_neg_inf(rng, rows, n, dtype):
    return np.full((rows, n), -np.inf)


def planted(*values: float) -> Case:
    """Normal rows with the values planted at random places."""

    def case(rng, rows, n, dtype):
        x = rng.standard_normal((rows, n))
        for value in values:
            x[np.arange(rows), rng.integers(0, n, rows)] = value
        return x

    return case


def huge(rng, rows, n, dtype):
    """Equal huge magnitudes: x*log2(e) - m*log2(e) would be wrong or overflow."""
    return np.full((rows, n), HUGE[dtype.name])


def huge_mixed(rng, rows, n, dtype):
    return rng.choice([-1.0, 0.5, 1.0], (rows, n)) * HUGE[dtype.name]


FINITE: dict[str, Case] = {
    case.__name__: case
    for case in (
        *(normal, wide, used_range, ties, equal_runs, constant, one_and_rest, shifted_rest),
        *(ramp_up, ramp_down, max_first, max_last, some_neg_inf, neg_inf_slices, huge, huge_mixed),
        *(pattern, lane_maxima),
    )
}
FINITE |= {f"staircase_{step}": staircase(step) for step in (1.0371, 8.3, 33)}
SPECIAL: dict[str, Case] = {
    "all_neg_inf": all_neg_inf,
    "pos_inf": planted(np.inf),
    "nan": planted(np.nan),
    "nan_and_infs": planted(np.inf, -np.inf, np.nan),
    "nan_and_neg_inf": planted(-np.inf, np.nan),
    "inf_and_neg_inf": planted(-np.inf, np.inf),
}
CASES: dict[str, Case] = {**FINITE, "one_hot": one_hot, **SPECIAL}
ROWS = {"neg_inf_slices": 2, "pattern": 4, "lane_maxima": 4}  # in a batch; of others one
HARDEST = (
    *("one_and_rest", "shifted_rest", "equal_runs", "staircase_1.0371", "pattern"),
    *("wide", "used_range", "one_hot", "staircase_8.3", "staircase_33", "lane_maxima"),
)


def make(name: str, rows: int, n: int, dtype: np.dtype, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, rows, n, sorted(CASES).index(name)])
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(CASES[name](rng, rows, n, dtype)).astype(dtype)


def batch(n: int, dtype: np.dtype, names=tuple(CASES), *, boundaries: bool = True) -> np.ndarray:
    """A row of each case, or ROWS; of one_hot one for each position (one without `boundaries`)."""
    count = ROWS | {"one_hot": len(positions(n)) if boundaries else 1}
    return np.concatenate([make(name, count.get(name, 1), n, dtype) for name in names])


def batch_dy(x: np.ndarray) -> np.ndarray:
    """Cotangents for x: a different kind each row; infinities and NaN only in every eleventh."""
    rng = np.random.default_rng([7, *x.shape])
    rows, n = x.shape
    dy = rng.standard_normal(x.shape)
    kinds = np.arange(rows)
    dy[kinds % 7 == 1] *= 1e4
    dy[kinds % 7 == 2] = 0.7  # sum of y*dy is then dy: everything cancels
    dy[kinds % 7 == 3] = np.where(np.arange(n) % 2, 1.0, -1.0)
    dy[kinds % 7 == 4] += 100
    dy[kinds % 7 == 5, n // 2] = 3e4
    for row in range(10, rows, 11):
        dy[row, row * 31 % n] = (np.nan, np.inf, -np.inf)[row // 11 % 3]
    return dy.astype(x.dtype)


def batch_g(x: np.ndarray) -> np.ndarray:
    """The same of one number a row."""
    rng = np.random.default_rng([8, *x.shape])
    g = rng.standard_normal(x.shape[0])
    kinds = np.arange(g.size)
    g[kinds % 7 == 1] *= 1e4
    g[kinds % 7 == 2] = 1
    g[kinds % 7 == 3] = 0
    g[kinds % 7 == 4] *= 2.0**-30
    g[10::11] = np.resize([np.nan, np.inf, -np.inf], g[10::11].shape)
    return g.astype(x.dtype)


def some_underflow(x: np.ndarray) -> np.ndarray:
    """Rows in which some exp(x - max) may be 0 in one float and not in another: an infinity times
    that is NaN or infinite."""
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        depth = x.max(axis=-1, keepdims=True) - x
    return ((depth > 60) & (depth < 12_000)).any(axis=-1)


def op_inputs(op: str, x: np.ndarray, forward: Expected | None = None) -> tuple[np.ndarray, ...]:
    """The operands of an op, made from x: x itself, or what its op (`forward`) leaves for the
    gradient, and a cotangent."""
    if not op.endswith("_bwd"):
        return (x,)
    forward = forward or Expected(op.removesuffix("_bwd"), (x,))
    deep = some_underflow(x)
    if op == "logsumexp_bwd":
        g = batch_g(x)
        g[np.isinf(g) & deep] = 1
        return x, *forward.rounded_stats(), g
    dy = batch_dy(x)
    if op == "log_softmax_bwd":
        dy[np.isinf(dy) & deep[:, None]] = 1
        return dy, x, *forward.rounded_stats()
    y = forward.rounded()
    if x.dtype != np.float16:  # what is below the smallest normal may be 0 already
        y[np.abs(y) < smallest_normal(x.dtype)] = 0
    return y, dy


def expected(
    op: str, x: np.ndarray, forward: Expected | None = None
) -> tuple[tuple[np.ndarray, ...], Expected]:
    inputs = op_inputs(op, x, forward)
    return inputs, Expected(op, inputs)
