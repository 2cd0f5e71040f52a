"""A helper process that answers for its owner while the owner computes.

The command is `python -I -S pulse_helper.py OWNER DESCRIPTOR`, with a key of
`KEY_BYTES` bytes on standard input. OWNER is the id of the parent process, DESCRIPTOR
that of a bound UDP socket. The helper uses the standard library only, so that it starts
quickly. It ends with its owner, even if the owner is killed or has forked.

A question consists of a nonce and its HMAC under the key. The answer is another HMAC of
the nonce. The helper answers only if the owner computes during `WINDOW_S` after the
question: a thread of the owner runs or is ready to run, or the CPU time of the owner
has grown. The helper does not answer if the owner is stopped, has ended or waits, or if
the system has no /proc.
"""

import hmac
import os
import select
import socket
import sys
import time
from contextlib import suppress

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 16, 32
WINDOW_S = 0.1
# Minimum CPU time in the window, in ticks of 10 ms. Threads that wait for the
# interpreter lock wake up 200 times per second, which takes less CPU time.
TICKS_MIN = 2
_QUESTIONS_MAX = 1024
_STOPPED = frozenset("TtZX")


def question(key: bytes, nonce: bytes) -> bytes:
    return nonce + hmac.digest(key, b"?" + nonce, "sha256")


def pulse_answer(key: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, b"!" + nonce, "sha256")


def _fields(path: str) -> list[str]:
    """Return the fields after the process name in a `stat` file of /proc."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _ticks(process: int) -> int:
    fields = _fields(f"/proc/{process}/stat")
    return int(fields[11]) + int(fields[12])


def _states(process: int) -> set[str]:
    states = set()
    for thread in os.listdir(f"/proc/{process}/task"):
        with suppress(OSError):  # The thread has just ended.
            states.add(_fields(f"/proc/{process}/task/{thread}/stat")[0])
    return states


def computes(process: int) -> bool:
    try:
        before = _ticks(process)
        time.sleep(WINDOW_S)
        states, grown = _states(process), _ticks(process) - before
    except OSError:
        return False
    return "R" in states or (grown >= TICKS_MIN and not states <= _STOPPED)


def _questions(bound: socket.socket, key: bytes) -> list[tuple[bytes, tuple[str, int]]]:
    questions = []
    with suppress(OSError):
        for _ in range(_QUESTIONS_MAX):
            most = NONCE_BYTES + TAG_BYTES + 1
            data, sender = bound.recvfrom(most, socket.MSG_DONTWAIT)
            nonce = data[:NONCE_BYTES]
            if hmac.compare_digest(data, question(key, nonce)):
                questions.append((nonce, sender))
    return questions


def main(owner: int, descriptor: int) -> None:
    key = os.read(0, KEY_BYTES)
    life = os.pidfd_open(owner)
    if len(key) < KEY_BYTES or os.getppid() != owner:
        return  # The owner has ended already.
    bound = socket.socket(fileno=descriptor)
    poller = select.poll()
    poller.register(life, select.POLLIN)
    poller.register(bound, select.POLLIN)
    while life not in dict(poller.poll()):
        questions = _questions(bound, key)
        if questions and computes(owner):
            for nonce, sender in questions:
                with suppress(OSError):
                    bound.sendto(pulse_answer(key, nonce), sender)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
