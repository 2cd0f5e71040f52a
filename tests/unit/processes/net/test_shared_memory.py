"""Segments carry arrays between workers, are used again, and leave nothing behind."""

import fcntl
import gc
import os
import queue
import random
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jdag.compute.buffers import array_over
from jdag.engine.arrays import ArrayType
from jdag.processes.net import shared_memory
from jdag.processes.net.shared_memory import (
    IDLE_NS_MAX,
    LENT_NS_MAX,
    SEGMENT_BYTES_MIN,
    BorrowedMemory,
    SharedMemoryPool,
    SharedSegment,
)
from tests.tools.error_texts import fails_with
from tests.tools.stream_cases import descriptors

MIB = 1 << 20
LARGE = 4 * MIB


def maps() -> set[str]:
    """Return where segments are mapped, and which: other tests' may go meanwhile."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:jdag" in line}


def of_segments() -> set[tuple[str, str]]:
    """Return the descriptors of segments, and what each is of."""
    return {(name, of) for name, of in descriptors() if "memfd:jdag" in of}


class Pair:
    """A writer and a reader in one process, and the words between them."""

    def __init__(self, **settings) -> None:
        self.maps, self.descriptors = maps(), of_segments()
        self.offered = threading.Semaphore(0)
        self.words: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.writer = SharedMemoryPool("ps0", self.offered.release, **settings)
        self.reader = BorrowedMemory("trainer", self.words.put)

    def deliver(self, now_ns: int = 0) -> None:
        """Pass what the reader said."""
        while not self.words.empty():
            self.writer.freed(self.words.get(), now_ns)

    def pass_offers(self, now_ns: int = 0) -> None:
        """Wait until a segment was made, and pass it."""
        assert self.offered.acquire(timeout=60)
        (segment,) = self.writer.created
        self.writer.offered(now_ns)
        copy = os.dup(segment.descriptor)
        self.reader.offered(segment.number, segment.nbytes, copy)

    def miss(self, nbytes: int = LARGE, now_ns: int = 0) -> None:
        """Ask for a segment twice, so that one is made."""
        for _ in range(2):
            assert self.writer.take(nbytes, now_ns) is None

    def ready(self, nbytes: int = LARGE, now_ns: int = 0) -> SharedSegment:
        """Miss twice, have one made, and take it."""
        self.miss(nbytes, now_ns)
        self.pass_offers(now_ns)
        self.deliver(now_ns)
        found = self.writer.take(nbytes, now_ns)
        assert found is not None
        return found

    def carry(self, segment: SharedSegment, data: bytes, now_ns: int = 0) -> memoryview:
        segment.write(0, memoryview(data))
        self.writer.lent(segment, now_ns)
        return self.reader.borrow(segment.number, len(data))

    def close(self) -> None:
        self.writer.close()
        if (maker := self.writer._maker) is not None:  # Who closes does not wait.
            maker.join(60)
        self.reader.close()
        gc.collect()
        assert maps() <= self.maps  # Those of others may go meanwhile.
        assert of_segments() <= self.descriptors


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def test_views_are_writable_aligned_and_hold_what_was_written(pair: Pair):
    data = random.Random(2).randbytes(LARGE - 5)
    segment = pair.ready()
    view = pair.carry(segment, data)
    assert bytes(view) == data and not view.readonly
    assert np.frombuffer(view, np.uint8).ctypes.data % 4096 == 0
    segment.write(3, memoryview(b"abc"))
    assert bytes(view[3:6]) == b"abc"


def test_what_is_lent_is_neither_lent_again_nor_written(pair: Pair):
    segment = pair.ready()
    first = pair.carry(segment, bytes(LARGE))
    assert pair.writer.take(LARGE, 0) is None
    pair.pass_offers()
    pair.deliver()
    second = pair.writer.take(LARGE, 0)
    assert second is not None and second.number != segment.number
    pair.carry(second, b"\1" * LARGE)
    assert bytes(first) == bytes(LARGE)


def test_an_array_of_jax_keeps_its_segment_until_the_last_use(pair: Pair):
    data = np.random.default_rng(0).standard_normal(LARGE // 8)
    segment = pair.ready()
    view = pair.carry(segment, data.tobytes())
    array = jax.device_put(np.frombuffer(view, np.float64))
    del view
    part = np.asarray(array)[5:9]
    assert array.unsafe_buffer_pointer() % 4096 == 0  # It lies where it came.
    assert pair.words.empty()
    assert np.array_equal(array, data)
    del array
    assert pair.words.empty() and np.array_equal(part, data[5:9])
    del part
    gc.collect()
    assert pair.words.get_nowait() == segment.number


def test_a_device_copies_from_the_segment_which_is_free_after_that(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    copying: list[np.ndarray] = []  # What a GPU reads until its copy is complete.

    def put(array: np.ndarray) -> str:
        copying.append(array)
        return "an array of the GPU"

    monkeypatch.setattr(jax, "device_put", put)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    segment = pair.ready()
    view = pair.carry(segment, np.arange(LARGE // 4, dtype=np.float32).tobytes())
    start = np.frombuffer(view, np.uint8).ctypes.data
    value = array_over(ArrayType((LARGE // 4,), "float32", False), view)
    assert value == "an array of the GPU"
    assert copying[0].ctypes.data == start  # Not a copy of the segment.
    del view
    gc.collect()
    assert pair.words.empty()
    copying.clear()
    gc.collect()
    assert pair.words.get_nowait() == segment.number


def test_no_segment_is_made_for_what_comes_once_or_is_small(pair: Pair):
    for nbytes in (LARGE, 2 * LARGE, 3 * LARGE):
        assert pair.writer.take(nbytes, 0) is None
    for _ in range(5):
        assert pair.writer.take(SEGMENT_BYTES_MIN - 1, 0) is None
    assert pair.writer._maker is None


def test_arrays_of_nearly_one_size_share_a_segment_and_others_do_not(pair: Pair):
    segment = pair.ready(LARGE + 1)
    assert segment.nbytes <= (LARGE + 1) * 9 // 8
    pair.writer.lent(segment, 0)
    pair.writer.freed(segment.number, 0)
    assert pair.writer.take(2 * LARGE, 0) is None
    assert pair.writer.take(LARGE // 2, 0) is None
    assert pair.writer.take(LARGE + 5000, 0) is segment


@pytest.mark.parametrize("fails", [False, True])
def test_who_closes_does_not_wait_for_what_is_being_made(
    fails: bool, monkeypatch: pytest.MonkeyPatch
):
    made: list[SharedSegment] = []
    go_on = threading.Event()

    def slow(size: int) -> SharedSegment:
        assert go_on.wait(60)
        if fails:
            raise OSError(28, "No space left on device")
        made.append(SharedSegment(size))
        return made[0]

    monkeypatch.setattr(shared_memory, "SharedSegment", slow)
    offered = threading.Event()
    writer = SharedMemoryPool("ps0", offered.set)
    for _ in range(2):
        assert writer.take(LARGE, 0) is None
    maker = writer._maker
    assert maker is not None
    monkeypatch.setattr(shared_memory, "SharedSegment", SharedSegment)
    writer.close()
    assert maker.is_alive()
    go_on.set()
    maker.join(60)
    assert not writer.created
    assert [one.descriptor for one in made] == ([] if fails else [-1])


def test_a_segment_that_never_arrived_is_never_used(pair: Pair, caplog):
    pair.miss()
    assert pair.offered.acquire(timeout=60)
    (lost,) = pair.writer.created
    pair.writer.offered(0)
    for now_ns in (1, LENT_NS_MAX):
        assert pair.writer.take(LARGE, now_ns) is None
        assert pair.writer.sweep(now_ns) == ()
    assert pair.writer.sweep(LENT_NS_MAX + 1) == (lost.number,)
    assert lost.descriptor == -1
    assert caplog.text.count("are sent to ps0 over the socket") == 1
    for turn in range(5):
        assert pair.writer.take(LARGE, LENT_NS_MAX + 2 + turn) is None
    assert pair.writer._maker is None  # It rests, and then tries again.
    pair.writer.take(LARGE, LENT_NS_MAX + IDLE_NS_MAX + 1)
    pair.pass_offers(LENT_NS_MAX + IDLE_NS_MAX + 1)
    pair.deliver(LENT_NS_MAX + IDLE_NS_MAX + 1)
    assert pair.writer.take(LARGE, 0) is not None


def test_what_is_held_for_long_is_the_readers_and_no_longer_counts():
    pair = Pair(bytes_max=2 * LARGE)
    segment = pair.ready()
    view = pair.carry(segment, b"\1" * LARGE, now_ns=5)
    number = segment.number
    del segment
    assert pair.writer.sweep(LENT_NS_MAX + 5) == ()
    assert pair.writer.sweep(LENT_NS_MAX + 6) == (number,)
    pair.reader.forget(number)
    assert bytes(view) == b"\1" * LARGE and len(maps() - pair.maps) == 1
    del view
    assert maps() <= pair.maps
    pair.deliver()  # Its word comes late, and changes nothing.
    assert pair.writer.take(LARGE, 0) is None
    pair.writer.close()
    pair.close()


def test_what_lies_idle_goes(pair: Pair):
    segment = pair.ready(now_ns=7)
    pair.writer.lent(segment, 7)
    pair.writer.freed(segment.number, 7)
    assert pair.writer.sweep(IDLE_NS_MAX + 7) == ()
    assert pair.writer.sweep(IDLE_NS_MAX + 8) == (segment.number,)
    pair.reader.forget(segment.number)
    del segment
    assert maps() <= pair.maps


def test_memory_is_bounded_and_sizes_of_old_make_room_for_new():
    pair = Pair(bytes_max=3 * LARGE)
    old = pair.ready()
    pair.writer.lent(old, 0)
    pair.writer.freed(old.number, 0)
    new = pair.ready(3 * LARGE)
    assert pair.writer.sweep(0) == (old.number,)
    pair.reader.forget(old.number)
    pair.carry(new, b"a")
    for _ in range(3):
        assert pair.writer.take(LARGE, 0) is None
        assert pair.writer.take(5 * LARGE, 0) is None
    assert pair.writer._maker is None
    del old, new
    pair.close()


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_a_host_without_room_is_said_once_and_arrays_go_by_the_socket(
    pair: Pair, call: str, monkeypatch, caplog
):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    for now_ns in range(0, 5 * IDLE_NS_MAX, IDLE_NS_MAX // 2):
        for _ in range(3):
            assert pair.writer.take(LARGE, now_ns) is None
        if (maker := pair.writer._maker) is not None:
            maker.join(60)
        assert not pair.writer.created
    (line,) = caplog.records
    assert line.getMessage() == (
        "no shared memory is available: No space left on device; large arrays are sent "
        "to ps0 over the socket"
    )


def test_a_reader_without_room_is_said_once_and_nothing_is_lent(
    pair: Pair, monkeypatch, caplog
):
    monkeypatch.setattr(shared_memory, "MAPPINGS_MAX", 0)
    pair.miss()
    pair.pass_offers()
    pair.reader.refused(OSError(24, "Too many open files"))
    assert pair.words.empty()
    (line,) = caplog.records
    assert "large arrays of trainer arrive over the socket" in line.getMessage()


# What a writer that is no writer may send.


def memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    made = os.memfd_create("jdag test", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, nbytes)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


@pytest.mark.parametrize("nbytes", [0, -1, 4095, 4097, 1 << 62])
def test_a_segment_of_another_size_than_it_says_is_refused(pair: Pair, nbytes: int):
    with pytest.raises(ConnectionError, match=f"offered {nbytes} bytes in a shared"):
        pair.reader.offered(1, nbytes, memfd(4096))
    assert pair.words.empty()


def test_a_segment_that_can_shrink_is_refused(pair: Pair, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    for seals in (0, fcntl.F_SEAL_GROW, None):
        descriptor = os.open(file, os.O_RDWR) if seals is None else memfd(4096, seals)
        with fails_with(ConnectionError, "processes.segment_can_shrink"):
            pair.reader.offered(1, 4096, descriptor)


def test_what_is_no_memory_is_refused(pair: Pair):
    reading, writing = os.pipe()
    os.close(writing)
    with fails_with(ConnectionError, "processes.segment_of_0_bytes"):
        pair.reader.offered(1, 4096, reading)


def test_segments_that_were_not_offered_or_are_lent_cannot_be_borrowed(pair: Pair):
    pair.reader.offered(1, 4096, memfd(4096))
    with fails_with(ConnectionError, "processes.offered_segment_1_twice"):
        pair.reader.offered(1, 4096, memfd(4096))
    for number, nbytes in ((2, 10), (1, 4097), (1, 0), (1, -1)):
        said = f"{nbytes} bytes in shared memory segment {number}"
        with pytest.raises(ConnectionError, match=said):
            pair.reader.borrow(number, nbytes)
    view = pair.reader.borrow(1, 4096)
    with fails_with(ConnectionError, "processes.lent_already"):
        pair.reader.borrow(1, 4096)
    del view
    assert len(pair.reader.borrow(1, 10)) == 10


def test_words_of_a_reader_that_make_no_sense_change_nothing(pair: Pair):
    segment = pair.ready()
    for number in (0, -1, 99, segment.number):
        pair.writer.freed(number, 0)
    assert pair.writer.take(LARGE, 0) is None


def test_nothing_is_said_after_the_end(pair: Pair):
    segment = pair.ready()
    view = pair.carry(segment, b"abc")
    pair.reader.close()
    del segment
    pair.writer.close()
    assert bytes(view) == b"abc"
    del view
    assert pair.words.empty()


def test_threads_that_let_go_at_once_free_each_segment_once(pair: Pair):
    for number in range(1, 65):
        pair.reader.offered(number, 4096, memfd(4096))
    while not pair.words.empty():
        pair.words.get()
    views = [pair.reader.borrow(number, 4096) for number in range(1, 65)]
    shares = [views[at::4] for at in range(4)]
    views.clear()
    crowd = [threading.Thread(target=share.clear) for share in shares]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert sorted(pair.words.get() for _ in range(64)) == list(range(1, 65))
    assert pair.words.empty()
