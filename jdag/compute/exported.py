"""Functions as StableHLO, for workers that do not have the module.

Forward and vjp are two functions over flat arrays, exported by `jax.export` for CPU and
CUDA. Residuals are outputs of forward and inputs of the vjp, so nothing is computed
twice. Residuals that are arguments or outputs are neither returned nor sent again
(`jdag.compute.tracing`). XLA compiles the same program on the receiver.

A received export is checked before use: its digest, the types of its programs, and that
they call nothing outside of StableHLO except routines for linear algebra, Fourier
transforms and random numbers.
"""

import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import compress
from typing import Annotated, Any, NamedTuple, NoReturn

import jax
import jax.tree_util as jtu
import numpy as np
from jax import export
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from msgspec import Meta, MsgspecError
from msgspec.msgpack import Decoder, encode

from jdag.compute.avals import Aval, aval_from, aval_of
from jdag.compute.jaxprs import unportable
from jdag.compute.tracing import Traced, TracedResult, as_jax, vjp_of
from jdag.engine.arrays import ArrayType
from jdag.engine.functions import is_unjitted
from jdag.engine.messages import Several
from jdag.engine.names import DATA_MAX_BYTES, U32, Mask, Record
from jdag.errors import JdagError, named_text

_Bytes = Annotated[bytes, Meta(max_length=DATA_MAX_BYTES)]

PLATFORMS = ("cpu", "cuda")
EXPORT_MAX_BYTES = 1 << 28

# JAX's lowerings of linear algebra and random numbers, and XLA operations that
# StableHLO lacks. Callbacks such as `xla_python_cpu_callback` must stay excluded.
_TARGETS = re.compile(
    r"(lapack|cusolver|cusparse|hipsolver)_[a-z0-9]+_ffi"
    r"|(cu|hip)_(threefry2x32_ffi|lu_pivots_to_permutation)"
    r"|mhlo\.[a-z_]+"
)
_CALL = re.compile(r'custom_call[^\n@]*@("[^"]*"|[\w$.\-]+)')


class Definition(NamedTuple):
    digest: bytes
    data: bytes


class ExportHeader(Record):
    """An exported function: its two programs, and data that its spec lacks.

    `sources` locates each residual: (0, index in `rest`), (1, index in `args_kept`) or
    (2, index in `outputs_kept`); `rest` has the types of the remaining residuals.
    """

    args_kept: Several[U32]
    outputs_kept: Several[U32]
    sources: Several[tuple[U32, U32]]
    rest: Several[ArrayType]
    reaches: Several[Mask]
    forward: _Bytes
    backward: _Bytes


_decoder: Decoder[ExportHeader] = Decoder(ExportHeader)


def exported(pair: Any) -> Definition:
    if pair.source.unjitted:
        reason = "" if is_unjitted(pair.source.fn) else ", since it moves arrays"
        raise JdagError(
            f"{pair.name} is not jitted{reason}, so it cannot be sent as StableHLO"
        )
    traces: list[tuple[Traced, list[Aval]]] = []  # Tracers would leak.
    body = pair.source.forward(pair.tracked, jax.jit)

    def forward(*args: Any) -> tuple[Any, ...]:
        result: TracedResult = body(*args)
        traces.append((result.traced, [aval_of(array) for array in result.rest]))
        return (*result.outputs, *result.rest)

    program = _exported(pair.name, forward, [aval.struct() for aval in pair.avals])
    traced, rest = traces[-1]
    data = encode(
        ExportHeader(
            traced.args_kept,
            traced.outputs_kept,
            traced.sources,
            tuple([ArrayType(a.shape, str(a.dtype), a.weak) for a in rest]),
            traced.reaches,
            program,
            b"" if traced.backward is None else _exported_vjp(pair, traced, rest),
        )
    )
    if len(data) > EXPORT_MAX_BYTES:
        raise JdagError(
            f"{pair.name} has {len(data)} bytes when exported; at most "
            f"{EXPORT_MAX_BYTES} are allowed. Pass its arrays as arguments"
        )
    return Definition(sha256(data).digest(), data)


def _exported_vjp(pair: Any, traced: Traced, rest: Sequence[Aval]) -> bytes:
    avals = _vjp_types(traced, pair, rest)
    count, vjp = len(traced.sources), vjp_of(traced)

    def backward(*arrays: Any) -> Any:
        return vjp(list(arrays[:count]), list(arrays[count:]))

    return _exported(pair.name, backward, [aval.struct() for aval in avals])


def _vjp_types(
    sources: "Traced | ExportHeader", pair: Any, rest: Sequence[Aval]
) -> list[Aval]:
    homes: tuple[Sequence[Aval], ...] = (
        rest,
        [pair.avals[index] for index in sources.args_kept],
        [pair.out_avals[index] for index in sources.outputs_kept],
    )
    residuals = [homes[home][index] for home, index in sources.sources]
    return [*residuals, *compress(pair.out_avals, pair.out_tracked)]


def _exported(name: str, fn: Callable[..., Any], structs: Sequence[Any]) -> bytes:
    """Serialize a flat function for all platforms or, if that fails, for this one."""
    compiled = jax.jit(fn)
    jaxpr = compiled.trace(*structs).jaxpr
    if reason := unportable(jaxpr):
        raise JdagError(f"{name} {reason}; StableHLO does not support this")
    failed: Exception | None = None
    for platforms in (PLATFORMS, (jax.default_backend(),)):
        try:
            program = export.export(compiled, platforms=platforms)(*structs)
            return bytes(program.serialize(vjp_order=0))
        except Exception as error:  # JAX, or a primitive's rules, may raise any error.
            failed = failed or error
    raise JdagError(
        f"{name} cannot be exported as StableHLO: {_reason(failed)}"
    ) from failed


def _reason(failed: Exception | None) -> str:
    if isinstance(failed, KeyError) and isinstance(failed.args[0], np.dtype):
        return (
            "this JAX version cannot export inputs or outputs of dtype "
            f"{failed.args[0]}; convert them before and after the call"
        )
    return f"{type(failed).__name__}: {str(failed).partition(chr(10))[0]}"


class ExportedProgram:
    """The source of a pair: a function received as StableHLO, with a checked digest.

    `spec` provides name, avals, tracked, out_avals and out_tracked. Raises JdagError if
    the bytes are not an exported function.
    """

    unjitted = False

    def __init__(self, definition: Definition, spec: Any) -> None:
        self.definition, (self.digest, data) = definition, definition
        self.name, self._spec = spec.name, spec
        try:
            self._header = header = _decoder.decode(data)
            self._rest = list(map(aval_from, header.rest))
            vjp_types = _vjp_types(header, spec, self._rest)
        except (MsgspecError, ValueError, LookupError) as error:
            raise JdagError(f"an exported function cannot be read: {error}") from error
        results = [*spec.out_avals, *self._rest]
        self._forward = _program(self.name, header.forward, spec.avals, results)
        self._backward: Any = None
        if any(spec.out_tracked):
            results = [*compress(spec.avals, spec.tracked)]
            self._backward = _program(self.name, header.backward, vjp_types, results)

    def argument(self, position: int) -> str:
        return f"array {position} of the arguments"

    def refuse_dual(self) -> NoReturn:
        module = self.name.partition(":")[0].rpartition("(")[2]
        is_users = module.partition(".")[0] not in ("__main__", "jdag")
        allowed = repr(module) if is_users else "..."
        raise JdagError(
            f"{self.name} was sent to this worker as StableHLO, which jdag.hvp cannot "
            "differentiate again. It can differentiate functions that are sent by "
            f"name: functions at the top level of modules in allow=[{allowed}], or of "
            "a script with a __main__ guard"
        )

    def forward(
        self, tracked: tuple[bool, ...], compiled: Callable[..., Any]
    ) -> Callable[..., TracedResult]:
        call, count = self._forward.call, len(self._spec.out_avals)

        def body(*args: Any) -> TracedResult:
            results = call(*map(as_jax, args))
            traced = self._traced(compiled)
            return TracedResult(traced, tuple(results[:count]), tuple(results[count:]))

        body.__name__ = body.__qualname__ = self.name.rpartition(":")[2]
        return body

    def _traced(self, compiled: Callable[..., Any]) -> Traced:
        header, out_avals = self._header, self._spec.out_avals
        traced = Traced(
            self.name,
            jtu.tree_structure((0,) * len(out_avals)),
            out_avals,
            self._spec.out_tracked,
            header.args_kept,
            header.outputs_kept,
            header.sources,
            header.reaches,
            sum(aval.nbytes for aval in self._rest),
        )

        def vjp(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            return tuple(self._backward.call(*map(as_jax, residuals), *cotangents))

        if self._backward is not None:
            traced.compile(vjp, compiled)
        return traced


def check_definition(digest: bytes, data: bytes) -> None:
    if len(data) > EXPORT_MAX_BYTES:
        raise JdagError(
            f"an exported function has {len(data)} bytes; at most {EXPORT_MAX_BYTES} "
            "are allowed"
        )
    if sha256(data).digest() != digest:
        raise JdagError("the bytes of an exported function do not match its digest")


def _program(
    name: str, data: bytes, inputs: Sequence[Aval], outputs: Sequence[Aval]
) -> Any:
    try:
        program = export.deserialize(bytearray(data))
        avals = *program.in_avals, *program.out_avals
        actual = [(aval.shape, aval.dtype) for aval in avals]
        with mlir.make_ir_context() as context:
            module = stablehlo.deserialize_portable_artifact(
                context, program.mlir_module_serialized
            )
            text: Any = module.operation.get_asm(large_elements_limit=8)
    except Exception as error:  # Malformed bytes may raise any error.
        raise JdagError(
            f"the program of {name} cannot be read: {named_text(error)}"
        ) from error
    expected = [(aval.shape, aval.dtype) for aval in (*inputs, *outputs)]
    if actual != expected or len(program.in_avals) != len(inputs):
        raise JdagError(
            f"the program of {name} has the types {actual}; expected {expected}"
        )
    backend = jax.default_backend()
    platform = {"gpu": "cuda"}.get(backend, backend)
    if platform not in program.platforms:
        raise JdagError(
            f"{name} was exported for {', '.join(program.platforms)}, and this worker "
            f"computes on {platform}; allow its module here to send it by name"
        )
    # JAX lowers effects to calls, so a program without calls has no effects.
    targets = _CALL.findall(text)
    refused = [target for target in targets if not _TARGETS.fullmatch(target)]
    if refused or len(targets) != text.count("custom_call"):
        raise JdagError(
            f"the program of {name} calls {', '.join(refused) or 'an unnamed target'}: "
            "it may call only routines for linear algebra, Fourier transforms and "
            "random numbers"
        )
    return program
