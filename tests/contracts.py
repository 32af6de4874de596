"""The accuracy contract of every op: its result in a wider float, and how far from it one may be.

A row is the last axis; what has one number a row lacks it. The wider float is float64, and long
double for float64. A new op is one entry in CONTRACTS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

ULPS = {"float16": 1, "bfloat16": 1, "float32": 4, "float64": 4}
BACKWARD_ULPS = 2  # of a row's largest term, where terms cancel


def as_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def wide(array: np.ndarray) -> np.ndarray:
    """The array in the oracle's own precision."""
    return array.astype(np.float64 if array.dtype.itemsize < 8 else np.longdouble)


def smallest_normal(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).smallest_normal)


def arithmetic(dtype: np.dtype) -> np.dtype:
    """The type kernels compute in, and that of statistics: float32 for 16-bit inputs."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def compute_epsilon(dtype: np.dtype) -> float:
    """Spacing at 1 of the type kernels compute in."""
    return float(ml_dtypes.finfo(arithmetic(dtype)).eps)


def spacing(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Distance of neighbouring numbers of `dtype` at `value`; at least the smallest normal's."""
    info = ml_dtypes.finfo(dtype)
    magnitude = np.abs(value).astype(np.float64)
    exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, info.minexp)
    return np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant)


def exp_difference(x: np.ndarray, m: np.ndarray) -> np.ndarray:
    """exp(x - m); in long double, where it would count, with the difference's rounding error."""
    d = x - m
    if x.dtype != np.longdouble:
        return np.exp(d)
    b = d - x
    error = (x - (d - b)) + (-m - b)  # what the subtraction lost (TwoDiff)
    return np.exp(d) * (1 + np.where(np.isfinite(d), error, 0))


def total_bound(dtype: np.dtype, total: np.ndarray) -> np.ndarray:
    """Of the statistics' sum, for inputs of `dtype`: for 16 bits, hardware exponentials will do."""
    if arithmetic(dtype) != dtype:
        return np.abs(total) * 2.0**-15
    return ULPS[dtype.name] * spacing(total, dtype)


@dataclass
class Bounds:
    """What a contract says of one call: values and their bounds, row totals and theirs."""

    want: np.ndarray  # (..., 1) of an op with one number a row
    bound: np.ndarray
    total: np.ndarray | None = None
    total_bound: np.ndarray | None = None
    reduces: bool = False
    flushes: bool = True  # what is below the smallest normal may be 0
    stats: tuple[np.ndarray, np.ndarray] | None = None


def sum_of_exp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """exp(x - max), the maximum, the sum: of each row."""
    top = x.max(axis=-1, keepdims=True, initial=-np.inf)
    terms = exp_difference(x, top)
    return terms, top, terms.sum(axis=-1, keepdims=True)


def rounding(dtype: np.dtype, want: np.ndarray, roundings: int) -> np.ndarray:
    """How far the rounding of its elements moves a row's sum: half a spacing each (float16: 2^-25
    where it underflows). Other dtypes than float16 may flush what underflows."""
    flushed = 0 if dtype == np.float16 else want.shape[-1] * smallest_normal(dtype)
    return 0.505 * roundings * spacing(want, dtype).sum(axis=-1) + flushed


def softmax_bounds(dtype: np.dtype, x: np.ndarray) -> Bounds:
    terms, _, s = sum_of_exp(x)
    want = terms / s
    # Beside the elements' rounding, that of the sum, its reciprocal and the map.
    slack = 2 * compute_epsilon(dtype)
    return Bounds(
        want,
        ULPS[dtype.name] * spacing(want, dtype),
        np.ones(want.shape[:-1], want.dtype),
        rounding(dtype, want, 1) + slack,
    )


def near_zero(dtype: np.dtype) -> float:
    """Where a logarithm is near 0 it cannot be better than its argument, which in double a
    rescaling may have rounded twice."""
    return 2.0**-51 if dtype == np.float64 else 2.0**-23


def log_softmax_bounds(dtype: np.dtype, x: np.ndarray) -> Bounds:
    _, top, s = sum_of_exp(x)
    want = (x - top) - np.log(s)
    bound = ULPS[dtype.name] * spacing(want, dtype) + near_zero(dtype)
    return Bounds(want, bound, flushes=False, stats=(top, s))


def logsumexp_bounds(dtype: np.dtype, x: np.ndarray) -> Bounds:
    """In ulps of the largest of what is added up and the result. Beside an infinite maximum the sum
    is 1."""
    _, top, s = sum_of_exp(x)
    log = np.log(s)
    infinite = np.isinf(top)
    want = np.where(infinite, top, top + log)
    largest = np.maximum(np.maximum(np.abs(top), np.abs(log)), np.abs(want))
    return Bounds(
        want,
        ULPS[dtype.name] * spacing(largest, dtype) + near_zero(dtype),
        reduces=True,
        flushes=False,
        stats=(top, np.where(infinite, 1, s)),
    )


def softmax_bwd_bounds(dtype: np.dtype, y: np.ndarray, dy: np.ndarray) -> Bounds:
    t = (y * dy).sum(axis=-1, keepdims=True)
    terms = np.abs(y) * (np.abs(dy) + np.abs(t))
    return cancelling(dtype, y * (dy - t), terms, y, t)


def log_softmax_bwd_bounds(
    dtype: np.dtype, dy: np.ndarray, x: np.ndarray, top: np.ndarray, s: np.ndarray
) -> Bounds:
    p = exp_difference(x, top[..., None]) / s[..., None]
    t = dy.sum(axis=-1, keepdims=True)
    return cancelling(dtype, dy - p * t, np.abs(dy) + p * np.abs(t), p, t)


def cancelling(
    dtype: np.dtype, want: np.ndarray, terms: np.ndarray, p: np.ndarray, t: np.ndarray
) -> Bounds:
    """Of a result that is a difference, of magnitudes that add up to `terms`; t times p is in it.
    The row's sum is t (1 - sum p)."""
    most = np.fmax.reduce(terms, axis=-1, keepdims=True, initial=0)
    bound = BACKWARD_ULPS * spacing(most, dtype)
    # The bound lets t be wrong by bound / max|p|, which the sum sees times sum|p|; and each
    # element rounds.
    largest = np.maximum(np.abs(p).max(axis=-1, initial=0), smallest_normal(dtype))
    reach = np.abs(p).sum(axis=-1) / largest
    return Bounds(
        want,
        np.broadcast_to(bound, want.shape),
        t[..., 0] * (1 - p.sum(axis=-1)),
        bound[..., 0] * reach + spacing(terms, dtype).sum(axis=-1),
    )


def logsumexp_bwd_bounds(
    dtype: np.dtype, x: np.ndarray, top: np.ndarray, s: np.ndarray, g: np.ndarray
) -> Bounds:
    want = g[..., None] * (exp_difference(x, top[..., None]) / s[..., None])
    # exp(x - max) itself may underflow before g multiplies.
    lost = np.abs(g[..., None]) * smallest_normal(arithmetic(dtype))
    total = want.sum(axis=-1)
    slack = 2 * compute_epsilon(dtype) * np.abs(total) + lost[..., 0] * want.shape[-1]
    # exp(x - max) / sum is rounded too: as the result in 32 and 64 bits, much finer in 16.
    roundings = 2 if arithmetic(dtype) == dtype else 1
    bound = ULPS[dtype.name] * spacing(want, dtype) + lost
    return Bounds(want, bound, total, rounding(dtype, want, roundings) + slack)


CONTRACTS: dict[str, Callable[..., Bounds]] = {
    "softmax": softmax_bounds,
    "softmax_bwd": softmax_bwd_bounds,
    "log_softmax": log_softmax_bounds,
    "log_softmax_bwd": log_softmax_bwd_bounds,
    "logsumexp": logsumexp_bounds,
    "logsumexp_bwd": logsumexp_bwd_bounds,
}
