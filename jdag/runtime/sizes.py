"""Size limit for values that a program sends.

Constants, values of new leaves and cotangents are checked before the program's engine
gets the event. The sender checks values that workers send each other later: see
`jdag.compute.machine.Machine.load`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jdag.compute.avals import Aval
from jdag.compute.machine import too_large
from jdag.engine.protocol import Assigned, Differentiated, Event, Issued, Key, Worker
from jdag.errors import JdagError


def check_values(event: Event, local: Worker, bytes_max: int) -> None:
    for worker, name, aval in _values_of(event):
        if worker != local and aval.nbytes > bytes_max:
            raise JdagError(too_large(f"for {worker!r}: {name}", aval, bytes_max))


def _values_of(event: Event) -> Iterator[tuple[Worker, str, Aval]]:
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
    worker: Worker, pair: Any, keys: Sequence[Key]
) -> Iterator[tuple[Worker, str, Aval]]:
    for place, (key, aval) in enumerate(zip(keys, pair.avals, strict=True)):
        if key.kind == "constant":
            yield worker, f"{pair.source.argument(place)} of {pair.name}", aval
