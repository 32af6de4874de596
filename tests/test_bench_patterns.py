"""The benchmark's patterns and the attention example: shapes, programs, errors, targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_bench_tables import ROOT, bench

import jaxsoftmax
from bench import hlo, pattern_cases, patterns, timing
from bench.pattern_cases import CAUSAL, FULL, KEY, PLAIN, SCALED, Group

TINY = (
    Group("attention", (2, 2, 16, 24)),
    Group("axis", (3, 7, 8, 5), 1),
    Group("axis", (40, 6), 0),
)
QUICK = timing.Effort(1, 0.01)


# --- the shapes ---


def test_grids():
    full = pattern_cases.grid(gpu=True, quick=False)
    assert len(full) == 10 and len({str(group) for group in full}) == 10
    assert all(
        str(group) in {str(g) for g in full} for group in pattern_cases.grid(gpu=True, quick=True)
    )
    for gpu, quick in ((True, False), (True, True), (False, False), (False, True)):
        families = {group.family for group in pattern_cases.grid(gpu, quick)}
        assert families == {"attention", "axis", "router"}


def test_shapes_are_chosen_by_name():
    full = pattern_cases.grid(gpu=True, quick=False)
    found = pattern_cases.parse("4096x8192, 2x16x4096x4096", full)
    assert [str(group) for group in found] == ["4096x8192 axis=0", "2x16x4096x4096"]
    with pytest.raises(ValueError, match=r"unknown shape '7x7'.* 131072x64"):
        pattern_cases.parse("7x7", full)


def test_what_must_move():
    """Arrays of 2^30 bytes: what the figures that the targets come from count."""
    moved = {
        (kind, what): pattern_cases.units(kind, what)
        for kind in (KEY, CAUSAL)
        for what in pattern_cases.WHATS
    }
    assert [int(u * 2**30) for u in moved.values()] == [
        *(2147483648, 5368709120, 1610612736, 3758096384)
    ]


def test_masks():
    shape = (4, 2, 6, 8)
    key = pattern_cases.mask_of(KEY, shape)
    assert key.shape == (4, 1, 1, 8) and key.sum(-1).min() >= 4 and not key.all()
    for kind in (FULL, CAUSAL):
        np.testing.assert_array_equal(pattern_cases.mask_of(kind, shape), np.tri(6, 8, dtype=bool))
    assert pattern_cases.mask_of(SCALED, shape).all()


# --- one shape ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group", TINY, ids=str)
def test_one_group(cpu_backend, group, dtype):
    kernels = jaxsoftmax._ffi.REASON is None
    entry = patterns.one_group(group, dtype, QUICK)
    assert entry["ok"] or not kernels, entry["patterns"]
    rows = {(row["kind"], row["what"]): row for row in json.loads(json.dumps(entry["patterns"]))}
    assert set(rows) == {(kind, what) for kind in group.kinds for what in group.whats}
    for (kind, what), row in rows.items():
        assert (row["alone_us"] is not None) == (what == "fwd+bwd")
        assert (row["over_full"] is not None) == (kind == CAUSAL)
        assert (row["over_plain"] is not None) == (kind == SCALED)
        alone = group.family == "attention" and kind in pattern_cases.OURS_ALONE
        assert (row["ratio"] is None) == alone
        assert len(row["jax_forms_us"]) == (0 if alone else 2 if kind in (KEY, CAUSAL) else 1)
        assert row["name"] in patterns.line(row)
        assert row["passes"] == [] or not kernels, row["passes"]


@pytest.mark.parametrize("form, kind", [("ours", SCALED), ("ours", KEY), ("where=", CAUSAL)])
@pytest.mark.parametrize("what", pattern_cases.WHATS)
def test_a_wrong_result_is_seen(cpu_backend, form, kind, what):
    group = TINY[0]
    made = pattern_cases.programs(group, patterns.buffers_of(group, "bfloat16"))
    (timed,) = (t for t in made if (t.form, t.kind, t.what) == (form, kind, what))
    assert pattern_cases.errors(group, timed)["ok"]
    right = timed.case.fn

    def wrong(change, which):
        def fn(*given):
            found = list(right(*given)) if what == "fwd+bwd" else [right(*given)]
            found[which] = change(found[which])
            return found[0] if what == "fwd" else found

        timed.case.fn = fn
        found = pattern_cases.errors(group, timed)
        assert not found["ok"], found
        return found

    for which, name in enumerate(("y", "dx")[: 1 + (what == "fwd+bwd")]):
        wrong(lambda a: 2 * a, which)
        found = wrong(lambda a: a.at[1, 1, 3, 2].add(0.5), which)
        assert not found[name]["near"] and found[name]["ulp"] > found[name]["bound"]
        wrong(lambda a: a.at[0, 0, 0, 0].set(jnp.nan), which)


def test_where_nothing_may_be(cpu_backend):
    """A little outside of the mask is an error."""
    group = TINY[0]
    made = pattern_cases.programs(group, patterns.buffers_of(group, "float32"))
    (timed,) = (t for t in made if (t.form, t.kind, t.what) == ("ours", CAUSAL, "fwd"))
    right = timed.case.fn
    timed.case.fn = lambda *given: right(*given).at[0, 0, 0, 5].set(1e-6)
    assert not pattern_cases.errors(group, timed)["ok"]


# --- targets ---


def rows(**given):
    base = {"name": "a", "family": "axis", "kind": PLAIN, "what": "fwd", "shape": (8, 4), "axis": 0}
    return base | {"ratio": 2.0, "of_copy": 0.9, "over_full": None} | given


def test_targets():
    of = patterns.Target("text", "ratio", 3.0, "axis")
    found = of.found([rows(), rows(ratio=8.0, name="b"), rows(family="router", ratio=1.0)])
    assert found["value"] == 2 and found["rows"] == 2 and found["worst"] == "a"
    assert not found["met"] and "MISSED" in "".join(patterns.target_lines([found]))
    mean = patterns.Target("text", "ratio", 4.0, "axis", mean=True)
    found = mean.found([rows(), rows(ratio=8.0)])
    assert found["value"] == pytest.approx(4) and "geometric" in "".join(
        patterns.target_lines([found])
    )
    assert patterns.Target("t", "over_full", 1, "axis").found([rows()]) is None
    assert patterns.Target("t", "ratio", 1, "axis", longest=9).found([rows()]) is None
    assert patterns.Target("t", "ratio", 1, "axis", longest=8).found([rows()]) is not None


# --- matrix products in the HLO ---


def test_products(cpu):
    def text(run):
        a = jnp.ones((24, 40))
        return jax.jit(run).lower(a).compile().as_text()

    found = hlo.traffic(text(lambda a: jnp.tanh(a @ a.T)), 24 * 24)
    assert "product" in {f["what"] for f in found}
    assert {f["what"] for f in hlo.traffic(text(lambda a: jnp.exp(a)), 960)} == {"pass"}
    cublas = """
ENTRY %main (a: bf16[4,8], b: bf16[8,8]) -> bf16[4,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[8,8]{1,0} parameter(1)
  ROOT %gemm = (bf16[4,8]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"
}
"""
    assert [f["what"] for f in hlo.traffic(cublas, 32)] == ["product"]


# --- the command line ---


def test_command_line(tmp_path):
    done = bench("--patterns", "--quick", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("*_bfloat16_patterns_quick.json")
    data = json.loads(result.read_text())
    assert data["complete"] and len(data["shapes"]) == 4
    assert {t["target"]["family"] for t in data["targets"]} == {"attention", "axis"}
    assert "geometric mean" in done.stdout and "memory" in done.stdout
    assert bench("--patterns", "--op", "softmax", out=tmp_path).returncode == 2
    done = bench("--patterns", "--quick", "--shapes", "7x7", out=tmp_path)
    assert done.returncode == 2 and "unknown shape" in done.stderr


def test_attention_example(tmp_path):
    command = [sys.executable, "examples/attention.py", "--out", str(tmp_path / "attention.json")]
    path = os.pathsep.join(p for p in sys.path if Path(p or ".").resolve() != ROOT / "tests")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "all right" in done.stdout, done.stdout + done.stderr
    (entry,) = json.loads((tmp_path / "attention.json").read_text())["sizes"]
    assert entry["wrong"] == [] and set(entry["times_us"]) == {"forward", "gradient"}
    if jaxsoftmax._ffi.REASON is None:
        assert [read["counts"]["kernel"] for read in entry["hlo"].values()] == [1, 2]
