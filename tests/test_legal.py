"""What makes a plan legal: one set of rules in Python and C++, and each device's limits."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import jax
import numpy as np
import pytest
from plans import GPU_ONLY, HAND_PLANS, ILLEGAL, SLOT, granted
from runs import run, run_native

import jaxsoftmax
from jaxsoftmax import Plan, _native
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import DTYPES, LIMITS, PATHS, check
from jaxsoftmax._plan_spec import resident_blocks


def test_cpp_fields_are_the_python_ones():
    names = tuple(f.name for f in dataclasses.fields(Plan) if f.name != "why")
    assert tuple(_native.plan_fields()) == names
    assert tuple(_native.paths()) == PATHS
    assert tuple(Plan("two_pass", 32).attributes()) == names


@pytest.mark.parametrize("rule", ILLEGAL)
def test_python_and_cpp_refuse_the_same(platform, rule):
    """Past Python, the handler refuses by itself and the process stays usable."""
    numbers, says = ILLEGAL[rule]
    plan, x = Plan(**numbers), np.zeros((2, 256), np.float32)
    for op in ("softmax", "log_softmax", "logsumexp"):
        with pytest.raises(ValueError, match=says):
            check(plan, op, "float32", 256)
        with pytest.raises(jax.errors.JaxRuntimeError, match=says):
            run_native(op, x, **plan.attributes())
    np.testing.assert_allclose(run("softmax", x), 1 / 256)


@pytest.mark.parametrize(
    "plan, holds",
    [
        (Plan("one_pass", 32, reg_packs=1, splits=2), 256),
        (Plan("one_pass", 32, reg_packs=2, smem_packs=3, splits=16), 10240),
        (Plan("one_pass", 32, smem_packs=SLOT), 128 * SLOT),
        (Plan("one_pass", 64, smem_packs=2 * SLOT, splits=8), 4096 * SLOT),
    ],
    ids=str,
)
def test_what_a_cluster_or_ring_holds(platform, plan, holds):
    """Whole packs, in a ring whole lines of 8; else rows may start at the last column of one."""
    unit = 32 if plan.bulk else 4
    odd = holds - (unit - 1)
    for n in (holds, holds - unit, odd, odd - 2):
        check(plan, "softmax", "float32", n)
    beyond = [(holds + unit, holds), (holds + 1, odd), (holds - 1, odd), (odd + 1, odd)]
    for n, most in [*beyond, (holds - 4, odd)] if plan.bulk else beyond:
        with pytest.raises(ValueError, match=f"holds {most} columns .*got {n}"):
            check(plan, "softmax", "float32", n)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"holds {most} columns, got {n}"):
            run_native("softmax", np.zeros((2, n), np.float32), **plan.attributes())


def refused(function, *args) -> str:
    try:
        function(*args)
    except ValueError as refusal:
        return str(refusal)
    return ""


def refused_by_python(plan: Plan, op: str, n: int) -> str:
    return refused(check, plan, op, "float32", n)


def refused_by_cpp(plan: Plan, op: str, n: int) -> str:
    """By the check of the handlers, which needs no array here; what needs a GPU has passed it."""
    said = refused(_native.count_reads, op, 1, n, plan.attributes())
    return "" if "needs a GPU" in said else said


@pytest.mark.parametrize("splits", [1, 3, 65535])
@pytest.mark.parametrize("op", OPS)
def test_a_piece_of_a_ring_is_not_too_long(op, splits):
    """2^27 packs, counted from a line where rows start anywhere. A ring never holds so many."""
    ring = Plan("split_k", 32, smem_packs=8 * SLOT, splits=splits)
    held = Plan("one_pass", 32, smem_packs=8 * SLOT, splits=16)
    most = 4 * splits * 2**27
    for refusal in (refused_by_python, refused_by_cpp):
        for n in (most, most - 31):
            assert refusal(ring, op, n) == ""
        for n, more in ((most - 30, 1), (most + 32, 8)):
            says = f"pieces of at most {2**27} packs, got {2**27 + math.ceil(more / splits)}"
            assert says in refusal(ring, op, n)
        assert "holds" in refusal(held, op, 16 * 4 * 2**27 + 32)
    check(dataclasses.replace(ring, smem_packs=0), op, "float32", most + 32)
    check(ring, op, "float32", None)


@pytest.mark.parametrize("op", OPS)
def test_python_and_cpp_agree_on_any_numbers(op):
    """Plans of random numbers around every bound: both refuse the same ones."""
    slots = (SLOT * count for count in (1, 2, 3, 4, 6, 8, 64, 65, 128, 130))
    values = {
        "path": PATHS,
        "threads": (0, 1, 4, 16, 32, 32, 48, 64, 64, 256, 512, 544),
        "rows_per_block": (0, 1, 1, 1, 1, 2, 3, 16),
        "reg_packs": (0, 0, 0, 1, 2, 3, 4, 8, 16, 32, 64),
        "smem_packs": (0, 0, 1, 2, 3, 5, 6, *slots),
        "splits": (0, 1, 1, 1, 2, 3, 4, 7, 8, 16, 32, 300, 65536),
    }
    rng, legal = np.random.default_rng(5), []
    for _ in range(6000):
        plan = Plan(**{field: some[rng.integers(len(some))] for field, some in values.items()})
        n = int(rng.choice([1, 100, 255, 256, 257, 481, 482, 512, 516, 1024, 5001]))
        python, cpp = refused_by_python(plan, op, n), refused_by_cpp(plan, op, n)
        assert bool(python) == bool(cpp), (plan, n, python, cpp)
        holds = re.compile(r"holds \d+ columns")
        assert holds.findall(python) == holds.findall(cpp), (plan, n)
        if not python:
            legal.append(plan)
    kinds = {(p.path, p.reg_packs > 0, p.smem_packs > 0, p.splits > 1) for p in legal}
    assert len(kinds) == 11, kinds


@pytest.mark.parametrize("preset", LIMITS)
@pytest.mark.parametrize("op", OPS)
def test_devices_grant_what_they_have(op, preset):
    """Clusters, rings, shared memory and co-resident blocks, against the device's limits."""
    limits = LIMITS[preset]
    for dtype, (name, make) in itertools.product(DTYPES, HAND_PLANS.items()):
        plan = make(OPS[op].inputs)
        if granted(plan, dtype, limits):
            check(plan, op, dtype, 1, limits)
            assert jaxsoftmax.plan(op, dtype, 3, 1, limits=preset, path=plan) == plan
        else:
            with pytest.raises(ValueError, match=rf"illegal plan .*\b{preset}\b"):
                check(plan, op, dtype, 1, limits)
        assert preset not in ("h100", "h200", "b200") or granted(plan, dtype, limits), name
        if preset in ("cpu", "a100", "rtx4090"):
            assert granted(plan, dtype, limits) == (name not in GPU_ONLY), name


H200 = LIMITS["h200"]
RING = Plan("split_k", 64, smem_packs=64, splits=264)  # 67 KiB a block: shared memory for 3 an SM


@pytest.mark.parametrize(
    "plan, limits, dtype, says",
    [
        (Plan("one_pass", 256, reg_packs=8, splits=2), "cpu", "float32", "cluster.* GPU.* cpu"),
        (Plan("one_pass", 256, smem_packs=8 * SLOT), "cpu", "float32", "ring.* GPU.* cpu"),
        (Plan("one_pass", 256, reg_packs=8, splits=2), "a100", "float32", "2 blocks.* = 0"),
        (Plan("one_pass", 256, reg_packs=8, splits=16), "rtx5090", "float32", "16 blocks.* = 8"),
        (Plan("one_pass", 256, smem_packs=8 * SLOT), "a100", "float32", "bulk.* max_cluster = 0"),
        (Plan("one_pass", 256, smem_packs=8 * SLOT), "rtx4090", "float32", "bulk.*max_cluster = 0"),
        (Plan("one_pass", 512, smem_packs=32), "rtx5090", "float32", "265216 bytes of shared"),
        (RING, "a100", "float32", "bulk copies.*max_cluster = 0"),
        (RING, dataclasses.replace(H200, cooperative=False), "float32", "cooperative = False"),
        (RING, dataclasses.replace(H200, max_cluster=0), "float32", "max_cluster = 0"),
        (dataclasses.replace(RING, splits=265), H200, "float32", "splits=265.* h200 holds 264"),
        (RING, H200, "float64", "splits=264 co-resident blocks, h200 holds 132"),
        (dataclasses.replace(RING, smem_packs=128), H200, "float16", "splits=264.* holds 132"),
    ],
    ids=str,
)
def test_limits_are_named(plan, limits, dtype, says):
    check(plan, "softmax", dtype, 256)
    with pytest.raises(ValueError, match=says):
        check(plan, "softmax", dtype, 256, limits)
    with pytest.raises(ValueError, match=says):
        jaxsoftmax.plan("softmax", dtype, 4, 256, limits=limits, path=plan)


def test_shared_memory_of_a_cluster():
    """4 KiB beside registers for the states that blocks send; a ring's are in every kernel's 3."""
    for registers, most, splits in ((8, 56, 1), (8, 55, 2), (8, 55, 16), (0, 56, 1), (0, 56, 16)):
        plan = Plan("one_pass", 256, reg_packs=registers, smem_packs=most, splits=splits)
        check(plan, "softmax", "float32", 256, H200)  # of 227 KiB, all
        more = dataclasses.replace(plan, smem_packs=most + 4)
        with pytest.raises(ValueError, match=f"{232448 + 4 * 4096} bytes of shared .* 232448"):
            check(more, "softmax", "float32", 256, H200)


def test_limits_of_a_device():
    """Every field comes from the device: none has a default that would hide what it has."""
    found = {k: v for k, v in dataclasses.asdict(H200).items() if k != "kind"}
    assert jaxsoftmax.Limits.of_device(found | {"capability": (9, 0)}) == H200
    for field in found:
        with pytest.raises(KeyError, match=field):
            jaxsoftmax.Limits.of_device({k: v for k, v in found.items() if k != field})


def test_resident_blocks():
    """Two blocks an SM by registers, one in float64, fewer where shared memory holds fewer."""
    assert resident_blocks(RING, "bfloat16", H200) == resident_blocks(RING, "float32", H200) == 264
    assert resident_blocks(RING, "float64", H200) == 132
    for packs, blocks in ((110, 2), (111, 1), (224, 1), (225, 0)):  # of 1 KiB, and 4 KiB a block
        wide = dataclasses.replace(RING, smem_packs=packs)
        assert resident_blocks(wide, "float16", H200) == blocks * 132
    check(RING, "softmax", "float16", 10**9, H200)


@pytest.mark.parametrize("name", GPU_ONLY)
def test_the_cpu_refuses_a_gpus_plans(cpu, name):
    """In Python before anything runs, and in the handler past it."""
    plan, x = GPU_ONLY[name](1), np.zeros((2, 64), np.float32)
    with pytest.raises(ValueError, match="needs a GPU, got limits cpu"):
        run("softmax", x, path=plan)
    with pytest.raises(jax.errors.JaxRuntimeError, match="needs a GPU"):
        run_native("softmax", x, **plan.attributes())
    with pytest.raises(ValueError, match="needs a GPU"):
        _native.count_reads("softmax", 2, 64, plan.attributes())
