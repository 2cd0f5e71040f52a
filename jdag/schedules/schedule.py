"""A pipeline schedule: for each worker the list of actions that it executes in order.

In a schedule that passes `check`, the list of a stage's worker has, for each
micro-batch, one F and either one B or one I and one W; the lists cause no deadlock. F
needs F of the previous stage; B or I needs F of its stage, and B or I of the next
stage; W needs I of its stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jdag.errors import ScheduleError, unusable
from jdag.schedules.actions import OVERLAP, Action, ScheduleStep
from jdag.schedules.ordering import in_order
from jdag.schedules.timing import Timeline, timed


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule: a list of actions for each worker.

    Attributes:
        workers: the names of the workers.
        actions: the list of each worker, in the order of `workers`.
        placement: for each stage the index of its worker.
        micro_batches: the number of micro-batches.

    Raises:
        ScheduleError: the names are not distinct strings, the numbers of lists and
            workers differ, an index is invalid, or there is no stage or micro-batch.
    """

    workers: tuple[str, ...]
    actions: tuple[tuple[ScheduleStep, ...], ...]
    placement: tuple[int, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        worker_names(self.workers, len(self.actions))
        at_least_one("stages", len(self.placement))
        at_least_one("micro_batches", self.micro_batches)
        for stage, worker in enumerate(self.placement):
            if type(worker) is not int or not 0 <= worker < len(self.workers):
                allowed = f"an index of a worker, 0 to {len(self.workers) - 1}"
                raise ScheduleError(unusable(f"placement[{stage}]", worker, allowed))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def lists(self) -> dict[str, tuple[ScheduleStep, ...]]:
        """The list of actions of each worker, by the worker's name."""
        return dict(zip(self.workers, self.actions, strict=True))

    def worker(self, stage: int) -> str:
        """Return the name of the worker of a stage.

        Raises:
            ScheduleError: there is no such stage.
        """
        if type(stage) is not int or not 0 <= stage < self.stages:
            allowed = f"an integer from 0 to {self.stages - 1}"
            raise ScheduleError(unusable("stage", stage, allowed))
        return self.workers[self.placement[stage]]

    def halves(self, stage: int, micro_batch: int) -> bool:
        """Whether the schedule has I and W for this backward, in place of B."""
        steps = self.actions[self.placement[stage]]
        return Action("W", stage, micro_batch) in steps

    def check(self) -> None:
        """Check that the schedule is complete and free of deadlocks.

        Raises:
            ScheduleError: the schedule is incomplete or has a deadlock.
        """
        self._check_complete()
        for _ in in_order(self.workers, self.actions, self.stages):
            pass

    def _parts(self) -> dict[Action, bool]:
        known: dict[Action, bool] = {}
        for index, steps in enumerate(self.actions):
            for part in [part for step in steps for part in step.parts]:
                if part.stage >= self.stages:
                    wrong = f", an unknown stage; stages are 0 to {self.stages - 1}"
                elif part.micro_batch >= self.micro_batches:
                    last = self.micro_batches - 1
                    wrong = f", an unknown micro-batch; micro-batches are 0 to {last}"
                elif self.placement[part.stage] != index:
                    wrong = f", but stage {part.stage} is on {self.worker(part.stage)}"
                elif part in known:
                    wrong = " for a second time; each action comes once"
                else:
                    known[part] = True
                    continue
                name = self.workers[index]
                raise ScheduleError(f"worker {name} has {part}{wrong}")
        return known

    def _check_complete(self) -> None:
        known = self._parts()
        for stage in range(self.stages):
            name = f"worker {self.worker(stage)}"
            for micro_batch in range(self.micro_batches):
                f, b, i, w = [Action(kind, stage, micro_batch) for kind in "FBIW"]
                has_b, has_i, has_w = b in known, i in known, w in known
                if f not in known:
                    raise ScheduleError(
                        f"{name} lacks {f}: each stage has one F for each micro-batch"
                    )
                if has_b and (has_i or has_w):
                    raise ScheduleError(
                        f"{name} has both {b} and {i if has_i else w}: a backward is "
                        "either one B, or one I and one W"
                    )
                if not (has_b or has_i or has_w):
                    raise ScheduleError(
                        f"{name} lacks {b}, or {i} and {w}: each F has a backward"
                    )
                if has_i != has_w:
                    lacking, half = (w, i) if has_i else (i, w)
                    raise ScheduleError(
                        f"{name} lacks {lacking}, the other half of {half}"
                    )

    def timeline(
        self,
        *,
        forward: int,
        input_grad: int,
        weight_grad: int,
        comm: int = 0,
        overlap_ns: int | None = None,
    ) -> Timeline:
        """Return start and end of each action in ns, with one cost per kind of action.

        Args:
            forward: cost of F in ns, for one stage and one micro-batch.
            input_grad: cost of I.
            weight_grad: cost of W. B costs as much as I and W together.
            comm: latency in ns between stages on different workers.
            overlap_ns: cost of OVERLAP_F_B; None: the costs of F and B together.

        Raises:
            ScheduleError: a cost is not an integer >= 0, or `check` raises.
        """
        for key, cost in (
            ("forward", forward),
            ("input_grad", input_grad),
            ("weight_grad", weight_grad),
            ("comm", comm),
            ("overlap_ns", 0 if overlap_ns is None else overlap_ns),
        ):
            if type(cost) is not int or cost < 0:
                allowed = "an integer of nanoseconds >= 0"
                raise ScheduleError(unusable(key, cost, allowed))
        backward = input_grad + weight_grad
        costs = {"F": forward, "B": backward, "I": input_grad, "W": weight_grad}
        costs[OVERLAP] = forward + backward if overlap_ns is None else overlap_ns
        self._check_complete()
        return timed(self.workers, self.actions, self.placement, costs, comm)

    def makespan_ns(
        self,
        *,
        forward: int,
        input_grad: int,
        weight_grad: int,
        comm: int = 0,
        overlap_ns: int | None = None,
    ) -> int:
        """Return the end of the last action in ns, for the arguments of `timeline`."""
        return self.timeline(
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            comm=comm,
            overlap_ns=overlap_ns,
        ).makespan_ns

    def peak_activations(self) -> dict[str, int]:
        """Return the largest number of activations that each worker stores at once.

        Each activation belongs to a stage and a micro-batch. It is stored from their F
        until their B or W.
        """
        peaks = {}
        for worker, steps in zip(self.workers, self.actions, strict=True):
            stored = peak = 0
            for part in [part for step in steps for part in step.parts]:
                stored += {"F": 1, "I": 0}.get(part.kind, -1)
                peak = max(peak, stored)
            peaks[worker] = peak
        return peaks


def at_least_one(key: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ScheduleError(unusable(key, value, "an integer >= 1"))


def worker_names(workers: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if workers is None:
        return tuple([f"w{index}" for index in range(count)])
    listed = isinstance(workers, Sequence) and not isinstance(workers, str)
    names = tuple(workers) if listed else ()
    texts = all(isinstance(name, str) and name for name in names)
    if len(names) != count or not texts or len(dict.fromkeys(names)) != count:
        allowed = f"a list of {count} different names, one for each list of actions"
        raise ScheduleError(unusable("workers", workers, allowed))
    return names


def check_for(schedule: Schedule | None, workers: Sequence[str]) -> None:
    if schedule is None:
        return
    for worker in schedule.workers:
        if worker not in workers:
            allowed = "workers of the cluster: " + ", ".join(workers)
            raise ScheduleError(unusable("schedule: worker", worker, allowed))
    schedule.check()
