"""Decodes the functions in messages, which are names or StableHLO.

The function of a call becomes a pair of forward and vjp, that of a program or hook a
callable.

Inputs: `bind(message, sender)` for each received message; `define(digest, data)` for
    each exported function, before the first message that needs it.
Outputs: the message for the engine. Its pairs are lazy (`Bound`): the module is
    imported, or the StableHLO is loaded, when the forward first runs.
Invariants: an unavailable function makes only the call, program or hook that needs it
    fail. It is replaced by a placeholder that raises an error when it is called.

`jdag.processes.functions.encoder` encodes.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

from msgspec.structs import replace

from jdag.compute.avals import Aval, aval_from
from jdag.compute.exported import Definition, ExportedProgram, check_definition
from jdag.compute.pairs import PAIRS_MAX, Pair, pair
from jdag.compute.placed import Placed
from jdag.compute.pytrees import template_of
from jdag.compute.refs import Reply
from jdag.compute.segments import SegmentFunction, link
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    Assign,
    Assignment,
    Attach,
    Call,
    Failure,
    Message,
    Prepare,
    Return,
    Run,
    Segment,
    Start,
    Tell,
    Worker,
)
from jdag.errors import JdagError, ProtocolError
from jdag.processes.functions.allowed import Allowed
from jdag.processes.functions.encoder import NAMING, FunctionEncoder
from jdag.processes.functions.unmarshal import Reader, read_tree, structure, unmarshal
from jdag.wire.encoding import Known
from jdag.wire.specs import read_segment, read_spec
from jdag.wire.trees import Named, TreeNode, read_items

# Linux limits the number of memory maps of a process: a process crashes when it holds
# about 10,900 executables. A pair has two executables, so at most MADE_MAX pairs are
# cached in addition to those of jdag.compute. Other pairs are rebuilt when needed.
BOUND_MAX = PAIRS_MAX
MADE_MAX = 512
DEFINED_MAX, DEFINED_BYTES_MAX = 4096, 1 << 30
# Attributes of `jdag.compute.pairs.Pair` that are known only once it is built.
_BUILT = (
    "out_tree", "residual_bytes", "args_kept", "outputs_kept", "reaches", "may_raise",
)  # fmt: skip
REPLY = name_of(Reply)
BOUND = NAMING | {Start, Return, Tell}  # The messages that `bind` changes.


class Bound:
    """A lazy `jdag.compute.pairs.Pair`, decoded from its spec and built when needed.

    Shapes, devices and tracking come from the spec. Reading any other attribute builds
    the pair and may raise.
    """

    def __init__(self, spec: bytes, make: Callable[["Bound"], Any]) -> None:
        places, body = read_spec(spec)
        self.spec, self.body, self.name = spec, body, body.name
        self.avals = tuple(map(aval_from, body.avals))
        self.tracked = body.tracked
        self.out_avals = tuple(map(aval_from, body.out_avals))
        self.out_tracked = body.out_tracked
        self.device = places.device
        self.in_devices = places.in_devices
        self.out_devices = places.out_devices
        self.may_raise = True  # The built pair's value will replace this.
        self._make = make
        self._lock = Lock()

    @property
    def pair(self) -> Any:
        """The pair, which is built if needed. The build may raise any exception."""
        with self._lock:
            return self._make(self)

    def __getattr__(self, name: str) -> Any:
        if name not in _BUILT:
            raise AttributeError(name)
        return getattr(self.pair, name)

    # These are methods, so that reading the attribute `forward` builds no pair.
    def forward(self, args: Sequence[Any]) -> Any:
        return self.pair.forward(args)

    def vjp(self, residuals: Any, cotangents: Sequence[Sequence[Any]]) -> Any:
        return self.pair.vjp(residuals, cotangents)

    def __repr__(self) -> str:
        return f"Bound({self.name})"


class FunctionDecoder:
    """Decodes the functions in messages to a worker. `allow` is as in `Allowed`."""

    def __init__(self, allow: Sequence[str] = ()) -> None:
        self.allowed = Allowed(allow)
        self.encoder = FunctionEncoder()
        # Maps a spec to its lazy pair; raises ProtocolError for a malformed spec.
        self.bound = lru_cache(maxsize=BOUND_MAX)(self._bind)
        self._pair = lru_cache(maxsize=MADE_MAX)(self._make)
        self._definitions: OrderedDict[bytes, bytes] = OrderedDict()
        self._defined_bytes = 0
        self._lock = Lock()

    def define(self, digest: bytes, data: bytes) -> None:
        """Store an exported function. At a limit, drop the least recently used.

        Raises:
            ProtocolError: the data do not match the digest, or are too large.
        """
        try:
            check_definition(digest, data)
        except JdagError as error:
            raise ProtocolError(str(error)) from None
        with self._lock:
            self._defined_bytes -= len(self._definitions.pop(digest, b""))
            while self._definitions and (
                len(self._definitions) >= DEFINED_MAX
                or self._defined_bytes + len(data) > DEFINED_BYTES_MAX
            ):
                _, former = self._definitions.popitem(last=False)
                self._defined_bytes -= len(former)
            self._definitions[digest] = data
            self._defined_bytes += len(data)

    def bind(self, message: Message, sender: Worker, known: Known) -> Message:
        """Return a message from `sender` with callables in place of specs and names.

        `known` contains the workers that refs may name. An unavailable function raises
        an error only when it runs.

        Raises:
            ProtocolError: a spec is malformed, or does not match its message.
        """
        match message:
            case Call():
                return replace(message, function=self._of_call(message))
            case Assign():
                parts = tuple([self._part(part) for part in message.parts])
                return replace(message, parts=parts)
            case Prepare():
                segments = tuple(map(self._segment, message.segments))
                link(segments)
                return replace(message, segments=segments)
            case Start():
                roots = [replace(r, aval=aval_from(r.aval)) for r in message.roots]
                return replace(message, roots=tuple(roots))
            case Attach(hook=hook):
                function, error = self._callable(hook.function, known)
                if error is not None:
                    function = _refused(hook.function, str(error))
                hook = replace(hook, function=function, aval=aval_from(hook.aval))
                return replace(message, hook=hook)
            case Run():
                return self._run(message, known)
            case Return():
                return self._return(message, sender, known)
            case Tell():  # An error replaces data that cannot be decoded.
                data, error = self._read(message.data, known)
                return replace(message, data=error or data)
            case _:
                return message

    def _of_call(self, call: Call) -> Bound:
        bound = self.bound(call.function)
        in_message = (len(call.inputs), call.tracked, call.outputs)
        in_spec = (len(bound.avals), bound.tracked, bound.out_tracked)
        _check_call(bound, in_message, in_spec)
        return bound

    def _part(self, part: Assignment) -> Assignment:
        avals = tuple(map(aval_from, part.avals))
        if part.function is None:
            return replace(part, avals=avals)
        bound = self.bound(part.function)
        in_message = (len(part.inputs), len(part.outputs))
        _check_call(bound, in_message, (len(bound.avals), len(bound.out_avals)))
        return replace(part, function=bound, avals=avals)

    def _segment(self, segment: Segment) -> Segment:
        body = read_segment(segment.function)
        try:
            function = SegmentFunction(
                tuple(map(self.bound, body.pairs)),
                tuple(map(aval_from, body.avals)),
                body.bundles,
                body.nodes,
                body.outputs,
                body.carries,
                body.calls,
                body.exact,
            )
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        in_message = (len(segment.needs), len(segment.makes))
        inputs, outputs = (body.avals, body.bundles), (body.outputs, body.carries)
        in_spec = (sum(map(len, inputs)), sum(map(len, outputs)))
        _check_call(function, in_message, in_spec)
        return replace(segment, function=function)

    def _bind(self, spec: bytes) -> Bound:
        return Bound(spec, self._pair)

    def _make(self, bound: Bound) -> Any:
        build = self._from_definition if bound.body.digest else self._from_names
        built = build(bound)
        for name in _BUILT:
            setattr(bound, name, getattr(built, name))
        if bound.in_devices is None or bound.out_devices is None:
            return built
        return Placed(built, bound.device, bound.in_devices, bound.out_devices)

    def _from_names(self, bound: Bound) -> Pair:
        body = bound.body
        try:
            function = unmarshal(body.function, self.allowed)
            treedef, leaves = structure(body.arguments, self.allowed)
        except JdagError as error:
            raise type(error)(
                f"{body.name} is not available on this worker: {error}"
            ) from None
        template = template_of(treedef, leaves, body.own)
        built = pair(function, template, bound.avals, bound.tracked)
        if (built.out_avals, built.out_tracked) != (bound.out_avals, bound.out_tracked):
            raise JdagError(
                f"{body.name} returns {_listed(built.out_avals)} on this worker, but "
                f"{_listed(bound.out_avals)} on the worker that called it: the module "
                "must be the same on both workers"
            )
        return built

    def _from_definition(self, bound: Bound) -> Pair:
        digest = bound.body.digest
        with self._lock:
            data = self._definitions.get(digest)
            if data is None:
                raise JdagError(
                    f"this worker no longer has the exported function {bound.name}: it "
                    f"keeps at most {DEFINED_MAX} functions and "
                    f"{DEFINED_BYTES_MAX >> 20} MiB; allow the function's module, and "
                    "the function is sent by name"
                )
            self._definitions.move_to_end(digest)
        source = ExportedProgram(Definition(digest, data), bound)
        return Pair(source, bound.avals, bound.tracked)

    def _read(self, data: Any, known: Known) -> tuple[Any, JdagError | None]:
        try:
            return read_tree(data, self.allowed, known, self.bound), None
        except ProtocolError:
            raise
        except JdagError as error:
            return None, error

    def _callable(self, data: Any, known: Known) -> tuple[Any, JdagError | None]:
        value, error = self._read(data, known)
        if error is None and not callable(value):
            error = JdagError(f"{value!r} cannot be called: expected a function")
        return value, error

    def _run(self, run: Run, known: Known) -> Run:
        arguments: Any = ((), {})
        cause = ""
        function, error = self._callable(run.function, known)
        if error is None:
            cause = "an argument of the program is not available on this worker: "
            arguments, error = self._read(run.arguments, known)
        if error is not None:
            function, arguments = _refused(run.function, f"{cause}{error}"), ((), {})
        return replace(run, function=function, arguments=arguments)

    def _return(self, message: Return, sender: Worker, known: Known) -> Return:
        item, view = read_items(message.result)
        if item is None:
            return replace(message, result=None)
        if type(item) is not TreeNode or item.name != REPLY or len(item.parts) != 3:
            raise ProtocolError(
                f"the result of a program is {item!r}: expected an encoded reply"
            )
        reader = Reader(self.allowed, known, view, self.bound)
        seen, kept_refs = reader.each(item.parts[1:], 0)
        result, failure = None, message.failure
        try:
            result = reader.object_of(item.parts[0], 1)
            reader.check_end()
        except ProtocolError:
            raise
        except JdagError as error:
            text = f"the result of a program is not available on this worker: {error}"
            failure = failure or Failure("JdagError", text, sender, message.path)
        return replace(message, result=Reply(result, seen, kept_refs), failure=failure)


def _check_call(
    bound: Any, in_message: tuple[Any, ...], in_spec: tuple[Any, ...]
) -> None:
    if in_message != in_spec:
        raise ProtocolError(
            f"a call of {bound.name} does not match its spec: the call has "
            f"{in_message}, the spec has {in_spec}"
        )


def _listed(avals: Sequence[Aval]) -> str:
    return ", ".join(map(str, avals)) or "nothing"


def _refused(data: Any, why: str) -> Callable[..., Any]:
    """Return a placeholder for an unavailable function. Calling it raises JdagError."""

    def refused(*_: Any, **__: Any) -> Any:
        raise JdagError(why)

    item, _ = read_items(data)
    refused.__module__, _, refused.__qualname__ = _name_in(item).partition(":")
    return refused


def _name_in(data: Any) -> str:
    match data:
        case TreeNode(parts=(Named() | TreeNode() as first, *_)):
            return f"partial({_name_in(first)})"
        case TreeNode(parts=(str(name), *_)):
            return name
        case _:
            name = getattr(data, "name", "builtins:function")
            return name.partition("#")[0]
