"""The op table: what each op takes and gives, its formula, its derivative. A new op is a row here.

No JAX machinery: a derivative is written with `run(name, *operands)`, which runs another op over
the same axes with the same mask and scale, and gives its result. The formulas are those of
reference.py, fetched when first used.

The rows' statistics are what a gradient needs of a row beside its elements: its maximum, and the
sum of exp(x - maximum), in the type of arithmetic. As two numbers they are right at any offset of
x; their logarithm's sum, one number, loses the gradient of float32 rows near 1e7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Loading:
    """What an op does to the elements as it reads them, and the dtype it writes.

    The mask (boolean, it broadcasts against the rows) and the scale (one number, or one a leading
    dimension, in the type of arithmetic) are the last operands, in that order. An op of x is then
    one of scale * x, its gradient times the scale; what the mask leaves out is in no sum, and 0 in
    a result (-inf in that of log_softmax). `causal` leaves out keys after the query, where the last
    two dimensions are (query, key). `dtype` is the result's, if that is not the first input's.
    """

    masked: bool = False
    scaled: bool = False
    causal: bool = False
    dtype: str | None = None

    @property
    def plain(self) -> bool:
        return self == Loading()

    @property
    def extra(self) -> int:
        """How many operands follow those of the op."""
        return self.masked + self.scaled

    def to(self, dtype: Any, first: Any) -> Loading:
        """The same for a result of a dtype, where the first input has another or the same one."""
        return dataclasses.replace(self, dtype=None if dtype == first else dtype.name)

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
        """The op's own operands, the mask and the scale, which are None if there is none."""
        own = len(operands) - self.extra
        mask = operands[own] if self.masked else None
        return operands[:own], mask, operands[-1] if self.scaled else None


_PLAIN = Loading()


@dataclasses.dataclass(frozen=True)
class Op:
    """One op: `inputs` arrays of one shape and dtype, then `given` arrays of a number a row.

    The dtypes of inputs may be a mix of float16, bfloat16 and float32 (see `Loading`).

    What is given of a row are its statistics and, if the op is `pulled`, a cotangent of the inputs'
    dtype. The result is an array like the inputs, or of one number a row if the op `reduces`. With
    `stats` the rows' statistics can be had beside it.
    `folds` counts the first inputs of which a row's sum is taken, 0 if there is none. An op without
    a `kernel` is its formula everywhere.

    An op of x has its tangent and its cotangent from residuals(result, x, stats): tangent(run,
    residuals, x_dot) and cotangent(run, residuals, ct). An op that is linear in operand `linear`
    has that operand's cotangent from transpose(run, operands, ct) and its other derivatives from
    its formula.
    """

    name: str
    inputs: int = 1
    given: int = 0
    folds: int = 1
    reduces: bool = False
    pulled: bool = False
    stats: bool = False
    kernel: bool = True
    residuals: Callable[..., tuple[Any, ...]] | None = None
    tangent: Callable[[Run, Sequence[Any], Any], Any] | None = None
    cotangent: Callable[[Run, Sequence[Any], Any], Any] | None = None
    linear: int | None = None
    transpose: Callable[[Run, Sequence[Any], Any], Any] | None = None

    def formula(
        self,
        *operands: Any,
        axes: tuple[int, ...],
        loading: Loading = _PLAIN,
        names: tuple[Any, ...] = (),
    ) -> Any:
        """The jnp formula of the result, for platforms and cases without a kernel. Where rows are
        cut over the mesh axes `names`, of parts of them."""
        from . import reference

        own, mask, scale = loading.split(operands)
        rows = reference.Rows(axes, mask, scale, loading.causal, loading.dtype, names)
        return getattr(reference, self.name)(*own, rows)

    def stats_formula(
        self, *operands: Any, axes: tuple[int, ...], loading: Loading = _PLAIN
    ) -> Any:
        """The jnp formula of the statistics."""
        from . import reference

        own, mask, scale = loading.split(operands)
        rows = reference.Rows(axes, mask, scale, loading.causal)
        return getattr(reference, f"{self.name}_stats")(*own, rows)


_FORWARD = (
    Op(
        "softmax",
        residuals=lambda y, x, stats: (y,),
        tangent=lambda run, res, x_dot: run("softmax_bwd", *res, x_dot),
        cotangent=lambda run, res, dy: run("softmax_bwd", *res, dy),
    ),
    Op(
        "log_softmax",
        stats=True,
        residuals=lambda y, x, stats: (x, *stats),
        tangent=lambda run, res, x_dot: run("log_softmax_jvp", x_dot, *res),
        cotangent=lambda run, res, dy: run("log_softmax_bwd", dy, *res),
    ),
    Op(
        "logsumexp",
        stats=True,
        reduces=True,
        residuals=lambda y, x, stats: (x, *stats),
        tangent=lambda run, res, x_dot: run("logsumexp_jvp", x_dot, *res),
        cotangent=lambda run, res, g: run("logsumexp_bwd", *res, g),
    ),
)

# Their gradients, as kernels. y * (dy - sum(y * dy)) is a symmetric matrix times dy, so softmax_bwd
# is its own transpose; the others have an op of the formulas for it, which is also the tangent.
_GRADIENTS = (
    Op(
        "softmax_bwd",  # y, dy
        inputs=2,
        folds=2,
        linear=1,
        transpose=lambda run, operands, ct: run("softmax_bwd", operands[0], ct),
    ),
    Op(
        "log_softmax_bwd",  # dy, x; max, sum
        inputs=2,
        given=2,
        linear=0,
        transpose=lambda run, operands, ct: run("log_softmax_jvp", ct, *operands[1:]),
    ),
    Op(
        "logsumexp_bwd",  # x; max, sum, g
        given=3,
        pulled=True,
        folds=0,
        linear=3,
        transpose=lambda run, operands, ct: run("logsumexp_jvp", ct, *operands[:3]),
    ),
)

_TANGENTS = (
    Op(
        "log_softmax_jvp",  # x_dot, x; max, sum
        inputs=2,
        given=2,
        kernel=False,
        linear=0,
        transpose=lambda run, operands, ct: run("log_softmax_bwd", ct, *operands[1:]),
    ),
    Op(
        "logsumexp_jvp",  # x_dot, x; max, sum
        inputs=2,
        given=2,
        reduces=True,
        kernel=False,
        linear=0,
        transpose=lambda run, operands, ct: run("logsumexp_bwd", *operands[1:], ct),
    ),
)

EVERY = {op.name: op for op in (*_FORWARD, *_GRADIENTS, *_TANGENTS)}
OPS = {name: op for name, op in EVERY.items() if op.kernel}
