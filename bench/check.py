"""Worst error in ulps against a float64 oracle, for every op, dtype and path, on hard rows.

A small judge of its own: the test suite's oracle is another, and neither imports the other.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from jaxsoftmax import _limits, _ops, _plan, _primitive

from . import candidates
from .timing import on_gpu

# The contract, in ulps of the output's dtype. Backward: of the largest term that is subtracted.
FORWARD_BOUND = {"float16": 1.0, "bfloat16": 1.0, "float32": 4.0, "float64": 4.0}
BACKWARD_BOUND = 2.0
LENGTHS = (1, 7, 257, 1000, 4096, 8191, 50257, 131072)
QUICK_LENGTHS = (8, 4099)


@dataclass(frozen=True)
class Result:
    """One verdict; `ulp` is infinite where a NaN, an infinity or a whole row is wrong, or where it
    did not run at all: `error` says why."""

    op: str
    dtype: str
    path: str
    columns: int
    ulp: float
    bound: float
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.ulp <= self.bound


def limits_here() -> _limits.Limits:
    """The limits of the device that JAX uses: it may have been told to leave a GPU alone."""
    return _limits.resolve(None if on_gpu() else "cpu")


def plan_here(op: str, dtype: str, shape: tuple[int, int], path: Any = None) -> jaxsoftmax.Plan:
    """The plan for the device that JAX uses."""
    return jaxsoftmax.plan(op, dtype, *shape, limits=limits_here(), path=path)


def _wide(dtype: Any) -> Any:
    return np.longdouble if dtype == np.float64 else np.float64


def ulp(value: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance between numbers of `dtype` around `value` (not below the smallest normal's)."""
    info = jnp.finfo(dtype)
    exponent = np.maximum(np.frexp(np.abs(value))[1] - 1, info.minexp)
    return np.ldexp(np.ones_like(value), exponent - info.nmant)


def worst(got: np.ndarray, want: np.ndarray, unit: np.ndarray, tiny: float) -> float:
    """Largest |got - want| in `unit`s; NaNs must be at the same places; below `tiny` 0 will do."""
    if got.shape != want.shape or not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("inf")
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(want.dtype) - want) / unit
    error[np.isnan(want) | ((got == 0) & (np.abs(want) < tiny))] = 0
    return float(np.max(error, initial=0))


def softmax_oracle(x: np.ndarray) -> np.ndarray:
    wide = x.astype(_wide(x.dtype))
    with np.errstate(invalid="ignore"):
        e = np.exp(wide - wide.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)


def forward_error(x: np.ndarray, y: np.ndarray) -> float:
    """Worst ulp of a softmax y of x."""
    want = softmax_oracle(x)
    return worst(y, want, ulp(want, y.dtype), float(jnp.finfo(y.dtype).tiny))


def backward_error(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> float:
    """Worst error of the gradient dx on the kernel's own y, in ulps of a row's largest term."""
    wide = _wide(y.dtype)
    v, d = y.astype(wide), dy.astype(wide)
    t = (v * d).sum(axis=-1, keepdims=True)
    term = (np.abs(v) * (np.abs(d) + np.abs(t))).max(axis=-1, keepdims=True)
    return worst(dx, v * (d - t), ulp(term, dx.dtype), float(jnp.finfo(dx.dtype).tiny))


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


def sampled(array: Any, elements: int = 1 << 22) -> Any:
    """First and last rows of a large array, about `elements` in all (one row at least)."""
    rows, n = array.shape
    take = max(1, elements // n)
    if take >= rows:
        return array
    return jnp.concatenate([array[: take // 2], array[rows - (take - take // 2) :]])


# Of a large array the oracle sees a sample only: these two look at all of it, on the device.


def _near(got: jax.Array, want: jax.Array, size: jax.Array, ulps: float) -> jax.Array:
    """Whether got is within some ulps of `size` of want, itself off by 1e-4 of it at most."""
    info = jnp.finfo(got.dtype)
    # Below the smallest normal float16 has its ulps still; elsewhere 0 will do.
    least = ulps * float(info.smallest_subnormal) if got.dtype == jnp.float16 else float(info.tiny)
    return jnp.all(jnp.abs(got.astype(want.dtype) - want) <= (4 * info.eps + 1e-4) * size + least)


@jax.jit
def like_jax(x: jax.Array, y: jax.Array) -> jax.Array:
    """Whether all of y is near jax.nn's softmax of x."""
    want = jax.nn.softmax(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return _near(y, want, want, FORWARD_BOUND[y.dtype.name])


@jax.jit
def gradient_like_jnp(y: jax.Array, dy: jax.Array, dx: jax.Array) -> jax.Array:
    """Whether all of dx is near y * (dy - sum(y * dy)), measured by a row's largest term."""
    wide = jnp.promote_types(y.dtype, jnp.float32)
    v, d = y.astype(wide), dy.astype(wide)
    t = jnp.sum(v * d, axis=-1, keepdims=True)
    term = jnp.max(v * (jnp.abs(d) + jnp.abs(t)), axis=-1, keepdims=True)
    return _near(dx, v * (d - t), term, BACKWARD_BOUND)


def _one(op: str, x: np.ndarray, path: Any, rng: np.random.Generator) -> float:
    if op == "softmax":
        return forward_error(
            x, np.asarray(_primitive.bind(op, jnp.asarray(x), axes=(-1,), path=path))
        )
    if op != "softmax_bwd":
        raise NotImplementedError(f"bench/check.py has no oracle for op {op!r}: add one here")
    y = softmax_oracle(x).astype(x.dtype)
    dy = (rng.normal(size=y.shape) * 10).astype(x.dtype)
    dx = _primitive.bind(op, jnp.asarray(y), jnp.asarray(dy), axes=(-1,), path=path)
    return backward_error(y, dy, np.asarray(dx))


def every_path(
    quick: bool, dtypes: Iterable[str] = tuple(_plan.DTYPES), ops: Iterable[str] = tuple(_ops.OPS)
) -> Iterator[Result]:
    """Checks op x dtype x path x length, every path and kind forced, where the plan is legal."""
    for op in ops:
        for dtype in dtypes:
            for n in QUICK_LENGTHS if quick else LENGTHS:
                rng = np.random.default_rng(n)
                x = hard_rows(n, jnp.dtype(dtype), rng)
                for name, plan in _forced(op, dtype, (len(x), n)).items():
                    bound = FORWARD_BOUND[dtype] if op == "softmax" else BACKWARD_BOUND
                    worst_ulp, failed = float("inf"), ""
                    with jax.enable_x64(True), np.errstate(over="ignore"):
                        try:
                            worst_ulp = _one(op, x, plan, rng)
                        except jax.errors.JaxRuntimeError as error:
                            failed = str(error)
                    yield Result(op, dtype, name, n, worst_ulp, bound, failed)


def _forced(op: str, dtype: str, shape: tuple[int, int]) -> dict[str, Any]:
    """What to force on a shape: the names of paths, and a plan of each kind that has no name."""
    legal: dict[str, Any] = {}
    for name in (*_plan.PATHS, *_plan.SEED_PLANS):
        with contextlib.suppress(ValueError):  # this path does not hold this length
            plan_here(op, dtype, shape, name)
            legal[name] = name
    kinds = candidates.by_kind(op, dtype, *shape, limits_here())
    return legal | {name: plan for name, plan in kinds.items() if name not in legal}
