"""A helper process, which answers for its owner while that is busy computing.

Run as `python -I -S pulse_helper.py OWNER DESCRIPTOR`, with a key of `KEY_BYTES` on its
standard input. OWNER is the process that started it, DESCRIPTOR a bound UDP socket. It
imports the standard library alone, since it has to start at once. It ends with its
owner, also where that is killed or has forked.

A question is a nonce and its tag under the key; the answer is another tag of the nonce.
It is sent only if the owner has computed in `WINDOW_S` after the question: a thread of
it runs or is ready to, or its CPU time has grown. A process that is stopped, has ended,
or waits gets no answer, nor does one where there is no /proc.
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
# Of CPU time in the window, 10 ms each. Threads that wait for Python's interpreter lock
# wake up 200 times a second, and use less.
TICKS_MIN = 2
_QUESTIONS_MAX = 1024
_STOPPED = frozenset("TtZX")


def question(key: bytes, nonce: bytes) -> bytes:
    """Return the datagram that asks."""
    return nonce + hmac.digest(key, b"?" + nonce, "sha256")


def pulse_answer(key: bytes, nonce: bytes) -> bytes:
    """Return the datagram that answers."""
    return hmac.digest(key, b"!" + nonce, "sha256")


def _fields(path: str) -> list[str]:
    """The fields of a `stat` file of /proc after the name, which may contain any."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _ticks(process: int) -> int:
    fields = _fields(f"/proc/{process}/stat")
    return int(fields[11]) + int(fields[12])


def _states(process: int) -> set[str]:
    found = set()
    for thread in os.listdir(f"/proc/{process}/task"):
        with suppress(OSError):  # It has just ended.
            found.add(_fields(f"/proc/{process}/task/{thread}/stat")[0])
    return found


def computes(process: int) -> bool:
    """Whether a process computes; takes `WINDOW_S`."""
    try:
        before = _ticks(process)
        time.sleep(WINDOW_S)
        states, grown = _states(process), _ticks(process) - before
    except OSError:
        return False
    return "R" in states or (grown >= TICKS_MIN and not states <= _STOPPED)


def _questions(asked: socket.socket, key: bytes) -> list[tuple[bytes, tuple[str, int]]]:
    """Return the nonces of valid questions, each with its sender's address."""
    found = []
    with suppress(OSError):
        for _ in range(_QUESTIONS_MAX):
            most = NONCE_BYTES + TAG_BYTES + 1
            data, sender = asked.recvfrom(most, socket.MSG_DONTWAIT)
            nonce = data[:NONCE_BYTES]
            if hmac.compare_digest(data, question(key, nonce)):
                found.append((nonce, sender))
    return found


def main(owner: int, descriptor: int) -> None:
    """Answer questions until the owner has ended."""
    key = os.read(0, KEY_BYTES)
    life = os.pidfd_open(owner)
    if len(key) < KEY_BYTES or os.getppid() != owner:
        return  # It has ended before.
    asked = socket.socket(fileno=descriptor)
    poller = select.poll()
    poller.register(life, select.POLLIN)
    poller.register(asked, select.POLLIN)
    while life not in dict(poller.poll()):
        questions = _questions(asked, key)
        if questions and computes(owner):
            for nonce, sender in questions:
                with suppress(OSError):
                    asked.sendto(pulse_answer(key, nonce), sender)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
