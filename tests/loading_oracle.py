"""What a masked, scaled, causal call must give: the contracts of the rows' elements that count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from contracts import arithmetic, total_bound, wide
from oracle import Expected

if TYPE_CHECKING:
    from loading import Call, Data


class Wide:
    """An array, in its own precision, that stands for a result of another dtype."""

    def __init__(self, array: np.ndarray, dtype: Any):
        self.array, self.dtype = array, np.dtype(dtype)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.array


class Oracle:
    """What a call must give on its data: the contracts, on the product of x and scale as it is
    rounded to the type of arithmetic, the rest of the rows left out."""

    def __init__(self, call: Call, data: Data, every: int = 1):
        self.call, self.data, self.every, x = call, data, every, data.x
        self.axes = call.axes(x.ndim)
        with np.errstate(all="ignore"):
            product = x if data.scale is None else x.astype(arithmetic(x.dtype)) * data.scale
        # Where nothing counts its value must not matter: -inf has no part in a row.
        self.z = self.rows(np.where(data.keep, product, x.dtype.type(-np.inf)))
        self.masked = ~self.rows(data.keep)
        self.empty = self.masked.all(axis=-1)
        self.value = self._expected(call.name, data.ct.dtype, self.z)

    def rows(self, a: np.ndarray) -> np.ndarray:
        """As (rows, columns), what has one number a row as (rows,): of `every` so many a row."""
        if a.ndim < self.data.x.ndim:
            return a.reshape(-1)[:: self.every]
        last = tuple(range(-len(self.axes), 0))
        columns = np.prod([a.shape[d] for d in self.axes], dtype=int)
        return np.moveaxis(a, self.axes, last).reshape(-1, columns)[:: self.every]

    def _expected(self, op: str, dtype: np.dtype, first: np.ndarray, *rest: np.ndarray) -> Expected:
        with np.errstate(all="ignore"):
            expected = Expected(op, (Wide(first, dtype), *rest))
        fill = 0 if op == "softmax" or op.endswith("_bwd") else -np.inf
        out = self.empty[:, None] if op == "logsumexp" else self.masked
        expected.want = np.where(out, fill, expected.want)
        expected.bound = np.where(out, 1e-300, expected.bound)  # exactly
        expected.finite = np.isfinite(expected.want)
        expected.rows = expected.rows & ~self.empty
        return expected

    def check(self, y: np.ndarray, dx: np.ndarray) -> None:
        assert y.shape == self.data.ct.shape and dx.shape == self.data.x.shape
        self.value.check(self.rows(y))
        self._gradient(y).check(self.rows(dx))

    def _gradient(self, y: np.ndarray) -> Expected:
        """From the y found, or from x and exact statistics: those of the kernel may be off."""
        name, dtype = self.call.name, self.data.x.dtype
        ct = wide(self.rows(self.data.ct))
        with np.errstate(all="ignore"):
            if self.data.scale is not None:
                ct = ct * wide(self.data.scale)
        if name != "logsumexp":
            ct = np.where(self.masked, 0, ct)
        if name == "softmax":
            y = wide(self.rows(y))
            return self._expected("softmax_bwd", dtype, y, ct)
        assert self.value.stats is not None
        top, total = (s[:, 0] for s in self.value.stats)
        with np.errstate(all="ignore"):
            p = np.exp(wide(self.z) - top[:, None]) / total[:, None]
            mixed = dtype != self.data.ct.dtype and dtype != np.float64
            off = total_bound(np.dtype(np.float32) if mixed else dtype, total) / total
        if name == "log_softmax":
            expected = self._expected("log_softmax_bwd", dtype, ct, self.z, top, total)
            return self._loosened(expected, p, off * ct.sum(axis=-1))
        expected = self._expected("logsumexp_bwd", dtype, self.z, top, total, ct)
        return self._loosened(expected, p, off * ct)

    def _loosened(self, expected: Expected, p: Any, shift: Any) -> Expected:
        """For a row's sum that may be off by `shift`, times p."""
        with np.errstate(all="ignore"):
            more = np.where(self.masked, 0, np.abs(np.reshape(shift, (-1, 1)) * p))
            expected.bound = expected.bound + more
            expected.total_bound = expected.total_bound + more.sum(axis=-1)
        return expected
