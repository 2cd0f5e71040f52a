"""The session of a node, as set by the control plane."""

from collections.abc import Callable
from dataclasses import dataclass

from jdag.processes.net.pulse import Helper
from jdag.processes.net.streams import Stream
from jdag.processes.session.cluster_file import SessionSettings
from jdag.processes.session.membership import Membership
from jdag.schedules.actions import ScheduleStep


@dataclass(frozen=True)
class SessionInfo:
    """The session of a node, as the control plane tells it.

    `worker` is its name, `main` the one whose program runs, `settings` what all nodes
    are configured by. `members` are the other workers; the control plane changes them
    before it calls `Node.joined`, and the node notes there which it has lost.

    `dial(peer, received)` connects to a peer of which so many messages were received,
    and returns the stream and how many the peer has received. It blocks for up to
    `deadline_s`, so it needs a thread of its own. It raises JoinError, or OSError. Only
    members with `is_dialled` are dialled from here: the others dial this process.

    `look(peer)` is for a peer that dials this process and whose stream has ended: it
    raises JoinError if its process is known to have ended, and blocks likewise.

    `watched`: main is told how each process of a worker ended by its parent. A peer
    that is not reached any more is then lost by that report, which says why.

    `program` is the name of main's script. `helper`: the helper process, which others
    ask whether this one computes.
    """

    worker: str
    main: str
    settings: SessionSettings
    members: Membership
    dial: Callable[[str, int], tuple[Stream, int]]
    look: Callable[[str], object] = lambda peer: None  # The peer is assumed alive.
    watched: bool = False
    program: str = ""
    helper: Helper | None = None

    @property
    def steps(self) -> tuple[ScheduleStep, ...]:
        """The list of this worker in the schedule; empty if it has none."""
        schedule = self.settings.schedule
        lists = {} if schedule is None else schedule.lists
        return lists.get(self.worker, ())
