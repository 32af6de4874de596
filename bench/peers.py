"""`--peers FILE.csv`: this run beside figures that others measured elsewhere, with both ceilings.

The file has a line a shape: rows, cols, copy_us, triad_us and for each peer PEER_fwd_us and
PEER_bwd_us, all of float16, for xla also xla_fwd_bf16_us and xla_fwd_f32_us; an empty cell is a
shape that a peer cannot run. How its copy was measured it does not say: where the two runs' copies
differ, as they may for small arrays, compare scores (each by its own copy) rather than times.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import scores
from .ops import renamed

WHAT = {"softmax": "fwd", "softmax_bwd": "bwd"}  # a row's name, and the columns'
PEERS = ("quack", "xla", "torch")
OTHER_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
Table = dict[tuple[int, int], dict[str, float]]


def read(path: Path) -> Table:
    """ValueError where the file is no such table."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := {"rows", "cols", "copy_us"} - set(reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        return {
            (int(line.pop("rows")), int(line.pop("cols"))): {
                name: float(cell) for name, cell in line.items() if name and cell
            }
            for line in reader
        }


def column(peer: str, what: str, dtype: str) -> str | None:
    """The file's column of a peer's times; None where it can have none."""
    if dtype == "float16":
        return f"{peer}_{what}_us"
    other = OTHER_DTYPES.get(dtype)
    return f"{peer}_fwd_{other}_us" if what == "fwd" and other else None


def compare(rows: list[dict[str, Any]], table: Table, dtype: str) -> list[dict[str, Any]]:
    """The rows of a run whose shapes the file has, each with the peers' figures."""
    found = []
    for row in rows:
        theirs, row = table.get(tuple(row["shape"])), renamed(row)
        if theirs is None or row["what"] not in WHAT:
            continue
        what = WHAT[row["what"]]
        # The file's ceilings are of float16: another dtype moves other bytes.
        base = theirs.get("copy_us" if what == "fwd" else "triad_us")
        entry = {k: row[k] for k in ("shape", "what", "bytes", "ours_us", "ceiling_us", "jax_us")}
        ours = row["ours_us"]
        entry |= {"score": row["ceiling_us"] / ours, "jax": row["jax_us"] / ours}
        entry["file_copy_us"] = base if dtype == "float16" else None
        for peer in PEERS:
            us = theirs.get(column(peer, what, dtype) or "")
            entry[f"{peer}_us"] = us
            entry[peer] = us and us / ours
            entry[f"{peer}_score"] = us and entry["file_copy_us"] and base / us if base else None
        found.append(entry)
    return found


def lines(entries: list[dict[str, Any]]) -> Iterator[str]:
    """The table, then the means of each figure: ratios are a peer's time over ours."""
    keys = [key.format(p) for key in ("{}_us", "{}", "{}_score") for p in PEERS]
    heads = [head.format(p) for head in ("{} us", "{}/ours", "{} sc.") for p in PEERS]
    yield (
        f"{'shape':>14} {'what':<11} {'ours us':>9} {'copy':>8} {'score':>6} {'file copy':>9}"
        + "".join(f"{head:>11}" for head in heads)
        + f"{'jax here':>9}"
    )
    for e in entries:
        yield (
            f"{'x'.join(map(str, e['shape'])):>14} {e['what']:<11} {e['ours_us']:>9.2f} "
            f"{e['ceiling_us']:>8.2f} {e['score']:>6.2f} {_cell(e['file_copy_us']):>9}"
            + "".join(f"{_cell(e[key]):>11}" for key in keys)
            + f"{e['jax']:>9.2f}"
        )
    for what in dict.fromkeys(e["what"] for e in entries):
        mine = [e for e in entries if e["what"] == what]
        yield scores.line(mine, "score", f"{what} our score here")
        for peer in PEERS:
            for figure, title in ((f"{peer}_score", "score in the file"), (peer, "/ ours here")):
                if any(e[figure] is not None for e in mine):
                    yield scores.line(mine, figure, f"{what} {peer} {title}")
        yield scores.line(mine, "jax", f"{what} jax.nn here / ours here")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
