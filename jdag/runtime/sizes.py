"""Values that are too large to be sent are refused where a program hands them over.

What the program itself hands over (constants, values of new leaves, cotangents) is
refused where it does so, before its engine sees it. What workers send each other later
is refused by the worker that holds it: see `jdag.compute.machine.Machine.load`.
"""

from typing import Any

from jdag.compute.avals import Aval
from jdag.compute.machine import too_large
from jdag.engine.protocol import (
    Assigned,
    Assignment,
    Differentiated,
    Event,
    Issued,
    Key,
    Worker,
)
from jdag.errors import JdagError


def check_values(event: Event, here: Worker, bytes_max: int) -> None:
    """Refuse an event by which a value would be sent that is too large.

    Args:
        event: what a program is about to tell its engine.
        here: the worker on which it runs.
        bytes_max: the largest value that leaves a worker.

    Raises:
        JdagError: names the value, its bytes, what is allowed, and what to do.
    """
    match event:
        case Issued() if event.worker != here:
            keys = tuple([argument.key for argument in event.arguments])
            _check_constants(event.function, keys, event.worker, bytes_max)
        case Assigned():
            for part in event.parts:
                if part.worker != here:
                    _check_part(part, bytes_max)
        case Differentiated():
            for worker, root in event.roots:
                if root.given and worker != here:
                    what = f"the cotangent of root {root.number}"
                    _check(what, root.aval, worker, bytes_max)
        case _:
            pass


def _check(what: str, aval: Aval, worker: Worker, bytes_max: int) -> None:
    if aval.nbytes > bytes_max:
        raise JdagError(too_large(f"for {worker!r}: {what}", aval, bytes_max))


def _check_part(part: Assignment, bytes_max: int) -> None:
    if part.function is not None:
        _check_constants(part.function, part.inputs, part.worker, bytes_max)
        return
    for key, aval in zip(part.outputs, part.avals, strict=True):
        _check(str(key.name), aval, part.worker, bytes_max)


def _check_constants(
    made: Any, keys: tuple[Key, ...], worker: Worker, bytes_max: int
) -> None:
    """Check those of the arguments of a call that go with it."""
    for place, (key, aval) in enumerate(zip(keys, made.avals, strict=True)):
        if key.kind == "constant":
            what = f"{made.source.argument(place)} of {made.name}"
            _check(what, aval, worker, bytes_max)
