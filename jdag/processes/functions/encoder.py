"""Encoding of functions: by name if the receiver has the same function, else exported.

A function goes by name if its module is allowed on the other side and its spec, read
as it will be read there, gives the very function, structure and statics again. Lambdas,
closures, functions of `__main__` and those that another one of their name hides go as
StableHLO, once to each worker, before the first message that needs them. What cannot
(unjitted functions, callbacks, several devices, functions that `jdag.hvp`
differentiates) and is of `__main__` goes by name to workers that import the script.

Inputs: `prepare(event, ...)`, by the program that tells its engine the event: exporting
    takes its time there, and a function that cannot travel is refused there.
    `outgoing(message, ...)`, by the sender.
Outputs: messages with specs in place of functions, and definitions to send before.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from jdag.compute.exported import Definition, exported
from jdag.compute.fingerprint import key_of
from jdag.compute.pytrees import flatten, template_of, unflatten
from jdag.engine.functions import call_site, name_of
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
    Planned,
    Prepare,
    Run,
    Worker,
)
from jdag.engine.segments import NodeKind
from jdag.errors import JdagError, PortabilityWarning, ProtocolError
from jdag.processes.functions.allowed import AllImported, Allowed
from jdag.processes.functions.code_fingerprint import coded_name
from jdag.processes.functions.script import MAIN
from jdag.processes.functions.unmarshal import received_copy, structure, unmarshal
from jdag.runtime.failures import blamed
from jdag.wire.frames import LENGTHS_MAX, FrameKind
from jdag.wire.specs import (
    DevicePlacement,
    PairData,
    exported_spec,
    placed_spec,
    read_spec,
    segment_spec,
    spec_of,
)
from jdag.wire.trees import check_there, tree_size

DATA_BYTES_MAX = LENGTHS_MAX[FrameKind.MESSAGE] - (1 << 20)  # The rest of a message.
NAMED_MAX_BYTES = 1 << 16  # Longer specs would travel with each call.

# The events and messages that name functions.
NAMING = frozenset(
    (Issued, Assigned, Launched, Attached, Planned, Call, Assign, Run, Attach, Prepare)
)

_warned: list[str] = []
_twice: list[None] = []  # One for each `jdag.hvp` that runs.
_WIDEST = AllImported((MAIN,), load=False)  # What any launch could allow.

Definitions = tuple[Definition, ...]
_Modules = tuple[str, ...]
_Known = tuple[bytes, Definitions]  # A spec, and what is to be defined before.
Written = TypeVar("Written", Call, Assignment)


class FunctionEncoder:
    """Encodes the functions of one process; used by several threads."""

    def __init__(self) -> None:
        self._specs: WeakKeyDictionary[Any, dict[Any, _Known]] = WeakKeyDictionary()
        self._exported: WeakKeyDictionary[Any, Definition] = WeakKeyDictionary()
        # What `prepare` has just found, `outgoing` asks for next.
        self._last: tuple[Any, _Modules, _Known] = (None, (), (b"", ()))

    def spec_for(self, pair: Any, allowed_there: _Modules, *at: str) -> _Known:
        """Return the spec of a pair for a worker, and what is to be defined there.

        `at` has worker and call site, for errors.

        Raises:
            JdagError: it can go neither by name nor as StableHLO; says what to do.
            RemoteError: its backward cannot be traced.
        """
        last, modules, known = self._last
        if last is pair and modules is allowed_there and not _twice:
            return known
        bare = pair.pair
        specs = self._specs.setdefault(bare, {})
        key = allowed_there, bool(_twice)
        if key not in specs:
            specs[key] = self._spec(bare, allowed_there, at)
        known = specs[key]
        if bare is not pair:
            places = DevicePlacement(pair.device, pair.in_devices, pair.out_devices)
            known = placed_spec(known[0], places), known[1]
        self._last = (pair, allowed_there, known)
        return known

    def prepare(
        self, event: Event, here: Worker, allowed_on: Callable[[Worker], _Modules]
    ) -> None:
        """Make ready what an event of a program on the worker `here` will send.

        Raises:
            JdagError: a function, program or hook in it cannot travel to its worker.
        """
        for pair, to, site in _pairs_of(event):
            if to != here:
                self.spec_for(pair, allowed_on(to), to, site)
        if isinstance(event, Launched | Attached) and event.worker != here:
            allowed = Allowed(allowed_on(event.worker), load=False)
            for fn in _python_of(event):
                _check_program(fn, event.worker, allowed)
            if isinstance(event, Launched):
                at = event.worker, event.call_site
                self._with_specs(event.arguments, allowed_on(at[0]), *at)
                check_size(event.function, "is given", event.arguments)

    def outgoing(
        self, message: Message, allowed_there: _Modules
    ) -> tuple[Message, Definitions]:
        """Return a message as it is written for a worker, and what is to precede it.

        What cannot travel, which `prepare` refuses, goes by name and fails there.
        """
        match message:
            case Call():
                return self._written(message, allowed_there)
            case Assign():
                written = [self._written(part, allowed_there) for part in message.parts]
                parts = tuple([part for part, _ in written])
                defined = [one for _, needed in written for one in needed]
                return replace(message, parts=parts), tuple(dict.fromkeys(defined))
            case Run():
                arguments, needed = self._with_specs(message.arguments, allowed_there)
                return replace(message, arguments=arguments), needed
            case Prepare():
                return self._with_segments(message, allowed_there)
            case _:
                return message, ()

    def _written(
        self, one: Written, allowed_there: _Modules
    ) -> tuple[Written, Definitions]:
        if one.function is None:
            return one, ()
        spec, needed = self._known(one.function, allowed_there)
        return replace(one, function=spec), needed

    def _known(self, pair: Any, allowed_there: _Modules) -> _Known:
        try:
            return self.spec_for(pair, allowed_there)
        except JdagError:
            return spec_of(pair), ()

    def _with_segments(
        self, message: Prepare, allowed_there: _Modules
    ) -> tuple[Prepare, Definitions]:
        segments, needed = [], dict[Definition, None]()
        for one in message.segments:
            known = [self._known(pair, allowed_there) for pair in one.function.pairs]
            spec = segment_spec(one.function, tuple([spec for spec, _ in known]))
            segments.append(replace(one, function=spec))
            needed.update(dict.fromkeys(d for _, needs in known for d in needs))
        return replace(message, segments=tuple(segments)), tuple(needed)

    def _with_specs(
        self, arguments: Any, modules: _Modules, *at: str
    ) -> tuple[Any, Definitions]:
        leaves, treedef = flatten(arguments)
        needed: list[Definition] = []
        for index, leaf in enumerate(leaves):
            if type(leaf) is PairData:
                spec, definitions = self.spec_for(leaf.pair, modules, *at)
                leaves[index] = PairData(leaf.pair, spec)
                needed.extend(definitions)
        return unflatten(treedef, leaves), tuple(dict.fromkeys(needed))

    def _spec(self, pair: Any, modules: _Modules, at: Sequence[str]) -> _Known:
        if pair.source.digest:  # It came as StableHLO, and is passed on as it came.
            return spec_of(pair), (pair.source.definition,)
        # The script is imported only for what goes no other way.
        first = tuple([one for one in modules if one != MAIN])
        if pair.source.unjitted or (_twice and any(pair.tracked)):
            first = modules
        named, why = _named(pair, first)
        if named is not None:
            return named
        try:
            definition = self._exported.get(pair) or exported(pair)
        except JdagError as error:
            if first != modules:
                named, why = _named(pair, modules)
            if named is not None:
                return named
            raise JdagError(
                f"{pair.name} cannot be called on another worker. By name: {why}. As "
                f"StableHLO: {error}"
            ) from error
        except Exception as error:  # Forward was traced before.
            to, site = at or ("another worker", "its program")
            raise blamed(error, f"the backward of {pair.name}", to, site) from error
        self._exported[pair] = definition
        return exported_spec(pair, definition.digest), (definition,)


def _named(pair: Any, modules: _Modules) -> tuple[_Known | None, str]:
    """Return what names a pair where these are allowed; or None, and why it cannot."""
    try:
        _check_named(pair, Allowed(modules, load=False))
    except JdagError as error:
        return None, str(error)
    return (exported_spec(pair, b"", coded_name), ()), ""


def _check_named(pair: Any, allowed: Allowed) -> None:
    spec = spec_of(pair)
    body = read_spec(spec)[1]
    _check_same(pair.source.fn, unmarshal(body.function, allowed))
    template = template_of(*structure(body.arguments, allowed), body.own)
    if template != pair.source.template:
        raise JdagError(
            f"the static arguments of {pair.name} are others when they are read"
        )
    if len(spec) > NAMED_MAX_BYTES:
        raise JdagError(f"its spec has {len(spec)} bytes")


def _check_same(fn: Any, found: Any) -> None:
    """Raise JdagError unless what a receiver finds is this very function."""
    if found is not fn and key_of(found) != key_of(fn):
        raise JdagError(
            f"{name_of(fn)} is the name of another function, or of one that holds "
            "other values"
        )


def warn_unportable(event: Event, here: Worker) -> None:
    """Warn, once in this process, of what `prepare` refuses whatever is allowed."""
    if _warned:
        return
    try:
        for pair, worker, _ in _pairs_of(event):
            if worker != here and pair.pair.source.unjitted:
                _check_program(pair.pair.source.fn, worker, _WIDEST)
            elif worker != here:
                _check_jitted(pair.pair, worker)
        if isinstance(event, Launched | Attached) and event.worker != here:
            for fn in _python_of(event):
                _check_program(fn, event.worker, _WIDEST)
    except JdagError as error:
        _warned.append(f"jdag.launch would refuse this: {error}")
        site = call_site()
        warnings.warn_explicit(_warned[0], PortabilityWarning, site.file, site.line)


def _python_of(event: Launched | Attached) -> Iterator[Any]:
    """Yield a hook; or a program, and the functions and classes that it is given."""
    if isinstance(event, Attached):
        yield event.hook.function
        return
    yield event.function
    for leaf in flatten(event.arguments)[0]:
        if isinstance(leaf, FunctionType | MethodType | type):
            yield leaf


def _pairs_of(event: Event) -> Sequence[tuple[Any, Worker, str]]:
    """The functions that an event has called or compiled: where, and where it says."""
    match event:
        case Issued():
            return ((event.function, event.worker, event.call_site),)
        case Assigned():
            found = [(one.function, one.worker, one.call_site) for one in event.parts]
            return [each for each in found if each[0] is not None]
        case Planned():
            return list(_planned(event))
        case _:
            return ()


def _check_jitted(pair: Any, worker: Worker) -> None:
    """Raise JdagError where a jitted function goes neither as StableHLO nor by name."""
    why = pair.unportable
    if not why and _twice and any(pair.tracked):
        why = "is differentiated twice by jdag.hvp"
    try:
        if why:
            _check_named(pair, _WIDEST)
    except JdagError as error:
        raise JdagError(
            f"{pair.name} cannot be called on {worker!r}: it {why}, so it cannot go as "
            f"StableHLO, nor can it by name: {error}"
        ) from None


@contextmanager
def differentiating_twice() -> Iterator[None]:
    """Warn of tracked functions that cannot go by name, as `jdag.hvp` needs them to."""
    _twice.append(None)
    try:
        yield
    finally:
        _twice.pop()


def _planned(event: Planned) -> Iterator[tuple[Any, Worker, str]]:
    """Yield the pairs of a plan, where they run and where they are called."""
    for to, message in event.parts:
        for segment in message.segments:
            fn = segment.function
            for (_, site), node in zip(fn.calls, fn.nodes, strict=True):
                if node.kind not in (NodeKind.SUM, NodeKind.FILL):
                    yield fn.pairs[node.pair], to, site


def _check_program(fn: Any, worker: Worker, allowed: Allowed) -> None:
    """Raise JdagError where a program or hook is not the same by name there."""
    if isinstance(fn, MethodType) and not isinstance(fn.__self__, type):
        raise JdagError(
            f"{name_of(fn)} cannot go to {worker!r}: it is a method of an object "
            "of this process; hand over a function, or a functools.partial of one "
            "with data that can travel"
        )
    try:
        _check_same(fn, received_copy(fn, allowed))
    except JdagError as error:
        raise JdagError(
            f"{name_of(fn)} cannot run on {worker!r}, where programs and hooks are the "
            f"Python that they are here: {error}"
        ) from None


def check_size(program: Any, what: str, data: Any) -> None:
    """Raise JdagError if the arguments or result of a program are too large to send.

    Checked here, where the program gets the error; at the sender it would lose the
    peer.
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
