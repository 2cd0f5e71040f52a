"""Shared memory for large arrays between two workers on one host; segments are reused.

A round trip of an array in a reused segment takes at most half of the time that a Unix
socket takes (64 MiB: 11 ms instead of 30 ms; 16 MiB: 3.5 ms instead of 8 ms; TCP takes
85 ms and 21 ms). Below 4 MiB, copying alone takes about as long as the socket (1 MiB:
0.47 ms instead of 0.35 ms). But on the socket, every few chunks need an iteration of
both event loops, so segments are faster for arrays of at least 256 KiB (a call with an
argument and a result of 1 MiB: 1.7 ms instead of 4.8 ms on busy cores). A new segment
is always slower than the socket (64 MiB: 117 ms), because its pages are allocated one
by one. Settings of glibc do not help.

Segments are therefore created in advance, on a thread, when no segment was available
for an array of some size for the second time. An array without a segment is sent over
the socket at once. A segment is an unnamed memfd. The system frees it when no process
maps it any more.

The connection offers each `created` segment to the reader, makes the reader forget the
numbers that `sweep` returns, and reports the reader's calls of `freed` to the writer.
An offered segment counts as lent until the reader reports it as free. A segment that
was lost, or that the reader cannot map, is therefore never used. A segment that is not
free after `LENT_NS_MAX` is left to the reader, because an array still uses it. Both
ends exist longer than their connections.

Invariants: a lent segment is neither written nor lent again. The reader maps only
memory that cannot shrink. The total size of the segments that are free or were recently
lent is at most `bytes_max`.
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
# Python's mmap keeps a descriptor open. From Python 3.13 on, this can be disabled.
_UNTRACKED = {"trackfd": False} if sys.version_info >= (3, 13) else {}

_log = logging.getLogger(__name__)


class SharedSegment:
    """A block of the writer's memory that a reader maps too.

    `descriptor` is open until the reader has mapped the segment. `nbytes` may exceed
    the requested size.
    """

    __slots__ = ("_bytes", "descriptor", "nbytes", "number", "since_ns")

    def __init__(self, nbytes: int) -> None:
        """Allocate all pages. Raises OSError if there is not enough memory."""
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
        self._bytes[:: mmap.PAGESIZE] = 0  # Cause all page faults now.

    def write(self, offset: int, view: memoryview) -> None:
        """Copy bytes to an offset. The copy releases the GIL."""
        target = self._bytes[offset : offset + view.nbytes]
        np.copyto(target, np.frombuffer(view, np.uint8))

    def shut(self) -> None:
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

    Log messages contain the name `peer`. `offer` is called, on any thread, when a
    segment was `created`; it must not block. All methods are called on one thread.
    Times are nanoseconds of one clock.
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
        self._free: list[SharedSegment] = []  # Least recently used first.
        self._lent: dict[int, SharedSegment] = {}
        self._dropped: list[int] = []
        self._missed: dict[int, None] = {}
        self._counter = 0
        self._rests_until_ns = 0
        self._complained = False
        self._is_closed = False
        self._maker: threading.Thread | None = None
        self.created: deque[SharedSegment] = deque()  # Segments that must be offered.

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
        """Record that the first `created` segment was offered, or cannot be offered."""
        self.lent(self.created.popleft(), now_ns)

    def freed(self, number: int, now_ns: int) -> None:
        segment = self._lent.pop(number, None)
        if segment is not None:
            segment.shut()
            segment.since_ns = now_ns
            self._free.append(segment)

    def sweep(self, now_ns: int) -> tuple[int, ...]:
        """Drop segments that were lent or free for too long; return their numbers."""
        for segment in list(self._lent.values()):
            if now_ns - segment.since_ns > LENT_NS_MAX:
                del self._lent[segment.number]
                if segment.descriptor >= 0:
                    self._rest(f"{self._peer} does not map shared memory", now_ns)
                self._drop(segment)
        for segment in list(self._free):
            if now_ns - segment.since_ns > IDLE_NS_MAX:
                self._free.remove(segment)
                self._drop(segment)
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def close(self) -> None:
        """Release all segments. The reader keeps the segments that it has mapped."""
        self._is_closed = True
        for segment in (*self._free, *self._lent.values()):
            segment.shut()
        self._free.clear()
        self._lent.clear()
        self._shut_created()

    def _shut_created(self) -> None:
        with suppress(IndexError):  # The maker thread and `close` may both call this.
            self.created.popleft().shut()

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
        """Whether a segment is being created or offered, or a creation just failed."""
        if self._maker is not None or self.created or now_ns < self._rests_until_ns:
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
            segment = SharedSegment(size)
        except OSError as error:
            self._rest(f"no shared memory is available: {reason(error)}", now_ns)
        else:
            segment.number = number
            self.created.append(segment)
        self._maker = None
        if self._is_closed:  # `close` does not wait for this thread.
            self._shut_created()
        self._offer()

    def _drop(self, segment: SharedSegment) -> None:
        segment.shut()
        self._dropped.append(segment.number)

    def _rest(self, why: str, now_ns: int) -> None:
        self._rests_until_ns = now_ns + IDLE_NS_MAX
        if not self._complained:
            self._complained = True
            text = "%s; large arrays are sent to %s over the socket"
            _log.warning(text, why, self._peer)


def _rounded(nbytes: int) -> int:
    """Round up by at most an eighth, so that similar sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << (max(nbytes, 1).bit_length() - 4))
    return -(-nbytes // step) * step


class BorrowedMemory:
    """The segments that another worker lends to this one.

    `freed(number)` is called when an array is released, which may happen on any thread
    at any time. It must therefore only record the number.
    """

    def __init__(self, peer: str, freed: Callable[[int], None]) -> None:
        self._peer = peer
        self._freed = freed
        self._mapped: dict[int, np.ndarray] = {}
        self._out: dict[int, weakref.ref[np.ndarray]] = {}
        self._complained = False

    def offered(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map a segment, close its descriptor and report it as free.

        A segment that cannot be mapped is dropped. An invalid segment raises
        ConnectionError.
        """
        try:
            self._check_offer(number, nbytes, descriptor)
            if len(self._mapped.keys() | self._out.keys()) >= MAPPINGS_MAX:
                text = f"already {MAPPINGS_MAX} segments of shared memory are mapped"
                raise OSError(errno.EMFILE, text)
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
        """Log once that a segment cannot be mapped. It is never reported as free."""
        if not self._complained:
            self._complained = True
            text = "large arrays of %s arrive over the socket, not in shared memory: %s"
            _log.warning(text, self._peer, reason(error))

    def _check_offer(self, number: int, nbytes: int, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes or nbytes <= 0:
            mistake = f"{nbytes} bytes in a shared file of {status.st_size} bytes"
        elif not _seals(descriptor) & fcntl.F_SEAL_SHRINK:
            mistake = "shared memory that can shrink"
        elif number in self._mapped or number in self._out:
            mistake = f"shared memory segment {number} twice"
        else:
            return
        raise ConnectionError(f"{self._peer} offered {mistake}")

    def borrow(self, number: int, nbytes: int) -> memoryview:
        """Return the first `nbytes` of a segment. It is freed when no view is left."""
        mapped = self._mapped.get(number)
        if mapped is None or number in self._out or not 0 < nbytes <= mapped.nbytes:
            raise ConnectionError(
                f"{self._peer} sent {nbytes} bytes in shared memory segment {number},"
                " which is unknown, smaller or lent already"
            )
        lent = mapped[:nbytes]
        self._out[number] = weakref.ref(lent, partial(self._returned, number))
        return memoryview(lent)  # type: ignore[arg-type]

    def _returned(self, number: int, _: object) -> None:
        # `close` clears `_out`, so nothing is reported afterwards.
        if self._out.pop(number, None) is not None:
            self._freed(number)

    def release_deleted(self) -> None:
        """Make JAX release deleted arrays now instead of at its next call."""
        if self._out:
            gc.collect(0)

    def forget(self, number: int) -> None:
        """Unmap a segment that the writer dropped. An array in it stays valid."""
        self._mapped.pop(number, None)

    def close(self) -> None:
        """Drop all segments without reporting them as free. Arrays stay valid."""
        self._out.clear()
        self._mapped.clear()


def _seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # This file does not support seals.
