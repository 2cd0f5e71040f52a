"""Measures replication and all-reduce by three routes: owner, tree and ring.

    python -m paper.replicas                  in virtual time: the same numbers anywhere
    python -m paper.replicas --driver rpc     on 2 and 3 processes of this host

A row has a number of replicas, a size of arrays, and a result for each route.
`replicate` is measured forward, until each replica was used, and backward, from the
request of the pass to its end. `all_reduce` is measured until each worker has used its
sum. Computing takes no virtual time, so only the network is measured: links of 10 us
and 10 Gbit/s, with and without ports of 10 Gbit/s, which all links of a worker share.
Only the bytes of arrays count: on the link and direction with most bytes, out of the
worker that sends most, and into the worker that receives most.

`paper/results/replicas.json` and `.md` contain the results in virtual time;
`replicas_rpc.json` and `.md` contain medians of repeats on processes.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jdag
from jdag.collectives.routes import HOW, How
from paper.figures import RESULTS, machine

COUNTS = (2, 4, 8, 16, 32, 64)
REAL_COUNTS = (2, 3)
PAYLOADS_BYTES = (4 << 10, 256 << 10, 16 << 20)
RATE = 1_250_000_000
LINK = jdag.sim.LinkModel(latency_ns=10_000, bandwidth_bytes_per_s=RATE)
NETWORKS = {
    "ports": jdag.sim.Network(LINK, port_bandwidth_bytes_per_s=RATE),
    "links": jdag.sim.Network(LINK),
}
WARM, REPEATS = 3, 21
SIZES = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))

Numbers = dict[str, int]
Row = dict[str, Any]


def total(x: jax.Array) -> jax.Array:
    return jnp.sum(x)


def zeros(size: int) -> jax.Array:
    return jnp.zeros(size, jnp.float32)


def used(ctx: Any, refs: dict[str, Any]) -> list[Any]:
    """Call `total` on each replica, on its worker. Returns the losses."""
    losses = []
    for worker, ref in refs.items():  # In a comprehension the call site would differ.
        losses.append(ctx.call(worker, total, ref))
    return losses


# --------------------------------------------------------------------- in virtual time


def in_virtual_time(network: Any, what: str, how: How, count: int, size: int) -> Row:
    """Run `what` once in the simulator. Returns times and bytes."""
    names = [f"r{number}" for number in range(count)]
    shape = jax.ShapeDtypeStruct((size // 4,), jnp.float32)
    with jdag.simulate(
        ["owner", *names], seed=0, values="abstract", network=network
    ) as cluster:
        homes = names if what == "all_reduce" else ["owner"]
        leaves = {home: cluster.put(home, shape) for home in homes}
        cluster.driver.settle()
        begun_ns, since = cluster.now_ns, len(cluster.trace)
        with cluster.context() as ctx:
            if what == "all_reduce":
                refs = ctx.all_reduce(leaves, how)
            else:
                found = ctx.replicate(names, leaves["owner"], how)
                refs = dict(zip(names, found, strict=True))
            losses = used(ctx, refs)
            cluster.driver.settle()
            forward_ns = last_ns(cluster, since) - begun_ns
            row = {"forward_ns": forward_ns, **bytes_of(cluster, since, "Primal")}
            if what == "all_reduce":
                return row
            asked_ns = cluster.now_ns
            ctx.backward(*losses)
            back = bytes_of(cluster, since, "Cotangent")
            row["back_ns"] = cluster.now_ns - asked_ns
            return row | {f"back_{name}": number for name, number in back.items()}


def last_ns(cluster: Any, since: int) -> int:
    """Return the end time of the last job in the trace, from record `since` on."""
    jobs = cluster.trace.of_kind("finish")
    return max(record.time_ns for record in jobs if record.index >= since)


def bytes_of(cluster: Any, since: int, message: str) -> Numbers:
    """Return the most array bytes in one kind of message: per link, out and in."""
    taken: dict[str, dict[Any, int]] = {"link": {}, "out": {}, "into": {}}
    for record in cluster.trace.of_kind("send"):
        said = record.named
        if record.index < since or said["message"] != message:
            continue
        here, there = record.worker, said["destination"]
        for kind, one in (("link", (here, there)), ("out", here), ("into", there)):
            taken[kind][one] = taken[kind].get(one, 0) + said["payload_bytes"]
    return {f"{kind}_bytes": max(of.values(), default=0) for kind, of in taken.items()}


def virtual_rows(
    counts: Sequence[int] = COUNTS, sizes: Sequence[int] = PAYLOADS_BYTES
) -> list[Row]:
    """Measure all rows in virtual time."""
    rows = []
    for what in ("replicate", "all_reduce"):
        for count in counts:
            for size in sizes:
                row: Row = {"what": what, "replicas": count, "payload_bytes": size}
                for how in HOW:
                    ports, links = (
                        in_virtual_time(network, what, how, count, size)
                        for network in NETWORKS.values()
                    )
                    row[how] = ports
                    for name in ("forward_ns", "back_ns"):
                        if name in links:
                            row[how][f"{name[:-3]}_without_ports_ns"] = links[name]
                rows.append(row)
    return rows


# -------------------------------------------------------------------- on real processes


def real_rows() -> list[Row]:
    """Measure all rows on processes. The calling process owns replicated arrays."""
    rows = []
    for count in REAL_COUNTS:
        names = [f"r{number}" for number in range(count)]
        with jdag.launch(["owner", *names]) as cluster:
            for size in PAYLOADS_BYTES:
                rows += on_processes(cluster, names, size)
    return rows


def on_processes(cluster: Any, names: Sequence[str], size: int) -> list[Row]:
    """Measure both operations at one size; the routes alternate."""
    array = cluster.put("owner", zeros(size // 4))
    leaves = {name: cluster.make(name, zeros, jdag.static(size // 4)) for name in names}

    def replicate(ctx: Any, how: How) -> dict[str, Any]:
        return dict(zip(names, ctx.replicate(names, array, how), strict=True))

    def all_reduce(ctx: Any, how: How) -> dict[str, Any]:
        found: dict[str, Any] = ctx.all_reduce(leaves, how)
        return found

    rows = []
    for ask in (replicate, all_reduce):
        times: dict[How, list[tuple[int, int]]] = {how: [] for how in HOW}
        for _ in range(WARM + REPEATS):
            for how in HOW:
                times[how].append(timed(cluster, ask, how))
        row = {
            "what": ask.__name__,
            "replicas": len(names),
            "payload_bytes": size,
        }
        for how, pairs in times.items():
            forward, back = zip(*pairs[WARM:], strict=True)
            row[how] = {
                "forward_ns": int(statistics.median(forward)),
                "back_ns": int(statistics.median(back)),
            }
        rows.append(row)
    cluster.drop([array, leaves])
    return rows


def timed(
    cluster: Any, ask: Callable[[Any, How], dict[str, Any]], how: How
) -> tuple[int, int]:
    """Run `ask` with one route. Returns its forward and backward times in ns."""
    with cluster.context() as ctx:
        begun_ns = cluster.now_ns
        losses = used(ctx, ask(ctx, how))
        jdag.fetch(losses)
        asked_ns = cluster.now_ns
        ctx.backward(*losses)
        return asked_ns - begun_ns, cluster.now_ns - asked_ns


# ----------------------------------------------------------------------- as a page


def sized(number: int) -> str:
    """Format a number of bytes, with its unit."""
    scale, unit = next(one for one in SIZES if number >= one[0] or one[0] == 1)
    return f"{number / scale:.4g} {unit}"


def each(row: Row, name: str, write: Callable[[int], str]) -> str:
    """Format the value `name` of each route, separated by slashes."""
    return " / ".join(write(row[how][name]) for how in HOW if name in row[how])


def lasting(number: int) -> str:
    """Format a time in ns, with its unit."""
    return f"{number / 1e3:.0f} us" if number < 1e6 else f"{number / 1e6:.4g} ms"


COLUMNS = {
    "forward_ns": ("forward", lasting),
    "back_ns": ("back", lasting),
    "forward_without_ports_ns": ("forward, no ports", lasting),
    "back_without_ports_ns": ("back, no ports", lasting),
    "link_bytes": ("busiest link", sized),
    "out_bytes": ("most out of one worker", sized),
    "back_into_bytes": ("most back into one", sized),
}


def table(rows: Sequence[Row]) -> str:
    """Format rows as a Markdown table. A cell has the values owner / tree / ring."""
    known = {name: one for name, one in COLUMNS.items() if name in rows[0][HOW[0]]}
    titles = " | ".join(title for title, _ in known.values())
    lines = [
        f"| replicas | arrays | {titles} |",
        "| ---: | ---: |" + " --- |" * len(known),
    ]
    for row in rows:
        cells = [each(row, name, write) for name, (_, write) in known.items()]
        size = sized(row["payload_bytes"])
        lines.append(f"| {row['replicas']} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables(about: str, rows: Sequence[Row]) -> str:
    """Format a page with `about` and a table for each operation."""
    parts = [f"{about} Each cell: owner / tree / ring.\n"]
    for what in dict.fromkeys(row["what"] for row in rows):
        parts.append(f"## {what}\n")
        parts.append(table([row for row in rows if row["what"] == what]))
    return "\n".join(parts)


def write(path: Path, about: str, found: Row) -> None:
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    text = tables(about, found["rows"])
    path.with_suffix(".md").write_text(text)
    print(text)


def main() -> None:
    """Measure with the requested driver, and write both result files."""
    parser = argparse.ArgumentParser(description="Replicas over workers.")
    parser.add_argument("--driver", choices=("sim", "rpc"), default="sim")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.driver == "sim":
        about = "Virtual time; links of 10 us and 10 Gbit/s, and ports of as much."
        found: Row = {"figure": "replicas", "latency_ns": 10_000, "bytes_per_s": RATE}
        write(asked.out / "replicas", about, {**found, "rows": virtual_rows()})
    else:
        about = f"Processes of one host; medians of {REPEATS}."
        found = {"figure": "replicas_rpc", "machine": machine()}
        found["rows"] = real_rows()
        write(asked.out / "replicas_rpc", about, found)


if __name__ == "__main__":
    from paper import replicas  # Workers cannot import functions of __main__.

    replicas.main()
