"""A topological order of the actions of a schedule, or the error of a deadlock."""

from collections import deque
from collections.abc import Iterator, Sequence

from jdag.errors import ScheduleError
from jdag.schedules.actions import Action, Result, ScheduleStep

ActionLists = Sequence[Sequence[ScheduleStep]]


def in_order(
    workers: Sequence[str], lists: ActionLists, stages: int
) -> Iterator[tuple[int, ScheduleStep]]:
    """Yield (index of the worker, step) for the steps of a complete schedule.

    Each step comes after the steps whose results it needs; the steps of a worker keep
    their order. The time is linear in the number of steps.

    Raises:
        ScheduleError: a deadlock, raised after the steps that can run. The text names
            the workers that wait for each other, and the actions.
    """
    positions = [0] * len(lists)
    done: dict[Result, bool] = {}
    # At most one other worker waits for a result: the worker of a neighbouring stage.
    waiting: dict[Result, int] = {}
    ready = deque(range(len(lists)))
    while ready:  # A worker is ready once, and once after each wait.
        worker = ready.popleft()
        while positions[worker] < len(lists[worker]):
            step = lists[worker][positions[worker]]
            missing = next((n for n in step.needs(stages) if n not in done), None)
            if missing is not None:
                waiting[missing] = worker
                break
            positions[worker] += 1
            yield worker, step
            for result in step.gives:
                done[result] = True
                if result in waiting:
                    ready.append(waiting.pop(result))
    if any(p < len(steps) for p, steps in zip(positions, lists, strict=True)):
        raise _deadlock(workers, lists, stages, positions)


def _deadlock(
    workers: Sequence[str], lists: ActionLists, stages: int, positions: list[int]
) -> ScheduleError:
    providers = {
        result: (worker, position, part)
        for worker, steps in enumerate(lists)
        for position, step in enumerate(steps)
        for part in step.parts
        for result in part.gives
    }
    worker = next(w for w, steps in enumerate(lists) if positions[w] < len(steps))
    waits: dict[int, tuple[Action, Action]] = {}
    while worker not in waits:
        position = positions[worker]
        part, (provider, needed_position, needed) = next(
            (part, providers[need])
            for part in lists[worker][position].parts
            for need in part.needs(stages)
            if providers[need][1] >= positions[providers[need][0]]
        )
        if provider == worker:
            how = "in one action with" if needed_position == position else "before"
            return ScheduleError(
                f"worker {workers[worker]} has {part} {how} {needed}, which it needs: "
                f"{needed} must come first"
            )
        waits[worker] = (part, needed)
        worker = provider
    cycle = list(waits)[list(waits).index(worker) :]
    text = ", ".join(
        f"worker {workers[w]} waits at {waits[w][0]} for {waits[w][1]}" for w in cycle
    )
    return ScheduleError(
        f"deadlock: {text}; on one of these workers, the action that another waits for "
        "must come earlier"
    )
