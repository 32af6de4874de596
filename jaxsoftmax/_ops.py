"""The op table: name, inputs, reference formula, derivative. A new op is one row here.

No JAX machinery: a derivative is written with `run(name, *operands)`, which runs another op over
the same axes, and with the formulas of reference.py, fetched when first used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Op:
    """One kernel family: `inputs` arrays of one shape and dtype -> one array like them.

    jvp(run, out, primals, tangents, axes) gives the output's tangent; a tangent is None where it is
    zero. An op that is linear in operand `linear` gives that operand's cotangent by
    transpose(run, ct, primals). `axes` are negative and sorted.
    """

    name: str
    inputs: int
    reference: str  # the formula's name in reference.py
    jvp: Callable[..., Any]
    linear: int | None = None
    transpose: Callable[..., Any] | None = None

    def formula(self, *operands: Any, axes: tuple[int, ...]) -> Any:
        """The jnp formula, for platforms and cases without a kernel."""
        from . import reference

        return getattr(reference, self.reference)(*operands, axes)


def _softmax_jvp(
    run: Callable[..., Any],
    y: Any,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    axes: tuple[int, ...],
) -> Any:
    return run("softmax_bwd", y, tangents[0])


def _softmax_bwd_jvp(
    run: Callable[..., Any],
    dx: Any,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    axes: tuple[int, ...],
) -> Any:
    from . import reference

    (y, dy), (y_dot, dy_dot) = primals, tangents
    parts = []
    if y_dot is not None:
        parts.append(reference.softmax_bwd_y(y, dy, y_dot, axes))
    if dy_dot is not None:
        parts.append(run("softmax_bwd", y, dy_dot))
    return sum(parts[1:], parts[0])


def _softmax_bwd_transpose(run: Callable[..., Any], ct: Any, primals: Sequence[Any]) -> Any:
    # y * (dy - sum(y * dy)) is a symmetric matrix times dy: the map is its own transpose.
    return run("softmax_bwd", primals[0], ct)


OPS = {
    op.name: op
    for op in (
        Op("softmax", 1, "softmax", _softmax_jvp),
        Op("softmax_bwd", 2, "softmax_bwd", _softmax_bwd_jvp, 1, _softmax_bwd_transpose),
    )
}
