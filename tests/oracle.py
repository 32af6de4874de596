"""The checker: an op's result against its contract, NaN, infinities and row totals included.

Expected(op, inputs)    the oracle's result on these (already rounded) inputs, and its bounds
.check(actual)          AssertionError unless `actual` keeps the contract; the worst error
.check(actual, max, sum)            the same with the rows' statistics, of an op that has them
assert_close(op, actual, inputs)    both in one
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from contracts import CONTRACTS, arithmetic, smallest_normal, spacing, total_bound, wide


class Expected:
    """The oracle's result of `op` on `inputs`, ready to check any number of actual results."""

    def __init__(self, op: str, inputs: Sequence[np.ndarray]):
        self.op, self.dtype = op, inputs[0].dtype
        with np.errstate(all="ignore"):
            bounds = CONTRACTS[op](self.dtype, *(wide(np.asarray(a)) for a in inputs))
        limit = np.asarray(ml_dtypes.finfo(self.dtype).max).astype(bounds.want.dtype)
        overflow = np.abs(bounds.want) >= limit + spacing(limit, self.dtype) / 2
        self.want = np.where(overflow, np.copysign(np.inf, bounds.want), bounds.want)
        self.finite = np.isfinite(self.want)
        self.bound = bounds.bound
        tiny = smallest_normal(self.dtype) if bounds.flushes else 0.0
        self.may_flush = np.abs(self.want) <= tiny + self.bound
        self.rows = self.finite.all(axis=-1)
        self.total, self.total_bound = bounds.total, bounds.total_bound
        self.reduces, self.stats = bounds.reduces, bounds.stats
        self.shape = self.want.shape[: -1 if bounds.reduces else None]

    def rounded(self) -> np.ndarray:
        """The best result there is: the oracle's, rounded once."""
        with np.errstate(all="ignore"):
            return self.want.astype(self.dtype).reshape(self.shape)

    def rounded_stats(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows' statistics, each rounded once."""
        assert self.stats is not None
        with np.errstate(all="ignore"):
            top, total = (s[..., 0].astype(arithmetic(self.dtype)) for s in self.stats)
        return top, total

    def check(self, actual: np.ndarray, *stats: np.ndarray) -> float:
        """The worst error, as a part of its bound."""
        if stats:
            self.check_stats(*stats)
        actual = np.asarray(actual)
        assert actual.dtype == self.dtype, f"{self.op}: dtype {actual.dtype}, expected {self.dtype}"
        assert actual.shape == self.shape, f"{self.op}: shape {actual.shape}, expected {self.shape}"
        if not actual.size:
            return 0.0
        got = wide(actual).reshape(self.want.shape)
        if not (np.isfinite(got) == self.finite).all() or not self.finite.all():
            self._equal("NaN", np.isnan(got), np.isnan(self.want), got)
            self._equal("+inf", got == np.inf, self.want == np.inf, got)
            self._equal("-inf", got == -np.inf, self.want == -np.inf, got)
        with np.errstate(invalid="ignore"):
            error = np.abs(got - self.want).astype(np.float64) / self.bound
        flushed = (got == 0) & self.may_flush
        part = np.where(self.finite & ~flushed, error, 0)
        if not part.max() <= 1:
            count = (~(part <= 1)).sum()
            self._fail(f"{count} elements off, worst {part.max():.3g} x the bound", part, got)
        self._check_totals(got)
        return float(part.max())

    def check_stats(self, top: np.ndarray, total: np.ndarray) -> None:
        """The maximum exactly; the sum within its ulps, in rows where the contract has one."""
        want_top, best = self.rounded_stats()
        for name, actual in {"max": np.asarray(top), "sum": np.asarray(total)}.items():
            what = f"{self.op} {self.dtype} {self.shape}: {name}"
            assert actual.dtype == best.dtype, f"{what} has dtype {actual.dtype}"
            assert actual.shape == best.shape, f"{what} has shape {actual.shape}"
        assert self.stats is not None
        np.testing.assert_array_equal(top, want_top, err_msg=f"{self.op}: max")
        want = self.stats[1][..., 0]
        with np.errstate(invalid="ignore"):
            off = np.abs(wide(np.asarray(total)) - want) / total_bound(self.dtype, want)
        off = np.where(np.isfinite(want), np.nan_to_num(off, nan=np.inf), 0)
        row = np.unravel_index(np.argmax(off), off.shape) if off.size else ()
        assert off.max(initial=0) <= 1, (
            f"{self.op} {self.dtype} {self.shape}: the sum of row {row} is off by {off[row]:.3g} x "
            f"its bound, got {np.asarray(total)[row]!r}, expected {want[row]!r}"
        )

    def _check_totals(self, got: np.ndarray) -> None:
        if self.total is None or self.total_bound is None:
            return
        with np.errstate(invalid="ignore"):
            off = np.where(self.rows, np.abs(got.sum(axis=-1) - self.total) / self.total_bound, 0)
        row = np.unravel_index(np.argmax(off), off.shape)
        assert off[row] <= 1, (
            f"{self.op} {self.dtype} {self.shape}: row {row} sums to {got.sum(axis=-1)[row]!r}, "
            f"expected {self.total[row]!r} within {self.total_bound[row]:.3g}"
        )

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


def assert_close(op: str, actual: np.ndarray, inputs: Sequence[np.ndarray]) -> None:
    Expected(op, inputs).check(actual)
