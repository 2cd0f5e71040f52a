"""The loop: turns, timers, the baton, and signals that wait for it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from jdag.processes.net.loop import Loop, clock_ns

PATIENCE_S = 60.0


@contextmanager
def loop_of(flush: Any = lambda: None) -> Iterator[Loop]:
    loop = Loop(flush)
    try:
        yield loop
    finally:
        with loop:
            loop.close()


@contextmanager
def guarded() -> Iterator[Loop]:
    """A loop that holds signals back."""
    with loop_of() as loop:
        undo = loop.guard_signals()
        try:
            yield loop
        finally:
            undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def in_background(loop: Loop) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=lambda: loop.background(spin=False), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        loop.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_what_was_posted_runs_once_and_in_order_before_the_turn_is_flushed() -> None:
    said: list[Any] = []
    with loop_of(lambda: said.append("flush")) as loop:
        for number in range(4):
            loop.post(partial(said.append, number))
        loop.post(partial(setattr, loop, "dirty", True))
        loop.drive(lambda: "flush" in said)
    assert said == [0, 1, 2, 3, "flush"]


def test_a_turn_in_which_nothing_was_said_flushes_nothing() -> None:
    said: list[str] = []
    with loop_of(lambda: said.append("flush")) as loop:
        loop.post(partial(said.append, "posted"))
        loop.drive(lambda: bool(said))
        loop.flush()
        assert said == ["posted"]
        loop.dirty = True
        loop.flush()
        loop.flush()
    assert said == ["posted", "flush"]


def test_what_a_flush_that_raised_has_left_is_flushed_by_the_next() -> None:
    said: list[str] = []

    def flush() -> None:
        said.append("flush")
        if len(said) == 1:
            raise MemoryError

    with loop_of(flush) as loop:
        loop.dirty = True
        with pytest.raises(MemoryError):
            loop.flush()
        loop.flush()
        loop.flush()
    assert said == ["flush"] * 2


def test_timers_run_in_the_order_of_their_times_and_not_if_they_were_cancelled() -> (
    None
):
    said: list[int] = []
    with loop_of() as loop:
        now_ns = clock_ns()
        timers = [
            loop.at(now_ns + after_ns, partial(said.append, after_ns))
            for after_ns in (3_000_000, 1_000_000, 2_000_000, 1_500_000)
        ]
        timers[3].cancel()
        loop.drive(lambda: len(said) == 3)
    assert said == [1_000_000, 2_000_000, 3_000_000]


def test_a_file_is_watched_until_it_is_not(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    came: list[bytes] = []
    with loop_of() as loop:
        loop.register(ours, lambda mask: came.append(os.read(ours, 10)))
        os.write(theirs, b"one")
        loop.drive(lambda: came == [b"one"])
        loop.unregister(ours)
        os.write(theirs, b"two")
        turned: list[None] = []
        loop.post(lambda: turned.append(None))
        loop.drive(lambda: bool(turned))
    assert came == [b"one"]
    assert os.read(ours, 10) == b"two"


def test_what_was_told_and_not_waited_for_is_flushed_all_the_same() -> None:
    flushed = threading.Event()
    with loop_of(flushed.set) as loop, in_background(loop):
        with loop:
            flushed.clear()
            loop.dirty = True
        assert flushed.wait(PATIENCE_S)


def test_several_threads_wait_at_once_and_each_goes_on_when_its_own_is_there() -> None:
    given: dict[int, bool] = {}
    gone: list[int] = []
    with loop_of() as loop, in_background(loop):

        def wait(number: int) -> None:
            loop.drive(lambda: number in given)
            gone.append(number)

        threads = [
            threading.Thread(target=wait, args=(number,), daemon=True)
            for number in range(5)
        ]
        for thread in threads:
            thread.start()
        for number in (3, 0, 4, 1, 2):

            def give(number: int = number) -> None:
                given[number] = True
                loop.wake_waiting()

            loop.post(give)
            threads[number].join(PATIENCE_S)
            assert not threads[number].is_alive()
    assert gone == [3, 0, 4, 1, 2]


def test_a_signal_waits_until_the_baton_is_given_back() -> None:
    with guarded() as loop:
        loop.acquire()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            loop.release()


def test_a_signal_interrupts_who_waits() -> None:
    with guarded() as loop:
        timer = threading.Timer(0.05, partial(os.kill, os.getpid(), signal.SIGINT))
        # Not before: here, where nothing is expected, it would end all tests.
        loop.post(timer.start)
        with pytest.raises(KeyboardInterrupt):
            loop.drive(lambda: False)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_guards_undone_in_any_order_leave_the_handler_that_was_there(
    order: tuple[int, ...],
) -> None:
    with loop_of() as one, loop_of() as two, loop_of() as three:
        loops = (one, two, three)
        undo = [loop.guard_signals() for loop in loops]
        left = list(range(3))
        for place in order:
            undo[place]()
            left.remove(place)
            for number in left:  # Those that are not undone hold back as before.
                loops[number].acquire()
                os.kill(os.getpid(), signal.SIGINT)
                with pytest.raises(KeyboardInterrupt):
                    loops[number].release()
            with loops[place], pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_waits_in_a_loop_that_is_closed_goes_on() -> None:
    loop = Loop(lambda: None)
    ended = threading.Event()

    def wait() -> None:
        loop.drive(lambda: False)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    with loop:
        loop.close()
    assert ended.wait(PATIENCE_S)


def test_a_signal_at_the_very_edges_of_having_the_baton_does_not_keep_it() -> None:
    class Edgy:
        """A lock at whose edges a signal comes."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.locked = self.lock.locked

        def acquire(self, *args: Any, **options: Any) -> bool:
            got = self.lock.acquire(*args, **options)
            os.kill(os.getpid(), signal.SIGINT)
            return got

        def release(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            self.lock.release()

    with guarded() as loop, pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "_lock", Edgy())
        with pytest.raises(KeyboardInterrupt), loop:
            pass
        assert not loop._lock.locked()


def test_the_background_looks_at_files_while_others_only_tell_things(
    pipe: tuple[int, int],
) -> None:
    ours, theirs = pipe
    came = threading.Event()

    def read(mask: int) -> None:
        os.read(ours, 10)
        came.set()

    with loop_of() as loop:
        with loop:
            loop.register(ours, read)
        with in_background(loop):
            os.write(theirs, b"x")
            for _ in range(1_000_000):
                with loop:
                    loop.dirty = True
                if came.is_set():
                    break
        assert came.is_set()
        with loop:
            loop.unregister(ours)
