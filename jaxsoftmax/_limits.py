"""What devices offer: `Limits`, the presets, and the attached GPU's own figures."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device offers. For a CPU, sms counts its cores and l2_bytes is one core's.

    max_cluster is the largest cluster of blocks that can be active at one time; 0 where the loaded
    code has neither clusters nor bulk copies, as on sm_80 or where a newer card runs PTX of sm_80.
    """

    name: str
    kind: str  # "gpu" or "cpu"
    sms: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    max_cluster: int
    cooperative: bool

    @classmethod
    def of_device(cls, found: dict[str, Any]) -> Limits:
        """From `_native.device_limits()`."""
        fields = [f.name for f in dataclasses.fields(cls) if f.name != "kind"]
        return cls(kind="gpu", **{field: found[field] for field in fields})


def _gpu(name: str, sms: int, smem_kib: int, l2_mib: int, max_cluster: int) -> Limits:
    # CUDA keeps 1 KiB of each SM's shared memory for itself, once a block.
    block, sm, l2 = (smem_kib - 1) * KIB, smem_kib * KIB, l2_mib * KIB * KIB
    return Limits(name, "gpu", sms, block, sm, l2, max_cluster, cooperative=True)


# A CPU's smem_per_block bounds the scratch a thread may use.
_CORES, _SCRATCH = os.cpu_count() or 1, 64 * KIB * KIB
# The vendors' published figures.
LIMITS = {
    "cpu": Limits("cpu", "cpu", _CORES, _SCRATCH, _SCRATCH, KIB * KIB, 0, cooperative=False),
    "a100": _gpu("a100", 108, 164, 40, 0),
    "rtx4090": _gpu("rtx4090", 128, 100, 72, 0),
    "h100": _gpu("h100", 132, 228, 50, 16),
    "h200": _gpu("h200", 132, 228, 50, 16),
    "b200": _gpu("b200", 148, 228, 126, 16),
    "rtx5090": _gpu("rtx5090", 170, 100, 96, 8),
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
