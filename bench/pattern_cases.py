"""Softmax as models call it, for `--patterns`: shapes, programs of ours and jax.nn's, errors.

A pattern is scaled, masked or causal attention, or another axis. Forward+backward is one program
that returns y and dx.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax

from . import cases, judge
from .shapes import Buffers
from .timing import Case

SCALE = 0.125  # of heads 64 wide
SCALED, KEY, FULL, CAUSAL = "scale", "scale+key mask", "scale+full mask", "scale+causal mask"
PLAIN = "softmax"
MASKED = (KEY, FULL, CAUSAL)
OURS_ALONE = (PLAIN, FULL)  # of attention: what the others are compared with
WHATS = ("fwd", "fwd+bwd")
SAMPLE = 97  # rows compared with a wider float


@dataclass(frozen=True)
class Group:
    """The patterns of one shape, timed in one go."""

    family: str
    shape: tuple[int, ...]
    axis: int = -1
    whats: tuple[str, ...] = WHATS

    @property
    def kinds(self) -> tuple[str, ...]:
        return (PLAIN, SCALED, *MASKED) if self.family == "attention" else (PLAIN,)

    def __str__(self) -> str:
        axis = "" if self.axis == -1 else f" axis={self.axis}"
        return "x".join(map(str, self.shape)) + axis


def grid(gpu: bool, quick: bool) -> tuple[Group, ...]:
    if gpu:
        attention: Any = ((32, 16, 1024, 1024), (8, 16, 2048, 2048), (2, 16, 4096, 4096))
        axes: Any = (((16, 1000, 64, 64), 1), ((64, 19, 256, 256), 1), ((4096, 8192), 0))
        axes += (((32768, 8192), 0), ((256, 128, 512), 1))
        router: Any = ((131072, 64), (131072, 8))
        if quick:
            attention, axes, router = attention[1:2], axes[:1], router[:1]
    else:
        attention, axes = ((2, 2, 64, 64),), (((4, 19, 16, 16), 1), ((128, 64), 0))
        router = ((256, 64),)
        if not quick:
            attention, axes = ((2, 4, 512, 512),), (((4, 100, 64, 64), 1), ((1024, 1024), 0))
    return (
        *(Group("attention", shape) for shape in attention),
        *(Group("axis", shape, axis) for shape, axis in axes),
        *(Group("router", shape, whats=("fwd",)) for shape in router),
    )


def parse(text: str, known: Sequence[Any]) -> list[Any]:
    """What is known of these shapes, "8x16x2048x2048,4096x8192"; ValueError where there is none."""
    found = []
    for part in (p.strip().lower() for p in text.split(",")):
        mine = [group for group in known if str(group).split()[0] == part]
        if not mine:
            shapes = ", ".join(str(group).split()[0] for group in known)
            raise ValueError(f"unknown shape {part!r} of this table: one of {shapes}")
        found += mine
    return found


def units(kind: str, what: str) -> float:
    """Arrays that must move."""
    return {"fwd": 1.5, "fwd+bwd": 3.5}[what] if kind == CAUSAL else {"fwd": 2, "fwd+bwd": 5}[what]


def mask_of(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """What is kept, in the shape a model has it in; of unmasked kinds one True."""
    if kind == KEY:  # sequences from half the length on
        lengths = shape[-1] - np.arange(shape[0]) * (shape[-1] // 2) // shape[0]
        return (np.arange(shape[-1]) < lengths[:, None])[:, None, None, :]
    return np.tri(*shape[-2:], dtype=bool) if kind in (FULL, CAUSAL) else np.array(True)


def given(kind: str, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The mask, where it is an operand of the program."""
    return (jnp.asarray(mask_of(kind, shape)),) if kind in (KEY, FULL) else ()


# --- the programs ---


def ours(kind: str, axis: int) -> Callable[..., jax.Array]:
    loading: dict[str, Any] = {} if kind == PLAIN else {"scale": SCALE}
    loading |= {"is_causal": True} if kind == CAUSAL else {}
    return lambda x, mask=None: jaxsoftmax.softmax(x, axis, where=mask, **loading)


def theirs(kind: str, axis: int) -> dict[str, Callable[..., jax.Array]]:
    """jax.nn's forms; the causal mask is made in the program, where XLA fuses it."""

    def z(x: jax.Array) -> jax.Array:
        return x if kind == PLAIN else SCALE * x

    def kept(x: jax.Array, mask: Any) -> jax.Array:
        return jnp.tri(x.shape[-2], x.shape[-1], dtype=bool) if kind == CAUSAL else mask

    def by_value(x: jax.Array, mask: Any = None) -> jax.Array:
        least = float(jnp.finfo(x.dtype).min)
        return jax.nn.softmax(jnp.where(kept(x, mask), z(x), least), axis)

    if kind not in MASKED:
        return {"plain": lambda x: jax.nn.softmax(z(x), axis)}
    return {
        "where=": lambda x, mask=None: jax.nn.softmax(z(x), axis, where=kept(x, mask)),
        "jnp.where": by_value,
    }


def both(call: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(x, dy, mask) -> y and dx."""

    def run(x: jax.Array, dy: jax.Array, *mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(lambda x: call(x, *mask), x)
        return y, pull(dy)[0]

    return run


@dataclass
class Timed:
    """A case, and what it is."""

    case: Case
    kind: str
    what: str
    form: str  # "ours", or jax.nn's


def programs(group: Group, buffers: Buffers) -> list[Timed]:
    made = []
    for kind in group.kinds:
        mask = given(kind, group.shape)
        forms = {"ours": ours(kind, group.axis)}
        if group.family != "attention" or kind not in OURS_ALONE:
            forms |= theirs(kind, group.axis)
        pairs = list(zip(buffers.x, buffers.dy, strict=True))
        for what in group.whats:
            inputs = [(x, *mask) if what == "fwd" else (x, dy, *mask) for x, dy in pairs]
            for form, call in forms.items():
                label = f"{form} {kind} {what}"
                run = call if what == "fwd" else both(call)
                fn = cases.named(lambda *a, run=run: run(*a), "".join(filter(str.isalnum, label)))
                made.append(Timed(Case(label, fn, inputs), kind, what, form))
    return made


def backwards(group: Group, buffers: Buffers) -> Iterator[Case]:
    """Our gradients alone, from the residuals of the forward."""
    for kind in group.kinds if "fwd+bwd" in group.whats else ():
        mask = given(kind, group.shape)
        call = ours(kind, group.axis)
        pull = jax.jit(lambda x, *m, call=call: jax.vjp(lambda x: call(x, *m), x)[1])
        pairs = zip(buffers.x, buffers.dy, strict=True)
        inputs = [(pull(x, *mask), dy) for x, dy in pairs]
        yield Case(f"ours {kind} bwd", cases.named(lambda p, dy: p(dy)[0], "ours_bwd"), inputs)


# --- right or wrong ---


@functools.partial(jax.jit, static_argnames="axis")
def _taken(a: jax.Array, index: tuple[Any, ...], axis: int) -> jax.Array:
    return jnp.moveaxis(a, axis, -1)[index]


def _rows(a: Any, axis: int) -> np.ndarray:
    """Some rows of an array, from the first to the last."""
    kept = tuple(np.delete(a.shape, axis))
    flat = np.unique(np.linspace(0, math.prod(kept) - 1, SAMPLE).astype(np.int64))
    index = np.unravel_index(flat, kept)
    if isinstance(a, np.ndarray):
        return np.moveaxis(a, axis, -1)[index]
    return np.asarray(_taken(a, index, axis))


@functools.partial(jax.jit, static_argnames="axis")
def _near_y(y: jax.Array, x: jax.Array, mask: Any, scale: Any, part: Any, axis: int) -> jax.Array:
    """Whether all of a result is near jnp's in a wider float."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    want = jax.nn.softmax(jnp.where(mask, scale * x.astype(wide), -jnp.inf), axis)
    return jnp.all(jnp.abs(y.astype(wide) - want) <= part * want + _least(y.dtype))


@functools.partial(jax.jit, static_argnames="axis")
def _near_dx(dx: jax.Array, y: jax.Array, dy: jax.Array, scale: Any, part: Any, axis: int) -> Any:
    wide = jnp.promote_types(dx.dtype, jnp.float32)
    y, dy = y.astype(wide), dy.astype(wide)
    t = jnp.sum(y * dy, axis, keepdims=True)
    size = jnp.max(scale * y * (jnp.abs(dy) + jnp.abs(t)), axis, keepdims=True)
    error = jnp.abs(dx.astype(wide) - scale * y * (dy - t))
    return jnp.all(error <= jnp.where(y == 0, 0, part * size) + _least(dx.dtype))


def _least(dtype: Any) -> float:
    info = jnp.finfo(dtype)
    return 2 * float(info.smallest_subnormal if dtype == jnp.float16 else info.tiny)


def errors(group: Group, timed: Timed) -> dict[str, Any]:
    """Of y, and of dx given that y: ulps on a sample of rows, and whether all is near.

    jax.nn's rounds z - max to x's dtype, and takes its gradient from a y that is not rounded yet:
    its bound says that it computes the same, not how well.
    """
    x, scale = timed.case.inputs[0][0], 1.0 if timed.kind == PLAIN else SCALE
    result = timed.case.fn(*timed.case.inputs[0])
    mask = mask_of(timed.kind, group.shape)
    dtype, axis = x.dtype, group.axis
    info = jnp.finfo(dtype)
    wide: Any = np.longdouble if dtype == np.float64 else np.float64
    kept = _rows(np.broadcast_to(mask, group.shape), axis)
    z = np.where(kept, scale * _rows(x, axis).astype(wide), -np.inf)
    loose, more = 0.0, 0.0
    if timed.form != "ours":
        most = np.array(2 * np.max(np.abs(z), where=np.isfinite(z), initial=0))
        loose = float(np.expm1(2 * judge.ulp(most, dtype)))
        more = 16 + 2 * loose / float(info.eps)
    part = 4 * float(info.eps) + 1e-4 + loose
    y = result if timed.what == "fwd" else result[0]
    want, tiny = judge.softmax(z)[0], float(info.tiny)
    expected = judge.Expected(want, judge.ulp(want, dtype), 0.0, tiny)
    bound = judge.bound("softmax", dtype.name) + more
    found = {"y": {"ulp": expected.worst(_rows(y, axis)), "bound": bound}}
    found["y"]["near"] = bool(_near_y(y, x, mask, scale, part, axis))
    if timed.what == "fwd+bwd":
        dx, dy = result[1], timed.case.inputs[0][1]
        want, size = judge.softmax_bwd(*(_rows(a, axis).astype(wide) for a in (y, dy)))
        expected = judge.Expected(scale * want, judge.ulp(scale * size, dtype), 0.0, tiny)
        bound = judge.bound("softmax_bwd", dtype.name) + more
        found["dx"] = {"ulp": expected.worst(_rows(dx, axis)), "bound": bound}
        found["dx"]["near"] = bool(_near_dx(dx, y, dy, scale, part, axis))
    return found | {"ok": all(one["near"] and one["ulp"] <= one["bound"] for one in found.values())}
