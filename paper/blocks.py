"""Compares the time of transformer blocks on two workers with one jax.jit.

    python -m paper.blocks measure|bits --device gpu:0 [--tiny]

`paper/gpu.py` starts these processes, which print one line of JSON. `measure` times a
gradient in one process (simulate), in two processes (launch), as a plan in one process,
and by one `jax.jit(jax.value_and_grad)`. These methods alternate in the same run.
`bits` prints only hashes of the gradients. Parameters and values are bfloat16.
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jdag
from jdag import Cluster

WORKERS = ("first", "second")
PLAN = "one process, as a plan"
TARGETS = {PLAN: 1.02}  # The maximum of (time / time of one jit).
REPEATS = 7


class Shape(NamedTuple):
    """The sizes of a stack of blocks and of its input."""

    blocks: int
    width: int
    heads: int
    inner: int
    rows: int
    length: int


FULL = Shape(blocks=8, width=1024, heads=16, inner=4096, rows=8, length=1024)
SHALLOW = FULL._replace(blocks=2)  # The size for `bits`, which runs in many processes.
TINY = Shape(blocks=2, width=16, heads=2, inner=32, rows=2, length=8)

Params = dict[str, Any]


def normed(x: Any) -> Any:
    """Normalize each row to mean 0 and variance 1, computed in float32."""
    wide = x.astype(jnp.float32)
    apart = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(apart**2, axis=-1, keepdims=True) + 1e-5)
    return (apart * scale).astype(x.dtype)


def block(params: Params, x: Any) -> Any:
    """Compute a transformer block with residuals; `x` is (rows, length, width)."""
    rows, length, width = x.shape
    heads = params["qkv"].shape[1]
    q, k, v = jnp.einsum("rlw,whcd->crlhd", normed(x), params["qkv"])
    scores = jnp.einsum("rlhd,rmhd->rhlm", q, k).astype(jnp.float32)
    scores = scores * (width // heads) ** -0.5
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("rhlm,rmhd->rlhd", weights, v).reshape(rows, length, width)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(normed(x) @ params["up"]) @ params["down"]


def mean_square(x: Any, y: Any) -> Any:
    """Return the mean squared difference, computed in float32."""
    return jnp.mean((x.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def corner(gradients: Any) -> Any:
    """Return the sum of the first element of each gradient."""
    return sum(
        jnp.ravel(one)[0].astype(jnp.float32) for one in jax.tree.leaves(gradients)
    )


def made(key: Any, shape: Shape) -> list[Params]:
    """Return random parameters for each block."""

    def one(key: Any) -> Params:
        keys = jax.random.split(key, 4)
        width, each = shape.width, shape.width // shape.heads
        sizes = {
            "qkv": (width, shape.heads, 3, each),
            "out": (width, width),
            "up": (width, shape.inner),
            "down": (shape.inner, width),
        }
        return {
            name: (jax.random.normal(one, size) * width**-0.5).astype(jnp.bfloat16)
            for one, (name, size) in zip(keys, sizes.items(), strict=True)
        }

    return [one(each) for each in jax.random.split(key, shape.blocks)]


class Stack:
    """The stack and its data; computes its gradients by jit, by calls and by plan."""

    def __init__(self, shape: Shape) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        size = (shape.rows, shape.length, shape.width)
        self.params = made(keys[0], shape)
        self.x = jax.random.normal(keys[1], size).astype(jnp.bfloat16)
        self.y = jax.random.normal(keys[2], size).astype(jnp.bfloat16)
        self._jitted = jax.jit(jax.value_and_grad(self._loss))

    @property
    def numbers(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def owner(self, number: int) -> str:
        """Return the worker of a block. The first half is on the first worker."""
        return WORKERS[2 * number // len(self.params)]

    def _loss(self, params: list[Params], x: Any, y: Any) -> Any:
        for one in params:
            x = block(one, x)
        return mean_square(x, y)

    def by_jit(self) -> Any:
        """Return (loss, gradients), computed by one jitted function."""
        return jax.block_until_ready(self._jitted(self.params, self.x, self.y))

    def put(self, cluster: Cluster) -> list[Any]:
        return [
            cluster.put(self.owner(number), one)
            for number, one in enumerate(self.params)
        ]

    def loss_of(self, ctx: Any, refs: Sequence[Any], value: Any, y: Any) -> Any:
        """Compute the loss by calls. `by_plan` uses this program as a plan."""
        for number, one in enumerate(refs):
            value = ctx.call(self.owner(number), block, one, value)
        return ctx.call(WORKERS[-1], mean_square, value, y)

    def by_plan(self, step: Any, refs: Sequence[Any], read: Callable) -> Any:
        """Return (loss, gradients), computed by the plan `step`. Ignores `read`."""
        del read
        loss, found = step.value_and_grad(refs, self.x, self.y)
        return jax.block_until_ready((loss, jax.tree.leaves(found)))

    def by_workers(self, cluster: Cluster, refs: Sequence[Any], read: Callable) -> Any:
        """Compute in a new context. Returns (loss, `read(ctx, gradients)`)."""
        with cluster.context() as ctx:
            loss = self.loss_of(ctx, refs, self.x, self.y)
            ctx.backward(loss)
            return loss.fetch(), read(ctx, ctx.gradient(list(refs)))

    def ready(self, ctx: Any, gradients: Sequence[Any]) -> Any:
        """Wait until the gradients are computed, without fetching them."""
        parts = [
            [one for number, one in enumerate(gradients) if self.owner(number) == name]
            for name in WORKERS
        ]
        calls = zip(WORKERS, parts, strict=True)
        return jdag.fetch([ctx.call(name, corner, part) for name, part in calls])


def fetched(_: Any, gradients: Any) -> Any:
    return jdag.fetch(gradients)


def digest(tree: Any) -> str:
    """Return a hash of the bits of a tree's arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def apart(found: Any, truth: Any) -> float:
    """Return the maximum over all leaves of max|g - t| / max|t|."""

    def one(g: Any, t: Any) -> float:
        g, t = (np.asarray(each).astype(np.float64) for each in (g, t))
        return float(np.max(np.abs(g - t)) / np.max(np.abs(t)))

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    return max(one(g, t) for g, t in pairs)


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(shape: Shape, device: str) -> dict[str, Any]:
    """Time all methods alternately, and compare gradients with those of one jit."""
    stack = Stack(shape)
    simulated, planned = (jdag.simulate(WORKERS, seed=0, trace=False) for _ in range(2))
    launched = jdag.launch(WORKERS, device=device, allow=["paper"])
    with simulated, planned, launched:
        ways: dict[str, Callable[[Callable], Any]] = {}
        for name, cluster in (("one process", simulated), ("two processes", launched)):
            refs = stack.put(cluster)
            ways[name] = partial(stack.by_workers, cluster, refs)
        step = jdag.compile(stack.loss_of, planned)
        ways[PLAN] = partial(stack.by_plan, step, stack.put(planned))
        loss, truth = stack.by_jit()
        found = {name: way(fetched) for name, way in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in ("one jit", *ways)}
        for _ in range(1 + REPEATS):  # The first round is discarded.
            times["one jit"].append(seconds(stack.by_jit))
            for name, way in ways.items():
                times[name].append(seconds(partial(way, stack.ready)))
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    return {
        "shape": shape._asdict(),
        "parameters": stack.numbers,
        "device": jax.devices()[0].device_kind,
        "seconds": medians,
        "ratios": {name: medians[name] / medians["one jit"] for name in ways},
        "targets": TARGETS,
        "loss": float(loss),
        "losses": {name: float(one) for name, (one, _) in found.items()},
        "gradient_difference": {
            name: apart(g, truth) for name, (_, g) in found.items()
        },
        "same_bits_in_one_process_and_two": digest(found["one process"][1])
        == digest(found["two processes"][1]),
    }


def bits(shape: Shape) -> dict[str, str]:
    """Return hashes of the gradients that this process computes."""
    stack = Stack(shape)
    with jdag.simulate(WORKERS, seed=0, trace=False) as cluster:
        _, found = stack.by_workers(cluster, stack.put(cluster), fetched)
    return {"one jit": digest(stack.by_jit()[1]), "one process": digest(found)}


def main() -> None:
    """Run the command, and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["measure", "bits"])
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    if asked.what == "measure":
        found: Any = measure(TINY if asked.tiny else FULL, asked.device)
    else:
        found = bits(TINY if asked.tiny else SHALLOW)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
