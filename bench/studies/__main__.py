"""Command line: compile the studies for the GPU at hand, run them, keep and plot the results.

    python3 -m bench.studies [--only l2,unroll,...] [--out DIR] [--plots DIR]
    python3 -m bench.studies --build DIR --arch sm_90     only compile, where there is no GPU

Exit status: 0 all right, 1 a wrong result or a run that failed, 2 a bad option.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAMES = ("l2", "unroll", "occupancy", "online", "which")
SOURCES = (
    *(HERE / f"{name}.cu" for name in ("harness", "studies", "which")),
    ROOT / "cpp" / "cuda" / "softmax.cu",  # the launch function that `which` calls
)
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-diag-suppress=20012")


def options(argv: list[str] | None = None) -> argparse.Namespace:
    summary = str(__doc__).split("\n")[0]
    parser = argparse.ArgumentParser(prog="python3 -m bench.studies", description=summary)
    parser.add_argument("--only", help=f"some of {', '.join(NAMES)}, separated by commas")
    parser.add_argument("--arch", default="native", help="what to compile for (the GPU at hand)")
    parser.add_argument("--build", type=Path, help="compile into this folder, and no more")
    parser.add_argument("--program", type=Path, help="run this program of an earlier --build")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of the JSON")
    parser.add_argument("--plots", type=Path, help="folder of the plots (default: --out)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until a run is stopped")
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else []
    if unknown := [name for name in args.only if name not in NAMES]:
        parser.exit(2, f"unknown study {unknown[0]!r}: some of {', '.join(NAMES)}\n")
    return args


def compile_program(folder: Path, arch: str) -> Path:
    """The program of the studies, linked with the library's kernels."""
    nvcc = os.environ.get("CUDACXX", "nvcc")

    def run(*rest: str | Path) -> None:
        command = [nvcc, f"-arch={arch}", *FLAGS, *rest]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"failed: {' '.join(map(str, command))}")

    def compiled(source: Path) -> Path:
        run("-c", source, "-o", folder / f"{source.stem}.o")
        return folder / f"{source.stem}.o"

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, SOURCES))
    run(*objects, "-o", folder / "studies")
    return folder / "studies"


def run_program(program: Path, only: list[str], timeout: float) -> tuple[list[dict[str, Any]], int]:
    """Every line it printed, and its exit status; killed, with the lines kept, after `timeout`."""
    lines = []
    with subprocess.Popen([program.resolve(), *only], stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        assert process.stdout is not None
        for text in process.stdout:
            lines.append(json.loads(text))
            print(text, end="", flush=True)
        status = process.wait()
        watchdog.cancel()
    return lines, status


def save(path: Path, stamp: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """One JSON document with a measurement on each line."""
    head = json.dumps({"schema": 1, **stamp}, indent=1)[:-2]
    body = ",\n".join(f"  {json.dumps(line)}" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "lines": [\n{body}\n ]\n}}\n')


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    if args.build:
        args.build.mkdir(parents=True, exist_ok=True)
        print(compile_program(args.build, args.arch))
        return 0
    # The environment's stamp asks JAX for its device: without this it would take the memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        from .. import report
        from . import plot
    except ImportError as error:
        sys.exit(f'{error}: run python3 -m pip install ".[bench]" first')
    with tempfile.TemporaryDirectory() as folder:
        program = args.program or compile_program(Path(folder), args.arch)
        lines, status = run_program(program, args.only, args.timeout)
    device = next((line["name"] for line in lines if line["study"] == "device"), None)
    if device is None:
        print(f"FAILED: status {status}, and no GPU was named", file=sys.stderr)
        return 1
    stamp = {
        "complete": status == 0 and not args.only,
        "environment": {
            **report.environment(),
            "device": device,
            "timing": "device time (events around graph replays, median of 9)",
        },
    }
    what = "-".join(args.only) or "studies"
    path = args.out / f"{'-'.join(device.split())}_{what}.json"
    save(path, stamp, lines)
    print(f"wrote {path}")
    plot.main([str(path), "--plots", str(args.plots or args.out)])
    if status:
        print(f"FAILED: status {status}: a result is wrong or CUDA failed (see above)")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
