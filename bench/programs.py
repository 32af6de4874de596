"""Programs of one forced plan each: compiled in threads, run once, checked; how often to call."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax import Plan, _primitive

from . import check, shapes
from .cases import named
from .ops import OPS
from .timing import GROUP, Case, on_gpu


def moved(op: str, shape: shapes.Shape, dtype: str) -> int:
    """Bytes that must move."""
    return OPS[op].units * shape[0] * shape[1] * jnp.dtype(dtype).itemsize


def calls(moved_bytes: int, seconds: float, least: int = 3) -> int:
    """Calls that take about so long at half of a usual memory's speed, one group at most."""
    each = 2e-6 + moved_bytes / (2e12 if on_gpu() else 5e9)
    return max(least, min(GROUP, int(seconds / each)))


def right(op: str, operands: tuple[Any, ...], result: Any) -> bool:
    """Whether all of a result is near jnp's: the contract itself is checked elsewhere."""
    return bool(check.near(op, operands, result))


def prepare(
    op: str, plans: list[Plan], arguments: list[tuple[Any, ...]]
) -> tuple[list[Case], dict[str, str]]:
    """A case for each plan, by its text, and for those that fail or are wrong the reason."""

    def compiled(number: int, plan: Plan) -> Any:
        run = lambda *operands: _primitive.bind(op, *operands, axes=(-1,), path=plan)  # noqa: E731
        return named(run, f"plan_{number}").lower(*arguments[0]).compile()

    good: list[Case] = []
    bad: dict[str, str] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        made = [pool.submit(compiled, i, plan) for i, plan in enumerate(plans)]
        for plan, future in zip(plans, made, strict=True):
            case_name = label(plan)
            try:
                program = future.result()
                result = jax.block_until_ready(program(*arguments[0]))
                if right(op, arguments[0], result):
                    good.append(Case(case_name, program, arguments))
                else:
                    bad[case_name] = "wrong result"
            except Exception as error:  # whatever it is, it is this plan's, and it is reported
                bad[case_name] = f"{type(error).__name__}: {error}"
    return good, bad


def label(plan: Plan) -> str:
    """A plan's fields, without the reason."""
    return str(plan).split(":", 1)[0]
