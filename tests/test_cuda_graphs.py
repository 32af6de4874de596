"""CUDA graphs: the calls are captured, and right when they replay other data in other buffers.

Each test is a fresh process, for the dump that proves it; the programs of a test share it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import devices_of
from functions import FUNCTIONS, ours, theirs
from graphs import (
    ANY_SIZE,
    GRAPH,
    Check,
    Operands,
    Program,
    captured,
    fresh_with_dump,
    run_all,
)
from loading import PATTERNS, SCALES, Call, both, make, paths_for
from loading_oracle import Oracle
from plans import hand_plans

from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import PATHS
from jaxsoftmax._primitive import bind

WHOLE_LOOPS = ANY_SIZE | {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE"}
ON_GPU = ("cluster_sixteen", "bulk_cluster", "cooperative")


def plans_of(platform: str, op: str, n: int) -> dict[str, Any]:
    held = hand_plans(op, "float32", n, platform)
    return {path: path for path in PATHS} | {name: held[name] for name in ON_GPU if name in held}


def of_op(platform: str, op: str) -> Iterator[Program]:
    """The op in each path, alone in its program."""
    stats = OPS[op].stats

    def data(seed: int) -> tuple[Operands, Check]:
        x = np.random.default_rng(seed).standard_normal((6, 5003)).astype(np.float32)
        inputs, expected = cases.expected(op, x)
        return inputs, lambda found: expected.check(*(found if stats else [found]))

    for name, path in plans_of(platform, op, 5003).items():
        call = functools.partial(bind, op, axes=(-1,), path=path, stats=stats)
        yield Program(f"{op}_{name}", call, data, calls=1)


SHAPE = (2, 40, 300)
KINDS: dict[str, dict[str, Any]] = {
    "masked": dict(mask="full", scaled=True),
    "causal": dict(causal=True),
    "columns": dict(axis=1),
    "cells": dict(axis=(0, 2), mask="key"),
}


def of_function(platform: str, name: str) -> Iterator[Program]:
    """Rows that are loaded and rows that are columns, forward and backward, in each path."""
    for kind, options in KINDS.items():
        if name == "logsumexp":  # which has no scale and is not causal
            options = {k: v for k, v in options.items() if k in ("axis", "mask")}
        for path in paths_for(platform, Call(name, **options), SHAPE, "float32"):
            call = Call(name, path=path, **options)
            data, both_ways = functools.partial(loads, call), functools.partial(both, call)
            yield Program(f"{name}_{kind}_{path}", both_ways, data, calls=2)


def loads(call: Call, seed: int) -> tuple[Operands, Check]:
    data = make(call, SHAPE, "float32", PATTERNS[seed % 3], SCALES[seed % 3])
    rng = np.random.default_rng(seed)
    x, ct = (rng.standard_normal(a.shape).astype(a.dtype) for a in (data.x, data.ct))
    data = dataclasses.replace(data, x=x, ct=ct)
    return data.operands(), lambda found: Oracle(call, data).check(*found)


# Calls among others: of f, which makes a function of a name and an axis.


def step(f, x, w):
    """Of training: so many thunks that XLA makes a graph unasked."""

    def loss(w):
        h = jnp.sin(jnp.dot(x, w, precision="highest"))
        return f("logsumexp")(h).sum() - (f("log_softmax")(h) * f("softmax", 0)(h)).sum()

    value, gradient = jax.value_and_grad(loss)(w)
    return value, w - 0.1 * gradient


def carried(f, x):
    return jax.lax.scan(lambda c, _: (c - f("softmax")(c), None), x, None, length=7)[0]


def slabs(f, x):
    return jax.lax.scan(lambda n, slab: (n + 1, f("softmax")(slab)), 0, x)[1]


def gradient_of_slabs(f, x):
    def add(total, slab):
        return total + (f("softmax")(slab) ** 2).sum(), None

    return jax.grad(lambda x: jax.lax.scan(add, 0.0, x)[0])(x)


def mapped(f, x):
    return jax.vmap(jax.grad(lambda x: (f("softmax")(x) ** 2).sum()), in_axes=1)(x)


# Of each: the shapes of its operands, how many calls it has, XLA's options.
AMONG: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int, dict[str, Any]]] = {
    "step": (step, ((64, 128), (128, 300)), 6, {}),
    "carried": (carried, ((6, 5003),), 1, ANY_SIZE),
    "whole_loop": (carried, ((6, 5003),), 1, WHOLE_LOOPS),
    "slabs": (slabs, ((7, 6, 5003),), 1, ANY_SIZE),
    # Slabs that begin at a line of memory: the call in the graph reads and writes them in place.
    "slabs_in_place": (slabs, ((7, 6, 5120),), 1, ANY_SIZE),
    "gradient_of_slabs": (gradient_of_slabs, ((5, 6, 2560),), 2, ANY_SIZE),
    "mapped": (mapped, ((6, 7, 999),), 2, ANY_SIZE),
}


def of_calls_among_others(platform: str, which: str) -> Iterator[Program]:
    """Against the same with jax.nn; what is planned anew for each call, or forced everywhere."""
    function, shapes, calls, options = AMONG[which]
    whole_step = which == "step"  # whose products XLA may tune anew each time: no bits to compare
    with_jax_nn = jax.jit(functools.partial(function, theirs))

    def data(seed: int) -> tuple[Operands, Check]:
        rng = np.random.default_rng(seed)
        operands = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        want = jax.tree.map(np.asarray, with_jax_nn(*operands))
        return operands, lambda found: jax.tree.map(near, found, want)

    plans = {"planned": None} if whole_step else plans_of(platform, "softmax", shapes[0][-1])
    for name, path in plans.items():
        with_ours = functools.partial(function, functools.partial(ours, path=path))
        inside = (GRAPH, "kWhile") if options == WHOLE_LOOPS else (GRAPH,)
        yield Program(f"{which}_{name}", with_ours, data, calls, options, inside, not whole_step)


def near(found: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-6 * max(1, np.abs(want).max()))


SETS = {of_op: OPS, of_function: FUNCTIONS, of_calls_among_others: AMONG}
NAMES = [(programs.__name__, what) for programs, each in SETS.items() for what in each]


def run_set(platform: str, programs: str, what: str, folder: str) -> None:
    run_all(globals()[programs](platform, what), folder)


@pytest.mark.gpu
@pytest.mark.parametrize(("programs", "what"), NAMES)
def test_captured_and_replayed(tmp_path, programs, what):
    if not devices_of("cuda"):
        pytest.skip("no cuda device")
    fresh_with_dump(run_set, programs, what, str(tmp_path))


DUMP = """\
000: kCommandBuffer [source       | next=003 (1)]
    001: kCustomCall [source | sink] kCustomCall
    002: kWhile      [prev=001 (1) | sink        ]
condition:
        003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        004: kDynamicSliceFusion [source | sink] params=1, results=2
            005: kCustomCall [source | sink] kCustomCall
006: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    007: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        008: kCustomCall [source | sink] kCustomCall
    009: kCustomCall [source | sink] kCustomCall
010: kCustomCall [source | sink] kCustomCall
"""


def test_the_proof_tells_captured_from_not():
    assert captured(DUMP) == (3, 2)
    assert captured(DUMP, (GRAPH, "kWhile")) == (1, 4)
    assert captured(DUMP, ("kWhile", GRAPH)) == (1, 4)
    assert captured("\n".join(DUMP.splitlines()[-2:])) == (0, 2)
