"""What a run leaves behind: the table as it goes, a JSON file after every shape, and a plot."""

import datetime
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import jaxsoftmax
from jaxsoftmax import _ffi

from .check import Result
from .ops import OPS, renamed

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = {"copy": "copy", "triad": "two reads, one write", "read": "read"}  # as plots name them
CACHE_DEFAULT = 64 << 20  # assumed last-level cache where the device does not say


def device_limits() -> dict[str, Any]:
    """The attached GPU's limits, {} without one."""
    return (_ffi.NATIVE.device_limits() if _ffi.NATIVE is not None else None) or {}


def cache_bytes() -> int:
    """How much data must pass between two uses of a buffer for the second to be cold."""
    if jax.default_backend() == "cpu":
        return 32 << 20
    return 3 * int(device_limits().get("l2_bytes") or CACHE_DEFAULT)


def _output(*command: str) -> str | None:
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Where and with what this run was made."""
    device = jax.devices()[0]
    gpu = device.platform != "cpu"
    told = os.environ.get("BENCH_COMMIT")
    status = _output("git", "status", "--porcelain", "--untracked-files=no")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind if gpu else _cpu(),
        "platform": device.platform,
        "cpus": os.cpu_count(),
        "driver": driver.splitlines()[0] if gpu and driver else None,
        "limits": device_limits(),
        "jaxsoftmax": jaxsoftmax.__version__,
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "python": platform.python_version(),
        "formulas_because": _ffi.REASON,  # None where the kernels run
        "build_info": _ffi.NATIVE.build_info() if _ffi.NATIVE is not None else None,
        # A copy of the tree can be told which commit it is: its .git may be missing or another's.
        "commit": told or _output("git", "rev-parse", "HEAD"),
        "dirty": None if told or status is None else bool(status),
        "timing": "device time (profiler)" if gpu else "wall time (paired rounds)",
    }


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become their names."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


class Report:
    """Collects a run's results; every `save` leaves a whole file on disk."""

    def __init__(self, out: Path, name: str, options: dict[str, Any], console: "Console") -> None:
        self.console = console
        self.data: dict[str, Any] = {
            "schema": 1,
            "complete": False,
            "environment": environment(),
            "options": options,
            "check": [],
            "shapes": [],
        }
        env = self.data["environment"]
        device = "-".join("".join(c if c.isalnum() else " " for c in env["device"]).split())
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / f"{device[:40]}_{name}.json"
        commit = f"{(env['commit'] or 'unknown')[:12]}{' (dirty)' if env['dirty'] else ''}"
        self.line(
            f"jaxsoftmax {env['jaxsoftmax']} on {env['device']} ({env['platform']}), "
            f"jax {env['jax']}, Python {env['python']}, commit {commit}"
        )
        if _ffi.REASON is not None:
            self.line(f"WARNING: the jnp formulas are timed, not the kernels: {_ffi.REASON}")

    def line(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def save(self) -> None:
        """Writes the JSON beside its final name, then renames it: a reader never sees half."""
        part = self.path.with_suffix(".json.part")
        part.write_text(json.dumps(_plain(self.data), indent=1, allow_nan=False) + "\n")
        os.replace(part, self.path)


def check_table(results: list[Result]) -> Iterator[tuple[str, bool]]:
    """(line, all right) for each op and dtype: the worst ulp over all lengths, a column a path."""
    paths = list(dict.fromkeys(r.path for r in results))
    yield f"{'worst ulp (bound)':<28}" + "".join(f"{p:>13}" for p in paths), True
    for op, dtype in dict.fromkeys((r.op, r.dtype) for r in results):
        mine = [r for r in results if (r.op, r.dtype) == (op, dtype)]
        worst = [max((r.ulp for r in mine if r.path == p), default=None) for p in paths]
        cells = "".join(f"{'-' if w is None else format(w, '.2f'):>13}" for w in worst)
        bad = ", ".join(dict.fromkeys(f"{r.columns}" for r in mine if not r.ok))
        line = f"{f'{op} {dtype} ({mine[0].bound:g})':<28}{cells}"
        yield line + (f"  WRONG at {bad} columns" if bad else ""), not bad


def table_head() -> str:
    return (
        f"{'shape':>14} {'what':<15} {'path':<24} {'ulp':>6} {'ours us':>10} {'jax.nn us':>10} "
        f"{'ratio':>6} {'score':>6} {'GB/s':>7}"
    )


def table_row(row: dict[str, Any]) -> str:
    shape = "x".join(str(n) for n in row["shape"])
    error = "" if row["ulp"] is None else f"{row['ulp']:.2f}"
    return (
        f"{shape:>14} {row['what']:<15} {row['path']:<24} {error:>6} {row['ours_us']:>10.2f} "
        f"{row['jax_us']:>10.2f} {row['ratio']:>6.2f} {row['score']:>6.2f} "
        f"{row['gb_per_s']:>7.1f}"
    )


def ceilings(entry: dict[str, Any]) -> str:
    return ", ".join(f"{k} {c['us']:.2f} us ({c['by']})" for k, c in entry["ceilings"].items())


def ceilings_row(entry: dict[str, Any]) -> str:
    """What the bytes alone take: a score is the op's ceiling (ops.py) over our time."""
    shape = "x".join(str(n) for n in entry["shape"])
    return f"{shape:>14} {'memory':<15} {ceilings(entry)}"


def plot(data: dict[str, Any], path: Path) -> None:
    """GB/s against columns: a line of plots for each op; few rows left, many rows right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [renamed(row) for shape in data["shapes"] for row in shape.get("rows", [])]
    groups = [("fewer than 512 rows", lambda r: r < 512), ("512 rows or more", lambda r: r >= 512)]
    kinds = [op for op in OPS if any(r["what"] == op for r in rows)] or ["softmax"]
    figure, axes = plt.subplots(
        len(kinds),
        2,
        figsize=(12, 4 * len(kinds)),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for i, what in enumerate(kinds):
        for j, (title, belongs) in enumerate(groups):
            axis = axes[i][j]
            mine = [r for r in rows if r["what"] == what and belongs(r["shape"][0])]
            mine.sort(key=lambda r: (r["shape"][1], r["shape"][0]))
            if not mine:
                axis.set_visible(False)
                continue
            columns = [r["shape"][1] for r in mine]
            for label, key, style in (
                ("jaxsoftmax", "ours_us", "o-"),
                ("jax.nn", "jax_us", "s-"),
                (CEILINGS[OPS[what].ceiling], "ceiling_us", "k--"),
            ):
                speed = [r["bytes"] / r[key] / 1e3 for r in mine]
                axis.plot(columns, speed, style, label=label, markersize=4)
            axis.set(title=f"{what}, {title}")
            axis.set(xlabel="columns", ylabel="GB/s")
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            axis.legend()
    env = data["environment"]
    figure.suptitle(f"{data['options']['dtype']}, {env['device']}, jax {env['jax']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
