"""The trace of a run in the formats of other tools, read back by protobuf's library."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from jdag.report.chakra import chakra_of
from jdag.report.goal import goal_of
from jdag.report.operations import operations_of
from jdag.report.spans import spans_of
from jdag.report.track_events import track_events
from tests.unit.report import test_report
from tests.unit.report.test_report import STAGES, deliver, finish, noted, send, start

pb = pytest.importorskip("google.protobuf.descriptor_pb2")
factory = pytest.importorskip("google.protobuf.message_factory")
pool = pytest.importorskip("google.protobuf.descriptor_pool")

slow = test_report.slow

# The parts of the tools' schemas that are used: message, then fields as
# name, number, type ("*" in front: repeated; a capital: a message of that name).
CHAKRA = {
    "AttributeProto": "name 1 string, int32_val 7 int32, int64_val 9 int64,"
    " uint64_val 13 uint64, string_val 29 string",
    "GlobalMetadata": "version 1 string, attr 2 *AttributeProto",
    "Node": "id 1 uint64, name 2 string, type 3 uint64, ctrl_deps 4 *uint64,"
    " data_deps 5 *uint64, start_time_micros 6 uint64, duration_micros 7 uint64,"
    " attr 10 *AttributeProto",
}
PERFETTO = {
    "Trace": "packet 1 *TracePacket",
    "TracePacket": "timestamp 8 uint64, sequence 10 uint32, track_event 11 TrackEvent,"
    " track_descriptor 60 TrackDescriptor",
    "ProcessDescriptor": "pid 1 int32, process_name 6 string",
    "TrackDescriptor": "uuid 1 uint64, name 2 string, process 3 ProcessDescriptor,"
    " parent_uuid 5 uint64, child_ordering 11 uint32",
    "DebugAnnotation": "uint_value 3 uint64, string_value 6 string, name 10 string",
    "TrackEvent": "debug_annotations 4 *DebugAnnotation, type 9 uint32,"
    " track_uuid 11 uint64, categories 22 *string, name 23 string,"
    " flow_ids 47 *fixed64, terminating_flow_ids 48 *fixed64",
}


def schema(messages: dict[str, str]) -> dict[str, Any]:
    file = pb.FileDescriptorProto(name="one.proto", package="one", syntax="proto2")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            called, number, kind = field.split()
            held = message.field.add(name=called, number=int(number))
            held.label = 3 if kind.startswith("*") else 1
            kind = kind.lstrip("*")
            if kind[0].isupper():
                held.type, held.type_name = 11, f".one.{kind}"
            else:
                held.type = getattr(held, f"TYPE_{kind.upper()}")
    pools = pool.DescriptorPool()
    pools.Add(file)
    found = {name: pools.FindMessageTypeByName(f"one.{name}") for name in messages}
    return {name: factory.GetMessageClass(one) for name, one in found.items()}


def delimited(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        length = shift = 0
        while True:
            part = data[at]
            at += 1
            length |= (part & 0x7F) << shift
            shift += 7
            if part < 0x80:
                break
        yield data[at : at + length]
        at += length
    assert at == len(data)


def held(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        (value,) = [v for f, v in one.ListFields() if f.name != "name"]
        found[one.name] = value
    return found


def spans(trace: Any):
    read = spans_of(trace)
    jobs = [(j.worker, j.name, j.kind, j.start_ns, j.end_ns) for j in read.jobs]
    sent = [
        (t.worker, t.peer, t.name, t.wire_bytes, t.start_ns, t.end_ns)
        for t in read.transfers
    ]
    assert len(jobs) >= 3 and len(sent) >= 3
    return sorted(jobs), sorted(sent)


def test_an_operation_needs_what_the_programs_before_it_waited_for():
    trace = noted(
        start(10, "a"),
        finish(15, "a", 0),
        (15, "resume", "a", (1, "Fetched"), (1,)),
        (15, "issue", "a", ("Called", "0.1", 0, ()), (2,)),
        (16, "send", "a", send(0, "a", "b")[3], (3,)),
        deliver(20, "a", "b", 4),
        (20, "start", "b", start(0, "b")[3], (5,)),
        (30, "crash", "b", ("fault",), ()),
        (31, "send", "a", send(0, "a", "b")[3], (1,)),
    )
    found = operations_of(trace)
    said = [(one.id, one.kind, one.end_ns, one.needs) for one in found]
    assert said == [
        (0, "forward", 15, ()),
        (4, "send", 20, (0,)),
        (5, "recv", 20, ()),
        (6, "forward", 30, (5,)),
        (8, "send", -1, (0,)),
    ]


def test_chakra_has_every_job_and_both_ends_of_every_message_to_the_nanosecond(slow):
    classes = schema(CHAKRA)
    jobs: list[Any] = []
    ends: dict[int, list[Any]] = {5: [], 6: []}
    for rank, data in enumerate(chakra_of(operations_of(slow[0]), STAGES)):
        metadata, *nodes = delimited(data)
        assert classes["GlobalMetadata"].FromString(metadata).version
        seen: set[int] = set()
        for node in map(classes["Node"].FromString, nodes):
            has = held(node.attr)
            start_ns = has["start_time_ns"]
            end_ns = start_ns + has["duration_ns"]
            assert node.start_time_micros == start_ns // 1_000
            assert seen.issuperset([*node.ctrl_deps, *node.data_deps])
            seen.add(node.id)
            if node.type == 4:
                jobs.append((STAGES[rank], node.name, has["job"], start_ns, end_ns))
                continue
            here, there = STAGES[has["comm_src"]], STAGES[has["comm_dst"]]
            assert STAGES[rank] == (here if node.type == 5 else there)
            size = has["comm_size"]
            times = (start_ns, end_ns)
            ends[node.type].append(
                (has["comm_tag"], here, there, node.name, size, *times)
            )
    wanted_jobs, wanted = spans(slow[0])
    assert sorted(jobs) == wanted_jobs
    assert sorted(one[1:] for one in ends[5]) == wanted
    came = {tag: (*said, at) for tag, *said, at, _ in ends[6]}
    assert came == {tag: (*said, at) for tag, *said, _, at in ends[5]}


class GoalOperation(NamedTuple):
    """A line of GOAL: `size` is nanoseconds of a calc, bytes of a message."""

    rank: int
    kind: str
    size: int
    peer: int
    tag: int
    requires: tuple[int, ...]


_OPERATION = re.compile(
    r"l(\d+): (?:(calc) (\d+)|(send|recv) (\d+)b (?:to|from) (\d+) tag (\d+))"
)
_REQUIRES = re.compile(r"l(\d+) requires l(\d+)")
_RANK = re.compile(r"rank (\d+) \{")


def read_goal(text: str) -> dict[int, GoalOperation]:
    found: dict[int, GoalOperation] = {}
    rank = -1
    for line in text.splitlines():
        if one := _OPERATION.fullmatch(line):
            id, calc, ns, kind, size, peer, tag = one.groups()
            said = ("calc", int(ns), -1, -1) if calc else None
            said = said or (kind, int(size), int(peer), int(tag))
            found[int(id)] = GoalOperation(rank, *said, ())
        elif (needs := _REQUIRES.fullmatch(line)) and int(needs[1]) in found:
            held = found[int(needs[1])]
            requires = (*held.requires, int(needs[2]))
            found[int(needs[1])] = held._replace(requires=requires)
        elif block := _RANK.fullmatch(line):
            rank = int(block[1])
        else:
            assert line in ("", "}") or re.fullmatch(r"num_ranks \d+", line), line
    return found


def test_goal_has_every_job_and_message_in_the_order_of_devices(slow):
    operations = operations_of(slow[0])
    found = read_goal(goal_of(operations, STAGES))
    calcs = [(STAGES[c.rank], c.size) for c in found.values() if c.kind == "calc"]
    wanted_jobs, wanted = spans(slow[0])
    assert sorted(calcs) == sorted((w, end - at) for w, _, _, at, end in wanted_jobs)
    for kind, here, there in (("send", 0, 1), ("recv", 1, 0)):
        ends = [one for one in found.values() if one.kind == kind]
        assert len({one.tag for one in ends}) == len(ends)
        said = [(STAGES[one.rank], STAGES[one.peer], one.size) for one in ends]
        assert sorted(said) == sorted((w[here], w[there], w[3]) for w in wanted)
    last: dict[int, int] = {}
    for id, one in found.items():
        assert all(found[needed].rank == one.rank for needed in one.requires)
        if one.kind == "calc":
            assert last.get(one.rank) is None or last[one.rank] in one.requires
            last[one.rank] = id
    needs = {one.id: set(one.needs) for one in operations}
    assert all(needs[id] <= set(one.requires) for id, one in found.items())


def test_a_message_that_did_not_arrive_is_not_in_goal_which_would_wait_for_it():
    trace = noted(send(1, "a", "b"), send(2, "a", "b"), deliver(3, "a", "b", 0))
    text = goal_of(operations_of(trace), ("a", "b"))
    assert text == (
        "num_ranks 2\n\nrank 0 {\nl0: send 48b to 1 tag 0\n}\n\n"
        "rank 1 {\nl2: recv 48b from 0 tag 0\n}\n"
    )


def read_back(data: bytes):
    """Slices as (track path, name, category, start, end, annotations, flows)."""
    tracks: dict[int, tuple[str, ...]] = {}
    open_: dict[int, Any] = {}
    slices, instants, last_ns = [], [], 0
    for packet in schema(PERFETTO)["Trace"].FromString(data).packet:
        if packet.HasField("track_descriptor"):
            one = packet.track_descriptor
            above = tracks.get(one.parent_uuid, ())
            tracks[one.uuid] = (*above, one.name or one.process.process_name)
            continue
        event, at = packet.track_event, packet.timestamp
        assert at >= last_ns
        last_ns = at
        if event.type == 1:
            assert event.track_uuid not in open_, "slices of a track overlap"
            open_[event.track_uuid] = (event, at)
        elif event.type == 2:
            one, began = open_.pop(event.track_uuid)
            flows = (*one.flow_ids,), (*one.terminating_flow_ids,)
            said = (tracks[event.track_uuid], one.name, one.categories[0])
            slices.append((*said, began, at, held(one.debug_annotations), flows))
        else:
            instants.append((tracks[event.track_uuid], event.name, at))
    assert not open_
    return slices, instants


def test_perfetto_has_every_job_and_an_arrow_for_every_message(slow):
    data = track_events(operations_of(slow[0]), spans_of(slow[0]).marks, STAGES)
    slices, _ = read_back(data)
    jobs, left, came = [], {}, {}
    for (worker, track, *_), _, kind, start_ns, end_ns, has, flows in slices:
        assert end_ns > start_ns
        exact_ns = start_ns + has["duration_ns"]
        if track == "device":
            jobs.append((worker, has["function"], kind, start_ns, exact_ns))
        elif kind == "send":
            there = track.removeprefix("queue to ").partition(",")[0]
            said = (there, has["message"], has["wire_bytes"])
            left[flows[0]] = (worker, *said, start_ns, exact_ns)
        else:
            assert track.startswith("inbox")
            came[flows[1]] = worker, start_ns
    wanted_jobs, wanted = spans(slow[0])
    assert sorted(jobs) == wanted_jobs
    assert sorted(left.values()) == wanted
    assert came == {flow: (one[1], one[-1]) for flow, one in left.items()}


def test_what_takes_no_time_or_does_not_arrive_is_in_perfetto_too():
    trace = noted(
        send(1, "a", "b"),
        send(1, "a", "b"),
        deliver(1, "a", "b", 0),
        deliver(1, "a", "b", 1),
        send(2, "a", "b"),
        (3, "drop", "a", ("b", "fault"), ()),
    )
    found = track_events(operations_of(trace), spans_of(trace).marks, ("a", "b"))
    slices, instants = read_back(found)
    assert sorted((track, start, end) for track, _, _, start, end, *_ in slices) == [
        (("a", "queue to b"), 1, 2),
        (("a", "queue to b, lane 2"), 1, 2),
        (("b", "inbox"), 1, 2),
        (("b", "inbox, lane 2"), 1, 2),
    ]
    assert instants == [
        (("a", "queue to b"), "Primal to b", 2),
        (("a", "network"), "drop", 3),
    ]
