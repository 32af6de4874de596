"""Times a multi-head attention block, forward and gradient, with jaxsoftmax and with jax.nn.

    python3 -m pip install ".[bench]" && python3 examples/attention.py --out attention.json

Queries, keys and values come from one matmul of the input; scores are scaled and masked by a key
mask [batch, 1, 1, keys]. Beside what the block saves stands what the softmax saves by itself on
scores of that shape: copies around a custom call would show as the difference. The compiled program
is read too: nothing but matrix products and our kernels may go over an array of the scores' size.
Exit status 1 if the two blocks' results differ or, on a GPU, if something else does or ours is
slower. Times are device time on a GPU, wall time on a CPU.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxsoftmax

# bench/ is of the checkout; the package is the installed one, if there is one.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from bench import cases, hlo, report
from bench.pattern_cases import KEY, both, mask_of
from bench.timing import Case, Effort, Sample, measure, on_gpu

WIDTH = 64  # of a head
SCALE = WIDTH**-0.5
SCORES = 1 << 29  # elements: as many has the default batch
CLOSE = {"bfloat16": 0.03, "float16": 0.01, "float32": 1e-3}  # parts of an array's norm
SOFTMAX: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "jaxsoftmax": lambda scores, mask: jaxsoftmax.softmax(scores, where=mask, scale=SCALE),
    "jax.nn": lambda scores, mask: jax.nn.softmax(SCALE * scores, where=mask),
}
WHATS = ("forward", "gradient")


def block(name: str, heads: int) -> Callable[..., jax.Array]:
    """Multi-head attention: ((weights, x), mask) -> an array like x, [batch, tokens, features]."""

    def attention(given: tuple[dict[str, jax.Array], jax.Array], mask: jax.Array) -> jax.Array:
        weights, x = given
        split = (*x.shape[:2], 3, heads, x.shape[2] // heads)
        q, k, v = jnp.moveaxis((x @ weights["qkv"]).reshape(split), 2, 0)
        y = SOFTMAX[name](jnp.einsum("bqhd,bkhd->bhqk", q, k), mask)
        return jnp.einsum("bhqk,bkhd->bqhd", y, v).reshape(x.shape) @ weights["out"]

    return attention


def pair(label: str, call: Any, inputs: list[Any], cts: list[Any], mask: jax.Array) -> list[Case]:
    """The function, and it with its gradient, called on these inputs and cotangents in turn."""
    forward = cases.named(lambda *given: call(*given), "forward")
    given = [(x, ct, mask) for x, ct in zip(inputs, cts, strict=True)]
    return [
        Case(f"{label} forward", forward, [(x, mask) for x in inputs]),
        Case(f"{label} gradient", cases.named(both(call), "gradient"), given),
    ]


def every_case(batch: int, size: int, heads: int, dtype: str) -> dict[str, Case]:
    """Blocks, and the softmax alone on scores like a block's; compiled."""
    features, shape = heads * WIDTH, (batch, heads, size, size)
    keys = iter(jax.random.split(jax.random.key(0), 10))

    def random(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    weights = {"qkv": random(features, 3 * features), "out": random(features, features)}
    weights = {name: w / math.sqrt(features) for name, w in weights.items()}
    x, ct = ([random(batch, size, features) for _ in range(2)] for _ in range(2))
    scores, dy = ([random(*shape) for _ in range(2)] for _ in range(2))
    mask, found = jnp.asarray(mask_of(KEY, shape)), []
    for name, softmax in SOFTMAX.items():
        found += pair(f"{name} block", block(name, heads), [(weights, a) for a in x], ct, mask)
        found += pair(f"{name} softmax", softmax, scores, dy, mask)
    cases.compile_all(found)
    return {case.label: case for case in found}


def differences(by: dict[str, Case]) -> dict[str, float]:
    """Of the blocks' results and gradients: the norm of the difference over that of jax.nn's."""
    results = []
    for case in (by[f"{name} block gradient"] for name in SOFTMAX):
        out, (dweights, dx) = case.fn(*case.inputs[0])
        results.append({"out": out, "dx": dx} | {f"d{name}": w for name, w in dweights.items()})

    def apart(a: jax.Array, b: jax.Array) -> float:
        a, b = (c.astype(jnp.promote_types(c.dtype, jnp.float32)) for c in (a, b))
        return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))

    return {name: apart(a, results[1][name]) for name, a in results[0].items()}


def around(case: Case, elements: int) -> dict[str, Any]:
    """What goes over arrays of the scores' size: how many of each, and which should not."""
    program: Any = case.fn
    found = hlo.traffic(program.as_text(), elements)
    other = [f"{f['opcode']} {f['name']}" for f in found if f["what"] not in ("kernel", "product")]
    counts = Counter(f["what"] for f in found)
    return {"counts": counts, "other": other, "ok": counts["kernel"] > 0 and not other}


def saving(samples: dict[str, Sample], of: str, what: str) -> dict[str, float]:
    ours, theirs = (samples[f"{name} {of} {what}"].median for name in SOFTMAX)
    return {"ours": ours, "jax.nn": theirs, "saving": theirs - ours}


def one_size(batch: int, size: int, heads: int, dtype: str, strict: bool) -> dict[str, Any]:
    by = every_case(batch, size, heads, dtype)
    apart = differences(by)
    read = {w: around(by[f"jaxsoftmax block {w}"], batch * heads * size**2) for w in WHATS}
    samples = measure(list(by.values()), Effort(5, 0.05))
    times = {w: {of: saving(samples, of, w) for of in ("block", "softmax")} for w in WHATS}
    wrong = [f"{name} differs" for name, d in apart.items() if not d <= CLOSE[dtype]]
    wrong += [f"{w}: other passes" for w in WHATS if strict and not read[w]["ok"]]
    wrong += [f"{w}: slower" for w in WHATS if on_gpu() and times[w]["block"]["saving"] < 0]
    return {
        **{"size": size, "batch": batch, "heads": heads, "times_us": times},
        **{"differences": apart, "hlo": read, "wrong": wrong},
        "samples": {label: sample.summary() for label, sample in samples.items()},
    }


def show(entry: dict[str, Any]) -> None:
    print(f"{entry['size']} tokens, batch {entry['batch']}, {entry['heads']} heads")
    for what, times in entry["times_us"].items():
        for of, t in times.items():
            print(
                f"  {what:<8} {of:<7} ours {t['ours']:>9.1f} us, jax.nn {t['jax.nn']:>9.1f} us, "
                f"saving {t['saving']:>8.1f} us ({t['jax.nn'] / t['ours']:.2f} times)"
            )
        part = times["block"]["saving"] / times["softmax"]["saving"]
        read = entry["hlo"][what]
        print(f"  {what:<8} the block saves {part:.2f} of what the softmax saves by itself")
        print(f"  {what:<8} over the scores: {dict(read['counts'])}, not ours: {read['other']}")
    print("  apart:", ", ".join(f"{name} {d:.1e}" for name, d in entry["differences"].items()))
    print(f"  FAILED: {', '.join(entry['wrong'])}" if entry["wrong"] else "  all right", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = [1024, 2048, 4096] if on_gpu() else [128]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="tokens")
    parser.add_argument("--batch", type=int, help="default: so many that 2^29 scores; CPU: 2")
    parser.add_argument("--heads", type=int, default=16 if on_gpu() else 4, help="each 64 wide")
    dtype = "bfloat16" if on_gpu() else "float32"
    parser.add_argument("--dtype", choices=tuple(CLOSE), default=dtype)
    parser.add_argument("--out", type=Path, help="a JSON file of all that was measured")
    args = parser.parse_args()
    environment, entries = report.environment(), []
    if formulas := environment["formulas_because"]:
        print(f"WARNING: the jnp formulas are timed, not the kernels: {formulas}")
    # On a CPU, matrix products transpose and convert operands in passes of their own.
    strict = formulas is None and on_gpu()
    for size in args.sizes:
        most = max(1, SCORES // (args.heads * size * size)) if on_gpu() else 2
        entries.append(one_size(args.batch or most, size, args.heads, args.dtype, strict))
        show(entries[-1])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"environment": environment, "dtype": args.dtype, "sizes": entries}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {args.out}")
    return 1 if any(entry["wrong"] for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
