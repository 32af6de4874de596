"""Oracles of every op in a wider float, errors in ulps of the output dtype, the accuracy contract.

    Expected(op, inputs)    the oracle's result on these (already rounded) inputs, and its bounds
    .check(actual)          AssertionError unless `actual` keeps the contract; the worst ulps
    assert_close(op, actual, inputs)    the two in one
A row is the last axis. The wider float is float64, and long double for float64. A new op is one
entry in CONTRACTS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

SOFTMAX_ULPS = {"float16": 1, "bfloat16": 1, "float32": 4, "float64": 4}
BACKWARD_ULPS = 2


def as_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def wide(array: np.ndarray) -> np.ndarray:
    """The array in the oracle's own precision."""
    return array.astype(np.longdouble if array.dtype == np.float64 else np.float64)


def smallest_normal(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).smallest_normal)


def compute_epsilon(dtype: np.dtype) -> float:
    """Spacing at 1 of the type kernels compute in: float32 for 16-bit inputs."""
    return float(ml_dtypes.finfo(np.float64 if dtype == np.float64 else np.float32).eps)


def spacing(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Distance of neighbouring numbers of `dtype` at `value`; at least the smallest normal's."""
    info = ml_dtypes.finfo(dtype)
    magnitude = np.abs(value)
    exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, info.minexp)
    return np.ldexp(np.ones((), magnitude.dtype), np.maximum(exponent, info.minexp) - info.nmant)


def exp_difference(x: np.ndarray, m: np.ndarray) -> np.ndarray:
    """exp(x - m), the rounding error of the difference carried along."""
    d = x - m
    b = d - x
    error = (x - (d - b)) + (-m - b)  # what the subtraction lost (TwoDiff)
    return np.exp(d) * (1 + np.where(np.isfinite(d), error, 0))


@dataclass
class Bounds:
    """What a contract says of one call: values and their bounds, row totals and theirs."""

    want: np.ndarray
    bound: np.ndarray
    total: np.ndarray
    total_bound: np.ndarray


def softmax_bounds(dtype: np.dtype, x: np.ndarray) -> Bounds:
    terms = exp_difference(x, x.max(axis=-1, keepdims=True))
    want = terms / terms.sum(axis=-1, keepdims=True)
    ulp = spacing(want, dtype)
    # Rounding moves a row's sum by half a spacing an element (float16: 2^-25 where it underflows);
    # the rest is the rounding of the sum, its reciprocal and the map. Other dtypes than float16
    # may flush what underflows.
    slack = 2 * compute_epsilon(dtype)
    if dtype != np.float16:
        slack += x.shape[-1] * smallest_normal(dtype)
    return Bounds(
        want,
        SOFTMAX_ULPS[dtype.name] * ulp,
        np.ones(want.shape[:-1], want.dtype),
        0.505 * ulp.sum(axis=-1) + slack,
    )


def softmax_bwd_bounds(dtype: np.dtype, y: np.ndarray, dy: np.ndarray) -> Bounds:
    t = (y * dy).sum(axis=-1, keepdims=True)
    terms = np.abs(y) * (np.abs(dy) + np.abs(t))
    bound = BACKWARD_ULPS * spacing(terms.max(axis=-1, keepdims=True), dtype)
    # The bound lets t be wrong by bound / max|y|, which the sum sees times sum|y|; and each
    # element rounds.
    largest = np.maximum(np.abs(y).max(axis=-1), smallest_normal(dtype))
    reach = np.abs(y).sum(axis=-1) / largest
    return Bounds(
        y * (dy - t),
        np.broadcast_to(bound, y.shape),
        t[..., 0] * (1 - y.sum(axis=-1)),
        bound[..., 0] * reach + spacing(terms, dtype).sum(axis=-1),
    )


CONTRACTS: dict[str, Callable[..., Bounds]] = {
    "softmax": softmax_bounds,
    "softmax_bwd": softmax_bwd_bounds,
}


class Expected:
    """The oracle's result of `op` on `inputs`, ready to check any number of actual results."""

    def __init__(self, op: str, inputs: Sequence[np.ndarray]):
        self.op, self.dtype, self.shape = op, inputs[0].dtype, inputs[0].shape
        self.tiny = smallest_normal(self.dtype)
        if not inputs[0].size:
            return
        with np.errstate(all="ignore"):
            bounds = CONTRACTS[op](self.dtype, *(wide(np.asarray(a)) for a in inputs))
        limit = ml_dtypes.finfo(self.dtype)
        top = np.asarray(limit.max).astype(bounds.want.dtype)
        overflow = np.abs(bounds.want) >= top + spacing(top, self.dtype) / 2
        self.want = np.where(overflow, np.copysign(np.inf, bounds.want), bounds.want)
        self.finite = np.isfinite(self.want)
        self.bound = bounds.bound
        self.rows = self.finite.all(axis=-1)
        self.total, self.total_bound = bounds.total, bounds.total_bound

    def rounded(self) -> np.ndarray:
        """The best result there is: the oracle's, rounded once."""
        with np.errstate(all="ignore"):
            return self.want.astype(self.dtype)

    def check(self, actual: np.ndarray) -> float:
        actual = np.asarray(actual)
        assert actual.dtype == self.dtype, f"{self.op}: dtype {actual.dtype}, expected {self.dtype}"
        assert actual.shape == self.shape, f"{self.op}: shape {actual.shape}, expected {self.shape}"
        if not actual.size:
            return 0.0
        got = wide(actual)
        self._equal("NaN", np.isnan(got), np.isnan(self.want), got)
        self._equal("+inf", got == np.inf, self.want == np.inf, got)
        self._equal("-inf", got == -np.inf, self.want == -np.inf, got)
        with np.errstate(invalid="ignore"):
            error = np.where(self.finite, np.abs(got - self.want), 0)
        flushed = (got == 0) & (np.abs(self.want) <= self.tiny + self.bound)
        wrong = self.finite & (error > self.bound) & ~flushed
        if wrong.any():
            ratio = np.where(wrong, error / self.bound, 0)
            self._fail(
                f"{wrong.sum()} elements off, worst {ratio.max():.3g} x the bound", ratio, got
            )
        with np.errstate(invalid="ignore"):
            off = np.where(self.rows, np.abs(got.sum(axis=-1) - self.total) / self.total_bound, 0)
        row = np.unravel_index(np.argmax(off), off.shape)
        assert off[row] <= 1, (
            f"{self.op} {self.dtype} {self.shape}: row {row} sums to {got.sum(axis=-1)[row]!r}, "
            f"expected {self.total[row]!r} within {self.total_bound[row]:.3g}"
        )
        with np.errstate(invalid="ignore"):
            ulps = error / spacing(self.want, self.dtype)
        return float(np.max(ulps, where=self.finite & ~flushed, initial=0))

    def _equal(self, what: str, got: np.ndarray, want: np.ndarray, values: np.ndarray) -> None:
        if (got != want).any():
            self._fail(
                f"{what} in {got.sum()} elements, expected in {want.sum()}", got != want, values
            )

    def _fail(self, problem: str, badness: np.ndarray, got: np.ndarray) -> None:
        at = tuple(int(i) for i in np.unravel_index(np.argmax(badness), badness.shape))
        raise AssertionError(
            f"{self.op} {self.dtype} {self.shape}: {problem}; at {at} got {got[at]!r}, "
            f"expected {self.want[at]!r} within {self.bound[at]:.3g}"
        )


def assert_close(op: str, actual: np.ndarray, inputs: Sequence[np.ndarray]) -> float:
    return Expected(op, inputs).check(actual)
