"""`--traffic`: the bytes that each kind of plan reads from and writes to DRAM, counted by ncu.

ncu runs this module as a child, which runs one plan of each kind once on big arrays; between two of
them it runs a MARK, a softmax of one tiny row that no other case's grid resembles. ncu empties the
caches before every kernel (--cache-control all), so the second launch of split_k never finds what
the first one left in L2: its figure is the most it can be. What is still in L2 when a kernel ends
is not written yet, so writes may count less than the output.
"""

import argparse
import csv
import dataclasses
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxsoftmax import Plan

from . import candidates
from .plans import describe, kind

METRICS = {
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "l2": "lts__t_bytes.sum",
}
# The rows of the first shape that are on their way at one time fit in L2, those of the second do
# not: what the second read of two_pass costs differs.
SHAPES = ((8192, 32768), (256, 1048576))
MARK_SHAPE, MARK = (1, 8), Plan("one_pass", 32, 1, 2)
ONCE = 1.05  # times the input that a one-pass plan may read
READ_ONCE = ("one_pass", "cluster", "ring", "ring_cluster")
UNITS = {"": 1, "byte": 1, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}


def read_csv(text: str) -> list[dict[str, Any]]:
    """A dict for each kernel in ncu's --csv output: name, blocks, threads, METRICS in bytes."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("ncu wrote no table: " + " ".join(lines[-8:])[-600:])
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not (row["ID"] or "").isdecimal():
            continue
        kernel = kernels.setdefault(
            row["ID"],
            {"name": row["Kernel Name"], "grid": _size(row, "Grid"), "block": _size(row, "Block")},
        )
        for field, metric in METRICS.items():
            if row["Metric Name"] == metric:
                if (unit := UNITS.get((row["Metric Unit"] or "").lower())) is None:
                    raise ValueError(f"ncu counts {metric} in {row['Metric Unit']!r}")
                kernel[field] = float(row["Metric Value"].replace(",", "")) * unit
    for kernel in kernels.values():
        if missing := [METRICS[f] for f in METRICS if f not in kernel]:
            raise ValueError(f"ncu measured no {', '.join(missing)} of {kernel['name']}")
    return list(kernels.values())


def _size(row: dict[str, str], of: str) -> int:
    """Blocks of a grid or threads of a block, from "(2, 1, 1)"."""
    return math.prod(map(int, re.findall(r"\d+", row[f"{of} Size"])))


def between_marks(kernels: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The kernels behind each mark."""
    groups: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if (kernel["grid"], kernel["block"]) == (1, MARK.threads):
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def tried(dtype: str, shapes: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], Plan]]:
    """One plan of each kind on each shape."""
    from .check import limits_here

    limits = limits_here()
    return [
        (shape, plan)
        for shape in shapes
        for plan in candidates.by_kind("softmax", dtype, *shape, limits).values()
    ]


def entry(case: dict[str, Any], kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """A case's sums over its kernels, as ratios to the input (the output is of the same size)."""
    plan = Plan(**case["plan"])
    sums = {f"{f}_ratio": sum(k[f] for k in kernels) / case["bytes"] for f in METRICS}
    once = kind(plan) not in READ_ONCE or sums["read_ratio"] <= ONCE
    good = bool(kernels) and case["error"] is None and once
    names = {"name": describe(plan), "kind": kind(plan)}
    return case | names | sums | {"kernels": kernels, "ok": good}


def child(dtype: str, shapes: tuple[tuple[int, int], ...], told: Path) -> None:
    """Runs every case once, each after a mark; writes what they are."""
    import jax
    import jax.numpy as jnp

    from jaxsoftmax import _primitive

    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)

    def run(x: Any, plan: Plan) -> str | None:
        try:
            jax.block_until_ready(_primitive.bind("softmax", x, axes=(-1,), path=plan))
        except Exception as error:  # whatever it is, it is this plan's, and it is reported
            return f"{type(error).__name__}: {error}"
        return None

    tiny = jnp.zeros(MARK_SHAPE, dtype)
    cases, shape_of, x = [], None, tiny
    for shape, plan in tried(dtype, shapes):
        if shape != shape_of:
            del x
            x = jnp.tile(jnp.arange(shape[1]) % 1013 / 100, (shape[0], 1)).astype(dtype)
            shape_of = shape
        run(tiny, MARK)
        error = run(x, plan)
        cases.append(
            {"shape": shape, "plan": dataclasses.asdict(plan), "bytes": x.nbytes, "error": error}
        )
    told.write_text(json.dumps(cases))


def command(dtype: str, shapes: tuple[tuple[int, int], ...], log: Path, told: Path) -> list[str]:
    return [
        *("ncu", "--csv", "--print-units", "base", "--clock-control", "none"),
        *("--cache-control", "all", "--kernel-name-base", "demangled"),
        *("--kernel-name", "regex:jaxsoftmax", "--metrics", ",".join(METRICS.values())),
        *("--log-file", str(log), sys.executable, "-m", "bench.traffic", dtype, str(told)),
        *(f"{rows}x{n}" for rows, n in shapes),
    ]


def measure(dtype: str, shapes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """An entry for each case; ValueError where ncu or the child did not do its part."""
    with tempfile.TemporaryDirectory(prefix="jaxsoftmax-bench-") as folder:
        log, told = Path(folder) / "ncu.csv", Path(folder) / "cases.json"
        root = Path(__file__).resolve().parent.parent
        # ncu saves what a kernel writes: leave it memory to do so.
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(
            command(dtype, shapes, log, told), cwd=root, env=env, capture_output=True, text=True
        )
        text = log.read_text() if log.exists() else ""
        if done.returncode or not told.exists():
            raise ValueError(f"ncu: status {done.returncode}: {(text + done.stderr)[-1500:]}")
        cases = json.loads(told.read_text())
        groups = between_marks(read_csv(text))
    if len(groups) != len(cases):
        raise ValueError(f"ncu saw {len(groups)} marks for {len(cases)} cases")
    return [entry(case, kernels) for case, kernels in zip(cases, groups, strict=True)]


def run(out: Any, args: argparse.Namespace, progress: Any) -> bool:
    """Measures, prints; whether every one-pass plan reads its input once."""
    if shutil.which("ncu") is None:
        out.line("--traffic needs ncu (Nsight Compute) on PATH, and there is none", "bold red")
        return False
    shapes = tuple(args.grid) if args.shapes else SHAPES
    progress.add_task(f"ncu on {len(shapes)} shapes", total=None)
    try:
        entries = measure(args.dtype, shapes)
    except ValueError as error:
        out.line(str(error), "bold red")
        return False
    out.line(f"{'shape':>14} {'plan':<26} {'read/in':>8} {'written/out':>11} {'L2/in':>8}")
    for case in entries:
        bad = f"MORE THAN {ONCE} READS" if case["kernels"] else "NOT SEEN BY NCU"
        note = "" if case["ok"] else case["error"] or bad
        out.line(
            f"{'x'.join(map(str, case['shape'])):>14} {case['name']:<26} "
            f"{case['read_ratio']:>8.3f} {case['written_ratio']:>11.3f} {case['l2_ratio']:>8.3f} "
            f"{note}",
            None if case["ok"] else "bold red",
        )
    out.data["traffic"] = entries
    return all(case["ok"] for case in entries)


if __name__ == "__main__":
    child(
        sys.argv[1],
        tuple((int(r), int(n)) for r, n in (text.split("x") for text in sys.argv[3:])),
        Path(sys.argv[2]),
    )
