"""A kernel under automatic sharding: every device has its piece, of rows or of each row."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._across import across, placed
from ._masks import Names
from ._ops import EVERY

Factors = list[str]  # a name for each dimension: what has one name is laid out alike


def partitioned(*operands: jax.Array, call: Any, limits: Any) -> list[jax.Array]:
    """The call's kernel, run by each device on its piece."""
    op, x = call.op, operands[0]
    elements = [f"d{d}" for d in range(x.ndim)]
    reduced = {elements[a] for a in call.axes}
    rows = [name for name in elements if name not in reduced]
    sizes = dict(zip(elements, x.shape, strict=True))
    takes = [elements] * op.inputs + [rows] * op.given
    takes += [_broadcast(a, x, f"{i}_") for i, a in enumerate(operands[len(takes) :])]
    gives = [rows if op.reduces else elements] + [rows] * (2 if call.stats else 0)

    def layout(mesh: Any, arguments: Any, results: Any) -> dict[str, Names]:
        """The mesh axes over which each dimension is cut: the result's, which has no reduced ones
        if the op reduces; those are then the first operand's."""
        found: dict[str, Names] = {}
        used: set[str] = set()
        for like, factors in ((results, gives[0]), (arguments, takes[0])):
            spec = like[0].sharding.spec if like is not None else ()
            for name, axes in zip(factors, spec, strict=False):  # a spec may be shorter
                axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
                axes = tuple(a for a in axes if mesh.shape[a] > 1)  # others cut nothing
                parts = math.prod(mesh.shape[a] for a in axes)
                # A row that is cut unevenly would be padded with what is no part of it.
                even = name not in reduced or sizes[name] % parts == 0
                if axes and name not in found and even and not used & {*axes}:
                    found[name] = axes
                    used |= {*axes}
            if results is not None and not op.reduces:
                break
        return found

    def shardings(mesh: Any, found: dict[str, Names], of: list[Factors]) -> list[NamedSharding]:
        return [NamedSharding(mesh, PartitionSpec(*map(found.get, factors))) for factors in of]

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        found = layout(mesh, arguments, results)
        # Nothing else keeps the partitioner from handing over other pieces.
        of_operands = tuple(shardings(mesh, found, takes))
        return (
            mesh,
            _local(call, limits, elements, found),
            shardings(mesh, found, gives),
            of_operands,
        )

    def infer(mesh: Any, arguments: Any, results: Any) -> Any:
        return shardings(mesh, layout(mesh, arguments, None), gives)

    run = custom_partitioning(
        _positional(lambda *pieces: call.kernel(*pieces, limits=limits), len(operands))
    )
    run.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=" -> ".join(", ".join(map(" ".join, side)) for side in (takes, gives)),
    )
    return run(*operands)


def _local(
    call: Any, limits: Any, elements: Factors, found: dict[str, Names]
) -> Callable[..., list[jax.Array]]:
    """One device's program, where dimensions are cut over these mesh axes."""
    names = tuple(name for a in call.axes for name in found.get(elements[a], ()))
    queries, keys = (found.get(name, ()) for name in ["", *elements][-2:])

    def kernel(name: str, *pieces: jax.Array, **how: Any) -> list[jax.Array]:
        return dataclasses.replace(call, op=EVERY[name], **how).kernel(*pieces, limits=limits)

    def local(*pieces: jax.Array) -> list[jax.Array]:
        op, axes, path = call.op, call.axes, call.path
        # Without the mesh of the caller, whose sharding annotations the partitioner, already
        # running, would leave in the program.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            operands, loading = placed(pieces, call.loading, queries, keys, op.inputs + op.given)
            if names:
                found = across(kernel, op.name, operands, names, axes, path, loading)
                return found[: 3 if call.stats else 1]
            return kernel(op.name, *operands, path=path, stats=call.stats, loading=loading)

    return local


def _broadcast(a: jax.Array, x: jax.Array, own: str) -> Factors:
    """Of what broadcasts against x: x's factors, and its own where it has size 1."""
    dims = range(x.ndim - a.ndim, x.ndim)
    sizes = zip(dims, a.shape, strict=True)
    return [f"d{d}" if size == x.shape[d] else f"own{own}{d}" for d, size in sizes]


def _positional(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """f with `count` named parameters: custom_partitioning resolves arguments by signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [inspect.Parameter(f"operand_{i}", kind) for i in range(count)]

    def g(*operands: Any) -> Any:
        return f(*operands)

    g.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return g
