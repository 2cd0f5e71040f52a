"""How a node stands: what it holds, what it has sent, whether anything goes on."""

from typing import Any

from jdag.compute.machine import Machine
from jdag.rpc.company import Company
from jdag.rpc.jobs import Jobs


def quiet(jobs: Jobs, company: Company) -> dict[str, Any]:
    """Whether nothing is under way here, and how many messages were said and heard."""
    peers = company.living
    return {
        "idle": jobs.idle and all(peer.outbox.empty for peer in peers),
        "sent": sum(peer.outbox.messages_sent for peer in peers),
        "got": sum(peer.inbox.messages for peer in peers),
    }


def info(
    engine: Any, machine: Machine, jobs: Jobs, company: Company
) -> dict[str, int | bool]:
    """What a node holds now, and what it has sent and computed so far."""
    values, peers = machine.values, company.peers.values()
    return {
        "live_contexts": 0 if engine is None else engine.live_contexts,
        "live_passes": 0 if engine is None else engine.live_passes,
        "values_held": values.held,
        "bytes_held": values.bytes_held,
        "bytes_peak": values.bytes_peak,
        "messages_sent": sum(peer.outbox.messages_sent for peer in peers),
        "payload_bytes_sent": sum(peer.outbox.payload_bytes for peer in peers),
        "zero_bytes_saved": sum(peer.zero_bytes for peer in peers),
        "bytes_sent": sum(peer.outbox.bytes_sent for peer in peers),
        "frames_sent": sum(peer.outbox.frames_sent for peer in peers),
        "resends": sum(peer.outbox.resends for peer in peers),
        "duplicates": sum(peer.link.duplicates for peer in peers),
        "busy_ns": jobs.busy_ns,
        "lost": False,
    }
