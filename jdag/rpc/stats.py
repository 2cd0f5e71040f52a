"""What a session holds and has sent, and whether anything goes on in it."""

from collections.abc import Callable
from typing import Any

from jdag.errors import JdagError
from jdag.rpc.jobs import Jobs
from jdag.rpc.loop import clock_ns
from jdag.rpc.peers import PeerTable
from jdag.rpc.session_info import SessionInfo

SETTLE_S, SETTLE_LOOK_S = 3600.0, 0.001


def quiet(jobs: Jobs, peers: PeerTable) -> dict[str, Any]:
    """Whether nothing is under way here, and how many messages were sent and came."""
    living = peers.living
    return {
        "idle": jobs.idle and all(peer.idle for peer in living),
        "sent": sum(peer.sent.messages for peer in living),
        "got": sum(peer.reader.messages for peer in living),
    }


def info_of_all(
    session: SessionInfo,
    peers: PeerTable,
    own: Callable[[], dict[str, Any]],
    within_s: float | None,
) -> dict[str, dict[str, Any]]:
    """Return the counts of each worker of a session.

    Without `within_s`, peers are waited for until they answer or are lost.
    """
    found = peers.ask_all({"what": "info"}, within_s)
    found[session.worker] = own()
    nothing = dict.fromkeys(found[session.worker], 0)
    living = [peer.name for peer in peers.living]
    return {
        worker: found.get(worker) or {**nothing, "lost": worker not in living}
        for worker in session.workers
    }


def settle(
    peers: PeerTable, own: Callable[[], dict[str, Any]], check: Callable[[], None]
) -> None:
    """Wait until everything is sent, received and computed on all workers.

    `own` returns what `quiet` does for this node; `check` raises if it is closed.

    Raises:
        JdagError: something still goes on after `SETTLE_S`.
    """
    before: object = None
    due_ns = clock_ns() + round(SETTLE_S * 1e9)
    now: list[tuple[str, dict[str, Any]]] = []
    while clock_ns() < due_ns:
        check()
        now = sorted({**peers.ask_all({"what": "quiet"}), "": own()}.items())
        each = [one for _, one in now]
        under_way = sum(one["sent"] - one["got"] for one in each)
        idle = all(one["idle"] for one in each)
        if idle and now == before and (peers.gone or not under_way):
            return
        peers.stopping.wait(0 if idle else SETTLE_LOOK_S)
        before = now
    busy = [worker or "the worker that waits" for worker, one in now if not one["idle"]]
    raise JdagError(
        f"the cluster has not settled within {SETTLE_S:g} s: something goes on, or is "
        f"under way, on {', '.join(busy) or 'its connections'}"
    )
