"""Costs of a scenario's functions and links, measured on processes of this host.

Inputs:  a scenario whose program returns a `Case`.
Outputs: the tables of a file of costs (`jdag.scenario.costs`). Durations of functions
    are those of jobs in steps of the program. Links and jobs: chains of calls of
    `relay`, from worker to worker or on one, take `hop_ns` a call beside the function;
    that is `job_ns` on one worker, and with a link its latency and n / bandwidth more.
Invariants: medians, compilation left out; nothing but time differs between two files
    of the same machine.
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

_Times = Mapping[str, Sequence[Sequence[Any]]]  # What `Node.times` returns.

WARM, STEPS = 3, 15
SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)  # Bytes that travel in a probe.
SHORT, LONG = 2, 10  # Calls in a chain.
_WIDTH = 384  # Of `relay`: it takes longer than jobs that run on the loop.
_TYPES = ("I", "W")


class StepTime(NamedTuple):
    """When a step began, had issued its calls, and was over."""

    began_ns: int
    issued_ns: int
    ended_ns: int

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.ended_ns - self.began_ns


@contextmanager
def in_one_line(scenario: Scenario) -> Iterator[None]:
    """Turn what goes wrong with a scenario into a ScenarioError of one line."""
    with wrong(scenario.path), raising_nothing(scenario.settings.program):
        try:
            yield
        except ScenarioError:
            raise
        except JdagError as error:  # The traceback of a worker follows.
            raise ScenarioError(text_of(error).partition("\n\n")[0]) from error


class CaseSteps:
    """The steps of a case on a cluster: a context with its passes, or one of a plan."""

    def __init__(self, case: Case, cluster: Cluster, *, planned: bool = False) -> None:
        self._case, self._cluster = case, cluster
        self._refs = case.put(cluster)
        fetch(list(self._refs.values()))  # They have arrived.
        self._plan = compile(case.roots, cluster) if planned else None

    def step(self) -> StepTime:
        """Run one step; return its time, of the cluster's clock."""
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
    """Measure what a scenario's program costs on processes of this host.

    Args:
        file: the scenario; its program returns a `Case`, of which some steps are run.
        out: the file of costs to write; None: none.
        device: where workers compute, as of `jdag.launch`.
        steps: how many are measured, after `WARM`.

    Returns:
        The tables of the file: measured, network, devices.

    Raises:
        ScenarioError: one line: an argument is unusable, the file cannot be written, or
            the program is not a `Case` or does not run on processes.
    """
    converted(COUNT, steps, "steps")
    scenario = load(Path(file))
    settings = scenario.settings
    driver = driver_of(settings, "rpc", device=device)
    if out is not None:  # What cannot be written is known before the run.
        with _writing(out):
            is_new = not Path(out).exists()
            Path(out).open("a", encoding="utf-8").close()
            if is_new:
                Path(out).unlink()
    with in_one_line(scenario), configured(settings), closing(driver):
        case = scenario.case
        cluster = driver.cluster(settings.seed, clean=True)
        step_ns, found = measured(CaseSteps(case, cluster), cluster, steps)
        network, job_ns = probe(cluster, settings.names, steps)
    about = {"scenario": settings.name, "step_ns": step_ns}
    tables = {
        "measured": {**about, **_machine()},
        "network": network,
        "devices": {"job_ns": job_ns, **found},
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
    """Return how long steps on processes took, and what functions and calls cost.

    Of the steps the least, the median and the most.
    """
    _ = [steps.step() for _ in range(WARM)], cluster.driver.times()
    taken = [steps.step() for _ in range(count)]
    times = cluster.driver.times()
    calls = sum([n for each in times.values() for _, of, n, _ in each if of == "F"])
    issue_ns = statistics.median([one.issued_ns - one.began_ns for one in taken])
    call_ns = round(issue_ns * count / max(calls, 1))
    took_ns = [one.ns for one in taken]
    middle_ns = round(statistics.median(took_ns))
    costs = {"call_ns": call_ns, **costs_of(times)}
    return [min(took_ns), middle_ns, max(took_ns)], costs


def costs_of(times: _Times) -> dict[str, Any]:
    """Return `sum_ns` and `functions` of a `DeviceModel` from durations on workers.

    A function that was called with several types of inputs has an entry for each, and
    one with their mean. Durations on several workers are averaged, too.
    """
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for name, action, count, ns in [one for each in times.values() for one in each]:
        for key in dict.fromkeys((name, name.partition("(")[0])):
            of = found.setdefault(key, defaultdict(list))
            of[action].append((count, ns))
    means = {
        name: {action: _mean(each) for action, each in of.items()}
        for name, of in sorted(found.items())
    }
    sums = means.pop("", {})
    types = [name.partition("(")[0] for name in means if "(" in name]
    return {
        "sum_ns": sums.get("sum", 0),
        "functions": {
            name: _costs(of)
            for name, of in means.items()
            if "(" not in name or types.count(name.partition("(")[0]) > 1
        },
    }


def _mean(counted: Sequence[tuple[int, int]]) -> int:
    total = sum([count for count, _ in counted])
    return round(sum([count * ns for count, ns in counted]) / total)


def _costs(actions: Mapping[str, int]) -> list[int]:
    """Return F, I and W if they ran apart, else F and B."""
    apart = [actions.get(action, 0) for action in _TYPES]
    back = apart if any(apart) else [actions.get("B", 0)]
    return [actions.get("F", 0), *back]


def fit_link(sizes: Sequence[int], hops_ns: Sequence[float]) -> tuple[int, int | None]:
    """Return latency in ns and bandwidth in bytes/s of hops of so many bytes.

    The alpha-beta model by least squares of relative errors (Hockney 1994); the
    bandwidth is None if the largest message takes no ns longer than an empty one.
    """
    hops = np.maximum(np.asarray(hops_ns, dtype=float), 1.0)
    beta, alpha = np.polyfit(np.asarray(sizes, dtype=float), hops, 1, w=1 / hops)
    rate = max(round(1e9 / beta), 1) if beta * max(sizes) >= 1 else None
    return max(round(alpha), 0), rate


def relay(w: Any, x: Any) -> Any:
    """Pass on a value, after some computing that does not depend on its size."""
    return x * jnp.mean(jnp.tanh(w @ w))


def _total(x: Any) -> Any:
    """A scalar."""
    return jnp.sum(x)


def chain(workers: Sequence[str], length: int, nbytes: int) -> Case:
    """Calls of `relay` one after the other, by turns on the workers, and a sum."""
    on = [workers[number % len(workers)] for number in range(length)]

    def program(ctx: Any, params: Any) -> Any:
        x = params["x"]
        for number, worker in enumerate(on):
            x = ctx.call(worker, relay, params[f"w{number}"], x)
        return ctx.call(on[-1], _total, x)

    params: dict[str, Any] = {f"w{n}": jnp.eye(_WIDTH) for n in range(length)}
    params["x"] = jnp.ones(nbytes // 4, jnp.float32)
    placement = {f"w{number}": worker for number, worker in enumerate(on)}
    return Case(program, params, {**placement, "x": on[0]})


def probe(
    cluster: Cluster, workers: Sequence[str], rounds: int
) -> tuple[dict[str, int], int]:
    """Return the keys of a link between the first two workers, and `job_ns`."""
    here = hop_ns(cluster, workers[1:2] or workers, SIZES[0], rounds)
    job_ns = max(round(here), 0)
    if len(workers) == 1:
        return {}, job_ns
    apart = [hop_ns(cluster, workers[:2], nbytes, rounds) for nbytes in SIZES]
    latency_ns, rate = fit_link(SIZES, [ns - job_ns for ns in apart])
    found = {"latency_ns": latency_ns}
    return (found if rate is None else {**found, "bandwidth_bytes_per_s": rate}), job_ns


def hop_ns(cluster: Cluster, workers: Sequence[str], nbytes: int, rounds: int) -> float:
    """Return what a call, or its vjp, takes beside the function in a chain.

    It is how much longer a step takes for each further call of a chain.
    """
    chains = [CaseSteps(chain(workers, n, nbytes), cluster) for n in (SHORT, LONG)]
    _ = [each.step() for each in chains for _ in range(WARM)], cluster.driver.times()
    taken = [[each.step().ns for each in chains] for _ in range(rounds)]
    found = costs_of(cluster.driver.times())["functions"]
    function_ns: int = sum(found[f"{__name__}:{relay.__name__}"])
    longer: float = statistics.median([long - short for short, long in taken])
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
