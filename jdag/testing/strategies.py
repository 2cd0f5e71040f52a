"""Hypothesis strategies: programs, clusters, networks, faults, orders and schedules.

All of them shrink towards the simplest value: one worker, one call, no fault, the
default order.
"""

from typing import Any

from hypothesis import strategies as st

from jdag import schedules as pipelines
from jdag import sim
from jdag.errors import ScenarioError, unusable
from jdag.lab.strategies import FAULTS, PCT, RandomWalk, Strategy
from jdag.testing.drawn import FUNCTIONS, DrawnCall, Program

_NS = 10_000
_NAMES = ("main", "a", "b", "c", "d", "e", "f", "g")


def clusters(
    min_workers: int = 1, max_workers: int = 4
) -> st.SearchStrategy[tuple[str, ...]]:
    """Return a strategy of tuples of worker names. The first, `main`, runs programs."""
    counts = st.integers(min_workers, min(max_workers, len(_NAMES)))
    return counts.map(lambda count: _NAMES[:count])


@st.composite
def programs(
    draw: st.DrawFn,
    workers: st.SearchStrategy[tuple[str, ...]] | None = None,
    max_calls: int = 6,
) -> Program:
    """Draw programs of one context, which apply a few functions to leaves."""
    if not isinstance(workers, st.SearchStrategy | None):
        allowed = "a strategy of worker names, such as clusters(2)"
        raise ScenarioError(unusable("workers", workers, allowed))
    names = draw(clusters() if workers is None else workers)
    places = st.sampled_from(names)
    leaves = draw(st.lists(places, min_size=1, max_size=3).map(tuple))
    calls = []
    for number in range(draw(st.integers(1, max_calls))):
        values = st.integers(0, len(leaves) + number - 1)
        function = draw(st.sampled_from([*FUNCTIONS]))
        calls.append(DrawnCall(draw(places), function, (draw(values), draw(values))))
    return Program(
        names,
        leaves,
        tuple(calls),
        terms=draw(st.integers(1, len(calls))),
        passes=draw(st.integers(1, 2)),
    )


def networks() -> st.SearchStrategy[sim.LinkModel]:
    """Return a strategy of links for `jdag.simulate(network=...)`.

    It draws latency, jitter (up to 10 us) and bandwidth (1e6 to 1e10 B/s, or None).
    """
    return st.builds(
        sim.LinkModel,
        latency_ns=st.integers(0, _NS),
        jitter_ns=st.integers(0, _NS),
        bandwidth_bytes_per_s=st.none() | st.integers(10**6, 10**10),
    )


def faults() -> st.SearchStrategy[tuple[Any, ...]]:
    """Return a strategy of faults for `jdag.simulate` that do not change results."""
    chances = st.floats(0.0, 0.2)
    fault = st.one_of(
        st.builds(sim.Drop, chances),
        st.builds(sim.Duplicate, chances, st.integers(0, _NS)),
        st.builds(sim.Delay, chances, st.just(0), st.integers(1, 2 * _NS)),
    )
    return st.lists(fault, max_size=2).map(tuple)


def fault_budgets() -> st.SearchStrategy[dict[str, int]]:
    """Return a strategy of `{kind of fault: largest number}`, for `jdag.explore`."""
    return st.dictionaries(st.sampled_from(FAULTS), st.integers(0, 1))


def orders() -> st.SearchStrategy[Strategy]:
    """Return a Hypothesis strategy that draws a `strategy` for `jdag.explore`."""
    seeds = st.integers(0, 2**16)
    pct = st.builds(PCT, depth=st.integers(1, 3), seed=seeds)
    return st.builds(RandomWalk, seeds) | pct


@st.composite
def schedules(
    draw: st.DrawFn, max_stages: int = 4, max_micro_batches: int = 6
) -> pipelines.Schedule:
    """Draw one of the published pipeline schedules, with drawn sizes."""
    names = ["gpipe", "one_f_one_b", "eager_one_f_one_b", "zb_h1", "zb_h2"]
    build = getattr(pipelines, draw(st.sampled_from(names)))
    stages = draw(st.integers(1, max_stages))
    schedule: pipelines.Schedule = build(
        stages=stages, micro_batches=draw(st.integers(stages, max_micro_batches))
    )
    return schedule
