"""Faults of a run, as its chooser decides: verdicts on frames and on workers.

Inputs:  `verdict(source, destination, now_ns, chooser)`, for each frame as it leaves.
Outputs: how often and how much late it arrives, and which faults made it so; how much
         slower a worker computes (`stretched_ns`); all `crashes`.

A fault on frames applies to those that leave in `from_ns <= now < until_ns` (None: for
ever), from `source` to `destination` (None: any). Partitions come first, then the
faults in the order of the list: a drop ends the matter, delays add up, a duplicate adds
a copy that is never earlier than the first.

Invariants: the chooser is asked only where a fault applies and its outcome or amount is
open (a probability of 0 or 1 is not); a verdict depends on its arguments and on the
chooser's answers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import assert_never

from jdag.errors import ScenarioError, unusable
from jdag.runtime.chooser import Chooser
from jdag.runtime.tables import NS, is_ns, number


@dataclass(frozen=True, slots=True)
class Drop:
    """A frame is lost with this probability."""

    probability: float
    source: str | None = None
    destination: str | None = None
    from_ns: int = 0
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Delay:
    """With this probability a frame is late by `delay_min_ns` to `delay_max_ns`."""

    probability: float
    delay_min_ns: int
    delay_max_ns: int
    source: str | None = None
    destination: str | None = None
    from_ns: int = 0
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Duplicate:
    """With this probability a frame comes again, up to `delay_max_ns` later."""

    probability: float
    delay_max_ns: int = 0
    source: str | None = None
    destination: str | None = None
    from_ns: int = 0
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """No frame passes between two of `groups`; repaired at `until_ns` (None: never).

    A worker in none of the groups reaches all of them.
    """

    groups: tuple[tuple[str, ...], ...]
    from_ns: int = 0
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker stops, and all it held is gone.

    It happens at `at_ns`, or when the trace has `at_index` events; exactly one of the
    two is given. The others are notified `detect_ns` later. The worker joins again,
    empty, `restart_ns` after the crash (None: never). Ignored if the worker is down.
    """

    worker: str
    detect_ns: int
    at_ns: int | None = None
    at_index: int | None = None
    restart_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Slow:
    """Jobs that a worker starts in this time take `factor` times as long."""

    worker: str
    factor: float
    from_ns: int = 0
    until_ns: int | None = None


FrameFault = Drop | Delay | Duplicate
Fault = FrameFault | Partition | Crash | Slow
_KINDS = (Drop, Delay, Duplicate, Partition, Crash, Slow)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of a frame: one extra delay for each copy that arrives.

    `copies` is () for a lost frame, (0,) for an unaffected one, (0, 7) for one that is
    duplicated 7 ns later. `causes` names the faults that applied.
    """

    copies: tuple[int, ...]
    causes: tuple[str, ...] = ()


DELIVERED = Verdict((0,))


class Faults:
    """All faults of one run.

    Raises:
        ScenarioError: names every unusable value and unknown worker, with what is
            allowed, in one line.
    """

    __slots__ = ("_frame_faults", "_partitions", "crashes", "slow")

    def __init__(self, faults: Sequence[Fault], workers: Sequence[str]) -> None:
        wrong = [
            text
            for index, fault in enumerate(faults)
            for text in _problems(f"faults[{index}]", fault, tuple(workers))
        ]
        self.crashes = tuple(f for f in faults if isinstance(f, Crash))
        for worker in workers:
            of = [crash for crash in self.crashes if crash.worker == worker]
            if any(crash.restart_ns is None for crash in of[:-1]):
                allowed = f"one crash of {worker}: it does not come back"
                wrong.append(unusable("faults", len(of), allowed))
        if wrong:
            raise ScenarioError("; ".join(wrong))
        self._partitions = tuple(
            (f.from_ns, f.until_ns, {w: n for n, g in enumerate(f.groups) for w in g})
            for f in faults
            if isinstance(f, Partition)
        )
        self._frame_faults = tuple(f for f in faults if isinstance(f, FrameFault))
        self.slow = tuple(f for f in faults if isinstance(f, Slow))

    @property
    def on_frames(self) -> bool:
        """Whether any fault concerns frames; if not, `verdict` need not be called."""
        return bool(self._partitions or self._frame_faults)

    def verdict(
        self, source: str, destination: str, now_ns: int, chooser: Chooser
    ) -> Verdict:
        """Return the fate of a frame that leaves now."""
        for from_ns, until_ns, group_of in self._partitions:
            if _during(now_ns, from_ns, until_ns):
                here, there = group_of.get(source), group_of.get(destination)
                if here is not None and there is not None and here != there:
                    return Verdict((), ("partition",))
        delay_ns = 0
        again: list[int] = []
        causes: list[str] = []
        for fault in self._frame_faults:
            if not _befalls(fault, source, destination, now_ns, chooser):
                continue
            match fault:
                case Drop():
                    return Verdict((), (*causes, "drop"))
                case Delay():
                    delay_ns += _drawn(fault.delay_min_ns, fault.delay_max_ns, chooser)
                    causes.append("delay")
                case Duplicate():
                    again.append(_drawn(0, fault.delay_max_ns, chooser))
                    causes.append("duplicate")
                case _:
                    assert_never(fault)
        if not causes:
            return DELIVERED
        copies = (delay_ns, *(delay_ns + more_ns for more_ns in again))
        return Verdict(copies, tuple(causes))

    def stretched_ns(self, worker: str, duration_ns: int, now_ns: int) -> int:
        """How long `worker` takes for what it starts now, unslowed `duration_ns`."""
        for slow in self.slow:
            if slow.worker == worker and _during(now_ns, slow.from_ns, slow.until_ns):
                duration_ns = round(duration_ns * slow.factor)
        return duration_ns


def _during(now_ns: int, from_ns: int, until_ns: int | None) -> bool:
    return from_ns <= now_ns and (until_ns is None or now_ns < until_ns)


def _befalls(
    fault: FrameFault, source: str, destination: str, now_ns: int, chooser: Chooser
) -> bool:
    if fault.source is not None and fault.source != source:
        return False
    if fault.destination is not None and fault.destination != destination:
        return False
    if not _during(now_ns, fault.from_ns, fault.until_ns):
        return False
    if fault.probability in (0, 1):
        return fault.probability == 1
    return chooser.chance(fault.probability)


def _drawn(least_ns: int, most_ns: int, chooser: Chooser) -> int:
    return least_ns if least_ns == most_ns else chooser.amount(least_ns, most_ns)


_OPEN = ("source", "destination", "until_ns", "at_ns", "at_index", "restart_ns")


def _problems(key: str, fault: Fault, workers: tuple[str, ...]) -> list[str]:
    if not isinstance(fault, _KINDS):
        allowed = "one of " + ", ".join(kind.__name__ for kind in _KINDS)
        return [unusable(key, fault, allowed)]
    wrong: list[str] = []
    for field in fields(fault):
        value = getattr(fault, field.name)
        if value is None and field.name in _OPEN:
            continue
        usable, allowed = _rule(field.name, value, workers)
        if not usable:
            wrong.append(unusable(f"{key}.{field.name}", value, allowed))
    # Combinations of fields are checked once each field is valid.
    return wrong or _contradictions(key, fault)


def _rule(name: str, value: object, workers: tuple[str, ...]) -> tuple[bool, str]:
    """Whether a field's value is usable, and what is allowed."""
    match name:
        case "source" | "destination" | "worker":
            return value in workers, "one of " + ", ".join(workers)
        case "groups":
            allowed = "two groups or more, none shared, of " + ", ".join(workers)
            return _are_groups(value, workers), allowed
        case "probability":
            return number(0, 1)(value), "a number from 0 to 1"
        case "factor":
            return number(1, 1e9)(value), "a number from 1 to 1e9"
        case _:
            return is_ns(value), NS


def _contradictions(key: str, fault: Fault) -> list[str]:
    if isinstance(fault, Crash):
        at = (fault.at_ns, fault.at_index)
        if (fault.at_ns is None) == (fault.at_index is None):
            return [unusable(f"{key}.(at_ns, at_index)", at, "one of the two")]
        return []
    wrong = []
    if fault.until_ns is not None and fault.until_ns < fault.from_ns:
        allowed = f"an integer >= from_ns = {fault.from_ns}"
        wrong.append(unusable(f"{key}.until_ns", fault.until_ns, allowed))
    if isinstance(fault, Delay) and fault.delay_max_ns < fault.delay_min_ns:
        allowed = f"an integer >= delay_min_ns = {fault.delay_min_ns}"
        wrong.append(unusable(f"{key}.delay_max_ns", fault.delay_max_ns, allowed))
    return wrong


def _are_groups(value: object, workers: tuple[str, ...]) -> bool:
    groups = value if isinstance(value, tuple | list) else ()
    if len(groups) < 2 or not all(isinstance(g, tuple | list) and g for g in groups):
        return False
    named = [worker for group in groups for worker in group]
    known = all(worker in workers for worker in named)
    return known and all(named.count(worker) == 1 for worker in named)
