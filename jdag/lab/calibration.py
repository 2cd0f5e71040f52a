"""Measures the costs of a scenario's functions and links on processes of this host.

Inputs:  a scenario whose program returns a `Case`.
Outputs: the tables of a cost file (`jdag.scenario.costs`). Durations of functions are
         measured in steps of the program. Links and job overhead are measured with
         chains of calls of `relay`: `hop_ns` is the time of a call minus the time of
         the function itself. If all calls are on one worker, this is `job_ns`. Over a
         link it also includes the latency and n / bandwidth, for n bytes.
Invariants: all values are medians of runs without compilation.
"""

import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdag.api.cluster import Cluster
from jdag.context.refs import fetch
from jdag.errors import JdagError, ScenarioError, reason, text_of, unusable
from jdag.plans.compiling import compile
from jdag.runtime.versions import version_of
from jdag.scenario import Case, Scenario, configured, load
from jdag.scenario.costs import written
from jdag.scenario.driving import driver_of
from jdag.scenario.program import raising_nothing
from jdag.settings.toml_files import wrong
from jdag.settings.validation import COUNT, converted

_Times = Mapping[str, Sequence[Sequence[Any]]]  # As returned by `Node.times`.

WARM, STEPS = 3, 15
SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)  # Bytes of a probe's messages.
SHORT, LONG = 2, 10  # Calls in a chain.
_WIDTH = 384  # Makes `relay` too long to run on the event loop.


class StepTime(NamedTuple):
    began_ns: int
    issued_ns: int
    ended_ns: int

    @property
    def ns(self) -> int:
        return self.ended_ns - self.began_ns


@contextmanager
def in_one_line(scenario: Scenario) -> Iterator[None]:
    with wrong(scenario.path), raising_nothing(scenario.settings.program):
        try:
            yield
        except ScenarioError:
            raise
        except JdagError as error:  # The worker's traceback is left out.
            raise ScenarioError(text_of(error).partition("\n\n")[0]) from error


class CaseSteps:
    """The steps of a case on a cluster: eager contexts, or steps of a compiled plan."""

    def __init__(self, case: Case, cluster: Cluster, *, planned: bool = False) -> None:
        self._case, self._cluster = case, cluster
        self._refs = case.put(cluster)
        fetch(list(self._refs.values()))  # Wait until the parameters have arrived.
        self._plan = compile(case.roots, cluster) if planned else None

    def step(self) -> StepTime:
        cluster, case = self._cluster, self._case
        began_ns = issued_ns = cluster.now_ns
        if self._plan is not None:
            for _ in range(case.passes):
                self._plan.value_and_grad(self._refs)
            return StepTime(began_ns, issued_ns, cluster.now_ns)
        with cluster.context() as ctx:
            roots = case.roots(ctx, self._refs)
            issued_ns = cluster.now_ns
            case.backward(ctx, roots)
            return StepTime(began_ns, issued_ns, cluster.now_ns)


def calibrate(
    file: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    steps: int = STEPS,
) -> dict[str, dict[str, Any]]:
    """Measure the costs of a scenario's program on processes of this host.

    Args:
        file: the scenario; its program returns a `Case`.
        out: path of the cost file to write; None: no file.
        device: the device of the workers, as for `jdag.launch`.
        steps: number of measured steps. Three steps run before, without measurement.

    Returns:
        The tables of the file: measured, network, devices.

    Raises:
        ScenarioError: an argument is unusable, the file cannot be written, or the
            program does not return a `Case` or fails on processes.
    """
    converted(COUNT, steps, "steps")
    scenario = load(Path(file))
    settings = scenario.settings
    driver = driver_of(settings, "rpc", device=device)
    if out is not None:  # Fail before the run if the file cannot be written.
        with _writing(out):
            is_new = not Path(out).exists()
            Path(out).open("a", encoding="utf-8").close()
            if is_new:
                Path(out).unlink()
    with in_one_line(scenario), configured(settings), closing(driver):
        case = scenario.case
        cluster = driver.cluster(settings.seed, clean=True)
        step_ns, device_table = measured(CaseSteps(case, cluster), cluster, steps)
        network, job_ns = probe(cluster, settings.names, steps)
    tables = {
        "measured": {"scenario": settings.name, "step_ns": step_ns, **_machine()},
        "network": network,
        "devices": {"job_ns": job_ns, **device_table},
    }
    if out is not None:
        with _writing(out):
            Path(out).write_text(written(tables), encoding="utf-8")
    return tables


@contextmanager
def _writing(out: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        allowed = f"a file that can be written; {reason(error)}"
        raise ScenarioError(unusable("out", os.fspath(out), allowed)) from error


def measured(
    steps: CaseSteps, cluster: Cluster, count: int
) -> tuple[list[int], dict[str, Any]]:
    """Return [least, median, largest] time of steps in ns, and a device's table."""
    _ = [steps.step() for _ in range(WARM)], cluster.driver.times()
    step_times = [steps.step() for _ in range(count)]
    times = cluster.driver.times()
    calls = sum([n for each in times.values() for _, key, n, _ in each if key == "F"])
    issue_ns = statistics.median([t.issued_ns - t.began_ns for t in step_times])
    call_ns = round(issue_ns * count / max(calls, 1))
    durations_ns = [step.ns for step in step_times]
    middle_ns = round(statistics.median(durations_ns))
    costs = {"call_ns": call_ns, **costs_of(times)}
    return [min(durations_ns), middle_ns, max(durations_ns)], costs


def costs_of(times: _Times) -> dict[str, Any]:
    """Return `sum_ns` and `functions` of a `DeviceModel` from workers' job durations.

    A function that was called with several input types has an entry for each of them,
    and an entry without types with the mean. Durations on several workers are averaged.
    """
    durations: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for name, action, count, ns in [row for rows in times.values() for row in rows]:
        for key in dict.fromkeys((name, name.partition("(")[0])):
            actions = durations.setdefault(key, defaultdict(list))
            actions[action].append((count, ns))
    means = {
        name: {action: _mean(rows) for action, rows in actions.items()}
        for name, actions in sorted(durations.items())
    }
    sums = means.pop("", {})
    types = [name.partition("(")[0] for name in means if "(" in name]
    return {
        "sum_ns": sums.get("sum", 0),
        "functions": {
            name: _costs(actions)
            for name, actions in means.items()
            if "(" not in name or types.count(name.partition("(")[0]) > 1
        },
    }


def _mean(counted: Sequence[tuple[int, int]]) -> int:
    total = sum([count for count, _ in counted])
    return round(sum([count * ns for count, ns in counted]) / total)


def _costs(actions: Mapping[str, int]) -> list[int]:
    """Return [F, I, W] if the halves of the vjp ran separately, otherwise [F, B]."""
    apart = [actions.get(action, 0) for action in ("I", "W")]
    return [actions.get("F", 0), *(apart if any(apart) else [actions.get("B", 0)])]


def fit_link(sizes: Sequence[int], hops_ns: Sequence[float]) -> tuple[int, int | None]:
    """Return latency in ns and bandwidth in bytes/s of a link.

    Fits the alpha-beta model (Hockney 1994) to the times `hops_ns` of messages of these
    sizes in bytes, by least squares of relative errors. The bandwidth is None if the
    largest message takes no longer than an empty one.
    """
    hops = np.maximum(np.asarray(hops_ns, dtype=float), 1.0)
    beta, alpha = np.polyfit(np.asarray(sizes, dtype=float), hops, 1, w=1 / hops)
    rate = max(round(1e9 / beta), 1) if beta * max(sizes) >= 1 else None
    return max(round(alpha), 0), rate


def relay(w: Any, x: Any) -> Any:
    """Return `x` times a scalar. The time to compute the scalar depends only on `w`."""
    return x * jnp.mean(jnp.tanh(w @ w))


def _total(x: Any) -> Any:
    return jnp.sum(x)


def chain(workers: Sequence[str], length: int, nbytes: int) -> Case:
    """Return a case of consecutive calls of `relay` on the workers in turn."""
    owners = [workers[number % len(workers)] for number in range(length)]

    def program(ctx: Any, params: Any) -> Any:
        x = params["x"]
        for number, worker in enumerate(owners):
            x = ctx.call(worker, relay, params[f"w{number}"], x)
        return ctx.call(owners[-1], _total, x)

    params: dict[str, Any] = {f"w{n}": jnp.eye(_WIDTH) for n in range(length)}
    params["x"] = jnp.ones(nbytes // 4, jnp.float32)
    placement = {f"w{number}": worker for number, worker in enumerate(owners)}
    return Case(program, params, {**placement, "x": owners[0]})


def probe(
    cluster: Cluster, workers: Sequence[str], rounds: int
) -> tuple[dict[str, int], int]:
    """Measure the link of the first two workers; return its settings and `job_ns`."""
    local_ns = hop_ns(cluster, workers[1:2] or workers, SIZES[0], rounds)
    job_ns = max(round(local_ns), 0)
    if len(workers) == 1:
        return {}, job_ns
    hops_ns = [hop_ns(cluster, workers[:2], nbytes, rounds) for nbytes in SIZES]
    latency_ns, rate = fit_link(SIZES, [ns - job_ns for ns in hops_ns])
    link = {"latency_ns": latency_ns}
    return (link if rate is None else {**link, "bandwidth_bytes_per_s": rate}), job_ns


def hop_ns(cluster: Cluster, workers: Sequence[str], nbytes: int, rounds: int) -> float:
    """Return what a further call, or vjp, adds to a step, less the function's time."""
    chains = [CaseSteps(chain(workers, n, nbytes), cluster) for n in (SHORT, LONG)]
    _ = [each.step() for each in chains for _ in range(WARM)], cluster.driver.times()
    step_times = [[each.step().ns for each in chains] for _ in range(rounds)]
    functions = costs_of(cluster.driver.times())["functions"]
    function_ns: int = sum(functions[f"{__name__}:{relay.__name__}"])
    longer: float = statistics.median([long - short for short, long in step_times])
    return (longer / (LONG - SHORT) - function_ns) / 2


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
    return {
        "machine": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: version_of(name) for name in ("jax", "jdag")},
    }
