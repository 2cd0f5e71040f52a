"""Shared memory for large arrays between two workers of one host, used again.

A segment that was used before carries an array there and back in half the time of a
Unix socket or less (64 MiB: 11 ms of 30; 16 MiB: 3.5 of 8; TCP: 85 and 21). Below 4 MiB
the copies alone take as long (1 MiB: 0.47 ms of 0.35), but an array that goes by the
socket takes a turn of both loops for each few chunks, which makes segments the faster
from 256 KiB on (a call there and back with 1 MiB: 1.7 ms of 4.8 on busy cores). A fresh
one never pays (64 MiB: 117 ms), as its pages are made one by one; glibc's settings
change nothing.

So segments are made ahead, on a thread, when an array of some size has found none for
the second time, and what finds none goes by the socket at once. A segment is a memfd
without a name: it is gone with the last process that maps it, whatever kills that.

Inputs:  the writer (`SharedMemoryPool`): `take`, `lent`, `freed`, `sweep`; the reader
         (`BorrowedMemory`): `offered`, `borrow`, `forget`.
Asks:  the writer: that what is `made` is passed to the reader, and that it is told to
       forget the numbers that `sweep` gives, after all that was lent before;
       the reader: that the writer is told the numbers for which `freed` is called.

How it works. A segment that was offered counts as lent, and the reader's word that it
is free says that it can be written; so one that got lost, or for which the reader has
no room, is never used. One that is not free after `LENT_NS_MAX` is the reader's to
keep: an array lives in it. Both ends outlive connections, and end with their worker.

Invariants: what is lent is never written, nor is it lent again; the reader maps nothing
that could shrink below it; at most `bytes_max` are free or lately lent.
"""

import errno
import fcntl
import gc
import logging
import mmap
import os
import stat
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from jdag.errors import reason

SEGMENT_BYTES_MIN = 1 << 18
SEGMENTS_BYTES_MAX = 1 << 28
MAPPINGS_MAX = 256
LENT_NS_MAX = 10 * 10**9
IDLE_NS_MAX = 10 * 10**9
_SIZES_MAX = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Python's maps hold a descriptor each, unless told not to (from 3.13 on).
_UNTRACKED = {"trackfd": False} if sys.version_info >= (3, 13) else {}

_log = logging.getLogger(__name__)


class SharedSegment:
    """Memory of the writer that a reader maps too.

    `descriptor` is open until the reader has mapped it. `nbytes` is the whole size,
    which may exceed the requested size.
    """

    __slots__ = ("_bytes", "descriptor", "nbytes", "number", "since_ns")

    def __init__(self, nbytes: int) -> None:
        """Make one with all of its pages; OSError if there is no room."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.descriptor = os.memfd_create("jdag", flags)
        try:
            os.posix_fallocate(self.descriptor, 0, nbytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._bytes = _map(self.descriptor, nbytes)
        except OSError:
            self.shut()
            raise
        self.nbytes = nbytes
        self.number = 0
        self.since_ns = 0
        self._bytes[:: mmap.PAGESIZE] = (
            0  # Fault the pages in now, rather than in the first copy.
        )

    def write(self, offset: int, view: memoryview) -> None:
        """Copy bytes to an offset; releases the GIL."""
        np.copyto(
            self._bytes[offset : offset + view.nbytes], np.frombuffer(view, np.uint8)
        )

    def shut(self) -> None:
        """Close the descriptor; the memory stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _map(descriptor: int, nbytes: int) -> np.ndarray:
    try:
        mapped = mmap.mmap(descriptor, nbytes, **_UNTRACKED)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    return np.frombuffer(mapped, np.uint8)


class SharedMemoryPool:
    """The segments that one worker lends to another.

    `peer` is for the log. `offer` is called, on any thread, when a segment was `made`,
    and must not block. All methods are called on one thread. Times are ns of one clock.
    """

    def __init__(
        self,
        peer: str,
        offer: Callable[[], None],
        *,
        bytes_max: int = SEGMENTS_BYTES_MAX,
    ) -> None:
        self._peer = peer
        self._offer = offer
        self._bytes_max = bytes_max
        self._free: list[SharedSegment] = []  # Those used last are at the end.
        self._lent: dict[int, SharedSegment] = {}
        self._gone: list[int] = []
        self._missed: dict[int, None] = {}
        self._counter = 0
        self._rests_until_ns = 0
        self._complained = False
        self._is_closed = False
        self._maker: threading.Thread | None = None
        self.made: deque[SharedSegment] = deque()  # Those to be offered.

    def take(self, nbytes: int, now_ns: int) -> SharedSegment | None:
        """Return a free segment for `nbytes`, or None to use the socket."""
        size = _rounded(nbytes)
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place].nbytes == size:
                return self._free.pop(place)
        if nbytes >= SEGMENT_BYTES_MIN:
            self._miss(size, now_ns)
        return None

    def lent(self, segment: SharedSegment, now_ns: int) -> None:
        """Record that a written segment was announced to the reader."""
        segment.since_ns = now_ns
        self._lent[segment.number] = segment

    def offered(self, now_ns: int) -> None:
        """Record that the first of `made` was passed to the reader, or cannot be."""
        self.lent(self.made.popleft(), now_ns)

    def freed(self, number: int, now_ns: int) -> None:
        """Take a segment back from the reader; ignores segments already dropped."""
        segment = self._lent.pop(number, None)
        if segment is not None:
            segment.shut()
            segment.since_ns = now_ns
            self._free.append(segment)

    def sweep(self, now_ns: int) -> tuple[int, ...]:
        """Drop segments lent or free for too long; return numbers to be forgotten."""
        for segment in list(self._lent.values()):
            if now_ns - segment.since_ns > LENT_NS_MAX:
                del self._lent[segment.number]
                if segment.descriptor >= 0:
                    self._rest(f"{self._peer} maps no more shared memory", now_ns)
                self._drop(segment)
        for segment in list(self._free):
            if now_ns - segment.since_ns > IDLE_NS_MAX:
                self._free.remove(segment)
                self._drop(segment)
        gone, self._gone = tuple(self._gone), []
        return gone

    def close(self) -> None:
        """Release all segments; the reader keeps what it has mapped."""
        self._is_closed = True
        for segment in (*self._free, *self._lent.values()):
            segment.shut()
        self._free.clear()
        self._lent.clear()
        self._shut_made()

    def _shut_made(self) -> None:
        with suppress(IndexError):  # The maker thread and `close` race for it.
            self.made.popleft().shut()

    def _miss(self, size: int, now_ns: int) -> None:
        repeated = size in self._missed
        self._missed.pop(size, None)
        self._missed[size] = None
        if len(self._missed) > _SIZES_MAX:
            del self._missed[next(iter(self._missed))]
        if repeated and not self._busy(now_ns) and self._make_room(size):
            self._counter += 1
            make = partial(self._make, self._counter, size, now_ns)
            self._maker = threading.Thread(None, make, "segment", daemon=True)
            self._maker.start()

    def _busy(self, now_ns: int) -> bool:
        """Whether one is being made or offered, or making one failed lately."""
        if self._maker is not None or self.made or now_ns < self._rests_until_ns:
            return True
        return any(segment.descriptor >= 0 for segment in self._lent.values())

    def _make_room(self, size: int) -> bool:
        lent = sum(segment.nbytes for segment in self._lent.values())
        if lent + size > self._bytes_max:
            return False
        while sum(s.nbytes for s in self._free) + lent + size > self._bytes_max:
            self._drop(self._free.pop(0))
        return True

    def _make(self, number: int, size: int, now_ns: int) -> None:
        try:
            made = SharedSegment(size)
        except OSError as error:
            self._rest(f"no shared memory is available: {reason(error)}", now_ns)
        else:
            made.number = number
            self.made.append(made)
        self._maker = None
        if self._is_closed:  # No thread waits for the maker.
            self._shut_made()
        self._offer()

    def _drop(self, segment: SharedSegment) -> None:
        segment.shut()
        self._gone.append(segment.number)

    def _rest(self, why: str, now_ns: int) -> None:
        """Make no segments for a while; log the reason once."""
        self._rests_until_ns = now_ns + IDLE_NS_MAX
        if not self._complained:
            self._complained = True
            _log.warning("%s; large arrays go to %s by the socket", why, self._peer)


def _rounded(nbytes: int) -> int:
    """Round up by at most an eighth, so that similar sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << (max(nbytes, 1).bit_length() - 4))
    return -(-nbytes // step) * step


class BorrowedMemory:
    """The segments that another worker lends to this one.

    `freed(number)` may be called on any thread at any moment, wherever an array is
    released, so it must only record the number.
    """

    def __init__(self, peer: str, freed: Callable[[int], None]) -> None:
        self._peer = peer
        self._freed = freed
        self._mapped: dict[int, np.ndarray] = {}
        self._out: dict[int, weakref.ref[np.ndarray]] = {}
        self._complained = False

    def offered(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map a segment, close its descriptor and tell the writer that it is free.

        A segment without room is dropped and never reported free. Raises
        ConnectionError if it is not what a writer makes.
        """
        try:
            self._hold_to_what_writers_make(number, nbytes, descriptor)
            if len(self._mapped.keys() | self._out.keys()) >= MAPPINGS_MAX:
                raise OSError(errno.EMFILE, f"{MAPPINGS_MAX} segments are mapped")
            self._mapped[number] = _map(descriptor, nbytes)
        except ConnectionError:
            raise
        except OSError as error:
            self.refused(error)
        else:
            self._freed(number)
        finally:
            os.close(descriptor)

    def refused(self, error: OSError) -> None:
        """Log once that a segment cannot be mapped; it is never reported free."""
        if not self._complained:
            self._complained = True
            said = "large arrays come from %s by the socket: no shared memory: %s"
            _log.warning(said, self._peer, reason(error))

    def _hold_to_what_writers_make(
        self, number: int, nbytes: int, descriptor: int
    ) -> None:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes or nbytes <= 0:
            said = f"offered {nbytes} bytes in a segment of {found.st_size}"
        elif not _seals(descriptor) & fcntl.F_SEAL_SHRINK:
            said = "offered a segment that can shrink"
        elif number in self._mapped or number in self._out:
            said = f"offered segment {number} twice"
        else:
            return
        raise ConnectionError(f"{self._peer} {said}")

    def borrow(self, number: int, nbytes: int) -> memoryview:
        """Return the front of a segment, writable; it is freed when no view is left.

        Raises ConnectionError if the segment is unknown, too small or already lent.
        """
        mapped = self._mapped.get(number)
        if mapped is None or number in self._out or not 0 < nbytes <= mapped.nbytes:
            raise ConnectionError(
                f"{self._peer} lent {nbytes} bytes in segment {number}, which is"
                " unknown, smaller or lent already"
            )
        lent = mapped[:nbytes]
        self._out[number] = weakref.ref(lent, partial(self._returned, number))
        return memoryview(lent)  # type: ignore[arg-type]

    def _returned(self, number: int, _: object) -> None:
        # `close` clears `_out`, so nothing is reported afterwards.
        if self._out.pop(number, None) is not None:
            self._freed(number)

    def let_go(self) -> None:
        """Have JAX release the memory of deleted arrays.

        JAX does so at its next call, which may never come, and on garbage collection.
        """
        if self._out:
            gc.collect(0)

    def forget(self, number: int) -> None:
        """Unmap a segment that the writer dropped; an array in it lives on."""
        self._mapped.pop(number, None)

    def close(self) -> None:
        """Drop all segments; arrays live on, and nothing is reported free any more."""
        self._out.clear()
        self._mapped.clear()


def _seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # A file without support for seals.
