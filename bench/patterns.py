"""`--patterns`: softmax as models call it: scaled, masked, causal, over other axes; its gradient.

Ours and jax.nn's, whose faster form of a mask counts. `of copy` is the speed at which the bytes
that must move do, over a copy's; of a causal mask the kept half is read and all is written. `alone`
is what our forward and backward take as two programs; `passes` are what else than our kernels goes
over a whole array in our program's HLO. The lines at the end tell which targets, meant for an H200
and bfloat16, the run meets.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax

from . import cases, hlo, pattern_cases, report, runs
from .pattern_cases import CAUSAL, FULL, KEY, PLAIN, SCALED, Group
from .scores import geometric_mean
from .shapes import Buffers
from .timing import Case, Effort, Sample, TimingError, measure, ratio

if TYPE_CHECKING:
    from rich.progress import Progress


# --- the targets ---


@dataclass(frozen=True)
class Target:
    """What the least, or the geometric mean, of a figure of some rows is meant to be."""

    text: str
    figure: str
    goal: float
    family: str
    kinds: tuple[str, ...] = (PLAIN,)
    whats: tuple[str, ...] = pattern_cases.WHATS
    longest: int = 0  # rows of so many columns or more
    mean: bool = False

    def found(self, rows: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
        """None without such rows."""
        mine = [
            row
            for row in rows
            if row["family"] == self.family
            and row["kind"] in self.kinds
            and row["what"] in self.whats
            and row["shape"][row["axis"]] >= self.longest
            and row[self.figure] is not None
        ]
        if not mine:
            return None
        worst = min(mine, key=lambda row: row[self.figure])
        value = geometric_mean(r[self.figure] for r in mine) if self.mean else worst[self.figure]
        return {
            "target": asdict(self),
            "value": value,
            "rows": len(mine),
            "worst": worst["name"],
            "met": value >= self.goal,
        }


MASKED = (KEY, CAUSAL)
FWD, BOTH = (("fwd",), ("fwd+bwd",))
# Plain over scaled: as fast but for what a run's medians differ.
TARGETS = (
    Target("scale, scale+key mask: of copy", "of_copy", 0.95, "attention", (SCALED, KEY), FWD),
    Target("causal over full mask, forward", "over_full", 1.22, "attention", (CAUSAL,), FWD, 2048),
    Target("causal over full mask, both", "over_full", 1.33, "attention", (CAUSAL,), BOTH, 2048),
    Target("masked: jax.nn / ours", "ratio", 1.9, "attention", MASKED),
    Target("masked: jax.nn / ours", "ratio", 2.7, "attention", MASKED, mean=True),
    Target("scale: jax.nn / ours", "ratio", 1.0, "attention", (SCALED,)),
    Target("ours: plain / scale", "over_plain", 0.99, "attention", (SCALED,)),
    Target("axes: of copy", "of_copy", 0.9, "axis", whats=FWD),
    Target("axes, forward: jax.nn / ours", "ratio", 2.6, "axis", whats=FWD, mean=True),
    Target("axes, both: jax.nn / ours", "ratio", 1.5, "axis", whats=BOTH),
    Target("axes, both: jax.nn / ours", "ratio", 2.0, "axis", whats=BOTH, mean=True),
)


# --- one shape ---


def buffers_of(group: Group, dtype: str) -> Buffers:
    n = group.shape[-1]
    buffers = runs.make_buffers((math.prod(group.shape) // n, n), dtype)
    shaped = ([a.reshape(group.shape) for a in arrays] for arrays in (buffers.x, buffers.dy))
    return Buffers(*shaped)


def one_group(group: Group, dtype: str, effort: Effort) -> dict[str, Any]:
    """Checks, reads the programs and times them."""
    buffers = buffers_of(group, dtype)
    made = pattern_cases.programs(group, buffers)
    timed = [one.case for one in made]
    timed += [*pattern_cases.backwards(group, buffers), *cases.ceilings(buffers)]
    cases.compile_all(timed)
    found = {one.case.label: pattern_cases.errors(group, one) for one in made}
    samples = measure(timed, effort)
    ceilings = cases.fastest(samples)
    rows = []
    for one in (one for one in made if one.form == "ours"):
        forms = {o.form: o.case.label for o in made if (o.kind, o.what) == (one.kind, one.what)}
        figures = row(one.kind, one.what, forms, samples)
        moved = pattern_cases.units(one.kind, one.what) * buffers.x[0].nbytes
        speed, copied = moved / figures["ours_us"], 2 * buffers.x[0].nbytes / ceilings["copy"]["us"]
        rows.append(
            {"name": f"{group} {one.kind} {one.what}", "family": group.family}
            | {"shape": group.shape, "axis": group.axis, "kind": one.kind, "what": one.what}
            | figures
            | {"bytes": int(moved), "gb_per_s": speed / 1e3, "of_copy": speed / copied}
            | {"passes": passes(one.case, buffers.x[0].size)}
            | {"errors": {form: found[label] for form, label in forms.items()}}
        )
    return {
        "shape": group.shape,
        "axis": group.axis,
        "patterns": rows,
        "ceilings": ceilings,
        "ok": all(errors["ok"] for errors in found.values()),
        "samples": {label: s.summary() for label, s in samples.items()},
    }


def row(kind: str, what: str, forms: dict[str, str], samples: dict[str, Sample]) -> dict[str, Any]:
    """The times of a pattern, of all its forms; `forms` has their labels."""
    ours, by = samples[forms["ours"]], {f: samples[of] for f, of in forms.items() if f != "ours"}
    form = min(by, key=lambda f: by[f].median, default=None)

    def over(kind: str) -> float | None:
        other = samples.get(f"ours {kind} {what}")
        return None if other is None else ratio(other, ours)

    parts = [samples.get(f"ours {kind} {part}") for part in ("fwd", "bwd")]
    alone = [part.median for part in parts if part is not None and what == "fwd+bwd"]
    return {
        "ours_us": ours.median,
        "span_us": ours.span,
        "alone_us": alone or None,
        "kernels": ours.kernels,
        "jax_us": by[form].median if form else None,
        "jax_form": form,
        "jax_forms_us": {f: sample.median for f, sample in by.items()},
        "jax_kernels": by[form].kernels if form else None,
        "ratio": ratio(by[form], ours) if form else None,
        "over_full": over(FULL) if kind == CAUSAL else None,
        "over_plain": over(PLAIN) if kind == SCALED else None,
    }


def passes(case: Case, elements: int) -> list[dict[str, Any]]:
    """What else than our kernels goes over a whole array."""
    program: Any = case.fn
    return [f for f in hlo.traffic(program.as_text(), elements) if f["what"] != "kernel"]


# --- what is printed ---

HEAD = (
    f"{'pattern':<42} {'ours us':>9} {'jax.nn us':>10} {'ratio':>6} {'GB/s':>6} {'of copy':>8} "
    f"{'kernels':>8} {'passes':>7} {'ulp':>10}  notes"
)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def line(row: dict[str, Any]) -> str:
    mine = row["errors"]["ours"]
    counts = (_cell(names and len(names), "d") for names in (row["kernels"], row["jax_kernels"]))
    ulps = "/".join(f"{mine[of]['ulp']:.2f}" for of in ("y", "dx") if of in mine)
    notes = []
    if row["alone_us"]:
        notes.append("alone " + " + ".join(f"{us:.1f}" for us in row["alone_us"]))
    if len(row["jax_forms_us"]) > 1:
        forms = ", ".join(f"{form} {us:.1f}" for form, us in row["jax_forms_us"].items())
        notes.append(f"jax.nn by {row['jax_form']} ({forms})")
    if row["passes"]:
        notes.append("passes: " + ", ".join(f"{f['opcode']} {f['name']}" for f in row["passes"]))
    notes += [
        f"WRONG: {form} {errors}" for form, errors in row["errors"].items() if not errors["ok"]
    ]
    return (
        f"{row['name']:<42} {row['ours_us']:>9.1f} {_cell(row['jax_us'], '.1f'):>10} "
        f"{_cell(row['ratio'], '.2f'):>6} {row['gb_per_s']:>6.0f} {row['of_copy']:>8.3f} "
        f"{'/'.join(counts):>8} {len(row['passes']):>7} {ulps:>10}  {'; '.join(notes)}"
    )


def target_lines(found: Iterable[dict[str, Any]]) -> Iterator[str]:
    for one in found:
        target = one["target"]
        how = "geometric mean" if target["mean"] else f"least ({one['worst']})"
        met = "met" if one["met"] else "MISSED"
        yield (
            f"{target['text']:<32} {one['value']:>6.3f}, target {target['goal']:<4} {met:<6} "
            f"{how} of {one['rows']} rows"
        )


def run(out: report.Report, args: argparse.Namespace, progress: Progress) -> bool:
    """Checks, measures, prints; whether all was right. A missed target is told, not a failure."""
    good, effort = True, Effort(1 if args.quick else 5, 0.05)
    out.line(HEAD)
    rows: list[dict[str, Any]] = []
    task = progress.add_task("patterns", total=len(args.grid))
    for group in args.grid:
        progress.update(task, description=f"patterns {group}")
        try:
            entry = one_group(group, args.dtype, effort)
        except (TimingError, jax.errors.JaxRuntimeError) as error:
            entry = {"shape": group.shape, "axis": group.axis, "ok": False, "error": str(error)}
            out.line(f"{group}: {error}", "bold red")
        else:
            for one in entry["patterns"]:
                right = all(errors["ok"] for errors in one["errors"].values())
                out.line(line(one), None if right else "bold red")
            out.line(f"{group} memory: {report.ceilings(entry)}")
            rows += entry["patterns"]
        good &= entry["ok"]
        out.data["shapes"].append(entry)
        out.save()
        progress.advance(task)
    out.data["targets"] = [found for target in TARGETS if (found := target.found(rows))]
    for text in target_lines(out.data["targets"]):
        out.line(text)
    return good
