"""Compares transformer blocks and small layers on workers with one jax.jit.

    python -m paper.blocks measure|layers|bits --device gpu:0 [--tiny]

`paper/gpu.py` starts these processes. `measure` times a gradient of the blocks in one
process (simulate) and in two (launch), by calls and as a plan, and by one
`jax.jit(jax.value_and_grad)`. `layers` times 64 small layers as a plan in one process.
All ways alternate in the same run, and each waits for what it computes. Each line of
JSON has all that was measured so far; a way that fails is left out, with its error.
`bits` prints only hashes of the gradients. Parameters and values are bfloat16.
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import truediv
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdag
from jdag import Cluster

WORKERS = ("first", "second")
ONE, TWO = "one process", "two processes"
PLAN, TWO_PLAN = f"{ONE}, as a plan", f"{TWO}, as a plan"
TARGETS = {PLAN: 1.05, TWO_PLAN: 1.8}  # The maximum of (time / time of one jit).
LAYERS_TARGETS = {"cpu": 1.05, "gpu": 1.5}
REPEATS = 7
LAYERS, WIDTH, ROWS = 64, 256, 8
LAYERS_REPEATS = 40


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

    def put(self, cluster: Cluster) -> tuple[list[Any], Any, Any]:
        """Put parameters and data where they are used. Returns refs: params, x, y."""
        x = cluster.put(WORKERS[0], self.x, tracked=False)
        y = cluster.put(WORKERS[-1], self.y, tracked=False)
        owned = enumerate(self.params)
        return [cluster.put(self.owner(number), one) for number, one in owned], x, y

    def loss_of(self, ctx: Any, refs: Sequence[Any], value: Any, y: Any) -> Any:
        """Compute the loss by calls. Plans use this program too."""
        for number, one in enumerate(refs):
            value = ctx.call(self.owner(number), block, one, value)
        return ctx.call(WORKERS[-1], mean_square, value, y)

    def by_workers(self, cluster: Cluster, put: Any, read: Callable) -> Any:
        """Compute in a new context. Returns (loss, `read(ctx, gradients)`)."""
        with cluster.context() as ctx:
            loss = self.loss_of(ctx, *put)
            ctx.backward(loss)
            found = loss.fetch(), read(ctx, ctx.gradient(list(put[0])))
            return jax.block_until_ready(found)  # In one process they may be computing.

    def ready(self, ctx: Any, gradients: Sequence[Any]) -> Any:
        """Compute a number of each worker's gradients, without fetching them."""
        parts = [
            [one for number, one in enumerate(gradients) if self.owner(number) == name]
            for name in WORKERS
        ]
        calls = zip(WORKERS, parts, strict=True)
        return jdag.fetch([ctx.call(name, corner, part) for name, part in calls])


class Way(NamedTuple):
    """A way to compute gradients. `run` waits for them; `gradients` fetches them."""

    run: Callable[[], Any]
    gradients: Callable[[], Any] | None = None


def by_calls(stack: Stack, cluster: Cluster) -> Way:
    work = partial(stack.by_workers, cluster, stack.put(cluster))
    return Way(partial(work, stack.ready), partial(work, fetched))


def by_plan(stack: Stack, cluster: Cluster) -> Way:
    """Return a plan of the gradients, which are arrays of this process."""
    work = partial(
        jdag.compile(stack.loss_of, cluster).value_and_grad, *stack.put(cluster)
    )
    return Way(work, work)


def by_training_plan(stack: Stack, cluster: Cluster) -> Way:
    """Return a plan whose gradients update leaves on their workers, by nothing."""
    refs, x, y = stack.put(cluster)
    optimizer = jdag.Optimizer(optax.sgd(0.0), refs)
    return Way(partial(jdag.compile(stack.loss_of, cluster, optimizer), refs, x, y))


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
    """Return the seconds until the arrays of the result are ready."""
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


def in_turn(
    ways: dict[str, Callable[[], Any]], failed: dict[str, str], repeats: int
) -> Iterator[dict[str, dict[str, float]]]:
    """Yield medians of seconds and of ratios to the first way, after each round.

    The first round is discarded. A way that raises is dropped from `ways`, and its
    error is added to `failed`.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    first = next(iter(ways))
    for number in range(1 + repeats):
        for name, work in [*ways.items()]:
            try:
                times[name].append(seconds(work))
            except Exception as error:
                del ways[name], times[name]
                failed[name] = repr(error)
        if number:
            medians = {name: statistics.median(t[1:]) for name, t in times.items()}
            ratios = {
                name: statistics.median(map(truediv, taken[1:], times[first][1:]))
                for name, taken in times.items()
                if name != first
            }
            yield {"seconds": medians, "ratios": ratios}


def measure(shape: Shape, device: str) -> Iterator[dict[str, Any]]:
    """Time all ways alternately, and compare gradients with those of one jit."""
    stack = Stack(shape)
    loss, truth = stack.by_jit()
    found: dict[str, Any] = {
        "shape": shape._asdict(),
        "parameters": stack.numbers,
        "device": jax.devices()[0].device_kind,
        "targets": TARGETS,
        "loss": float(loss),
        "losses": {},
        "gradient_difference": {},
        "failed": {},
    }
    with ExitStack() as clusters:
        simulated, planned = [
            clusters.enter_context(jdag.simulate(WORKERS, seed=0, trace=False))
            for _ in range(2)
        ]
        launched = jdag.launch(WORKERS, device=device, allow=["paper"])
        clusters.enter_context(launched)
        builds: dict[str, Callable[[], Way]] = {
            ONE: partial(by_calls, stack, simulated),
            PLAN: partial(by_plan, stack, planned),
            TWO: partial(by_calls, stack, launched),
            TWO_PLAN: partial(by_training_plan, stack, launched),
        }
        ways: dict[str, Callable[[], Any]] = {"one jit": stack.by_jit}
        digests: dict[str, str] = {}
        for name, build in builds.items():
            try:
                way = build()
                if way.gradients is None:
                    found["losses"][name] = float(way.run())
                else:
                    value, gradients = way.gradients()
                    found["losses"][name] = float(value)
                    found["gradient_difference"][name] = apart(gradients, truth)
                    digests[name] = digest(gradients)
            except Exception as error:
                found["failed"][name] = repr(error)
            else:
                ways[name] = way.run
            yield found
        if {ONE, TWO} <= set(digests):
            same = digests[ONE] == digests[TWO]
            found["same_bits_in_one_process_and_two"] = same
        for figures in in_turn(ways, found["failed"], REPEATS):
            yield found | figures


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def layers(count: int, width: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Time small layers as a plan in one process, on one worker and on two."""
    keys = jax.random.split(jax.random.key(0), count)
    ws = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    x = jax.random.normal(jax.random.key(1), (ROWS, width))

    def loss(params: Sequence[Any], value: Any) -> Any:
        for w in params:
            value = layer(w, value)
        return mean_square(value, 0 * value)

    def program(owners: Sequence[str], ctx: Any, refs: Sequence[Any], h: Any) -> Any:
        for owner, ref in zip(owners, refs, strict=True):
            h = ctx.call(owner, layer, ref, h)
        return ctx.call(owners[-1], mean_square, h, 0.0)

    jitted = partial(jax.jit(jax.value_and_grad(loss)), ws, x)
    ways: dict[str, Callable[[], Any]] = {"one jit": jitted}
    found: dict[str, Any] = {
        "layers": count,
        "width": width,
        "device": jax.devices()[0].device_kind,
        "target": LAYERS_TARGETS.get(jax.default_backend()),
        "failed": {},
    }
    with ExitStack() as clusters:
        for workers in (1, 2):
            names = [f"w{number}" for number in range(workers)]
            simulated = jdag.simulate(names, seed=0, trace=False)
            cluster = clusters.enter_context(simulated)
            owners = [names[number * workers // count] for number in range(count)]
            refs = [cluster.put(o, w) for o, w in zip(owners, ws, strict=True)]
            step = jdag.compile(partial(program, owners), cluster).value_and_grad
            ways[f"a plan, workers: {workers}"] = partial(step, refs, x)
        for figures in in_turn(ways, found["failed"], repeats):
            yield found | figures


def bits(shape: Shape) -> dict[str, str]:
    """Return hashes of the gradients that this process computes."""
    stack = Stack(shape)
    with jdag.simulate(WORKERS, seed=0, trace=False) as cluster:
        _, found = stack.by_workers(cluster, stack.put(cluster), fetched)
    return {"one jit": digest(stack.by_jit()[1]), "one process": digest(found)}


def main() -> None:
    """Run the command, and print lines of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["measure", "layers", "bits"])
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    found: Iterator[Any]
    if asked.what == "measure":
        found = measure(TINY if asked.tiny else FULL, asked.device)
    elif asked.what == "layers":
        found = (
            layers(8, 16, 3) if asked.tiny else layers(LAYERS, WIDTH, LAYERS_REPEATS)
        )
    else:
        found = iter([bits(TINY if asked.tiny else SHALLOW)])
    for each in found:
        print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
