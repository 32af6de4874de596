"""Device time of a call that runs on several GPUs of one host, from one profiler session.

The clocks of GPUs are not compared. On each GPU by itself a group of calls runs back to back behind
a plug (see trace.py); a call takes what the group does from the end of its first call to the end of
its last, divided by the calls between: waiting for other GPUs, within NCCL's kernels, is in it. The
slowest GPU counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from . import trace
from .timing import Case, Sample
from .trace import GROUP, Event, Timed, TimingError

LEAST = 3  # calls of a group: two of them are timed


@dataclass
class Rate:
    """Microseconds a call on each GPU, the events of one call, and the part that did not wait."""

    us: list[float]
    kernels: list[str]
    queued: float


def plane(device: jax.Device) -> str:
    """The name of a GPU in a trace."""
    return f"/device:GPU:{device.local_hardware_id}"


def steady(timed: Timed) -> float:
    """Microseconds a call, of a group's that followed the first."""
    if len(timed.ends) < 2:
        raise TimingError(f"{len(timed.ends)} calls in a group: a rate takes two")
    return (timed.ends[-1] - timed.ends[0]) / (len(timed.ends) - 1)


def rates(
    events: Mapping[str, list[Event]], plugs: frozenset[str], calls: Sequence[int]
) -> list[Rate | TimingError]:
    """For each group of so many calls its rate, from each GPU's events, or what is wrong."""
    timed: dict[str, list[Timed | TimingError]] = {}
    for gpu, mine in events.items():
        try:
            timed[gpu] = trace.assign(mine, plugs, calls)
        except TimingError as error:
            raise TimingError(f"{gpu}: {error}") from error
    return [_rate({gpu: groups[i] for gpu, groups in timed.items()}) for i in range(len(calls))]


def _rate(timed: Mapping[str, Timed | TimingError]) -> Rate | TimingError:
    good = [one for one in timed.values() if isinstance(one, Timed)]
    if len(good) < len(timed):
        wrong = (f"{gpu}: {e}" for gpu, e in timed.items() if isinstance(e, TimingError))
        return TimingError("; ".join(wrong))
    return Rate([steady(one) for one in good], good[0].kernels, min(one.queued for one in good))


def _session(
    groups: Sequence[tuple[Case, int]], devices: tuple[jax.Device, ...]
) -> list[Rate | TimingError]:
    plug, names = trace._plug(devices)

    def work() -> Any:
        for case, calls in groups:
            for _ in devices:  # to launch a call takes the longer, the more devices there are
                plug()
            out = None
            for _ in range(calls):
                out = case.fn(*case.next())
            jax.block_until_ready(out)  # so that two groups' results are never there at once

    planes = [plane(device) for device in devices]
    recorded = trace.record(work, planes)
    return rates(dict(zip(planes, recorded, strict=True)), names, [calls for _, calls in groups])


def device_rates(
    groups: Sequence[tuple[Case, int]], devices: tuple[jax.Device, ...]
) -> list[Rate | TimingError]:
    """The rate of each group of calls, in one profiler session; what it lost, in a second."""
    assert all(LEAST <= calls <= GROUP for _, calls in groups)
    try:
        found = _session(groups, devices)
    except TimingError:
        return _session(groups, devices)
    lost = [i for i, rate in enumerate(found) if isinstance(rate, TimingError)]
    if lost:
        again = _session([groups[i] for i in lost], devices)
        for i, rate in zip(lost, again, strict=True):
            found[i] = rate
    return found


def in_rounds(
    cases: Sequence[Case], calls: Sequence[int], rounds: int, devices: tuple[jax.Device, ...]
) -> dict[str, tuple[Sample, list[float]] | TimingError]:
    """Of each (compiled) case the slowest GPU's time of every round, and each GPU's median; a case
    whose every round is lost says why."""
    groups = [(c, n) for _ in range(rounds) for c, n in zip(cases, calls, strict=True)]
    rounds_of: dict[str, list[Rate | TimingError]] = {case.label: [] for case in cases}
    for (case, _), rate in zip(groups, device_rates(groups, devices), strict=True):
        rounds_of[case.label].append(rate)
    return {label: summary(mine) for label, mine in rounds_of.items()}


def summary(found: Sequence[Rate | TimingError]) -> tuple[Sample, list[float]] | TimingError:
    good = [rate for rate in found if isinstance(rate, Rate)]
    if not good:
        return next(rate for rate in found if isinstance(rate, TimingError))
    slowest = [max(rate.us) for rate in good]
    sample = Sample(slowest, slowest, good[0].kernels, queued=min(r.queued for r in good))
    return sample, [statistics.median(us) for us in zip(*(r.us for r in good), strict=True)]
