"""Size limit for values that a program sends.

Constants, values of new leaves and cotangents are checked before the program's engine
gets the event. Values that workers send each other later are checked by the sender: see
`jdag.compute.machine.Machine.load`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jdag.compute.avals import Aval
from jdag.compute.machine import too_large
from jdag.engine.protocol import Assigned, Differentiated, Event, Issued, Key, Worker
from jdag.errors import JdagError


def check_values(event: Event, here: Worker, bytes_max: int) -> None:
    """Refuse an event that would send a value of more than `bytes_max`.

    Args:
        event: an event of a program.
        here: the program's worker.
        bytes_max: the limit.

    Raises:
        JdagError: names the value, its bytes, what is allowed, and what to do.
    """
    for worker, what, aval in _handed_over(event):
        if worker != here and aval.nbytes > bytes_max:
            raise JdagError(too_large(f"for {worker!r}: {what}", aval, bytes_max))


def _handed_over(event: Event) -> Iterator[tuple[Worker, str, Aval]]:
    """Yield (destination, description, aval) of the values of an event."""
    match event:
        case Issued():
            keys = [argument.key for argument in event.arguments]
            yield from _constants(event.worker, event.function, keys)
        case Assigned():
            for part in event.parts:
                if part.function is not None:
                    yield from _constants(part.worker, part.function, part.inputs)
                else:
                    for key, aval in zip(part.outputs, part.avals, strict=True):
                        yield part.worker, str(key.name), aval
        case Differentiated():
            for worker, root in event.roots:
                if root.given:
                    yield worker, f"the cotangent of root {root.number}", root.aval


def _constants(
    worker: Worker, made: Any, keys: Sequence[Key]
) -> Iterator[tuple[Worker, str, Aval]]:
    for place, (key, aval) in enumerate(zip(keys, made.avals, strict=True)):
        if key.kind == "constant":
            yield worker, f"{made.source.argument(place)} of {made.name}", aval
