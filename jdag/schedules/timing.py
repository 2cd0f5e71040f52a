"""Start and end of each action of a schedule, with one cost per kind of action.

A worker starts the next action of its list when the previous action has ended and the
needed results are available. Results of the same worker are available at once, results
of other workers after `comm_ns`. Communication occupies no worker. Times are exact
integers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdag.schedules.actions import Result, ScheduleStep
from jdag.schedules.ordering import ActionLists, in_order


@dataclass(frozen=True, slots=True)
class Span:
    """One action with its start and end in ns."""

    action: ScheduleStep
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of each worker's actions, in the order of `workers` and their lists.

    Times are in ns from the start of the schedule.
    """

    workers: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan_ns(self) -> int:
        """The end of the last action in ns."""
        return max([span.end_ns for spans in self.spans for span in spans], default=0)

    @property
    def span_ns(self) -> int:
        """The longest time in ns of a worker from its first start to its last end.

        The zero-bubble paper uses this time, since a worker without a synchronous
        optimizer step starts the next batch at once.
        """
        lists = [spans for spans in self.spans if spans]
        return max([spans[-1].end_ns - spans[0].start_ns for spans in lists], default=0)

    @property
    def bubble(self) -> float:
        """The fraction of time until the makespan in which workers are idle, 0 to 1."""
        return self._idle(self.makespan_ns)

    @property
    def span_bubble(self) -> float:
        """The fraction of `span_ns` in which workers are idle, 0 to 1."""
        return self._idle(self.span_ns)

    def _idle(self, time_ns: int) -> float:
        all_ns = time_ns * len(self.spans)
        busy = sum([s.end_ns - s.start_ns for spans in self.spans for s in spans])
        return (all_ns - busy) / all_ns if all_ns else 0.0


def timed(
    workers: tuple[str, ...],
    lists: ActionLists,
    placement: Sequence[int],
    costs_ns: Mapping[str, int],
    comm_ns: int,
) -> Timeline:
    ends: dict[Result, int] = {}
    free = [0] * len(lists)
    spans: list[list[Span]] = [[] for _ in lists]
    stages = len(placement)
    for worker, step in in_order(workers, lists, stages):
        start = free[worker]
        for need in step.needs(stages):
            away = placement[need[1]] != worker
            start = max(start, ends[need] + (comm_ns if away else 0))
        free[worker] = end = start + costs_ns[step.kind]
        ends.update(dict.fromkeys(step.gives, end))
        spans[worker].append(Span(step, start, end))
    return Timeline(workers, tuple([tuple(each) for each in spans]))
