"""Decoding of functions: names and StableHLO in messages become pairs and callables.

Inputs: `bind(message, sender)` for each message that arrives; `define(digest, data)`
    for each exported function, before the first message that needs it.
Outputs: the message as engines take it. The function of a call is a pair that is made
    when its forward first runs; nothing is imported before.
Invariants: a function that is not available fails only the call, program or hook that
    needs it: an object in its place raises when it is run.

How functions are encoded is in `jdag.processes.functions.encoder`.
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

# Executables take memory maps, which are limited: a process dies near 10,900 of them.
# So few pairs, of two executables each, are held beyond those that compute keeps; the
# others are rebuilt when needed.
BOUND_MAX = PAIRS_MAX
MADE_MAX = 512
DEFINED_MAX, DEFINED_BYTES_MAX = 4096, 1 << 30
# What a pair has when it is made; see `jdag.compute.pairs.Pair`.
_OF_PAIR = ("out_tree", "residual_bytes", "args_kept", "outputs_kept", "reaches")
REPLY = name_of(Reply)
BOUND = NAMING | {Start, Return, Tell}  # The messages that `bind` changes.


class Bound:
    """A pair decoded from its spec, made when first needed.

    It is used as a `jdag.compute.pairs.Pair`. Shapes, devices and tracking are known
    before; reading any other attribute makes the pair, and may raise.
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
        self.may_raise = True  # So it is assumed before the pair is made.
        self._make = make
        self._lock = Lock()

    @property
    def pair(self) -> Any:
        """The pair itself, made by one thread.

        Raises:
            JdagError: the function is not allowed here, or has other code here.
            Exception: whatever the function raises while it is traced.
        """
        with self._lock:
            return self._make(self)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the pair, which is made if necessary."""
        if name not in _OF_PAIR:
            raise AttributeError(name)
        return getattr(self.pair, name)

    # Methods, so that looking these two up does not make the pair.
    def forward(self, args: Sequence[Any]) -> Any:
        """Run the function; see `Pair.forward`."""
        return self.pair.forward(args)

    def vjp(self, residuals: Any, cotangents: Sequence[Sequence[Any]]) -> Any:
        """Carry cotangents back; see `Pair.vjp`."""
        return self.pair.vjp(residuals, cotangents)

    def __repr__(self) -> str:
        return f"Bound({self.name})"


class FunctionDecoder:
    """Decodes the functions that arrive at a worker; used by several threads.

    Args:
        allow: modules whose functions may be named, beside those of JAX, optax and
            jdag's ready programs; modules below one are allowed with it.

    Raises:
        JdagError: one is not the name of a module, or there is none of this name.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        self.allowed = Allowed(allow)
        self.encoder = FunctionEncoder()
        # The pair of a spec; ProtocolError where the bytes are no spec.
        self.bound = lru_cache(maxsize=BOUND_MAX)(self._bind)
        self._pair = lru_cache(maxsize=MADE_MAX)(self._make)
        self._definitions: OrderedDict[bytes, bytes] = OrderedDict()
        self._defined_bytes = 0
        self._lock = Lock()

    def define(self, digest: bytes, data: bytes) -> None:
        """Take an exported function.

        Beyond the bounds the least recently used one is dropped, never the newest.

        Raises:
            ProtocolError: the bytes are not those of the digest, or too many.
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
        """Return a decoded message of `sender` as engines take it.

        `known` are the workers that refs may name. A call imports nothing. A function
        that is unavailable fails when it is run.

        Raises:
            ProtocolError: a spec is malformed, or disagrees with the message.
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
            case Tell():  # Its reader sees an error in its place.
                data, error = self._read(message.data, known)
                return replace(message, data=error or data)
            case _:
                return message

    def _of_call(self, call: Call) -> Bound:
        bound = self.bound(call.function)
        said = (len(call.inputs), call.tracked, call.outputs)
        _check_call(bound, said, (len(bound.avals), bound.tracked, bound.out_tracked))
        return bound

    def _part(self, part: Assignment) -> Assignment:
        avals = tuple(map(aval_from, part.avals))
        if part.function is None:
            return replace(part, avals=avals)
        bound = self.bound(part.function)
        said = (len(part.inputs), len(part.outputs))
        _check_call(bound, said, (len(bound.avals), len(bound.out_avals)))
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
        said = (len(segment.needs), len(segment.makes))
        taken, made = (body.avals, body.bundles), (body.outputs, body.carries)
        _check_call(function, said, (sum(map(len, taken)), sum(map(len, made))))
        return replace(segment, function=function)

    def _bind(self, spec: bytes) -> Bound:
        return Bound(spec, self._pair)

    def _make(self, bound: Bound) -> Any:
        by_name = not bound.body.digest
        made = self._from_names(bound) if by_name else self._from_definition(bound)
        bound.may_raise = made.may_raise
        if bound.in_devices is None or bound.out_devices is None:
            return made
        return Placed(made, bound.device, bound.in_devices, bound.out_devices)

    def _from_names(self, bound: Bound) -> Pair:
        body = bound.body
        try:
            function = unmarshal(body.function, self.allowed)
            treedef, leaves = structure(body.arguments, self.allowed)
        except JdagError as error:
            raise type(error)(f"{body.name} is not available here: {error}") from None
        template = template_of(treedef, leaves, body.own)
        made = pair(function, template, bound.avals, bound.tracked)
        if (made.out_avals, made.out_tracked) != (bound.out_avals, bound.out_tracked):
            raise JdagError(
                f"{body.name} gives {_listed(made.out_avals)} here, and "
                f"{_listed(bound.out_avals)} where it was called: the module has to be "
                "the same on both sides"
            )
        return made

    def _from_definition(self, bound: Bound) -> Pair:
        digest = bound.body.digest
        with self._lock:
            data = self._definitions.get(digest)
            if data is None:
                raise JdagError(
                    f"{bound.name} was exported, and its definition is not here: at "
                    f"most {DEFINED_MAX} are kept, and {DEFINED_BYTES_MAX >> 20} MiB; "
                    "allow its module, so that it goes by name"
                )
            self._definitions.move_to_end(digest)
        source = ExportedProgram(Definition(digest, data), bound)
        return Pair(source, bound.avals, bound.tracked)

    def _read(self, data: Any, known: Known) -> tuple[Any, JdagError | None]:
        """Return nested data, or why they are not available here."""
        try:
            return read_tree(data, self.allowed, known, self.bound), None
        except ProtocolError:
            raise
        except JdagError as error:
            return None, error

    def _callable(self, data: Any, known: Known) -> tuple[Any, JdagError | None]:
        found, error = self._read(data, known)
        if error is None and not callable(found):
            error = JdagError(f"{found!r} is no function")
        return found, error

    def _run(self, run: Run, known: Known) -> Run:
        arguments: Any = ((), {})
        what = ""
        function, error = self._callable(run.function, known)
        if error is None:
            what = "an argument of it is not available here: "
            arguments, error = self._read(run.arguments, known)
        if error is not None:
            function, arguments = _refused(run.function, f"{what}{error}"), ((), {})
        return replace(run, function=function, arguments=arguments)

    def _return(self, message: Return, sender: Worker, known: Known) -> Return:
        item, view = read_items(message.result)
        if item is None:
            return replace(message, result=None)
        if type(item) is not TreeNode or item.name != REPLY or len(item.parts) != 3:
            raise ProtocolError(f"a program returned {item!r}, which is no reply")
        reader = Reader(self.allowed, known, view, self.bound)
        seen, kept = reader.each(item.parts[1:], 0)
        result, failure = None, message.failure
        try:
            result = reader.made(item.parts[0], 1)
            reader.check_end()
        except ProtocolError:
            raise
        except JdagError as error:
            said = f"the result of a program is not available here: {error}"
            failure = failure or Failure("JdagError", said, sender, message.path)
        return replace(message, result=Reply(result, seen, kept), failure=failure)


def _check_call(bound: Any, said: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    if said != wanted:
        name = bound.name
        raise ProtocolError(f"a call of {name} says {said}, and its spec {wanted}")


def _listed(avals: Sequence[Aval]) -> str:
    return ", ".join(map(str, avals)) or "nothing"


def _refused(data: Any, why: str) -> Callable[..., Any]:
    """Stand in for a program or hook that is not available: raise why when called."""

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
