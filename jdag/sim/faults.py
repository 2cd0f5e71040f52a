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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, assert_never

from msgspec import Meta

from jdag.errors import ScenarioError, unusable
from jdag.runtime.chooser import Chooser
from jdag.settings.validation import NATURAL, NS, Settings, are_different

DETECT_NS = 1_000_000

_SHARE = Annotated[float, Meta(ge=0, le=1)]
_FACTOR = Annotated[float, Meta(ge=1, le=1e9, description="a number from 1 to 1e9")]


class _Fault(Settings, frozen=True, tag_field="kind"):
    """A fault; the name of its class is its kind in files."""

    @property
    def kind(self) -> str:
        """Its kind in files."""
        return type(self).__name__.lower()

    def contradictions(self) -> Iterator[str]:
        """An end before its beginning."""
        from_ns, until_ns = getattr(self, "from_ns", 0), getattr(self, "until_ns", None)
        if until_ns is not None and until_ns < from_ns:
            yield unusable("until_ns", until_ns, f"an integer >= from_ns = {from_ns}")


class Drop(_Fault, frozen=True, tag="drop"):
    """A frame is lost with this probability."""

    probability: _SHARE
    source: str | None = None
    destination: str | None = None
    from_ns: NS = 0
    until_ns: NS | None = None


class Delay(_Fault, frozen=True, tag="delay"):
    """With this probability a frame is late by `delay_min_ns` to `delay_max_ns`."""

    probability: _SHARE
    delay_min_ns: NS
    delay_max_ns: NS
    source: str | None = None
    destination: str | None = None
    from_ns: NS = 0
    until_ns: NS | None = None

    def contradictions(self) -> Iterator[str]:
        """An end before its beginning, or a longest delay below the shortest."""
        yield from _Fault.contradictions(self)
        if self.delay_max_ns < self.delay_min_ns:
            allowed = f"an integer >= delay_min_ns = {self.delay_min_ns}"
            yield unusable("delay_max_ns", self.delay_max_ns, allowed)


class Duplicate(_Fault, frozen=True, tag="duplicate"):
    """With this probability a frame comes again, up to `delay_max_ns` later."""

    probability: _SHARE
    delay_max_ns: NS = 0
    source: str | None = None
    destination: str | None = None
    from_ns: NS = 0
    until_ns: NS | None = None


class Partition(_Fault, frozen=True, tag="partition"):
    """No frame passes between two of `groups`; repaired at `until_ns` (None: never).

    A worker in none of the groups reaches all of them.
    """

    groups: tuple[tuple[str, ...], ...]
    from_ns: NS = 0
    until_ns: NS | None = None


class Crash(_Fault, frozen=True, tag="crash"):
    """A worker stops, and all it held is gone.

    It happens at `at_ns`, or when the trace has `at_index` events; exactly one of the
    two is given. The others are notified `detect_ns` later. The worker joins again,
    empty, `restart_ns` after the crash (None: never). Ignored if the worker is down.
    """

    worker: str
    detect_ns: NS = DETECT_NS
    at_ns: NS | None = None
    at_index: NATURAL | None = None
    restart_ns: NS | None = None

    def contradictions(self) -> Iterator[str]:
        """Two times of the crash, or none."""
        if (self.at_ns is None) == (self.at_index is None):
            at = (self.at_ns, self.at_index)
            yield unusable("(at_ns, at_index)", at, "one of the two")


class Slow(_Fault, frozen=True, tag="slow"):
    """Jobs that a worker starts in this time take `factor` times as long."""

    worker: str
    factor: _FACTOR
    from_ns: NS = 0
    until_ns: NS | None = None


FrameFault = Drop | Delay | Duplicate
Fault = FrameFault | Partition | Crash | Slow


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
            raise ScenarioError(*wrong)
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


def _problems(key: str, fault: Fault, workers: tuple[str, ...]) -> list[str]:
    """Return the errors of workers that a fault names and the run does not have."""
    if isinstance(fault, Partition):
        if _are_groups(fault.groups, workers):
            return []
        allowed = "two groups or more, none shared, of " + ", ".join(workers)
        return [unusable(f"{key}.groups", fault.groups, allowed)]
    names = {
        name: getattr(fault, name, None) for name in ("source", "destination", "worker")
    }
    allowed = "one of " + ", ".join(workers)
    return [
        unusable(f"{key}.{name}", worker, allowed)
        for name, worker in names.items()
        if worker is not None and worker not in workers
    ]


def _are_groups(groups: tuple[tuple[str, ...], ...], workers: tuple[str, ...]) -> bool:
    named = [worker for group in groups for worker in group]
    known = all(worker in workers for worker in named)
    return len(groups) > 1 and all(groups) and known and are_different(named)
