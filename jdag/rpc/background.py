"""One asyncio loop for this process, on a thread of its own.

Control servers, listeners and dials run on it: all that waits for other processes with
a deadline and does not compute. gRPC's asyncio servers want one loop for all of them.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")
_lock = threading.Lock()


def loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs from the first call on; from any thread."""
    with _lock:
        return _loop_of(os.getpid())


@cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process: a forked copy has none of its parent's threads."""
    made = asyncio.new_event_loop()
    threading.Thread(
        target=made.run_forever, name=f"asyncio {process}", daemon=True
    ).start()
    return made


def wait_for(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on the loop and return its result; from any other thread."""
    running = asyncio.run_coroutine_threadsafe(coroutine, loop())
    try:
        return running.result()
    except BaseException:  # Perhaps it is this thread that was interrupted.
        running.cancel()
        raise
