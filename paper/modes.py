"""Compares the cost of SMART passes, which first search the graph, with FAST passes.

    python paper/modes.py

The programs are chains on two workers, chains with one more worker than transfers,
fan-outs, and trees, with 1 to 512 transfers. The pass is requested at once (during the
forward) or after the forward. Protocol messages, all bytes on the wire, and
virtual time are counted from the request of the pass to its end. Everything is
simulated in virtual time, so the numbers are the same on any machine.
`paper/results/modes.json` contains the numbers, `modes.md` a table.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

import jdag

RESULTS = Path(__file__).parent / "results"
SIZES = (1, 2, 8, 64, 512)  # A fan-out needs at least 2 transfers.
WIDTH = 64
NETWORK = jdag.sim.Network(
    jdag.sim.LinkModel(latency_ns=20_000, bandwidth_bytes_per_s=1_250_000_000)
)
DEVICES = jdag.sim.DeviceModel(forward_ns=10_000, backward_ns=20_000, sum_ns=1_000)
MODES: tuple[Literal["fast", "smart"], ...] = ("fast", "smart")


def scaled(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return w * x, elementwise."""
    return w * x


def total(*parts: jax.Array) -> jax.Array:
    """Return the sum of all elements of all parts, which is the loss."""
    result = jnp.zeros(())
    for part in parts:
        result = result + jnp.sum(part)
    return result


def chain_of_two(ctx: Any, leaves: Any, size: int) -> list[Any]:
    """Make a chain of calls with `size` transfers, to and fro between two workers."""
    values = [ctx.call("w0", scaled, leaves[0], 1.5)]
    for number in range(size):
        values.append(ctx.call(f"w{(number + 1) % 2}", scaled, values[-1], 1.5))
    return [*values, ctx.call(values[-1].worker, total, values[-1])]


def chain_of_many(ctx: Any, leaves: Any, size: int) -> list[Any]:
    """Make a chain of calls with `size` transfers, each to a new worker."""
    values = [ctx.call("w0", scaled, leaves[0], 1.5)]
    for number in range(size):
        values.append(ctx.call(f"w{number + 1}", scaled, values[-1], 1.5))
    return [*values, ctx.call(values[-1].worker, total, values[-1])]


def fan_out(ctx: Any, leaves: Any, size: int) -> list[Any]:
    """Send a value to `size` / 2 workers, and send their results back."""
    value = ctx.call("w0", scaled, leaves[0], 1.5)
    parts = [ctx.call(f"w{n + 1}", scaled, value, 1.5) for n in range(size // 2)]
    return [value, *parts, ctx.call("w0", total, *parts)]


def tree(ctx: Any, leaves: Any, size: int) -> list[Any]:
    """Combine values in a binary tree of workers, each of which has one value."""
    values = [ctx.call(leaf.worker, scaled, leaf, 1.5) for leaf in leaves]
    made = list(values)
    for number in range(size, 0, -1):
        above = (number - 1) // 2
        values[above] = ctx.call(f"w{above}", scaled, values[above], values[number])
        made.append(values[above])
    return [*made, ctx.call("w0", total, values[0])]


SHAPES: dict[str, tuple[Callable[..., Any], Callable[[int], int]]] = {
    "chain on 2 workers": (chain_of_two, lambda size: 2),
    "chain on n workers": (chain_of_many, lambda size: size + 1),
    "fan-out and back": (fan_out, lambda size: size // 2 + 1),
    "tree": (tree, lambda size: size + 1),
}


class Cost(NamedTuple):
    """The cost of one backward pass."""

    messages: int
    bytes: int
    virtual_ns: int


def cost(
    shape: str, size: int, mode: Literal["fast", "smart"], after_forward: bool
) -> Cost:
    """Run a pass. Returns its cost, from the request of the pass to its end."""
    program, workers_of = SHAPES[shape]
    names = [f"w{number}" for number in range(workers_of(size))]
    settings: dict[str, Any] = {"network": NETWORK, "devices": DEVICES, "trace": False}
    with jdag.simulate(names, seed=0, values="abstract", **settings) as cluster:
        shape_of = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
        leaves = [cluster.put(name, shape_of) for name in names]
        with cluster.context() as ctx:
            # All refs are kept, since messages about dropped refs must not count.
            *kept, root = program(ctx, leaves, size)
            if after_forward:
                cluster.driver.settle()
            before, start_ns = _sent(cluster), cluster.now_ns
            ctx.backward(root, mode=mode)
            took_ns = cluster.now_ns - start_ns
            after = _sent(cluster)
            del kept
    return Cost(after[0] - before[0], after[1] - before[1], took_ns)


def _sent(cluster: jdag.Cluster) -> tuple[int, int]:
    info = cluster.info().values()
    return (
        sum(worker["messages_sent"] for worker in info),
        sum(worker["bytes_sent"] for worker in info),
    )


def rows() -> list[dict[str, Any]]:
    """Measure all shapes, sizes and modes. Returns their costs."""
    found = []
    for shape in SHAPES:
        for size in SIZES if shape != "fan-out and back" else SIZES[1:]:
            for after in (False, True):
                fast, smart = (cost(shape, size, mode, after) for mode in MODES)
                found.append(
                    {
                        "shape": shape,
                        "transfers": size,
                        "backward": "after forward" if after else "at once",
                        "fast": fast._asdict(),
                        "smart": smart._asdict(),
                    }
                )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return the costs as a table in Markdown."""
    lines = [
        "| shape | transfers | backward | messages | bytes | virtual time | |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        fast, smart = Cost(**row["fast"]), Cost(**row["smart"])
        more = (smart.virtual_ns / fast.virtual_ns - 1) * 100
        lines.append(
            f"| {row['shape']} | {row['transfers']} | {row['backward']} "
            f"| {fast.messages} -> {smart.messages} | {fast.bytes} -> {smart.bytes} "
            f"| {fast.virtual_ns / 1e3:.0f} -> {smart.virtual_ns / 1e3:.0f} us "
            f"| {more:+.1f}% |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write both result files."""
    found = rows()
    (RESULTS / "modes.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "modes.md").write_text("FAST -> SMART\n\n" + table(found))
    print(table(found))


if __name__ == "__main__":
    main()
