"""Plans run in virtual time, held against plain JAX.

Which passes end stuck or spent, and what is owed, is for the engine's random programs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdag import Cluster, sim, simulate
from jdag.api.oracle import pullback
from jdag.errors import GraphError, UnusedSendError
from tests.tools.random_hooks import numbered
from tests.tools.random_programs import Pass, Plan
from tests.tools.random_source import Record, Source, main_of, source_of

RELATIVE_MAX = 1e-12

Mode = Literal["smart", "fast"]
MODES: tuple[Mode, ...] = ("smart", "fast")
Numbers = float | tuple[float, ...]
Gradients = dict[int, Any]  # By the number of the leaf.


@dataclass
class Ended:
    """How a pass ended: "finished", "stuck" or "spent"; and what is owed."""

    outcome: str
    owed: tuple[Any, ...] = ()


@dataclass
class Result:
    """How one run went: its passes, its gradients after each, what it fetched.

    What hooks saw is there for passes that finish before one fails.
    """

    mode: Mode = "smart"
    record: Record = field(default_factory=Record)
    passes: list[Ended] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    seen: list[Gradients] = field(default_factory=list)  # By hooks, by their ids.
    digest: str = ""
    records: int = 0

    @property
    def bits(self) -> list[Any]:
        found = [
            [(number, bytes_of(array)) for number, array in gradients.items()]
            for gradients in self.gradients
        ]
        notes = [bytes_of(value) for note in self.record.notes for value in note]
        seen = [
            [(hook, bytes_of(array)) for hook, array in one.items()]
            for one in self.seen
        ]
        return [self.record.decisions, self.passes, found, notes, seen]


def bytes_of(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def settings(seed: int, workers: Sequence[str]) -> dict[str, Any]:
    rng = Random(f"settings {seed}")
    device = sim.DeviceModel(
        forward_ns=rng.randrange(3) * 700,
        backward_ns=rng.randrange(3) * 900,
        sum_ns=rng.randrange(2) * 100,
    )
    faults: tuple[sim.Fault, ...] = (
        sim.Drop(rng.choice((0.0, 0.02, 0.1))),
        sim.Duplicate(rng.choice((0.0, 0.05, 0.2)), 3_000),
        sim.Delay(rng.choice((0.0, 0.1, 0.3)), 10, 20_000),
    )
    if len(workers) > 1 and rng.random() < 0.3:
        first, second = rng.sample(workers, 2)
        groups = ((first,), tuple(name for name in workers if name != first))
        if rng.random() < 0.5:
            groups = ((first,), (second,))
        from_ns = rng.randrange(30_000)
        faults = (*faults, sim.Partition(groups, from_ns, from_ns + 50_000))
    link = sim.LinkModel(
        latency_ns=500,
        jitter_ns=rng.choice((0, 300, 5_000)),
        bandwidth_bytes_per_s=rng.choice((None, 100_000_000)),
    )
    return {
        "seed": seed,
        "network": link,
        "devices": device,
        "faults": faults,
        "policy": rng.choice(("path", "backward_first")),
    }


def arrays(given: Sequence[Numbers | None]) -> list[Any]:
    return [None if one is None else _array(one) for one in given]


@lru_cache(maxsize=256, typed=True)
def _array(value: Numbers) -> Any:
    return jnp.array(value)


def put(cluster: Cluster, plan: Plan) -> list[Any]:
    return [cluster.put(leaf.worker, leaf.array) for leaf in plan.leaves]


def run(plan: Plan, source: Source, *, mode: Mode = "smart", **options: Any) -> Result:
    with simulate(plan.workers, home=plan.home, **options) as cluster:
        leaves = put(cluster, plan)
        result = passes(cluster, source, leaves, Result(mode))
        clean(cluster, leaves)
        result.digest = cluster.trace.digest
        result.records = len(cluster.trace)
    return result


def passes(
    cluster: Cluster,
    source: Source,
    leaves: Sequence[Any],
    result: Result,
) -> Result:
    numbers = {leaf: number for number, leaf in enumerate(leaves)}

    def backward(ctx: Any, number: int, roots: list[Any]) -> None:
        step = source.passes[number]
        record = result.record
        record.seen.clear()
        ended = _ended(ctx, step, roots, result.mode)
        record.late = record.late or ended.outcome != "finished"
        result.passes.append(ended)
        result.seen.append({} if record.late else once(record))
        reached = {numbers[leaf]: ref for leaf, ref in ctx.gradients().items()}
        values = jax.tree.map(lambda ref: ref.fetch(), reached)
        result.gradients.append(values)

    main = main_of(source, result.record, backward)
    with cluster.context() as ctx:
        main(ctx, *leaves)
    return result


def once(record: Record) -> Gradients:
    """What each hook was given in this pass: one array, by the hooks' ids."""
    assert [id for id, given in record.seen.items() if len(given) != 1] == []
    return {id: record.seen[id][0] for id in sorted(record.seen)}


def _ended(ctx: Any, step: Pass, roots: list[Any], mode: Mode) -> Ended:
    given = arrays(step.cotangents)
    try:
        ctx.backward(*roots, cotangents=given, retain_graph=step.retain, mode=mode)
    except UnusedSendError as error:
        sends: Any = error.sends
        return Ended("stuck", tuple(sends))
    except GraphError:
        return Ended("spent")
    return Ended("finished")


def clean(cluster: Cluster, leaves: Sequence[Any]) -> None:
    driver: Any = cluster.driver
    driver.settle()
    for worker, held in cluster.info().items():
        mine = sum(leaf.worker == worker for leaf in leaves)
        left = [held[what] for what in ("live_contexts", "live_passes", "values_held")]
        assert left == [0, 0, mine], (worker, left)


def gradients_of(plan: Plan, source: Source, number: int) -> tuple[Record, Any]:
    record = Record()
    smooth = [leaf.array for leaf in plan.leaves if leaf.inexact]
    step = source.passes[number]
    cotangents = arrays(step.cotangents)
    program = roots_of(plan, source, number, record)
    _, gradients = pullback(program)(smooth, cotangents=cotangents)
    return record, gradients


def roots_of(
    plan: Plan, source: Source, number: int, record: Record
) -> Callable[[Any, Any], list[Any]]:
    """A program of the leaves that are floats; returns the roots of one pass."""

    def program(ctx: Any, params: Any) -> list[Any]:
        record.decisions.clear()
        record.notes.clear()
        record.seen.clear()
        found: list[Any] = []

        def backward(_: Any, at: int, roots: list[Any]) -> None:
            if at == number:
                found.extend(roots)

        refs = iter(params)
        given = [
            next(refs)
            if leaf.inexact
            else ctx.call(leaf.worker, jnp.array, np.array(leaf.values))
            for leaf in plan.leaves
        ]
        # What is hooked after this pass is for later ones.
        main_of(source, record, backward, lambda: not found)(ctx, *given)
        return found

    return program


def weighted(cotangents: Sequence[Any], roots: Sequence[Any]) -> Any:
    """A number whose gradient is that of a pass with these cotangents."""
    return sum(
        jnp.sum(root if cotangent is None else root * cotangent)
        for cotangent, root in zip(cotangents, roots, strict=True)
    )


Truths = dict[int, tuple[Record, Any]]  # What gradients_of gives, by the pass.


def check(plan: Plan, result: Result, truths: Truths) -> None:
    """Hold the finished passes of a run against the oracle.

    `truths` has what is known of the plan already, and then what comes to be known.
    """
    source = source_of(plan)
    smooth = [number for number, leaf in enumerate(plan.leaves) if leaf.inexact]
    sums = {number: np.zeros(3) for number in smooth}
    for number, ended in enumerate(result.passes):
        if ended.outcome == "finished":
            if number not in truths:
                truths[number] = gradients_of(plan, source, number)
            record, gradients = truths[number]
            assert record.decisions == result.record.decisions, source.text
            for ours, theirs in zip(result.record.notes, record.notes, strict=True):
                _close(ours, theirs, source)
            if all(one.outcome == "finished" for one in result.passes[:number]):
                ours, theirs = result.seen[number], once(record)
                _hooked(ours, theirs, source)
                more = len(ours) - len(theirs)
                assert result.mode == "fast" or more == 0, source.text
            for leaf, gradient in zip(smooth, gradients, strict=True):
                sums[leaf] = sums[leaf] + np.asarray(gradient)
        found = [result.gradients[number].get(leaf, np.zeros(3)) for leaf in smooth]
        _close(found, [sums[leaf] for leaf in smooth], source)


def _hooked(found: Gradients, truth: Gradients, source: Source) -> None:
    assert [hook for hook in truth if hook not in found] == [], source.text
    for hook, array in found.items():
        if hook in truth:
            _close([array], [truth[hook]], source)
        else:
            assert not np.any(array), (hook, source.text)


def _close(found: Sequence[Any], truth: Sequence[Any], source: Source) -> None:
    for ours, theirs in zip(found, truth, strict=True):
        off = np.max(np.abs(np.asarray(ours) - np.asarray(theirs)))
        largest = np.max(np.abs(np.asarray(theirs)))
        assert off <= RELATIVE_MAX * largest, (off / largest, source.text)


def hold(number: int, seeds: int) -> Result:
    """Draw the program of this number; hold all that must hold of it. Its FAST run.

    It runs undisturbed in both modes, and in one or the other with each of so many
    seeds under jitter and faults; no two runs in one mode may differ in a bit of a
    result, and no two modes as long as FAST finishes.
    """
    plan = numbered(number)
    source = source_of(plan)
    calm = [run(plan, source, mode=mode, seed=number) for mode in MODES]
    truths: Truths = {}
    for result in calm:
        check(plan, result, truths)
    smart, fast = calm
    _agree(smart, fast, source)
    for seed in range(seeds):
        which = seed % len(MODES)
        options = settings(seed, plan.workers)
        disturbed = run(plan, source, mode=MODES[which], **options)
        assert disturbed.bits == calm[which].bits, (number, seed, source.text)
    return fast


def _agree(smart: Result, fast: Result, source: Source) -> None:
    """SMART is never stuck; it finishes where FAST does, with the same bits.

    Leaves that the roots do not need have zeros in FAST, and nothing in SMART; so it is
    with hooks.
    """
    assert not [one for one in smart.passes if one.outcome == "stuck"], source.text
    for number, ended in enumerate(fast.passes):
        if ended.outcome != "finished":
            return
        assert smart.passes[number] == ended, source.text
        for ours, theirs in (
            (smart.gradients[number], fast.gradients[number]),
            (smart.seen[number], fast.seen[number]),
        ):
            assert sorted(ours | theirs) == sorted(theirs), source.text
            for name, array in theirs.items():
                same = ours.get(name, np.zeros_like(array))
                assert bytes_of(same) == bytes_of(array), (name, source.text)
