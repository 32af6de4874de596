"""Which instructions of a compiled program go over a whole array of a given size: its HLO text.

An array is known by its number of elements. Reshapes that move nothing are free; a fusion that only
gathers from an array does not go over it; a scatter whose operand is its result's buffer changes it
in place (where that buffer is still needed, XLA puts a copy before it, which is found as a pass).
A matrix product is known as such, also in a fusion or a library's call.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all")
ENDS = ("async-done", "async-update", "copy-done")  # of what is counted where it starts
SPARSE = ("gather", "dynamic-slice", "scatter", "dynamic-update-slice")  # in their operand 0
UPDATES = ("scatter", "dynamic-update-slice")
OURS = "jaxsoftmax"
PRODUCTS = ("cublas", "matmul", "gemm")  # in the targets of libraries' calls
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[int, ...]  # elements of each array of the result
    operands: tuple[str, ...]
    computation: str  # that it runs, if it is a fusion or a call
    target: str  # of a custom call
    root: bool


def _balanced(text: str) -> int:
    """Where the parenthesis closes that text begins with."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def instruction(line: str) -> Instruction | None:
    """The instruction of a line; None where there is none."""
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line)
    if not found:
        return None
    root, name, rest = found.groups()
    end = _balanced(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = rest[: rest.index("(")]
    rest = rest[len(opcode) :]
    inside, attributes = rest[1 : (end := _balanced(rest)) - 1], rest[end:]
    operands = re.findall(r"%([\w.\-]+)", inside) or re.findall(r"([\w.\-]+)(?:,|$)", inside)
    runs = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", attributes)
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    sizes = (math.prod(map(int, filter(None, d.split(",")))) for d in SHAPE.findall(shape))
    return Instruction(
        name,
        opcode,
        tuple(sizes),
        tuple(operands),
        runs[1] if runs else "",
        target[1] if target else "",
        bool(root),
    )


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Every computation's instructions, and the name of the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, here = "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", line)
        if head:
            here = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            here = None
        elif here is not None and (found := instruction(line)):
            here.append(found)
    if not entry:
        raise ValueError("no entry computation in the HLO text")
    return computations, entry


class _Reader:
    def __init__(self, text: str, elements: int) -> None:
        self.computations, self.entry = parse(text)
        self.elements = elements

    def big(self, sizes: tuple[int, ...]) -> bool:
        return self.elements in sizes

    def each(self, computation: str) -> Iterator[dict[str, Any]]:
        here = self.computations[computation]
        sizes = {i.name: i.results for i in here}
        for i in here:
            if i.opcode in ("call", "async-start") and i.computation in self.computations:
                yield from self.each(i.computation)
                continue
            if i.opcode in (*FREE, *ENDS):
                continue
            reads = [n for n, o in enumerate(i.operands) if self.big(sizes.get(o, ()))]
            if reads or self.big(i.results):
                dense = [n for n in reads if self.reads_all(i, n)]
                what = "pass" if dense or self.big(i.results) else "gather"
                if i.target.startswith(OURS):
                    what = "kernel"
                elif self.is_product(i):
                    what = "product"
                elif not dense and self.big(i.results) and self.in_place(i):
                    what = "in place"
                found = {"name": i.name, "opcode": i.opcode, "what": what, "target": i.target}
                yield found | {"reads": len(dense), "writes": i.results.count(self.elements)}

    def reads_all(self, i: Instruction, number: int) -> bool:
        """Whether an instruction goes over all of an operand."""
        inner = self.computations.get(i.computation) if i.opcode == "fusion" else None
        if inner is None:
            return not (i.opcode in SPARSE and number == 0)
        parameters = [p for p in inner if p.opcode == "parameter"]
        names = {p.name for p in parameters if p.operands == (str(number),)}
        for user in inner:  # in order: an operand comes before its users
            if names & set(user.operands) and user.opcode not in ("parameter", "constant"):
                if user.opcode in ("bitcast", "reshape"):
                    names.add(user.name)
                elif any(
                    o in names and self.reads_all(user, n) for n, o in enumerate(user.operands)
                ):
                    return True
        return False

    def is_product(self, i: Instruction) -> bool:
        if i.opcode == "dot" or any(name in i.target for name in PRODUCTS):
            return True
        inner = self.computations.get(i.computation, []) if i.opcode == "fusion" else []
        return any(self.is_product(x) for x in inner)

    def in_place(self, i: Instruction) -> bool:
        """Whether all that an instruction writes of that size is its own operand, changed."""
        if i.opcode in UPDATES:
            return True
        inner = self.computations.get(i.computation) if i.opcode == "fusion" else None
        if inner is None:
            return False
        by_name = {x.name: x for x in inner}
        (root,) = (x for x in inner if x.root)
        results = [by_name[o] for o in root.operands] if root.opcode == "tuple" else [root]
        return all(self._updates(x, by_name) for x in results if self.big(x.results))

    def _updates(self, i: Instruction, by_name: dict[str, Instruction]) -> bool:
        i = _source(i, by_name)
        return (
            i.opcode in UPDATES and _source(by_name[i.operands[0]], by_name).opcode == "parameter"
        )


def _source(i: Instruction, by_name: dict[str, Instruction]) -> Instruction:
    while i.opcode in ("bitcast", "reshape"):
        i = by_name[i.operands[0]]
    return i


def traffic(text: str, elements: int) -> list[dict[str, Any]]:
    """The instructions that touch an array of so many elements, in order. `what`: "kernel", ours;
    "product", of matrices; "pass", over the whole array; "in place", a scatter; "gather", a few
    elements read."""
    reader = _Reader(text, elements)
    return list(reader.each(reader.entry))
