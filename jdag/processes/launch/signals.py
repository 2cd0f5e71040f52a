"""Handling of SIGINT and SIGTERM in commands: one line of output, exit code 130 or 143.

During imports a signal ends the process at once. In a command the first signal raises
KeyboardInterrupt, so that `with` and `finally` clean up. If a callback swallows the
exception, or a computation in C delays it, a thread ends the process after `_GRACE_S`.
This module imports built-in modules only, so that the handlers are installed early.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import NoReturn
else:
    import _signal as signal  # Importing `signal` takes 10 ms.

_GRACE_S = 3.0
_MESSAGES: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_SHOW_CURSOR = b"\x1b[?25h\n"  # A progress bar hides the cursor.
_MAIN, _LEAVING = _thread.get_ident(), _thread.allocate_lock()
undo: list[Callable[[], object]] = []  # Cleanup functions of `exit_by_signal`.


class _State:
    # The effect of a signal: it "ends" the process, "raises" KeyboardInterrupt, or
    # "waits" until the command has ended.
    mode = "ends"
    number = 0  # The first signal that a command received.


def handle() -> None:
    """Make signals end the process. Call this function before slow imports."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # SIG_IGN: run by nohup.
        signal.signal(signal.SIGINT, _handle)
    signal.signal(signal.SIGTERM, _terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _MESSAGES)


def run_command(command: Callable[[], object]) -> None:
    received, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forked)
    atexit.register(_ignore)
    _thread.start_new_thread(_watch, (received,))
    try:
        _State.mode = "raises"
        command()
    except KeyboardInterrupt:  # Perhaps raised by the user's program.
        _State.number = _State.number or signal.SIGINT
    finally:
        _State.mode = "ends"
        if _State.number:
            try:
                sys.stdout.flush()
            finally:
                exit_by_signal(_State.number)


def import_command(module: str) -> ModuleType:
    """Import a module for a command. Meanwhile, a signal ends the process at once."""
    former, _State.mode = _State.mode, "ends"
    try:
        return import_module(module)
    finally:
        _State.mode = former


def finish() -> None:
    """Delay signals from now on, so that the output of the command is complete.

    Raises:
        KeyboardInterrupt: a signal arrived earlier, but its exception was swallowed.
    """
    _State.mode = "waits"
    if _State.number:
        raise KeyboardInterrupt
    undo.clear()


def exit_by_signal(number: int) -> NoReturn:
    """End the process without Python's cleanup, which crashes while XLA compiles."""
    if _thread.get_ident() == _MAIN:
        _ignore()
    _LEAVING.acquire()  # Never released: other threads block here until the end.
    try:
        for clean_up in reversed(undo):
            clean_up()
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        os.write(2, f"jdag: {_MESSAGES[number]}\n".encode())
    finally:
        os._exit(128 + number)


def _handle(number: int, frame: FrameType | None) -> None:
    if _State.mode == "ends":
        exit_by_signal(number)
    if not _State.number:
        _State.number = number
        # The command prints one line to stderr; suppress all other output.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if _State.mode == "raises":
            raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    """Call the current SIGINT handler. A node's handler may defer the signal."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else _handle)(number, frame)


def _watch(received: int) -> None:
    while (number := os.read(received, 1)[0]) not in _MESSAGES:
        continue
    time.sleep(_GRACE_S)
    exit_by_signal(_State.number or number)


def _ignore() -> None:
    for number in _MESSAGES:
        signal.signal(number, signal.SIG_IGN)


def _forked() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
