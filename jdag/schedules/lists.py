"""Schedules from lists of actions, and the CSV format of torch's pipelining.

A row of a CSV is the list of one worker; a cell is an action, such as `0F3`, or empty
where the worker is idle in a grid of equal steps. Empty cells are ignored, since
`Schedule.timeline` computes times. `input_half` is the letter for the input half of a
backward in the CSV: "I", with B for the full backward; or "B", as in older versions of
torch, with BW for the full backward, or B if the CSV has no W.
"""

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Literal

from jdag.errors import ScheduleError, kind_of, text_of, unusable
from jdag.schedules.actions import Action, Overlap, ScheduleStep, parsed_action
from jdag.schedules.schedule import Schedule, at_least_one, worker_names

InputHalf = Literal["I", "B"]

_NEWER = {"F": "F", "B": "B", "I": "I", "W": "W"}
_OLDER = {"F": "F", "BW": "B", "B": "I", "W": "W"}
_OLDER_FULL = {"F": "F", "BW": "B", "B": "B"}  # For a CSV without W.


def from_lists(
    lists: Sequence[Sequence[ScheduleStep | str | None]],
    *,
    workers: Sequence[str] | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
) -> Schedule:
    """Return a checked schedule from one list of actions for each worker.

    Args:
        lists: an entry is an action, its text, or None or "" for an idle step. A stage
            is on the worker whose list has its actions.
        workers: the names of the workers; None: w0, w1, ...
        stages: the number of stages; None: as many as the lists have.
        micro_batches: the number of micro-batches; None: as many as the lists have.

    Raises:
        ScheduleError: an entry is not an action, a stage is on no worker or on two,
            the number of names is wrong, or `Schedule.check` raises.
    """
    return _checked_schedule(lists, _NEWER, workers, stages, micro_batches)


def from_csv(
    text: str,
    input_half: InputHalf = "I",
    *,
    workers: Sequence[str] | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
) -> Schedule:
    """Return a checked schedule from the text of a CSV, with one row for each worker.

    `input_half` is the letter for the input half of a backward in the CSV: "I" or "B".
    The other arguments are those of `from_lists`.

    Raises:
        ScheduleError: the text is not a CSV, or `from_lists` raises.
    """
    _check_half(input_half)
    if not isinstance(text, str):
        raise ScheduleError(
            f"the CSV is {kind_of(text)}: expected a str, the text of the CSV"
        )
    try:
        rows = [*csv.reader(StringIO(text.removeprefix("\ufeff"), newline=""))]
    except csv.Error as error:
        raise ScheduleError(f"the text is not a CSV: {text_of(error)}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    renamed = _NEWER
    if input_half == "B":
        # The W in BW is not a separate action.
        cells = [cell.replace("BW", "") for row in rows for cell in row]
        renamed = _OLDER if any("W" in cell for cell in cells) else _OLDER_FULL
    return _checked_schedule(rows, renamed, workers, stages, micro_batches)


def to_csv(schedule: Schedule, input_half: InputHalf = "I") -> str:
    """Return a schedule as the text of a CSV, with one row for each worker.

    Raises:
        ScheduleError: `input_half` is neither "I" nor "B".
    """
    _check_half(input_half)
    kinds = {"I": "I", "B": "B"}
    if input_half == "B":
        steps = [step for each in schedule.actions for step in each]
        halves = any(step.kind == "W" for step in steps)
        kinds = {"I": "B", "B": "BW" if halves else "B"}
    out = StringIO()
    rows = [[_written(step, kinds) for step in each] for each in schedule.actions]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _written(step: ScheduleStep, kinds: dict[str, str]) -> str:
    if isinstance(step, Overlap):
        forward, backward = [_written(part, kinds) for part in step.parts]
        return f"({forward};{backward}){step.kind}"
    return f"{step.stage}{kinds.get(step.kind, step.kind)}{step.micro_batch}"


def _check_half(input_half: object) -> None:
    if input_half not in ("I", "B"):
        raise ScheduleError(unusable("input_half", input_half, '"I" or "B"'))


def _checked_schedule(
    lists: Sequence[Sequence[ScheduleStep | str | None]],
    renamed: dict[str, str],
    workers: Sequence[str] | None,
    stages: int | None,
    micro_batches: int | None,
) -> Schedule:
    if isinstance(lists, str) or not isinstance(lists, Sequence) or not lists:
        allowed = "a list of actions for each worker, at least one"
        raise ScheduleError(unusable("the schedule", lists, allowed))
    names = worker_names(workers, len(lists))
    actions = tuple(
        [
            tuple(_read(name, steps, renamed))
            for name, steps in zip(names, lists, strict=True)
        ]
    )
    placement = _placement(names, actions, stages)
    if micro_batches is None:
        parts = [part for steps in actions for step in steps for part in step.parts]
        micro_batches = 1 + max([part.micro_batch for part in parts])
    schedule = Schedule(names, actions, placement, micro_batches)
    schedule.check()
    return schedule


def _read(
    name: str, steps: Sequence[ScheduleStep | str | None], renamed: dict[str, str]
) -> Iterable[ScheduleStep]:
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        allowed = "a list of actions"
        raise ScheduleError(unusable(f"worker {name}", steps, allowed))
    for number, step in enumerate(steps, 1):
        if isinstance(step, Action | Overlap):
            yield step
        elif isinstance(step, str):
            if step.strip():
                try:
                    yield parsed_action(step, renamed)
                except ScheduleError as error:
                    where = f"worker {name}, entry {number}"
                    raise ScheduleError(f"{where}: {error}") from None
        elif step is not None:
            raise ScheduleError(
                f"worker {name}, entry {number} is {kind_of(step)}; expected an "
                "action, its text, or None"
            )


def _placement(
    names: tuple[str, ...],
    actions: tuple[tuple[ScheduleStep, ...], ...],
    stages: int | None,
) -> tuple[int, ...]:
    if stages is not None:
        at_least_one("stages", stages)
    placed: dict[int, int] = {}
    for worker, steps in enumerate(actions):
        if not steps:
            raise ScheduleError(
                f"worker {names[worker]} has no action; each worker needs a stage"
            )
        for part in [part for step in steps for part in step.parts]:
            if placed.setdefault(part.stage, worker) != worker:
                raise ScheduleError(
                    f"worker {names[worker]} has {part}, but stage {part.stage} is on "
                    f"{names[placed[part.stage]]}; a stage must be on one worker"
                )
    count = 1 + max(placed) if stages is None else stages
    for stage in range(count):
        if stage not in placed:
            raise ScheduleError(
                f"no worker has an action of stage {stage}; stages are 0 to {count - 1}"
            )
    return tuple([placed[stage] for stage in range(count)])
