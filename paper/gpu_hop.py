"""Measures a hop of an array between two processes by part: to host, wire, to device.

    python -m paper.gpu_hop --device gpu:0 [--tiny]

Prints a line of JSON after each size, with all that was measured so far. All times are
medians, and each measurement waits for its arrays. `to host` is the copy that jdag
makes, into page-locked memory; it is measured into ordinary memory too. `wire` is a hop
between arrays of hosts: the copy into shared memory and the frame. `whole hop` is
measured with both processes on the device; it includes `compute`, which makes the
array. The times of a hop are those of an array less those of a few bytes.
"""

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdag
from jdag import Cluster
from jdag.compute.buffers import parts, start_copies
from jdag.processes.net.shared_memory import SharedSegment

SIZES = tuple([1 << n for n in (18, 20, 22, 24, 26)])
TINY_SIZES = (1 << 18, 1 << 22)
SMALL_BYTES = 64
REPEATS, WARM = 15, 6
REST_S = 0.05  # Segments of shared memory are made on a thread, after the first hops.
WORKERS = ("caller", "worker")
PARTS = ("compute", "to host", "wire", "to device")


@jax.jit
def doubled(x: Any) -> Any:
    return x + x


def first_element(x: Any) -> Any:
    return x.ravel()[0]


def received(ctx: Any, x: Any) -> Any:
    """Send an argument to the worker, which returns one element."""
    return ctx.call(WORKERS[1], first_element, x)


def computed(ctx: Any, x: Any) -> Any:
    """Compute an array here, and send it to the worker, which returns one element."""
    return ctx.call(WORKERS[1], first_element, ctx.call(WORKERS[0], doubled, x))


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds until the arrays of the result are ready."""
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


def median_of(work: Callable[[Any], Any], made: Callable[[], Any]) -> float:
    """Return the median seconds of `work(made())`, without those of `made`."""
    times = []
    for _ in range(WARM + REPEATS):
        value = jax.block_until_ready(made())
        times.append(seconds(partial(work, value)))
    return statistics.median(times[WARM:])


class Copies:
    """The copies of one process: from the device, into shared memory, to the device."""

    def __init__(self, nbytes: int) -> None:
        self._x = jnp.ones(nbytes // 2, jnp.bfloat16)
        self._bytes = np.ones(nbytes, np.uint8)
        self._segment = SharedSegment(nbytes)
        descriptor = os.dup(self._segment.descriptor)
        self._mapped = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        os.close(descriptor)

    def new(self) -> Any:
        return doubled(self._x)  # JAX keeps the copy of an array that was read.

    def compute(self) -> float:
        return median_of(doubled, lambda: self._x)

    def to_host(self) -> float:
        def work(array: Any) -> Any:
            start_copies([array])
            return parts(array)[0].nbytes

        return median_of(work, self.new)

    def to_ordinary_memory(self) -> float:
        return median_of(lambda array: np.asarray(array).nbytes, self.new)

    def to_shared_memory(self) -> float:
        view = memoryview(self._bytes)  # type: ignore[arg-type]
        return median_of(lambda _: self._segment.write(0, view), lambda: None)

    def to_device(self) -> float:
        elements = self._mapped.view(jnp.bfloat16)
        return median_of(lambda _: jax.device_put(elements), lambda: None)

    def close(self) -> None:
        self._segment.shut()


class Hops:
    """Hops of a plan from the caller to a worker process."""

    def __init__(self, cluster: Cluster, program: Any, make: Callable) -> None:
        self._step = jdag.compile(program, cluster)
        self._make = make

    def seconds(self, nbytes: int) -> float:
        large, small = self._make(nbytes), self._make(SMALL_BYTES)
        times: list[tuple[float, float]] = []
        for number in range(WARM + REPEATS):
            of_large = seconds(partial(self._step, large))
            times.append((of_large, seconds(partial(self._step, small))))
            if number < WARM:
                time.sleep(REST_S)
        columns = zip(*times[WARM:], strict=True)
        of_large, of_small = [statistics.median(column) for column in columns]
        return of_large - of_small


def host_array(nbytes: int) -> Any:
    return np.ones(nbytes // 4, np.float32)


def put_on(cluster: Cluster, nbytes: int) -> Any:
    array = jnp.ones(nbytes // 2, jnp.bfloat16)
    return cluster.put(WORKERS[0], array, tracked=False)


def measured(device: str, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield all results so far after each size."""
    rows: list[dict[str, Any]] = []
    launch = partial(jdag.launch, WORKERS, allow=["paper"])
    with launch(device="cpu") as host, launch(device=device) as on_device:
        wire = Hops(host, received, host_array)
        whole = Hops(on_device, computed, partial(put_on, on_device))
        for nbytes in sizes:
            copies = Copies(nbytes)
            measures: dict[str, Callable[[], float]] = {
                "compute": copies.compute,
                "to host": copies.to_host,
                "to host, ordinary memory": copies.to_ordinary_memory,
                "into shared memory": copies.to_shared_memory,
                "wire": partial(wire.seconds, nbytes),
                "to device": copies.to_device,
                "whole hop": partial(whole.seconds, nbytes),
            }
            taken, failed = {}, {}
            for name, measure in measures.items():
                try:
                    taken[name] = measure()
                except Exception as error:
                    failed[name] = repr(error)
            copies.close()
            if not set(PARTS) - set(taken):
                taken["sum of parts"] = sum([taken[name] for name in PARTS])
            rows.append({"bytes": nbytes, "seconds": taken, "failed": failed})
            yield {"device": jax.devices()[0].device_kind, "sizes": rows}


def main() -> None:
    """Print the results after each size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    for found in measured(asked.device, TINY_SIZES if asked.tiny else SIZES):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    from paper import gpu_hop  # Workers cannot import functions of __main__.

    gpu_hop.main()
