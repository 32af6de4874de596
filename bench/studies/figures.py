"""What docs/dispatch.md quotes from a run of the studies, by name."""

import math
from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]
Shape = tuple[int, int]  # rows, bytes of a row

# Kinds of the library's plans.
ONE_PASS = ("registers", "registers + shared", "ring", "cluster", "ring, cluster")
KINDS = (*ONE_PASS, "two-pass", "split-k", "split-k, one launch")
FOLDS = ("every pack", "every rise", "lagging", "separate")
KIB, MIB = 1 << 10, 1 << 20
SHOWN: tuple[Shape, ...] = (  # in the table of kinds
    *((65536, KIB), (65536, 8 * KIB), (16384, 32 * KIB), (4096, 64 * KIB), (1024, 256 * KIB)),
    *((256, MIB), (64, 256 * KIB), (16, 64 * KIB), (4, 32 * KIB), (4, 256 * KIB)),
    *((4, MIB), (1, MIB), (4, 16 * MIB), (4, 64 * MIB), (1, 64 * MIB)),
)
BIG = 32 * MIB  # of input: the shape moves 64 MB or more
NOISE = 1.03  # slower by less than this is as fast


def size(count: float) -> str:
    """Bytes in the largest unit that keeps them whole."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or count % 1024:
            return f"{count:g} {unit}"
        count /= 1024
    return f"{count:g} GiB"


def named(shape: Shape) -> str:
    return f"{shape[0]} x {size(shape[1])}"


def of(lines: list[Line], study: str, **fixed: Any) -> list[Line]:
    return [x for x in lines if x["study"] == study and all(x[k] == v for k, v in fixed.items())]


def share(lines: list[Line], x: Line, us: str = "us") -> float:
    """Per cent of the speed of the copy that is nearest in size."""
    moved = x["rows"] * x["row_bytes"]
    near = min(of(lines, "copy"), key=lambda c: abs(math.log(c["bytes"] / moved)))
    return float(100 * near["us"] * moved / near["bytes"] / x[us])


def geometric(values: Iterable[float]) -> float:
    """The geometric mean, NaN of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    cells = [[str(c) for c in row] for row in (head, *rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def by_shape(lines: list[Line]) -> dict[Shape, dict[str, Line]]:
    """The line of each kind, and of the copy, for every shape."""
    shapes: dict[Shape, dict[str, Line]] = {}
    for x in of(lines, "which"):
        shapes.setdefault((x["rows"], x["row_bytes"]), {})[x["kind"]] = x
    return shapes


def fastest(kinds: dict[str, Line], among: Iterable[str] = KINDS) -> Line | None:
    return min((kinds[k] for k in among if k in kinds), key=lambda x: x["us"], default=None)


def two_over_one(kinds: dict[str, Line]) -> float | None:
    """Time of two-pass over that of the best one-pass; None where no one-pass holds the row."""
    one = fastest(kinds, ONE_PASS)
    return kinds["two-pass"]["us"] / one["us"] if one and "two-pass" in kinds else None


def which(lines: list[Line]) -> dict[str, str]:
    shapes = by_shape(lines)
    best = {s: x for s, kinds in shapes.items() if (x := fastest(kinds))}
    ratios = {s: r for s, kinds in shapes.items() if (r := two_over_one(kinds)) is not None}
    big = [s for s in shapes if s[0] * s[1] >= BIG]

    def in_registers(shape: Shape) -> bool:
        mine = fastest(shapes[shape], ONE_PASS[:2])
        return mine is not None and mine["us"] <= NOISE * best[shape]["us"]

    # The longest row up to which registers (and shared memory) are as fast as anything, if many.
    lost = min((s[1] for s in big if not in_registers(s)), default=math.inf)
    rows = []
    for shape in (s for s in SHOWN if s in shapes):
        cells = []
        for kind in (*KINDS, "copy"):
            x = shapes[shape].get(kind)
            mark = "**" if x is best[shape] else ""
            cells.append(f"{mark}{x['us']:.1f}{mark}" if x else "-")
        rows.append([named(shape), *cells])
    launches = {}
    for row_bytes in (MIB, 64 * MIB):
        kinds = shapes[4, row_bytes]
        where = f"4x{size(row_bytes).replace(' ', '')}"
        launches[f"which.one_launch_{where}"] = f"{kinds['split-k, one launch']['us']:.1f}"
        launches[f"which.two_launches_{where}"] = f"{kinds['split-k']['us']:.1f}"
    wins = {kind: sum(x["kind"] == kind for x in best.values()) for kind in KINDS}
    worst = max(ratios, key=lambda s: ratios[s])
    shares = [100 * shapes[s]["copy"]["us"] / best[s]["us"] for s in big]
    return {
        "which.shapes": f"{len(shapes)}",
        "which.wins": ", ".join(f"{kind} {count}" for kind, count in wins.items()),
        "which.big_share": f"{geometric(shares):.0f}",
        "which.big_worst": f"{min(shares):.0f}",
        "which.registers_to": size(max((s[1] for s in big if s[1] < lost), default=0)),
        "which.two_over_one": f"{geometric(ratios[s] for s in big if s in ratios):.2f}",
        "which.two_worst": f"{ratios[worst]:.2f}",
        "which.two_worst_shape": named(worst),
        "which.two_ahead": f"{sum(r < 1 / NOISE for r in ratios.values())}",
        "which.held": f"{len(ratios)}",
        "which.table": table(["us", *KINDS, "copy"], rows),
        **launches,
    }


def in_flight(x: Line) -> float:
    """MB of input that lie between the two reads of a byte."""
    return float(x["rows_in_flight"] * x["row_bytes"] / 1e6)


def second_pass(x: Line, order: str) -> float:
    """Microseconds of the second pass for a GB of input."""
    return float((x[f"{order}_us"] - x["fold_us"]) / (x["rows"] * x["row_bytes"] / 1e9))


def l2_points(lines: list[Line]) -> list[Line]:
    """From 4 MB: shorter rows leave threads without a pack."""
    return [x for x in of(lines, "l2") if in_flight(x) > 3.9]


def turn(points: list[Line], order: str) -> float:
    """The last MB in flight before the second pass is 10 % slower than its median to 20 MB."""
    near = sorted(second_pass(x, order) for x in points if in_flight(x) <= 20)
    last = math.nan
    for x in points:
        if second_pass(x, order) > 1.1 * near[len(near) // 2]:
            break
        last = in_flight(x)
    return last


def l2(lines: list[Line]) -> dict[str, str]:
    points = l2_points(lines)
    device = of(lines, "device")[0]
    found = {
        "l2.size": f"{device['l2_bytes'] / 1e6:.0f}",
        "l2.rows_in_flight": f"{points[0]['rows_in_flight']}",
    }
    near = min(points, key=lambda x: abs(in_flight(x) - 16))
    for order in ("forward", "reversed"):
        at = turn(points, order)
        # two_pass of the library has 2 blocks of 512 threads an SM, a row each.
        row = at * 1e6 / (2 * device["sms"]) / KIB
        found |= {
            f"l2.{order}_turn": f"{at:.0f}",
            f"l2.{order}_turn_row": f"{row:.0f}" if math.isfinite(row) else "none",
            f"l2.{order}_within": f"{share(lines, near, f'{order}_us'):.0f}",
            f"l2.{order}_beyond": f"{share(lines, points[-1], f'{order}_us'):.0f}",
        }
    return found


def unroll_shapes(lines: list[Line]) -> list[Shape]:
    """Many rows, fewer, one block an SM."""
    return list(dict.fromkeys((x["rows"], x["row_bytes"]) for x in of(lines, "unroll")))


def unroll(lines: list[Line]) -> dict[str, str]:
    found, rows = {}, []
    for name, shape in zip(("many", "fewer", "one"), unroll_shapes(lines), strict=True):
        mine = of(lines, "unroll", rows=shape[0], row_bytes=shape[1])
        speed = {x["unroll"]: share(lines, x) for x in mine}
        found[f"unroll.{name}_best"] = f"{max(speed, key=lambda d: speed[d])}"
        found |= {f"unroll.{name}_{depth}": f"{s:.0f}" for depth, s in speed.items()}
        rows.append([named(shape), *(f"{s:.0f}" for s in speed.values())])
    rows.append(["registers", *(x["registers"] for x in mine)])
    rows.append(["blocks an SM, at most", *(x["blocks_an_sm"] for x in mine)])
    return found | {"unroll.table": table(["% of copy", *(x["unroll"] for x in mine)], rows)}


def occupancy(lines: list[Line]) -> dict[str, str]:
    found, rows = {}, []
    for packs in (8, 16):
        mine = of(lines, "occupancy", packs=packs)
        found[f"occupancy.{packs}_best"] = f"{min(mine, key=lambda x: x['us'])['blocks']}"
        for x in mine:
            name = f"occupancy.{packs}_{x['blocks']}"
            found[name] = f"{share(lines, x):.0f}"
            found[f"{name}_spill"] = f"{x['local_bytes']}"
            resources = (x["blocks_an_sm"], x["registers"], x["local_bytes"])
            rows.append([packs, *resources, f"{x['us']:.1f}", f"{share(lines, x):.0f}"])
    head = ("packs a lane", "blocks an SM", "registers", "bytes spilled a lane", "us", "% of copy")
    return found | {"occupancy.table": table(head, rows)}


def online(lines: list[Line]) -> dict[str, str]:
    found, rows = {}, []
    for warm in (0, 1):
        for path in ("one_pass", "two_pass"):
            us = {x["fold"]: x["us"] for x in of(lines, "online", warm=warm, path=path)}
            for fold in FOLDS:
                name = f"online.{'warm' if warm else 'cold'}_{path}_{fold.replace(' ', '_')}"
                found[name] = f"{100 * us[fold] / min(us.values()) - 100:.0f}"
            label = f"{path.replace('_', '-')}, {'from L2' if warm else 'from memory'}"
            rows.append([label, *(f"{us[fold]:.1f}" for fold in FOLDS)])
    return found | {"online.table": table(["us", *FOLDS], rows)}
