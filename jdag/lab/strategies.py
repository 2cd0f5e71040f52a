"""Which of the steps that may happen next does: the strategies of `jdag.explore`.

A strategy is asked to `begin` each run and returns a function that picks the index of
one of some steps (`jdag.sim.untimed.PossibleStep`), or None if nothing is left to try;
`planned(steps)` tells it how many steps the run of first choices has, `ended(steps)`
how many each run had. One of your own derives from `Strategy`.

Invariants: a strategy is a function of its arguments and of the steps that it is shown;
the same run numbers give the same picks, in any process, but for `Exhaustive`, where a
run follows from the one before.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Annotated

from msgspec import Meta

from jdag.errors import ScenarioError, unusable
from jdag.settings.validation import COUNT, NATURAL, converted
from jdag.sim.untimed import PossibleStep

Pick = Callable[[tuple[PossibleStep, ...]], int]
FAULTS = ("crash", "rejoin", "drop", "duplicate")
_DEPTH_MAX = (
    100  # Bugs of even ten steps are hardly found; the bound is a whole number.
)
_DEPTH = Annotated[int, Meta(ge=1, le=_DEPTH_MAX)]
# Dependent on steps of all workers: a return enters each engine, and a crash may happen
# as long as any other step may.
EVERYWHERE = ("crash", "rejoin")


class Redundant(BaseException):
    """Every order that goes on from here has been seen; ends the run."""


class Strategy:
    """Base of strategies; by itself, the first choice everywhere.

    `learned` is what its bound and its next runs depend on, as integers; a strategy
    that is told them by `learn` goes on where another one stopped.
    """

    @property
    def learned(self) -> tuple[int, ...]:
        """What is kept from run to run."""
        return ()

    def learn(self, learned: Sequence[int]) -> None:
        """Take up what another strategy of this kind has learned."""

    def planned(self, steps: int) -> None:
        """The run of first choices has so many picks; told before the first run."""

    def begin(self, run: int) -> Pick | None:
        """What picks in this run, which is the first if it is 0; None: no more runs."""
        del run
        return lambda steps: 0

    def ended(self, steps: int) -> None:
        """A run has ended after so many picks."""

    def bound(self) -> str:
        """What it promises, as a line for the report; "" for nothing."""
        return ""


class RandomWalk(Strategy):
    """Each step with the same probability, by a seed; faults anywhere in the run.

    Of each kind of fault in the budget one comes in as many picks as the run of first
    choices has, on average: with a step's probability it would come at the start.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = converted(NATURAL, seed, "seed")
        self._planned = 1

    def planned(self, steps: int) -> None:
        """See `Strategy`."""
        self._planned = max(1, steps)

    def begin(self, run: int) -> Pick:
        """See `Strategy`."""
        random = Random(f"walk {self._seed} {run}")

        def pick(steps: tuple[PossibleStep, ...]) -> int:
            count = len(steps)
            if steps[-1].kind in FAULTS:
                count, fault = _fault(steps, random, self._planned)
                if fault is not None:
                    return fault
            # As `random` does it, without its loop of draws.
            return int(random.random() * count)

        return pick


class PCT(Strategy):
    """Random priorities of links, devices and programs, changed `depth` - 1 times.

    A bug that needs `depth` steps to come in some order is found by one run with a
    probability of at least 1 / (n k^(depth-1)), for n chains, if it comes in the first
    k picks: half as many again as the run of first choices has. Faults come as in
    `RandomWalk`.

    Source: Burckhardt, Kothari, Musuvathi, Nagarakatte, "A Randomized Scheduler with
    Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.
    """

    def __init__(self, depth: int = 3, seed: int = 0) -> None:
        self._depth = converted(_DEPTH, depth, "depth")
        self._seed = converted(NATURAL, seed, "seed")
        self._chains = 1
        self._planned = 1

    @property
    def learned(self) -> tuple[int, ...]:
        """The most chains that a run had, and the picks with change points."""
        return self._chains, self._planned

    def learn(self, learned: Sequence[int]) -> None:
        """See `Strategy`."""
        chains, self._planned = learned
        self._chains = max(self._chains, chains)

    def planned(self, steps: int) -> None:
        """See `Strategy`."""
        self._planned = max(1, steps + steps // 2)

    def begin(self, run: int) -> Pick:
        """See `Strategy`."""
        random = Random(f"pct {self._seed} {run}")
        priorities: dict[tuple[str, ...], float] = {}
        changes = [random.randrange(self._planned) for _ in range(self._depth - 1)]
        lowest = {at: -1 - number for number, at in enumerate(changes)}
        count = 0

        def pick(steps: tuple[PossibleStep, ...]) -> int:
            nonlocal count
            if steps[-1].kind in FAULTS:
                ordinary, fault = _fault(steps, random, self._planned)
                if fault is not None:
                    return fault
                steps = steps[:ordinary]
            for step in steps:
                if step.chain not in priorities:
                    priorities[step.chain] = random.random()
            self._chains = max(self._chains, len(priorities))
            chosen = _highest(steps, priorities)
            if count in lowest:
                priorities[steps[chosen].chain] = lowest[count]
                chosen = _highest(steps, priorities)
            count += 1
            return chosen

        return pick

    @property
    def runs_per_bug(self) -> int:
        """What the bound is one of: n k^(depth-1), for the most chains of a run."""
        return int(self._chains * self._planned ** (self._depth - 1))

    def bound(self) -> str:
        """See `Strategy`."""
        where = f"{self._chains} chains, first {self._planned} steps"
        return (
            f"each run finds a bug of depth {self._depth} with probability at least "
            f"1/{self.runs_per_bug:,} ({where})"
        )


class Exhaustive(Strategy):
    """Every order once, as far as orders differ to any worker; at most `max_runs`.

    Two steps depend on each other if they are on one worker, or one is a crash or a
    return; orders that differ only in independent steps are one (sleep sets: Godefroid,
    "Partial-Order Methods for the Verification of Concurrent Systems", 1996).
    """

    def __init__(self, max_runs: int = 100_000) -> None:
        self.max_runs = converted(COUNT, max_runs, "max_runs")
        # The path of the run: at each pick the steps, which one, and the asleep ones.
        self._path: list[
            tuple[tuple[PossibleStep, ...], int, frozenset[PossibleStep]]
        ] = []
        self._taken: tuple[int, ...] = ()  # Of a path that another strategy made.
        self.complete = False  # Whether every order has been seen.

    @property
    def learned(self) -> tuple[int, ...]:
        """The picks with which the next run begins; none after the last."""
        return self._taken or tuple([index for _, index, _ in self._path])

    def learn(self, learned: Sequence[int]) -> None:
        """See `Strategy`."""
        self._path, self._taken = [], tuple(learned)
        self.complete = not self._taken

    def begin(self, run: int) -> Pick | None:
        """See `Strategy`."""
        if self.complete or run >= self.max_runs:
            return None
        path, taken, at, is_over = self._path, self._taken, 0, False
        self._taken = ()

        def pick(steps: tuple[PossibleStep, ...]) -> int:
            nonlocal at, is_over
            if is_over:  # The program still leaves its context.
                raise Redundant
            if at < len(path):
                if path[at][0] != steps:
                    raise ScenarioError(
                        "strategy = 'exhaustive': the program does something else in "
                        "each run; allowed is one that its order of events decides"
                    )
            elif at < len(taken):
                seen = frozenset(steps[: taken[at]])
                path.append((steps, taken[at], self._asleep() | seen))
            else:
                path.append((steps, -1, self._asleep()))
                if is_over := not self._next():
                    raise Redundant
            at += 1
            return path[at - 1][1]

        return pick

    def ended(self, steps: int) -> None:
        """See `Strategy`."""
        while self._path and not self._next():
            continue  # To the first path that has not been tried.
        self.complete = not self._path

    def _asleep(self) -> frozenset[PossibleStep]:
        """The steps of which all that follows has been seen, after the path so far."""
        if not self._path:
            return frozenset()
        steps, index, asleep = self._path[-1]
        taken = steps[index]
        return frozenset([step for step in asleep if not _dependent(step, taken)])

    def _next(self) -> bool:
        """Take the next step at the end of the path that is not asleep."""
        steps, index, asleep = self._path.pop()
        if index >= 0:
            asleep |= {steps[index]}
        for other in range(index + 1, len(steps)):
            if steps[other] not in asleep:
                self._path.append((steps, other, asleep))
                return True
        return False

    def bound(self) -> str:
        """See `Strategy`."""
        if self.complete:
            return "every order was run"
        return f"orders are left to run, beyond runs or max_runs = {self.max_runs:,}"


class Script(Strategy):
    """The picks of a former run, once; what follows them are first choices."""

    def __init__(self, choices: Sequence[int]) -> None:
        given = choices if isinstance(choices, Sequence) else [None]
        if not all(type(choice) is int and choice >= 0 for choice in given):
            allowed = "a list of integers >= 0"
            raise ScenarioError(unusable("choices", choices, allowed))
        self._choices = tuple(choices)

    def begin(self, run: int) -> Pick | None:
        """See `Strategy`."""
        return None if run else self.pick

    @property
    def pick(self) -> Pick:
        """What picks in the run, from its begin."""
        left = iter(self._choices)
        return lambda steps: min(next(left, 0), len(steps) - 1)


def parsed_strategy(text: str) -> Strategy:
    """A strategy from "random", "pct:3" or "exhaustive:1000".

    Raises:
        ScenarioError: there is no such strategy, and names those there are; or its
            number is unusable.
    """
    kinds: dict[str, Callable[..., Strategy]]
    kinds = {"random": RandomWalk, "pct": PCT, "exhaustive": Exhaustive}
    name, _, number = text.partition(":")
    is_number = number.isascii() and number.isdigit()
    if name not in kinds or (number and not is_number):
        allowed = "one of random[:SEED], pct[:DEPTH], exhaustive[:MAX_RUNS]"
        raise ScenarioError(unusable("--strategy", text, allowed))
    return kinds[name](*([int(number)] if number else []))


def _fault(
    steps: Sequence[PossibleStep], random: Random, picks: int
) -> tuple[int, int | None]:
    """How many steps are no faults, which come last; the index of one that comes now.

    There is one of each kind in so many picks.
    """
    count = len(steps)
    while count and steps[count - 1].kind in FAULTS:
        count -= 1
    kinds = len({step.kind for step in steps[count:]})
    if count and random.random() * picks >= kinds:
        return count, None
    return count, count + int(random.random() * (len(steps) - count))


def _highest(
    steps: Sequence[PossibleStep], priorities: dict[tuple[str, ...], float]
) -> int:
    return max(range(len(steps)), key=lambda index: priorities[steps[index].chain])


def _dependent(one: PossibleStep, other: PossibleStep) -> bool:
    everywhere = one.kind in EVERYWHERE or other.kind in EVERYWHERE
    return everywhere or one.worker == other.worker
