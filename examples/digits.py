"""Trains a small attention classifier on real digits twice: with jaxsoftmax and with jax.nn.

    python3 -m pip install ".[bench]" && python3 examples/digits.py --out digits.png

The 1797 images of 8 x 8 pixels come with scikit-learn: nothing is downloaded. A row of pixels is a
token. The softmax under test is in the attention and in the loss (minus the log of the label's
probability). Both runs share the seed, so they should learn the same thing: exit status 1 if
their test accuracies differ by more than one point.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

try:
    import matplotlib
    import optax
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f'{error}: run python3 -m pip install ".[bench]" first')

# Run from the checkout, the installed package is found: only examples/ is put on sys.path.
import jaxsoftmax

Softmax = Callable[[jax.Array], jax.Array]
Params = dict[str, jax.Array]

TOKENS, PIXELS, CLASSES = 8, 8, 10
WIDTH, HEADS, LAYERS = 32, 4, 2
BATCH, EPOCHS, TEST = 128, 40, 360


def load(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Training images and labels, test images and labels, shuffled once."""
    digits = load_digits()
    images = jnp.asarray(digits.images / 16.0 - 0.5, jnp.float32)
    labels = jnp.asarray(digits.target, jnp.int32)
    order = jax.random.permutation(jax.random.key(seed), len(labels))
    images, labels = images[order], labels[order]
    return images[TEST:], labels[TEST:], images[:TEST], labels[:TEST]


def init(key: jax.Array) -> Params:
    shapes = {"embed": (PIXELS, WIDTH), "place": (TOKENS, WIDTH), "out": (WIDTH, CLASSES)}
    for layer in range(LAYERS):
        shapes[f"qkv{layer}"] = (WIDTH, 3 * WIDTH)
        shapes[f"mix{layer}"] = (WIDTH, WIDTH)
        shapes[f"up{layer}"] = (WIDTH, 2 * WIDTH)
        shapes[f"down{layer}"] = (2 * WIDTH, WIDTH)
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(x: jax.Array, qkv: jax.Array, softmax: Softmax) -> jax.Array:
    """Multi-head attention over the tokens of each image: [batch, tokens, width]."""
    heads = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
    q, k, v = jnp.moveaxis((x @ qkv).reshape(heads), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v).reshape(x.shape)


def logits(params: Params, images: jax.Array, softmax: Softmax) -> jax.Array:
    x = images @ params["embed"] + params["place"]
    for layer in range(LAYERS):
        x = x + attention(norm(x), params[f"qkv{layer}"], softmax) @ params[f"mix{layer}"]
        x = x + jax.nn.gelu(norm(x) @ params[f"up{layer}"]) @ params[f"down{layer}"]
    return norm(x).mean(axis=1) @ params["out"]


def loss(params: Params, images: jax.Array, labels: jax.Array, softmax: Softmax) -> jax.Array:
    probabilities = softmax(logits(params, images, softmax))
    chosen = jnp.take_along_axis(probabilities, labels[:, None], axis=1)
    return -jnp.log(jnp.maximum(chosen, 1e-30)).mean()


def train(softmax: Softmax, seed: int) -> tuple[float, list[float]]:
    """Trains with one softmax; returns the test accuracy and the mean loss of every epoch."""
    images, labels, test_images, test_labels = load()
    steps = len(labels) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, EPOCHS * steps))
    params = init(jax.random.key(seed))

    @jax.jit
    def epoch(params: Params, state: optax.OptState, key: jax.Array):
        order = jax.random.permutation(key, len(labels))[: steps * BATCH].reshape(steps, BATCH)

        def step(carry, batch):
            params, state = carry
            value, grads = jax.value_and_grad(partial(loss, softmax=softmax))(
                params, images[batch], labels[batch]
            )
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        carry, losses = jax.lax.scan(step, (params, state), order)
        return *carry, losses.mean()

    state, curve = optimizer.init(params), []
    for key in jax.random.split(jax.random.key(seed + 1), EPOCHS):
        params, state, value = epoch(params, state, key)
        curve.append(float(value))
    predicted = jax.jit(partial(logits, softmax=softmax))(params, test_images).argmax(axis=-1)
    return float((predicted == test_labels).mean()), curve


def plot(curves: dict[str, list[float]], path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        axis.plot(range(1, len(curve) + 1), curve, style, label=name)
    axis.set(xlabel="epoch", ylabel="mean training loss", yscale="log", title="digits, attention")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="where the plot goes")
    args = parser.parse_args()
    curves, accuracy = {}, {}
    for name, softmax in (("jaxsoftmax", jaxsoftmax.softmax), ("jax.nn", jax.nn.softmax)):
        start = time.perf_counter()
        accuracy[name], curves[name] = train(softmax, args.seed)
        print(
            f"{name:<11} test accuracy {100 * accuracy[name]:.2f} %, last loss "
            f"{curves[name][-1]:.5f}, {time.perf_counter() - start:.1f} s"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plot(curves, args.out)
    print(f"wrote {args.out}")
    apart = 100 * abs(accuracy["jaxsoftmax"] - accuracy["jax.nn"])
    if not apart <= 1:
        print(f"FAILED: the accuracies differ by {apart:.2f} points, more than 1")
        return 1
    print(f"the accuracies differ by {apart:.2f} points: within 1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
