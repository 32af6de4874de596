"""What the compiled program of a masked, scaled, causal call on any axis holds: kernels alone."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import every_function, ours
from loading import Call, both, make, variants

SHAPE = (16, 24, 16, 40)
AXES = (-1, 0, 2, (1, 2), (0, 2), (1, -1), (-1, -2), None)
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)
FREE = {"parameter", "constant", "custom-call", "get-tuple-element", "tuple", "bitcast"}


def elements(result: str) -> int:
    """Of the largest array in an HLO type."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", result)
    return max(int(np.prod([int(d) for d in s.split(",") if d])) for s in shapes)


def others(text: str) -> list[str]:
    """What a program does to arrays beside calling kernels; with single numbers all is allowed."""
    found = INSTRUCTION.findall(text)
    assert found
    return [f"{op} {result}" for result, op in found if op not in FREE and elements(result) > 1]


def kernels(text: str) -> list[str]:
    return re.findall(r'custom_call_target="([^"]*)"', text)


def test_the_parser_sees_what_it_should():
    """A mask that is broadcast and applied, a transpose, a dtype: each is found."""
    x, mask = jnp.ones((8, 64)), jnp.ones((1, 64), bool)
    seen = {
        "select|fusion|broadcast": lambda x, mask: jnp.where(mask, x, 0) + 0 * x,
        "transpose|copy|fusion": lambda x, mask: ours("softmax")(jnp.sin(x).T).T,
        "convert|fusion": lambda x, mask: ours("softmax")(x.astype(jnp.bfloat16)),
    }
    for op, f in seen.items():
        found = others(jax.jit(f).lower(x, mask).compile().as_text())
        assert any(re.match(op, line) for line in found), (op, found)


def alone(call: Call, shape=SHAPE, dtype="float32") -> jax.stages.Compiled:
    """The program of value and gradient, which must hold two kernel calls and no more."""
    data = make(call, shape, dtype, "random", 0.5)
    with jax.enable_x64(dtype == "float64"):
        jitted = jax.jit(lambda *operands: both(call, *operands))
        compiled = jitted.lower(*data.operands()).compile()
    text = compiled.as_text()
    assert kernels(text) == [f"jaxsoftmax.{op}" for op in (call.name, f"{call.name}_bwd")], call
    assert not others(text), (call, others(text))
    memory = compiled.memory_analysis()
    if memory is not None:
        rows = data.x.size // int(np.prod([shape[d] for d in call.axes(len(shape))]))
        words = re.findall(r"u32\[(\d+)\].*custom_call_target", text)  # workspaces of split_k
        statistics, workspaces = 2 * 8 * rows, 4 * sum(map(int, words))
        size, temporary = data.x.nbytes, memory.temp_size_in_bytes
        assert temporary <= statistics + workspaces + 4096, call
        assert statistics + workspaces + 4096 < size, call
    return compiled


@pytest.mark.parametrize("axis", AXES, ids=str)
@every_function
def test_kernels_alone(platform, name, axis):
    """No transpose, nothing of a mask's or the rows' size: any mask, scale, axis."""
    for call in variants(name, axis):
        alone(call)


@pytest.mark.parametrize("dtype, result", [("bfloat16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_no_conversion_beside_the_kernels(platform, name, dtype, result):
    for axis in (-1, 1, (0, 2)):
        for call in variants(name, axis, (None, "key"), dtype=result):
            alone(call, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@every_function
def test_other_dtypes(platform, name, dtype):
    for axis in (-1, 1):
        for mask in ("key", "full"):
            alone(Call(name, axis, mask, name != "logsumexp"), dtype=dtype)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_causal_rows_have_no_mask(platform, name):
    """Over the last axis; over others the mask [query, key] is all there is beside."""
    for mask in (None, "key", "full"):
        for result in (None, "bfloat16"):
            alone(Call(name, -1, mask, True, True, result))
    text = (
        jax.jit(ours(name, -2, is_causal=True))
        .lower(np.ones(SHAPE, np.float32))
        .compile()
        .as_text()
    )
    assert kernels(text) == [f"jaxsoftmax.{name}"]
    assert all(elements(line.split()[1]) <= SHAPE[-1] * SHAPE[-2] for line in others(text))


@pytest.mark.parametrize("path", ["one_pass", "two_pass", "split_k"])
@every_function
def test_every_path(platform, name, path):
    for axis in (-1, 1, (0, 2)):
        alone(Call(name, axis, "key", name != "logsumexp", path=path))


def test_a_python_scale_is_a_constant(platform):
    """Without a parameter of the program, in the kernel's type: for 16-bit rows too."""
    x = jnp.ones((4, 40), jnp.bfloat16)
    text = (
        jax.jit(jax.grad(lambda x: ours("softmax", scale=0.37)(x)[0, 0]))
        .lower(x)
        .compile()
        .as_text()
    )
    assert "f32[] constant(0.37)" in text


X, CT = (np.random.default_rng(s).standard_normal((3, 4, 5, 8)).astype(np.float32) for s in (1, 2))
MASKED = np.random.default_rng(3).random((3, 4, 5, 8)) < 0.8
# Where the batch is in x, the result and the cotangent; in the mask; and the axis.
BATCHED = {
    "in front": (0, None, -1),
    "in front, mask too": (0, 0, -1),
    "second": (1, None, -1),
    "second, mask too": (1, 1, -1),
    "third, mask too": (2, 2, 0),
    "last": (3, None, -1),
    "last, mask too": (3, 3, 1),
    "second, over two": (1, None, (0, 2)),
    "third, over all": (2, None, None),
}


@pytest.mark.parametrize("batch", BATCHED)
@every_function
def test_vmap_leaves_the_batch_where_it_is(platform, name, batch):
    """No transpose, whether the mask is batched too or not; the results are those of a loop."""
    at, mask_at, axis = BATCHED[batch]
    out = at
    if name == "logsumexp":  # whose result lacks the reduced dimensions
        reduced = range(3) if axis is None else np.atleast_1d(axis) % 3
        out = sum(d not in reduced for d in range(at))

    def one(x, mask, ct):
        y, pull = jax.vjp(ours(name, axis, where=mask), x)
        return y, pull(ct)[0]

    def looped(x, mask, ct):
        found = []
        for i in range(x.shape[at]):
            part = mask if mask_at is None else jnp.take(mask, i, mask_at)
            found.append(one(jnp.take(x, i, at), part, jnp.take(ct, i, out)))
        return [jnp.stack(a, d) for a, d in zip(zip(*found, strict=True), (out, at), strict=True)]

    mask = MASKED if mask_at is not None else np.take(MASKED, 0, at)
    shape = jax.eval_shape(jax.vmap(ours(name, axis), at, out), X).shape
    given = X, mask, np.resize(CT, shape)
    mapped = jax.vmap(one, in_axes=(at, mask_at, out), out_axes=(out, at))
    compiled = jax.jit(mapped).lower(*given).compile()
    assert kernels(compiled.as_text()) == [f"jaxsoftmax.{op}" for op in (name, f"{name}_bwd")]
    assert not others(compiled.as_text()), others(compiled.as_text())
    for got, want in zip(compiled(*given), jax.jit(looped)(*given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
