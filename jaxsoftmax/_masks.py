"""Operands as the formulas take them: widened, masked, scaled; reductions, also over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Axes = int | tuple[int, ...]
Names = tuple[Any, ...]
Mask = jax.Array | None
Scale = jax.typing.ArrayLike | None


class Over(NamedTuple):
    """What is reduced: axes, of rows that may be cut over mesh axes of these names."""

    axes: Axes = -1
    names: Names = ()

    def sum(self, x: jax.Array) -> jax.Array:
        """Of each row, in an array of as many dimensions."""
        total = jnp.sum(x, self.axes, keepdims=True)
        return lax.psum(total, self.names) if self.names else total

    def max(self, x: jax.Array) -> jax.Array:
        top = jnp.max(x, self.axes, keepdims=True, initial=-jnp.inf)
        # pmax has no derivative. None is needed: a shift leaves what is made of it as it is.
        return lax.pmax(lax.stop_gradient(top), self.names) if self.names else top

    def any(self, x: jax.Array) -> jax.Array:
        found = jnp.any(x, self.axes, keepdims=True)
        return lax.pmax(found.astype(jnp.int32), self.names) > 0 if self.names else found

    def squeeze(self, row: jax.Array) -> jax.Array:
        return jnp.squeeze(row, self.axes)

    def spread(self, row: jax.Array, ndim: int) -> jax.Array:
        """A number a row as an array that broadcasts against the rows."""
        axes = (self.axes,) if isinstance(self.axes, int) else self.axes
        return jnp.expand_dims(row, tuple(sorted(a % ndim for a in axes)))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows a formula is of, and what it does to their elements.

    Elements outside `where` (a mask) or, if `causal`, after the query of the last two dimensions
    (query, key) are left out of every sum, whatever they hold. A `scale` multiplies x, and so a
    gradient. `dtype` is the result's, None the first operand's. Where rows are cut over the mesh
    axes `names`, a formula is of this device's parts, and reduces over the devices.
    """

    axes: Axes = -1
    where: Mask = None
    scale: Scale = None
    causal: bool = False
    dtype: Any = None
    names: Names = ()

    @property
    def over(self) -> Over:
        return Over(self.axes, self.names)

    def mask(self, x: jax.Array) -> Mask:
        return causal_mask(x.shape, self.where) if self.causal else self.where

    def scaled(self, x: jax.Array, mask: Mask) -> jax.Array:
        return self.times(wide(x, mask))

    def times(self, x: jax.Array) -> jax.Array:
        return x if self.scale is None else jnp.multiply(self.scale, x)

    def cast(self, y: jax.Array, like: jax.Array) -> jax.Array:
        return y.astype(self.dtype or like.dtype)


def causal_mask(
    shape: tuple[Any, ...], where: Mask = None, first: Sequence[Any] = (0, 0)
) -> jax.Array:
    """The mask [query, key] of the keys up to each query, together with another mask; `first`
    numbers the first query and the first key."""
    query, key = (lax.broadcasted_iota(jnp.int32, shape[-2:], d) + first[d] for d in (0, 1))
    return key <= query if where is None else where & (key <= query)


def wide(x: jax.Array, mask: Mask = None) -> jax.Array:
    """x in the type the arithmetic is done in; 0 where masked, so that no NaN from there meets a
    factor of 0 in a derivative."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        x = x.astype(jnp.float32)
    return x if mask is None else jnp.where(mask, x, 0)


def kept(x: jax.Array, mask: Mask, other: float = 0) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, other)
