"""The grids of shapes, the rotated input buffers, and the functions that are timed on them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxsoftmax
from jaxsoftmax import _plan

from .check import plan_here
from .timing import Case, TimingError

Shape = tuple[int, int]

# The grid of the article this project starts from: (rows, columns).
SEED: tuple[Shape, ...] = (
    (128, 1024),
    (2048, 1024),
    (2048, 2048),
    (2048, 4096),
    (2048, 8192),
    (4, 16384),
    (4, 32768),
    (4, 65536),
    (4, 114688),
    (4, 262144),
    (4, 1048576),
    (4, 8388608),
    (4, 33554432),
)
# Beside it on a GPU: very short rows, an odd vocabulary, one row alone.
GPU: tuple[Shape, ...] = (*SEED, (1048576, 64), (8192, 50257), (1, 33554432))
GPU_QUICK: tuple[Shape, ...] = ((128, 1024), (2048, 4096), (4, 262144), (4, 8388608))
# On a CPU no array exceeds 64 MB in float32.
CPU: tuple[Shape, ...] = (
    (128, 1024),
    (2048, 1024),
    (2048, 4096),
    (1024, 16384),
    (65536, 64),
    (64, 50257),
    (4, 16384),
    (4, 262144),
    (4, 1048576),
    (1, 4194304),
)
CPU_QUICK: tuple[Shape, ...] = ((128, 1024), (2048, 1024), (1024, 4096), (4, 65536), (4, 262144))


def parse(text: str) -> list[Shape]:
    """Reads "128x1024,4x65536"; a ValueError names the part that is wrong and the form."""
    shapes = []
    for part in text.split(","):
        fields = part.strip().lower().split("x")
        if len(fields) != 2 or not all(f.isdecimal() and int(f) > 0 for f in fields):
            raise ValueError(
                f"unknown shape {part.strip()!r}: a shape is ROWSxCOLUMNS, both at least 1, "
                "several are separated by commas, for example 128x1024,4x65536"
            )
        shapes.append((int(fields[0]), int(fields[1])))
    return shapes


@dataclass
class Buffers:
    """Inputs of one shape, enough of them that a round trip through all exceeds the cache."""

    x: list[jax.Array]
    dy: list[jax.Array]

    @classmethod
    def make(cls, shape: Shape, dtype: Any, cache_bytes: int, most: int) -> "Buffers":
        size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
        count = max(2, min(most, -(-cache_bytes // size)))
        normal = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
        keys = jax.random.split(jax.random.key(0), 2 * count)
        arrays = [normal(k) for k in keys]
        assert arrays[0].dtype == jnp.dtype(dtype)  # float64 without x64 would be float32
        return cls(arrays[:count], arrays[count:])


def _named(fn: Callable[..., Any], name: str) -> Any:
    fn.__name__ = name  # what a profiler or a dump calls the jitted module
    return jax.jit(fn)


def copies(buffers: Buffers) -> list[Case]:
    """Plain copies (a kernel, the runtime's own) and the triad: the speed of the memory itself."""
    neg = _named(lambda x: lax.neg(x), "copy_kernel")
    add = _named(lambda a, b: a + b, "triad")
    if "negate" not in neg.lower(buffers.x[0]).compile().as_text():
        raise TimingError("XLA removed the copy kernel: its HLO holds no negate")
    one = [(x,) for x in buffers.x]
    return [
        Case("copy_kernel", neg, one),
        Case("copy_runtime", _named(lambda x: jnp.copy(x), "copy_runtime"), one),
        Case("triad", add, list(zip(buffers.x, buffers.dy, strict=True))),
    ]


def gradients(buffers: Buffers, softmax: Callable[..., Any], label: str) -> list[Case]:
    """Forward, backward alone (from the residuals of the forward), and both in one jit."""

    def both(x: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(softmax, x)
        return y, pull(dy)[0]

    forward = _named(lambda x: softmax(x), f"{label}_fwd")
    backward = _named(lambda pull, dy: pull(dy)[0], f"{label}_bwd")
    residuals = jax.jit(lambda x: jax.vjp(softmax, x)[1])
    pairs = list(zip(buffers.x, buffers.dy, strict=True))
    pulls = [(residuals(x), dy) for x, dy in pairs]
    return [
        Case(f"{label}_fwd", forward, [(x,) for x in buffers.x]),
        Case(f"{label}_bwd", backward, pulls),
        Case(f"{label}_both", _named(both, f"{label}_both"), pairs),
    ]


def seed_plans(shape: Shape, dtype: str) -> dict[str, jaxsoftmax.Plan]:
    """The article's five kernels as plans, those that can hold this shape on this device."""
    plans = {}
    for name in _plan.SEED_PLANS:
        with contextlib.suppress(ValueError):  # it does not fit this kernel: a dash in the table
            plans[name] = plan_here("softmax", dtype, shape, name)
    return plans


def forced(buffers: Buffers, plans: dict[str, jaxsoftmax.Plan]) -> list[Case]:
    """One forward case for each forced plan."""
    one = [(x,) for x in buffers.x]
    return [
        Case(name, _named(lambda x, p=plan: jaxsoftmax.softmax(x, path=p), f"seed_{name}"), one)
        for name, plan in plans.items()
    ]
