"""The session of a node, as set by the control plane."""

from collections.abc import Callable
from dataclasses import dataclass

from jdag.rpc.membership import Membership
from jdag.rpc.pulse import Helper
from jdag.rpc.requests import Journaled
from jdag.rpc.streams import Stream
from jdag.runtime.validation import NESTING_MAX
from jdag.schedules import Schedule
from jdag.schedules.actions import Step


@dataclass(frozen=True)
class SessionInfo:
    """The session of a node, as the control plane tells it.

    `worker` is its name, `workers` all names in order, `main` the one whose program
    runs. `members` are the other workers; the control plane changes them before it
    calls `Node.joined`, and the node notes there which it has lost.

    `dial(peer, received)` connects to a peer of which so many messages were received,
    and returns the stream and how many the peer has received. It blocks for up to
    `deadline_s`, so it needs a thread of its own. It raises JoinError, or OSError. Only
    members with `is_dialled` are dialled from here: the others dial this process.

    `look(peer)` is for a peer that dials this process and whose stream has ended: it
    raises JoinError if its process is known to have ended, and blocks likewise.

    `watched`: main is told how each process of a worker ended by its parent. A peer
    that is not reached any more is then lost by that report, which says why.

    `nesting_max`: how deep programs may call each other. `schedule`: the order of the
    work of pipelines, if there is one. `events_max`: how many events of its trace the
    node keeps; 0: it has none. `journal`: where it writes the order of what its engine
    handles, if it does. `helper`: the helper process, which others ask whether this one
    computes.
    """

    worker: str
    workers: tuple[str, ...]
    main: str
    members: Membership
    deadline_s: float
    dial: Callable[[str, int], tuple[Stream, int]]
    look: Callable[[str], object] = lambda peer: None  # The peer is assumed alive.
    watched: bool = False
    nesting_max: int = NESTING_MAX
    schedule: Schedule | None = None
    events_max: int = 0
    journal: Journaled | None = None
    helper: Helper | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """The list of this worker in the schedule; empty if it has none."""
        lists = {} if self.schedule is None else self.schedule.lists
        return lists.get(self.worker, ())
