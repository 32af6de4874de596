"""Masked, scaled, causal calls of the public functions: their data, and all of them in one program.

Call(name, axis, mask, ...)         one call; `mask` names a shape in MASKS
make(call, shape, dtype, ...)       its data
check_calls(calls, shape, dtype)    all of them, in one program, against the contracts: values and
                                    gradients; and once more with NaN and infinities where nothing
                                    counts, which must change no bit. Returns what it found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from contracts import arithmetic, as_dtype
from functions import ours, row_shape
from loading_oracle import Oracle
from plans import limits_on

from jaxsoftmax import _plan
from jaxsoftmax._lowering import view

# A mask's shape, from x's; None is no mask. Those of fewer dimensions serve x of any rank.
MASKS = {
    None: lambda shape: None,
    "key": lambda shape: (*shape[:1], *(1 for _ in shape[1:-1]), shape[-1]),
    "query_key": lambda shape: (*(1 for _ in shape[:-2]), *shape[-2:]),
    "last": lambda shape: shape[-1:],
    "full": lambda shape: shape,
    "scalar": lambda shape: (),
    "query": lambda shape: (shape[-2], 1),
}
PATTERNS = ("random", "alternating", "nothing")
SCALES = (0.37, 0.0, -1.5)
POISON = (np.nan, np.inf, -np.inf, 6e4)


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    axis: Any = -1
    mask: str | None = None
    scaled: bool = False
    causal: bool = False
    dtype: str | None = None  # the result's, if it is not x's
    path: str | None = None

    def function(self, mask: Any, scale: Any):
        options: dict[str, Any] = {"where": mask, "path": self.path}
        if self.name != "logsumexp":
            dtype = self.dtype and as_dtype(self.dtype)
            options |= {"scale": scale, "is_causal": self.causal, "dtype": dtype}
        return ours(self.name, self.axis, **options)

    def axes(self, ndim: int) -> tuple[int, ...]:
        """The axes, negative and sorted."""
        axes = range(ndim) if self.axis is None else np.atleast_1d(self.axis)
        return tuple(sorted(int(a) % ndim - ndim for a in axes))


def variants(name: str, axis: Any = -1, masks=tuple(MASKS), paths=(None,), **fixed) -> list[Call]:
    """A call for each mask and path, with and without a scale where the function has one."""
    scaled = (False,) if name == "logsumexp" else (False, True)
    return [
        Call(name, axis, mask, scale, path=path, **fixed)
        for mask in masks
        for scale in scaled
        for path in paths
    ]


@dataclasses.dataclass
class Data:
    """The operands of a call, and which elements count."""

    x: np.ndarray
    mask: np.ndarray | None
    scale: np.ndarray | None
    ct: np.ndarray
    keep: np.ndarray

    def operands(self) -> tuple[Any, ...]:
        return self.x, self.mask, self.scale, self.ct

    def poisoned(self) -> Data:
        """NaN, infinities and a large number in x and in its cotangent, where nothing counts."""
        poison = np.resize(POISON, self.x.shape)
        x = np.where(self.keep, self.x, poison.astype(self.x.dtype))
        ct = self.ct
        if ct.shape == x.shape:
            ct = np.where(self.keep, ct, poison.astype(ct.dtype))
        return dataclasses.replace(self, x=x, ct=ct)


def mask_of(shape: tuple[int, ...], pattern: str) -> np.ndarray:
    size = int(np.prod(shape))
    if pattern == "alternating":
        return (np.arange(size) % 2 == 0).reshape(shape)
    random = np.random.default_rng([3, *shape]).random(shape) < 0.7
    return np.zeros(shape, bool) if pattern == "nothing" else random | (size == 1)


def make(call: Call, shape: tuple[int, ...], dtype: str, pattern: str, scale: float) -> Data:
    """The alternating pattern comes with x far from 0, where scale * x rounds coarsely."""
    rng = np.random.default_rng([9, *shape])
    x = rng.standard_normal(shape) * 3 + (300 if pattern == "alternating" else 0)
    ct_shape = row_shape(shape, call.axis) if call.name == "logsumexp" else shape
    ct = rng.standard_normal(ct_shape).astype(as_dtype(call.dtype or dtype))
    mask_shape = MASKS[call.mask](shape)
    mask = None if mask_shape is None else mask_of(mask_shape, pattern)
    keep = np.broadcast_to(True if mask is None else mask, shape)
    if call.causal:
        keep = keep & (np.arange(shape[-1]) <= np.arange(shape[-2])[:, None])
    x = x.astype(as_dtype(dtype))
    factor = arithmetic(x.dtype).type(scale) if call.scaled else None
    return Data(x, mask, factor, ct, keep)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


@contextmanager
def noted(*what: Any) -> Iterator[None]:
    """An AssertionError says of which call."""
    try:
        yield
    except AssertionError as error:
        error.add_note(", ".join(map(str, what)))
        raise


def paths_for(
    platform: str,
    call: Call,
    shape: tuple[int, ...],
    dtype: str,
    names: Iterable[str] = _plan.PATHS,
) -> list[str]:
    """The named paths that hold the call's rows, forward and backward; two of them always do."""
    outer, n, inner, contiguous = view(shape, call.axes(len(shape)))
    layouts = ("rows", "loaded") if contiguous else ("columns", "cells")

    def holds(op: str, path: str) -> bool:
        options = {"limits": limits_on(platform), "path": path}
        try:
            for layout in layouts:
                _plan.plan(op, dtype, outer, n, inner, layout=layout, **options)
        except ValueError:
            return False
        return True

    ops = call.name, f"{call.name}_bwd"
    found = [path for path in names if all(holds(op, path) for op in ops)]
    assert {"two_pass", "split_k"} <= {*found}
    return found


def both(call: Call, x: Any, mask: Any, scale: Any, ct: Any) -> tuple[Any, Any]:
    """Value and gradient."""
    y, pull = jax.vjp(call.function(mask, scale), x)
    return y, pull(ct)[0]


def check_calls(
    calls: Iterable[Call],
    shape: tuple[int, ...],
    dtype: str,
    patterns: Iterable[str] = PATTERNS,
    scales: Iterable[float] = SCALES,
    every: int = 1,
) -> list[tuple[Call, Data, np.ndarray, np.ndarray]]:
    calls, found = list(calls), []
    jitted = jax.jit(lambda all: [both(c, *a) for c, a in zip(calls, all, strict=True)])

    def run(data: list[Data]) -> list[tuple[np.ndarray, np.ndarray]]:
        with jax.enable_x64(dtype == "float64"):
            return jax.tree.map(np.asarray, jitted([d.operands() for d in data]))

    for pattern in patterns:
        checked: dict[Any, list] = {}
        for i, scale in enumerate(scales):
            data = [make(call, shape, dtype, pattern, scale) for call in calls]
            plain = run(data)
            dirty = plain if i else run([d.poisoned() for d in data])
            for call, d, results, others in zip(calls, data, plain, dirty, strict=True):
                if i and not call.scaled:
                    continue
                found.append((call, d, *results))
                kind = (dataclasses.replace(call, path=None), scale)
                if any(all(map(same_bits, results, r)) for r in checked.get(kind, [])):
                    continue
                checked.setdefault(kind, []).append(results)
                with noted(call, pattern, scale):
                    Oracle(call, d, every).check(*results)
                    for what, a, b in zip(("value", "gradient"), results, others, strict=True):
                        assert same_bits(a, b), f"what is masked changes the {what}"
    return found
