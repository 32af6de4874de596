"""Threads that trace, compile and run at once, from a process's very first call on: every op in
many plans, and masked, scaled, causal rows and other axes both ways. Each is right, and has the
bits that it gives alone.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cases
import jax
import numpy as np
from contracts import as_dtype
from functions import FUNCTIONS
from loading import Call, both, make, paths_for, same_bits
from loading_oracle import Oracle
from plans import hand_plans
from processes import fresh

from jaxsoftmax import _ffi
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import PATHS
from jaxsoftmax._primitive import bind

THREADS = 12
# The rings are one kernel, which a first call grants shared memory: to each of them another amount.
PLANS = (
    *("warp_a_row", "mostly_shared", "split_seven", "cluster_shared", "cluster_sixteen"),
    *("bulk_block", "bulk_cluster", "cooperative", "cooperative_slots"),
)
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (1003, 512, 77, 1030)
SHAPE = (2, 40, 100)
LOADS: tuple[dict[str, Any], ...] = (
    *({"mask": "full", "scaled": True}, {"causal": True}),
    *({"axis": 1}, {"axis": (0, 2), "mask": "key"}),
)


@dataclasses.dataclass
class Job:
    """`make(platform)` gives the function, or None where the device has no such plan. A thread
    calls it: it may be the first to ask the device."""

    name: str
    make: Callable[[str], Callable[..., Any] | None]
    operands: tuple[Any, ...]
    check: Callable[..., Any]

    def run(self, platform: str) -> list[np.ndarray]:
        """Traced and compiled anew each time."""
        function = self.make(platform)
        if function is None:
            return []
        found = jax.jit(lambda *operands: function(*operands))(*self.operands)
        return [np.asarray(a) for a in found]


def op_jobs() -> Iterator[Job]:
    for i, op in enumerate(OPS):
        for k, path in enumerate((None, *PATHS, *PLANS)):
            dtype, n = DTYPES[i % len(DTYPES)], LENGTHS[k % len(LENGTHS)]
            inputs, expected = cases.expected(op, cases.make("normal", 5, n, as_dtype(dtype)))
            make_op = functools.partial(op_function, op, dtype, n, path)
            yield Job(f"{op} {dtype} {n} {path}", make_op, inputs, expected.check)


def op_function(op: str, dtype: str, n: int, path: str | None, platform: str) -> Any:
    plan: Any = path
    if path in PLANS and (plan := hand_plans(op, dtype, n, platform).get(path)) is None:
        return None
    stats = OPS[op].stats

    def function(*operands):
        found = bind(op, *operands, axes=(-1,), path=plan, stats=stats)
        return found if stats else (found,)

    return function


def load_jobs() -> Iterator[Job]:
    for i, name in enumerate(FUNCTIONS):
        for k, options in enumerate(LOADS):
            if name == "logsumexp":  # which has no scale and is not causal
                options = {key: options[key] for key in options.keys() & {"axis", "mask"}}
            call = Call(name, **options)
            data = make(call, SHAPE, "float32", "random", 0.37)
            make_call = functools.partial(load_function, call, i + k)
            check = Oracle(call, data).check
            yield Job(f"{name} {options}", make_call, data.operands(), check)


def load_function(call: Call, turn: int, platform: str) -> Any:
    held = paths_for(platform, call, SHAPE, "float32")
    return functools.partial(both, dataclasses.replace(call, path=held[turn % len(held)]))


def run_at_once(platform: str) -> None:
    """Each job in two threads, the first of a fresh process's, and then alone."""
    jobs = [*op_jobs(), *load_jobs()]  # of NumPy: nothing has asked JAX yet
    together, started = jobs * 2, threading.Barrier(THREADS)
    random.Random(5).shuffle(together)
    failures: list[str] = []

    def attempt(job: Job) -> list[np.ndarray]:
        try:
            found = job.run(platform)
            if found and platform in _ffi.PLATFORMS:  # the formulas keep no contract
                job.check(*found)
            return found
        except Exception:
            failures.append(f"{job.name}: {traceback.format_exc()}")
            return []

    with concurrent.futures.ThreadPoolExecutor(THREADS, initializer=started.wait) as pool:
        found = list(pool.map(attempt, together))
    alone = {job.name: attempt(job) for job in jobs}
    for job, results in zip(together, found, strict=True):
        want = alone[job.name]
        if len(results) != len(want) or not all(map(same_bits, results, want)):
            failures.append(f"{job.name}: other bits than alone")
    if failures:
        sys.exit("\n".join(failures))
    assert sum(map(bool, found)) > len(found) // 3, "few of the plans are any device's"


def test_threads_from_the_first_call_on(platform):
    fresh(run_at_once, platform, platform=platform)
