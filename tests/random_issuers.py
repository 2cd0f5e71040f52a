"""Random programs that several drivers run over the same workers at once."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from jdag import Cluster, simulate
from tests.random_hooks import with_hooks
from tests.random_programs import WORKERS_MAX, Plan, draw
from tests.random_runs import (
    MODES,
    Mode,
    Result,
    check,
    clean,
    passes,
    put,
    run,
    settings,
)
from tests.random_source import Source, source_of

Drawn = Sequence[tuple[str, Plan, Source]]  # Each with the worker that issues it.


def drawn(
    rng: Random, workers: tuple[str, ...], most: int, *, hooks: bool = False
) -> Drawn:
    """Some programs over these workers, each issued by another of them."""
    plans = [draw(rng, workers) for _ in range(rng.randint(2, most))]
    if hooks:
        plans = [with_hooks(plan, rng) for plan in plans]
    issuers = rng.sample(workers, len(plans))
    issued = [
        replace(plan, home=name) for name, plan in zip(issuers, plans, strict=True)
    ]
    return [(plan.home, plan, source_of(plan)) for plan in issued]


def playing(results: dict[str, Result], plan: Plan, source: Source, mode: Mode) -> Any:
    """The whole of a program, leaves included, for `Cluster.run`."""

    def play(cluster: Cluster) -> None:
        results[cluster.here] = Result(mode)
        leaves = put(cluster, plan)
        passes(cluster, source, leaves, result=results[cluster.here])
        cluster.drop(leaves)

    return play


def together(
    drawn: Drawn, workers: tuple[str, ...], mode: Mode = "smart", **options: Any
) -> tuple[dict[str, list[Any]], str]:
    """All these at once; for each all that no other may change, and the digest."""
    results: dict[str, Result] = {}
    with simulate(workers, **options) as cluster:
        cluster.run(
            {name: playing(results, plan, source, mode) for name, plan, source in drawn}
        )
        clean(cluster, [])
        bits = {name: result.bits for name, result in results.items()}
        return bits, cluster.trace.digest


def beside_each_other(number: int) -> str:
    """Hold that each of several programs at once has the bits that it has alone.

    Those are the oracle's. It is one mode for all; some have hooks.
    """
    rng = Random(f"drivers {number}")
    workers = tuple("abcdef"[: rng.randint(2, WORKERS_MAX)])
    mode = rng.choice(MODES)
    programs = drawn(rng, workers, min(3, len(workers)), hooks=rng.random() < 0.5)
    alone = {}
    for name, plan, source in programs:
        result = run(plan, source, mode=mode, seed=0)
        check(plan, result)
        alone[name] = result.bits
    assert together(programs, workers, mode, seed=number)[0] == alone
    for seed in (number, number + 1):
        options = settings(seed, workers)
        assert together(programs, workers, mode, **options)[0] == alone, seed
    return f"{len(programs)}, {mode}"
