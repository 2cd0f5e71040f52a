"""A pipeline schedule: for each worker the list of actions that it follows.

Inputs:  names of workers, their lists, the worker of each stage, the number of
         micro-batches: from a builder, from a user's own lists, or from CSV.
Outputs: what is wrong with it (`check`), when everything runs (`timeline`), and how
         much each worker holds (`peak_activations`).

Invariants of a schedule that passes `check`: for each stage and micro-batch its worker
has one F, and either one B or one I and one W; an action comes after what it needs on
its worker; workers that follow their lists never wait for each other in a circle. F of
a stage needs F of the stage before; B or I needs B or I of the stage after, and its own
F; W needs its own I.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jdag.errors import ScheduleError, unusable
from jdag.schedules.actions import OVERLAP, Action, ScheduleStep
from jdag.schedules.ordering import in_order
from jdag.schedules.timing import Timeline, timed


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lists of all workers, in the order of `workers`.

    `placement` has the index of the worker of each stage.

    Raises:
        ScheduleError: names that are not distinct texts, another number of lists than
            of workers, a stage on no worker, or no micro-batch.
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
        """The list of actions of each worker."""
        return dict(zip(self.workers, self.actions, strict=True))

    def worker(self, stage: int) -> str:
        """Return the name of the worker that has the stage.

        Raises:
            ScheduleError: there is no such stage.
        """
        if type(stage) is not int or not 0 <= stage < self.stages:
            allowed = f"an integer from 0 to {self.stages - 1}"
            raise ScheduleError(unusable("stage", stage, allowed))
        return self.workers[self.placement[stage]]

    def halves(self, stage: int, micro_batch: int) -> bool:
        """Whether this backward is listed as I and W, each by itself."""
        steps = self.actions[self.placement[stage]]
        return Action("W", stage, micro_batch) in steps

    def check(self) -> None:
        """Raise if the schedule is not complete, or can never end.

        Raises:
            ScheduleError: names the worker, the action and what would be right.
        """
        self._check_complete()
        for _ in in_order(self.workers, self.actions, self.stages):
            pass

    def _known(self) -> dict[Action, bool]:
        """Return all actions, after checking each by itself."""
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
        known = self._known()
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
        """Return start and end of each action, in ns.

        `forward`, `input_grad` and `weight_grad` are the costs of F, I and W of one
        stage and micro-batch; B costs I and W. `comm` is added between stages on
        different workers and occupies nobody. OVERLAP_F_B costs `overlap_ns`; None:
        F and B.

        Raises:
            ScheduleError: a cost is not an integer >= 0, or what `check` raises.
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
        whole = input_grad + weight_grad
        both = forward + whole if overlap_ns is None else overlap_ns
        costs = {"F": forward, "B": whole, "I": input_grad, "W": weight_grad}
        costs[OVERLAP] = both
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
        """Return the end of the last action in ns; see `timeline`."""
        return self.timeline(
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            comm=comm,
            overlap_ns=overlap_ns,
        ).makespan_ns

    def peak_activations(self) -> dict[str, int]:
        """Return, by worker, the most that it holds at once, in units of a stage.

        One stage's activations of one micro-batch are held from its F until its B, or
        until its W. With v stages on a worker, a micro-batch makes v units.
        """
        peaks = {}
        for worker, steps in zip(self.workers, self.actions, strict=True):
            held = peak = 0
            for part in [part for step in steps for part in step.parts]:
                held += {"F": 1, "I": 0}.get(part.kind, -1)
                peak = max(peak, held)
            peaks[worker] = peak
        return peaks


def at_least_one(key: str, value: object) -> None:
    """Raise ScheduleError if a number is not an integer >= 1."""
    if type(value) is not int or value < 1:
        raise ScheduleError(unusable(key, value, "an integer >= 1"))


def worker_names(workers: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Return the names of `count` workers, w0, w1, ... if None are given.

    Raises:
        ScheduleError: not a list of texts, a name twice, or another number of names.
    """
    if workers is None:
        return tuple([f"w{index}" for index in range(count)])
    listed = isinstance(workers, Sequence) and not isinstance(workers, str)
    names = tuple(workers) if listed else ()
    texts = all(isinstance(name, str) and name for name in names)
    if len(names) != count or not texts or len(dict.fromkeys(names)) != count:
        allowed = f"a list of {count} names, none twice: one for each list of actions"
        raise ScheduleError(unusable("workers", workers, allowed))
    return names


def check_for(schedule: Schedule | None, workers: Sequence[str]) -> None:
    """Raise ScheduleError unless these workers can follow it; None is no schedule."""
    if schedule is None:
        return
    for worker in schedule.workers:
        if worker not in workers:
            allowed = "workers of the cluster: " + ", ".join(workers)
            raise ScheduleError(unusable("schedule: worker", worker, allowed))
    schedule.check()
