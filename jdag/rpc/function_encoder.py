"""Encoding of functions: by name where that is the same function there, else exported.

A function goes by name if its module is allowed on the other side and its spec, read
as it will be read there, gives the very function, structure and statics again. Lambdas,
closures, functions of `__main__` and those that another one of their name hides go as
StableHLO, once to each worker, before the first message that needs them.

Inputs: `prepare(event, ...)`, by the program that tells its engine the event: exporting
    takes its time there, and a function that cannot travel is refused there.
    `outgoing(message, ...)`, by the sender.
Outputs: messages with specs in place of functions, and definitions to send before.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from jdag.compute.exported import Definition, exported
from jdag.compute.fingerprint import key_of
from jdag.compute.pytrees import flatten, template_of
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    Assign,
    Assigned,
    Assignment,
    Attach,
    Attached,
    Call,
    Event,
    Issued,
    Launched,
    Message,
    Run,
    Worker,
)
from jdag.errors import JdagError, ProtocolError
from jdag.rpc.allowed import Allowed
from jdag.rpc.code_fingerprint import fingerprints_of
from jdag.rpc.unmarshal import structure, unmarshal
from jdag.wire.frames import LENGTHS_MAX, FrameKind
from jdag.wire.specs import (
    DevicePlacement,
    exported_spec,
    placed_spec,
    read_spec,
    spec_of,
)
from jdag.wire.trees import check_there, portable, tree_size

DATA_BYTES_MAX = LENGTHS_MAX[FrameKind.MESSAGE] - (1 << 20)  # The rest of a message.
TOLD_MAX = 1024  # Programs and hooks.
NAMED_MAX_BYTES = 1 << 16  # Longer specs would travel with each call.

Definitions = tuple[Definition, ...]
Modules = tuple[str, ...]
Known = tuple[bytes, Definitions, Definitions]

_allowed_of = lru_cache(maxsize=256)(Allowed)  # Of the modules that a worker allows.


class FunctionEncoder:
    """Encodes the functions of one process; used by several threads."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Any, dict[Modules, Known]]
        self._found = WeakKeyDictionary()
        self._exported: WeakKeyDictionary[Any, Definition] = WeakKeyDictionary()
        self._told: OrderedDict[Any, Definitions] = OrderedDict()
        self._lock = Lock()

    def spec_for(self, pair: Any, allowed_there: Modules) -> tuple[bytes, Definitions]:
        """Return the spec of a pair for a worker, and what is to be defined there.

        Args:
            pair: a `Pair` or `Placed` of this process.
            allowed_there: the modules that the worker was told to allow.

        Raises:
            JdagError: it can go neither by name nor as StableHLO; says what to do.
        """
        spec, definitions, _ = self._known(pair, allowed_there)
        return spec, definitions

    def _known(self, pair: Any, allowed_there: Modules) -> Known:
        """What `spec_for` returns, and the fingerprints of functions by name."""
        bare = pair.pair
        found = self._found.get(bare)
        known = None if found is None else found.get(allowed_there)
        if known is None:
            known = self._spec(bare, _allowed_of(allowed_there))
            with self._lock:
                self._found.setdefault(bare, {})[allowed_there] = known
        if bare is pair:
            return known
        places = DevicePlacement(pair.device, pair.in_devices, pair.out_devices)
        return (placed_spec(known[0], places), *known[1:])

    def prepare(
        self, event: Event, here: Worker, allowed_on: Callable[[Worker], Modules]
    ) -> None:
        """Have all that an event will send be ready, or refuse it.

        Args:
            event: what a program is about to tell its engine.
            here: the worker on which it runs.
            allowed_on: the modules that a worker was told to allow.

        Raises:
            JdagError: a function, program or hook in it cannot travel to its worker.
        """
        match event:
            case Issued() if event.worker != here:
                self.spec_for(event.function, allowed_on(event.worker))
            case Assigned():
                for part in event.parts:
                    if part.function is not None and (to := _owner(part)) != here:
                        self.spec_for(part.function, allowed_on(to))
            case Launched() if event.worker != here:
                self._check(event.function, event.worker, allowed_on(event.worker))
                _check_methods(event.arguments, event.worker)
                check_size(event.function, "is given", event.arguments)
            case Attached() if event.worker != here:
                self._check(event.hook.function, event.worker, allowed_on(event.worker))
            case _:
                pass

    def outgoing(
        self, message: Message, allowed_there: Modules
    ) -> tuple[Message, Definitions]:
        """Return a message as it is to be written for a worker, and what is to precede.

        What cannot travel goes by name all the same, and fails there: `prepare` refuses
        it before.
        """
        match message:
            case Call():
                function, needed = self._data(message.function, allowed_there)
                if function is message.function:
                    return message, needed
                return replace(message, function=function), needed
            case Assign():
                parts: list[Assignment] = []
                definitions: dict[bytes, Definition] = {}
                for part in message.parts:
                    if part.function is None:
                        parts.append(part)
                        continue
                    function, needed = self._data(part.function, allowed_there)
                    parts.append(replace(part, function=function))
                    definitions.update({one.digest: one for one in needed})
                return replace(message, parts=tuple(parts)), tuple(definitions.values())
            case Run():
                given = [one for one in flatten(message.arguments)[0] if callable(one)]
                return message, self._codes((message.function, *given), allowed_there)
            case Attach():
                return message, self._codes((message.hook.function,), allowed_there)
            case _:
                return message, ()

    def _data(self, pair: Any, allowed_there: Modules) -> tuple[Any, Definitions]:
        try:
            spec, definitions, codes = self._known(pair, allowed_there)
        except JdagError:
            return pair, ()
        return (spec, definitions) if definitions else (pair, codes)

    def _codes(self, functions: Any, allowed_there: Modules) -> Definitions:
        """Return the fingerprints of programs and hooks, which run the Python there."""
        key = (tuple([key_of(one) for one in functions]), allowed_there)
        with self._lock:
            known = self._told.get(key)
        if known is None:
            try:
                find = _allowed_of(allowed_there).find_own
                known = fingerprints_of(portable(functions), find)
            except JdagError:
                known = ()  # It is refused there, by what it is.
            with self._lock:
                self._told[key] = known
                if len(self._told) > TOLD_MAX:
                    self._told.popitem(last=False)
        return known

    def _spec(self, pair: Any, allowed: Allowed) -> Known:
        spec = spec_of(pair)
        why = _why_not_named(pair, spec, allowed)
        if not why and len(spec) <= NAMED_MAX_BYTES:
            body = read_spec(spec)[1]
            named = (body.function, body.arguments)
            return spec, (), fingerprints_of(named, allowed.find_own)
        try:
            with self._lock:
                definition = self._exported.get(pair)
            if definition is None:
                definition = exported(pair)
                with self._lock:
                    self._exported[pair] = definition
        except JdagError as error:
            raise JdagError(
                f"{pair.name} cannot be called on another worker. By name: "
                f"{why or f'its spec has {len(spec)} bytes'}. As StableHLO: {error}"
            ) from error
        return exported_spec(pair, definition.digest), (definition,), ()

    def _check(self, fn: Any, worker: Worker, modules: Modules) -> None:
        """Raise JdagError where a program or hook is not the same by name there."""
        name = name_of(fn)
        try:
            found = unmarshal(
                portable(fn, arrays=True), _allowed_of(modules), load=False
            )
            why = "" if key_of(found) == key_of(fn) else _other(name)
        except JdagError as error:
            why = str(error)
        if why:
            raise JdagError(
                f"{name} cannot run on {worker!r}, where programs and hooks are the "
                f"Python that they are here: {why}"
            )


def _check_methods(arguments: Any, worker: Worker) -> None:
    """Raise JdagError where a method is handed over: its object would stay here."""
    for leaf in flatten(arguments)[0]:
        if isinstance(leaf, MethodType) and not isinstance(leaf.__self__, type):
            raise JdagError(
                f"{name_of(leaf)} cannot go to {worker!r}: it is a method of an object "
                "of this process; hand over a function, or a functools.partial of one "
                "with data that can travel"
            )


def check_size(program: Any, what: str, data: Any) -> None:
    """Raise JdagError where a program is given, or returns, more than travels.

    Here, where the error is its program's; at the sender it would only lose the peer.
    """
    try:
        nbytes = tree_size(data, check_there)
    except ProtocolError as error:
        raise ProtocolError(f"what {name_of(program)} {what}: {error}") from None
    if nbytes > DATA_BYTES_MAX:
        raise JdagError(
            f"{name_of(program)} {what} {nbytes} bytes of data; allowed are "
            f"{DATA_BYTES_MAX}: larger arrays go by ref (cluster.put, ctx.call)"
        )


def _owner(part: Assignment) -> Worker:
    key: Any = part.outputs[0]
    worker: Worker = key.name.worker
    return worker


def _other(name: str) -> str:
    return f"{name} is the name of another function, or of one that holds other values"


def _why_not_named(pair: Any, spec: bytes, allowed: Allowed) -> str:
    """Say why a spec would not be read there as this very pair; nothing if it would."""
    source = pair.source
    try:
        body = read_spec(spec)[1]
        function = unmarshal(body.function, allowed, load=False)
        template = template_of(
            *structure(body.arguments, allowed, load=False), body.own
        )
    except JdagError as error:
        return str(error)
    if key_of(function) != key_of(source.fn):
        return _other(pair.name)
    if template != source.template:
        return f"the static arguments of {pair.name} are others when they are read"
    return ""
