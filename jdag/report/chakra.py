"""Chakra execution traces of a run, one file for each worker.

A file is a sequence of protobuf messages, each preceded by its length as a varint: a
`GlobalMetadata`, then a `Node` for each operation. A job is a COMP_NODE. A message
between workers is a COMM_SEND_NODE in the sender's file and a COMM_RECV_NODE in the
receiver's file. The schema's fields are in microseconds; the attributes `start_time_ns`
and `duration_ns` are exact. Data dependencies and program order are in `data_deps`. The
order of jobs on the device is in `ctrl_deps`.

Chakra cannot represent dependencies between files, names of workers, drops, resends and
crashes. A send and its receive have the same `comm_tag`, and a rank is the index of a
worker. Messages that did not arrive are left out, since a replay would wait for them.

Source: MLCommons Chakra, schema/protobuf/et_def.proto.
"""

from collections.abc import Iterable, Sequence

from jdag.context.graph import dotted
from jdag.report.operations import Operation, without_lost_sends
from jdag.report.protobuf import nested, number, packed, varint

_VERSION = "0.0.4"
_COMPUTE, _SEND, _RECV = 4, 5, 6
_NS_PER_US = 1_000
# The fields of AttributeProto.
_INT32, _INT64, _UINT64, _STRING = 7, 9, 13, 29


def chakra_of(
    operations: Iterable[Operation], workers: Sequence[str]
) -> tuple[bytes, ...]:
    """Return the contents of each worker's file, in the order of `workers`."""
    rank = {worker: index for index, worker in enumerate(workers)}
    parts = [[_delimited(nested(1, _VERSION))] for _ in workers]
    completed = tuple(without_lost_sends(operations))
    ids = {operation.id for operation in completed}
    for operation in completed:
        needs = tuple(id for id in operation.needs if id in ids)
        parts[rank[operation.worker]].append(_delimited(_node(operation, needs, rank)))
    return tuple(map(b"".join, parts))


def _node(operation: Operation, needs: tuple[int, ...], rank: dict[str, int]) -> bytes:
    duration_ns = operation.end_ns - operation.start_ns
    attributes = [
        _attribute("start_time_ns", _UINT64, operation.start_ns),
        _attribute("duration_ns", _UINT64, duration_ns),
        _attribute("context", _STRING, operation.context),
        _attribute("pass", _UINT64, operation.number),
        _attribute("path", _STRING, dotted(operation.path)),
    ]
    kind = {"send": _SEND, "recv": _RECV}.get(operation.kind, _COMPUTE)
    if kind == _COMPUTE:
        attributes.append(_attribute("job", _STRING, operation.kind))
    else:
        ends = rank[operation.worker], rank[operation.peer]
        source, destination = ends if kind == _SEND else ends[::-1]
        attributes += [
            _attribute("comm_src", _INT32, source),
            _attribute("comm_dst", _INT32, destination),
            _attribute("comm_tag", _INT32, operation.pair),
            _attribute("comm_size", _INT64, operation.wire_bytes),
            _attribute("payload_bytes", _INT64, operation.payload_bytes),
        ]
    return b"".join(
        [
            number(1, operation.id),
            nested(2, operation.name),
            number(3, kind),
            packed(4, () if operation.device is None else (operation.device,)),
            packed(5, needs),
            number(6, operation.start_ns // _NS_PER_US),
            number(7, duration_ns // _NS_PER_US),
            *[nested(10, attribute) for attribute in attributes],
        ]
    )


def _attribute(name: str, field: int, value: int | str) -> bytes:
    data = nested(field, value) if isinstance(value, str) else number(field, value)
    return nested(1, name) + data


def _delimited(message: bytes) -> bytes:
    return varint(len(message)) + message
