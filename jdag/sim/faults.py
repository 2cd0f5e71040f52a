"""Faults of a simulated run: lost and late frames, partitions, crashes, slow workers.

Inputs:  calls `verdict(source, destination, now_ns, chooser)`, for each frame that is
         sent.
Outputs: the delays of a frame's copies and the faults that caused them; the duration of
         jobs on slow workers (`stretched_ns`); all `crashes`.

A frame fault applies to frames that are sent in `from_ns <= now < until_ns` (None: no
end), from `source` to `destination` (None: any worker). Partitions are checked first,
then the other faults in list order: a drop ends the check, delays add up, and a
duplicate adds a copy that is never earlier than the original.

Invariants: the chooser draws only where a fault applies and its outcome or amount is
random (not for a probability of 0 or 1). A verdict depends only on its arguments and
these draws.
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
    """Base class of faults. In files `kind` is the lower-case name of the class."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    def contradictions(self) -> Iterator[str]:
        from_ns, until_ns = getattr(self, "from_ns", 0), getattr(self, "until_ns", None)
        if until_ns is not None and until_ns < from_ns:
            yield unusable("until_ns", until_ns, f"an integer >= from_ns = {from_ns}")


class Drop(_Fault, frozen=True, tag="drop"):
    """Lose each frame with this probability."""

    probability: _SHARE
    source: str | None = None
    destination: str | None = None
    from_ns: NS = 0
    until_ns: NS | None = None


class Delay(_Fault, frozen=True, tag="delay"):
    """Delay each frame with this probability, by `delay_min_ns` to `delay_max_ns`."""

    probability: _SHARE
    delay_min_ns: NS
    delay_max_ns: NS
    source: str | None = None
    destination: str | None = None
    from_ns: NS = 0
    until_ns: NS | None = None

    def contradictions(self) -> Iterator[str]:
        """Yield an error if the time span or the range of delays is reversed."""
        yield from _Fault.contradictions(self)
        if self.delay_max_ns < self.delay_min_ns:
            allowed = f"an integer >= delay_min_ns = {self.delay_min_ns}"
            yield unusable("delay_max_ns", self.delay_max_ns, allowed)


class Duplicate(_Fault, frozen=True, tag="duplicate"):
    """Deliver each frame twice with this probability.

    The second copy arrives up to `delay_max_ns` later.
    """

    probability: _SHARE
    delay_max_ns: NS = 0
    source: str | None = None
    destination: str | None = None
    from_ns: NS = 0
    until_ns: NS | None = None


class Partition(_Fault, frozen=True, tag="partition"):
    """Block all frames between different `groups` until `until_ns` (None: no end).

    A worker that is not in a group can reach all workers.
    """

    groups: tuple[tuple[str, ...], ...]
    from_ns: NS = 0
    until_ns: NS | None = None


class Crash(_Fault, frozen=True, tag="crash"):
    """Crash a worker: its values, jobs and programs are lost.

    Attributes:
        worker: name of the worker; a crash has no effect if the worker is already down.
        detect_ns: delay until the other workers are notified.
        at_ns, at_index: the time of the crash, or the number of trace records at which
            it happens; exactly one of the two must be set.
        restart_ns: delay until the worker rejoins without its state; None: it never
            rejoins.
    """

    worker: str
    detect_ns: NS = DETECT_NS
    at_ns: NS | None = None
    at_index: NATURAL | None = None
    restart_ns: NS | None = None

    def contradictions(self) -> Iterator[str]:
        """Yield an error if both or neither of `at_ns` and `at_index` are set."""
        if (self.at_ns is None) == (self.at_index is None):
            times = (self.at_ns, self.at_index)
            yield unusable("(at_ns, at_index)", times, "exactly one of the two")


class Slow(_Fault, frozen=True, tag="slow"):
    """Multiply the duration of jobs of `worker` by `factor`.

    This applies to jobs that start in `from_ns <= now < until_ns`.
    """

    worker: str
    factor: _FACTOR
    from_ns: NS = 0
    until_ns: NS | None = None


FrameFault = Drop | Delay | Duplicate
Fault = FrameFault | Partition | Crash | Slow


@dataclass(frozen=True, slots=True)
class Verdict:
    """The effect of all faults on one frame: the extra delay in ns of each copy.

    `copies` is () for a lost frame, and (0, 7) for a frame whose duplicate arrives 7 ns
    later. `causes` has the names of the faults that applied.
    """

    copies: tuple[int, ...]
    causes: tuple[str, ...] = ()


DELIVERED = Verdict((0,))


class Faults:
    """All faults of one run. One ScenarioError names all unknown workers."""

    __slots__ = ("_frame_faults", "_partitions", "crashes", "slow")

    def __init__(self, faults: Sequence[Fault], workers: Sequence[str]) -> None:
        errors = [
            text
            for index, fault in enumerate(faults)
            for text in _problems(f"faults[{index}]", fault, tuple(workers))
        ]
        self.crashes = tuple(f for f in faults if isinstance(f, Crash))
        for worker in workers:
            crashes = [crash for crash in self.crashes if crash.worker == worker]
            if any(crash.restart_ns is None for crash in crashes[:-1]):
                allowed = f"at most one crash of {worker}, which never restarts"
                errors.append(unusable("faults", len(crashes), allowed))
        if errors:
            raise ScenarioError(*errors)
        self._partitions = tuple(
            (f.from_ns, f.until_ns, {w: n for n, g in enumerate(f.groups) for w in g})
            for f in faults
            if isinstance(f, Partition)
        )
        self._frame_faults = tuple(f for f in faults if isinstance(f, FrameFault))
        self.slow = tuple(f for f in faults if isinstance(f, Slow))

    @property
    def on_frames(self) -> bool:
        """Whether any fault affects frames. If not, `verdict` need not be called."""
        return bool(self._partitions or self._frame_faults)

    def verdict(
        self, source: str, destination: str, now_ns: int, chooser: Chooser
    ) -> Verdict:
        for from_ns, until_ns, group_of in self._partitions:
            if _during(now_ns, from_ns, until_ns):
                groups = group_of.get(source), group_of.get(destination)
                if None not in groups and groups[0] != groups[1]:
                    return Verdict((), ("partition",))
        delay_ns = 0
        copy_delays_ns: list[int] = []
        causes: list[str] = []
        for fault in self._frame_faults:
            if not _applies(fault, source, destination, now_ns, chooser):
                continue
            match fault:
                case Drop():
                    return Verdict((), (*causes, "drop"))
                case Delay():
                    delay_ns += _drawn(fault.delay_min_ns, fault.delay_max_ns, chooser)
                    causes.append("delay")
                case Duplicate():
                    copy_delays_ns.append(_drawn(0, fault.delay_max_ns, chooser))
                    causes.append("duplicate")
                case _:
                    assert_never(fault)
        if not causes:
            return DELIVERED
        copies = (delay_ns, *(delay_ns + more_ns for more_ns in copy_delays_ns))
        return Verdict(copies, tuple(causes))

    def stretched_ns(self, worker: str, duration_ns: int, now_ns: int) -> int:
        for slow in self.slow:
            if slow.worker == worker and _during(now_ns, slow.from_ns, slow.until_ns):
                duration_ns = round(duration_ns * slow.factor)
        return duration_ns


def _during(now_ns: int, from_ns: int, until_ns: int | None) -> bool:
    return from_ns <= now_ns and (until_ns is None or now_ns < until_ns)


def _applies(
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
    if isinstance(fault, Partition):
        if _are_groups(fault.groups, workers):
            return []
        allowed = "at least two disjoint groups of " + ", ".join(workers)
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
    are_known = all(worker in workers for worker in named)
    return len(groups) > 1 and all(groups) and are_known and are_different(named)
