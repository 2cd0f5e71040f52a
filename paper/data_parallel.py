"""Measures data parallelism over devices: what it costs, and which way is fastest.

    python -m paper.data_parallel                        1, 2 and 4 devices of this CPU
    python -m paper.data_parallel --platform gpu         as many GPUs as there are

A stack of dense layers, of several sizes. On one device `data_parallel` is held against
plain `jax.jit`; on several, each of its ways against `jax.pmap` and `jax.shard_map` as
one writes them by hand, which are given parameters and rows on the first device as it
is, and give what it gives. A step is `jax.value_and_grad` around each. Two are timed in
turn, and a row has their medians and the median of their ratios. Beside the step there
is the same in one `jax.jit`, gradients added by a psum, for what it costs that JAX
differentiates step by step.

Memory is what arrays hold on each device between forward and vjp. Each number of
devices is a process of its own. `paper/results/data_parallel.json` holds the numbers,
`data_parallel.md` the tables. The machine should be quiet, and have a core a device.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jdag.parallel import data_parallel
from paper.figures import RESULTS, machine

ROOT = Path(__file__).parents[1]
COUNTS = (1, 2, 4)
WAYS = ("pmap", "shard_map", "each")
# Width of a layer, and rows: on one core of a laptop from 0.1 to 100 ms.
SIZES = ((32, 64), (128, 512), (256, 1024), (512, 2048), (1024, 4096))
TINY = ((8, 16),)
LAYERS = 4
REPEATS, TURN_S = 15, 0.02
TARGET = (
    "<= 1.05 of plain jit on one device at 1 ms of work; <= 1.05 of the faster of pmap "
    "and shard_map by hand on 2 and 4"
)

Row = dict[str, Any]
Model = Callable[[Any], jax.Array]


def layers(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """A stack of dense layers; (rows, width) in and out."""
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def made(width: int, rows: int) -> tuple[list[jax.Array], jax.Array]:
    """Parameters and rows, on the first device."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys[1:]]
    return params, jax.random.normal(keys[0], (rows, width))


# ---------------------------------------------------------------------------- by hand


def with_pmap(devices: Sequence[Any], x: jax.Array) -> Model:
    """Forward by `jax.pmap`: rows as (devices, rows of each), and joined again."""
    count, first = len(devices), devices[0]
    mapped = jax.pmap(layers, in_axes=(None, 0), devices=devices)
    chunks = x.reshape(count, -1, x.shape[1])
    return lambda p: jax.device_put(mapped(p, chunks), first).reshape(x.shape)


def with_shard_map(devices: Sequence[Any], x: jax.Array) -> Model:
    """Forward by `jax.shard_map`."""
    mapped, first = sharded(devices, layers), devices[0]
    return lambda p: jax.device_put(mapped(p, x), first)


def sharded(devices: Sequence[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of parameters and rows over all devices, its outputs by rows."""
    by_rows = PartitionSpec("rows")
    mesh = Mesh(np.array(devices), ("rows",))
    given = (PartitionSpec(), by_rows)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=given, out_specs=by_rows))


def loss_of(model: Model) -> Callable[[Any], jax.Array]:
    """The mean square of what a model gives."""
    return lambda params: jnp.mean(model(params) ** 2)


def step_of(model: Model) -> Callable[[Any], Any]:
    """Loss and gradient, JAX going through the model as it is called."""
    return jax.value_and_grad(loss_of(model))


# ----------------------------------------------------------------------------- timing


def in_turn(one: Callable[[], Any], other: Callable[[], Any]) -> Row:
    """Seconds a call of two functions, measured in turn, and the ratio of the first."""
    taken = [seconds(one, 3), seconds(other, 3)]
    calls = [max(1, min(200, int(TURN_S / taken_s))) for taken_s in taken]
    pairs = [(seconds(one, calls[0]), seconds(other, calls[1])) for _ in range(REPEATS)]
    ratios = sorted(first / second for first, second in pairs)
    return {
        "jdag_s": statistics.median(first for first, _ in pairs),
        "by_hand_s": statistics.median(second for _, second in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def seconds(call: Callable[[], Any], calls: int) -> float:
    """The mean time of some calls; each is waited for."""
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / calls


def rows_of(devices: Sequence[Any], width: int, rows: int) -> list[Row]:
    """Each way against each by hand; and all of them against one compiled step."""
    params, x = made(width, rows)
    ways = WAYS if len(devices) > 1 else (None,)
    hands: dict[str, Model] = {"pmap": with_pmap(devices, x)}
    hands["shard_map"] = with_shard_map(devices, x)
    if len(devices) == 1:
        plain = jax.jit(layers)
        hands = {"jit": lambda p: plain(p, x)}
    model = sharded(devices, layers)
    whole = jax.jit(step_of(lambda p: model(p, x)))
    whole_s = statistics.median(seconds(lambda: whole(params), 3) for _ in range(5))
    found = []
    for way in ways:

        def ours(params: Any, way: str | None = way) -> jax.Array:
            return data_parallel(layers, params, x, devices, how=way)

        for name, hand in hands.items():
            assert bool(jnp.allclose(ours(params), hand(params), atol=1e-5))
            forward = in_turn(partial(ours, params), partial(hand, params))
            step = in_turn(
                partial(step_of(ours), params), partial(step_of(hand), params)
            )
            found.append(
                {
                    "devices": len(devices),
                    "width": width,
                    "rows": rows,
                    "way": way or "chosen",
                    "by_hand": name,
                    "forward": forward,
                    "step": step,
                    "step_in_one_jit_s": whole_s,
                }
            )
    return found


# ----------------------------------------------------------------------------- memory


def held(devices: Sequence[Any]) -> list[int]:
    """Bytes of all live arrays, on each device; of shared buffers each once."""
    found = dict.fromkeys(devices, 0)
    seen = set()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            place = (shard.device, shard.data.unsafe_buffer_pointer())
            if shard.device in found and place not in seen:
                seen.add(place)
                found[shard.device] += shard.data.nbytes
    return list(found.values())


def memory_of(devices: Sequence[Any], width: int, rows: int) -> list[Row]:
    """What each device holds between forward and vjp beyond what was there before."""
    params, x = made(width, rows)
    ways: dict[str, Model] = {
        way: partial(data_parallel, layers, x=x, devices=devices, how=way)
        for way in WAYS
    }
    ways["pmap by hand"] = with_pmap(devices, x)
    ways["shard_map by hand"] = with_shard_map(devices, x)
    found = []
    for name, model in ways.items():
        jax.block_until_ready(jax.vjp(model, params)[0])  # What is made once.
        before = held(devices)
        out, vjp = jax.vjp(model, params)
        jax.block_until_ready((out, vjp))
        after = held(devices)
        del vjp
        more = [now - then for now, then in zip(after, before, strict=True)]
        found.append(
            {
                "devices": len(devices),
                "way": name,
                "parameters_bytes": sum(w.nbytes for w in params),
                "rows_bytes": x.nbytes,
                "first_bytes": more[0],
                "others_bytes_max": max(more[1:], default=0),
            }
        )
    return found


# ------------------------------------------------------------------------------- main


def inside(is_tiny: bool) -> Row:
    """Measure on all devices of this process."""
    devices = jax.local_devices()
    sizes = TINY if is_tiny else SIZES
    return {
        "rows": [row for size in sizes for row in rows_of(devices, *size)],
        "memory": memory_of(devices, *sizes[-1]) if len(devices) > 1 else [],
        "device": devices[0].device_kind,
    }


def measured(count: int, platform: str, is_tiny: bool) -> Row:
    """Measure in a process that has so many devices."""
    tiny = ["--tiny"] if is_tiny else []
    done = subprocess.run(
        [sys.executable, "-m", "paper.data_parallel", "--inside", *tiny],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": {"gpu": "cuda"}.get(platform, platform),
            "JAX_NUM_CPU_DEVICES": str(count),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def fastest(rows: Sequence[Row]) -> list[Row]:
    """For each number of devices and size, the way with the shortest step."""
    found: dict[tuple[int, int], Row] = {}
    for row in rows:
        place = (row["devices"], row["width"])
        best = found.setdefault(place, row)
        if row["step"]["jdag_s"] < best["step"]["jdag_s"]:
            found[place] = row
    return list(found.values())


def tables(found: Row) -> str:
    """The results in Markdown."""
    lines = [
        f"{found['device']}, {found['machine']['cores']} cores. Target: {TARGET}.",
        "",
        "| devices | width x rows | way | by hand | forward | ratio | step | ratio "
        "| step in one jit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        forward, step = row["forward"], row["step"]
        lines.append(
            f"| {row['devices']} | {row['width']} x {row['rows']} | {row['way']} | "
            f"{row['by_hand']} | {forward['jdag_s'] * 1e3:.2f} ms | "
            f"{forward['ratio']:.2f} | {step['jdag_s'] * 1e3:.2f} ms | "
            f"{step['ratio']:.2f} | {row['step_in_one_jit_s'] * 1e3:.2f} ms |"
        )
    lines += ["", "| devices | width | fastest way of a step |", "| --- | --- | --- |"]
    lines += [
        f"| {row['devices']} | {row['width']} | {row['way']} |"
        for row in fastest(found["rows"])
        if row["devices"] > 1
    ]
    lines += [
        "",
        "| devices | way | parameters | rows | more on the first | on any other |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    names = ("parameters_bytes", "rows_bytes", "first_bytes", "others_bytes_max")
    for row in found["memory"]:
        cells = " | ".join(f"{row[name] / 1e6:.2f} MB" for name in names)
        lines.append(f"| {row['devices']} | {row['way']} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure on each number of devices, and write both files."""
    parser = argparse.ArgumentParser(description="Data parallelism over devices.")
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--devices", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    parser.add_argument("--tiny", action="store_true", help="to try the script alone")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(inside(asked.tiny)))
        return
    if asked.tiny and asked.out == RESULTS:
        parser.error("--tiny needs --out: what it measures is no result")
    parts = [measured(count, asked.platform, asked.tiny) for count in asked.devices]
    found = {
        "figure": "data_parallel",
        "target": TARGET,
        "device": parts[0]["device"],
        "machine": machine(),
        "rows": [row for part in parts for row in part["rows"]],
        "memory": [row for part in parts for row in part["memory"]],
    }
    name = "data_parallel" if asked.platform == "cpu" else "data_parallel_gpu"
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / name
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(tables(found))
    print(tables(found))


if __name__ == "__main__":
    main()
