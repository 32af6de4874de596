"""The op table: name, inputs, reference formula, derivative. A new op is one row here.

No JAX machinery: derivatives are written with `bind`, and formulas are fetched when first used.
`axes` are always negative and sorted, so that a batch dimension in front changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Op:
    """One kernel family: `inputs` arrays of one shape and dtype -> one array like them.

    jvp(out, primals, tangents, axes, path) gives the output's tangent; a tangent is None where it
    is zero. An op that is linear in operand `linear` gives that operand's cotangent by
    transpose(ct, primals, axes, path).
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


def bind(name: str, *operands: Any, axes: tuple[int, ...], path: Any = None) -> Any:
    """Run an op's primitive at the operands' own rank."""
    from . import _primitive  # the table itself stays free of jax

    return _primitive.bind(name, *operands, axes=axes, path=path)


def _softmax_jvp(
    y: Any, primals: Sequence[Any], tangents: Sequence[Any], axes: tuple[int, ...], path: Any
) -> Any:
    from . import _plan

    return bind("softmax_bwd", y, tangents[0], axes=axes, path=_plan.for_gradient(path))


def _softmax_bwd_jvp(
    dx: Any, primals: Sequence[Any], tangents: Sequence[Any], axes: tuple[int, ...], path: Any
) -> Any:
    from . import reference

    (y, dy), (y_dot, dy_dot) = primals, tangents
    parts = []
    if y_dot is not None:
        parts.append(reference.softmax_bwd_y(y, dy, y_dot, axes))
    if dy_dot is not None:
        parts.append(bind("softmax_bwd", y, dy_dot, axes=axes, path=path))
    return sum(parts[1:], parts[0])


def _softmax_bwd_transpose(
    ct: Any, primals: Sequence[Any], axes: tuple[int, ...], path: Any
) -> Any:
    # y * (dy - sum(y * dy)) is a symmetric matrix times dy: the map is its own transpose.
    return bind("softmax_bwd", primals[0], ct, axes=axes, path=path)


OPS = {
    op.name: op
    for op in (
        Op("softmax", 1, "softmax", _softmax_jvp),
        Op("softmax_bwd", 2, "softmax_bwd", _softmax_bwd_jvp, 1, _softmax_bwd_transpose),
    )
}
