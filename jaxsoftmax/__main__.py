"""python -m jaxsoftmax info | plan: what is installed, and which kernel a shape would get."""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import sys

import jax
import jaxlib

from . import __version__, _ffi, _ops, _plan


def info() -> None:
    """Versions, the build and the device's limits; starts no JAX backend."""
    print(f"jaxsoftmax {__version__}, Python {platform.python_version()}")
    print(f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, FFI {_ffi.runtime_version()}")
    build = None if _ffi.NATIVE is None else _ffi.NATIVE.build_info()
    print(f"build: {build}")
    print(f"kernels for: {', '.join(sorted(_ffi.PLATFORMS)) or f'none ({_ffi.REASON})'}")
    for limits in (_plan.device_limits(), _plan.LIMITS["cpu"]):
        print(f"device: {'no GPU' if limits is None else dataclasses.asdict(limits)}")


def plan(arguments: argparse.Namespace) -> None:
    """The plan for rows of the last size of the shape."""
    *rows, n = arguments.shape
    try:
        chosen = _plan.plan(
            arguments.op,
            arguments.dtype,
            math.prod(rows),
            n,
            limits=arguments.device,
            path=arguments.path,
        )
    except ValueError as error:
        sys.exit(f"jaxsoftmax: {error}")
    print(chosen)


def _shape(text: str) -> list[int]:
    sizes = text.split("x")
    if not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes such as 8x131072, got {text!r}")
    return [int(size) for size in sizes]


def main() -> None:
    """Parse the command line and run one command."""
    parser = argparse.ArgumentParser(prog="python -m jaxsoftmax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, build and device")
    one = commands.add_parser("plan", help="the kernel chosen for a shape, such as 8x131072")
    one.add_argument("shape", type=_shape, help="rows x columns; softmax runs over the last")
    one.add_argument("--op", default="softmax", choices=_ops.OPS)
    one.add_argument("--dtype", default="float32", choices=_plan.DTYPES)
    one.add_argument("--device", choices=_plan.LIMITS, help="default: the one attached")
    one.add_argument("--path", help="force a path or a seed kernel")
    arguments = parser.parse_args()
    if arguments.command == "info":
        info()
    else:
        plan(arguments)


if __name__ == "__main__":
    main()
