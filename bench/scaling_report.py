"""What `--scaling` makes of its points: speed-ups, efficiency, targets, the table, the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .scaling_cases import AUTOMATIC, AXIS_NAME, PLAIN, STRONG, WEAK, WHATS, Family
from .shapes import Shape


@dataclass(frozen=True)
class Target:
    """What the least of a figure is meant to be, of strong, automatic scaling."""

    kind: str
    figure: str
    goal: float
    devices: int | None = None  # None: as many as there are
    whats: tuple[str, ...] = WHATS
    shape: Shape | None = None

    def found(self, families: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """None where nothing of it was measured on several devices."""
        mine = [
            p | {"name": f"{family['name']} {p['what']}"}
            for family in families
            if (family["scaling"], family["kind"]) == (STRONG, self.kind)
            if self.shape in (None, tuple(family["shape"]))
            for p in family["points"]
            if p["form"] == AUTOMATIC and p["what"] in self.whats and p[self.figure] is not None
        ]
        n = self.devices or max((p["devices"] for p in mine), default=0)
        mine = [p for p in mine if p["devices"] == n]
        if not mine:
            return None
        worst = min(mine, key=lambda p: p[self.figure])
        value = worst[self.figure]
        found = {"target": asdict(self), "devices": n, "value": value, "worst": worst["name"]}
        return found | {"met": value >= self.goal}


# Meant for H200s and bfloat16.
BOTH = ("fwd+bwd",)
TARGETS = (
    Target("rows", "efficiency", 0.95),
    Target("columns", "efficiency", 0.85),
    Target("rows", "speed_up", 1.95, 2, BOTH, (65536, 16384)),
    Target("columns", "same_code", 1.8, 2, BOTH, (4096, 262144)),
    Target("columns", "speed_up", 1.15, 2, BOTH, (4096, 262144)),
)


def add_figures(points: Sequence[dict[str, Any]], family: Family) -> None:
    """Speed-ups and efficiency, of points that have a time and what they are compared with."""
    one = {(p["form"], p["what"]): p["us"] for p in points if p["devices"] == 1 and "us" in p}
    same = PLAIN if family.kind == "rows" else AXIS_NAME
    for p in points:
        work = p["devices"] if family.scaling == WEAK else 1
        for name, form in (("speed_up", PLAIN), ("same_code", same)):
            base = one.get((form, p["what"]))
            p[name] = work * base / p["us"] if base and "us" in p else None
        of_its_code = p["same_code"] and (p["form"] != PLAIN or same == PLAIN)
        p["efficiency"] = p["same_code"] / p["devices"] if of_its_code else None


def targets(families: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found for target in TARGETS if (found := target.found(families))]


# --- what is printed ---

HEAD = (
    f"{'shape':>15} {'cut':<7} {'scaling':<7} {'devices':>7} {'form':<9} {'what':<7} {'us':>10} "
    f"{'x copy':>6} {'speed-up':>8} {'same code':>9} {'effic.':>6} {'ulp y':>5} {'ulp dx':>6}  "
    "collectives"
)


def line(p: dict[str, Any], family: Family) -> str:
    shape = "x".join(map(str, p["shape"]))
    dx = p["errors"].get("dx")
    text = (
        f"{shape:>15} {family.kind:<7} {family.scaling:<7} {p['devices']:>7} {p['form']:<9} "
        f"{p['what']:<7} {_cell(p.get('us'), '10.2f')} {_cell(p.get('of_copy'), '6.2f')} "
        f"{_cell(p['speed_up'], '8.2f')} {_cell(p['same_code'], '9.2f')} "
        f"{_cell(p['efficiency'], '6.3f')} {p['errors']['y']:>5.0f} {_cell(dx, '6.2f')}  "
    )
    moved = [
        f"{c['count']} {name.replace('_', '-')}, {c['bytes']} bytes"
        for name, c in p["collectives"].items()
        if c["count"]
    ]
    ends = [", ".join(moved) or "none", *(f"WRONG: {why}" for why in p["wrong"])]
    return text + "  ".join(ends + ([p["error"]] if "error" in p else []))


def target_line(found: dict[str, Any]) -> str:
    target, met = found["target"], "met" if found["met"] else "MISSED"
    return (
        f"{target['kind']} on {found['devices']} devices: least {target['figure']} "
        f"{found['value']:.3f} (target {target['goal']}: {met}), {found['worst']}"
    )


def _cell(value: float | None, form: str) -> str:
    return format("-", f">{form.split('.')[0]}") if value is None else format(value, form)


def good(points: Sequence[dict[str, Any]]) -> bool:
    return not any(p["wrong"] or "error" in p for p in points)


def plot(data: dict[str, Any], path: Any) -> None:
    """Speed-up over the same code on one device, strong and weak, against devices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    numbers = sorted({p["devices"] for f in data["shapes"] for p in f["points"]}) or [1]
    for axis, scaling in zip(axes, (STRONG, WEAK), strict=True):
        axis.plot(numbers, numbers, "k--", label="ideal")
        families = [f for f in data["shapes"] if f["scaling"] == scaling]
        for i, family in enumerate(families):
            for what, style in zip(WHATS, ("o-", "s:"), strict=True):
                mine = {
                    p["devices"]: p["same_code"]
                    for p in family["points"]
                    if p["what"] == what and p["efficiency"] is not None
                    if p["form"] == AUTOMATIC or p["devices"] == 1
                }
                label = f"{family['name'].removesuffix(scaling)}{what}"
                axis.plot(*zip(*mine.items(), strict=True), style, c=f"C{i}", label=label, ms=4)
        each = "" if scaling == STRONG else ", shapes of one device"
        axis.set(title=f"{scaling} scaling{each}", xlabel="devices")
        axis.set(ylabel="speed-up over one device's same code")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(numbers, [str(n) for n in numbers])
        axis.set_yticks(numbers, [str(n) for n in numbers])
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    env = data["environment"]
    figure.suptitle(f"{data['options']['dtype']}, {env['device']}, jax {env['jax']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
