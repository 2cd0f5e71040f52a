"""A machine carries out one worker's jobs on the values that it holds.

Inputs:  `run(job)`; or, where computing must not block others, `begin(job)`, then
         `hold(job, work, made)` with the result of the work.
Outputs: None, and the job's outputs are held; or the error, and nothing new is held.

Real values are arrays, computed by JAX. Abstract values are shapes (`Aval`): nothing is
computed and no array is made, not even a zero, so that a thousand workers fit on a
laptop. Both modes hold, read and drop the same values.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any, assert_never

from msgspec import Struct
from msgspec.structs import replace

from jdag.compute.avals import Aval, aval_of, is_deleted
from jdag.compute.devices import put
from jdag.compute.halves import Cut, Halves, halves
from jdag.compute.hooks import hooked, seen
from jdag.compute.sums import add, ones, zeros
from jdag.compute.values import Buffer, Values
from jdag.engine.addends import ADDENDS_MAX
from jdag.engine.functions import name_of, name_on
from jdag.engine.protocol import (
    AnyKey,
    Apply,
    CompileSegment,
    Failure,
    Fill,
    Forward,
    Job,
    Key,
    Primal,
    Reading,
    RunSegment,
    Sum,
    Vjp,
    VjpInputs,
    VjpWeights,
)

_OF_PAIRS = (Forward, Vjp, VjpWeights)  # Jobs whose function is a pair.
_OF_SEGMENTS = (RunSegment, CompileSegment)
_TRAVELLING = (Primal, Reading)  # Messages with values that jobs have made.


class Work(Struct):
    """The computation of a job, with its inputs, and its device."""

    compute: Callable[[], Any]
    device: str | None


class Machine:
    """The values of one worker, "real" or "abstract", and the jobs on them.

    `leaving_bytes_max` is the largest value that may leave the worker; None: no limit.
    """

    __slots__ = ("_leaving_bytes_max", "abstract", "values")

    def __init__(self, values: str, leaving_bytes_max: int | None = None) -> None:
        self.values = Values()
        self.abstract = values == "abstract"
        self._leaving_bytes_max = leaving_bytes_max

    def run(self, job: Job) -> BaseException | None:
        """Carry out a job; return the error that it raised, or None."""
        work = self.begin(job)
        try:
            made = work.compute()
        except (Exception, SystemExit) as error:  # Raised by a user's function.
            return error
        self.hold(job, work, made)
        return None

    def begin(self, job: Job) -> Work:
        """Take a job's inputs; return its work, which any thread may do.

        Inputs read for the last time (`used_up`) are dropped.
        """
        get, abstract = self.values.get, self.abstract
        compute: Callable[[], Any]
        match job:
            case Forward() if abstract:
                compute = partial(_output_avals, job.function)
            case Forward():
                compute = partial(job.function.forward, [get(k) for k in job.inputs])
            case VjpInputs() | VjpWeights():
                compute = self._half(job)
            case Vjp() if abstract:
                compute = partial(_input_avals, job.function)
            case Vjp():
                cotangents = [[get(key) for key in keys] for keys in job.cotangents]
                compute = partial(
                    carried_back, job.function, get(job.residuals), cotangents
                )
            case Sum():
                keys = job.addends if job.base is None else (job.base, *job.addends)
                addends = [get(key) for key in keys]
                compute = partial(itemgetter(0) if abstract else add, addends)
            case Fill():
                compute = partial(_filled, job, abstract)
            case Apply():
                run = seen if job.output is None else hooked
                compute = partial(run, job.function, get(job.input))
            case RunSegment():
                compute = partial(job.function.run, list(map(get, job.inputs)))
                if abstract:
                    compute = partial(_segment_avals, job.function)
            case CompileSegment():
                compute = _nothing if abstract else job.function.compile
            case _:
                assert_never(job)
        work = Work(compute, self.device_of(job))
        if gone := used_up(job):
            self.values.drop(gone)
        return work

    def _half(self, job: VjpInputs | VjpWeights) -> Callable[[], Any]:
        of, get = halves(job.function, job.weights), self.values.get
        if isinstance(job, VjpWeights):
            if self.abstract:
                return partial(_second_avals, of)
            return partial(of.weight_half, get(job.stash))
        residuals = get(job.residuals)
        if self.abstract:
            counts = tuple(map(len, job.cotangents))
            return partial(_first_avals, of, residuals, of.cut(counts))
        cotangents = [[get(key) for key in keys] for keys in job.cotangents]
        return partial(of.input_half, residuals, cotangents)

    def hold(self, job: Job, work: Work, made: Any) -> None:
        """Hold the outputs of a job's work."""
        match job:
            case Forward():
                outputs, residuals = made
                self._put(job.outputs, outputs, job.function.out_devices)
                if job.residuals is not None:
                    if self.abstract:
                        residuals = _AbstractResiduals(self.values, job)
                    self.values.put(job.residuals, residuals)
                    self.values.activate(job.residuals, _activation_bytes(job))
            case VjpInputs():
                found, stash = made
                self._put(job.outputs, found, _homes(job, weights=False))
                if self.abstract:  # It holds the arrays of these as well.
                    cut, kept = stash
                    results = [job.outputs[place] for place in cut.results_kept]
                    kept = (*kept, *map(self.values.buffer, results))
                    stash = _AbstractStash(cut.stash_bytes, kept)
                self.values.put(job.stash, stash)
                nbytes = sum([part.nbytes for part in stash.keeps])
                self.values.activate(job.stash, nbytes)
            case VjpWeights():
                self._put(job.outputs, made, _homes(job, weights=True))
            case Vjp():
                self._put(job.outputs, made, job.function.in_devices)
            case Sum() | Fill() | Apply():
                if job.output is not None:
                    self.values.put(job.output, made, work.device)
            case RunSegment():
                self._put(job.outputs, made, None)
                bundles = job.function.carried
                keys = job.outputs[len(job.outputs) - len(bundles) :]
                for key, bundle in zip(keys, bundles, strict=True):
                    self.values.activate(key, _carried_bytes(job, bundle))
            case CompileSegment():
                pass
            case _:
                assert_never(job)

    def clear(self) -> None:
        """Drop all values; the peak of held bytes is kept."""
        before, self.values = self.values, Values()
        self.values.bytes_peak = before.bytes_peak
        self.values.activations_peak = before.activations_peak

    def device_of(self, job: Job) -> str | None:
        """The name of the device on which a job runs, None for the default.

        A sum runs on the device of its last addend.
        """
        match job:
            case Forward() | Vjp() | VjpWeights():
                device: str | None = job.function.device
                return device
            case Sum():
                return self.values.device((job.base, *job.addends)[-1])
            case Apply():
                return self.values.device(job.input)
            case Fill():
                device = job.aval.device
                return device
            case RunSegment() | CompileSegment():
                return None
            case _:
                assert_never(job)

    def leaving(self, key: Key) -> Any:
        """Return a value as it leaves this worker: on the default device."""
        value = self.values.get(key)
        if self.values.device(key) is None or self.abstract or is_deleted(value):
            return value
        return put((value,), None)[0]

    def load(
        self, message: Any, keys: tuple[Key, ...], worker: str
    ) -> tuple[Any, tuple[Key, ...], tuple[Any, ...]]:
        """The message, keys and values that are actually sent.

        An array may have been deleted since it was made, or be too large to leave. A
        failure replaces it, which originates in the call that needs it.
        """
        held = self.values
        values = tuple(map(held.get if held.all_default else self.leaving, keys))
        most = self._leaving_bytes_max
        stays = self.abstract and (most is None or held.bytes_peak <= most)
        if stays or not isinstance(message, _TRAVELLING):
            return message, keys, values
        staying = [
            self._why_not(value, key, worker)
            for value, key in zip(values, keys, strict=True)
        ]
        if not any(staying):
            return message, keys, values
        path = message.path if isinstance(message, Primal) else ()
        whys = iter([why and replace(why, path=path) for why in staying])
        failures = [known or next(whys) for known in message.failures]
        leaves = [why is None for why in staying]
        return (
            replace(message, failures=tuple(failures)),
            tuple(compress(keys, leaves)),
            tuple(compress(values, leaves)),
        )

    def _why_not(self, value: Any, key: Key, worker: str) -> Failure | None:
        """The failure that explains why a value cannot leave; None if it can."""
        if is_deleted(value):
            return deleted(value, key, worker)
        most = self._leaving_bytes_max
        if most is None or self.values.bytes_peak <= most:
            return None  # No value ever held is larger.
        aval = aval_of(value)
        if aval.nbytes <= most:
            return None
        what = held_as(key, worker)
        return Failure("JdagError", too_large(what, aval, most), worker)

    def fetched(self, found: Sequence[Any], worker: str) -> tuple[Any, ...]:
        """The result of a fetch: values in place of keys, failures unchanged."""
        held = self.values
        get = held.get if held.all_default else self.leaving
        values = [get(one) if isinstance(one, AnyKey) else one for one in found]
        return tuple(
            [
                deleted(value, key, worker) if is_deleted(value) else value
                for value, key in zip(values, found, strict=True)
            ]
        )

    def _put(
        self,
        keys: Sequence[Key],
        arrays: Sequence[Any],
        devices: Sequence[str | None] | None,
    ) -> None:
        put = self.values.put
        if devices is None:
            for key, array in zip(keys, arrays, strict=True):
                put(key, array)
            return
        for key, array, device in zip(keys, arrays, devices, strict=True):
            put(key, array, device)


def _activation_bytes(job: Forward) -> int:
    """What the residuals of a forward hold beyond leaves, which are held anyway."""
    pair = job.function
    nbytes: int = pair.residual_bytes
    for place in pair.args_kept:
        if job.inputs[place].kind != "leaf":
            nbytes += pair.avals[place].nbytes
    return nbytes + sum([pair.out_avals[place].nbytes for place in pair.outputs_kept])


def _carried_bytes(job: RunSegment, bundle: Any) -> int:
    """The same of residuals that a segment makes for another one."""
    inputs = [at for at in bundle.inputs if job.inputs[at].kind != "leaf"]
    nbytes: int = bundle.nbytes_most
    return nbytes + sum([job.function.avals[at].nbytes for at in inputs])


class _AbstractStash:
    """What an abstract I leaves for W: the buffers of `keeps`."""

    __slots__ = ("keeps",)

    def __init__(self, nbytes: int, kept: Sequence[Buffer]) -> None:
        self.keeps = (Buffer(nbytes), *kept)


class _AbstractResiduals:
    """Abstract residuals of a forward, of which only the bytes are known.

    `keeps` are the buffers of arguments and outputs among them, and one for the rest.
    """

    __slots__ = ("keeps",)

    def __init__(self, values: Values, job: Forward) -> None:
        pair = job.function
        self.keeps = (
            Buffer(pair.residual_bytes),
            *[values.buffer(job.inputs[index]) for index in pair.args_kept],
            *[values.buffer(job.outputs[index]) for index in pair.outputs_kept],
        )


def _output_avals(pair: Any) -> tuple[tuple[Aval, ...], None]:
    return pair.out_avals, None


def _segment_avals(segment: Any) -> tuple[Any, ...]:
    bundles = [Buffer(one.nbytes) for one in segment.carried]
    return (*segment.out_avals, *bundles)


def _input_avals(pair: Any) -> tuple[Aval, ...]:
    """The types of a vjp's results: those of the tracked inputs, strongly typed."""
    return tuple([aval.strong for aval in compress(pair.avals, pair.tracked)])


def _first_avals(of: Halves, residuals: Any, cut: Cut) -> tuple[Any, Any]:
    """The types of I's results; the cut, and the buffers of residuals in its stash."""
    pair, (_, *buffers) = of.pair, residuals.keeps
    args = dict(zip(pair.args_kept, buffers, strict=False))
    outputs = dict(zip(pair.outputs_kept, buffers[len(args) :], strict=True))
    kept = [args[i] for i in cut.args_kept] + [outputs[i] for i in cut.outputs_kept]
    return of.input_avals, (cut, kept)


def _second_avals(of: Halves) -> tuple[Aval, ...]:
    return of.weight_avals


def _homes(job: VjpInputs | VjpWeights, *, weights: bool) -> list[str | None] | None:
    """The devices of the inputs that are weights, or of the others."""
    if job.function.in_devices is None:
        return None
    homes = zip(job.function.in_devices, job.weights, strict=True)
    return [home for home, weight in homes if weight == weights]


def carried_back(pair: Any, residuals: Any, cotangents: Sequence[Sequence[Any]]) -> Any:
    """The vjp of any number of addends, on the pair's device."""
    if pair.device is not None:
        cotangents = [put(addends, pair.device) for addends in cotangents]
    # The vjp adds up to 8 itself; more are summed before, with the same bits.
    few = [c if len(c) <= ADDENDS_MAX else [add(c)] for c in cotangents]
    return pair.vjp(residuals, few)


def _nothing() -> None:
    """Compile an abstract segment."""


def _filled(job: Fill, abstract: bool) -> Any:
    assert job.value in (0, 1), job
    if abstract:
        return job.aval.on(None)
    made = ones(job.aval) if job.value else zeros(job.aval)
    return made if job.aval.device is None else put((made,), job.aval.device)[0]


def used_up(job: Job) -> tuple[Key, ...]:
    """The values that a job reads and that are dropped afterwards."""
    match job:
        case Forward():
            return ()
        case Vjp():
            addends = tuple([key for keys in job.cotangents for key in keys])
            return (*addends, job.residuals) if job.last else addends
        case VjpWeights():
            return (job.stash,)
        case Sum():
            return job.addends
        case Apply():
            return () if job.output is None else (job.input,)
        case RunSegment():
            return job.last
        case _:
            return ()


def kept(job: Job) -> tuple[Key, ...]:
    """The values that a job reads and that stay held."""
    match job:
        case Forward():
            return job.inputs
        case Vjp():
            return () if job.last else (job.residuals,)
        case Sum():
            return () if job.base is None else (job.base,)
        case Fill() | VjpWeights():
            return ()
        case Apply():
            return (job.input,) if job.output is None else ()
        case RunSegment():
            return tuple([key for key in job.inputs if key not in job.last])
        case CompileSegment():
            return ()


def job_name(job: Job) -> str:
    """The name of a job's function, or of the kind of job if it has none.

    With a named device: `function@cpu:1`.
    """
    if isinstance(job, _OF_PAIRS):
        pair = job.function
        return pair.name if pair.device is None else name_on(pair)
    if isinstance(job, Apply):
        return name_of(job.function)
    if isinstance(job, _OF_SEGMENTS):
        name: str = job.function.name
        return name
    return type(job).__name__.lower()


def blamed(job: Job) -> str:
    """What an error of a job says has failed: `job_name`, or the backward of that."""
    backward = isinstance(job, Vjp | VjpWeights)
    return f"the backward of {job_name(job)}" if backward else job_name(job)


def deleted(value: Any, key: Key, worker: str) -> Failure:
    """The failure for an array of `worker` that was deleted."""
    return Failure(
        "JdagError",
        f"{held_as(key, worker)}, {aval_of(value)}, was deleted, or donated to a "
        "jitted function; what was put, passed or fetched is shared, not copied, so "
        "pass a copy (jnp.copy) where the original is to be donated",
        worker,
        key.name if key.kind in ("output", "constant") else (),
    )


def held_as(key: Key, worker: str) -> str:
    """How errors name a value that `worker` holds."""
    is_leaf = key.kind == "leaf"
    return str(key.name) if is_leaf else f"{key.kind} {key.name} on {worker}"


def too_large(what: str, aval: Aval, bytes_max: int) -> str:
    """The error text for a value that is too large to travel between workers."""
    return (
        f"{what}, {aval}, has {aval.nbytes} bytes, and values of more than "
        f"{bytes_max} do not leave their worker: compute there what is needed of it "
        "(ctx.call), send it in parts, or allow more by value_bytes_max of jdag.launch "
        "or of the cluster's file"
    )
