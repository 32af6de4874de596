"""Brings the compiled handlers into JAX: the ABI guard, then registration. Asks no device."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

Version = tuple[int, int]


def target(op: str) -> str:
    """The FFI target of an op."""
    return f"jaxsoftmax.{op}"


def header_version(text: str) -> Version | None:
    """The FFI API version that a c_api.h declares."""
    found = [
        re.search(rf"#define\s+XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")
    ]
    major, minor = (None if f is None else int(f.group(1)) for f in found)
    return None if major is None or minor is None else (major, minor)


def runtime_version() -> Version | None:
    """The FFI API version of the running jaxlib, from the headers it ships; it tells it nowhere
    else. None if they cannot be read."""
    try:
        header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
        return header_version(header.read_text(encoding="utf-8", errors="replace"))
    except (OSError, RuntimeError):
        return None


def mismatch(built: Version, runtime: Version | None) -> str | None:
    """Why a module built against `built` must not be registered; None if it may.

    A module newer than the runtime, once registered, fails the whole backend at first use.
    """
    if runtime is None:
        return "the FFI version of this jaxlib is unknown"
    if built[0] != runtime[0] or built[1] > runtime[1]:
        versions = [".".join(map(str, v)) for v in (built, runtime)]
        return f"it was built for XLA FFI {versions[0]}, this jaxlib has {versions[1]}"
    return None


def _load() -> tuple[ModuleType | None, str | None]:
    """The compiled module, and the reason it is not used."""
    try:
        _native = importlib.import_module("._native", __package__)
    except ModuleNotFoundError:
        here = Path(__file__).parent
        return None, f"{here} has no compiled module; install the package, import that copy"
    except ImportError as error:
        return None, str(error)
    return _native, mismatch(tuple(_native.build_info()["ffi_api"]), runtime_version())


def _register(native: Any) -> frozenset[str]:
    """Register every handler once a process; the lowering platforms that now have kernels."""
    registrations = native.registrations()
    if not getattr(native, "_registered", False):  # the module outlives a reload of this package
        for platform, targets in registrations.items():
            for name, stages in targets.items():
                jax.ffi.register_ffi_target(name, stages, platform=platform, api_version=1)
        native._registered = True
    return frozenset("cuda" if p == "CUDA" else p for p in registrations)


def require_devices(primitive: Any) -> None:
    """Have jit tell the lowering its devices, which custom_partitioning needs.

    There is no public way; without it, programs of many devices take the formulas.
    """
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering
    except ImportError:
        return
    prim_requires_devices_during_lowering.add(primitive)


NATIVE, REASON = _load()
PLATFORMS: frozenset[str] = frozenset()
if NATIVE is not None and REASON is None:
    PLATFORMS = _register(NATIVE)
else:
    warnings.warn(
        f"jaxsoftmax uses jnp formulas instead of its kernels: {REASON}",
        RuntimeWarning,
        stacklevel=2,
    )
