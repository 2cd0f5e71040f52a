"""The jobs, sends and receives of a trace, and their dependencies.

The trace formats of other tools do not represent programs. An operation that waited for
a program therefore depends on the operations that the program waited for.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jdag.runtime.trace import TraceRecord

# Maps kinds of jobs to kinds of bars. Jobs of other kinds belong to sums.
_DRAWN_AS = {
    **{"vjp": "backward", "vjpinputs": "input_grad", "vjpweights": "weight_grad"},
    **{"apply": "hook", "runsegment": "segment"},
}


class Operation(NamedTuple):
    """A job, a send or a receive.

    Attributes:
        id: index of its first record in the trace.
        start_ns: start time; equal to `end_ns` for a receive.
        end_ns: end time; for a send, the delivery of the message, -1 if it was lost.
        peer: the worker at the other end of a message.
        pair: id of the message's send; -1 for a job.
        payload_bytes: bytes of a message's arrays. For a job, `payload_bytes` and
            `wire_bytes` are 0.
        needs: ids of the operations of this worker that this operation waited for,
            because of data or program order.
        device: id of the previous job on this worker's device; None for the first.
        action: the pipeline action of a job, such as 0F3.
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
        """The kind of a job's bar, a key of `jdag.report.gantt.KINDS`.

        A forward outside of contexts is an update of leaves. Jobs that create zeros or
        ones are parts of sums.
        """
        if self.kind == "forward":
            return "forward" if self.context else "update"
        return _DRAWN_AS.get(self.kind, "sum")


def operations_of(records: Iterable[TraceRecord]) -> tuple[Operation, ...]:
    """Return the operations of a trace, in order of their first records.

    A job without an end record ends when its worker crashed, or with the last record.
    """
    # For each record: the operations on which the records that it causes depend.
    waits: list[tuple[int, ...]] = []
    operations: dict[int, Operation] = {}
    running: dict[int, None] = {}
    device: dict[str, int] = {}
    # By send. A frame may deliver an acknowledgement and the message.
    received: dict[int, int] = {}
    last_ns = 0
    for record in records:
        last_ns = record.time_ns
        before = dict.fromkeys(id for cause in record.causes for id in waits[cause])
        awaited = tuple(before)
        needs = tuple(id for id in before if operations[id].worker == record.worker)
        match record.kind:
            case "start":
                job = _job(record, needs, device.get(record.worker))
                operations[job.id] = job
                running[job.id] = None
                device[job.worker] = job.id
                awaited = (job.id,)
            case "finish":
                (id,) = waits[record.causes[0]]
                running.pop(id, None)
                operations[id] = operations[id]._replace(end_ns=record.time_ns)
            case "send":
                operations[record.index] = _send(record, needs)
                awaited = (record.index,)
            case "deliver" if record.causes:
                sent = operations[record.causes[0]]
                end_ns = max(sent.start_ns, record.time_ns)
                operations[sent.id] = sent._replace(end_ns=end_ns)
                receive = received.setdefault(sent.id, record.index)
                operations[receive] = _receive(receive, record, sent)
                awaited = (receive,)
            case "crash":
                for id in [i for i in running if operations[i].worker == record.worker]:
                    operations[id] = operations[id]._replace(end_ns=record.time_ns)
                    del running[id]
        waits.append(awaited)
    for id in running:
        operations[id] = operations[id]._replace(end_ns=last_ns)
    return tuple(operations.values())


def without_lost_sends(operations: Iterable[Operation]) -> Iterator[Operation]:
    return (operation for operation in operations if operation.end_ns >= 0)


def _job(record: TraceRecord, needs: tuple[int, ...], device: int | None) -> Operation:
    kind, context, number, path, function, action, _ = record.detail
    time_ns, worker = record.time_ns, record.worker
    fields = (worker, kind, function, context, number, path, time_ns, time_ns)
    more = {"needs": needs, "device": device, "action": action}
    return Operation(record.index, *fields, **more)


def _send(record: TraceRecord, needs: tuple[int, ...]) -> Operation:
    peer, message, context, number, path, payload_bytes, wire_bytes, _ = record.detail
    fields = (context, number, path, record.time_ns, -1, peer, record.index)
    sizes = (payload_bytes, wire_bytes)
    return Operation(
        record.index, record.worker, "send", message, *fields, *sizes, needs
    )


def _receive(receive: int, record: TraceRecord, sent: Operation) -> Operation:
    time_ns = record.time_ns
    return sent._replace(
        id=receive, worker=record.worker, kind="recv", start_ns=time_ns,
        end_ns=time_ns, peer=sent.worker, needs=(),
    )  # fmt: skip
