"""Worst error in ulps against the judge's oracle, for every op, dtype and path, on hard rows."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from jaxsoftmax import _limits, _plan, _primitive

from . import candidates, judge
from .ops import OPS
from .timing import on_gpu

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


def sampled(arrays: Sequence[Any], elements: int = 1 << 22) -> list[np.ndarray]:
    """First and last rows of large arrays, and what belongs to these rows: about so many elements
    of the first one (one row at least)."""
    rows, n = arrays[0].shape
    take = max(1, elements // n)
    if take >= rows:
        return [np.asarray(a) for a in arrays]
    ends = slice(take // 2), slice(rows - (take - take // 2), rows)
    return [np.concatenate([np.asarray(a[end]) for end in ends]) for a in arrays]


def error(op: str, operands: Sequence[Any], result: Any) -> float:
    """Worst ulp of a large result's sample; infinite where any of it is not even near."""
    if not near(op, tuple(operands), result):
        return float("inf")
    *few, got = sampled([*operands, result])
    return judge.expected(op, few).worst(got)


# Of a large array the oracle sees a sample only: this looks at all of it, on the device.


@functools.partial(jax.jit, static_argnames="op")
def near(op: str, operands: tuple[jax.Array, ...], got: jax.Array) -> jax.Array:
    """Whether all of a result is within some ulps of jnp's, itself off by 1e-4 at most."""
    wide = jnp.promote_types(got.dtype, jnp.float32)
    want, size = _near(op, *(a.astype(wide) for a in operands))
    info, ulps = jnp.finfo(got.dtype), judge.bound(op, got.dtype.name)
    # Below the smallest normal float16 has its ulps still; elsewhere 0 will do.
    least = ulps * float(info.smallest_subnormal) if got.dtype == jnp.float16 else float(info.tiny)
    return jnp.all(jnp.abs(got.astype(wide) - want) <= (4 * info.eps + 1e-4) * size + least)


def _near(op: str, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What jnp makes of it, and of what size the errors are a part."""
    if op == "softmax":
        return (y := jax.nn.softmax(operands[0])), y
    if op in ("log_softmax", "logsumexp"):
        y = getattr(jax.nn, op)(operands[0], axis=-1)
        return y, jnp.maximum(jnp.abs(y), 1)
    if op == "softmax_bwd":
        y, dy = operands
        t = jnp.sum(y * dy, axis=-1, keepdims=True)
        return y * (dy - t), jnp.max(y * (jnp.abs(dy) + jnp.abs(t)), axis=-1, keepdims=True)
    if op == "log_softmax_bwd":
        dy, x, top, total = operands
        p = jnp.exp(x - top[:, None]) / total[:, None]
        t = jnp.sum(dy, axis=-1, keepdims=True)
        return dy - p * t, jnp.max(jnp.abs(dy) + p * jnp.abs(t), axis=-1, keepdims=True)
    x, top, total, g = operands
    dx = g[:, None] * jnp.exp(x - top[:, None]) / total[:, None]
    return dx, jnp.abs(dx)


def every_path(
    quick: bool, dtypes: Iterable[str] = tuple(_plan.DTYPES), ops: Iterable[str] = tuple(OPS)
) -> Iterator[Result]:
    """Checks op x dtype x path x length, every path and kind forced, where the plan is legal."""
    for op in ops:
        for dtype in dtypes:
            for n in QUICK_LENGTHS if quick else LENGTHS:
                rng = np.random.default_rng(n)
                with np.errstate(over="ignore"):
                    x = judge.hard_rows(n, jnp.dtype(dtype), rng)
                operands = judge.hard_operands(op, x, rng)
                expected = judge.expected(op, operands)
                for name, plan in _forced(op, dtype, (len(x), n)).items():
                    worst, failed = float("inf"), ""
                    with jax.enable_x64(True):
                        try:
                            given = [jnp.asarray(a) for a in operands]
                            got = _primitive.bind(op, *given, axes=(-1,), path=plan)
                            worst = expected.worst(np.asarray(got))
                        except jax.errors.JaxRuntimeError as error:
                            failed = str(error)
                    yield Result(op, dtype, name, n, worst, judge.bound(op, dtype), failed)


def _forced(op: str, dtype: str, shape: tuple[int, int]) -> dict[str, Any]:
    """What to force on a shape: the names of paths, and a plan of each kind that has no name."""
    legal: dict[str, Any] = {}
    for name in (*_plan.PATHS, *_plan.SEED_PLANS):
        with contextlib.suppress(ValueError):  # this path does not hold this length
            plan_here(op, dtype, shape, name)
            legal[name] = name
    kinds = candidates.by_kind(op, dtype, *shape, limits_here())
    return legal | {name: plan for name, plan in kinds.items() if name not in legal}
