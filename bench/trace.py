"""Device time on a GPU, from a profiler session: groups of calls, each group behind a plug.

The plug is a kernel that reads gigabytes. While it runs the host queues the calls of a group, so
that they run back to back and no gap is the host's; its name marks in the trace where a group
begins; and it leaves foreign, clean data in L2. JAX lets 32 programs be in flight: a group has at
most GROUP calls.

A call has two times. `busy` is what at least one of its kernels, memcpys and memsets covers (those
of one call may overlap). `span` goes from its first start to its last end: it also counts the gaps
between its own launches, which whoever calls it waits for.
"""

import functools
import itertools
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Where the rotation stands. One for all cases: the buffers one case has just left in the cache must
# not be the first that the next case reads.
_TURN = itertools.count()
GPU_PLANE = "/device:GPU:0"
STREAM = "Stream #"
GROUP = 16
PLUG_BYTES = 4 << 30  # about a millisecond
PLUG_PIECES = 64
QUEUED = 5e3  # ns

Event = tuple[float, float, str]  # start and duration in ns, name


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
class Timed:
    """Microseconds of each call of a group, and the names of the device events of one call.

    `queued` is the part of the calls that began within QUEUED of the end of the call before: the
    others may have waited for the host. `ends` is when each call ended, on the device's clock.
    """

    busy: list[float]
    span: list[float]
    kernels: list[str]
    queued: float = 1.0
    ends: list[float] = field(default_factory=list)


def device_events(folder: str, gpu: str = GPU_PLANE) -> list[Event]:
    """Everything that ran on a GPU's streams, by start."""
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise TimingError(f"jax.profiler wrote no trace under {folder}")
    data = jax.profiler.ProfileData.from_file(str(files[-1]))
    seen, events = [], []
    for plane in data.planes:
        lines = list(plane.lines) if plane.name == gpu else []
        seen += [plane.name, *(f"{plane.name}: {line.name}" for line in lines)]
        for line in lines:  # other lines ("XLA Ops", ...) repeat the same time in another view
            if line.name.startswith(STREAM):
                events += [(e.start_ns, e.duration_ns, e.name) for e in line.events]
    if not events:
        raise TimingError(
            f"the trace holds no GPU kernels (no events on {gpu}, lines {STREAM}...): CUPTI "
            f"is missing or held by another profiler; the trace has {', '.join(seen) or 'nothing'}"
        )
    return sorted(events)


def per_call(events: list[Event], calls: int) -> Timed:
    """The times of each of `calls` calls; every call must show the same device events."""
    each, rest = divmod(len(events), calls)
    if rest or not each:
        names = dict(Counter(name for _, _, name in events))
        raise TimingError(f"{len(events)} GPU events for {calls} calls, no multiple: {names}")
    groups = [events[i * each : (i + 1) * each] for i in range(calls)]
    kinds = [sorted(name for _, _, name in group) for group in groups]
    if any(kind != kinds[0] for kind in kinds):
        raise TimingError(f"calls differ in their GPU events: {kinds[0]} and others")
    busy, span, ends, waited, end = [], [], [], 0, groups[0][0][0]
    for group in groups:
        waited += group[0][0] - end > QUEUED
        end, covered = group[0][0], 0.0
        for start, duration, _ in group:
            covered += max(0.0, start + duration - max(start, end))
            end = max(end, start + duration)
        busy.append(covered / 1e3)
        span.append((end - group[0][0]) / 1e3)
        ends.append(end / 1e3)
    return Timed(busy, span, kinds[0], 1 - waited / calls, ends)


def split(events: list[Event], plugs: frozenset[str]) -> list[list[Event]]:
    """The events behind each plug; a plug may be several kernels of these names.

    What ran before the first plug belongs to nobody.
    """
    groups: list[list[Event]] = []
    in_plug = False
    for event in events:
        if event[2] in plugs:
            if not in_plug:
                groups.append([])
            in_plug = True
        else:
            in_plug = False
            if groups:
                groups[-1].append(event)
    return groups


def assign(
    events: list[Event], plugs: frozenset[str], calls: Sequence[int]
) -> list[Timed | TimingError]:
    """For each group of so many calls its times, or what is wrong with its events."""
    groups = split(events, plugs)
    if len(groups) != len(calls):
        raise TimingError(f"{len(groups)} groups of GPU events for {len(calls)} groups of calls")
    found: list[Timed | TimingError] = []
    for group, count in zip(groups, calls, strict=True):
        try:
            found.append(per_call(group, count))
        except TimingError as error:
            found.append(error)
    return found


def _record(work: Callable[[], Any]) -> list[Event]:
    return record(work, [GPU_PLANE])[0]


def record(work: Callable[[], Any], gpus: Sequence[str]) -> list[list[Event]]:
    """What `work` ran on each of these GPUs."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the device's events are all we read
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory(prefix="jaxsoftmax-bench-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(work())
        return [device_events(folder, gpu) for gpu in gpus]


@functools.cache
def _plug_data(device: jax.Device | None) -> jax.Array:
    memory = ((device or jax.devices()[0]).memory_stats() or {}).get("bytes_limit", PLUG_BYTES)
    piece = min(PLUG_BYTES, memory // 32) // (4 * PLUG_PIECES) // 1024 * 1024
    return jnp.zeros((PLUG_PIECES, piece), jnp.uint32, device=device)


@jax.jit
def _read(data: jax.Array) -> jax.Array:
    pieces = [lax.index_in_dim(data, i, keepdims=False) for i in range(PLUG_PIECES)]
    return functools.reduce(lax.bitwise_or, pieces)  # no case does that: a name of its own


@functools.cache
def _plug(
    devices: tuple[jax.Device | None, ...] = (None,),
) -> tuple[Callable[[], Any], frozenset[str]]:
    """Launches the plug on each device; the names of its kernels, learned from a trace of it alone
    on the first GPU."""
    each = [_plug_data(device) for device in devices]

    def launch() -> list[jax.Array]:
        return [_read(data) for data in each]

    jax.block_until_ready(launch())
    for attempt in range(3):  # the profiler may lose events, its very first trace above all
        try:
            events = _record(lambda: [launch() for _ in range(3)])
            names = frozenset(name for _, _, name in events if not name.startswith("Mem"))
            return launch, names
        except TimingError:
            if attempt == 2:
                raise
    raise AssertionError("unreachable")


def _session(groups: Sequence[tuple[Case, int]]) -> list[Timed | TimingError]:
    plug, names = _plug()

    def work() -> Any:
        keep: deque[Any] = deque()
        for case, calls in groups:
            plug()
            # Outputs stay alive for a round trip, so that they rotate as the inputs do.
            keep = deque(maxlen=len(case.inputs))
            for _ in range(calls):
                keep.append(case.fn(*case.next()))
        return list(keep)

    return assign(_record(work), names, [calls for _, calls in groups])


def device_time(groups: Sequence[tuple[Case, int]]) -> list[Timed | TimingError]:
    """The times of each group of calls, in one profiler session; what it lost, in a second."""
    assert all(0 < calls <= GROUP for _, calls in groups)
    try:
        found = _session(groups)
    except TimingError:
        return _session(groups)
    lost = [i for i, timed in enumerate(found) if isinstance(timed, TimingError)]
    if lost:
        again = _session([groups[i] for i in lost])
        for i, timed in zip(lost, again, strict=True):
            found[i] = timed
    return found
