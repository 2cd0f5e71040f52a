"""Functions as StableHLO: the same bits as by name, and nothing unchecked."""

import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from msgspec import msgpack
from msgspec.structs import replace

from jdag.compute import exported as module
from jdag.compute.duals import Dual
from jdag.compute.exported import (
    Definition,
    ExportedProgram,
    ExportHeader,
    check_definition,
    exported,
)
from jdag.compute.moves import moved_arrays
from jdag.compute.pairs import Pair
from jdag.compute.pytrees import split
from jdag.engine.arrays import DTYPES
from jdag.engine.functions import unjitted
from jdag.errors import JdagError
from jdag.wire.encoding import encoded
from jdag.wire.specs import exported_spec, spec_of
from tests.tools.compute_cases import array, pair_of
from tests.tools.error_texts import fails_with
from tests.tools.export_cases import CASES, layer


def made(fn: Any, *args: Any) -> tuple[Pair, list[Any]]:
    constants = split(args, {}, lambda _: False).constants
    return pair_of(fn, *args), [value for _, value in constants]


def travelled(here: Pair) -> Pair:
    return Pair(ExportedProgram(exported(here), here), here.avals, here.tracked)


def bits(value: Any) -> bytes:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return bytes(str((value.dtype, value.shape)), "ascii") + np.asarray(value).tobytes()


def cotangents_for(here: Pair) -> Callable[[int], list[list[Any]]]:
    outs = [a for a, t in zip(here.out_avals, here.out_tracked, strict=True) if t]
    return lambda count: [
        [
            jnp.asarray(array(*aval.shape) / (n + 3), aval.dtype)
            for n in range(max(count - place, 0))
        ]
        for place, aval in enumerate(outs)
    ]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.second] * (number % 2))
        for number, case in enumerate(CASES)
    ],
)
def test_an_exported_function_gives_the_very_bits_of_the_named_one(case: str) -> None:
    here, values = made(*CASES[case])
    there = travelled(here)
    assert (there.out_avals, there.out_tracked) == (here.out_avals, here.out_tracked)
    assert (there.args_kept, there.outputs_kept) == (here.args_kept, here.outputs_kept)
    assert there.reaches == here.reaches
    assert there.residual_bytes == here.residual_bytes
    (one, one_kept), (two, two_kept) = here.forward(values), there.forward(values)
    assert list(map(bits, one)) == list(map(bits, two))
    assert (one_kept is None) == (two_kept is None)
    if one_kept is None or two_kept is None:
        return
    assert one_kept.nbytes == two_kept.nbytes
    assert len(one_kept.keeps) == len(two_kept.keeps)
    cotangents = cotangents_for(here)
    for count in (1, 3, 8):
        gradients = here.vjp(one_kept, cotangents(count))
        again = there.vjp(two_kept, cotangents(count))
        assert list(map(bits, gradients)) == list(map(bits, again))
        for gradient in again:
            assert not jax.typeof(gradient).weak_type


def test_what_forward_keeps_of_arguments_and_outputs_is_not_made_twice() -> None:
    here, values = made(*CASES["layer"])
    there = travelled(here)
    outputs, residuals = there.forward(values)
    assert residuals is not None and there.args_kept
    held = [*values, *outputs]
    shared = [one for one in residuals.keeps if any(one is other for other in held)]
    assert len(shared) == len(there.args_kept) + len(there.outputs_kept)


def test_python_numbers_are_taken_where_weak_ones_were_exported() -> None:
    here, values = made(*CASES["numbers"])
    assert [aval.weak for aval in here.avals] == [False, True, True]
    there = travelled(here)
    one, two = [pair.forward([values[0], 4.5, 2])[0] for pair in (here, there)]
    assert list(map(bits, one)) == list(map(bits, two))


def test_an_exported_pair_has_a_spec_that_names_its_digest() -> None:
    here, _ = made(*CASES["layer"])
    definition = exported(here)
    there = Pair(ExportedProgram(definition, here), here.avals, here.tracked)
    assert definition.digest in spec_of(there)
    assert len(spec_of(there)) < 300


CHILD = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_enable_x64", {x64})
from jdag.processes.functions.decoder import FunctionDecoder
folder = Path(sys.argv[1])
functions = FunctionDecoder()
functions.define((folder / "digest").read_bytes(), (folder / "data").read_bytes())
there = functions.bound((folder / "spec").read_bytes())
values = [np.load(folder / f"arg{{n}}.npy") for n in range(len(there.avals))]
outputs, residuals = there.forward(values)
ones = [[np.load(folder / f"cot{{n}}.npy")] * 3 for n in range(len(outputs))]
for n, value in enumerate([*outputs, *there.vjp(residuals, ones)]):
    np.save(folder / f"out{{n}}.npy", value)
assert not [name for name in sys.modules if name.startswith("tests")]
print("ran")
"""


@pytest.mark.parametrize(
    "case", ["scan", pytest.param("softmax", marks=pytest.mark.second)]
)
def test_a_process_without_the_module_computes_the_same_bits(
    case: str, tmp_path: Path
) -> None:
    here, values = made(*CASES[case])
    definition = exported(here)
    (tmp_path / "data").write_bytes(definition.data)
    (tmp_path / "digest").write_bytes(definition.digest)
    (tmp_path / "spec").write_bytes(exported_spec(here, definition.digest))
    outputs, residuals = here.forward(values)
    cotangents = [array(*output.shape) / 3 for output in outputs]
    for n, value in enumerate(values):
        np.save(tmp_path / f"arg{n}.npy", np.asarray(value))
    for n, value in enumerate(cotangents):
        np.save(tmp_path / f"cot{n}.npy", np.asarray(value))
    code = CHILD.format(x64=jax.config.read("jax_enable_x64"))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "ran\n", done.stderr
    assert residuals is not None
    gradients = here.vjp(residuals, [[cotangent] * 3 for cotangent in cotangents])
    for n, value in enumerate([*outputs, *gradients]):
        assert bits(np.load(tmp_path / f"out{n}.npy")) == bits(value)


def called_back(x: Any) -> Any:
    return jax.pure_callback(np.sin, x, jax.lax.stop_gradient(x))


def printing(x: Any) -> Any:
    jax.debug.print("{}", x)
    return x * 2


@jax.custom_vjp
def late(x: Any) -> Any:
    return x


late.defvjp(lambda x: (x, None), lambda _, g: (called_back(g),))


def test_what_calls_python_cannot_be_exported() -> None:
    for fn in (called_back, printing):
        with fails_with(JdagError, "compute.calls_back_into_python_as"):
            exported(made(fn, array(3))[0])
    plain = unjitted(shapes=lambda x: x)(lambda x: x)
    with fails_with(JdagError, "compute.is_not_jitted"):
        exported(made(plain, array(3))[0])
    with fails_with(JdagError, "compute.late_calls_back_into_python"):
        exported(made(late, array(3))[0])
    moving = made(lambda x: moved_arrays([x], jax.devices()[:1])[0], array(3))[0]
    with fails_with(JdagError, "compute.is_not_jitted_since_it_moves"):
        exported(moving)


def test_an_export_leaks_no_tracer() -> None:
    with jax.checking_leaks():
        assert exported(made(layer, array(3, 3), array(3), array(3))[0]).data


FEW_BITS = [name for name in DTYPES if name.startswith(("int4", "uint4", "float4"))]
FEW_BITS += [name for name in DTYPES if name.startswith("float8")]


def as_it_is_and_wide(x: Any) -> Any:
    return x, x.astype(jnp.float32)


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_arrays_of_few_bits_go_in_and_out_of_an_exported_function(dtype: str) -> None:
    here, values = made(as_it_is_and_wide, jnp.asarray([2.0, 1.0, 0.5], dtype))
    one, two = here.forward(values)[0], travelled(here).forward(values)[0]
    assert [str(out.dtype) for out in two] == [dtype, "float32"]
    assert list(map(bits, one)) == list(map(bits, two))


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_of_arrays_that_jax_cannot_write_the_dtype_is_named(dtype: str) -> None:
    here, _ = made(as_it_is_and_wide, jnp.asarray([1, 0], dtype))
    text = f"this JAX version cannot export inputs or outputs of dtype {dtype}; convert"
    with pytest.raises(JdagError, match=text):
        exported(here)


def test_what_holds_too_much_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPORT_MAX_BYTES", 100)
    with fails_with(JdagError, "compute.at_most_100_are_allowed"):
        exported(made(*CASES["closure"])[0])
    with fails_with(JdagError, "compute.has_101_bytes_at_most"):
        check_definition(bytes(32), bytes(101))


def changed(definition: Definition, **fields: Any) -> Definition:
    data = encoded(replace(header_of(definition), **fields))
    return Definition(sha256(data).digest(), data)


def header_of(definition: Definition) -> ExportHeader:
    return msgpack.decode(definition.data, type=ExportHeader)


def test_other_bytes_than_those_of_the_digest_are_refused() -> None:
    here = made(*CASES["layer"])[0]
    digest, data = exported(here)
    check_definition(digest, data)
    with fails_with(JdagError, "compute.bytes_do_not_match_digest"):
        check_definition(digest, data[:-1])
    with fails_with(JdagError, "compute.bytes_do_not_match_digest"):
        check_definition(bytes(32), data)
    with fails_with(JdagError, "compute.cannot_be_read"):
        ExportedProgram(Definition(digest, b"x"), here)
    with fails_with(JdagError, "compute.cannot_be_read_trailing_characters"):
        ExportedProgram(Definition(digest, data + b"x"), here)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"args_kept": (7,)}, "cannot be read"),
        ({"outputs_kept": (1,)}, "cannot be read"),
        ({"sources": ((3, 0),)}, "cannot be read"),
        ({"sources": ((0, 99),)}, "cannot be read"),
        ({"forward": b""}, "cannot be read"),
        ({"forward": b"\0" * 64}, "cannot be read"),
        ({"backward": b"noise"}, "cannot be read"),
        ({"rest": ()}, "cannot be read|is of"),
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_refused(
    fields: dict[str, Any], said: str
) -> None:
    here = made(*CASES["layer"])[0]
    with pytest.raises(JdagError, match=said):
        ExportedProgram(changed(exported(here), **fields), here)


def test_a_program_of_other_shapes_is_refused() -> None:
    here = made(*CASES["layer"])[0]
    one = exported(here)
    other = header_of(exported(made(layer, array(5, 3), array(5), array(3))[0]))
    with fails_with(JdagError, "compute.has_other_types"):
        ExportedProgram(changed(one, forward=other.forward), here)
    with fails_with(JdagError, "compute.has_other_types"):
        ExportedProgram(changed(one, backward=other.backward), here)


def with_forward(fn: Any, **options: Any) -> tuple[Definition, Pair]:
    here = made(CASES["identity"][0], array(3))[0]
    structs = [aval.struct() for aval in here.avals]
    program = export.export(jax.jit(fn), **options)(*structs)
    return changed(exported(here), forward=bytes(program.serialize())), here


@pytest.mark.parametrize("target", ["xla_ffi_python_cpu_callback", "evil"])
def test_a_program_that_calls_what_is_not_harmless_is_refused(target: str) -> None:
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((3,), "f8"))
    unchecked = export.DisabledSafetyCheck.custom_call(target)
    harmful = with_forward(lambda x: (call(x),), disabled_checks=[unchecked])
    with pytest.raises(JdagError, match=f"calls .*{target}.*: it may call only"):
        ExportedProgram(*harmful)


def test_a_program_for_another_platform_says_which_and_what_to_do() -> None:
    other = with_forward(lambda x: (x,), platforms=["cuda"])
    if jax.default_backend() == "cpu":
        with fails_with(JdagError, "compute.exported_for_cuda_and_this"):
            ExportedProgram(*other)


def test_an_exported_function_has_no_second_derivative_and_says_so() -> None:
    here, values = made(*CASES["layer"])
    there = travelled(here)
    duals = [Dual(value, jnp.ones_like(value)) for value in values]
    said = r"layer was sent .* as StableHLO.*allow=\['tests\.tools\.export_cases'\]"
    with pytest.raises(JdagError, match=said):
        there.forward(duals)
    _, residuals = there.forward(values)
    assert residuals is not None
    cotangent = jnp.ones(4)
    with pytest.raises(JdagError, match=said):
        there.vjp(residuals, [[Dual(cotangent, cotangent)]])
