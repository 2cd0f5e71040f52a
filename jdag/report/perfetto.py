"""A run as a trace that Perfetto and Chrome's about:tracing load.

The JSON trace-event format (Google, "Trace Event Format"): a process is a worker, its
first thread what it computes, its second what it sends and is sent, with an arrow for
each message; times are microseconds.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jdag.api.graph import dotted
from jdag.report.spans import Job, Spans, Transfer

JOBS_MAX = 5_000
MESSAGES_MAX = 10_000

_COMPUTE, _NETWORK = 1, 2
_US = 1_000


def trace_events(spans: Spans, workers: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object for what happened on these workers, in their order.

    A long run is cut to its first `JOBS_MAX` jobs, and to the first `MESSAGES_MAX`
    messages sent until then.
    """
    if len(spans.jobs) > JOBS_MAX:
        spans = spans.within((0, spans.jobs[JOBS_MAX].start_ns))
    jobs, transfers = spans.jobs[:JOBS_MAX], spans.transfers[:MESSAGES_MAX]
    number = {worker: place for place, worker in enumerate(workers, 1)}
    events = [event for w in workers for event in _named(w, number[w])]
    events += [_job(job, number[job.worker]) for job in jobs]
    for place, transfer in enumerate(transfers, 1):
        events += _transfer(transfer, place, number)
    events += [
        {
            "ph": "i",
            "s": "p",
            "name": mark.kind,
            "pid": number[mark.worker],
            "tid": _NETWORK,
            "ts": mark.at_ns / _US,
            "args": {"peer": mark.peer},
        }
        for mark in spans.marks
    ]
    # Sorted by time, since an arrow joins the slices that began last. The sort is
    # stable, so events of one message at one time keep their order.
    events.sort(key=lambda event: float(event.get("ts", 0)))
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _named(worker: str, pid: int) -> Iterator[dict[str, Any]]:
    base = {"ph": "M", "pid": pid}
    yield {**base, "name": "process_name", "args": {"name": worker}}
    yield {**base, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, name in ((_COMPUTE, "compute"), (_NETWORK, "network")):
        yield {**base, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _job(job: Job, pid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": job.function.rpartition(":")[2],
        "cat": job.kind,
        "pid": pid,
        "tid": _COMPUTE,
        "ts": job.start_ns / _US,
        "dur": (job.end_ns - job.start_ns) / _US,
        "args": {
            "kind": job.kind,
            "function": job.function,
            "context": job.context,
            "pass": job.number,
            "path": dotted(job.path),
        },
    }


def _transfer(
    transfer: Transfer, id: int, number: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield slices where a message left and arrived, and an arrow between them.

    A message with arrays is also an asynchronous span, since transfers may overlap.
    """
    name = f"{transfer.message} to {transfer.destination}"
    base = {"cat": "message", "name": name, "tid": _NETWORK}
    there = {**base, "pid": number[transfer.worker], "ts": transfer.start_ns / _US}
    here = {**base, "pid": number[transfer.destination], "ts": transfer.end_ns / _US}
    args = {
        "context": transfer.context,
        "pass": transfer.number,
        "path": dotted(transfer.path),
        "payload_bytes": transfer.payload_bytes,
        "wire_bytes": transfer.wire_bytes,
    }
    came = f"{transfer.message} from {transfer.worker}"
    yield {**there, "ph": "X", "dur": 0, "args": args}
    yield {**there, "ph": "s", "id": id}
    if transfer.payload_bytes:
        yield {**there, "ph": "b", "id": id, "args": args}
        yield {**there, "ph": "e", "id": id, "ts": here["ts"]}
    yield {**here, "ph": "X", "dur": 0, "name": came}
    yield {**here, "ph": "f", "bp": "e", "id": id}
