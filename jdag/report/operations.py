"""The jobs, sends and receives of a trace, and which of them waits for which.

Traces for other tools have no programs. Here an operation that waited for a program
depends on what that program waited for.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jdag.runtime.trace import TraceRecord

# What is none of these is for a sum.
_DRAWN_AS = {
    **{"vjp": "backward", "vjpinputs": "input_grad", "vjpweights": "weight_grad"},
    **{"apply": "hook", "runsegment": "segment"},
}


class Operation(NamedTuple):
    """A job, a send or a receive; `id` is the index of its first record.

    `needs` are the ids of the operations of the same worker that it waited for, data
    and the program's order alike; `device` is that of the job that ran before it (None:
    there is none). `peer` is the other worker of a message, and `pair` the index of its
    send (-1 for a job). A job has no bytes; `action` is that of a pipeline, as 0F3.
    Times are nanoseconds; a send ends when the message is handed on, -1 if that did not
    happen; a receive takes no time.
    """

    id: int
    worker: str
    kind: str
    name: str
    context: str
    number: int
    path: tuple[int, ...]
    start_ns: int
    end_ns: int
    peer: str = ""
    pair: int = -1
    payload_bytes: int = 0
    wire_bytes: int = 0
    needs: tuple[int, ...] = ()
    device: int | None = None
    action: str = ""

    @property
    def drawn_as(self) -> str:
        """What a job is for: one of the kinds of `jdag.report.gantt`.

        A forward outside of contexts makes new versions of leaves; what makes zeros or
        ones makes them for a sum.
        """
        if self.kind == "forward":
            return "forward" if self.context else "update"
        return _DRAWN_AS.get(self.kind, "sum")


def operations_of(records: Iterable[TraceRecord]) -> tuple[Operation, ...]:
    """Return the operations of a trace, in order of their first records.

    A job without an end ends when its worker crashed, or with the last record.
    """
    waits: list[tuple[int, ...]] = []  # Of each record, the operations it stands for.
    found: dict[int, Operation] = {}
    running: dict[int, None] = {}
    device: dict[str, int] = {}
    last_ns = 0
    for record in records:
        last_ns = record.time_ns
        before = dict.fromkeys(id for cause in record.causes for id in waits[cause])
        stands = tuple(before)
        here = tuple(id for id in before if found[id].worker == record.worker)
        match record.kind:
            case "start":
                job = _job(record, here, device.get(record.worker))
                found[job.id] = job
                running[job.id] = None
                device[job.worker] = job.id
                stands = (job.id,)
            case "finish":
                (id,) = waits[record.causes[0]]
                running.pop(id, None)
                found[id] = found[id]._replace(end_ns=record.time_ns)
            case "send":
                found[record.index] = _send(record, here)
                stands = (record.index,)
            case "deliver" if record.causes:
                sent = found[record.causes[0]]
                end_ns = max(sent.start_ns, record.time_ns)
                found[sent.id] = sent._replace(end_ns=end_ns)
                found[record.index] = _receive(record, sent)
                stands = (record.index,)
            case "crash":
                for id in [i for i in running if found[i].worker == record.worker]:
                    found[id] = found[id]._replace(end_ns=record.time_ns)
                    del running[id]
        waits.append(stands)
    for id in running:
        found[id] = found[id]._replace(end_ns=last_ns)
    return tuple(found.values())


def without_lost_sends(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the operations without the sends of messages that did not arrive."""
    return (one for one in operations if one.end_ns >= 0)


def _job(record: TraceRecord, needs: tuple[int, ...], device: int | None) -> Operation:
    kind, context, number, path, function, action, _ = record.detail
    at, worker = record.time_ns, record.worker
    said = (worker, kind, function, context, number, path, at, at)
    more = {"needs": needs, "device": device, "action": action}
    return Operation(record.index, *said, **more)


def _send(record: TraceRecord, needs: tuple[int, ...]) -> Operation:
    peer, message, context, number, path, payload_bytes, wire_bytes, _ = record.detail
    said = (context, number, path, record.time_ns, -1, peer, record.index)
    sizes = (payload_bytes, wire_bytes)
    return Operation(record.index, record.worker, "send", message, *said, *sizes, needs)


def _receive(record: TraceRecord, sent: Operation) -> Operation:
    at = record.time_ns
    return sent._replace(
        id=record.index, worker=record.worker, kind="recv", start_ns=at, end_ns=at,
        peer=sent.worker, needs=(),
    )  # fmt: skip
