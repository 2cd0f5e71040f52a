"""Who finds a place, and that all are given back."""

import threading
from contextlib import ExitStack

import pytest

from jdag.rpc.rooms import Room


def test_no_holder_has_more_than_a_share_and_all_no_more_than_there_are():
    room = Room(5, 3)
    with ExitStack() as stack:
        found = [stack.enter_context(room.place(name)) for name in "aaaabbb"]
        assert found == [True, True, True, False, True, True, False]
        assert not stack.enter_context(room.place("c"))
    with ExitStack() as stack:
        assert all(stack.enter_context(room.place("b")) for _ in range(3))


def test_a_place_is_given_back_after_an_error_and_nobody_is_remembered():
    room = Room(2, 1)
    for number in range(100):
        with pytest.raises(ValueError, match="mine"), room.place(str(number)) as there:
            assert there
            raise ValueError("mine")
    assert len(room._held) == 0
    with room.place("a"), room.place("a") as second:
        assert not second
    assert len(room._held) == 0


def test_many_threads_lose_no_place():
    room, most = Room(8, 8), []
    lock = threading.Lock()
    inside = [0]

    def come() -> None:
        for _ in range(300):
            with room.place("a") as there_is:
                with lock:
                    inside[0] += there_is
                    most.append(inside[0])
                with lock:
                    inside[0] -= there_is

    threads = [threading.Thread(target=come) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < max(most) <= 8
    assert len(room._held) == 0
