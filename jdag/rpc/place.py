"""Where a node stands in a session: what the control plane tells it, and asks of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

# A stream of bytes between two nodes; the control plane only hands it on.
Stream = Any


class Node(Protocol):
    """One process's part of a session, as the control plane uses it.

    Every method may be called on any thread, but `run`, which is a worker's main one.
    """

    def joined(self, peer: str, incarnation: int) -> None:
        """Take messages for a peer from now on, which wait until it is connected.

        A former incarnation of that name is gone, whether or not that was known.
        """

    def adopt(self, peer: str, incarnation: int, stream: Stream, received: int) -> None:
        """Own a connection to a peer, which has received messages up to a number."""

    def received(self, peer: str) -> int:
        """Return up to which number messages of a peer have been received; 0: none."""

    def lost(self, peer: str, why: str) -> None:
        """Know that a peer is gone."""

    def run(self) -> None:
        """Work until the session has ended: closed, drained, or its main is lost."""

    def drain(self) -> None:
        """Finish what is under way, say goodbye to peers, and let `run` return."""

    def close(self) -> None:
        """Let `run` return, and let go of everything; may be called again."""


@dataclass(frozen=True)
class Place:
    """Where a node stands.

    `worker` is its name, `workers` all names in order, `main` the one whose program
    runs. `incarnations` and `allowed` (the modules whose functions may be named there)
    change as workers join; they are changed before `Node.joined` is called.

    `dial(peer, received)` connects to a peer of which so many messages were received,
    and returns the stream and how many it has received; it blocks up to `deadline_s`,
    so it is for a thread of its own. It raises JoinError, or OSError. Only who is in
    `dials` is dialled from here: the others dial us.

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
    dials: dict[str, bool] = field(default_factory=dict)


MakeNode = Callable[[Place], Node]


class Gate(Protocol):
    """Where others come in to a node."""

    address: str

    def close(self) -> None:
        """Let nobody in any more."""


@dataclass(frozen=True)
class Admitted:
    """Whom a token lets in, and up to which number this side has received."""

    worker: str
    incarnation: int
    received: int


Admit = Callable[[bytes], Any]
Take = Callable[[Any, Stream, int], None]
# Opens a gate: whom a token lets in (`Admitted` or None), and what takes who came in.
OpenGate = Callable[[Admit, Take], Gate]
# Connects to a gate: address, token, received, seconds; gives stream and theirs.
DialGate = Callable[[str, bytes, int, float], tuple[Stream, int]]
