"""What devices offer: `Limits`, the presets, and the attached GPU's own figures."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device offers. For a CPU, sms counts its cores and l2_bytes is one core's."""

    name: str
    kind: str  # "gpu" or "cpu"
    sms: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int

    @classmethod
    def of_device(cls, found: dict[str, Any]) -> Limits:
        """From `_native.device_limits()`."""
        fields = ("name", "sms", "smem_per_block", "smem_per_sm", "l2_bytes")
        return cls(kind="gpu", **{field: found[field] for field in fields})


def _gpu(name: str, sms: int, smem_kib: int, l2_mib: int) -> Limits:
    # CUDA keeps 1 KiB of each SM's shared memory for itself, once a block.
    return Limits(name, "gpu", sms, (smem_kib - 1) * KIB, smem_kib * KIB, l2_mib * KIB * KIB)


# The vendors' published figures. A CPU's smem_per_block bounds the scratch a thread may use.
LIMITS = {
    "cpu": Limits("cpu", "cpu", os.cpu_count() or 1, 64 * KIB * KIB, 64 * KIB * KIB, KIB * KIB),
    "a100": _gpu("a100", 108, 164, 40),
    "rtx4090": _gpu("rtx4090", 128, 100, 72),
    "h100": _gpu("h100", 132, 228, 50),
    "h200": _gpu("h200", 132, 228, 50),
    "b200": _gpu("b200", 148, 228, 126),
    "rtx5090": _gpu("rtx5090", 170, 100, 96),
}


@functools.cache
def device_limits() -> Limits | None:
    """The attached GPU's limits, asked once; None without a GPU or a CUDA build."""
    try:
        from . import _native
    except ImportError:
        return None
    found = _native.device_limits()
    return None if found is None else Limits.of_device(found)


def resolve(limits: str | Limits | None) -> Limits:
    if limits is None:
        return device_limits() or LIMITS["cpu"]
    if isinstance(limits, Limits):
        return limits
    if not isinstance(limits, str) or limits not in LIMITS:
        raise ValueError(f"unknown limits {limits!r}; valid presets: {', '.join(LIMITS)}")
    return LIMITS[limits]
