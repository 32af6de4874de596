"""Registers, shared memory and spills of every kernel, from the compiler's own output.

    python3 tools/ptxas_report.py                    compiles cpp/cuda/*.cu for --arch, then reads
    python3 tools/ptxas_report.py --log build.log    reads the log of `pip install -v .` instead
    python3 tools/ptxas_report.py --module _native.abi3.so    also holds the module to its size:
        24 MB

Exit status 1 if a kernel spills that ALLOWED_SPILLS does not name, or the module is over
--limit-mb.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "cpp" / "cuda"

# Kernels that may spill: a pattern of the demangled name, and how much.
ALLOWED_SPILLS: dict[str, str] = {
    r"one_pass<.*, 32, ": "up to 40 bytes beside the row; not planned",
    r"one_pass<Softmax<ExactFloat>, F32, 8, ": "4 bytes beside the row; not planned",
    r"one_pass<LogSoftmax<Fast<false> >, BF16, 8, \(For\)1>": "8 bytes; 16384 x 16384: 261 us, "
    "0.96 of a copy",
    r"held_columns<LogSoftmax<Fast<false> >, Loaded<BF16>, 8>": "4 bytes for a third block an SM: "
    "(16, 1000, 64, 64) takes 78 us, as softmax does",
    r"two_pass<LogSoftmax<ExactDouble>, Loaded<F64>": "16 bytes; not measured",
}

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


@dataclass
class Kernel:
    """What ptxas says of one kernel; `shared` is the static part, the rest is set at launch."""

    mangled: str
    arch: str
    name: str = ""
    stack: int = 0
    stores: int = 0
    loads: int = 0
    registers: int = 0
    shared: int = 0

    @property
    def spills(self) -> bool:
        """Whether registers went to memory."""
        return bool(self.stores or self.loads)

    @property
    def allowed(self) -> str | None:
        """Why this kernel may spill, None if it may not."""
        return next((why for p, why in ALLOWED_SPILLS.items() if re.search(p, self.name)), None)


def parse(text: str) -> list[Kernel]:
    """The kernels of `-Xptxas -v` output, whatever stands around it."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if found := ENTRY.search(line):
            kernels.append(Kernel(*found.groups()))
        elif kernels and (found := SPILLS.search(line)):
            kernels[-1].stack, kernels[-1].stores, kernels[-1].loads = map(int, found.groups())
        elif kernels and (found := USED.search(line)):
            kernels[-1].registers = int(found[1])
            if shared := SHARED.search(line):
                kernels[-1].shared = int(shared[1])
    return kernels


def demangle(kernels: list[Kernel]) -> None:
    """Fills in readable names, with cu++filt or c++filt if there is one."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    names = [k.mangled for k in kernels]
    if tool and names:
        done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True)
        names = done.stdout.splitlines() if done.returncode == 0 else names
    for kernel, name in zip(kernels, names, strict=True):
        kernel.name = short(name)


def short(name: str) -> str:
    """A demangled kernel without its return type, parameters and casts."""
    depth, end = 0, len(name)
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and not name.startswith("(anonymous", i):
            end = i
            break
    name = re.sub(r"\(anonymous namespace\)::|\((?:int|bool|unsigned int)\)", "", name[:end])
    return re.sub(r"^void |\bjaxsoftmax::(?:cuda::)?", "", name)


def compile_kernels(arch: str, jobs: int) -> tuple[str, int]:
    """Output of ptxas and bytes of machine code of every .cu, with the build's own flags."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("nvcc is not on PATH: give a build log with --log instead")
    sources = sorted(KERNELS.glob("*.cu"))
    if not sources:
        sys.exit(f"no .cu files in {KERNELS}")

    def one(source: Path) -> tuple[str, int]:
        cubin = Path(folder) / f"{source.stem}.cubin"
        flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-diag-suppress=20012"]
        command = [nvcc, f"-arch={arch}", "-cubin", "-Xptxas=-v", *flags, "-o", cubin, source]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"nvcc failed on {source.name}:\n{done.stderr}")
        return done.stdout + done.stderr, cubin.stat().st_size

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        texts, sizes = zip(*pool.map(one, sources), strict=True)
    return "\n".join(texts), sum(sizes)


def main() -> int:
    """Reads or makes the compiler's output, prints the table, judges."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--log", type=argparse.FileType(), help="compiler output, - for stdin")
    parser.add_argument("--arch", default="sm_90", help="what to compile for without --log")
    parser.add_argument("--module", type=Path, help="the built _native module, held to --limit-mb")
    parser.add_argument("--limit-mb", type=float, default=24.0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    code = None
    if args.log:
        text = args.log.read()
    else:
        text, code = compile_kernels(args.arch, args.jobs)
    kernels = parse(text)
    if not kernels:
        sys.exit("no kernels in the compiler's output: was it built with -Xptxas=-v?")
    demangle(kernels)

    print(f"{'registers':>9} {'shared':>7} {'stack':>6} {'stores':>7} {'loads':>6}  kernel")
    bad = []
    for k in sorted(kernels, key=lambda k: (k.arch, k.name)):
        note = ""
        if k.spills:
            note = f"  (allowed: {k.allowed})" if k.allowed else "  SPILLS"
            bad += [] if k.allowed else [k.name]
        row = f"{k.registers:>9} {k.shared:>7} {k.stack:>6} {k.stores:>7} {k.loads:>6}"
        print(f"{row}  {k.arch} {k.name}{note}")
    most = max(kernels, key=lambda k: k.registers)
    print(f"{len(kernels)} kernels, most registers {most.registers} ({most.name})")
    if code is not None:
        print(f"{code / 2**20:.2f} MiB of uncompressed cubins for {args.arch}")
    failed = False
    if args.module:
        size = args.module.stat().st_size / 1e6
        failed = size > args.limit_mb
        verdict = "FAILED: over" if failed else "within"
        print(f"module {args.module.name}: {size:.2f} MB, {verdict} {args.limit_mb:g} MB")
    if bad:
        print(f"FAILED: {len(bad)} kernels spill and are not in ALLOWED_SPILLS: {', '.join(bad)}")
    return 1 if bad or failed else 0


if __name__ == "__main__":
    sys.exit(main())
