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
from itertools import chain, compress
from typing import Any, NamedTuple, assert_never

from msgspec import Struct
from msgspec.structs import replace

from jdag.compute.avals import Aval, aval_of, is_deleted
from jdag.compute.devices import put
from jdag.compute.halves import halves
from jdag.compute.hooks import hooked, seen
from jdag.compute.pairs import input_types
from jdag.compute.sums import add, filled
from jdag.compute.values import Buffer, Values
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
        get = self.values.get
        compute: Callable[[], Any]
        match job:
            case Apply():
                hook = seen if job.output is None else hooked
                compute = partial(hook, job.function, get(job.input))
            case _ if self.abstract:
                compute = partial(_same, _types(job, get))
            case Forward():
                compute = partial(job.function.forward, [get(k) for k in job.inputs])
            case VjpWeights():
                half = halves(job.function, job.weights).weight_half
                compute = partial(half, get(job.stash))
            case Vjp():
                cotangents = [[get(key) for key in keys] for keys in job.cotangents]
                run = job.function.vjp
                if isinstance(job, VjpInputs):
                    run = halves(job.function, job.weights).input_half
                compute = partial(run, get(job.residuals), cotangents)
            case Sum():
                keys = job.addends if job.base is None else (job.base, *job.addends)
                compute = partial(add, [get(key) for key in keys])
            case Fill():
                compute = partial(filled, job.aval, job.value)
            case RunSegment():
                compute = partial(job.function.run, list(map(get, job.inputs)))
            case CompileSegment():
                compute = job.function.compile
            case _:
                assert_never(job)
        work = Work(compute, self.device_of(job))
        if gone := used_up(job):
            self.values.drop(gone)
        return work

    def hold(self, job: Job, work: Work, made: Any) -> None:
        """Hold the outputs of a job's work."""
        match job:
            case Forward():
                outputs, residuals = made
                self._put(job.outputs, outputs, job.function.out_devices)
                if job.residuals is not None:
                    if self.abstract:
                        residuals = _Kept(self._kept_by(job))
                    self.values.put(job.residuals, residuals)
                    self.values.activate(job.residuals, _activation_bytes(job))
            case VjpInputs():
                found, stash = made
                avals = halves(job.function, job.weights).input_avals
                self._put(job.outputs, found, [aval.device for aval in avals])
                if self.abstract:  # It holds the arrays of these as well.
                    cut, kept = stash
                    results = [job.outputs[place] for place in cut.results_kept]
                    kept = (*kept, *map(self.values.buffer, results))
                    stash = _Kept((Buffer(cut.stash_bytes), *kept))
                self.values.put(job.stash, stash)
                nbytes = sum([part.nbytes for part in stash.keeps])
                self.values.activate(job.stash, nbytes)
            case VjpWeights():
                avals = halves(job.function, job.weights).weight_avals
                self._put(job.outputs, made, [aval.device for aval in avals])
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

    def _kept_by(self, job: Forward) -> tuple[Buffer, ...]:
        pair, buffer = job.function, self.values.buffer
        keys = [job.inputs[place] for place in pair.args_kept]
        keys += [job.outputs[place] for place in pair.outputs_kept]
        return (Buffer(pair.residual_bytes), *map(buffer, keys))

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


class _Kept(NamedTuple):
    """Abstract residuals or stash: a buffer of its own, then those of held arrays."""

    keeps: tuple[Buffer, ...]


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


def _types(job: Job, get: Callable[[Key], Any]) -> Any:
    """What an abstract job makes; of I, the cut and residuals' buffers as its stash."""
    match job:
        case Forward():
            return job.function.out_avals, None
        case VjpInputs():
            pair, of = job.function, halves(job.function, job.weights)
            _, *buffers = get(job.residuals).keeps
            cut = of.cut(tuple(map(len, job.cotangents)))
            args = dict(zip(pair.args_kept, buffers, strict=False))
            outputs = dict(zip(pair.outputs_kept, buffers[len(args) :], strict=True))
            kept = map(args.get, cut.args_kept), map(outputs.get, cut.outputs_kept)
            return of.input_avals, (cut, tuple(chain(*kept)))
        case VjpWeights():
            return halves(job.function, job.weights).weight_avals
        case Vjp():
            return input_types(job.function)
        case Sum():
            last: Any = (job.base, *job.addends)[-1]
            return get(last)
        case Fill():
            return job.aval.on(None)
        case RunSegment():
            bundles = [Buffer(one.nbytes) for one in job.function.carried]
            return (*job.function.out_avals, *bundles)
        case _:
            return None


def _same(value: Any) -> Any:
    return value


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


def blamed_name(job: Job) -> str:
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
