"""The functions that are timed: the ops and their gradients, plans forced, the memory itself."""

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax
from jaxsoftmax import _plan

from .check import plan_here
from .ops import cotangents, function, is_gradient, rows_of
from .shapes import Buffers, Shape
from .timing import Case, Sample, TimingError

# The ceilings, and the cases that may set each: the fastest does.
COPIES = ("copy_runtime", "copy_kernel", "copy_words")
CEILINGS = {
    "copy": COPIES,
    "triad": ("triad", "triad_words"),
    "read": ("read_rows", "read_slices"),
}
SLICES = 64


def named(fn: Callable[..., Any], name: str) -> Any:
    """A jitted function that a profiler or a dump calls by this name."""
    fn.__name__ = name
    return jax.jit(fn)


def ceilings(buffers: Buffers) -> list[Case]:
    """What moving as many bytes takes, without softmax: each in several ways.

    copy: the runtime's memcpy; XLA's kernel on this dtype; XLA's kernel on 4-byte words, which it
    loads and stores 16 bytes a thread. triad: two reads and one write, both ways. read: XLA's
    reduction of rows; an exclusive or of 64 slices, which writes a 64th of what it reads.
    """
    neg = named(lambda x: lax.neg(x), "copy_kernel")
    if "negate" not in neg.lower(buffers.x[0]).compile().as_text():
        raise TimingError("XLA removed the copy kernel: its HLO holds no negate")
    count = len(buffers.x)
    words = max(1, buffers.x[0].nbytes // 4)  # 3 bytes short at most
    bits = jax.jit(lambda start: lax.iota(jnp.uint32, words) * np.uint32(2654435761) + start)
    plain = [(bits(np.uint32(i)),) for i in range(2 * count)]
    one = [(x,) for x in buffers.x]
    cases = [
        Case("copy_kernel", neg, one),
        Case("copy_runtime", named(lambda x: jnp.copy(x), "copy_runtime"), one),
        Case("copy_words", named(lambda x: lax.bitwise_not(x), "copy_words"), plain),
        Case(
            "triad_words",
            named(lambda a, b: lax.bitwise_xor(a, b), "triad_words"),
            [a + b for a, b in zip(plain[:count], plain[count:], strict=True)],
        ),
        Case("read_rows", named(_read_rows, "read_rows"), plain),
        Case("read_slices", named(_read_slices, "read_slices"), plain),
    ]
    if buffers.dy:
        pairs = list(zip(buffers.x, buffers.dy, strict=True))
        cases.append(Case("triad", named(lambda a, b: a + b, "triad"), pairs))
    return cases


def _read_rows(words: jax.Array) -> jax.Array:
    length = 1 << max(7, min(13, (words.size // 1056).bit_length() - 1))
    rows = words[: words.size // length * length].reshape(-1, length)
    return lax.reduce(rows, np.uint32(0), lax.bitwise_xor, (1,))


def _read_slices(words: jax.Array) -> jax.Array:
    # Slices of whole 128-byte lines; tiny arrays have one word a slice at least.
    each = max(1, words.size // SLICES // 32 * 32)
    out = words[:each]
    for start in range(each, min(SLICES * each, words.size - each + 1), each):
        out = lax.bitwise_xor(out, words[start : start + each])
    return out


def compile_all(cases: list[Case]) -> None:
    """Compiles in threads: what takes long is XLA's work, outside Python."""

    def compiled(case: Case) -> Any:
        fn: Any = case.fn
        return fn.lower(*case.inputs[0]).compile()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for case, program in zip(cases, pool.map(compiled, cases), strict=True):
            case.fn = program


def fastest(samples: dict[str, Sample]) -> dict[str, dict[str, Any]]:
    """For each ceiling that was measured: us, and which case it was."""
    found = {}
    for name, labels in CEILINGS.items():
        measured = {label: samples[label].median for label in labels if label in samples}
        if measured:
            by = min(measured, key=measured.__getitem__)
            found[name] = {"us": measured[by], "by": by}
    return found


def op_cases(buffers: Buffers, library: Any, label: str, ops: Iterable[str]) -> list[Case]:
    """Each op of a library's: functions as called without gradient, gradients alone, from the
    residuals of their functions, and where both are asked for, both in one program."""
    one = [(x,) for x in buffers.x]
    cases = []
    for what, of in rows_of(ops).items():
        op, name = of[-1], f"{label}_{what}"
        call = function(op, library)
        if not is_gradient(op):
            cases.append(Case(name, named(lambda x, f=call: f(x), name), one))
            continue
        given = cotangents(op, buffers)
        if len(of) == 2:
            pairs: list[tuple[Any, ...]] = list(zip(buffers.x, given, strict=True))
            cases.append(Case(name, named(lambda x, ct, f=call: _both(f, x, ct), name), pairs))
            continue
        residuals = jax.jit(lambda x, f=call: jax.vjp(f, x)[1])
        pairs = [(residuals(x), ct) for x, ct in zip(buffers.x, given, strict=True)]
        cases.append(Case(name, named(lambda pull, ct: pull(ct)[0], name), pairs))
    return cases


def _both(call: Callable[..., Any], x: jax.Array, ct: jax.Array) -> Any:
    y, pull = jax.vjp(call, x)
    return y, pull(ct)[0]


def seed_plans(shape: Shape, dtype: str) -> dict[str, jaxsoftmax.Plan]:
    """The article's five kernels as plans, those that can hold this shape on this device."""
    plans = {}
    for name in _plan.SEED_PLANS:
        with contextlib.suppress(ValueError):  # it does not fit this kernel: a dash in the table
            plans[name] = plan_here("softmax", dtype, shape, name)
    return plans


def forced(buffers: Buffers, plans: dict[str, jaxsoftmax.Plan]) -> list[Case]:
    """One forward case for each forced plan."""
    one = [(x,) for x in buffers.x]
    return [
        Case(name, named(lambda x, p=plan: jaxsoftmax.softmax(x, path=p), f"seed_{name}"), one)
        for name, plan in plans.items()
    ]
