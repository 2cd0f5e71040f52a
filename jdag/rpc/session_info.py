"""What the control plane tells a node of its session, and asks of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from jdag.rpc.streams import Stream
from jdag.runtime.tables import NESTING_MAX


class Node(Protocol):
    """One process's part of a session, as the control plane uses it.

    Every method may be called on any thread, but `run`, which is a worker's main one.
    """

    def joined(self, peer: str, incarnation: int) -> None:
        """Take messages for a peer from now on, which wait until it is connected.

        A former incarnation of that name is gone, whether or not that was known.
        """

    def adopt(self, peer: str, incarnation: int, stream: Stream, received: int) -> None:
        """Own a connection to a peer, which has received messages up to a number.

        Who has been told of the others first dials them: it may come before `joined`.
        """

    def received(self, peer: str) -> int:
        """Return up to which number messages of a peer have been received; 0: none."""

    def lost(self, peer: str, why: str) -> None:
        """Know that a peer is gone."""

    def loss(self, worker: str) -> str | None:
        """Return why an incarnation of a worker was given up; None if it was not."""

    def begin(self) -> None:
        """Work from now on, on a thread of its own: what main's node does."""

    def run(self) -> None:
        """Work until the session has ended: closed, drained, or its main is lost."""

    def drain(self) -> None:
        """Finish what is under way, say goodbye to peers, and let `run` return."""

    def close(self) -> None:
        """Let `run` return, and let go of everything; may be called again."""


def _assume_alive(peer: str) -> None:
    """Default liveness check: assume that the peer is alive."""


@dataclass(frozen=True)
class SessionInfo:
    """The session of a node, as the control plane tells it.

    `worker` is its name, `workers` all names in order, `main` the one whose program
    runs. `incarnations` and `allowed` (the modules whose functions may be named there)
    change as workers join; they are changed before `Node.joined` is called.

    `dial(peer, received)` connects to a peer of which so many messages were received,
    and returns the stream and how many it has received; it blocks up to `deadline_s`,
    so it is for a thread of its own. It raises JoinError, or OSError. Only who is in
    `dials` is dialled from here: the others dial us.

    `look(peer)` is for one who dials us and whose stream has ended: it raises JoinError
    if its process is known not to be there any more, and blocks likewise.

    `watched` tells that whoever started the first processes of all workers tells main
    how one has ended: who is not there any more is then lost by that, which says why.

    `nesting_max` tells how deep programs may call each other.

    `gone(peer, why)` is to be called by main's node when it finds that a peer is lost,
    so that the others are told; it does not block.
    """

    worker: str
    workers: tuple[str, ...]
    main: str
    incarnations: dict[str, int]
    allowed: dict[str, tuple[str, ...]]
    deadline_s: float
    dial: Callable[[str, int], tuple[Stream, int]]
    gone: Callable[[str, str], None]
    look: Callable[[str], None] = _assume_alive
    dials: dict[str, bool] = field(default_factory=dict)
    watched: bool = False
    nesting_max: int = NESTING_MAX


MakeNode = Callable[[SessionInfo], Node]
