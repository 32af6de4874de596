"""Scaled gradients of float64 rows in which every rounding counts: factors lie just above a power
of two, where a rounding is largest, the result just below one, where the bound is least.
"""

from __future__ import annotations

import numpy as np
import pytest
from contracts import wide
from runs import run_native_each
from test_loading_native import PLANS, expect

ROWS, N, SCALE = 3000, 17, np.float64(1.93)


def above(rng: np.random.Generator, value: float, columns: int = 1) -> np.ndarray:
    return value * (1 + 0.02 * rng.random((ROWS, columns)))


def softmax_bwd(rng) -> list[np.ndarray]:
    """y * (dy - t) * scale = 0.5 * (1 + 1) * 1.93 in the first column, the largest of its row."""
    y = np.hstack([above(rng, 0.5), above(rng, 0.1, N - 1)])
    return [y, np.hstack([above(rng, 1), -above(rng, 1.5 / 1.6, N - 1)])]


def log_softmax_bwd(rng) -> list[np.ndarray]:
    """(dy - p * t) * scale = (1 + 0.5 * 2) * 1.93 in the first column: of its dy, and e^-0.69."""
    dy = np.hstack([above(rng, 1), -above(rng, 3 / 16, N - 1)])
    x = np.hstack([np.log(above(rng, 0.5)), np.full((ROWS, N - 1), -5.0)])
    return [dy, x / SCALE, np.zeros(ROWS), np.ones(ROWS)]


@pytest.mark.parametrize("rows", [softmax_bwd, log_softmax_bwd])
def test_scaled_rows_within_the_contract(platform, rows):
    op, (first, second, *stats) = rows.__name__, rows(np.random.default_rng(61))
    dy = wide(second if op == "softmax_bwd" else first) * wide(SCALE)
    moved = (first, dy) if op == "softmax_bwd" else (dy, second * SCALE)
    expected = expect(op, first.dtype, *moved, *stats)
    each = [{"scaled": True} | plan.attributes() for plan in PLANS.values()]
    for (found,) in run_native_each(op, first, second, *stats, SCALE, each=each):
        expected.check(found)
