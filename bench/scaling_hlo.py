"""The collectives of a compiled program and their bytes on each device: its HLO text.

An asynchronous one counts where it is done: its start also names its operands. Bytes are those of
its result, whose shape is a device's own.
"""

import math
import re
from typing import Any

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_LINE = re.compile(
    rf"\s+(?:ROOT )?%?[\w.\-]+ = (?P<result>.+?) (?P<op>{'|'.join(COLLECTIVES)})(?P<done>-done)?\("
)
_SHAPE = re.compile(r"\b((?:pred|[a-z]+\d+)\w*)\[([\d,]*)\]")


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # pred has a byte


def collectives(text: str) -> dict[str, dict[str, Any]]:
    """count, bytes and result shapes of each kind that there is; all_reduce and all_gather, the
    wanted and the unwanted, also where there is none."""
    found: dict[str, dict[str, Any]] = {
        name: {"count": 0, "bytes": 0, "shapes": []} for name in ("all_reduce", "all_gather")
    }
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name = match["op"].replace("-", "_")
        one = found.setdefault(name, {"count": 0, "bytes": 0, "shapes": []})
        one["count"] += 1
        for dtype, dims in _SHAPE.findall(match["result"]):
            elements = math.prod(map(int, filter(None, dims.split(","))))
            one["bytes"] += -(-elements * _bits(dtype) // 8)
            one["shapes"].append(f"{dtype}[{dims}]")
    return found
