"""How a node stands: what it holds, what it has sent, whether anything goes on."""

from collections.abc import Callable
from typing import Any

from jdag.errors import JdagError
from jdag.rpc.company import Company
from jdag.rpc.jobs import Jobs
from jdag.rpc.loop import clock_ns
from jdag.rpc.place import Place
from jdag.runtime.stats import Sent

SETTLE_S, SETTLE_LOOK_S = 3600.0, 0.001


def quiet(jobs: Jobs, company: Company) -> dict[str, Any]:
    """Whether nothing is under way here, and how many messages were said and heard."""
    peers = company.living
    return {
        "idle": jobs.idle and all(peer.outbox.empty for peer in peers),
        "sent": sum(peer.outbox.messages_sent for peer in peers),
        "got": sum(peer.inbox.messages for peer in peers),
    }


def sent_by(company: Company) -> Sent:
    """Return what left a node, over all connections."""
    sent = Sent()
    for peer in company.peers.values():
        out = peer.outbox
        sent.messages += out.messages_sent
        sent.payload_bytes += out.payload_bytes
        sent.zero_bytes += peer.zero_bytes
        sent.bytes += out.bytes_sent
        sent.frames += out.frames_sent
        sent.resends += out.resends
        sent.duplicates += peer.link.duplicates
    return sent


def info_of_all(
    place: Place,
    company: Company,
    own: Callable[[], dict[str, Any]],
    within_s: float | None,
) -> dict[str, dict[str, Any]]:
    """For each worker of a session, what it says of how it stands.

    Args:
        place: of the node that asks.
        company: of that node.
        own: says how that one stands.
        within_s: how long is waited for the others; None: until they say, or are lost.
    """
    found = company.ask_all({"what": "info"}, within_s)
    found[place.worker] = own()
    nothing = dict.fromkeys(found[place.worker], 0)
    living = [peer.name for peer in company.living]
    return {
        worker: found.get(worker) or {**nothing, "lost": worker not in living}
        for worker in place.workers
    }


def settle(
    company: Company, own: Callable[[], dict[str, Any]], check: Callable[[], None]
) -> None:
    """Wait until nothing goes on anywhere: all is sent, heard and computed.

    Args:
        company: of the node that waits.
        own: says whether all is quiet on that.
        check: raises where the node is closed.

    Raises:
        JdagError: something goes on for longer than anybody waits.
    """
    before: object = None
    due_ns = clock_ns() + round(SETTLE_S * 1e9)
    now: list[tuple[str, dict[str, Any]]] = []
    while clock_ns() < due_ns:
        check()
        now = sorted({**company.ask_all({"what": "quiet"}), "": own()}.items())
        each = [one for _, one in now]
        under_way = sum(one["sent"] - one["got"] for one in each)
        idle = all(one["idle"] for one in each)
        if idle and now == before and (company.gone or not under_way):
            return
        company.stopping.wait(0 if idle else SETTLE_LOOK_S)
        before = now
    busy = [worker or "the worker that waits" for worker, one in now if not one["idle"]]
    raise JdagError(
        f"the cluster has not settled within {SETTLE_S:g} s: something goes on, or is "
        f"under way, on {', '.join(busy) or 'its connections'}"
    )
