"""How long a call takes: device time on a GPU (trace.py), paired wall time on a CPU.

GPU: inputs and outputs rotate among enough buffers that every call finds a cold L2.
CPU: every round runs all cases once, in a shifting order; ratios are medians of paired rounds.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from .trace import GROUP as GROUP
from .trace import Case as Case
from .trace import TimingError as TimingError
from .trace import device_time


@dataclass
class Sample:
    """Microseconds of every call, and the median of each round."""

    times: list[float]
    rounds: list[float]
    kernels: list[str] | None = None  # names of the device events of one call (GPU)
    spans: list[float] = field(default_factory=list)  # median of each round, gaps counted (GPU)
    queued: float | None = None  # the least part of a group's calls that did not wait (GPU)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def span(self) -> float:
        """From a call's first start to its last end: the median of the rounds' medians."""
        return statistics.median(self.spans or self.rounds)

    @property
    def spread(self) -> float:
        """How far rounds differ: the middle half of their medians (of spans), in percent."""
        values = sorted(self.spans or self.rounds)
        if len(values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return 100 * (high - low) / statistics.median(values)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.times)
        low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
        data = asdict(self)
        del data["times"]
        numbers = {"median_us": self.median, "p10_us": low, "p90_us": high, "span_us": self.span}
        return numbers | {"calls": len(ordered)} | data


@dataclass(frozen=True)
class Effort:
    """How much to measure. `budget_s` is for one case: device time on a GPU, wall time on a CPU."""

    rounds: int
    budget_s: float


def on_gpu() -> bool:
    """Whether JAX's default device is a GPU."""
    return jax.default_backend() in ("gpu", "cuda")


def measure(cases: list[Case], effort: Effort) -> dict[str, Sample]:
    """Times every case on the device JAX has; keys are the labels."""
    cost = {}
    for case in cases:  # compile, warm up the clocks and the allocator, and learn what a call costs
        _once(case, 1)
        cost[case.label] = min(_once(case, 1) for _ in range(3))
    if not on_gpu():
        return _wall_time(cases, effort, cost)
    most = 4 * GROUP
    calls = [min(most, max(10, int(effort.budget_s / cost[c.label]))) for c in cases]
    samples = in_rounds(cases, calls, effort.rounds)
    for label, sample in samples.items():
        if isinstance(sample, TimingError):
            raise TimingError(f"{label}: {sample}") from sample
    return {k: s for k, s in samples.items() if isinstance(s, Sample)}


def in_rounds(
    cases: Sequence[Case], calls: Sequence[int], rounds: int
) -> dict[str, Sample | TimingError]:
    """Rounds of so many calls of each (compiled) case, or why a case has no times."""
    if not on_gpu():
        return _wall_rounds(cases, calls, rounds)
    groups, of = [], []
    for number in range(rounds):
        for case, count in zip(cases, calls, strict=True):
            for start in range(0, count, GROUP):
                groups.append((case, min(GROUP, count - start)))
                of.append((case.label, number))
    samples: dict[str, Sample | TimingError] = {c.label: Sample([], [], []) for c in cases}
    parts: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    for (label, number), timed in zip(of, device_time(groups), strict=True):
        sample = samples[label]
        if isinstance(timed, TimingError):
            samples[label] = timed
        elif isinstance(sample, Sample):
            busy, span = parts.setdefault((label, number), ([], []))
            busy += timed.busy
            span += timed.span
            sample.times += timed.busy
            sample.kernels = timed.kernels
            sample.queued = min(timed.queued, 1.0 if sample.queued is None else sample.queued)
    for (label, _), (busy, span) in parts.items():
        sample = samples[label]
        if isinstance(sample, Sample):
            sample.rounds.append(statistics.median(busy))
            sample.spans.append(statistics.median(span))
    return samples


def ratio(base: Sample, ours: Sample) -> float:
    """How many times faster `ours` is; paired by round where the rounds are paired (wall time)."""
    if base.kernels is None and len(base.times) == len(ours.times):
        return statistics.median(b / o for b, o in zip(base.times, ours.times, strict=True))
    return base.median / ours.median


# --- CPU ---


def _once(case: Case, repeat: int) -> float:
    args = [case.next() for _ in range(repeat)]
    start = time.perf_counter()
    for arg in args:
        jax.block_until_ready(case.fn(*arg))
    return (time.perf_counter() - start) / repeat


def _wall_rounds(
    cases: Sequence[Case], calls: Sequence[int], rounds: int
) -> dict[str, Sample | TimingError]:
    samples: dict[str, Sample | TimingError] = {}
    for case, count in zip(cases, calls, strict=True):
        times = [[_once(case, 1) * 1e6 for _ in range(count)] for _ in range(rounds)]
        medians = [statistics.median(t) for t in times]
        samples[case.label] = Sample([t for each in times for t in each], medians)
    return samples


def _wall_time(cases: list[Case], effort: Effort, cost: dict[str, float]) -> dict[str, Sample]:
    # A sample lasts a millisecond at least, so that the clock and a wake-up do not show in it.
    repeat = {label: max(1, min(100, int(1e-3 / t))) for label, t in cost.items()}
    spent = sum(cost[c.label] * repeat[c.label] for c in cases)
    count = min(100, max(5, int(effort.budget_s * len(cases) / spent)))
    times: dict[str, list[float]] = {c.label: [] for c in cases}
    for number in range(count):
        shift = number % len(cases)
        for case in cases[shift:] + cases[:shift]:
            times[case.label].append(_once(case, repeat[case.label]) * 1e6)
    third = -(-count // 3)
    return {
        label: Sample(t, [statistics.median(t[i : i + third]) for i in range(0, count, third)])
        for label, t in times.items()
    }
