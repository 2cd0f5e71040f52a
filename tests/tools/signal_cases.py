"""Programs of scenarios that are sent a signal while they run, for `test_signals`."""

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from jdag.scenario.case import Case
from tests.tools.scenario_cases import one_leaf

WAITS_S = 60.0


def press(number: str) -> None:
    os.kill(os.getpid(), signal.Signals[number])


def _wait() -> None:
    threading.Event().wait(WAITS_S)
    raise AssertionError("the signal has not ended this")


def _beside(workers: Any, during: Any) -> Case:
    case = one_leaf(workers)

    def program(ctx: Any, params: Any) -> Any:
        loss = case.program(ctx, params)
        during(ctx)
        return loss

    return Case(program, case.params, case.placement)


def interrupted(workers: Any, *, number: str) -> Case:
    def during(_: Any) -> None:
        press(number)
        _wait()

    return _beside(workers, during)


def swallowed(workers: Any, *, number: str) -> Case:
    def during(_: Any) -> None:
        with suppress(BaseException):
            press(number)
            _wait()

    return _beside(workers, during)


def twice(workers: Any, *, number: str) -> Case:
    def during(_: Any) -> None:
        try:
            press(number)
            _wait()
        finally:
            press(number)
            sys.stderr.write("cleaned up\n")

    return _beside(workers, during)


def terminal(workers: Any) -> Case:
    def during(_: Any) -> None:
        os.killpg(os.getpgrp(), signal.SIGINT)
        _wait()

    return _beside(workers, during)
