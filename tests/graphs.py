"""Programs that XLA is to put in CUDA graphs, and the proof that it did: its own dump of thunks.

Program(name, function, data, calls)    run alone and from a graph, on other data in other buffers
run_all(programs, folder)               each of them; folder is where XLA dumps those captured
captured(dump)                          how many custom calls lie in graphs, and how many do not
fresh_with_dump(function, ...)          in a fresh process, which dumps to the last argument
"""

from __future__ import annotations

import dataclasses
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from loading import same_bits
from processes import fresh

ANY_SIZE = {"xla_gpu_graph_min_graph_size": 1}
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 10**6}
GRAPH = "kCommandBuffer"
THUNK = re.compile(r"( *)\d+: (k\w+)")
Operands = tuple[Any, ...]
Check = Callable[[Any], None]


@dataclasses.dataclass
class Program:
    """`data` gives a seed's operands and the check of what the function makes of them; `calls` are
    ours at least, which must lie `inside` such thunks. With `bits`, the results have those of the
    same program without graphs."""

    name: str
    function: Callable[..., Any]
    data: Callable[[int], tuple[Operands, Check]]
    calls: int
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: ANY_SIZE)
    inside: tuple[str, ...] = (GRAPH,)
    bits: bool = True

    def replay(self) -> None:
        """Four times: the second likely in the first's buffers, the others in new ones."""
        graph, alone, kept = self.jit(), self.jit(alone=True), []
        for seed in range(4):
            operands, check = self.data(seed)
            operands = jax.device_put(operands)
            found = jax.tree.map(np.asarray, graph(*operands))
            check(found)
            if self.bits:
                want = jax.tree.map(np.asarray, alone(*operands))
                assert jax.tree.all(jax.tree.map(same_bits, found, want)), f"other bits, {seed=}"
            if seed > 0:
                kept += [operands, jnp.zeros(1000 * seed)]
            del operands

    def jit(self, alone: bool = False, **shardings: Any) -> Callable[..., Any]:
        def program(*operands):
            return self.function(*operands)

        program.__name__ = "alone" if alone else f"captured_{self.name}"  # the dump's name too
        options = NO_GRAPHS if alone else self.options
        return jax.jit(program, compiler_options=options, **shardings)

    def prove(self, folder: str) -> None:
        pattern = f"*.jit_captured_{self.name}.thunk_sequence_after_thunk_passes.txt"
        dumps = [path.read_text() for path in Path(folder).glob(pattern)]
        assert dumps, "no dump: XLA writes one where it makes a graph"
        for dump in dumps:
            inside, outside = captured(dump, self.inside)
            assert inside >= self.calls and outside == 0, dump


def run_all(programs: Iterable[Program], folder: str) -> None:
    """Each, whatever becomes of the others; the failures by name. A CPU has no graphs to prove."""
    failures = []
    for program in programs:
        try:
            program.replay()
            if jax.default_backend() != "cpu":
                program.prove(folder)
        except Exception:
            failures.append(f"{program.name}: {traceback.format_exc()}")
    if failures:
        sys.exit("\n".join(failures))


def thunks(dump: str) -> Iterator[tuple[str, list[str]]]:
    """Every thunk's kind and those of the thunks around it, by their indentation."""
    around: list[tuple[int, str]] = []
    for thunk in filter(None, map(THUNK.match, dump.splitlines())):
        depth, kind = len(thunk[1]), thunk[2]
        around = [outer for outer in around if outer[0] < depth]
        yield kind, [outer for _, outer in around]
        around.append((depth, kind))


def captured(dump: str, inside: tuple[str, ...] = (GRAPH,)) -> tuple[int, int]:
    """Or of those that lie inside thunks of these kinds, the outermost first."""

    def held(around: list[str]) -> bool:
        rest = iter(around)
        return all(kind in rest for kind in inside)

    calls = [held(around) for kind, around in thunks(dump) if kind == "kCustomCall"]
    return sum(calls), len(calls) - sum(calls)


def fresh_with_dump(function: Callable[..., None], *args: Any, platform: str = "cuda") -> None:
    flags = f"--xla_dump_to={args[-1]} --xla_dump_hlo_module_re=jit_captured.*"
    fresh(function, platform, *args, platform=platform, flags=flags)
