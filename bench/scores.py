"""Geometric means over groups of shapes: moving 64 MB or more, the seed's, the whole grid.

A row is what a table prints: a dict with "shape", "bytes" (that must move) and figures.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from .shapes import GPU, SEED

BIG = 64e6
GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "moving 64 MB or more": lambda row: row["bytes"] >= BIG,
    f"the seed's {len(SEED)}": lambda row: tuple(row["shape"]) in SEED,
    f"all {len(GPU)}": lambda row: tuple(row["shape"]) in GPU,
}


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def groups(rows: list[dict[str, Any]], figure: str) -> dict[str, dict[str, Any]]:
    """For each group with rows that have the figure: its mean, its least and where, how many."""
    found = {}
    for name, belongs in GROUPS.items():
        mine = [r for r in rows if r.get(figure) is not None and belongs(r)]
        if mine:
            worst = min(mine, key=lambda r: r[figure])
            found[name] = {
                "mean": geometric_mean(r[figure] for r in mine),
                "worst": worst[figure],
                "worst_shape": worst["shape"],
                "shapes": len(mine),
            }
    return found


def line(rows: list[dict[str, Any]], figure: str, title: str) -> str:
    """A figure's geometric mean in every group, how many shapes it is of, the worst of them."""
    cells = [
        f"{name} {g['mean']:.3f} ({g['shapes']} shapes, worst {g['worst']:.2f} "
        f"{'x'.join(map(str, g['worst_shape']))})"
        for name, g in groups(rows, figure).items()
    ]
    return f"{title:<37} {'; '.join(cells) or 'no shape of a group'}"
