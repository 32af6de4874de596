"""Plans of rows that are loaded and of columns: the planner's choice is legal, and what is not is
refused, in Python and by the handler."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from runs import run_native

from jaxsoftmax import Plan, plan
from jaxsoftmax._legal import check
from jaxsoftmax._ops import OPS
from jaxsoftmax._plan import LIMITS, PATHS
from jaxsoftmax._plan_spec import LAYOUTS, PACK, columns_smem, slot_bytes

COLUMNS = (1, 19, 33, 257, 1000, 5000, 32768, 300_000)
INNER = (1, 3, 64, 65_537)
GPUS = [name for name, limits in LIMITS.items() if limits.kind == "gpu"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", LIMITS)
def test_every_choice_is_legal(preset, layout):
    """plan() checks what it gives, on every device: nothing raises but a row that one_pass cannot
    hold when it is forced."""
    inner = INNER if layout in ("columns", "cells") else (1,)
    for op, dtype, n, width, outer in itertools.product(
        OPS, ("bfloat16", "float32", "float64"), COLUMNS, inner, (None, 1, 4096)
    ):
        chosen = plan(op, dtype, outer, n, width, limits=preset, layout=layout)
        assert chosen.path in PATHS and chosen.why
        for path in PATHS if dtype == "bfloat16" else ():
            try:
                forced = plan(op, dtype, outer, n, width, limits=preset, layout=layout, path=path)
            except ValueError as error:
                assert path == "one_pass" and "one_pass holds" in str(error)
            else:
                assert forced.path == path


@pytest.mark.parametrize("layout", ["columns", "cells", None])
def test_unknown_sizes(layout):
    for preset in LIMITS:
        for sizes in ((None, 100, 8), (4, None, 8), (4, 100, None), (None, None, None)):
            assert plan("softmax", "float16", *sizes, limits=preset, layout=layout).path in PATHS
        with pytest.raises(ValueError, match="known number of columns"):
            plan("softmax", "float16", 4, None, 8, limits=preset, layout=layout, path="one_pass")


def test_unknown_inner_leaves_room_for_packs():
    """Sizes that are known late may make packs of what was planned: their tile fits too."""
    for op, n, preset in itertools.product(OPS, COLUMNS, GPUS):
        chosen = plan(op, "bfloat16", None, n, None, limits=preset, layout="columns")
        tile = chosen.threads * chosen.smem_packs * PACK
        merged = columns_smem(chosen.threads, chosen.rows_per_block, chosen.splits)
        assert tile + merged <= LIMITS[preset].smem_per_block


def test_the_layout_follows_from_inner():
    """By itself: columns beside each other, cells where a pack would not fit."""
    for inner, like in ((64, "columns"), (63, "cells")):
        asked = plan("softmax", "float32", 4, 1000, inner, limits="h200")
        assert asked == plan("softmax", "float32", 4, 1000, inner, limits="h200", layout=like)
    with pytest.raises(ValueError, match=r"unknown layout 'tiles'.*rows, loaded, columns, cells"):
        plan("softmax", "float32", 4, 1000, 64, layout="tiles")


@pytest.mark.parametrize("preset", GPUS)
def test_tiles_fit_in_shared_memory(preset):
    for layout, n, inner in itertools.product(("columns", "cells"), COLUMNS, INNER):
        chosen = plan("softmax_bwd", "float16", 16, n, inner, limits=preset, layout=layout)
        if chosen.path == "one_pass":
            slot = slot_bytes("cells" if inner * 2 % PACK else layout, "float16")
            tile = chosen.threads * chosen.smem_packs * slot
            merged = columns_smem(chosen.threads, chosen.rows_per_block, chosen.splits, slot)
            assert tile + merged <= LIMITS[preset].smem_per_block


# A plan that a layout refuses, and what its refusal says: of softmax, 256 float32 columns.
ILLEGAL = {
    ("loaded", Plan("one_pass", 64, smem_packs=8)): "smem_packs",
    ("loaded", Plan("one_pass", 64, reg_packs=4, smem_packs=4)): "smem_packs",
    ("loaded", Plan("one_pass", 64, reg_packs=16)): "reg_packs",
    ("loaded", Plan("one_pass", 512, reg_packs=4)): "reg_packs.* threads",
    ("loaded", Plan("split_k", 64, smem_packs=16, splits=2)): "smem_packs",
    ("columns", Plan("one_pass", 64, reg_packs=4)): "reg_packs",
    ("columns", Plan("one_pass", 64, 3, smem_packs=16)): "rows_per_block",
    ("columns", Plan("one_pass", 96, 3, smem_packs=16)): "rows_per_block",
    ("columns", Plan("one_pass", 512, 8, smem_packs=16)): "threads",
    ("columns", Plan("one_pass", 64, 8, smem_packs=5000)): "smem_packs",
    ("columns", Plan("one_pass", 64, 8, smem_packs=16, splits=3)): "splits",
    ("columns", Plan("one_pass", 16, 8, smem_packs=128, splits=2)): "cluster.* threads",
    ("columns", Plan("one_pass", 64, 8, smem_packs=16)): "one_pass holds 128 columns",
    ("columns", Plan("two_pass", 64, smem_packs=16)): "keeps no",
    ("columns", Plan("two_pass", 64, splits=32)): "splits",
    ("columns", Plan("split_k", 64, reg_packs=4)): "reg_packs",
}


@pytest.mark.parametrize("layout,wrong", ILLEGAL, ids=str)
def test_illegal_plans_are_refused(layout, wrong):
    with pytest.raises(ValueError, match=ILLEGAL[layout, wrong]):
        check(wrong, "softmax", "float32", 256, "h200", layout)


@pytest.mark.parametrize("layout,wrong", ILLEGAL, ids=str)
def test_the_handler_refuses_them_too(platform, layout, wrong):
    """A GPU's; on a CPU all layouts have the rules of rows."""
    if platform == "cpu":
        pytest.skip("no layouts")
    x = np.zeros((2, 256, 8) if layout == "columns" else (2, 256), np.float32)
    loads = () if layout == "columns" else (np.ones((), np.float32),)
    axes = (-2,) if layout == "columns" else (-1,)
    with pytest.raises(jax.errors.JaxRuntimeError, match="softmax: plan "):
        run_native("softmax", x, *loads, axes=axes, scaled=bool(loads), **wrong.attributes())
