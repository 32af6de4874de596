"""The FFI target called past Python: it runs what it is told, and refuses what would be a fault."""

from __future__ import annotations

import cases
import jax
import numpy as np
import pytest
from contracts import as_dtype
from plans import HAND_PLANS, hand_plans
from runs import plain_operands, run_native

from jaxsoftmax import Plan
from jaxsoftmax._ops import OPS


@pytest.mark.parametrize("name", HAND_PLANS)
@pytest.mark.parametrize("op", OPS)
def test_the_handler_runs_what_it_is_told(platform, op, name):
    """The target called directly: leading dimensions are rows, the trailing ones a row."""
    plan = hand_plans(op, "float32", 100, platform).get(name)
    if plan is None:
        pytest.skip("not on this device")
    inputs, expected = cases.expected(op, cases.make("normal", 6, 100, as_dtype("float32")))
    for asked in {False, OPS[op].stats}:
        for leading, row in (((2, 3), (100,)), ((6,), (4, 25))):
            shaped = [a.reshape(leading + row if a.ndim > 1 else leading) for a in inputs]
            axes = tuple(range(-len(row), 0))
            found = run_native(op, *shaped, axes=axes, stats=asked, **plan.attributes())
            assert [a.shape for a in found[1:]] == [leading] * 2 * asked
            assert found[0].shape == leading + (() if OPS[op].reduces else row)
            expected.check(*(a.reshape((6, 100) if a.size > 6 else 6) for a in found))


@pytest.mark.parametrize("path", [-1, 3])
def test_cpp_refuses_an_unknown_path(platform, path):
    plan = Plan("two_pass", 32).attributes() | {"path": path}
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"path.*{path}"):
        run_native("softmax", np.zeros((2, 4), np.float32), **plan)


@pytest.mark.parametrize("op", OPS)
def test_cpp_refuses_wrong_operands_and_results(platform, op):
    """Their number, dtypes and shapes, of the rows and of one number a row: errors, not memory
    faults."""
    x, plan = np.zeros((3, 256), np.float32), Plan("two_pass", 32).attributes()
    right, what, a_row = plain_operands(op, x), OPS[op], jax.ShapeDtypeStruct((3,), np.float32)

    def refuses(says, *operands, **options):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxsoftmax.{op}: {says}"):
            run_native(op, *operands, **{**plan, **options})

    run_native(op, *right, **plan)
    count = f"takes {len(right)} operands"
    refuses(count, *right, x)
    refuses(count, *right, right[-1])
    if len(right) > 1:
        refuses(count, *right[:-1])
    for i, operand in enumerate(right):
        does_not_fit = f"operand {i} has a dtype" if i >= what.inputs else "no kernel for dtype"
        refuses(does_not_fit, *right[:i], operand.astype(np.int32), *right[i + 1 :])
        wrong = [operand[1:], operand[..., None], operand.reshape(-1)[:1]]
        for other in [*wrong, x if operand.ndim == 1 else x[:, 0]] if i else []:
            says = f"operand {i} must have the first operand's shape"
            refuses(says, *right[:i], other, *right[i + 1 :])
    # Results of another type or number than the op gives.
    result = a_row if what.reduces else jax.ShapeDtypeStruct(x.shape, x.dtype)
    shaped = jax.ShapeDtypeStruct(x.shape if what.reduces else (3,), np.float32)
    refuses("result 0 must have", *right, results=[shaped])
    refuses("no kernel for dtype", *right, results=[result.update(dtype=np.int32)])
    if what.reduces:
        refuses("result 0 has a dtype", *right, results=[result.update(dtype=np.float16)])
    for results in ([result, a_row], [result, a_row, a_row, a_row]):
        refuses(count, *right, results=results)
    if not what.stats:
        return refuses(count, *right, results=[result, a_row, a_row])
    other, shorter = jax.ShapeDtypeStruct((3,), np.float16), jax.ShapeDtypeStruct((2,), np.float32)
    for says, wrong in (("has a dtype", other), ("must have", shorter)):
        refuses(f"result 2 {says}", *right, results=[result, a_row, wrong])
        refuses(f"result 1 {says}", *right, results=[result, wrong, a_row])


@pytest.mark.parametrize("op", ["log_softmax_bwd", "logsumexp_bwd"])
def test_cpp_takes_the_dtypes_of_what_is_given(platform, op):
    """Statistics in the type of arithmetic, whatever the rows are; a cotangent in the rows'."""
    plan = Plan("two_pass", 32).attributes()
    for rows, number in ((np.float16, np.float32), (np.float64, np.float64)):
        x = np.zeros((3, 256), rows)
        a_row = {"stat": np.ones(3, number), "cotangent": np.ones(3, rows)}
        kinds = ["stat", "stat"] + ["cotangent"] * OPS[op].pulled
        right = [x] * OPS[op].inputs + [a_row[kind] for kind in kinds]
        run_native(op, *right, **plan)
        for i in range(OPS[op].inputs, len(right)):
            other = np.float16 if right[i].dtype != np.float16 else np.float32
            wrong = [*right[:i], right[i].astype(other), *right[i + 1 :]]
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"operand {i} has a dtype"):
                run_native(op, *wrong, **plan)


@pytest.mark.parametrize("op", OPS)
def test_cpp_refuses_other_faults(platform, op):
    """Row dimensions that there are not, and a short workspace."""
    operands, plan = plain_operands(op, np.zeros((2, 256), np.float32)), Plan("two_pass", 32)
    for axes, bits in (((-3,), 4), ((-1, -63), 2**62 + 1)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"axes.* of 2, got {bits}"):
            run_native(op, *operands, axes=axes, **plan.attributes())
    split = Plan("split_k", 32, splits=4).attributes()
    for stats in {False, OPS[op].stats}:
        with pytest.raises(jax.errors.JaxRuntimeError, match="workspace of 256 bytes, got 252"):
            run_native(op, *operands, workspace=63, stats=stats, **split)
