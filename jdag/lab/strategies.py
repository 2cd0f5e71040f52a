"""Strategies of `jdag.explore`. A strategy picks one of the steps that may come next.

A strategy's `begin` starts a run and returns a function, or None if no run is left. The
function takes a list of steps (`jdag.sim.untimed.PossibleStep`) and returns the index
of the picked step. `planned(steps)` receives the number of picks of the default run, in
which every pick is the first step. `ended(steps)` receives the number of picks of each
finished run. Custom strategies derive from `Strategy`.

Invariants: picks are a function of the strategy's arguments, the run number and the
steps, in any process. An exception is `Exhaustive`, where a run depends on the run
before.
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
_DEPTH_MAX = 100  # Even bugs of depth 10 are hardly ever found.
_DEPTH = Annotated[int, Meta(ge=1, le=_DEPTH_MAX)]
# Steps that depend on steps of all workers: a rejoin changes each engine, and a crash
# may happen as long as any other step may.
EVERYWHERE = ("crash", "rejoin")


class Redundant(BaseException):
    """Raised to end a run whose continuations have all been explored."""


class Strategy:
    """Base class of strategies. It always picks the first step.

    `learned` is the state that determines the bound and the next runs, as integers.
    `learn` restores this state in another process.
    """

    @property
    def learned(self) -> tuple[int, ...]:
        """State that is kept from run to run."""
        return ()

    def learn(self, learned: Sequence[int]) -> None:
        """Restore the `learned` state of another strategy of this class."""

    def planned(self, steps: int) -> None:
        """Receive the number of picks of the default run, before the first run."""

    def begin(self, run: int) -> Pick | None:
        """Return the pick function of run `run` (0, 1, ...). None: no run is left."""
        del run
        return lambda steps: 0

    def ended(self, steps: int) -> None:
        """Receive the number of picks of a finished run."""

    def bound(self) -> str:
        """Return the strategy's guarantee as one line for the report, or ""."""
        return ""


class RandomWalk(Strategy):
    """Picks at random, by a seed. All steps but faults have the same probability.

    Faults are less likely, so that they may happen at any time of the run: on average,
    one fault of each kind in the budget happens in as many picks as the default run
    has. With the probability of other steps, most faults would happen at the start.
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
            # A draw as by `randrange`, but faster.
            return int(random.random() * count)

        return pick


class PCT(Strategy):
    """Gives links, devices and programs random priorities, and picks the highest.

    Before `depth` - 1 random picks, the highest priority becomes the lowest. If a bug
    needs `depth` steps in a certain order within the first k picks, one run finds it
    with a probability of at least 1 / (n k^(depth-1)). n is the number of links,
    devices and programs, called chains. k is 1.5 times the number of picks of the
    default run. Faults happen as in `RandomWalk`.

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
        """The largest number of chains of a run so far, and k."""
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
        lowest = {pick_index: -1 - number for number, pick_index in enumerate(changes)}
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
        """The denominator n k^(depth-1) of the bound, with the largest n of any run."""
        return int(self._chains * self._planned ** (self._depth - 1))

    def bound(self) -> str:
        """See `Strategy`."""
        where = f"{self._chains} chains, first {self._planned} steps"
        return (
            f"each run finds a bug of depth {self._depth} with probability at least "
            f"1/{self.runs_per_bug:,} ({where})"
        )


class Exhaustive(Strategy):
    """Runs every order once. Orders that no worker can distinguish count as one order.

    Stops after `max_runs` runs. Two steps depend on each other if they are on the same
    worker, or if one of them is a crash or a rejoin. Two orders count as one if they
    differ only in the order of independent steps (sleep sets: Godefroid, "Partial-Order
    Methods for the Verification of Concurrent Systems", 1996).
    """

    def __init__(self, max_runs: int = 100_000) -> None:
        self.max_runs = converted(COUNT, max_runs, "max_runs")
        # For each pick of the run: the steps, the picked index, and the sleep set.
        self._path: list[
            tuple[tuple[PossibleStep, ...], int, frozenset[PossibleStep]]
        ] = []
        self._prefix: tuple[int, ...] = ()  # Picks that another process learned.
        self.complete = False  # Whether every order has been seen.

    @property
    def learned(self) -> tuple[int, ...]:
        """The picks with which the next run starts, or () after the last run."""
        return self._prefix or tuple([index for _, index, _ in self._path])

    def learn(self, learned: Sequence[int]) -> None:
        """See `Strategy`."""
        self._path, self._prefix = [], tuple(learned)
        self.complete = not self._prefix

    def begin(self, run: int) -> Pick | None:
        """See `Strategy`."""
        if self.complete or run >= self.max_runs:
            return None
        path, prefix, depth, is_over = self._path, self._prefix, 0, False
        self._prefix = ()

        def pick(steps: tuple[PossibleStep, ...]) -> int:
            nonlocal depth, is_over
            if is_over:  # Again: leaving the context makes further picks.
                raise Redundant
            if depth < len(path):
                if path[depth][0] != steps:
                    raise ScenarioError(
                        "strategy = 'exhaustive': the program differs from run to run; "
                        "expected a program that depends only on its order of events"
                    )
            elif depth < len(prefix):
                seen = frozenset(steps[: prefix[depth]])
                path.append((steps, prefix[depth], self._asleep() | seen))
            else:
                path.append((steps, -1, self._asleep()))
                if is_over := not self._next():
                    raise Redundant
            depth += 1
            return path[depth - 1][1]

        return pick

    def ended(self, steps: int) -> None:
        """See `Strategy`."""
        while self._path and not self._next():
            continue  # Until a path has not been tried.
        self.complete = not self._path

    def _asleep(self) -> frozenset[PossibleStep]:
        """Return the sleep set after the path: steps whose runs were all explored."""
        if not self._path:
            return frozenset()
        steps, index, asleep = self._path[-1]
        picked = steps[index]
        return frozenset([step for step in asleep if not _dependent(step, picked)])

    def _next(self) -> bool:
        """Replace the path's last pick by the next step outside of the sleep set."""
        steps, index, asleep = self._path.pop()
        if index >= 0:
            asleep |= {steps[index]}
        for candidate in range(index + 1, len(steps)):
            if steps[candidate] not in asleep:
                self._path.append((steps, candidate, asleep))
                return True
        return False

    def bound(self) -> str:
        """See `Strategy`."""
        if self.complete:
            return "every order was run"
        return f"orders remain, since runs or max_runs = {self.max_runs:,} was reached"


class Script(Strategy):
    """Repeats the picks of an earlier run, then picks the first step. Has one run."""

    def __init__(self, choices: Sequence[int]) -> None:
        indices = choices if isinstance(choices, Sequence) else [None]
        if not all(type(choice) is int and choice >= 0 for choice in indices):
            raise ScenarioError(unusable("choices", choices, "a list of integers >= 0"))
        self._choices = tuple(choices)

    def begin(self, run: int) -> Pick | None:
        """See `Strategy`."""
        return None if run else self.pick

    @property
    def pick(self) -> Pick:
        """A pick function for one run, from its start."""
        choices = iter(self._choices)
        return lambda steps: min(next(choices, 0), len(steps) - 1)


def parsed_strategy(text: str) -> Strategy:
    """Parse "random[:SEED]", "pct[:DEPTH]" or "exhaustive[:MAX_RUNS]"."""
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
    """Decide whether a fault happens next.

    Returns the number of steps that are not faults, and the index of the fault to pick,
    or None. Faults are last among the steps. On average, one fault of each kind happens
    in `picks` picks.
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


def _dependent(first: PossibleStep, second: PossibleStep) -> bool:
    everywhere = first.kind in EVERYWHERE or second.kind in EVERYWHERE
    return everywhere or first.worker == second.worker
