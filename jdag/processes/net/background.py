"""The asyncio loop of this process, on its own thread.

It runs control servers, listeners and connection attempts. These tasks wait for other
processes, have a deadline, and do not compute. All asyncio servers of gRPC in a process
must share one loop.
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
    """Return the loop. The first call starts it. Callable from any thread."""
    with _lock:
        return _loop_of(os.getpid())


@cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process. A forked child needs its own loop and thread."""
    created = asyncio.new_event_loop()
    threading.Thread(
        target=created.run_forever, name=f"asyncio {process}", daemon=True
    ).start()
    return created


def wait_for(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    running = asyncio.run_coroutine_threadsafe(coroutine, loop())
    try:
        return running.result()
    except BaseException:  # For example KeyboardInterrupt.
        running.cancel()
        raise
