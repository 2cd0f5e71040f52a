"""The programs of `paper.chaos`: scenarios, `saving` (checkpoints), and `arrays`."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jdag
from jdag.errors import JdagError
from jdag.scenario import Run, load
from paper.chaos_pool import NAMES
from paper.failures import SCENARIOS, Driver

SAVING, ARRAYS = "saving", "arrays"
PROGRAMS = (
    *(SAVING, ARRAYS),
    *("chain", "diamond", "several_roots", "three_hops", "pipeline"),
    *("parameter_server", "ddp_with_rpc", "shared_digits", "two_shards"),
    "remote_embedding",
)
# Runs on a cluster and returns a hash of the bits of its results.
Program = Callable[[jdag.Cluster], str]


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """Compute a layer whose output is large enough for shared memory."""
    return jnp.tanh(x * w)


def square(v: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(v * x - 1.0))


def lowered(leaf: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return a leaf's value after a step of gradient descent."""
    return leaf - 0.1 * gradient


def train(cluster: jdag.Cluster, leaves: Any, x: Any, steps: int) -> None:
    """Train a net of two layers, on w1 and w2, for some steps."""
    for _ in range(steps):
        with cluster.context() as ctx:
            hidden = ctx.call("w1", layer, leaves["w"], x)
            ctx.backward(ctx.call("w2", square, leaves["v"], hidden))
            for leaf in leaves.values():
                cluster.update(lowered, leaf, ctx.gradient(leaf))


def bits_of(leaves: Any) -> str:
    """Return a hash of the bits of all leaves."""
    values = [leaf.fetch() for leaf in leaves.values()]
    return hashlib.sha256(b"".join(one.tobytes() for one in values)).hexdigest()


def fresh(cluster: jdag.Cluster, size: int) -> dict[str, Any]:
    """Return new parameters of the net, each of `size` numbers."""
    w, v = jnp.linspace(-1.0, 1.0, size), jnp.linspace(0.5, 1.5, size)
    return {"w": cluster.put("w1", w), "v": cluster.put("w2", v)}


def saving(cluster: jdag.Cluster, folder: Path) -> str:
    """Train, save, train on; load, train on again. Both results must be equal."""
    size = 1 << 17  # 512 KiB.
    leaves, x = fresh(cluster, size), jnp.linspace(1.0, 2.0, size)
    train(cluster, leaves, x, 2)
    cluster.save(folder, leaves=leaves)
    train(cluster, leaves, x, 2)
    once = bits_of(leaves)
    leaves = cluster.load(folder, leaves={"w": "w1", "v": "w2"})["leaves"]
    train(cluster, leaves, x, 2)
    return once if bits_of(leaves) == once else "differs after load"


def scaled(w: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.tanh(one * w) for one in arrays]


def distance(left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
    pairs = zip(left, right, strict=True)
    return jnp.stack([jnp.mean((one - other) ** 2) for one, other in pairs]).sum()


def arrays(cluster: jdag.Cluster) -> str:
    """Send arrays of 64 B to 1 MiB between three workers, forward and backward."""
    sizes = [1 << bits for bits in range(4, 19)] + [100] * 50
    x = [jnp.linspace(0.5, 1.5, size) for size in sizes]
    leaves = {name: cluster.put(name, jnp.float32(0.9)) for name in NAMES[1:]}
    w1, w2, w3 = leaves.values()
    with cluster.context() as ctx:
        hidden = ctx.call("w1", scaled, w1, x)
        left, right = (ctx.call(w.worker, scaled, w, hidden) for w in (w2, w3))
        ctx.backward(ctx.call("w1", distance, left, right))
        found = [ctx.gradient(leaf) for leaf in leaves.values()]
        found = [one.fetch() for one in found]
    return hashlib.sha256(b"".join(one.tobytes() for one in found)).hexdigest()


def programs_in(
    folder: Path, names: Sequence[str]
) -> tuple[dict[str, Program], list[str]]:
    """Return the named programs, and the modules that workers must allow."""
    found: dict[str, Program] = {}
    modules = [__name__]
    for name in names:
        if name == ARRAYS:
            found[name] = arrays
            continue
        if name == SAVING:
            found[name] = lambda cluster: saving(cluster, folder / "saved")
            continue
        path = SCENARIOS / f"{name}.toml"
        count = len(load(path).settings.names)
        changes = {"workers": list(NAMES[:count]), "network": {}, "devices": {}}
        scenario = load(path, changes=changes)
        modules.append(scenario.settings.program.partition(":")[0])

        def play(cluster: jdag.Cluster, scenario: Any = scenario) -> str:
            run = Run(
                workers=scenario.settings.names,
                seeds=(0,),
                abstract=False,
                troubled=False,
                virtual=False,
                driver=Driver(cluster),
                show=lambda *_: None,
            )
            figures = scenario.player.play(run)
            if figures["outcome"] != "finished":
                # A program may report an error as its outcome.
                raise JdagError(str(figures.get("error_message", figures)))
            return str(figures["gradient_bits"])

        found[name] = play
    return found, sorted({*modules})
