"""What the control plane tells a node of its session."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jdag.rpc.streams import Stream
from jdag.runtime.tables import NESTING_MAX


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
    look: Callable[[str], object] = lambda peer: None  # The peer is assumed alive.
    dials: dict[str, bool] = field(default_factory=dict)
    watched: bool = False
    nesting_max: int = NESTING_MAX
