"""Streams: calls beside other work on the device, and beside each other, come to an end and give
the bits that they give alone. A cooperative launch needs all of its blocks on the device at once.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import inspect
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import devices_of
from contracts import as_dtype
from graphs import ANY_SIZE, GRAPH, Check, Operands, Program, fresh_with_dump, run_all
from jax.experimental.compute_on import compute_on
from loading import same_bits
from oracle import Expected
from plans import hand_plans, plan_on
from processes import fresh

from jaxsoftmax import Plan
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import PATHS
from jaxsoftmax._primitive import bind

pytestmark = pytest.mark.gpu
AT_ONCE = ANY_SIZE | {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
ON_GPU = ("cluster_sixteen", "bulk_cluster", "cooperative", "cooperative_many")
SHAPE, WIDE = (3, 30_001), (2, 1_500_001)  # rows of WIDE take the whole device
REPEATS, THREADS = 200, 4


@pytest.fixture(autouse=True)
def cuda():
    if not devices_of("cuda"):
        pytest.skip("no cuda device")


def normal(shape: tuple[int, int], seed: int) -> np.ndarray:
    return cases.make("normal", *shape, as_dtype("float32"), seed)


def wide_plan(platform: str, op: str) -> Plan:
    plan = plan_on(platform, op, "float32", *WIDE)
    assert platform == "cpu" or (plan.path == "split_k" and plan.bulk), f"not cooperative: {plan}"
    return plan


# Two streams of one program, which are branches of a graph where XLA makes one of it.


def chain(path: Any, length: int, x: jax.Array) -> jax.Array:
    """One call after the other. log_softmax of log_softmax changes only roundings: what goes wrong
    in one call is still there after the last."""
    for _ in range(length):
        x = bind("log_softmax", x, axes=(-1,), path=path)
    return x


def of_two_streams(platform: str) -> Iterator[Program]:
    many = hand_plans("log_softmax", "float32", SHAPE[1], platform).get("cooperative_many")
    wide = wide_plan(platform, "log_softmax")
    links = {
        "streamed": functools.partial(chain, "two_pass", 30),
        "wide": functools.partial(chain, wide, 30),
        "many": functools.partial(chain, many, 100),
    }
    shapes = {"streamed": WIDE, "wide": WIDE, "many": SHAPE}
    alone = {name: jax.jit(link) for name, link in links.items()}

    def on_streams(f: Any, g: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        def on(number: int, function: Any) -> Any:
            kind, space = f"gpu_stream:{number}", jax.memory.Space.Device
            return compute_on(function, compute_type=kind, out_memory_spaces=space)

        return on(1, f)(x), on(2, g)(y)

    def data(a: str, b: str, seed: int) -> tuple[Operands, Check]:
        operands = normal(shapes[a], seed), normal(shapes[b], seed + 10)
        want = [np.asarray(alone[n](x)) for n, x in zip((a, b), operands, strict=True)]
        assert all(np.isfinite(y).all() for y in want)
        return operands, lambda found: identical(found, want)

    for a, b in (("streamed", "many"), ("wide", "many"), ("wide", "wide")):
        each, calls = functools.partial(data, a, b), 130 if b == "many" else 60
        both = functools.partial(on_streams, links[a], links[b])
        inside = (GRAPH, "kAsyncStart")
        yield Program(f"streams_{a}_{b}", both, each, calls, AT_ONCE, inside)
        no_streams = functools.partial(lambda f, g, x, y: (f(x), g(y)), links[a], links[b])
        yield Program(f"branches_{a}_{b}", no_streams, each, calls, AT_ONCE)


def identical(found: Any, want: Any) -> None:
    assert all(map(same_bits, found, want)), "other bits than alone"


def run_two_streams(platform: str, folder: str) -> None:
    run_all(of_two_streams(platform), folder)


def test_two_streams_of_a_program(tmp_path):
    """Streamed and cooperative calls, each kind on a stream of its own, and both in one graph."""
    if "out_memory_spaces" not in inspect.signature(compute_on).parameters:
        pytest.skip("an older JAX, whose compute_on takes other arguments")
    fresh_with_dump(run_two_streams, str(tmp_path))


# Calls from several threads while PyTorch's streams keep the device busy.


class Repeated:
    """A call that is right alone, and is then repeated: `wrong()` counts other bits."""

    def __init__(self, name: str, op: str, path: Any, inputs: Operands, expected: Expected):
        self.name, stats = name, OPS[op].stats

        def call(*operands: jax.Array) -> Any:
            found = bind(op, *operands, axes=(-1,), path=path, stats=stats)
            return found if stats else (found,)

        def same(want: Any, *operands: jax.Array) -> jax.Array:
            bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
            pairs = zip(call(*operands), want, strict=True)
            return jnp.stack([(bits(a) == bits(b)).all() for a, b in pairs]).all()

        self.operands, self.same = jax.device_put(inputs), jax.jit(same)
        self.want = jax.jit(call)(*self.operands)
        expected.check(*map(np.asarray, self.want))
        assert self.same(self.want, *self.operands), f"{name}: other bits when run again"

    def wrong(self) -> int:
        """All of them are in flight before the first is looked at."""
        same = [self.same(self.want, *self.operands) for _ in range(REPEATS)]
        return sum(not each for each in same)


def repeated(platform: str) -> Iterator[Repeated]:
    for op in OPS:
        inputs, expected = cases.expected(op, normal(SHAPE, 0))
        held = hand_plans(op, "float32", SHAPE[1], platform)
        plans = {p: p for p in PATHS} | {name: held[name] for name in ON_GPU if name in held}
        for name, path in plans.items():
            yield Repeated(f"{op} {name}", op, path, inputs, expected)
    for op in ("softmax", "softmax_bwd", "log_softmax", "log_softmax_bwd"):
        inputs, expected = cases.expected(op, normal(WIDE, 0))
        yield Repeated(f"{op} wide", op, wide_plan(platform, op), inputs, expected)


class Products:
    """Products that come and go on three streams of PyTorch's, some tens of ms of them ahead."""

    def __init__(self) -> None:
        import torch

        self.torch, self.stop, self.begun = torch, threading.Event(), threading.Event()
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.a = torch.randn(4096, 4096, device="cuda").to(torch.bfloat16)
        self.results = [torch.empty_like(self.a) for _ in self.streams]
        torch.cuda.synchronize()

    def work(self) -> None:
        torch, ahead = self.torch, deque()
        while not self.stop.is_set():
            for stream, result in zip(self.streams, self.results, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(8):
                        torch.mm(self.a, self.a, out=result)
                    ahead.append(stream.record_event())
            while len(ahead) > 48:
                self.begun.set()
                ahead.popleft().synchronize()
        torch.cuda.synchronize()

    def busy(self) -> bool:
        return not all(stream.query() for stream in self.streams)


def run_beside(platform: str, load: Any = Products) -> None:
    calls, products = list(repeated(platform)), load()

    def work(call: Repeated) -> tuple[str, int, int]:
        before = products.busy()
        return call.name, call.wrong(), before + products.busy()

    with concurrent.futures.ThreadPoolExecutor(THREADS + 1) as pool:
        loading = pool.submit(products.work)
        try:
            assert products.begun.wait(60) or loading.result(), "the products did not begin"
            found = list(pool.map(work, calls))
        finally:
            products.stop.set()
        loading.result()
    assert not (wrong := {name: count for name, count, _ in found if count}), wrong
    assert sum(busy for *_, busy in found) > len(found), "the device was idle half of the time"


def test_beside_busy_streams():
    """Every path, four threads at once, 200 times each: cooperative launches wait their turn."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no PyTorch")
    fresh(run_beside, "cuda", platform="cuda", limit=400)
