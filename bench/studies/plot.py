"""Plots a run of the studies, one picture a hint, and prints what docs/dispatch.md quotes.

python3 -m bench.studies.plot bench/results/NVIDIA-H200_studies.json --plots docs/dispatch
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

from . import figures
from .figures import FOLDS, KINDS, Line

COLOURS = ("#77aadd", "#99ddff", "#44bb99", "#bbcc33", "#eedd88", "#ee8866", "#ffaabb", "#dddddd")


def new(columns: int = 1, width: float = 6.0, height: float = 4.0) -> Any:
    """A figure and its axes in a row."""
    figure, axes = plt.subplots(
        1, columns, figsize=(width * columns, height), layout="constrained", squeeze=False
    )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def which(lines: list[Line]) -> Any:
    """The fastest kind over the shapes, with its % of copy; two-pass against one-pass."""
    shapes = figures.by_shape(lines)
    rows = sorted({s[0] for s in shapes})
    sizes = sorted({s[1] for s in shapes})
    figure, axes = new(2, 9.5, 4.6)
    nothing = [[float("nan")] * len(sizes) for _ in rows]
    kind_at, ratio_at = ([list(line) for line in nothing] for _ in range(2))
    for shape, kinds in shapes.items():
        i, j = rows.index(shape[0]), sizes.index(shape[1])
        if best := figures.fastest(kinds):
            kind_at[i][j] = KINDS.index(best["kind"])
            text = f"{100 * kinds['copy']['us'] / best['us']:.0f}"
            axes[0].text(j, i, text, ha="center", va="center", fontsize=8)
        if ratio := figures.two_over_one(kinds):
            ratio_at[i][j] = ratio
            axes[1].text(j, i, f"{ratio:.2f}", ha="center", va="center", fontsize=7)
    colours = ListedColormap(COLOURS)
    axes[0].imshow(kind_at, cmap=colours, vmin=-0.5, vmax=len(KINDS) - 0.5, aspect="auto")
    axes[1].imshow(ratio_at, cmap="RdBu", vmin=0.4, vmax=1.6, aspect="auto", alpha=0.5)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in COLOURS]
    figure.legend(handles, KINDS, loc="outside lower center", ncols=len(KINDS), frameon=False)
    titles = ("fastest kind of plan, and its % of copy", "time of two-pass / best one-pass")
    for axis, title in zip(axes, titles, strict=True):
        axis.grid(False)
        axis.set_xticks(range(len(sizes)), [figures.size(s) for s in sizes], rotation=60)
        axis.set_yticks(range(len(rows)), [str(r) for r in rows])
        axis.invert_yaxis()
        axis.set(title=title, xlabel="bytes of a row", ylabel="rows")
    return figure


def l2(lines: list[Line]) -> Any:
    """The second pass alone, and the whole kernel, over the bytes in flight."""
    points = figures.l2_points(lines)
    x = [figures.in_flight(p) for p in points]
    figure, axes = new(2)
    for order, style in (("forward", "s-"), ("reversed", "o-")):
        label = f"second pass {order}"
        gb = [1e6 / figures.second_pass(p, order) for p in points]
        axes[0].plot(x, gb, style, label=label, markersize=4)
        speed = [figures.share(lines, p, f"{order}_us") for p in points]
        axes[1].plot(x, speed, style, label=label, markersize=4)
    axes[0].set(title="second pass alone", ylabel="GB of input a second")
    axes[1].set(title="both passes", ylabel="% of copy")
    size = figures.of(lines, "device")[0]["l2_bytes"] / 1e6
    for axis in axes:
        axis.axvline(size, color="k", linestyle=":", label=f"L2, {size:.0f} MB")
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 8, 16, 32, 64, 128], ["4", "8", "16", "32", "64", "128"])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("MB read between the two reads of a byte")
    axes[0].legend(frameon=False)
    return figure


def unroll(lines: list[Line]) -> Any:
    figure, (axis,) = new()
    for rows, row_bytes in figures.unroll_shapes(lines):
        mine = figures.of(lines, "unroll", rows=rows, row_bytes=row_bytes)
        x, y = [p["unroll"] for p in mine], [figures.share(lines, p) for p in mine]
        axis.plot(x, y, "o-", label=figures.named((rows, row_bytes)))
    axis.set_xscale("log", base=2)
    ticks = [f"{p['unroll']}\n{p['registers']} registers" for p in mine]
    axis.set_xticks([p["unroll"] for p in mine], ticks)
    axis.set(title="two-pass", xlabel="16-byte loads in flight a lane", ylabel="% of copy")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, title="rows x bytes of a row")
    return figure


def occupancy(lines: list[Line]) -> Any:
    """Solid: no spill; hollow: spills, with its bytes a lane."""
    figure, axes = new(2)
    for axis, packs in zip(axes, (8, 16), strict=True):
        mine = figures.of(lines, "occupancy", packs=packs)
        x, y = [p["blocks_an_sm"] for p in mine], [figures.share(lines, p) for p in mine]
        fill = ["white" if p["local_bytes"] else "#4477aa" for p in mine]
        axis.plot(x, y, "-", color="#4477aa", zorder=1)
        axis.scatter(x, y, c=fill, edgecolors="#4477aa", zorder=2)
        for p, at in zip(mine, y, strict=True):
            spill = f"\nspills {p['local_bytes']} B" if p["local_bytes"] else ""
            axis.annotate(
                f"{p['registers']} registers{spill}",
                (p["blocks_an_sm"], at),
                xytext=(0, -8),
                textcoords="offset points",
                fontsize=7,
                ha="center",
                va="top",
            )
        axis.set(title=f"{packs} packs a lane, {figures.size(mine[0]['row_bytes'])} a row")
        axis.set(xlabel="blocks of 256 threads an SM", ylabel="% of copy")
        axis.set_ylim(0, 105)
        axis.set_xlim(0.5, 6.5)
    return figure


def online(lines: list[Line]) -> Any:
    figure, axes = new(2)
    for axis, warm in zip(axes, (0, 1), strict=True):
        for i, path in enumerate(("one_pass", "two_pass")):
            us = {p["fold"]: p["us"] for p in figures.of(lines, "online", warm=warm, path=path)}
            at = [k + 0.4 * i - 0.2 for k in range(len(FOLDS))]
            bars = axis.bar(at, [us[f] for f in FOLDS], 0.38, label=path.replace("_", "-"))
            axis.bar_label(bars, fmt="%.1f", fontsize=7)
        axis.set_xticks(range(len(FOLDS)), FOLDS)
        axis.set(title="16 MB, from L2" if warm else "256 MB, from memory", ylabel="us")
    axes[0].legend(loc="lower right")
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("results", type=Path, help="the JSON that python3 -m bench.studies wrote")
    parser.add_argument("--plots", type=Path, default=Path("bench/out"), help="folder of the plots")
    args = parser.parse_args(argv)
    data = json.loads(args.results.read_text())
    lines, env = data["lines"], data["environment"]
    args.plots.mkdir(parents=True, exist_ok=True)
    studies = {
        "which": (which, figures.which),
        "l2": (l2, figures.l2),
        "unroll": (unroll, figures.unroll),
        "occupancy": (occupancy, figures.occupancy),
        "online": (online, figures.online),
    }
    for name, (draw, quote) in studies.items():
        if not figures.of(lines, name):
            continue
        figure = draw(lines)
        commit = (env["commit"] or "unknown")[:12]
        figure.suptitle(f"float16, {env['device']}, commit {commit}", fontsize=9)
        figure.savefig(args.plots / f"{name}.png", dpi=110)
        plt.close(figure)
        print(f"wrote {args.plots / name}.png")
        for key, value in quote(lines).items():
            print(f"\n{value}\n" if "\n" in value else f"{key}: {value}")
    return 0


if __name__ == "__main__":
    main()
