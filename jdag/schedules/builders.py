"""The published schedules, as functions from sizes to a `Schedule`.

All of them pass `Schedule.check`. Each takes the total number of stages, the number of
micro-batches, and the names of the workers (None: w0, w1, ...). The placement is a loop
(stage s on worker s mod p) or a V (worker r has stages r and 2p - 1 - r), where p is
the number of workers and r the index of a worker.
"""

from collections.abc import Sequence

from jdag.errors import ScheduleError, unusable
from jdag.schedules.actions import Action, Overlap, ScheduleStep
from jdag.schedules.schedule import Schedule, at_least_one, worker_names


class _List:
    """The list of one worker under construction. It counts the micro-batches."""

    def __init__(self) -> None:
        self.steps: list[ScheduleStep] = []
        self.pending: list[Action] = []  # Each W whose I was added, oldest first.
        self._next: dict[tuple[bool, int], int] = {}

    def _action(self, kind: str, stage: int) -> Action:
        key = (kind == "F", stage)
        micro_batch = self._next.get(key, 0)
        self._next[key] = micro_batch + 1
        return Action(kind, stage, micro_batch)

    def add(self, kind: str, stage: int) -> None:
        action = self._action(kind, stage)
        self.steps.append(action)
        if kind == "I":
            self.pending.append(Action("W", stage, action.micro_batch))

    def overlap(self, forward: int, backward: int) -> None:
        both = Overlap(self._action("F", forward), self._action("B", backward))
        self.steps.append(both)

    def weight(self, stage: int | None = None) -> None:
        oldest = [w for w in self.pending if stage is None or w.stage == stage][:1]
        for action in oldest:
            self.pending.remove(action)
            self.steps.append(action)


def _lists(stages: int, micro_batches: int) -> list[_List]:
    at_least_one("stages", stages)
    at_least_one("micro_batches", micro_batches)
    return [_List() for _ in range(stages)]


def _schedule(
    lists: Sequence[_List],
    placement: Sequence[int],
    micro_batches: int,
    workers: Sequence[str] | None,
) -> Schedule:
    names = worker_names(workers, len(lists))
    actions = tuple([tuple(each.steps) for each in lists])
    return Schedule(names, actions, tuple(placement), micro_batches)


def gpipe(
    *, stages: int, micro_batches: int, workers: Sequence[str] | None = None
) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965).

    Raises:
        ScheduleError: a size is not an integer >= 1, or `workers` does not have a name
            for each stage.
    """
    lists = _lists(stages, micro_batches)
    for rank, each in enumerate(lists):
        for kind in "FB":
            for _ in range(micro_batches):
                each.add(kind, rank)
    return _schedule(lists, range(stages), micro_batches, workers)


def one_f_one_b(
    *, stages: int, micro_batches: int, workers: Sequence[str] | None = None
) -> Schedule:
    """1F1B: worker r of p runs p - 1 - r forwards, then one F and one B alternately.

    PipeDream-Flush of Narayanan et al., 2021, arXiv:2006.09503. Same errors as `gpipe`.
    """
    return _warmed_up(stages, micro_batches, workers, depth=1, halves=False)


def eager_one_f_one_b(
    *, stages: int, micro_batches: int, workers: Sequence[str] | None = None
) -> Schedule:
    """1F1B in which worker r of p first runs 2 (p - 1 - r) forwards.

    So transfers and compute overlap. Each worker stores activations of up to 2p - 1
    micro-batches. Zhuang et al., 2023, "On Optimizing the Communication of Model
    Parallelism", arXiv:2211.05322. Same errors as `gpipe`.
    """
    return _warmed_up(stages, micro_batches, workers, depth=2, halves=False)


def zb_h1(
    *, stages: int, micro_batches: int, workers: Sequence[str] | None = None
) -> Schedule:
    """ZB-H1: 1F1B with separate W actions that fill the bubble. Needs 1F1B's memory.

    Qi et al., 2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241. Same errors
    as `gpipe`.
    """
    return _warmed_up(stages, micro_batches, workers, depth=1, halves=True)


def zb_h2(
    *, stages: int, micro_batches: int, workers: Sequence[str] | None = None
) -> Schedule:
    """ZB-H2: ZB-H1 in which each worker first runs twice as many forwards.

    There is no bubble if F, I and W cost the same. With p workers, each stores
    activations of up to 2p - 1 micro-batches. Same paper as `zb_h1`. Same errors as
    `gpipe`.
    """
    return _warmed_up(stages, micro_batches, workers, depth=2, halves=True)


def _warmed_up(
    stages: int,
    micro_batches: int,
    workers: Sequence[str] | None,
    *,
    depth: int,
    halves: bool,
) -> Schedule:
    """Put `depth * (p - 1 - r)` forwards first. All workers start W simultaneously."""
    lists = _lists(stages, micro_batches)
    for rank, each in enumerate(lists):
        first = min(micro_batches, depth * (stages - 1 - rank))
        for _ in range(first):
            each.add("F", rank)
        for index in range(micro_batches):
            if first + index < micro_batches:
                each.add("F", rank)
            each.add("I" if halves else "B", rank)
            if first + index >= depth * (stages - 1):
                each.weight()
        for _ in range(micro_batches):
            each.weight()
    return _schedule(lists, range(stages), micro_batches, workers)


def interleaved(
    *,
    stages: int,
    micro_batches: int,
    chunks: int,
    workers: Sequence[str] | None = None,
) -> Schedule:
    """1F1B with `chunks` stages on each of p = stages / chunks workers, in a loop.

    Groups of p micro-batches pass through one chunk after another. Narayanan et al.,
    2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
    arXiv:2104.04473.

    Raises:
        ScheduleError: a size is not an integer >= 1, `stages` is not a multiple of
            `chunks`, `micro_batches` is not a multiple of p, or `workers` does not have
            p names.
    """
    at_least_one("chunks", chunks)
    lists = _lists(stages, micro_batches)[::chunks]
    if stages % chunks:
        allowed = f"a multiple of chunks = {chunks}"
        raise ScheduleError(unusable("stages", stages, allowed))
    count = len(lists)
    if micro_batches % count:
        allowed = f"a multiple of the {count} workers"
        raise ScheduleError(unusable("micro_batches", micro_batches, allowed))
    work = micro_batches * chunks
    for rank, each in enumerate(lists):
        first = min(work, 2 * (count - 1 - rank) + (chunks - 1) * count)
        for index in range(work + first):
            if index < work:
                each.add("F", index // count % chunks * count + rank)
            if index >= first:
                chunk = chunks - 1 - (index - first) // count % chunks
                each.add("B", chunk * count + rank)
    placement = [stage % count for stage in range(stages)]
    return _schedule(lists, placement, micro_batches, workers)


def zb_v(
    *, stages: int, micro_batches: int, workers: Sequence[str] | None = None
) -> Schedule:
    """ZB-V: two stages per worker in a V. No bubble if F, I and W cost the same.

    It needs the memory of 1F1B. Qi et al., 2024, arXiv:2401.10241, section 6. With p
    workers and fewer than 2p - 1 micro-batches, the order is the order for 2p - 1
    micro-batches without the missing micro-batches.

    Raises:
        ScheduleError: a size is not an integer >= 1, `stages` is odd, or `workers` does
            not have stages / 2 names.
    """
    lists, placement = _in_a_v(stages, micro_batches)
    for rank, each in enumerate(lists):
        _fill_zb_v(each, rank, stages - 1 - rank, len(lists), micro_batches)
        each.steps = [s for s in each.steps if s.parts[0].micro_batch < micro_batches]
    return _schedule(lists, placement, micro_batches, workers)


def _fill_zb_v(each: _List, down: int, up: int, count: int, micro_batches: int) -> None:
    """Fill the list of worker `down`, whose stages in the V are `down` and `up`."""
    total = max(micro_batches, 2 * count - 1)
    rest = count - down
    for _ in range(2 * rest - 1):
        each.add("F", down)
    for _ in range(down):
        each.add("F", up)
        each.add("F", down)
    for _ in range(rest):
        _forward_and_halves(each, up, up)
    for index in range(total - count):
        has_forward = index < total - (2 * count - 1 - down)
        _forward_and_halves(each, down if has_forward else None, down)
        _forward_and_halves(each, up, up)
    for _ in range(down):
        each.add("I", down)
        each.add("I", up)
    for _ in range(rest):
        each.add("I", down)
        each.weight(down)
    for stage in (up, down):
        for _ in range(down):
            each.weight(stage)


def _forward_and_halves(each: _List, forward: int | None, backward: int) -> None:
    if forward is not None:
        each.add("F", forward)
    each.add("I", backward)
    each.weight(backward)


def dualpipe_v(
    *, stages: int, micro_batches: int, workers: Sequence[str] | None = None
) -> Schedule:
    """DualPipeV: two stages per worker in a V. Forwards and backwards overlap in pairs.

    DeepSeek-AI, 2024, arXiv:2412.19437, and https://github.com/deepseek-ai/DualPipe.
    With p workers, each stores up to 2p + 1 activations of a stage.

    Raises:
        ScheduleError: a size is not an integer >= 1, `stages` is odd, there are fewer
            micro-batches than stages, or `workers` does not have stages / 2 names.
    """
    lists, placement = _in_a_v(stages, micro_batches)
    if micro_batches < stages:
        allowed = f"an integer >= stages = {stages}"
        raise ScheduleError(unusable("micro_batches", micro_batches, allowed))
    for rank, each in enumerate(lists):
        _fill_dualpipe_v(each, rank, stages - 1 - rank, len(lists), micro_batches)
    return _schedule(lists, placement, micro_batches, workers)


def _fill_dualpipe_v(
    each: _List, down: int, up: int, count: int, micro_batches: int
) -> None:
    rest = count - 1 - down
    for _ in range(2 * rest):
        each.add("F", down)
    for _ in range(down + 1):
        each.add("F", down)
        each.add("F", up)
    for _ in range(rest):
        each.add("I", up)
        each.weight()
        each.add("F", up)
    for index in range(micro_batches - 2 * count + down + 1):
        if index == 0 and rest == 0:
            each.add("F", down)  # Not an overlap: the last worker would wait longer.
            each.add("B", up)
        else:
            each.overlap(down, up)
        each.overlap(up, down)
    for _ in range(rest):
        each.add("B", up)
        each.overlap(up, down)
    # About half of the last 2 (r + 1) backwards have their W at the end.
    backwards = [up, down] * (down + 1) + [down] * rest
    for index, stage in enumerate(backwards):
        if index >= 2 * (down + 1):
            each.weight()
        each.add("I" if index > down else "B", stage)
    for _ in range(down + 1):
        each.weight()


def _in_a_v(stages: int, micro_batches: int) -> tuple[list[_List], list[int]]:
    lists = _lists(stages, micro_batches)[::2]
    if stages % 2:
        raise ScheduleError(unusable("stages", stages, "an even number"))
    count = len(lists)
    return lists, [*range(count), *reversed(range(count))]
