"""`--loss`: the loss of a language model, the mean over tokens, and its gradient to the logits.

Two forms, each with jaxsoftmax and with jax.nn: log_softmax, of which the label's is taken, and
logsumexp minus the label's logit. A form is one jitted program. Ideal are three arrays moved (the
logits read twice, the gradient written) at the better rate of the copy and the triad; how many
passes over an array of that size a program takes is read in its HLO.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax

from . import cases, hlo, judge, report, runs
from .shapes import Shape
from .timing import Case, Effort, Sample, TimingError, measure, ratio

if TYPE_CHECKING:
    from rich.progress import Progress

LIBRARIES = {"ours": jaxsoftmax, "jax.nn": jax.nn}
FORMS = ("log_softmax", "logsumexp")
# Whose time over whose, and how much it is meant to be on an H200.
RATIOS = (
    ("jax.nn log_softmax", "ours log_softmax", 1.6),
    ("jax.nn logsumexp", "ours logsumexp", 1.5),
    ("jax.nn log_softmax", "ours logsumexp", 2.7),
)
UNITS = 3
SAMPLE = 16  # rows compared with float64
# What hlo.py finds, and the heads of its columns.
PASSES = {"kernel": "HLO:ours", "pass": "passes", "in place": "in place", "gather": "gathers"}


def _taken(array: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(array, labels[:, None], axis=-1)[:, 0]


def form(name: str, library: Any) -> Callable[..., Any]:
    """(logits, labels) -> the loss and its gradient to the logits; the loss is float32 or wider."""

    def log_softmax(logits: jax.Array, labels: jax.Array) -> jax.Array:
        taken = _taken(library.log_softmax(logits, axis=-1), labels)
        return -jnp.mean(taken.astype(_wide(logits)))

    def logsumexp(logits: jax.Array, labels: jax.Array) -> jax.Array:
        total, taken = library.logsumexp(logits, axis=-1), _taken(logits, labels)
        return jnp.mean(total.astype(_wide(logits)) - taken.astype(_wide(logits)))

    return jax.value_and_grad(log_softmax if name == "log_softmax" else logsumexp)


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def programs(inputs: list[tuple[Any, ...]]) -> list[Case]:
    return [
        Case(f"{label} {name}", cases.named(form(name, library), f"{label}_{name}"), inputs)
        for name in FORMS
        for label, library in LIBRARIES.items()
    ]


# --- right or wrong ---


def oracle(logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss and its gradient in float64."""
    x, rows = logits.astype(np.float64), np.arange(len(labels))
    d = x - x.max(axis=-1, keepdims=True)
    total = np.exp(d).sum(axis=-1, keepdims=True)
    gradient = np.exp(d) / total
    gradient[rows, labels] -= 1
    return float(np.mean(np.log(total[:, 0]) - d[rows, labels])), gradient / len(labels)


def bounds(label: str, dtype: str, largest: float) -> dict[str, float]:
    """What a loss may be off, and of each element of a gradient its part: nearness, not accuracy.

    A loss is a mean of numbers up to `largest` rounded to the dtype, some of them twice. jax.nn
    takes its gradient from what it has rounded, which changes exp by as much.
    """
    unit, epsilon = judge.ulp(np.array(largest), jnp.dtype(dtype)), float(jnp.finfo(dtype).eps)
    theirs = 0.0 if label.startswith("ours") else float(np.expm1(2 * unit))
    return {"value": float(2 * unit + 1e-5 * largest), "gradient": 4 * epsilon + 1e-4 + theirs}


@functools.partial(jax.jit, static_argnames="dtype")
def _worst(got: jax.Array, want: jax.Array, dtype: str) -> jax.Array:
    """The largest part of itself that an element is off, beyond what underflows."""
    info = jnp.finfo(dtype)
    least = 2 * float(info.smallest_subnormal if dtype == "float16" else info.tiny)
    error = jnp.maximum(jnp.abs(got.astype(want.dtype) - want) - least, 0)
    return jnp.max(error / jnp.maximum(jnp.abs(want), least))


def errors(case: Case, dtype: str, whole: tuple[Any, Any]) -> dict[str, Any]:
    """Errors on a sample of rows against float64, and on all against jax.nn in a wider float."""
    logits, labels = case.inputs[0]
    few = logits[:SAMPLE], labels[:SAMPLE]
    program: Any = case.fn
    got = {"sample": jax.jit(program)(*few), "all": program(logits, labels)}
    value, gradient = oracle(*(np.asarray(a) for a in few))
    want = {"sample": (value, jnp.asarray(gradient, _wide(logits))), "all": whole}
    limit = bounds(case.label, dtype, float(np.abs(value)) + float(jnp.max(jnp.abs(logits))))
    found: dict[str, Any] = {"bounds": limit, "ok": True}
    for of, (loss, dx) in got.items():
        found[of] = {"value": abs(float(loss) - float(want[of][0]))}
        found[of]["gradient"] = float(_worst(dx, want[of][1], dtype))
        found["ok"] &= all(found[of][key] <= limit[key] for key in limit)
    return found


# --- one shape ---


def one_shape(shape: Shape, dtype: str, effort: Effort) -> dict[str, Any]:
    """Checks, reads the programs and times them."""
    buffers = runs.make_buffers(shape, dtype, gradient=False)
    keys = (jax.random.key(i) for i in range(len(buffers.x)))
    labels = [jax.random.randint(k, shape[:1], 0, shape[1], jnp.int32) for k in keys]
    made = programs(list(zip(buffers.x, labels, strict=True)))
    logits = buffers.x[0]
    whole = jax.jit(form("log_softmax", jax.nn))(logits.astype(_wide(logits)), labels[0])
    found = {case.label: errors(case, dtype, whole) for case in made}
    del whole
    timed = made + cases.ceilings(buffers)
    cases.compile_all(timed)
    passes = {case.label: passes_of(case, shape) for case in made}
    samples = measure(timed, effort)
    ceilings = cases.fastest(samples)
    copy, triad = ceilings["copy"]["us"], ceilings["triad"]["us"]
    forms = {
        case.label: {"us": samples[case.label].median, "span_us": samples[case.label].span}
        | {"kernels": samples[case.label].kernels, "errors": found[case.label]}
        | {"passes": passes[case.label]}
        for case in made
    }
    return {
        "shape": shape,
        "forms": forms,
        "ratios": ratios(samples),
        "ideal_us": min(UNITS / 2 * copy, UNITS / 3 * triad),
        "ceilings": ceilings,
        "ok": all(one["ok"] for one in found.values()),
        "samples": {label: s.summary() for label, s in samples.items()},
    }


def ratios(samples: dict[str, Sample]) -> list[dict[str, Any]]:
    return [
        {"of": theirs, "over": ours, "ratio": ratio(samples[theirs], samples[ours]), "target": goal}
        for theirs, ours, goal in RATIOS
    ]


def passes_of(case: Case, shape: Shape) -> list[dict[str, Any]]:
    program: Any = case.fn
    return hlo.traffic(program.as_text(), shape[0] * shape[1])


# --- what is printed ---

HEAD = (
    f"{'shape':>14} {'form':<19} {'us':>10} {'x ideal':>8} {'kernels':>8} "
    + " ".join(f"{head:>8}" for head in PASSES.values())
    + f" {'loss off':>9} {'grad off':>9}"
)


def lines(entry: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """(line, all right): a line a form, then the ideal, the ratios and what each program runs."""
    shape = "x".join(map(str, entry["shape"]))
    for label, one in entry["forms"].items():
        counts, errors = Counter(found["what"] for found in one["passes"]), one["errors"]
        off = (max(errors[of][key] for of in ("sample", "all")) for key in errors["bounds"])
        text = (
            f"{shape:>14} {label:<19} {one['us']:>10.2f} {one['us'] / entry['ideal_us']:>8.2f} "
            f"{len(one['kernels']) if one['kernels'] else '-':>8} "
            + " ".join(f"{counts[what]:>8}" for what in PASSES)
            + "".join(f" {error:>9.1e}" for error in off)
        )
        yield text if errors["ok"] else f"{text}  WRONG: {errors}", errors["ok"]
    yield f"{shape:>14} ideal {entry['ideal_us']:.2f} us; {report.ceilings(entry)}", True
    for r in entry["ratios"]:
        text = f"{r['of']} / {r['over']}: {r['ratio']:.2f} (target {r['target']})"
        yield f"{shape:>14} {text}", True
    for label, one in entry["forms"].items():
        for name, count in Counter(one["kernels"] or []).items():
            yield f"    {label}: {count} x {name[:110]}", True
        for found in one["passes"] if label.startswith("ours") else []:
            text = f"{found['what']}: {found['name']} {found['target']}"
            yield f"    {label}, HLO: {text} reads {found['reads']}, writes {found['writes']}", True


def run(out: report.Report, args: argparse.Namespace, progress: Progress) -> bool:
    """Checks, measures, prints; whether all was right. A missed target is told, not a failure."""
    good, effort = True, Effort(1 if args.quick else 5, 0.05)
    out.line(HEAD)
    task = progress.add_task("loss", total=len(args.grid))
    for shape in args.grid:
        progress.update(task, description=f"loss {shape[0]}x{shape[1]}")
        try:
            entry = one_shape(shape, args.dtype, effort)
        except (TimingError, jax.errors.JaxRuntimeError) as error:
            entry = {"shape": shape, "ok": False, "error": str(error)}
            out.line(f"{shape[0]}x{shape[1]}: {error}", "bold red")
        else:
            for text, right in lines(entry):
                out.line(text, None if right else "bold red")
        good &= entry["ok"]
        out.data["shapes"].append(entry)
        out.save()
        progress.advance(task)
    return good
