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
    """The session of a node, as set by the control plane.

    Attributes:
        main: the name of the node that runs the user's program.
        settings: the settings of the session, equal on all nodes.
        members: the other workers. The control plane updates `members` before it calls
            `Node.joined`; the node records losses.
        dial: `dial(peer, received)` connects to a peer; `received` is the number of
            frames received from it. Returns the stream, and the number of frames that
            the peer has received. Blocks for up to `deadline_s`, so it must be called
            on a separate thread. Raises JoinError or OSError. Only for members with
            `is_dialled`; the other members dial this process.
        look: `look(peer)` checks a peer that dials this process and whose stream has
            ended. Raises JoinError if the peer's process is known to have ended. May
            block as long as `dial`.
        watched: whether the parent of each worker process reports to main when the
            process ends. An unreachable peer is then lost when this report arrives; the
            report contains the reason.
        program: the name of main's script.
    """

    worker: str
    main: str
    settings: SessionSettings
    members: Membership
    dial: Callable[[str, int], tuple[Stream, int]]
    look: Callable[[str], object] = lambda peer: None  # Assume that the peer is alive.
    watched: bool = False
    program: str = ""
    helper: Helper | None = None

    @property
    def steps(self) -> tuple[ScheduleStep, ...]:
        schedule = self.settings.schedule
        return () if schedule is None else schedule.lists.get(self.worker, ())
