"""The benchmark's tables and modes: regret, cliffs, ncu's table, the command line."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from test_bench import CSV

from bench import (
    candidates,
    cliffs,
    ops,
    peers,
    programs,
    regret,
    report,
    timing,
    traffic,
)
from jaxsoftmax import Plan, _plan

ROOT = Path(__file__).resolve().parents[1]
H200, A100 = _plan.LIMITS["h200"], _plan.LIMITS["a100"]


# --- regret and cliffs ---


def sample(*rounds: float) -> timing.Sample:
    return timing.Sample(list(rounds), list(rounds), spans=list(rounds))


def test_loss_and_spread():
    samples = {"choice": sample(11, 11, 11.1, 11.2, 11.4), "best": sample(10, 10, 10, 10, 10.1)}
    found = regret.loss(samples, "choice")
    assert found["best"] == "best" and found["loss_percent"] == pytest.approx(11.0)
    assert found["spread_percent"] == pytest.approx(100 * 0.2 / 11.1)
    assert found["beyond_percent"] == pytest.approx(11.0 - 100 * 0.2 / 11.1)
    assert regret.loss({"choice": sample(1, 2)}, "choice")["beyond_percent"] == 0


def test_finalists_are_few_and_hold_the_choice():
    first = {f"p{i}": 10.0 + i / 100 for i in range(40)}
    assert regret.finalists(first, "p39") == [f"p{i}" for i in range(regret.FINAL)] + ["p39"]
    assert regret.finalists({"a": 1.0, "b": 5.0}, "gone") == ["a", "b", "gone"]


@pytest.mark.parametrize("op", ops.OPS)
def test_regret_of_one_shape(cpu_backend, monkeypatch, op):
    entry = regret.one_shape(op, "float32", (64, 256))
    assert entry["ok"] and len(entry["plans"]) >= 2 and entry["score"] > 0
    assert entry["beyond_percent"] <= entry["loss_percent"]
    assert list(entry["ceilings"]) == [ops.OPS[op].ceiling]
    json.dumps(entry)
    assert "64x256" in regret.line(entry) and regret.summary([entry])["shapes"] == 1
    real = candidates.candidates
    bad = Plan("one_pass", 1, reg_packs=1)  # holds 4 columns
    monkeypatch.setattr(candidates, "candidates", lambda *a: [*real(*a), bad])
    entry = regret.one_shape(op, "float32", (64, 256))
    assert not entry["ok"] and list(entry["failures"]) == [programs.label(bad)]
    assert "best" in entry  # the others are measured all the same


def test_a_wrong_result_is_a_failure(cpu_backend, monkeypatch):
    monkeypatch.setattr(programs, "right", lambda *a: False)
    made, failures = programs.prepare("softmax", [Plan("two_pass", 1)], [(jnp.zeros((4, 8)),)])
    assert made == [] and set(failures.values()) == {"wrong result"}


def test_changes_are_found_to_the_pack():
    assert cliffs.changes(lambda p: (p > 5, p > 1000, p > 1001), 5000) == [5, 1000, 1001]
    assert cliffs.changes(lambda p: 0, 5000) == []


@pytest.mark.parametrize("op", ops.OPS)
def test_pairs_are_the_planners_thresholds(op):
    found = cliffs.pairs(op, "float16", H200)
    assert set(cliffs.POWERS) <= set(found)
    for c, why in found.items():
        assert cliffs.rows_for(op, "float16", c) * c * 2 * ops.OPS[op].units >= cliffs.MOVED
        if why == "threshold":
            sides = [cliffs.nature(op, "float16", n, H200) for n in (c, c + 8)]
            assert sides[0] != sides[1]


# --- ncu ---

METRICS = ["dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"]


def ncu_table(*kernels: tuple[str, int, int, tuple[float, ...]], unit: str = "byte") -> str:
    lines = [
        "==PROF== Connected to process 1",
        '"ID","Process ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit",'
        '"Metric Value"',
    ]
    for number, (name, grid, block, values) in enumerate(kernels):
        lines += [
            f'"{number}","1","{name}","({block}, 1, 1)","({grid}, 1, 1)","{m}","{unit}","{v:,.0f}"'
            for m, v in zip(METRICS, values, strict=True)
        ]
    return "\n".join(lines) + "\n==PROF== Disconnected\n"


def test_ncu_table():
    mark = ("one_pass<a, b>(c, d)", 1, 32, (0, 0, 0))
    fold, ring = ("fold", 9, 256, (5e6, 0, 6e6)), ("ring", 9, 288, (5e6, 4e6, 1e7))
    kernels = traffic.read_csv(ncu_table(mark, fold, ("map", 9, 256, (5e6, 5e6, 1e7)), mark, ring))
    assert [k["read"] for k in kernels] == [0, 5e6, 5e6, 0, 5e6]
    cut, held = traffic.between_marks(kernels)
    case = {"shape": [8, 8], "bytes": 5_000_000, "error": None}
    entry = traffic.entry(case | {"plan": {"path": "split_k", "threads": 256}}, cut)
    assert (entry["read_ratio"], entry["written_ratio"], entry["l2_ratio"]) == (2.0, 1.0, 3.2)
    assert entry["ok"] and entry["kind"] == "split_k"
    ring_plan = {"path": "one_pass", "threads": 256, "smem_packs": 8}
    assert traffic.entry(case | {"plan": ring_plan}, held)["ok"]
    assert not traffic.entry(case | {"plan": ring_plan, "bytes": 4_700_000}, held)["ok"]
    assert not traffic.entry(case | {"plan": ring_plan}, [])["ok"]
    (scaled,) = traffic.read_csv(ncu_table((*mark[:3], (1, 2, 3)), unit="Kbyte"))
    assert scaled["written"] == 2000
    with pytest.raises(ValueError, match="no permission"):
        traffic.read_csv("==ERROR== no permission")
    with pytest.raises(ValueError, match="in 'furlong'"):
        traffic.read_csv(ncu_table(fold, unit="furlong"))
    with pytest.raises(ValueError, match="lts__t_bytes"):
        traffic.read_csv("\n".join(ncu_table(fold).splitlines()[:-2]))


FAKE_NCU = """#!{python}
import json, subprocess, sys
METRICS = {metrics}
{table}
args = sys.argv[1:]
child = args.index("{python}")
subprocess.run(args[child:], check=True)
cases = json.load(open(args[child + 4]))
kernels = []
for case in cases:
    kernels.append(("mark", 1, 32, (0, 0, 0)))
    kernels.append(("kernel", 7, 256, (case["bytes"], case["bytes"], 2 * case["bytes"])))
open(args[args.index("--log-file") + 1], "w").write(ncu_table(*kernels))
"""


def test_traffic_with_a_fake_ncu(tmp_path, monkeypatch):
    fake = tmp_path / "ncu"
    text = FAKE_NCU
    parts = {"python": sys.executable, "metrics": METRICS, "table": inspect.getsource(ncu_table)}
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", str(part))
    fake.write_text(text)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    entries = traffic.measure("float32", ((16, 4096), (4, 8192)))
    assert {e["kind"] for e in entries} == {"one_pass", "two_pass", "split_k"}
    assert all(e["ok"] and e["read_ratio"] == 1.0 for e in entries)


# --- the command line ---


def bench(*args: str, out: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("rich")
    command = [sys.executable, "-m", "bench", *args, "--out", str(out)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_command_line(tmp_path):
    done = bench("--quick", "--shapes", "128x1024", "--no-plot", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the seed's 13" in done.stdout and "memory" in done.stdout
    (result,) = tmp_path.glob("*_float32_quick.json")
    data = json.loads(result.read_text())
    assert data["complete"] and data["means"]["softmax_score"]["all 36"]["shapes"] == 1
    rows = data["shapes"][0]["rows"]
    assert [r["what"] for r in rows] == ["softmax", "softmax_bwd", "softmax+bwd"]
    assert [r["ceiling"] for r in rows] == ["copy", "triad", "copy + triad"]
    assert all(r["score"] == pytest.approx(r["ceiling_us"] / r["ours_us"]) for r in rows)
    (tmp_path / "peers.csv").write_text(CSV)
    both = ["--peers", str(tmp_path / "peers.csv"), "--from", str(result)]
    done = bench(*both, out=tmp_path)
    assert done.returncode == 0 and "128x1024" in done.stdout, done.stdout + done.stderr
    assert bench("--from", str(result), out=tmp_path).returncode == 2


def test_table_of_every_op(tmp_path):
    args = ("--op", "all", "--quick", "--dtype", "bfloat16", "--shapes", "128x1024")
    done = bench(*args, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("*_bfloat16_all_quick.json")
    (shape,) = json.loads(result.read_text())["shapes"]
    names = [what for op in ("softmax", "log_softmax", "logsumexp") for what in around(op)]
    assert [row["what"] for row in shape["rows"]] == names
    timed = {f"{whose}_{what}" for whose in ("ours", "jax") for what in names}
    assert timed | {"copy_words", "triad_words", "read_rows"} <= set(shape["samples"])
    assert all(f"{op} score" in done.stdout for op in ops.OPS)
    assert result.with_suffix(".png").exists()


def around(op: str) -> tuple[str, ...]:
    return op, f"{op}_bwd", f"{op}+bwd"


@pytest.mark.parametrize("mode", ["--regret", "--seed-table", "--loss"])
def test_other_tables(tmp_path, mode):
    done = bench(mode, "--quick", "--shapes", "16x512", out=tmp_path)
    assert done.returncode == 0 and "16x512" in done.stdout, done.stdout + done.stderr


def test_loss_has_ops_of_its_own(tmp_path):
    done = bench("--loss", "--op", "softmax", out=tmp_path)
    assert done.returncode == 2 and "--op" in done.stderr


@pytest.mark.parametrize(
    "name, found",
    [("NVIDIA-H200_float16_softmax.json", 2), ("Intel-R-Xeon-R-Processor_float32.json", 4)],
)
def test_stored_results_are_read(tmp_path, name, found):
    """Of this version, and of the one before, whose rows have no score."""
    file = tmp_path / "peers.csv"
    file.write_text(CSV)
    stored = json.loads((ROOT / "bench/results" / name).read_text())
    rows = [row for shape in stored["shapes"] for row in shape["rows"]]
    dtype = stored["options"]["dtype"]
    pytest.importorskip("matplotlib")
    report.plot(stored, tmp_path / "plot.png")
    assert len(peers.compare(rows, peers.read(file), dtype)) == found
