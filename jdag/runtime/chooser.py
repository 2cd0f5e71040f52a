"""One chooser for every choice of a run that its program and settings leave open.

    chance       whether a fault befalls a frame
    amount       how long jitter, or the delay of a fault, is
    pick_job     which of the ready jobs of a device runs next
    pick_event   which of the events that are due at one instant happens next: that a
                 frame arrives, a job begins or ends, a program begins or goes on

`Chooser` draws amounts and chances from a seed, and orders ready jobs by a policy. A
strategy, or a script of the choices of an earlier run, overrides these methods. Picks
are asked for only where it sets `picks_jobs` or `picks_events`.

Invariants: nothing is asked where the answer is certain: a probability of 0 or 1, an
amount with equal bounds. A choice changes when things happen, and never gradient bits.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from jdag.errors import ScenarioError, unusable

# The order of a ready job, lowest first, by its `phase` (0: forward, else its pass) and
# its `path`. Jobs of equal keys run in the order in which they became ready.
JobKey = Callable[[Any], tuple[Any, ...]]


POLICIES: Mapping[str, JobKey] = {
    "path": lambda job: (job.phase, job.path),
    "backward_first": lambda job: (job.phase == 0, job.phase, job.path),
}


class Chooser:
    """Choices by a seed and a policy.

    "path" is the order of the program: forward before backward, then by pass, then by
    path. "backward_first": backward before forward, then the same. Both take what is
    ready; the orders of pipelines, which wait for what is not, are `jdag.schedules`.
    """

    picks_jobs = False
    picks_events = False
    untimed = False  # Whether it picks the order of all steps: `jdag.sim.untimed`.

    def __init__(self, seed: int = 0, policy: str = "path") -> None:
        self.job_key = POLICIES[policy]
        self._random = Random(seed)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability, between 0 and 1, happens."""
        return self._random.random() < probability

    def amount(self, least: int, most: int) -> int:
        """An int from `least` to `most`, which is larger."""
        # Not randrange: it draws a varying number of times, at five times the cost.
        return least + int(self._random.random() * (most - least + 1))

    def pick_job(self, worker: str, ready: Sequence[Any]) -> int:
        """The index of the job to run next; `ready` is in the policy's order."""
        del worker, ready
        return 0

    def pick_event(self, tied: Sequence[tuple[str, str]]) -> int:
        """The index of the event to happen next; each is given as (kind, worker)."""
        del tied
        return 0


def checked_index(index: int, count: int, what: str = "pick of the chooser") -> int:
    """Return an index that was picked; ScenarioError if it is none, with who did."""
    if type(index) is not int or not 0 <= index < count:
        allowed = f"an int from 0 to {count - 1}: an index"
        raise ScenarioError(unusable(what, index, allowed))
    return index
