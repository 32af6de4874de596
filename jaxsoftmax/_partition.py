"""A kernel under automatic sharding: rows stay where they are, a row is gathered whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._ops import Loading, Op

Factors = list[str]  # a name for each dimension: what has one name is laid out alike


def partitioned(
    *operands: jax.Array,
    kernel: Callable[..., list[jax.Array]],
    op: Op,
    axes: tuple[int, ...],
    stats: bool,
    loading: Loading,
) -> list[jax.Array]:
    """The kernel, called by each device on its piece."""
    x = operands[0]
    elements = [f"d{d}" for d in range(x.ndim)]
    whole = {elements[a] for a in axes}
    rows = [name for name in elements if name not in whole]
    if loading.causal:  # a kernel counts queries from the first
        whole.add(elements[-2])
    takes = [elements] * op.inputs + [rows] * op.given
    takes += [_broadcast(a, x, f"{i}_") for i, a in enumerate(operands[len(takes) :])]
    gives = [rows if op.reduces else elements] + [rows] * (2 if stats else 0)

    def shardings(mesh: Any, like: Any, factors: Factors) -> tuple[list[NamedSharding], ...]:
        """Those of operands and results, where what has these factors is sharded like that."""
        found = dict(zip(factors, like.sharding.spec, strict=False))  # a spec may be shorter

        def sharding(factors: Factors) -> NamedSharding:
            spec = [None if f in whole else found.get(f) for f in factors]
            return NamedSharding(mesh, PartitionSpec(*spec))

        return [sharding(f) for f in takes], [sharding(f) for f in gives]

    def local(*pieces: jax.Array) -> list[jax.Array]:
        # One device's program: without the mesh of the caller, whose sharding annotations the
        # partitioner, already running, would leave in it.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return kernel(*pieces)

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        # Nothing else keeps the partitioner from handing over pieces of a row.
        of_operands, of_results = shardings(mesh, result_shapes[0], gives[0])
        return mesh, local, of_results, tuple(of_operands)

    def infer(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        return shardings(mesh, arg_shapes[0], takes[0])[1]

    run = custom_partitioning(_positional(kernel, len(operands)))
    run.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=" -> ".join(", ".join(map(" ".join, side)) for side in (takes, gives)),
        need_replication_factors=tuple(sorted(whole, key=lambda name: int(name[1:]))),
    )
    return run(*operands)


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
