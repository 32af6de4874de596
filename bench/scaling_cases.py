"""What `--scaling` runs: shapes and how they are cut, inputs made in place, programs, errors.

A result is compared with that of one device, all of it: y in steps between neighbouring numbers of
the dtype; dx, where terms cancel, in ulps of its row's largest term, as in the contract. dx is one
device's backward of the y that came with it, so that a rounding of y is not counted twice; from end
to end both count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import _primitive

from . import cases, check, judge
from .shapes import Shape
from .timing import Case

AXIS = "d"
SPECS = {"rows": P(AXIS, None), "columns": P(None, AXIS)}
STRONG, WEAK = "strong", "weak"
WHATS = ("fwd", "fwd+bwd")
# One device's call; jit of sharded arrays; a shard_map in which the call names the mesh axis. On
# one device the last is the code that several run, which reads its input twice.
PLAIN, AUTOMATIC, AXIS_NAME = "plain", "automatic", "axis_name"
SAMPLE = 1 << 20  # elements compared with a wider float
ARRAYS = {"fwd": 2, "fwd+bwd": 5}  # that must move


@dataclass(frozen=True)
class Family:
    """One shape on growing numbers of devices: of the whole, or of what each device has."""

    scaling: str
    kind: str  # which dimension is cut
    shape: Shape

    def whole(self, n: int) -> Shape:
        rows, columns = self.shape
        if self.scaling == STRONG:
            return self.shape
        return (n * rows, columns) if self.kind == "rows" else (rows, n * columns)

    def __str__(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]} {self.kind} {self.scaling}"


def grid(gpu: bool, quick: bool) -> list[Family]:
    """The weak shapes on 8 devices are the strong ones."""
    if gpu:
        rows, columns = (65536, 16384), [(4096, 262144), (512, 4194304)]
    elif quick:
        rows, columns = (256, 512), [(16, 8192)]
    else:
        rows, columns = (2048, 1024), [(64, 32768), (8, 262144)]
    strong = [Family(STRONG, "rows", rows), *(Family(STRONG, "columns", c) for c in columns)]
    if gpu and quick:
        return strong[:2]
    weak = [Family(WEAK, "rows", (rows[0] // 8, rows[1]))]
    return strong + weak + [Family(WEAK, "columns", (c[0], c[1] // 8)) for c in columns]


def counts(wanted: int | None) -> list[int]:
    """1, 2, 4, ... up to the devices wanted, or present; ValueError where they are not."""
    found = len(jax.local_devices())
    if wanted is not None and (wanted < 1 or wanted & (wanted - 1)):
        raise ValueError(f"--devices {wanted}: not 1, 2, 4, 8, ..., which cut every shape evenly")
    if wanted is not None and wanted > found:
        raise ValueError(f"--devices {wanted}: only {found} found")
    return [2**i for i in range((wanted or found).bit_length())]


# --- inputs ---


def _hash(shape: Shape, seed: int, dtype: str) -> jax.Array:
    """Numbers from -1 to 1 that depend on the place alone, however the array is cut."""
    i, j = (jax.lax.broadcasted_iota(jnp.uint32, shape, d) for d in (0, 1))
    bits = i * np.uint32(0x9E3779B1) ^ (j + np.uint32(seed)) * np.uint32(0x85EBCA77)
    bits = (bits ^ bits >> 15) * np.uint32(0xC2B2AE3D)
    bits = (bits ^ bits >> 13) * np.uint32(0x27D4EB2F)
    return ((bits ^ bits >> 16).astype(jnp.float32) * 2.0**-31 - 1).astype(dtype)


@functools.cache
def _maker(shape: Shape, dtype: str, sharding: Any) -> Callable[[], tuple[jax.Array, jax.Array]]:
    return jax.jit(
        lambda: (_hash(shape, 1, dtype) * 4, _hash(shape, 2, dtype)),
        out_shardings=(sharding, sharding),
    )


def inputs(shape: Shape, dtype: str, sharding: Any) -> tuple[jax.Array, jax.Array]:
    """x and dy, made where they are to lie."""
    return _maker(shape, dtype, sharding)()


def sharding(kind: str, devices: Sequence[jax.Device]) -> Any:
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh(np.array(devices), (AXIS,)), SPECS[kind])


# --- programs ---


def forms(kind: str, n: int) -> tuple[str, ...]:
    several = (AUTOMATIC,) if n > 1 else (PLAIN,)
    return several if kind == "rows" else (*several, AXIS_NAME)


def form(name: str, kind: str, devices: Sequence[jax.Device]) -> Callable[[jax.Array], jax.Array]:
    if name != AXIS_NAME:
        return lambda x: jaxsoftmax.softmax(x, axis=-1)
    mesh, spec = Mesh(np.array(devices), (AXIS,)), SPECS[kind]

    def local(x: jax.Array) -> jax.Array:
        return jaxsoftmax.softmax(x, axis=-1, axis_name=AXIS)

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)


def both(f: Callable[[jax.Array], jax.Array]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """y and dx in one program."""

    def program(x: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(f, x)
        return y, pull(dy)[0]

    return program


def programs(
    kind: str, x: jax.Array, dy: jax.Array, devices: Sequence[jax.Device]
) -> dict[tuple[str, str], Case]:
    """Every form's forward, and its value and gradient in one program."""
    made = {}
    for name in forms(kind, len(devices)):
        f = form(name, kind, devices)

        def forward(x: jax.Array, f: Any = f) -> jax.Array:
            return f(x)

        for what, fn, given in (("fwd", forward, (x,)), ("fwd+bwd", both(f), (x, dy))):
            label = f"{name} {what}"
            called = f"scaling_{label}".replace(" ", "_").replace("+", "_")
            made[name, what] = Case(label, cases.named(fn, called), [given])
    return made


# --- right or wrong ---


def bounds(dtype: str) -> dict[str, float]:
    """How far two results may be apart: an ulp; in 32 and 64 bits as far as each from the truth."""
    y = judge.bound("softmax", dtype)
    dx = 1.0 if y == 1 else judge.bound("softmax_bwd", dtype)
    return {"y": y, "dx": dx, "dx end to end": y + dx}


def whole(array: jax.Array, device: jax.Device) -> jax.Array:
    """All pieces of an array put together on one device, by no program of several."""
    pieces = {
        tuple(s.start or 0 for s in shard.index): jax.device_put(shard.data, device)
        for shard in array.addressable_shards
    }
    cut = max(range(array.ndim), key=lambda d: len({start[d] for start in pieces}))
    return jnp.concatenate([pieces[start] for start in sorted(pieces)], axis=cut)


@jax.jit
def steps(a: jax.Array, b: jax.Array) -> jax.Array:
    """The most numbers of the dtype that lie between two elements, one of them counted."""
    bits = 8 * a.dtype.itemsize
    half = np.dtype(f"uint{bits}").type(1 << (bits - 1))

    def place(x: jax.Array) -> jax.Array:
        i = jax.lax.bitcast_convert_type(x, half.dtype)
        return jnp.where(i < half, half + i, half - (i - half))

    here, there = place(a), place(b)
    return jnp.max(jnp.maximum(here, there) - jnp.minimum(here, there))


@jax.jit
def largest_terms(y: jax.Array, dy: jax.Array) -> jax.Array:
    """The ulp of each row's largest term of dx = y dy - y sum(y dy)."""
    wide = jnp.promote_types(y.dtype, jnp.float32)
    p, d, info = y.astype(wide), dy.astype(wide), jnp.finfo(y.dtype)
    t = jnp.sum(p * d, axis=-1, keepdims=True)
    _, exponent = jnp.frexp(jnp.max(p * (jnp.abs(d) + jnp.abs(t)), axis=-1, keepdims=True))
    return jnp.ldexp(jnp.ones((), wide), jnp.maximum(exponent - 1, info.minexp) - info.nmant)


@jax.jit
def in_units(a: jax.Array, b: jax.Array, unit: jax.Array) -> jax.Array:
    error = jnp.abs(a.astype(unit.dtype) - b.astype(unit.dtype)) / unit
    return jnp.max(jnp.where(jnp.isnan(error), jnp.inf, error))


@jax.jit
def backward(y: jax.Array, dy: jax.Array) -> jax.Array:
    return _primitive.bind("softmax_bwd", y, dy, axes=(-1,), path=None)


_plain = jax.jit(both(form(PLAIN, "rows", ())))


def _worst(op: str, arrays: Sequence[np.ndarray]) -> float:
    *operands, got = arrays
    return judge.expected(op, operands).worst(got)


class OneDevice:
    """One device's results, against which others' are held."""

    def __init__(self, x: jax.Array, dy: jax.Array, device: jax.Device) -> None:
        self.x, self.dy, self.device = x, dy, device
        self.y, self.dx = _plain(x, dy)
        self.unit = largest_terms(self.y, dy)

    def against_oracle(self) -> dict[str, float]:
        """Of its own results, in ulps, on a sample of rows."""
        taken = {"softmax": (self.x, self.y), "softmax_bwd": (self.y, self.dy, self.dx)}
        return {op: _worst(op, check.sampled(arrays, SAMPLE)) for op, arrays in taken.items()}

    def errors(self, results: Sequence[jax.Array]) -> dict[str, float]:
        """How far y, or y and dx, are from one device's."""
        y, *rest = (whole(result, self.device) for result in results)
        found = {"y": float(steps(y, self.y))}
        for dx in rest:
            found["dx"] = float(in_units(dx, backward(y, self.dy), self.unit))
            found["dx end to end"] = float(in_units(dx, self.dx, self.unit))
        return found
