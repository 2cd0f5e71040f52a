"""Statistics of a worker: the values that it holds, its messages and its jobs."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from jdag.runtime.worker_runtime import WorkerRuntime


@dataclass(slots=True)
class Sent:
    """Counts of sent data. Bytes and frames include headers, acks and resends."""

    messages: int = 0
    payload_bytes: int = 0
    zero_bytes: int = 0  # Bytes of zeros, which are not sent.
    bytes: int = 0
    frames: int = 0
    resends: int = 0
    duplicates: int = 0  # Repeated frames that were received and dropped.


def total_sent(counts: Iterable[Sent]) -> Sent:
    return Sent(*map(sum, zip(*map(astuple, (Sent(), *counts)), strict=True)))


def info(
    host: WorkerRuntime, sent: Sent, busy_ns: int, *, lost: bool, waits_for: str = ""
) -> dict[str, Any]:
    """Count a worker's data. `waits_for` is the action that its list waits for."""
    values, engine = host.machine.values, host.engine
    return {
        "live_contexts": 0 if engine is None else engine.live_contexts,
        "live_passes": 0 if engine is None else engine.live_passes,
        "values_held": values.held,
        "bytes_held": values.bytes_held,
        "bytes_peak": values.bytes_peak,
        "activation_bytes_peak": values.activations_peak,
        "messages_sent": sent.messages,
        "payload_bytes_sent": sent.payload_bytes,
        "zero_bytes_saved": sent.zero_bytes,
        "bytes_sent": sent.bytes,
        "frames_sent": sent.frames,
        "resends": sent.resends,
        "duplicates": sent.duplicates,
        "busy_ns": busy_ns,
        "lost": lost,
        "waits_for": waits_for,
    }
