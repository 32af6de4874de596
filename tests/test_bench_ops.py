"""The benchmark's judge, its table of ops, the loss and what it reads in a program's HLO."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from bench import candidates, cases, check, hlo, judge, loss, ops, runs, shapes, timing
from jaxsoftmax import _ops, _plan

FORWARD = ("softmax", "log_softmax", "logsumexp")


# --- the ops ---


def test_every_kernel_is_measured_and_judged():
    assert set(ops.OPS) == set(_ops.OPS) == set(judge.ORACLES)
    assert all(op.ceiling in cases.CEILINGS for op in ops.OPS.values())
    assert [op for op in ops.OPS if not ops.is_gradient(op)] == list(FORWARD)


def test_rows_of_a_table():
    assert list(ops.rows_of(["logsumexp_bwd"])) == ["logsumexp_bwd"]
    assert ops.rows_of(ops.CHOICES["both"]) == {
        "softmax": ("softmax",),
        "softmax_bwd": ("softmax_bwd",),
        "softmax+bwd": ("softmax", "softmax_bwd"),
    }
    assert len(ops.rows_of(ops.CHOICES["all"])) == 9


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operands_are_those_of_the_public_gradient(cpu_backend, dtype):
    buffers = runs.make_buffers((8, 100), dtype)
    timed = cases.op_cases(buffers, jaxsoftmax, "ours", ops.OPS)
    assert [case.label for case in timed] == [f"ours_{what}" for what in ops.rows_of(ops.OPS)]
    for op in ops.OPS:
        (case,) = (case for case in timed if case.label == f"ours_{op}")
        result, operands = case.fn(*case.inputs[0]), ops.inputs(op, buffers)[0]
        assert len(operands) == _ops.OPS[op].inputs + _ops.OPS[op].given
        assert check.near(op, operands, result)
        assert check.error(op, operands, result) <= judge.bound(op, dtype)
        assert not check.near(op, operands, result * 1.1 + 0.5)
        assert check.error(op, operands, result.at[3].set(jnp.nan)) == np.inf
        theirs = cases.op_cases(buffers, jax.nn, "jax", [op])[-1]
        assert theirs.fn(*theirs.inputs[0]).shape == result.shape


@pytest.mark.parametrize("op", ops.OPS)
def test_candidates_stream_what_is_read_once(op):
    def streamed(shape):
        found = candidates.candidates(op, "float16", *shape, _plan.LIMITS["h200"])
        return sum(plan.path == "two_pass" for plan in found)

    once = op in ("logsumexp", "logsumexp_bwd")
    assert all(streamed(shape) >= (2 if once else 1) for shape in shapes.GPU)
    assert streamed((8192, 32768)) >= (4 if once else 3)


# --- the judge ---


@pytest.mark.parametrize("op", ops.OPS)
@pytest.mark.parametrize("dtype", _plan.DTYPES)
def test_judge_of_right_and_wrong_results(op, dtype):
    """The oracle rounded once is within half a unit, and what is off by more is seen."""
    rng = np.random.default_rng(1)
    x = judge.hard_rows(300, jnp.dtype(dtype), rng)
    expected = judge.expected(op, judge.hard_operands(op, x, rng))
    got = expected.want.astype(dtype)
    assert expected.worst(got) <= 0.5
    unit = np.broadcast_to(expected.unit, got.shape)
    finite = np.isfinite(expected.want) & (np.abs(expected.want) > expected.tiny)
    assert np.isfinite(got).sum() < got.size  # specials are among them
    off = np.where(finite, 3 * unit + expected.slack, 0)
    assert 2.4 <= expected.worst(got.astype(off.dtype) + off) <= 3.6
    wrong = got.copy()
    wrong[0] = np.nan
    assert expected.worst(wrong) == np.inf
    wrong[0] = -np.inf
    assert expected.worst(wrong) == np.inf
    assert expected.worst(got[1:]) == np.inf


def test_units_of_the_logarithms():
    x = np.array([[-10.0, -10.0, -200.0]], np.float32)
    expected = judge.expected("logsumexp", [x])
    assert expected.want == pytest.approx(-10 + np.log(2)) and expected.unit == 2.0**-20
    expected = judge.expected("log_softmax", [np.array([[0.0, -40.0]], np.float32)])
    assert abs(expected.want[0, 0]) < 1e-17  # next to nothing, so the absolute bound is what counts
    assert expected.worst(np.array([[1e-7, -40]], np.float32)) == 0


# --- the HLO reader ---

HLO = """\
HloModule jit_loss, is_scheduled=true, entry_computation_layout={(bf16[4,8]{1,0})->(f32[])}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b), metadata={op_name="jit(f)/add"}
}

%fused_scatter (p.0: bf16[4,8], p.1: s32[4,2], p.2: bf16[4]) -> bf16[4,8] {
  %p.0 = bf16[4,8]{1,0} parameter(0)
  %flat = bf16[32]{0} bitcast(%p.0)
  %p.1 = s32[4,2]{1,0} parameter(1)
  %p.2 = bf16[4]{0} parameter(2)
  %scatter = bf16[32]{0} scatter(%flat, %p.1, %p.2), index_vector_dim=1, to_apply=%add
  ROOT %back = bf16[4,8]{1,0} bitcast(%scatter)
}

%fused_gather (p.3: bf16[4,8], p.4: s32[4]) -> bf16[4] {
  %p.3 = bf16[4,8]{1,0} parameter(0)
  %p.4 = s32[4]{0} parameter(1)
  ROOT %gather = bf16[4]{0} gather(%p.3, %p.4), slice_sizes={1,1}
}

%fused_both (p.5: bf16[4,8], p.6: bf16[4,8]) -> (f32[4], bf16[4,8]) {
  %p.5 = bf16[4,8]{1,0} parameter(0)
  %p.6 = bf16[4,8]{1,0} parameter(1)
  %more = bf16[4,8]{1,0} add(%p.5, %p.6)
  %row = f32[4]{0} reduce(%more, %p.6), dimensions={1}, to_apply=%add
  ROOT %pair = (f32[4]{0}, /*index=1*/bf16[4,8]{1,0}) tuple(%row, %more)
}

%command_buffer (q.0: bf16[4,8]) -> bf16[4,8] {
  %q.0 = bf16[4,8]{1,0} parameter(0)
  ROOT %copy.1 = bf16[4,8]{1,0} copy(%q.0)
}

ENTRY %main.1 (logits: bf16[4,8], labels: s32[4]) -> (f32[], bf16[4,8]) {
  %logits = bf16[4,8]{1,0:T(8,128)} parameter(0), metadata={op_name="logits"}
  %labels = s32[4]{0} parameter(1)
  %call.1 = (bf16[4]{0}, f32[4]{0}) custom-call(bf16[4,8]{1,0} %logits), \
custom_call_target="jaxsoftmax.logsumexp", api_version=API_VERSION_TYPED_FFI
  %max = f32[4]{0} get-tuple-element(%call.1), index=1
  %few = bf16[4]{0} fusion(%logits, %labels), kind=kLoop, calls=%fused_gather
  %dx = bf16[4,8]{1,0} custom-call(%logits, %max), custom_call_target="jaxsoftmax.logsumexp_bwd"
  %moved = bf16[4,8]{1,0} call(%dx), to_apply=%command_buffer
  %wide = f32[4,8]{1,0} convert(%moved)
  %both = (f32[4]{0}, bf16[4,8]{1,0}) fusion(%logits, %dx), kind=kInput, calls=%fused_both
  %raw = bf16[4,8]{1,0} dynamic-update-slice(%dx, %few, %labels, %labels)
  %result = bf16[4,8]{1,0} fusion(%dx, %labels, %few), kind=kInput, calls=%fused_scatter
  %mean = f32[] constant(1)
  ROOT %all = (f32[], bf16[4,8]{1,0}) tuple(%mean, %result)
}
"""


@pytest.mark.parametrize("percent", [True, False])
def test_passes_of_a_program(percent):
    text = HLO if percent else HLO.replace("bf16[4,8]{1,0} %logits", "logits").replace("%", "")
    found = hlo.traffic(text, 32)
    assert [(f["name"], f["what"], f["reads"], f["writes"]) for f in found] == [
        ("call.1", "kernel", 1, 0),
        ("few", "gather", 0, 0),
        ("dx", "kernel", 1, 1),
        ("copy.1", "pass", 1, 1),
        ("wide", "pass", 1, 1),
        ("both", "pass", 2, 1),
        ("raw", "in place", 0, 1),
        ("result", "in place", 0, 1),
    ]
    assert hlo.traffic(text, 12345) == []


def test_passes_need_an_entry():
    with pytest.raises(ValueError, match="no entry"):
        hlo.traffic(HLO.split("ENTRY")[0], 32)


def test_passes_of_programs_here(cpu):
    """A cotangent that is filled is a pass; on float32 XLA scatters into what a kernel wrote."""
    logits, labels = jnp.zeros((16, 96)), jnp.zeros(16, jnp.int32)
    (ours,) = (c for c in loss.programs([(logits, labels)]) if c.label == "ours log_softmax")
    text = jax.jit(ours.fn).lower(logits, labels).compile().as_text()
    found = [f["what"] for f in hlo.traffic(text, logits.size)]
    kernels = 2 if jaxsoftmax._ffi.REASON is None else 0
    assert found.count("kernel") == kernels and found.count("pass") >= 1
    assert (
        hlo.traffic(jax.jit(jnp.tanh).lower(logits).compile().as_text(), 16 * 96)[0]["reads"] == 1
    )


# --- the loss ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loss_of_one_shape(cpu_backend, dtype):
    entry = loss.one_shape((24, 256), dtype, timing.Effort(1, 0.01))
    assert entry["ok"] and len(entry["forms"]) == 4
    assert json.loads(json.dumps(entry))["ideal_us"] > 0
    printed = [line for line, _ in loss.lines(entry)]
    assert len([line for line in printed if "target" in line]) == 3
    assert all(any(label in line for line in printed) for label in entry["forms"])


def test_a_wrong_loss_is_seen(cpu_backend):
    logits = jax.random.normal(jax.random.key(0), (20, 64))
    labels = jnp.arange(20, dtype=jnp.int32)
    made = loss.programs([(logits, labels)])
    assert [case.label for case in made] == [
        *("ours log_softmax", "jax.nn log_softmax", "ours logsumexp", "jax.nn logsumexp")
    ]
    case = made[2]
    right = case.fn(logits, labels)
    assert loss.errors(case, "float32", right)["ok"]
    assert not loss.errors(case, "float32", (right[0] + 1, right[1]))["ok"]
    assert not loss.errors(case, "float32", (right[0], right[1].at[3, 5].multiply(1.01)))["ok"]
    fn = case.fn
    case.fn = lambda x, y: (fn(x, y)[0], fn(x, y)[1].at[0, 0].set(jnp.nan))
    assert not loss.errors(case, "float32", right)["ok"]


def test_ratios_and_what_is_ideal():
    samples = {
        f"{label} {name}": timing.Sample([us], [us], ["kernel"])
        for us, (label, name) in enumerate(
            ((label, name) for name in loss.FORMS for label in loss.LIBRARIES), 1
        )
    }
    assert [r["ratio"] for r in loss.ratios(samples)] == [2.0, 4 / 3, 2 / 3]
    value, gradient = loss.oracle(np.zeros((2, 4)), np.array([0, 3]))
    assert value == pytest.approx(np.log(4)) and gradient[1].tolist() == [0.125] * 3 + [-0.375]
