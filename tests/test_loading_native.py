"""Masks, scale, causal rows, any axes and mixed dtypes, by the FFI target called directly."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from contracts import arithmetic, as_dtype, wide
from loading import POISON, noted
from loading_oracle import Wide
from oracle import Expected
from runs import run_native, run_native_each

from jaxsoftmax import Plan
from jaxsoftmax._lowering import Call
from jaxsoftmax._ops import OPS, Loading
from jaxsoftmax._plan import device_limits

# Each is legal for rows of one and of two inputs, up to 512 columns, and on a CPU for columns.
PLANS = {
    "one_pass": Plan("one_pass", threads=256, reg_packs=4),
    "two_pass": Plan("two_pass", threads=64),
    "two_pass_rows": Plan("two_pass", threads=32, rows_per_block=4),
    "split_k": Plan("split_k", threads=32, splits=3),
    "split_too_many": Plan("split_k", threads=64, splits=90),
}
CLUSTER = Plan("two_pass", threads=64, rows_per_block=4, splits=2)  # of columns
FORMS = {  # shape, axes, mask (a shape, or None), scale (a number, or one a leading index), causal
    "rows": ((3, 5, 67), (-1,), None, None, False),
    "all": ((3, 5, 7), (-3, -2, -1), (3, 1, 7), 0.3, False),
    "first": ((67, 5, 3), (-3,), None, None, False),
    "first, mask of rows": ((67, 5, 3), (-3,), (5, 3), -1.5, False),
    "middle": ((3, 130, 5), (-2,), (130, 1), 0.125, False),
    "middle, full mask": ((2, 33, 40), (-2,), (2, 33, 40), None, False),
    "middle, scales": ((3, 130, 5), (-2,), (3, 1, 1), (2.5, 0.0, -0.7), False),
    "two that are not neighbours": ((9, 4, 31), (-3, -1), (9, 4, 1), 1.7, False),
    "two in the middle": ((2, 7, 11, 3), (-3, -2), (7, 1, 3), None, False),
    "alternating": ((2, 3, 4, 5, 6), (-4, -2), (2, 1, 4, 1, 6), 3.0, False),
    "alternating, the others": ((2, 3, 4, 5, 6), (-5, -3, -1), (3, 1, 5, 1), 0.3, False),
    "ones": ((1, 5, 1, 67, 1), (-2, -1), (5, 1, 1, 1), None, False),
    "trailing ones": ((4, 1, 33), (-3, -2), (1, 33), -0.3, False),
    "one column": ((4, 1), (-1,), (4, 1), 2.0, False),
    "no dimensions": ((), (), (), 2.0, False),
    "nothing reduced": ((4, 9), (), (9,), 0.5, False),
    "keys of a batch": ((2, 3, 5, 65), (-1,), (2, 1, 1, 65), 0.3, False),
    "query and key": ((2, 3, 5, 65), (-1,), (1, 1, 5, 65), 1e-3, False),
    "keys": ((5, 257), (-1,), (257,), 0.0, False),
    "full": ((3, 200), (-1,), (3, 200), -2.0, False),
    "every element": ((3, 200), (-1,), (), None, False),
    "queries": ((2, 5, 129), (-1,), (5, 1), 4.0, False),
    "mask alternates": ((2, 3, 4, 5, 6), (-2, -1), (3, 1, 5, 1), None, False),
    "mask of a part of a row": ((3, 8, 9), (-2, -1), (8, 1), None, False),
    "long keys": ((2, 1, 509), (-1,), (2, 1, 509), (0.5, 3.0), False),
    "causal": ((2, 3, 67, 67), (-1,), None, None, True),
    "causal, more keys": ((2, 5, 200), (-1,), None, 0.3, True),
    "causal, more queries": ((2, 70, 9), (-1,), (2, 1, 9), (-0.5, 2.0), True),
}
# The dtypes of the inputs and of the result.
MIXES = [
    *(("float16",) * 3, ("bfloat16",) * 3, ("float32",) * 3, ("float64",) * 3),
    *(("float16", "float32", "bfloat16"), ("float32", "bfloat16", "float16")),
    *(("bfloat16", "bfloat16", "float32"), ("float16", "float16", "bfloat16")),
]


def as_rows(a: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The array as (rows, columns)."""
    columns = np.prod([a.shape[d] for d in axes], dtype=int)
    return np.moveaxis(a, axes, tuple(range(-len(axes), 0))).reshape(-1, columns)


def as_array(rows: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    order = [d for d in range(len(shape)) if d - len(shape) not in axes]
    order += [len(shape) + d for d in axes]
    moved = rows.reshape([shape[d] for d in order])
    return np.transpose(moved, np.argsort(order)).copy()


def expect(op: str, dtype: np.dtype, first: np.ndarray, *rest: np.ndarray) -> Expected:
    with np.errstate(all="ignore"):
        return Expected(op, (Wide(first, dtype), *rest))


class Case:
    """The operands of an op in a form, and what it has to give: the contracts' results on the rows
    that have something, what is left out -inf in them, or 0 in a cotangent."""

    def __init__(self, op: str, form: str, mix: tuple[str, ...]):
        self.shape, self.axes, mask, scale, causal = FORMS[form]
        self.op, self.name = op, op.removesuffix("_bwd")
        first, second, out = map(as_dtype, mix)
        self.out = first if OPS[op].reduces else out
        mixed = len({first, second, out}) > 1
        acc = np.dtype(np.float32) if mixed else arithmetic(first)
        rng = np.random.default_rng([13, *self.shape])

        keep = np.broadcast_to(True, self.shape)
        self.options = {"axes": self.axes, "causal": causal, "dtype": self.out}
        loads = []
        if mask is not None:
            loads.append(np.asarray(rng.random(mask) < 0.7))
            if mask and mask[0] > 1:
                loads[0][0] = False
            keep, self.options["masked"] = keep & loads[0], True
        if causal:
            keep = keep & (np.arange(self.shape[-1]) <= np.arange(self.shape[-2])[:, None])
        self.keep = as_rows(keep, self.axes)
        self.alive = self.keep.any(axis=-1)
        factor = np.ones((), acc)
        if scale is not None:
            size = (-1, *[1] * (len(self.shape) - 1)) if np.ndim(scale) else ()
            factor = np.asarray(scale, acc).reshape(size)
            loads.append(factor)
            self.options["scaled"] = True
        factor = as_rows(np.broadcast_to(factor, self.shape), self.axes)

        x, ct = rng.standard_normal((2, *self.keep.shape)) * [[[3]], [[1]]]
        x = x.astype(second if op == "log_softmax_bwd" else first)
        ct = ct.astype(second if op == "softmax_bwd" else first)
        z = np.where(self.keep, x.astype(acc) * factor, acc.type(-np.inf))
        inputs, given = [x], []
        self.expected = forward = expect(self.name, self.out, z[self.alive])
        if op != self.name:
            # Every op is linear in its cotangent: the scaled result is that of a scaled one.
            moved = np.where(self.keep, wide(ct) * wide(factor), 0)[self.alive]
            stats = [np.full(self.keep.shape[0], fill, acc) for fill in (-np.inf, 1)]
            for i, stat in enumerate(forward.rounded_stats() if forward.stats else ()):
                stats[i][self.alive] = stat
            rounded = [stat[self.alive] for stat in stats]
        if op == "softmax_bwd":
            y = np.zeros(self.keep.shape, first)
            y[self.alive] = expect("softmax", first, z[self.alive]).rounded()
            inputs = [y, ct]
            self.expected = expect(op, out, y[self.alive], moved)
        elif op == "log_softmax_bwd":
            inputs, given = [ct, x], stats
            self.expected = expect(op, out, moved, z[self.alive], *rounded)
        elif op == "logsumexp_bwd":
            g = ct[:, 0]
            given = [*stats, g]
            moved = (wide(g) * wide(factor[:, 0]))[self.alive]
            self.expected = expect(op, out, z[self.alive], *rounded, moved)

        poison = np.resize(POISON, self.keep.shape)
        inputs = [np.where(self.keep, a, poison.astype(a.dtype)) for a in inputs]
        rows = tuple(
            size for d, size in enumerate(self.shape) if d - len(self.shape) not in self.axes
        )
        self.operands = [as_array(a, self.shape, self.axes) for a in inputs]
        self.operands += [a.reshape(rows) for a in given] + loads

    def plans(self, platform: str) -> dict[str, Plan]:
        """PLANS, or where a GPU takes the rows for columns those of columns."""
        given = {name: bool(self.options.get(name)) for name in ("masked", "scaled", "causal")}
        dtype = None if self.out == self.operands[0].dtype else self.out.name
        call = Call(OPS[self.op], self.axes, "one_pass", False, Loading(**given, dtype=dtype))
        if platform == "cpu" or call.layout(self.operands) in ("rows", "loaded"):
            return PLANS
        held = call.plan(self.operands, device_limits(), rows=True)
        return PLANS | {"one_pass": held, "two_pass_cluster": CLUSTER}

    def check(self, platform: str, stats: bool) -> None:
        """In every plan."""
        plans = self.plans(platform)
        each = [self.options | {"stats": stats} | plan.attributes() for plan in plans.values()]
        found = run_native_each(self.op, *self.operands, each=each)
        for plan, results in zip(plans, found, strict=True):
            with noted(plan), np.errstate(all="ignore"):
                self._check(*results)

    def _check(self, found: np.ndarray, *stats: np.ndarray) -> None:
        if OPS[self.op].reduces:
            found = found.reshape(-1)
            assert (found[~self.alive] == -np.inf).all()
        else:
            assert found.shape == self.shape
            found = as_rows(found, self.axes)
            left_out = found[~self.keep]
            assert (left_out == (-np.inf if self.op == "log_softmax" else 0)).all()
        stats = tuple(a.reshape(-1) for a in stats)
        for top in stats[:1]:
            assert (top[~self.alive] == -np.inf).all()
        self.expected.check(found[self.alive], *(a[self.alive] for a in stats))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_the_handler_loads(platform, op, form):
    """Every form in every path, with NaN and infinities in what is left out."""
    at = list(FORMS).index(form) + list(OPS).index(op)
    for mix in (MIXES[at % 4], MIXES[4 + at % 4]):
        with noted(mix):
            Case(op, form, mix).check(platform, stats=OPS[op].stats and at % 2 == 0)


@pytest.mark.parametrize("op", OPS)
def test_cpp_refuses_wrong_masks_and_scales(platform, op):
    x, plan = np.zeros((2, 3, 5), np.float32), Plan("two_pass", 32).attributes()
    mask, scale = np.ones((3, 5), bool), np.ones((), np.float32)

    def refuses(says, *loads, axes=(-1,), x=x, **options):
        given = np.ones([s for d, s in enumerate(x.shape) if d - x.ndim not in axes], x.dtype)
        operands = [x] * OPS[op].inputs + [given] * OPS[op].given
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoftmax.{op}: {says}"):
            run_native(op, *operands, *loads, axes=axes, **options, **plan)

    refuses("takes", mask)
    refuses("takes", mask, masked=True, scaled=True)
    refuses("the mask must be boolean", mask.astype(np.int8), masked=True)
    for other in (mask[:2], mask[None, None], mask[:, :4], mask[:0]):
        refuses("the mask must broadcast", other, masked=True)
    refuses("the scale must be float32", scale.astype(np.float16), scaled=True)
    refuses("the scale must broadcast", np.ones(2, np.float32), scaled=True)
    refuses("the scale must be one number", np.ones((2, 1, 5), np.float32), scaled=True)
    refuses("the scale must be one number", np.ones((3, 1), np.float32), scaled=True, axes=(-3,))
    for axes in ((-2,), (-2, -1), ()):
        refuses("causal rows are", causal=True, axes=axes)
    refuses("causal rows are", x=x[0, 0], causal=True)
    dims = np.zeros([2, 1] * 18, np.float32)
    refuses("takes 8 dimensions, got 9", x=dims, axes=tuple(range(-36, 0, 4)))
