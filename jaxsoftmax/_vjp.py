"""The ops of x with their own gradients, and without: what the public functions end in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _plan, _primitive
from ._across import across
from ._masks import Names
from ._ops import OPS, Loading


class How(NamedTuple):
    """What is known of a call while it is traced."""

    axes: tuple[int, ...]
    path: _plan.PathLike
    loading: Loading
    dtype: np.dtype[Any]  # of x
    names: Names = ()  # mesh axes over which rows are cut


Function = Callable[[jax.Array, jax.Array | None, jax.Array | None, How], jax.Array]


def _bind(
    name: str,
    x: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array | None,
    how: How,
    stats: bool = False,
) -> Any:
    operands = [a for a in (x, mask, scale) if a is not None]
    return _run(name, operands, how, how.path, how.loading, stats)


def _run(
    name: str, operands: Any, how: How, path: _plan.PathLike, loading: Loading, stats: bool = False
) -> Any:
    """The op on whole rows, or on parts of rows."""
    if not how.names:
        return _primitive.bind(
            name, *operands, axes=how.axes, path=path, stats=stats, loading=loading
        )

    def local(name: str, *operands: jax.Array, stats: bool, **rest: Any) -> Any:
        found = _primitive.bind(name, *operands, axes=how.axes, stats=stats, **rest)
        return found if stats else (found,)

    found = across(local, name, operands, how.names, how.axes, path, loading)
    return tuple(found) if stats else found[0]


def _with_vjp(name: str) -> Function:
    """The op as a custom_vjp: its own gradient kernel, from the residuals that the op names."""
    op = OPS[name]

    @partial(jax.custom_vjp, nondiff_argnums=(3,))
    def function(
        x: jax.Array, mask: jax.Array | None, scale: jax.Array | None, how: How
    ) -> jax.Array:
        return _bind(name, x, mask, scale, how)

    def forward(x: Any, mask: Any, scale: Any, how: How) -> Any:
        assert op.residuals is not None
        scale_moves = scale is not None and scale.perturbed
        x, mask, scale = (None if a is None else a.value for a in (x, mask, scale))
        found = _bind(name, x, mask, scale, how, stats=op.stats)
        y, *stats = found if op.stats else (found,)
        # The derivative along the scale takes x, which is not kept for the one along x.
        return y, (op.residuals(y, x, stats), mask, scale, x if scale_moves else None)

    def backward(how: How, kept: Any, ct: Any) -> Any:
        if isinstance(ct, jax.custom_derivatives.SymbolicZero):
            return None, None, None
        assert op.cotangent is not None
        residuals, mask, scale, x = kept
        extra = [a for a in (mask, scale) if a is not None]

        def run(other: str, *operands: jax.Array) -> jax.Array:
            loading = how.loading.to(how.dtype, operands[0].dtype)
            path = _plan.for_gradient(how.path)
            return _run(other, (*operands, *extra), how, path, loading)

        def of_scale(scale: jax.Array) -> Any:
            operands = [a for a in (x, mask, scale) if a is not None]
            return op.formula(*operands, axes=how.axes, loading=how.loading, names=how.names)

        along_scale = None if x is None else jax.vjp(of_scale, scale)[1](ct)[0]
        return op.cotangent(run, residuals, ct), None, along_scale

    function.defvjp(forward, backward, symbolic_zeros=True)
    # shard_map without jit takes no symbolic zeros, but a jit around them.
    jitted = jax.jit(function, static_argnums=3)

    def chosen(x: Any, mask: Any, scale: Any, how: How) -> Any:
        # Of a number that devices have alike, only psum's own rule knows the parts' cotangents.
        alike = op.reduces and how.names
        return _bind(name, x, mask, scale, how) if alike else jitted(x, mask, scale, how)

    return chosen


WITH_VJP = {name: _with_vjp(name) for name, op in OPS.items() if op.residuals}
WITHOUT_VJP: dict[str, Function] = {name: partial(_bind, name) for name in WITH_VJP}
