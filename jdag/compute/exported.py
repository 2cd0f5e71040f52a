"""Functions as StableHLO: for workers that do not have the module.

Forward and vjp are two functions over flat arrays, made by `jax.export`, for CPU and
CUDA. Residuals are outputs of forward and inputs of the vjp, so that nothing is
computed twice; those that are arguments or outputs are neither returned nor sent again
(`jdag.compute.tracing`). What XLA compiles on the other side is the same program.

What arrives is checked before it is used: its digest, what its header says against the
shapes of the programs, their effects and devices, and that they call nothing outside of
StableHLO but the routines for linear algebra, Fourier transforms and random numbers.
"""

import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import compress
from typing import Annotated, Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jax import export
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from msgspec import Meta, MsgspecError
from msgspec.msgpack import Decoder, encode

from jdag.compute.avals import Aval, aval_from, aval_of
from jdag.compute.jaxprs import has_callback
from jdag.compute.tracing import Traced, TracedResult, as_jax, vjp_of
from jdag.engine.arrays import ArrayType, check_possible
from jdag.engine.functions import is_unjitted
from jdag.engine.messages import Several
from jdag.engine.names import DATA_MAX_BYTES, U32, Mask, Name, Record
from jdag.errors import JdagError, ProtocolError, named_text

Bytes = Annotated[bytes, Meta(max_length=DATA_MAX_BYTES)]

PLATFORMS = ("cpu", "cuda")
EXPORT_MAX_BYTES = 1 << 28

# What JAX lowers linear algebra and random numbers to, and what stands for operations
# of XLA that StableHLO lacks. Above all not `xla_python_cpu_callback` and its kin.
_TARGETS = re.compile(
    r"(lapack|cusolver|cusparse|hipsolver)_[a-z0-9]+_ffi"
    r"|(cu|hip)_(threefry2x32_ffi|lu_pivots_to_permutation)"
    r"|mhlo\.[a-z_]+"
)
_CALL = re.compile(r'custom_call[^\n@]*@("[^"]*"|[\w$.\-]+)')


class Definition(NamedTuple):
    """An exported function: its bytes, and their digest, by which specs name it."""

    digest: bytes
    data: bytes


class ExportHeader(Record):
    """What is known of an exported function beside its two programs.

    `sources` says of each residual where it is: (0, place in the rest), (1, in
    `args_kept`), (2, in `outputs_kept`); `rest` are the types of the rest.
    """

    name: Name
    avals: Several[ArrayType]
    tracked: Mask
    out_avals: Several[ArrayType]
    out_tracked: Mask
    args_kept: Several[U32]
    outputs_kept: Several[U32]
    sources: Several[tuple[U32, U32]]
    rest: Several[ArrayType]
    reaches: Several[Mask]
    forward: Bytes
    backward: Bytes


_decoder: Decoder[ExportHeader] = Decoder(ExportHeader)


def _types(avals: Sequence[Aval]) -> tuple[ArrayType, ...]:
    return tuple([ArrayType(a.shape, str(a.dtype), a.weak) for a in avals])


def exported(pair: Any) -> Definition:
    """Return a pair as StableHLO."""
    if pair.source.unjitted:
        why = "" if is_unjitted(pair.source.fn) else ", since it moves arrays"
        raise JdagError(f"{pair.name} is not jitted{why}, as StableHLO would be")
    found: list[TracedResult] = []
    body = pair.source.forward(pair.tracked, jax.jit)

    def forward(*args: Any) -> tuple[Any, ...]:
        found.append(body(*args))
        return (*found[-1].outputs, *found[-1].rest)

    structs = [aval.struct() for aval in pair.avals]
    program = _exported(pair.name, forward, structs)
    traced, rest = found[-1].traced, [aval_of(one) for one in found[-1].rest]
    backward = b""
    if traced.backward is not None:
        backward = _exported_vjp(pair, traced, rest)
    data = encode(
        ExportHeader(
            pair.name,
            _types(pair.avals),
            pair.tracked,
            _types(traced.out_avals),
            traced.out_tracked,
            traced.args_kept,
            traced.outputs_kept,
            traced.sources,
            _types(rest),
            traced.reaches,
            program,
            backward,
        )
    )
    if len(data) > EXPORT_MAX_BYTES:
        raise JdagError(
            f"{pair.name} is {len(data)} bytes when exported, and at most "
            f"{EXPORT_MAX_BYTES} travel; pass the arrays that it holds as arguments"
        )
    return Definition(sha256(data).digest(), data)


def _exported_vjp(pair: Any, traced: Traced, rest: Sequence[Aval]) -> bytes:
    found = _residuals(traced, pair.avals, traced.out_avals, rest)
    residuals = [aval.struct() for aval in found]
    tracked = compress(traced.out_avals, traced.out_tracked)
    cotangents = [aval.struct() for aval in tracked]
    vjp = vjp_of(traced)

    def backward(*arrays: Any) -> Any:
        return vjp(list(arrays[: len(residuals)]), list(arrays[len(residuals) :]))

    return _exported(pair.name, backward, [*residuals, *cotangents])


def _residuals(
    kept: "Traced | ExportHeader",
    avals: Sequence[Aval],
    out_avals: Sequence[Aval],
    rest: Sequence[Aval],
) -> list[Aval]:
    """Return the abstract values of residuals, in the order of the vjp."""
    homes: tuple[Sequence[Aval], ...] = (
        rest,
        [avals[index] for index in kept.args_kept],
        [out_avals[index] for index in kept.outputs_kept],
    )
    return [homes[home][index] for home, index in kept.sources]


def _exported(name: str, fn: Callable[..., Any], structs: Sequence[Any]) -> bytes:
    """Return a flat function as bytes: for all platforms or, failing that, for ours."""
    compiled = jax.jit(fn)
    jaxpr = compiled.trace(*structs).jaxpr
    if jaxpr.effects or has_callback(jaxpr):
        raise JdagError(
            f"{name} calls back into Python, as jax.pure_callback and jax.debug.print "
            "do, which StableHLO cannot"
        )
    failed: Exception | None = None
    for platforms in (PLATFORMS, (jax.default_backend(),)):
        try:
            made = export.export(compiled, platforms=platforms)(*structs)
            return bytes(made.serialize(vjp_order=0))
        except Exception as error:  # Whatever JAX, or a primitive's rules, raise.
            failed = failed or error
    raise JdagError(
        f"{name} cannot be exported as StableHLO: {_why(failed)}"
    ) from failed


def _why(failed: Exception | None) -> str:
    if isinstance(failed, KeyError) and isinstance(failed.args[0], np.dtype):
        return (
            f"this JAX cannot write arrays of {failed.args[0]} that go in or out; "
            "convert them before and after the call"
        )
    return f"{type(failed).__name__}: {str(failed).partition(chr(10))[0]}"


class Program:
    """What a pair is made from: a function that came as StableHLO.

    Raises:
        JdagError: the bytes are not those of the digest, or no program.
    """

    unjitted = False

    def __init__(self, digest: bytes, data: bytes) -> None:
        check_definition(digest, data)
        try:
            header = _decoder.decode(data)
            for kind in (*header.avals, *header.out_avals, *header.rest):
                check_possible(kind)
        except (MsgspecError, ValueError, RecursionError, ProtocolError) as error:
            raise JdagError(f"an exported function cannot be read: {error}") from error
        self.name = header.name
        self.digest = digest
        self.avals = tuple(map(aval_from, header.avals))
        self.out_avals = tuple(map(aval_from, header.out_avals))
        self.rest = tuple(map(aval_from, header.rest))
        self.tracked, self.out_tracked = header.tracked, header.out_tracked
        self._header = header
        self._check()
        tracked = [*compress(self.avals, header.tracked)]
        self._forward = _program(
            header.name, header.forward, self.avals, (*self.out_avals, *self.rest)
        )
        self._backward: Any = None
        if any(header.out_tracked):
            residuals = _residuals(header, self.avals, self.out_avals, self.rest)
            taken = [*residuals, *compress(self.out_avals, header.out_tracked)]
            self._backward = _program(header.name, header.backward, taken, tracked)

    def argument(self, position: int) -> str:
        """What errors call an argument."""
        return f"array {position} of the arguments"

    def check(self, *, dual: bool) -> None:
        """Raise JdagError where it would have to be differentiated twice."""
        if dual:
            module = self.name.partition(":")[0].rpartition("(")[2]
            raise JdagError(
                f"{self.name} has come to this worker as StableHLO, which jdag.hvp "
                "cannot differentiate again; a function that goes by name it can: "
                f"start the worker with allow=[{module!r}] where it has that module"
            )

    def forward(
        self, tracked: tuple[bool, ...], compiled: Callable[..., Any]
    ) -> Callable[..., TracedResult]:
        """Return forward as a function of flat arguments; `compiled` makes its vjp."""
        assert tracked == self.tracked, (self.name, tracked)
        call, count = self._forward.call, len(self.out_avals)

        def body(*args: Any) -> TracedResult:
            found = call(*map(as_jax, args))
            traced = self._traced(compiled)
            return TracedResult(traced, tuple(found[:count]), tuple(found[count:]))

        body.__name__ = self.name.rpartition(":")[2]
        body.__qualname__ = body.__name__
        return body

    def _traced(self, compiled: Callable[..., Any]) -> Traced:
        header = self._header
        tree = jtu.tree_structure((0,) * len(self.out_avals))
        traced = Traced(self.name, tree, self.out_avals, self.out_tracked)
        if self._backward is None:
            return traced
        traced.args_kept, traced.outputs_kept = header.args_kept, header.outputs_kept
        traced.sources, traced.reaches = header.sources, header.reaches
        traced.nbytes = sum(aval.nbytes for aval in self.rest)
        call = self._backward.call

        def vjp(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            return tuple(call(*map(as_jax, residuals), *cotangents))

        traced.compile(vjp, compiled)
        return traced

    def _check(self) -> None:
        """Raise JdagError where the parts of the header contradict each other."""
        header = self._header
        sizes = (len(header.rest), len(header.args_kept), len(header.outputs_kept))
        inputs, outputs = sum(header.tracked), sum(header.out_tracked)
        facts = {
            "each argument is tracked or not": len(header.tracked) == len(self.avals),
            "each output is": len(header.out_tracked) == len(self.out_avals),
            "tracked arguments are inexact": all(
                aval.inexact for aval in compress(self.avals, header.tracked)
            ),
            "arguments kept are there": all(
                index < len(self.avals) for index in header.args_kept
            ),
            "outputs kept are there": all(
                index < len(self.out_avals) for index in header.outputs_kept
            ),
            "residuals are there": all(
                home < 3 and index < sizes[home] for home, index in header.sources
            ),
            "what reaches what is known": not outputs
            or [len(row) for row in header.reaches] == [outputs] * inputs,
        }
        for fact, holds in facts.items():
            if not holds:
                raise JdagError(f"{self.name}, as it was exported, breaks: {fact}")


def check_definition(digest: bytes, data: bytes) -> None:
    """Raise JdagError unless these are the bytes of the digest, and not too many."""
    if len(data) > EXPORT_MAX_BYTES:
        raise JdagError(
            f"an exported function of {len(data)} bytes: at most {EXPORT_MAX_BYTES} "
            "are taken"
        )
    if sha256(data).digest() != digest:
        raise JdagError("the bytes of an exported function are not those of its digest")


def _program(
    name: str, data: bytes, taken: Sequence[Aval], given: Sequence[Aval]
) -> Any:
    """Return a program that takes and gives these, or raise JdagError."""
    try:
        program = export.deserialize(bytearray(data))
        found = [(a.shape, a.dtype) for a in (*program.in_avals, *program.out_avals)]
    except Exception as error:  # Whatever its reader makes of bytes that are none.
        raise JdagError(
            f"the program of {name} cannot be read: {named_text(error)}"
        ) from error
    wanted = [(aval.shape, aval.dtype) for aval in (*taken, *given)]
    if found != wanted or len(program.in_avals) != len(taken):
        raise JdagError(f"the program of {name} is of {found}, and not of {wanted}")
    backend = jax.default_backend()
    here = {"gpu": "cuda"}.get(backend, backend)
    if here not in program.platforms:
        raise JdagError(
            f"{name} was exported for {', '.join(program.platforms)}, and this worker "
            f"computes on {here}; allow its module here, so that it goes by name"
        )
    effects = (*program.ordered_effects, *program.unordered_effects)
    if program.nr_devices != 1 or effects or program.disabled_safety_checks:
        raise JdagError(
            f"the program of {name} is for {program.nr_devices} devices, with effects "
            f"{effects} and without checks {program.disabled_safety_checks}: it has to "
            "be for one, without effects, with all checks"
        )
    _check_calls(name, program.mlir_module_serialized)
    return program


def _check_calls(name: str, module: bytes) -> None:
    """Raise JdagError where a module calls what is not known to be harmless."""
    text: Any
    try:
        context = mlir.make_ir_context()
        with context:
            found = stablehlo.deserialize_portable_artifact(context, module)
            text = found.operation.get_asm(large_elements_limit=8)
    except Exception as error:  # Whatever its reader makes of bytes that are none.
        raise JdagError(
            f"the program of {name} cannot be read: {named_text(error)}"
        ) from error
    targets = _CALL.findall(text)
    others = [target for target in targets if not _TARGETS.fullmatch(target)]
    if others or len(targets) != text.count("custom_call"):
        raise JdagError(
            f"the program of {name} calls {', '.join(others) or 'what has no name'}: "
            "only routines for linear algebra, Fourier transforms and random numbers "
            "may be called"
        )
