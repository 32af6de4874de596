"""What the bench knows of each op: what must move, the ceiling of that, its function, its operands.

A gradient is its function's: timed as what jax.vjp of the public function pulls back.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jaxsoftmax import _ops, _primitive

from .shapes import Buffers


@dataclass(frozen=True)
class Measured:
    function: str  # the public one: the op itself, or what it is the gradient of
    units: int  # arrays of the input's size that must move
    ceiling: str  # of cases.CEILINGS: moves as many, in the same way


OPS = {
    "softmax": Measured("softmax", 2, "copy"),
    "softmax_bwd": Measured("softmax", 3, "triad"),
    "log_softmax": Measured("log_softmax", 2, "copy"),
    "log_softmax_bwd": Measured("log_softmax", 3, "triad"),
    "logsumexp": Measured("logsumexp", 1, "read"),
    "logsumexp_bwd": Measured("logsumexp", 2, "copy"),
}
CHOICES = {op: (op,) for op in OPS} | {"both": ("softmax", "softmax_bwd"), "all": tuple(OPS)}


def is_gradient(op: str) -> bool:
    return OPS[op].function != op


def function(op: str, library: Any) -> Callable[..., Any]:
    """The function of the op in jaxsoftmax or jax.nn, over the last axis."""
    return functools.partial(getattr(library, OPS[op].function), axis=-1)


def rows_of(ops: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """A table's rows and the ops of each: one, or a function and its gradient in one program."""
    found: dict[str, tuple[str, ...]] = {}
    for op in (ops := tuple(ops)):
        found[op] = (op,)
        forward = OPS[op].function
        if op != forward and forward in ops:
            found[f"{forward}+bwd"] = (forward, op)
    return found


def renamed(row: dict[str, Any]) -> dict[str, Any]:
    """A table's row in today's names, also if stored when softmax was the only function."""
    if "ceiling_us" in row:
        return row
    what = {"fwd": "softmax", "bwd": "softmax_bwd", "fwd+bwd": "softmax+bwd"}[row["what"]]
    ceiling = OPS[what].ceiling if what in OPS else "copy + triad"
    return row | {"what": what, "ceiling": ceiling, "ceiling_us": row["copy_us"]}


def cotangents(op: str, buffers: Buffers) -> list[jax.Array]:
    """What a gradient is pulled back from: of the shape of the function's result."""
    if _ops.OPS[OPS[op].function].reduces:
        return [dy[:, 0] for dy in buffers.dy]
    return buffers.dy


def inputs(op: str, buffers: Buffers) -> list[tuple[jax.Array, ...]]:
    """What the primitive is called on in turn."""
    if not is_gradient(op):
        return [(x,) for x in buffers.x]
    pairs = zip(buffers.x, cotangents(op, buffers), strict=True)
    return [_operands(op, x, ct) for x, ct in pairs]


@functools.partial(jax.jit, static_argnames="op")
def _operands(op: str, x: jax.Array, ct: jax.Array) -> tuple[jax.Array, ...]:
    """The op's operands as its row of the op table makes them from its function's residuals."""
    of = _ops.OPS[OPS[op].function]
    found = _primitive.bind(of.name, x, axes=(-1,), path=None, stats=of.stats)
    result, *stats = found if of.stats else (found,)
    assert of.residuals is not None and of.cotangent is not None
    residuals = of.residuals(result, x, stats)
    operands: tuple[jax.Array, ...] = of.cotangent(lambda _, *given: given, residuals, ct)
    return operands
