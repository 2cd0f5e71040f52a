"""SIGINT and SIGTERM end a command: exit code 130 or 143, one line, nothing left.

During imports a signal ends the process at once. In a command it raises
KeyboardInterrupt, once, so that `with` and `finally` clean up. A callback may swallow
that, and a computation in C delays it: then a thread ends the process `_GRACE_S` later.
Only built-in modules are imported here, so that handlers are in place soon.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn
else:
    import _signal as signal  # `signal` makes enums of its numbers, which takes 10 ms.

_GRACE_S = 3.0
_SAID: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_SHOW_CURSOR = b"\x1b[?25h\n"  # A progress bar hides it.
_MAIN, _LEAVING = _thread.get_ident(), _thread.allocate_lock()
undo: list[Callable[[], object]] = []  # Cleans up in place of the main thread.


class _State:
    mode = "ends"  # What a signal does: it ends, "raises", or "waits" for the end.
    number = 0  # The first signal that came in a command.


def handle() -> None:
    """Have signals end the process; to be called before slow imports."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # As it is with nohup.
        signal.signal(signal.SIGINT, _handle)
    signal.signal(signal.SIGTERM, _terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SAID)


def run_command(command: Callable[[], object]) -> None:
    """Run a command, which ends by SystemExit or by a signal."""
    came, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forked)
    atexit.register(_ignore)
    _thread.start_new_thread(_watch, (came,))
    try:
        _State.mode = "raises"
        command()
    except KeyboardInterrupt:  # The program may have raised it by itself.
        _State.number = _State.number or signal.SIGINT
    finally:
        _State.mode = "ends"
        if _State.number:
            try:
                sys.stdout.flush()
            finally:
                exit_by_signal(_State.number)


def finish() -> None:
    """Hold signals back from now on, so that what the command has done is kept whole.

    Raises:
        KeyboardInterrupt: a signal came, and what it raised was swallowed.
    """
    _State.mode = "waits"
    if _State.number:
        raise KeyboardInterrupt
    undo.clear()


def exit_by_signal(number: int) -> NoReturn:
    """End the process without Python's own exit, which crashes while XLA compiles."""
    if _thread.get_ident() == _MAIN:
        _ignore()
    _LEAVING.acquire()  # For ever: another thread that comes here waits for the end.
    try:
        for each in reversed(undo):
            each()
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        os.write(2, f"jdag: {_SAID[number]}\n".encode())
    finally:
        os._exit(128 + number)


def _handle(number: int, frame: FrameType | None) -> None:
    if _State.mode == "ends":
        exit_by_signal(number)
    if not _State.number:
        _State.number = number
        # The error output is one line: suppress everything after it.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if _State.mode == "raises":
            raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    """Act as on SIGINT, which a node holds back while its engine handles an event."""
    other = signal.getsignal(signal.SIGINT)
    (other if callable(other) else _handle)(number, frame)


def _watch(came: int) -> None:
    while (number := os.read(came, 1)[0]) not in _SAID:
        continue
    time.sleep(_GRACE_S)
    exit_by_signal(_State.number or number)


def _ignore() -> None:
    for number in _SAID:
        signal.signal(number, signal.SIG_IGN)


def _forked() -> None:
    """A forked child of a program is not a command."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
