"""The asyncio loop of this process, on its own thread.

Control servers, listeners and dials run here: everything that waits for other processes
with a deadline and does not compute. The asyncio servers of gRPC require a single loop.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_lock = threading.Lock()


def loop() -> asyncio.AbstractEventLoop:
    """Return the loop, started by the first call; callable from any thread."""
    with _lock:
        return _loop_of(os.getpid())


@cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Keyed by process, because a forked child has none of its parent's threads."""
    made = asyncio.new_event_loop()
    threading.Thread(
        target=made.run_forever, name=f"asyncio {process}", daemon=True
    ).start()
    return made


def wait_for(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on the loop from another thread; return its result."""
    running = asyncio.run_coroutine_threadsafe(coroutine, loop())
    try:
        return running.result()
    except BaseException:  # This thread may have been interrupted.
        running.cancel()
        raise
