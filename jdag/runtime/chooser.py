"""The source of all choices that the program and settings of a run leave open.

    chance       whether a fault affects a frame
    amount       the length of jitter, or of a fault's delay
    pick_job     the next job of those that are ready on a device
    pick_event   the next event of those due at one instant: arrival of a frame, begin
                 or end of a job, start or resumption of a program

`Chooser` draws amounts and chances from a seed, and orders ready jobs by a policy. A
strategy, or a script of an earlier run's choices, overrides these methods. Picks are
requested only if it sets `picks_jobs` or `picks_events`.

Invariants: nothing is requested if only one answer is possible: a probability of 0 or
1, an amount with equal bounds. A choice changes times and orders, never gradient bits.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from jdag.errors import ScenarioError, unusable

# The sort key of a ready job, from its `phase` (0: forward, else the number of its
# pass) and `path`. Jobs with equal keys run in the order in which they became ready.
JobKey = Callable[[Any], tuple[Any, ...]]


POLICIES: Mapping[str, JobKey] = {
    "path": lambda job: (job.phase, job.path),
    "backward_first": lambda job: (job.phase == 0, job.phase, job.path),
}


class Chooser:
    """Makes choices from a seed and a policy.

    "path" is the order of the program: forward before backward, then by pass, then by
    path. "backward_first" puts backward before forward. Both order only ready jobs.
    Pipeline orders, which wait for jobs that are not ready, are in `jdag.schedules`.
    """

    picks_jobs = False
    picks_events = False
    untimed = False  # Whether the chooser orders all steps: see `jdag.sim.untimed`.

    def __init__(self, seed: int = 0, policy: str = "path") -> None:
        self.job_key = POLICIES[policy]
        self._random = Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def amount(self, least: int, most: int) -> int:
        # randrange would draw a varying number of times, at five times the cost.
        return least + int(self._random.random() * (most - least + 1))

    def pick_job(self, worker: str, ready: Sequence[Any]) -> int:
        """Return the index of the next job. `ready` is in the order of the policy."""
        del worker, ready
        return 0

    def pick_event(self, tied: Sequence[tuple[str, str]]) -> int:
        """Return the index of the next event. `tied` has (kind, worker) for each."""
        del tied
        return 0


def checked_index(index: int, count: int, name: str = "pick of the chooser") -> int:
    """Return a picked index. Raise ScenarioError if it is out of range."""
    if type(index) is not int or not 0 <= index < count:
        allowed = f"an index from 0 to {count - 1}"
        raise ScenarioError(unusable(name, index, allowed))
    return index
