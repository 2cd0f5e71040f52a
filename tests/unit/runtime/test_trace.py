"""The trace: what was added comes back, and the digest stands for every bit of it."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from jdag.errors import JdagError
from jdag.runtime.trace import DETAIL, Trace, TraceRecord, read_trace

SEND = ("b", "Primal", "0.1", 0, (3, 1), 24, 88, (7, 2**32 - 1))


def filled() -> Trace:
    trace = Trace()
    trace.add(0, "issue", "a", ("Issued", "0.1", 0, (3,)), ())
    trace.add(5, "send", "a", SEND, (0,))
    trace.add(2**40, "deliver", "b", ("a", "Primal", "0.1", 0, (3, 1)), (1,))
    trace.add(2**40, "lost", "b", ("a",), (1, 2))
    return trace


def test_what_was_added_comes_back_in_order_under_its_index():
    trace = filled()
    assert [trace.add(9, "crash", "a", ("at_ns",), ()), len(trace)] == [4, 5]
    assert trace[1] == TraceRecord(1, 5, "send", "a", SEND, (0,))
    assert trace[-1] == trace[4]
    assert [record.index for record in trace] == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        trace[5]


def test_the_records_of_a_long_run_come_back_in_order_and_by_index():
    trace = Trace()
    note = trace.at(SimpleNamespace(now_ns=7))
    for index in range(0, 300, 2):
        assert note("crash", "a", (str(index),), (index,)) == index
        assert trace.add(7, "crash", "a", (str(index + 1),), ()) == index + 1
    for records in (list(trace), [trace[index] for index in range(len(trace))]):
        assert [record.index for record in records] == [*range(300)]
        assert [record.detail for record in records] == [(str(n),) for n in range(300)]


def test_ctrl_c_while_records_are_packed_repeats_none_and_loses_none():
    class Packs(list[bytes]):
        def append(self, pack: bytes) -> None:
            super().append(pack)
            raise KeyboardInterrupt

    trace = Trace()
    trace._packs = Packs()
    for index in range(200):
        with suppress(KeyboardInterrupt):
            trace.add(0, "crash", "a", (str(index),), ())
    assert [record.detail for record in trace] == [(str(n),) for n in range(200)]


def test_records_are_found_by_kind_and_their_detail_by_name():
    (send,) = filled().of_kind("send", "resend")
    assert send.named["fingerprints"] == (7, 2**32 - 1)
    assert list(send.named) == list(DETAIL["send"])


@pytest.mark.parametrize(
    "row",
    [
        (6, "send", "a", SEND, (0,)),
        (5, "resend", "a", SEND, (0,)),
        (5, "send", "b", SEND, (0,)),
        (5, "send", "a", SEND, (1,)),
        *[
            (5, "send", "a", (*SEND[:place], (part, 0), *SEND[place + 1 :]), (0,))
            for place, part in enumerate(SEND)
        ],
    ],
)
def test_each_field_and_each_part_of_a_detail_changes_the_digest(row):
    digests = []
    for added in ((5, "send", "a", SEND, (0,)), row):
        trace = Trace()
        trace.add(*added)
        digests.append(trace.digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128])
def test_the_last_bits_of_a_run_of_any_length_change_the_digest(length):
    digests = []
    for cause in (1, 2):
        trace = Trace()
        for index in range(length):
            trace.add(index, "send", "a", SEND, (cause,) * (index + 1 == length))
        digests.append(trace.digest)
    assert digests[0] != digests[1]


def test_the_digest_does_not_depend_on_when_it_was_asked_for():
    asked, not_asked = Trace(), Trace()
    for index in range(10_000):
        for trace in (asked, not_asked):
            trace.add(index, "send", "a", SEND, (index - 1,))
        if index % 1_234 == 0:
            assert asked.digest
    assert asked.digest == not_asked.digest
    assert asked.digest == asked.digest


def test_text_that_is_not_unicode_is_escaped():
    trace = Trace()
    trace.add(0, "spawn", "a", ("", 0, (), "m:\udc80"), ())
    trace.at(SimpleNamespace(now_ns=0))("spawn", "a", ("", 0, (), "m:\udc80"), ())
    assert [record.named["function"] for record in trace] == ["m:\\udc80"] * 2


def test_a_written_trace_is_read_back_with_its_digest(tmp_path):
    trace = filled()
    trace.write(tmp_path / "trace.jsonl")
    again = read_trace(tmp_path / "trace.jsonl")
    assert list(again) == list(trace)
    assert again.digest == trace.digest


LINE = '{"index":%s,"time_ns":0,"kind":"%s","worker":"a","detail":%s,"causes":%s}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("what", "Expecting value"),
        ("[]", "list indices"),
        ("{}", "'index'"),
        (LINE % (7, "crash", '["at_ns"]', "[]"), "the index is 7, expected 4"),
        (LINE % (4, "boom", '["at_ns"]', "[]"), "kind 'boom'"),
        (
            LINE % (4, "crash", "[]", "[]"),
            "the detail of crash has 0 parts: expected 1",
        ),
        (LINE % (4, "crash", '["at_ns"]', "[4]"), r"causes are \(4,\)"),
    ],
)
def test_a_line_that_is_no_record_is_refused_by_file_and_number(tmp_path, line, said):
    path = tmp_path / "trace.jsonl"
    filled().write(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(JdagError, match=rf"trace.jsonl, line 5 is not .*: .*{said}"):
        read_trace(path)
