"""Random plans of functions of ints, for the engines of a `PlanNet`."""

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

from jdag.engine.protocol import (
    ContextId,
    LeafId,
    Outgoing,
    Prepare,
    Segment,
    Slotted,
)
from tests.tools.plan_net import PlanNet

PLAN = ContextId(0, 7, 0)  # Its owner is a.
MODULUS = 1_000_003


def summed(weights: Sequence[int], count: int) -> Any:
    """A function of ints with one or two outputs; the order of inputs matters."""

    def one(*inputs: int) -> tuple[int]:
        return (sum(w * x for w, x in zip(weights, inputs, strict=True)) % MODULUS,)

    def two(*inputs: int) -> tuple[int, int]:
        (first,) = one(*inputs)
        return first, 3 * first + 1

    return two if count == 2 else one


class RandomPlan:
    """A plan over workers a, b and c, and its steps in plain Python."""

    def __init__(self, net: PlanNet, seed: int) -> None:
        self.rng = rng = Random(f"plan {seed}")
        self.leaves: dict[LeafId, int] = {}  # With the values of now.
        self._slots: dict[LeafId, int] = {}
        self._calls: list[tuple[str, Any, tuple[int, ...], tuple[int, ...]]] = []
        self._stages: dict[LeafId, int] = {}
        self._net = net
        homes, count = {}, 1  # Slot 0 is the input.
        for worker in "abc":
            for _ in range(rng.randrange(3)):
                value = rng.randrange(9)
                leaf = net.put(worker, value)
                self.leaves[leaf] = value
                self._slots[leaf], homes[count] = count, worker
                count += 1
        for number in range(rng.randint(2, 7)):
            worker, slots = rng.choice("abc"), [0, *homes]
            needs = rng.sample(slots, min(len(slots), rng.randint(1, 3)))
            if number == 0 and 0 not in needs:
                needs.append(0)
            makes = tuple(range(count, count + rng.randint(1, 2)))
            count = self._call(worker, needs, makes)
            homes.update(dict.fromkeys(makes, worker))
        made = [slot for slot in homes if slot not in self._slots.values()]
        results = *rng.sample([*homes], rng.randint(1, 2)), made[-1]
        self.results = [*dict.fromkeys(results)]
        for leaf, slot in self._slots.items():
            if rng.random() < 0.7:
                self._stages[leaf] = count
                count = self._call(leaf.worker, [slot, rng.choice(made)], (count,))
        self._prepare(homes)

    def _call(self, worker: str, needs: Sequence[int], makes: tuple[int, ...]) -> int:
        weights = [self.rng.randint(1, 99) for _ in needs]
        self._calls.append((worker, summed(weights, len(makes)), (*needs,), makes))
        return makes[-1] + 1

    def _prepare(self, homes: dict[int, str]) -> None:
        readers: dict[int, dict[str, None]] = defaultdict(dict)
        for worker, _, needs, _ in self._calls:
            for slot in needs:
                readers[slot][worker] = None
        for slot in self.results:
            readers[slot]["a"] = None

        def hops(slots: Sequence[int], home: str) -> tuple[Outgoing, ...]:
            by_worker: dict[str, list[int]] = defaultdict(list)
            for slot in slots:
                for worker in readers[slot]:
                    if worker != home:
                        by_worker[worker].append(slot)
            return tuple(Outgoing(w, (*some,)) for w, some in by_worker.items())

        parts = []
        for home in "abc":
            leaves = {
                leaf: slot
                for leaf, slot in self._slots.items()
                if leaf.worker == home and readers[slot]
            }
            stages = {leaf: n for leaf, n in self._stages.items() if leaf in leaves}
            segments = []
            for slot in leaves.values():
                if sent := hops((slot,), home):
                    segments.append(Segment(None, (slot,), (), sent))
            for worker, function, needs, makes in self._calls:
                if worker == home:
                    segments.append(Segment(function, needs, makes, hops(makes, home)))
            updates = [
                index
                for index, segment in enumerate(segments)
                if segment.makes and segment.makes[0] in stages.values()
            ]
            has_end = not all(segment.hops for segment in segments)
            part = Prepare(
                PLAN,
                0,
                tuple(segments),
                (),
                tuple(Slotted(leaf, slot) for leaf, slot in leaves.items()),
                tuple(Slotted(leaf, slot) for leaf, slot in stages.items()),
                tuple(updates),
                has_end,
            )
            if segments:
                parts.append((home, part))
        self.parts = dict(parts)
        self._net.plan(parts, self.results, {}, "".join(readers[0]))

    def step(self, x: int) -> tuple[list[int], dict[LeafId, int]]:
        """Return the results of a step, and the leaves after it."""
        values = {0: x} | {n: self.leaves[leaf] for leaf, n in self._slots.items()}
        for _, function, needs, makes in self._calls:
            outputs = function(*[values[slot] for slot in needs])
            values.update(zip(makes, outputs, strict=True))
        staged = {leaf: values[slot] for leaf, slot in self._stages.items()}
        return [values[slot] for slot in self.results], {**self.leaves, **staged}
