"""How long a call takes: kernel time from the profiler on a GPU, paired wall time on a CPU.

GPU: the calls run under jax.profiler.trace and the durations of the kernels, memcpys and memsets
that CUPTI recorded on the device's stream lines are summed for each call: no launch gap and no host
time is in them. Inputs and outputs rotate among enough buffers that every call finds a cold L2.
CPU: every round runs all cases once, in a shifting order; ratios are medians of paired rounds.
"""

import itertools
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

# Where the rotation stands. One for all cases: the buffers one case has just left in the cache must
# not be the first that the next case reads.
_TURN = itertools.count()
GPU_PLANE = "/device:GPU:0"
STREAM = "Stream #"


class TimingError(RuntimeError):
    """A measurement that cannot be trusted, with the reason."""


@dataclass
class Case:
    """A jitted function and the tuples of arguments it is called on in turn."""

    label: str
    fn: Callable[..., Any]
    inputs: list[tuple[Any, ...]]

    def next(self) -> tuple[Any, ...]:
        return self.inputs[next(_TURN) % len(self.inputs)]


@dataclass
class Sample:
    """Microseconds of every call, and the median of each round."""

    times: list[float]
    rounds: list[float]
    kernels: list[str] | None = None  # names of the device events of one call (GPU)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.times)
        low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
        data = asdict(self)
        del data["times"]
        numbers = {"median_us": self.median, "p10_us": low, "p90_us": high}
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
    return (_device_time if on_gpu() else _wall_time)(cases, effort, cost)


def ratio(base: Sample, ours: Sample) -> float:
    """How many times faster `ours` is; paired by round where the rounds are paired (wall time)."""
    if base.kernels is None and len(base.times) == len(ours.times):
        return statistics.median(b / o for b, o in zip(base.times, ours.times, strict=True))
    return base.median / ours.median


# --- GPU ---


def device_events(folder: str) -> list[tuple[float, float, str]]:
    """(start, duration, name) in ns of everything that ran on the GPU's streams, by start."""
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise TimingError(f"jax.profiler wrote no trace under {folder}")
    data = jax.profiler.ProfileData.from_file(str(files[-1]))
    seen, events = [], []
    for plane in data.planes:
        lines = list(plane.lines) if plane.name == GPU_PLANE else []
        seen += [plane.name, *(f"{plane.name}: {line.name}" for line in lines)]
        for line in lines:  # other lines ("XLA Ops", ...) repeat the same time in another view
            if line.name.startswith(STREAM):
                events += [(e.start_ns, e.duration_ns, e.name) for e in line.events]
    if not events:
        raise TimingError(
            f"the trace holds no GPU kernels (no events on {GPU_PLANE}, lines {STREAM}...): CUPTI "
            f"is missing or held by another profiler; the trace has {', '.join(seen) or 'nothing'}"
        )
    return sorted(events)


def per_call(events: list[tuple[float, float, str]], calls: int) -> tuple[list[float], list[str]]:
    """Microseconds of each call, and the kernels of one; every call must show the same kernels."""
    each, rest = divmod(len(events), calls)
    if rest:
        names = dict(Counter(name for _, _, name in events))
        raise TimingError(f"{len(events)} GPU events for {calls} calls, no multiple: {names}")
    groups = [events[i * each : (i + 1) * each] for i in range(calls)]
    kinds = [sorted(name for _, _, name in group) for group in groups]
    if any(kind != kinds[0] for kind in kinds):
        raise TimingError(f"calls differ in their GPU events: {kinds[0]} and others")
    return [sum(duration for _, duration, _ in group) / 1e3 for group in groups], kinds[0]


def _trace(case: Case, calls: int) -> tuple[list[float], list[str]]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the device's events are all we read
    options.host_tracer_level = 1
    for attempt in range(2):  # the profiler may lose events, its very first trace above all
        # Outputs stay alive for a round trip, so that they rotate among buffers as the inputs do.
        keep: deque[Any] = deque(maxlen=len(case.inputs))
        with tempfile.TemporaryDirectory(prefix="jaxsoftmax-bench-") as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                for _ in range(calls):
                    keep.append(case.fn(*case.next()))
                jax.block_until_ready(list(keep))
            try:
                return per_call(device_events(folder), calls)
            except TimingError as error:
                if attempt:
                    raise TimingError(f"{case.label}: {error}") from error
    raise AssertionError("unreachable")


def _device_time(cases: list[Case], effort: Effort, cost: dict[str, float]) -> dict[str, Sample]:
    samples = {c.label: Sample([], [], []) for c in cases}
    for _ in range(effort.rounds):
        for case in cases:
            times, names = _trace(case, min(200, max(10, int(effort.budget_s / cost[case.label]))))
            sample = samples[case.label]
            sample.times += times
            sample.rounds.append(statistics.median(times))
            sample.kernels = names
    return samples


# --- CPU ---


def _once(case: Case, repeat: int) -> float:
    args = [case.next() for _ in range(repeat)]
    start = time.perf_counter()
    for arg in args:
        jax.block_until_ready(case.fn(*arg))
    return (time.perf_counter() - start) / repeat


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
