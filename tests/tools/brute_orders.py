"""All orders of a small program, by brute force: no sleep sets, no order of picks.

What a worker sees of a prefix of a run is its own steps, in their order; crashes and
returns come before or after steps of all workers. Prefixes in which all workers see the
same are one class. A search extends each class by every step that it enables, and ends
where a class is met again; what it enables must not depend on the way there.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdag.lab.exploration import order_of, sound
from jdag.lab.strategies import Redundant
from jdag.lab.subject import Subject
from jdag.scenario import Case
from jdag.sim.untimed import PossibleStep


def total(*terms: Any) -> Any:
    return jnp.sin(sum(jnp.sum(term) for term in terms))


def case_of(owner: str, *calls: tuple[str, tuple[int, ...]]) -> Case:
    """A case of one leaf and calls, (worker, arguments): 0 is the leaf, 1 a call.

    Values that no call takes are roots.
    """
    taken = {number for _, arguments in calls for number in arguments}

    def program(ctx: Any, params: Any) -> Any:
        values = [params["w"]]
        for worker, arguments in calls:
            values.append(ctx.call(worker, total, *[values[n] for n in arguments]))
        return [value for n, value in enumerate(values) if n not in taken]

    return Case(program, {"w": np.array([0.1, 0.7, 1.3], np.float32)}, {"w": owner})


# Two workers and two calls; "a" has the main program.
TWO_CALLS = {
    "there, then here": case_of("b", ("b", (0, 0)), ("a", (1,))),
    "here, then there": case_of("b", ("a", (0, 0)), ("b", (1,))),
    "chain there": case_of("b", ("b", (0, 0)), ("b", (1,))),
    "chain here": case_of("b", ("a", (0, 0)), ("a", (1,))),
    "fan-out there": case_of("b", ("b", (0,)), ("b", (0,))),
    "own leaf, here, then there": case_of("a", ("a", (0, 0)), ("b", (1,))),
    "own leaf, chain there": case_of("a", ("b", (0, 0)), ("b", (1,))),
    "own leaf, fan-out there": case_of("a", ("b", (0,)), ("b", (0,))),
    "own leaf, fan-out to both": case_of("a", ("a", (0,)), ("b", (0,))),
}


def seen_of(steps: Iterable[PossibleStep]) -> Any:
    seen: dict[str, list[tuple[int, PossibleStep]]] = {}
    everywhere = 0
    for step in steps:
        seen.setdefault(step.worker, []).append((everywhere, step))
        everywhere += step.kind in ("crash", "rejoin")
    return tuple((worker, *seen[worker]) for worker in sorted(seen))


def searched(subject: Subject) -> dict[Any, bytes]:
    enabled: dict[Any, frozenset[PossibleStep]] = {}
    ended: dict[Any, bytes] = {}
    left: list[list[PossibleStep]] = [[]]  # Prefixes to go on from.
    while left:
        run = Run(left.pop(), enabled)
        played = subject.play(run.pick)
        left += run.others
        if played.explored is not None:
            sound(played.explored)
            ended[seen_of(run.taken)] = order_of(run.taken)
    return ended


class Run:
    """A prefix, and then the first step everywhere, until a class is known.

    `others` are the prefixes that were passed by.
    """

    def __init__(
        self, prefix: list[PossibleStep], enabled: dict[Any, frozenset[PossibleStep]]
    ) -> None:
        self.taken: list[PossibleStep] = []
        self.others: list[list[PossibleStep]] = []
        self._prefix, self._enabled, self._is_over = prefix, enabled, False

    def pick(self, steps: tuple[PossibleStep, ...]) -> int:
        step = steps[0]
        if len(self.taken) < len(self._prefix):
            step = self._prefix[len(self.taken)]
        elif self._is_over or not self._is_new(steps):
            self._is_over = True  # The program still leaves its context.
            raise Redundant
        self.taken.append(step)
        return steps.index(step)

    def _is_new(self, steps: tuple[PossibleStep, ...]) -> bool:
        seen, now = seen_of(self.taken), frozenset(steps)
        assert len(now) == len(steps), f"equal steps: {steps}"
        before = self._enabled.setdefault(seen, now)
        assert before == now, (self.taken, steps)
        if before is now:
            self.others += [[*self.taken, other] for other in steps[1:]]
        return before is now
