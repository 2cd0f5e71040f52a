"""A run as Chakra execution traces, one file for each worker.

Each file is a `GlobalMetadata` and then a `Node` for each operation, each after its
length as a varint. A job is a COMP_NODE, a message a COMM_SEND_NODE in the file of one
worker and a COMM_RECV_NODE in that of another. Exact times are the attributes
`start_time_ns` and `duration_ns`, as the fields of the schema are microseconds.

Source: MLCommons Chakra, schema/protobuf/et_def.proto.

Chakra cannot say: dependencies between files (the two ends of a message are found by
`comm_tag`); names of workers (a rank is a worker's place); drops, resends, crashes; and
messages that did not arrive, which are left out since a replay would wait for them.
Data and a program's order are both `data_deps`, the device's order is `ctrl_deps`.
"""

from collections.abc import Iterable, Sequence

from jdag.context.graph import dotted
from jdag.report.operations import Operation, without_lost_sends
from jdag.report.protobuf import nested, number, packed, varint

_VERSION = "0.0.4"
_COMPUTE, _SEND, _RECV = 4, 5, 6
_NS = 1_000  # Of a microsecond.
# The fields of AttributeProto.
_INT32, _INT64, _UINT64, _STRING = 7, 9, 13, 29


def chakra_of(
    operations: Iterable[Operation], workers: Sequence[str]
) -> tuple[bytes, ...]:
    """Return the contents of each worker's file, in the order of `workers`."""
    rank = {worker: place for place, worker in enumerate(workers)}
    parts = [[_delimited(nested(1, _VERSION))] for _ in workers]
    kept = tuple(without_lost_sends(operations))
    ids = {one.id for one in kept}
    for one in kept:
        needs = tuple(id for id in one.needs if id in ids)
        parts[rank[one.worker]].append(_delimited(_node(one, needs, rank)))
    return tuple(b"".join(one) for one in parts)


def _node(one: Operation, needs: tuple[int, ...], rank: dict[str, int]) -> bytes:
    duration_ns = one.end_ns - one.start_ns
    attributes = [
        _attribute("start_time_ns", _UINT64, one.start_ns),
        _attribute("duration_ns", _UINT64, duration_ns),
        _attribute("context", _STRING, one.context),
        _attribute("pass", _UINT64, one.number),
        _attribute("path", _STRING, dotted(one.path)),
    ]
    kind = {"send": _SEND, "recv": _RECV}.get(one.kind, _COMPUTE)
    if kind == _COMPUTE:
        attributes.append(_attribute("job", _STRING, one.kind))
    else:
        ends = rank[one.worker], rank[one.peer]
        source, destination = ends if kind == _SEND else ends[::-1]
        attributes += [
            _attribute("comm_src", _INT32, source),
            _attribute("comm_dst", _INT32, destination),
            _attribute("comm_tag", _INT32, one.pair),
            _attribute("comm_size", _INT64, one.wire_bytes),
            _attribute("payload_bytes", _INT64, one.payload_bytes),
        ]
    return b"".join(
        [
            number(1, one.id),
            nested(2, one.name),
            number(3, kind),
            packed(4, () if one.device is None else (one.device,)),
            packed(5, needs),
            number(6, one.start_ns // _NS),
            number(7, duration_ns // _NS),
            *[nested(10, attribute) for attribute in attributes],
        ]
    )


def _attribute(name: str, field: int, value: int | str) -> bytes:
    said = nested(field, value) if isinstance(value, str) else number(field, value)
    return nested(1, name) + said


def _delimited(message: bytes) -> bytes:
    return varint(len(message)) + message
