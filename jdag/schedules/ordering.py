"""The order in which workers that follow their lists can act, or why they cannot.

Inputs:  one list of steps for each worker, and the number of stages.
Outputs: `in_order` gives all steps so that each comes after all that it needs.

Invariants: the steps of a worker come in the order of its list; the result depends on
nothing but the lists. Each step is looked at once, and once more for each time that it
waits, so a schedule of n actions takes time in proportion to n.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from jdag.errors import ScheduleError
from jdag.schedules.actions import Action, Result, ScheduleStep

ActionLists = Sequence[Sequence[ScheduleStep]]


def in_order(
    workers: Sequence[str], lists: ActionLists, stages: int
) -> Iterator[tuple[int, ScheduleStep]]:
    """Yield (index of the worker, step); a complete schedule alone may be passed.

    Raises:
        ScheduleError: a deadlock, after the steps that can be taken; names the workers
            that wait for each other, and for what.
    """
    at = [0] * len(lists)
    done: dict[Result, bool] = {}
    # One worker at most waits for what another gives: the one of the next stage.
    waiting: dict[Result, int] = {}
    ready = deque(range(len(lists)))
    while ready:  # A worker is ready once, and once after each wait.
        worker = ready.popleft()
        while at[worker] < len(lists[worker]):
            step = lists[worker][at[worker]]
            missing = next((n for n in step.needs(stages) if n not in done), None)
            if missing is not None:
                waiting[missing] = worker
                break
            at[worker] += 1
            yield worker, step
            for result in step.gives:
                done[result] = True
                if result in waiting:
                    ready.append(waiting.pop(result))
    if any(place < len(steps) for place, steps in zip(at, lists, strict=True)):
        raise _deadlock(workers, lists, stages, at)


def _deadlock(
    workers: Sequence[str], lists: ActionLists, stages: int, at: list[int]
) -> ScheduleError:
    """Follow, from the first worker that waits, who waits for whom until it repeats."""
    givers = {
        result: (worker, place, part)
        for worker, steps in enumerate(lists)
        for place, step in enumerate(steps)
        for part in step.parts
        for result in part.gives
    }
    worker = next(w for w, steps in enumerate(lists) if at[w] < len(steps))
    waits: dict[int, tuple[Action, Action, bool]] = {}
    while worker not in waits:
        step, place = lists[worker][at[worker]], at[worker]
        part, (giver, given_at, given) = next(
            (part, givers[need])
            for part in step.parts
            for need in part.needs(stages)
            if givers[need][1] >= at[givers[need][0]]
        )
        together = giver == worker and given_at == place
        waits[worker] = (part, given, together)
        if giver == worker:
            how = "in one action with" if together else "before"
            return ScheduleError(
                f"worker {workers[worker]} has {part} {how} {given}, which it needs: "
                f"{given} must come first"
            )
        worker = giver
    cycle = list(waits)[list(waits).index(worker) :]
    said = ", ".join(
        f"worker {workers[w]} waits at {waits[w][0]} for {waits[w][1]}" for w in cycle
    )
    return ScheduleError(
        f"deadlock: {said}; on one of these workers, what another waits for must come "
        "earlier"
    )
