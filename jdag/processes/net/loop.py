"""The event loop of a node: sockets, timers and the loop lock.

The engine, connections and values of a node are used by one thread at a time, which
holds the loop lock. The user's thread and the threads of programs take the lock to pass
an event to the engine, or to drive (run) the loop while they wait for a result. The
background thread drives the loop when no other thread has done so for `_GRACE_S`, and
releases the lock as soon as another thread wants it.

Each iteration of the loop handles ready sockets, then posted calls, then timers whose
time has come, and then calls `flush`. A driving thread may poll repeatedly for a short
while before it blocks.

A signal that arrives while the lock is held is deferred until the lock is released, so
that no KeyboardInterrupt is raised in the middle of an event.

Invariants: socket handlers, posted calls and timer calls run with the lock held. Posted
calls run once and in order. A thread that waits in `drive` is woken when `done` may
have become true (`wake_waiting`), or when no other thread drives.
"""

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from types import FrameType
from typing import Any

from msgspec import Struct

from jdag.errors import JdagError

_GRACE_S = 0.002  # The background thread drives after this time without a driver.
YIELD_S = 0.000_05
# Polling time, longer than most replies take. A thread that blocks instead wakes up
# late and with cold caches, which doubles the time of its next computation.
SPIN_NS = 300_000
CROWDED_NS = 100_000  # If a yield takes longer, other threads compete for the core.
REST_NS = 20_000_000
BLOCK_MAX_NS = 10**9

_Call = Callable[[], object]
Handler = Callable[[int], object]
READ, WRITE = select.EPOLLIN, select.EPOLLOUT

clock_ns = time.monotonic_ns

PROCESS = {"id": os.getpid()}  # `getpid` is a system call, which may take 1 us.
os.register_at_fork(after_in_child=lambda: PROCESS.update(id=os.getpid()))


class Timer(Struct):
    call: _Call | None

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Sockets, timers and the loop lock. Calls `flush` after each `dirty` iteration."""

    def __init__(self, flush: _Call) -> None:
        self.process = PROCESS["id"]
        self._flush = flush
        self._epoll = select.epoll()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[int, Handler] = {
            self._waker: lambda mask: os.eventfd_read(self._waker)
        }
        self._epoll.register(self._waker, READ)
        self._timers: list[tuple[int, int, Timer]] = []
        self._numbers = count()
        self._posted: deque[_Call] = deque()
        # `soon` is `post` for a thread that holds the lock. It wakes no other thread.
        self.soon = self._posted.append
        self._lock = threading.Lock()
        self._waiting: deque[None] = deque()  # One per thread that waits for the lock.
        # One per thread that waits in `drive`.
        self._sleeping: deque[threading.Event] = deque()
        self._turns = 0  # Lock acquisitions, except of the background thread.
        self._blocked = False
        self._stopped = threading.Event()
        self._active_ns = 0  # Time of the last activity.
        self._rests_until_ns = 0  # Time before which threads do not spin.
        self._signal: tuple[int, FrameType | None] | None = None
        self._guard: _Guard | None = None
        self._holder = 0  # The thread that holds the lock.
        self._main = 0  # The thread whose signals may be deferred.
        self._defers = False  # Whether `_main` now takes, holds or releases the lock.
        self.unflushed: deque[Any] = deque()  # Connections with output to flush.
        self.dirty = False  # Whether `flush` must run even without `unflushed`.
        self.closed = False

    def register(self, fd: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, READ)

    def watch(self, fd: int, mask: int) -> None:
        self._epoll.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        """Stop watching a file. Call this before the file is closed."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def at(self, when_ns: int, call: _Call) -> Timer:
        timer = Timer(call)
        heappush(self._timers, (when_ns, next(self._numbers), timer))
        return timer

    def post(self, call: _Call) -> None:
        """Let the driving thread run `call`. Callable from any thread."""
        self._posted.append(call)
        self._wake()

    def flush(self) -> None:
        """Flush pending output now. Requires the lock."""
        if self.dirty or self.unflushed:
            self.dirty = False
            try:
                self._flush()
            except BaseException:  # The next call flushes the other connections.
                self.dirty = True
                raise

    def _wake(self) -> None:
        if self._blocked:
            try:
                os.eventfd_write(self._waker, 1)
            except BlockingIOError:  # The counter is full, so a wake-up is pending.
                return

    def check_process(self) -> None:
        if PROCESS["id"] != self.process:
            raise JdagError(
                f"process {os.getpid()} was forked from process {self.process} and "
                "cannot use its cluster; start processes by "
                'multiprocessing.get_context("spawn")'
            )

    def acquire(self) -> None:
        """Take the lock. If its holder is blocked in a poll, wake the holder up."""
        if PROCESS["id"] != self.process:
            self.check_process()
        me = threading.get_ident()
        if me == self._main:
            self._defers = True
        if not self._lock.acquire(blocking=False):
            self._waiting.append(None)
            try:
                self._wake()
                self._lock.acquire()
            finally:
                self._waiting.pop()
        self._turns += 1
        self._holder = me

    def release(self, *error: object) -> None:
        del error
        holder, self._holder = self._holder, 0
        self._lock.release()
        if holder == self._main:
            self._defers = False
            if self._signal is not None:
                self._handle_signal()

    __enter__, __exit__ = acquire, release

    @property
    def is_held(self) -> bool:
        return self._holder == threading.get_ident()

    def wake_waiting(self) -> None:
        for sleeper in tuple(self._sleeping):
            sleeper.set()

    def drive(self, done: Callable[[], bool]) -> None:
        """Block until `done()`. Drive the loop meanwhile, if no other thread does."""
        me = threading.get_ident()
        while not done():
            if me == self._main:
                self._defers = True
            if self._waiting or not self._lock.acquire(blocking=False):
                if me == self._main:
                    self._defers = False
                    if self._signal is not None:
                        self._handle_signal()
                self._sleep(done)
                continue
            self._turns += 1
            self._holder = me
            self._active_ns = clock_ns()
            try:
                while not (done() or self._waiting or self._signal or self.closed):
                    self._turn(spin=True)
            finally:
                self.release()
                if self._waiting or self._sleeping:
                    self._give_way()
            if self.closed:
                return

    def drive_until(self, done: Callable[[], bool], within_ns: int) -> None:
        due_ns = clock_ns() + within_ns
        with self:
            timer = self.at(due_ns, self.wake_waiting)
        self.drive(lambda: done() or clock_ns() >= due_ns)
        timer.cancel()

    def _sleep(self, done: Callable[[], bool]) -> None:
        sleeper = threading.Event()
        self._sleeping.append(sleeper)
        try:
            if not done() and (self._waiting or self._lock.locked()):
                sleeper.wait(_GRACE_S * 5)
        finally:
            self._sleeping.remove(sleeper)

    def _give_way(self) -> None:
        for _ in range(1000):  # Waiting threads take the lock within milliseconds.
            if not self._waiting:
                break
            time.sleep(YIELD_S)
        for sleeper in tuple(self._sleeping):
            sleeper.set()
            break

    def background(self, *, spin: bool) -> None:
        """Drive the loop whenever no other thread does, until `stop` is called."""
        while not self.closed and not self._stopped.is_set():
            seen = self._turns
            self._stopped.wait(_GRACE_S)
            if self._waiting or not self._lock.acquire(blocking=False):
                continue
            self._holder = threading.get_ident()
            try:
                if self.closed:
                    return
                if self._turns != seen:  # Other threads use the loop without waiting.
                    self._turn(spin=False, block=False)
                    continue
                while not (self._waiting or self._signal or self._stopped.is_set()):
                    self._turn(spin=spin)
            finally:
                self.release()
                self._give_way()

    def stop(self) -> None:
        self._stopped.set()
        self._wake()

    def close(self) -> None:
        """Close the poller. No thread may drive the loop afterwards."""
        assert self.is_held, "close with the lock held"
        self.closed = True
        self._stopped.set()
        self._handlers.clear()
        self._timers.clear()
        self._posted.clear()
        self._epoll.close()
        os.close(self._waker)
        self.wake_waiting()

    def _turn(self, *, spin: bool, block: bool = True) -> None:
        if self.dirty or self.unflushed:  # Output of programs that do not wait.
            self.flush()
        events = self._poll(spin) if block else self._epoll.poll(0)
        for fd, mask in events:
            handler = self._handlers.get(fd)
            if handler is not None:  # An earlier handler may have closed the file.
                handler(mask)
        posted = self._posted
        for _ in range(len(posted)):
            posted.popleft()()
        timers = self._timers
        if timers and timers[0][0] <= (now_ns := clock_ns()):
            while timers and timers[0][0] <= now_ns:
                call = heappop(timers)[2].call
                if call is not None:
                    call()
        if self.dirty or self.unflushed:
            self.flush()
        if events:
            self._active_ns = clock_ns()

    def _poll(self, spin: bool) -> list[tuple[int, int]]:
        # Spin briefly after recent activity: most replies arrive before a blocked
        # process would wake up. On a contended core, spinning delays the other threads.
        poll = self._epoll.poll
        events = poll(0)
        if events or self._posted or self._waiting or self.dirty or self.unflushed:
            return events
        now_ns = clock_ns()
        if spin and now_ns >= self._rests_until_ns:
            end_ns = self._active_ns + SPIN_NS
            while now_ns < end_ns:
                os.sched_yield()
                events = poll(0)
                before_ns, now_ns = now_ns, clock_ns()
                if events or self._posted or self._waiting:
                    return events
                if now_ns - before_ns > CROWDED_NS:
                    self._rests_until_ns = now_ns + REST_NS
                    break
        timers = self._timers
        while timers and timers[0][2].call is None:
            heappop(timers)
        due_ns = timers[0][0] - now_ns if timers else BLOCK_MAX_NS
        self._blocked = True
        try:
            # `post` checks `_blocked` after it has posted, so no wake-up is lost.
            if self._posted or self._waiting or self._signal or self._stopped.is_set():
                return poll(0)
            return poll(min(max(due_ns, 0), BLOCK_MAX_NS) / 1e9)
        finally:
            self._blocked = False

    def guard_signals(self) -> _Call:
        """Defer SIGINT while the main thread holds the lock. The result undoes this."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        self._guard = _Guard(self._defer_signal)
        self._main = threading.get_ident()
        signal.signal(signal.SIGINT, self._guard)
        return self._guard.undo

    def _defer_signal(self, number: int, frame: FrameType | None) -> bool:
        if self._defers:
            self._signal = (number, frame)
            self._wake()
        return self._defers

    def _handle_signal(self) -> None:
        deferred, self._signal = self._signal, None
        if deferred is not None and self._guard is not None:
            self._guard.pass_on(*deferred)


class _Guard:
    """SIGINT handler that may defer the signal or pass it to the previous handler.

    Several guards may be installed, and undone in any order. A guard that was undone
    passes all signals on. It is removed when it is the current handler again.
    """

    def __init__(self, defers: Callable[[int, FrameType | None], bool]) -> None:
        self._defers = defers
        self._former: Any = signal.getsignal(signal.SIGINT)
        self._is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or not self._defers(number, frame):
            self.pass_on(number, frame)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._former == signal.SIG_DFL:
            raise KeyboardInterrupt
        if callable(self._former):
            self._former(number, frame)

    def undo(self) -> None:
        self._is_over = True
        top = signal.getsignal(signal.SIGINT)
        while isinstance(top, _Guard) and top._is_over:
            top = top._former
        if signal.getsignal(signal.SIGINT) is not top:
            signal.signal(signal.SIGINT, top)
