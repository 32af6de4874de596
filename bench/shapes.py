"""The grids of shapes, and the rotated input buffers."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

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
# Beside it on a GPU: short rows, vocabularies, long rows, one row alone; 36 with the seed's.
GPU: tuple[Shape, ...] = (
    *SEED,
    (1048576, 64),
    (262144, 128),
    (65536, 512),
    (131072, 1024),
    (32768, 2048),
    (32768, 8192),
    (16384, 16384),
    (8192, 32000),
    (8192, 32768),
    (8192, 50257),
    (4096, 65536),
    (4096, 128256),
    (4096, 151936),
    (2048, 131072),
    (1024, 262144),
    (256, 1048576),
    (1, 50257),
    (1, 128256),
    (16, 128256),
    (64, 128256),
    (128, 151936),
    (32, 1048576),
    (1, 33554432),
)
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


def loss(gpu: bool, quick: bool) -> tuple[Shape, ...]:
    """Tokens x vocabulary of `--loss`."""
    if gpu:
        return ((1024, 50257),) if quick else ((8192, 50257), (4096, 128256))
    return ((32, 8192),) if quick else ((256, 50257),)


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


# What fills every buffer, repeated: its prime length keeps rows from being alike.
PERIOD = 1048573


@functools.cache
def _pattern(dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (PERIOD,), dtype)


@functools.partial(jax.jit, static_argnames="shape")
def _fill(pattern: jax.Array, start: int, shape: Shape) -> jax.Array:
    size = shape[0] * shape[1]
    repeats = -(-size // PERIOD)
    moved = jnp.roll(pattern, start)
    return jnp.broadcast_to(moved, (repeats, PERIOD)).reshape(-1)[:size].reshape(shape)


@dataclass
class Buffers:
    """Inputs of one shape, enough of them that a round trip through all exceeds the cache."""

    x: list[jax.Array]
    dy: list[jax.Array]

    @classmethod
    def make(
        cls, shape: Shape, dtype: Any, cache_bytes: int, most: int, gradient: bool = True
    ) -> "Buffers":
        """`dy` is empty without `gradient`."""
        size = shape[0] * shape[1] * jnp.dtype(dtype).itemsize
        count = max(2, min(most, -(-cache_bytes // size)))
        pattern = _pattern(jnp.dtype(dtype).name)
        assert pattern.dtype == jnp.dtype(dtype)  # float64 without x64 would be float32
        total = count * (1 + gradient)
        arrays = [_fill(pattern, 977 * i, shape) for i in range(total)]
        return cls(arrays[:count], arrays[count:])
