"""Encoding of functions: by name if the receiver has the same function, else exported.

A function is sent by name if the receiver allows its module, and if the function's
decoded spec has the same function, structure and static arguments. Other functions
(lambdas, closures, functions of `__main__`, shadowed names) are sent as StableHLO, once
to each worker, before the first message that needs the StableHLO. Functions of
`__main__` that cannot be exported (unjitted, with callbacks, on several devices, or
differentiated by `jdag.hvp`) are sent by name to workers that import the script.

Inputs: `prepare(event, ...)` and `outgoing(message, ...)`. The program calls `prepare`
    before it passes the event to its engine. Export therefore takes the program's time,
    and its errors are raised in the program. The sender calls `outgoing`.
Outputs: messages with specs in place of functions, and the definitions that must be
    sent before these messages.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any
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

# The data of a message leave 1 MiB of its maximum size for the other fields.
DATA_BYTES_MAX = LENGTHS_MAX[FrameKind.MESSAGE] - (1 << 20)
NAMED_MAX_BYTES = 1 << 16  # Longer specs are exported: every call sends its spec.

# The events and messages that name functions.
NAMING = frozenset(
    (Issued, Assigned, Launched, Attached, Planned, Call, Assign, Run, Attach, Prepare)
)

_warned: list[str] = []  # The PortabilityWarning that this process has issued, if any.
_twice: list[None] = []  # One entry for each running `jdag.hvp`.
_WIDEST = AllImported((MAIN,), load=False)  # The largest possible allowlist.

Definitions = tuple[Definition, ...]
_Modules = tuple[str, ...]
_Spec = tuple[bytes, Definitions]  # A spec, and the definitions to send before it.


class FunctionEncoder:
    """Encodes the functions of one process. Thread-safe."""

    def __init__(self) -> None:
        self._specs: WeakKeyDictionary[Any, dict[Any, _Spec]] = WeakKeyDictionary()
        self._exported: WeakKeyDictionary[Any, Definition] = WeakKeyDictionary()
        # The last arguments and result. `outgoing` usually repeats a call of `prepare`.
        self._last: tuple[Any, _Modules, _Spec] = (None, (), (b"", ()))

    def spec_for(self, pair: Any, allowed_modules: _Modules, *target: str) -> _Spec:
        """Return the spec of a pair, and the definitions to send before it.

        `target` is the worker and the call site, which error messages contain.

        Raises:
            JdagError: the function can be sent neither by name nor as StableHLO.
            RemoteError: the backward of the function cannot be traced.
        """
        last, modules, spec = self._last
        if last is pair and modules is allowed_modules and not _twice:
            return spec
        bare = pair.pair
        specs = self._specs.setdefault(bare, {})
        key = allowed_modules, bool(_twice)
        if key not in specs:
            specs[key] = self._spec(bare, allowed_modules, target)
        spec = specs[key]
        if bare is not pair:
            places = DevicePlacement(pair.device, pair.in_devices, pair.out_devices)
            spec = placed_spec(spec[0], places), spec[1]
        self._last = (pair, allowed_modules, spec)
        return spec

    def prepare(
        self, event: Event, here: Worker, allowed_on: Callable[[Worker], _Modules]
    ) -> None:
        """Encode the functions in an event of a program on the worker `here`.

        Raises:
            JdagError: a function, program or hook cannot be sent to its worker.
        """
        if event.__class__ is Issued:
            if (to := event.worker) != here:
                self.spec_for(event.function, allowed_on(to), to, event.call_site)
            return
        for pair, worker, site in _pairs_of(event):
            if worker != here:
                self.spec_for(pair, allowed_on(worker), worker, site)
        if isinstance(event, Launched | Attached) and event.worker != here:
            allowed = Allowed(allowed_on(event.worker), load=False)
            for fn in _python_of(event):
                _check_program(fn, event.worker, allowed)
            if isinstance(event, Launched):
                target = event.worker, event.call_site
                self._with_specs(event.arguments, allowed_on(event.worker), *target)
                check_size(event.function, "is given", event.arguments)

    def outgoing(
        self, message: Message, allowed_modules: _Modules
    ) -> tuple[Message, Definitions]:
        """Return the message with encoded functions, and definitions to send first.

        `prepare` normally refuses functions that cannot be encoded. Without `prepare`,
        such a function is sent by name, and its call fails on the receiver.
        """
        match message:
            case Call():
                spec, needed = self._spec_or_name(message.function, allowed_modules)
                return replace(message, function=spec), needed
            case Assign():
                encoded = [self._encoded(p, allowed_modules) for p in message.parts]
                parts = tuple([part for part, _ in encoded])
                definitions = [each for _, needed in encoded for each in needed]
                return replace(message, parts=parts), tuple(dict.fromkeys(definitions))
            case Run():
                arguments, needed = self._with_specs(message.arguments, allowed_modules)
                return replace(message, arguments=arguments), needed
            case Prepare():
                return self._with_segments(message, allowed_modules)
            case _:
                return message, ()

    def _encoded(
        self, part: Assignment, allowed_modules: _Modules
    ) -> tuple[Assignment, Definitions]:
        if part.function is None:
            return part, ()
        spec, needed = self._spec_or_name(part.function, allowed_modules)
        return replace(part, function=spec), needed

    def _spec_or_name(self, pair: Any, allowed_modules: _Modules) -> _Spec:
        try:
            return self.spec_for(pair, allowed_modules)
        except JdagError:
            return spec_of(pair), ()

    def _with_segments(
        self, message: Prepare, allowed_modules: _Modules
    ) -> tuple[Prepare, Definitions]:
        segments, needed = [], dict[Definition, None]()
        for segment in message.segments:
            function = segment.function
            specs = [self._spec_or_name(p, allowed_modules) for p in function.pairs]
            spec = segment_spec(function, tuple([spec for spec, _ in specs]))
            segments.append(replace(segment, function=spec))
            needed.update(dict.fromkeys(d for _, needs in specs for d in needs))
        return replace(message, segments=tuple(segments)), tuple(needed)

    def _with_specs(
        self, arguments: Any, modules: _Modules, *target: str
    ) -> tuple[Any, Definitions]:
        leaves, treedef = flatten(arguments)
        needed: list[Definition] = []
        for index, leaf in enumerate(leaves):
            if type(leaf) is PairData:
                spec, definitions = self.spec_for(leaf.pair, modules, *target)
                leaves[index] = PairData(leaf.pair, spec)
                needed.extend(definitions)
        return unflatten(treedef, leaves), tuple(dict.fromkeys(needed))

    def _spec(self, pair: Any, modules: _Modules, target: Sequence[str]) -> _Spec:
        if pair.source.digest:  # Forward StableHLO from another worker unchanged.
            return spec_of(pair), (pair.source.definition,)
        # The receiver imports the script only if export is impossible.
        first = tuple([module for module in modules if module != MAIN])
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
                f"{pair.name} cannot be sent to another worker. It cannot be sent by "
                f"name: {why}. It cannot be sent as StableHLO: {error}"
            ) from error
        except Exception as error:  # In the backward: the forward was traced before.
            worker, site = target or ("another worker", "its program")
            function = f"the backward of {pair.name}"
            raise blamed(error, function, worker, site) from error
        self._exported[pair] = definition
        return exported_spec(pair, definition.digest), (definition,)


def _named(pair: Any, modules: _Modules) -> tuple[_Spec | None, str]:
    """Return (spec, "") to send a function by name, or (None, reason of a refusal)."""
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
            f"the static arguments of {pair.name} are different after they were "
            "encoded and decoded"
        )
    if len(spec) > NAMED_MAX_BYTES:
        raise JdagError(
            f"its encoded name and static arguments take {len(spec)} bytes; expected "
            f"at most {NAMED_MAX_BYTES}"
        )


def _check_same(fn: Any, decoded: Any) -> None:
    if decoded is not fn and key_of(decoded) != key_of(fn):
        raise JdagError(
            f"the name {name_of(fn)} refers to a different function, or to one with "
            "different values in its closure or defaults"
        )


def warn_unportable(event: Event, here: Worker) -> None:
    """Warn, once per process, if `jdag.launch` cannot send a function of the event."""
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
    """Yield a hook; or a program, and the functions and classes in its arguments."""
    if isinstance(event, Attached):
        yield event.hook.function
        return
    yield event.function
    for leaf in flatten(event.arguments)[0]:
        if isinstance(leaf, FunctionType | MethodType | type):
            yield leaf


def _pairs_of(event: Event) -> Iterable[tuple[Any, Worker, str]]:
    """Return the pair, worker and call site of each function that an event calls."""
    match event:
        case Issued():
            return ((event.function, event.worker, event.call_site),)
        case Assigned():
            parts = [part for part in event.parts if part.function is not None]
            return [(part.function, part.worker, part.call_site) for part in parts]
        case Planned():
            return _planned(event)
        case _:
            return ()


def _check_jitted(pair: Any, worker: Worker) -> None:
    why = pair.unportable
    if not why and _twice and any(pair.tracked):
        why = "is differentiated twice by jdag.hvp"
    try:
        if why:
            _check_named(pair, _WIDEST)
    except JdagError as error:
        raise JdagError(
            f"{pair.name} cannot be called on {worker!r}: it {why}, so it cannot be "
            f"sent as StableHLO. It cannot be sent by name: {error}"
        ) from None


@contextmanager
def differentiating_twice() -> Iterator[None]:
    """While this context is active, tracked functions are sent by name (`jdag.hvp`)."""
    _twice.append(None)
    try:
        yield
    finally:
        _twice.pop()


def _planned(event: Planned) -> Iterator[tuple[Any, Worker, str]]:
    for worker, message in event.parts:
        for segment in message.segments:
            fn = segment.function
            for (_, site), node in zip(fn.calls, fn.nodes, strict=True):
                if node.kind not in (NodeKind.SUM, NodeKind.FILL):
                    yield fn.pairs[node.pair], worker, site


def _check_program(fn: Any, worker: Worker, allowed: Allowed) -> None:
    if isinstance(fn, MethodType) and not isinstance(fn.__self__, type):
        raise JdagError(
            f"{name_of(fn)} cannot be sent to {worker!r}: it is a method of an object "
            "in this process; pass a function, or a functools.partial of a function "
            "and data"
        )
    try:
        _check_same(fn, received_copy(fn, allowed))
    except JdagError as error:
        raise JdagError(
            f"{name_of(fn)} cannot run on {worker!r}: programs and hooks are sent by "
            f"name, but {error}"
        ) from None


def check_size(program: Any, verb: str, data: Any) -> None:
    # Checked in the program, because an error in the sender disconnects the peer.
    try:
        nbytes = tree_size(data, check_there)
    except ProtocolError as error:
        text = f"the data that {name_of(program)} {verb} cannot be sent: {error}"
        raise ProtocolError(text) from None
    if nbytes > DATA_BYTES_MAX:
        raise JdagError(
            f"{name_of(program)} {verb} {nbytes} bytes of data; expected at most "
            f"{DATA_BYTES_MAX}: pass larger arrays as refs (cluster.put, ctx.call)"
        )
