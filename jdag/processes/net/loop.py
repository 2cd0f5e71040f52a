"""The one loop of a node: sockets, timers and the loop lock.

Engine, connections, values and sockets of a node are touched by one thread at a time,
the one that holds the loop lock. Three kinds of threads take it: the user's, for the
moment in which it tells the engine something, or for as long as it waits, when it
drives the loop itself; threads of programs, alike; and the background thread, which
drives when no other thread has for `_GRACE_S`, and gives way as soon as one wants to.

A turn is: what sockets have, then what was posted, then what is due, then `flush`.
Before it blocks, a driving thread may poll again and again for a short while.

A signal that comes while the lock is held waits until it is released, so that no
KeyboardInterrupt falls into the middle of an event.

Invariants: handlers, posted calls and due calls run with the lock held; what is posted
runs once, in order; a thread that waits in `drive` is woken when `done` may have become
true (`wake_waiting`), or when no other thread drives.
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

_GRACE_S = 0.002  # The background drives after so long without a driver.
YIELD_S = 0.000_05
# Longer than most answers take. A thread that blocks instead wakes late and with cold
# caches, which doubles the time of what it does next.
SPIN_NS = 300_000
CROWDED_NS = 100_000  # A yield that takes longer means that the core is contended.
REST_NS = 20_000_000
BLOCK_MAX_NS = 10**9

_Call = Callable[[], object]
Handler = Callable[[int], object]
READ, WRITE = select.EPOLLIN, select.EPOLLOUT

clock_ns = time.monotonic_ns


class Timer(Struct):
    """A call due at some time, unless cancelled."""

    call: _Call | None

    def cancel(self) -> None:
        """Cancel the call; no effect once it was made."""
        self.call = None


class Loop:
    """Sockets, timers and the loop lock; `flush` ends each turn that was `dirty`."""

    def __init__(self, flush: _Call) -> None:
        self._process = os.getpid()
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
        # `post` for a thread with the lock: no thread has to be woken.
        self.soon = self._posted.append
        self._lock = threading.Lock()
        self._wanted: deque[None] = deque()  # One for each thread that wants the lock.
        self._sleeping: deque[threading.Event] = deque()  # Those that wait in `drive`.
        self._turns = 0  # How often a thread but the background's had the lock.
        self._blocked = False
        self._stopped = threading.Event()
        self._active_ns = 0  # When something happened last.
        self._rests_until_ns = 0  # Until then it does not look again.
        self._signal: tuple[int, FrameType | None] | None = None
        self._guard: _Guard | None = None
        self._holder = 0  # The thread that has the lock.
        self._main = 0  # The thread whose signals are held back,
        self._thinks = False  # while it has the lock, takes or releases it.
        self.unflushed: deque[Any] = deque()  # Connections with something to flush.
        self.dirty = False  # There is more to do in `flush` than these.
        self.closed = False

    # ------------------------------------------------------------------ what it watches

    def register(self, fd: int, handler: Handler) -> None:
        """Call `handler(mask)` when the file has something to read."""
        self._handlers[fd] = handler
        self._epoll.register(fd, READ)

    def watch(self, fd: int, mask: int) -> None:
        """Set the events to wait for: `READ`, `WRITE` or both."""
        self._epoll.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        """Stop watching the file; call this before closing it."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def at(self, when_ns: int, call: _Call) -> Timer:
        """Schedule a call at a time of `clock_ns`, or as soon as possible after it."""
        timer = Timer(call)
        heappush(self._timers, (when_ns, next(self._numbers), timer))
        return timer

    def post(self, call: _Call) -> None:
        """Have the driving thread make a call; from any thread."""
        self._posted.append(call)
        self._wake()

    def flush(self) -> None:
        """Flush pending output now; requires the lock."""
        if self.dirty or self.unflushed:
            self.dirty = False
            try:
                self._flush()
            except BaseException:  # The rest is flushed next time.
                self.dirty = True
                raise

    def _wake(self) -> None:
        if self._blocked:
            try:
                os.eventfd_write(self._waker, 1)
            except BlockingIOError:  # The counter is full, so a wake-up is pending.
                return

    # ------------------------------------------------------------------ the loop lock

    def check_process(self) -> None:
        """Raise JdagError in a forked child, which shares sockets with its parent."""
        if os.getpid() != self._process:
            raise JdagError(
                f"this cluster belongs to process {self._process}, and process "
                f"{os.getpid()} was forked from it and cannot use it; start processes "
                'by multiprocessing.get_context("spawn")'
            )

    def acquire(self) -> None:
        """Take the lock; wake a thread that blocks while holding it."""
        if os.getpid() != self._process:
            self.check_process()
        me = threading.get_ident()
        if me == self._main:
            self._thinks = True
        if not self._lock.acquire(blocking=False):
            self._wanted.append(None)
            try:
                self._wake()
                self._lock.acquire()
            finally:
                self._wanted.pop()
        self._turns += 1
        self._holder = me

    def release(self, *error: object) -> None:
        """Release the lock, then handle a signal that arrived meanwhile."""
        del error
        holder, self._holder = self._holder, 0
        self._lock.release()
        if holder == self._main:
            self._thinks = False
            if self._signal is not None:
                self._handle_signal()

    __enter__, __exit__ = acquire, release

    @property
    def held(self) -> bool:
        """Whether this thread has the lock."""
        return self._holder == threading.get_ident()

    def wake_waiting(self) -> None:
        """Wake threads in `drive`, whose condition may have become true."""
        for sleeper in tuple(self._sleeping):
            sleeper.set()

    def drive(self, done: Callable[[], bool]) -> None:
        """Block until `done()`, which is called with the lock held or after a wake-up.

        The thread drives the loop itself unless another thread does.
        """
        me = threading.get_ident()
        while not done():
            if me == self._main:
                self._thinks = True
            if self._wanted or not self._lock.acquire(blocking=False):
                if me == self._main:
                    self._thinks = False
                    if self._signal is not None:
                        self._handle_signal()
                self._sleep(done)
                continue
            self._turns += 1
            self._holder = me
            self._active_ns = clock_ns()
            try:
                while not (done() or self._wanted or self._signal or self.closed):
                    self._turn(spin=True)
            finally:
                self.release()
                if self._wanted or self._sleeping:
                    self._give_way()
            if self.closed:
                return

    def drive_until(self, done: Callable[[], bool], within_ns: int) -> None:
        """Block until `done()`, or for so long."""
        due_ns = clock_ns() + within_ns
        with self:
            timer = self.at(due_ns, self.wake_waiting)
        self.drive(lambda: done() or clock_ns() >= due_ns)
        timer.cancel()

    def _sleep(self, done: Callable[[], bool]) -> None:
        """Wait while another thread drives, until it stops or `done` may be true."""
        sleeper = threading.Event()
        self._sleeping.append(sleeper)
        try:
            if not done() and (self._wanted or self._lock.locked()):
                sleeper.wait(_GRACE_S * 5)
        finally:
            self._sleeping.remove(sleeper)

    def _give_way(self) -> None:
        for _ in range(1000):  # A bound: a waiting thread takes it within milliseconds.
            if not self._wanted:
                break
            time.sleep(YIELD_S)
        for sleeper in tuple(self._sleeping):
            sleeper.set()
            break

    def background(self, *, spin: bool) -> None:
        """Drive whenever no other thread does, until `stop`."""
        while not self.closed and not self._stopped.is_set():
            seen = self._turns
            self._stopped.wait(_GRACE_S)
            if self._wanted or not self._lock.acquire(blocking=False):
                continue
            self._holder = threading.get_ident()
            try:
                if self.closed:
                    return
                if self._turns != seen:  # Other threads use the loop without waiting.
                    self._turn(spin=False, block=False)
                    continue
                while not (self._wanted or self._signal or self._stopped.is_set()):
                    self._turn(spin=spin)
            finally:
                self.release()
                self._give_way()

    def stop(self) -> None:
        """End the background thread."""
        self._stopped.set()
        self._wake()

    def close(self) -> None:
        """Close the poller; no thread may drive afterwards."""
        assert self.held, "close with the lock held"
        self.closed = True
        self._stopped.set()
        self._handlers.clear()
        self._timers.clear()
        self._posted.clear()
        self._epoll.close()
        os.close(self._waker)
        self.wake_waiting()

    # ------------------------------------------------------------------ one turn

    def _turn(self, *, spin: bool, block: bool = True) -> None:
        if self.dirty or self.unflushed:  # Events from a program that did not wait.
            self.flush()
        events = self._poll(spin) if block else self._epoll.poll(0)
        for fd, mask in events:
            handler = self._handlers.get(fd)
            if handler is not None:  # An earlier handler may have closed it.
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
        # After recent activity it spins for a short while: most answers arrive sooner
        # than a blocked process is woken. On a contended core that only delays the
        # other process, so it is suspended.
        poll = self._epoll.poll
        events = poll(0)
        if events or self._posted or self._wanted or self.dirty or self.unflushed:
            return events
        now_ns = clock_ns()
        if spin and now_ns >= self._rests_until_ns:
            end_ns = self._active_ns + SPIN_NS
            while now_ns < end_ns:
                os.sched_yield()
                events = poll(0)
                before_ns, now_ns = now_ns, clock_ns()
                if events or self._posted or self._wanted:
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
            if self._posted or self._wanted or self._signal or self._stopped.is_set():
                return poll(0)
            return poll(min(max(due_ns, 0), BLOCK_MAX_NS) / 1e9)
        finally:
            self._blocked = False

    # ------------------------------------------------------------------ signals

    def guard_signals(self) -> _Call:
        """Defer SIGINT while the lock is held; return a function that undoes this.

        Has an effect only on the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        self._guard = _Guard(self._hold_back)
        self._main = threading.get_ident()
        signal.signal(signal.SIGINT, self._guard)
        return self._guard.undo

    def _hold_back(self, number: int, frame: FrameType | None) -> bool:
        if self._thinks:
            self._signal = (number, frame)
            self._wake()
        return self._thinks

    def _handle_signal(self) -> None:
        held_back, self._signal = self._signal, None
        if held_back is not None and self._guard is not None:
            self._guard.pass_on(*held_back)


class _Guard:
    """SIGINT handler that may defer the signal or pass it to the former handler.

    Several may be installed and undone in any order. A guard that is undone passes all
    signals on, and is removed when it is on top.
    """

    def __init__(self, holds_back: Callable[[int, FrameType | None], bool]) -> None:
        self._holds_back = holds_back
        self._former: Any = signal.getsignal(signal.SIGINT)
        self._is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or not self._holds_back(number, frame):
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
