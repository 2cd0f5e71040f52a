"""A run as a trace that Perfetto and Chrome's about:tracing load.

The JSON trace-event format (Google, "Trace Event Format"): a process is a worker, its
first thread the device, its second what it sends; times are microseconds.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jdag.report.spans import Job, Spans, Transfer

JOBS_MAX = 5_000

_DEVICE, _LINK = 1, 2
_US = 1_000


def trace_events(spans: Spans, workers: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object for what happened on these workers, in their order.

    Of a long run it has the first `JOBS_MAX` jobs and what was sent until then.
    """
    if len(spans.jobs) > JOBS_MAX:
        spans = spans.within((0, spans.jobs[JOBS_MAX].start_ns))
    number = {worker: place for place, worker in enumerate(workers, 1)}
    events = [event for w in workers for event in _named(w, number[w])]
    events += [_job(job, number[job.worker]) for job in spans.jobs]
    for place, transfer in enumerate(spans.transfers, 1):
        events += _transfer(transfer, place, number)
    events += [
        {
            "ph": "i",
            "s": "p",
            "name": mark.kind,
            "pid": number[mark.worker],
            "tid": _LINK,
            "ts": mark.at_ns / _US,
            "args": {"peer": mark.peer},
        }
        for mark in spans.marks
    ]
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _named(worker: str, pid: int) -> Iterator[dict[str, Any]]:
    base = {"ph": "M", "pid": pid}
    yield {**base, "name": "process_name", "args": {"name": worker}}
    yield {**base, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, name in ((_DEVICE, "device"), (_LINK, "sends")):
        yield {**base, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _dotted(path: tuple[int, ...]) -> str:
    return ".".join(map(str, path))


def _job(job: Job, pid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": job.function.rpartition(":")[2],
        "cat": job.kind,
        "pid": pid,
        "tid": _DEVICE,
        "ts": job.start_ns / _US,
        "dur": (job.end_ns - job.start_ns) / _US,
        "args": {
            "kind": job.kind,
            "function": job.function,
            "context": job.context,
            "pass": job.number,
            "path": _dotted(job.path),
        },
    }


def _transfer(
    transfer: Transfer, id: int, number: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """A message: an asynchronous span, as any number are on their way at once."""
    base = {
        "cat": "message",
        "name": f"{transfer.message} to {transfer.destination}",
        "id": id,
        "pid": number[transfer.worker],
        "tid": _LINK,
    }
    args = {
        "context": transfer.context,
        "pass": transfer.number,
        "path": _dotted(transfer.path),
        "payload_bytes": transfer.payload_bytes,
        "wire_bytes": transfer.wire_bytes,
    }
    yield {**base, "ph": "b", "ts": transfer.start_ns / _US, "args": args}
    yield {**base, "ph": "e", "ts": transfer.end_ns / _US}
