"""Measures the cost of `data_parallel` over several devices.

    python -m paper.data_parallel                        1, 2 and 4 devices of this CPU
    python -m paper.data_parallel --platform gpu         1, 2 and 4 GPUs

The model is a stack of dense layers, of several sizes. On one device `data_parallel` is
compared with plain `jax.jit`. On several devices it is compared with hand-written
functions by `jax.pmap` and `jax.shard_map`, with chunks of equal size ("equal") and
with one row fewer ("uneven"). Like `data_parallel`, the hand-written functions take
parameters and rows on the first device, and return outputs there. A step is
`jax.value_and_grad` of such a function. In each round all functions are timed one after
the other; a ratio is the median of the ratios of all rounds. For comparison, the step
is also compiled as one `jax.jit`, with gradients added by a psum, which shows the cost
of differentiating outside of a jit.

Memory is the size of arrays on each device between forward and vjp. Each number of
devices is measured in a separate process. `paper/results/data_parallel.json` contains
the numbers, `data_parallel.md` tables. The machine should be idle, with a core for each
device.
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
WAYS = ("equal", "uneven")
# Pairs (width of a layer, rows), which take 0.1 to 100 ms on one core of a laptop.
SIZES = ((32, 64), (128, 512), (256, 1024), (512, 2048), (1024, 4096))
TINY = ((8, 16),)
LAYERS = 4
# The time of one measurement and of all rounds, and bounds of the number of rounds.
TURN_S, ROUNDS_S, ROUNDS_MIN, ROUNDS_MAX = 0.02, 4.0, 15, 100
RATIO_MAX, WORK_MIN_S = 1.05, 1e-3
TARGET = (
    f"<= {RATIO_MAX} of plain jit on one device at 1 ms of work; <= {RATIO_MAX} of "
    "pmap and of shard_map by hand on 2 and 4, from 1 ms on"
)
# The reference of each method; for "uneven" it is the faster hand-written function.
AGAINST = {"one device": "jit", "equal": "pmap by hand"}

Row = dict[str, Any]
Model = Callable[[Any], jax.Array]


def layers(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Compute a stack of dense layers; input and output are (rows, width)."""
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def made(width: int, rows: int) -> tuple[list[jax.Array], jax.Array]:
    """Return random parameters and rows, on the first device."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys[1:]]
    return params, jax.random.normal(keys[0], (rows, width))


# ---------------------------------------------------------------------------- by hand


def with_pmap(devices: Sequence[Any], x: jax.Array) -> Model:
    """Return a model by `jax.pmap`, with rows reshaped to (devices, rows of each)."""
    count, first = len(devices), devices[0]
    mapped = jax.pmap(layers, in_axes=(None, 0), devices=devices)

    def model(params: Any) -> jax.Array:
        chunks = x.reshape(count, -1, x.shape[1])
        return jax.device_put(mapped(params, chunks), first).reshape(x.shape)

    return model


def with_shard_map(devices: Sequence[Any], x: jax.Array) -> Model:
    """Return a model by `jax.shard_map`."""
    mapped, first = sharded(devices, layers), devices[0]
    return lambda p: jax.device_put(mapped(p, x), first)


def sharded(devices: Sequence[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Map `fn` over the devices: each gets all parameters and part of the rows."""
    by_rows = PartitionSpec("rows")
    mesh = Mesh(np.array(devices), ("rows",))
    given = (PartitionSpec(), by_rows)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=given, out_specs=by_rows))


def loss_of(model: Model) -> Callable[[Any], jax.Array]:
    """Return a loss function: the mean square of a model's output."""
    return lambda params: jnp.mean(model(params) ** 2)


def step_of(model: Model) -> Callable[[Any], Any]:
    """Return a function that computes loss and gradient. It is not jitted."""
    return jax.value_and_grad(loss_of(model))


# ----------------------------------------------------------------------------- timing


def in_turn(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Time all functions alternately. Returns each one's seconds per call, by round."""
    often, round_s = {}, 0.0
    for name, call in calls.items():
        one_s = seconds(call, 3)
        often[name] = max(1, min(200, int(TURN_S / one_s)))
        round_s += often[name] * one_s
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(ROUNDS_MIN, min(ROUNDS_MAX, int(ROUNDS_S / round_s)))):
        for name, call in calls.items():
            found[name].append(seconds(call, often[name]))
    return found


def seconds(call: Callable[[], Any], calls: int) -> float:
    """Return the mean time of a call, including the wait for its result."""
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / calls


def models_of(devices: Sequence[Any], x: jax.Array) -> dict[str, Model]:
    """Return models by `data_parallel` and, as references, models by plain JAX."""
    if len(devices) == 1:
        plain = jax.jit(layers)
        alone = partial(data_parallel, layers, x=x, devices=devices)
        return {"one device": alone, "jit": lambda p: plain(p, x)}
    return {
        "equal": partial(data_parallel, layers, x=x, devices=devices),
        "uneven": partial(data_parallel, layers, x=x[:-1], devices=devices),
        "pmap by hand": with_pmap(devices, x),
        "shard_map by hand": with_shard_map(devices, x),
    }


def row_of(devices: Sequence[Any], width: int, rows: int) -> Row:
    """Measure all methods at one size, and a step compiled by one `jax.jit`."""
    params, x = made(width, rows)
    models = models_of(devices, x)
    wanted = layers(params, x)
    for name, model in models.items():
        found = model(params)
        assert bool(jnp.allclose(found, wanted[: len(found)], atol=1e-5)), name
    steps = {name: step_of(model) for name, model in models.items()}
    whole_model = sharded(devices, layers)
    whole = jax.jit(step_of(lambda p: whole_model(p, x)))
    seconds(lambda: whole(params), 1)
    return {
        "devices": len(devices),
        "width": width,
        "rows": rows,
        "forward_s": in_turn({n: partial(m, params) for n, m in models.items()}),
        "step_s": in_turn({n: partial(s, params) for n, s in steps.items()}),
        "step_in_one_jit_s": [seconds(lambda: whole(params), 3) for _ in range(5)],
    }


# ----------------------------------------------------------------------------- memory


def held(devices: Sequence[Any]) -> list[int]:
    """Return the bytes of live arrays on each device. A shared buffer counts once."""
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
    """Measure the bytes that forward adds on each device and keeps for the vjp."""
    params, x = made(width, rows)
    found = []
    for name, model in models_of(devices, x).items():
        jax.block_until_ready(jax.vjp(model, params)[0])  # Makes arrays that remain.
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
    """Measure on all devices of this process; `measured` started it."""
    devices = jax.local_devices()
    sizes = TINY if is_tiny else SIZES
    return {
        "rows": [row_of(devices, *size) for size in sizes],
        "memory": memory_of(devices, *sizes[-1]) if len(devices) > 1 else [],
        "device": devices[0].device_kind,
    }


def measured(count: int, platform: str, is_tiny: bool) -> Row:
    """Measure in a new process with `count` devices."""
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


# ------------------------------------------------------------------------------- page


def ratio_of(times: dict[str, list[float]], way: str) -> float:
    """Return the median ratio, over all rounds, of a method's time to its reference."""
    other = AGAINST.get(way) or min(
        [name for name in times if name.endswith("by hand")],
        key=lambda name: statistics.median(times[name]),
    )
    both = zip(times[way], times[other], strict=True)
    return statistics.median([one / hand for one, hand in both])


def ways_of(row: Row) -> list[str]:
    """Return the methods in a row that use `data_parallel`."""
    return [name for name in row["forward_s"] if name in ("one device", *WAYS)]


def size_of(row: Row) -> str:
    """Return a row's size as text: layer width x number of rows."""
    return f"{row['width']} x {row['rows']}"


def targets(rows: Sequence[Row]) -> list[str]:
    """Return a table of the highest ratio for each target, and whether it is met."""
    lines = [
        "| devices | of | against | highest ratio | at | target of 1.05 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for count in dict.fromkeys([row["devices"] for row in rows]):
        own = [row for row in rows if row["devices"] == count]
        for way in [way for way in ways_of(own[0]) if way in AGAINST]:
            hand = AGAINST[way]
            for kind in ("forward", "step"):
                found = _enough(own, kind, hand)
                if not found:
                    continue
                worst = max(found, key=lambda r: ratio_of(r[f"{kind}_s"], way))
                ratio = ratio_of(worst[f"{kind}_s"], way)
                verdict = "met" if ratio <= RATIO_MAX else "missed"
                lines.append(
                    f"| {count} | {way}, {kind} | {hand} | {ratio:.2f} | "
                    f"{size_of(worst)} | {verdict} |"
                )
    return lines


def _enough(rows: Sequence[Row], kind: str, hand: str) -> Sequence[Row]:
    """Select rows of 1 ms or more; with one device, only the row nearest to 1 ms."""

    def taken(row: Row, kind: str) -> float:
        return statistics.median(row[f"{kind}_s"][hand])

    if rows[0]["devices"] == 1:
        return [min(rows, key=lambda row: abs(taken(row, "forward") - WORK_MIN_S))]
    return [row for row in rows if taken(row, kind) >= WORK_MIN_S]


def table_of(rows: Sequence[Row], kind: str) -> list[str]:
    """Return a table of times in ms; all rows have the same number of devices."""
    names = list(rows[0][f"{kind}_s"])
    heads = [*names, "step in one jit"] if kind == "step" else names
    lines = [f"| {kind}, ms | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for row in rows:
        times = row[f"{kind}_s"]
        cells = []
        for name in names:
            cell = f"{statistics.median(times[name]) * 1e3:.2f}"
            if name in ways_of(row):
                cell += f" ({ratio_of(times, name):.2f})"
            cells.append(cell)
        if kind == "step":
            cells.append(f"{statistics.median(row['step_in_one_jit_s']) * 1e3:.2f}")
        lines.append(f"| {size_of(row)} | {' | '.join(cells)} |")
    return lines


def page(found: Row) -> str:
    """Return the results as a page in Markdown."""
    rows = found["rows"]
    lines = [
        "# `data_parallel` over the devices of one process",
        "",
        f"{found['device']}, {found['machine']['cores']} cores; {LAYERS} dense layers.",
        "Sizes are width x rows, in float32. Times are medians of",
        f"{ROUNDS_MIN} to {ROUNDS_MAX} rounds; each call is waited for.",
        "",
        "## Targets",
        "",
        "On one device the target holds at the size nearest to 1 ms of forward. On",
        "several devices it holds at all sizes of 1 ms or more by hand.",
        "",
        *targets(rows),
    ]
    for count in dict.fromkeys([row["devices"] for row in rows]):
        own = [row for row in rows if row["devices"] == count]
        name, of = "1 device", "plain `jax.jit`"
        if count > 1:
            name, of = (
                f"{count} devices",
                "pmap by hand; of `uneven`, to the faster by hand",
            )
        lines += ["", f"## {name}", "", f"In brackets the ratio to {of}.", ""]
        lines += [*table_of(own, "forward"), "", *table_of(own, "step")]
    return "\n".join([*lines, *memory_table(found["memory"])]) + "\n"


def memory_table(rows: Sequence[Row]) -> list[str]:
    """Return a table of the memory of devices in MB; empty if not measured."""
    if not rows:
        return []
    lines = [
        "",
        "## Memory",
        "",
        "The size of arrays in MB between forward and vjp, at the largest size, beyond",
        "parameters and rows on the first device.",
        "",
        "| devices | way | parameters | rows | more on the first | on any other |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    names = ("parameters_bytes", "rows_bytes", "first_bytes", "others_bytes_max")
    for row in rows:
        cells = " | ".join(f"{row[name] / 1e6:.2f}" for name in names)
        lines.append(f"| {row['devices']} | {row['way']} | {cells} |")
    return lines


def main() -> None:
    """Measure with each number of devices, and write the JSON file and the page."""
    parser = argparse.ArgumentParser(description="Data parallelism over devices.")
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--devices", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    parser.add_argument("--tiny", action="store_true", help="only test the script")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(inside(asked.tiny)))
        return
    if asked.tiny and asked.out == RESULTS:
        parser.error("--tiny needs --out, since its numbers are not results")
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
    path.with_suffix(".md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
