"""Each op's oracle in a wider float, the contract's bounds, and errors in ulps.

A small judge of its own: the test suite's oracle is another, and neither imports the other. The
wider float is float64, and long double for float64. Errors of the logarithms count beyond an
absolute one of SLACK.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

# The contract, in ulps of the output's dtype: of each element, or, where products are subtracted,
# of a row's largest term.
FORWARD_BOUND = {"float16": 1.0, "bfloat16": 1.0, "float32": 4.0, "float64": 4.0}
BACKWARD_BOUND = 2.0
OF_TERMS = ("softmax_bwd", "log_softmax_bwd")
SLACK = {"float16": 2.0**-23, "bfloat16": 2.0**-23, "float32": 2.0**-23, "float64": 2.0**-51}


def bound(op: str, dtype: str) -> float:
    return BACKWARD_BOUND if op in OF_TERMS else FORWARD_BOUND[dtype]


def ulp(value: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance between numbers of `dtype` around `value` (not below the smallest normal's)."""
    info = jnp.finfo(dtype)
    exponent = np.maximum(np.frexp(np.abs(value))[1] - 1, info.minexp)
    return np.ldexp(np.ones_like(value), exponent - info.nmant)


@dataclass
class Expected:
    """The oracle's result, the unit of errors, what is free beside it, and below what 0 will do."""

    want: np.ndarray
    unit: np.ndarray
    slack: float
    tiny: Any

    def worst(self, got: np.ndarray) -> float:
        """Largest error in units; infinite where a NaN or an infinity is not where it should be."""
        want = self.want
        if got.shape != want.shape or not np.array_equal(np.isnan(got), np.isnan(want)):
            return float("inf")
        got = got.astype(want.dtype)
        infinite = np.isinf(want) | np.isinf(got)
        if not np.array_equal(got[infinite], want[infinite]):
            return float("inf")
        with np.errstate(invalid="ignore"):
            error = np.maximum(np.abs(got - want) - self.slack, 0) / self.unit
        flushed = (got == 0) & (np.abs(want) < self.tiny)
        error[np.isnan(want) | infinite | flushed] = 0
        return float(np.max(error, initial=0))


def _wide(dtype: Any) -> Any:
    return np.longdouble if dtype == np.float64 else np.float64


def _row_stats(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's maximum and its sum of exp(x - maximum), as columns."""
    top = x.max(axis=-1, keepdims=True)
    return top, np.exp(x - top).sum(axis=-1, keepdims=True)


def _softmax(x: np.ndarray) -> np.ndarray:
    top, total = _row_stats(x)
    return np.exp(x - top) / total


def expected(op: str, operands: Sequence[np.ndarray]) -> Expected:
    """The oracle on operands as the primitive takes them; a row is the last axis."""
    dtype = operands[0].dtype
    tiny: Any = float(jnp.finfo(dtype).tiny)
    with np.errstate(all="ignore"):
        want, size = ORACLES[op](*(a.astype(_wide(dtype)) for a in operands))
        unit = ulp(size, dtype)
    slack = SLACK[dtype.name] if op in ("log_softmax", "logsumexp") else 0.0
    if op == "logsumexp_bwd":  # g times what may have been below the smallest normal
        g = np.maximum(np.abs(operands[3].astype(want.dtype))[:, None], 1)
        unit, tiny = np.maximum(unit, g * ulp(np.zeros_like(g), dtype)), tiny * g
    return Expected(want, unit, slack, tiny)


# An oracle gives the result and the size whose ulp is the unit.
Oracle = Callable[..., tuple[np.ndarray, np.ndarray]]


def softmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (y := _softmax(x)), y


def softmax_bwd(y: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    t = (y * dy).sum(axis=-1, keepdims=True)
    return y * (dy - t), (np.abs(y) * (np.abs(dy) + np.abs(t))).max(axis=-1, keepdims=True)


def log_softmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    top, total = _row_stats(x)
    return (y := (x - top) - np.log(total)), y


def logsumexp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    top, total = (a[..., 0] for a in _row_stats(x))
    log = np.log(total)
    want = np.where(np.isinf(top), top, top + log)
    return want, np.maximum(np.maximum(np.abs(top), np.abs(log)), np.abs(want))


def log_softmax_bwd(dy: np.ndarray, x: np.ndarray, top: np.ndarray, total: np.ndarray) -> Any:
    p, t = np.exp(x - top[:, None]) / total[:, None], dy.sum(axis=-1, keepdims=True)
    return dy - p * t, (np.abs(dy) + p * np.abs(t)).max(axis=-1, keepdims=True)


def logsumexp_bwd(x: np.ndarray, top: np.ndarray, total: np.ndarray, g: np.ndarray) -> Any:
    dx = g[:, None] * np.exp(x - top[:, None]) / total[:, None]
    return dx, dx


ORACLES: dict[str, Oracle] = {
    f.__name__: f
    for f in (softmax, softmax_bwd, log_softmax, log_softmax_bwd, logsumexp, logsumexp_bwd)
}


def hard_rows(n: int, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Rows of n columns on which a softmax goes wrong first: specials come last."""
    rows = [
        rng.normal(size=n),
        rng.normal(size=n) * 30,
        rng.uniform(-1e4, 1e4, size=n),
        rng.integers(0, 3, size=n),
        np.zeros(n),
        np.where(np.arange(n) == 0, 0, -0.357),
        np.where(rng.random(n) < 0.5, -np.inf, rng.normal(size=n)),
        *(np.where(np.arange(n) == i, -1e4, -np.inf) for i in (0, n // 2, n - 1)),
        np.full(n, -np.inf),
        np.where(np.arange(n) == n - 1, np.inf, 0),
        np.where(np.arange(n) == n // 3, np.nan, 0),
    ]
    return np.stack(rows).astype(dtype)


def hard_operands(op: str, x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """The op's operands made from hard rows x: the statistics and y rounded as a kernel's are."""
    if op in ("softmax", "log_softmax", "logsumexp"):
        return (x,)
    wide = x.astype(_wide(x.dtype))
    dy = (rng.normal(size=x.shape) * 10).astype(x.dtype)
    with np.errstate(all="ignore"):
        if op == "softmax_bwd":
            return _softmax(wide).astype(x.dtype), dy
        top, total = (a[:, 0] for a in _row_stats(wide))
    acc = np.float64 if x.dtype == np.float64 else np.float32
    if op == "log_softmax_bwd":
        return dy, x, top.astype(acc), total.astype(acc)
    total = np.where(np.isinf(top), 1, total)
    return x, top.astype(acc), total.astype(acc), rng.normal(size=len(x)).astype(x.dtype)
