"""The machine of one worker: its values, and the jobs on them.

Inputs:  `run(job)`; or `begin(job)` and then `hold(job, work, result)`, so that other
         threads are not blocked while the work is computed.
Outputs: None if the job's outputs are stored; otherwise the error.

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

_PAIR_JOBS = (Forward, Vjp, VjpWeights)  # Jobs whose function is a pair.
_SEGMENT_JOBS = (RunSegment, CompileSegment)
_WITH_JOB_RESULTS = (Primal, Reading)  # Messages with results of jobs.


class Work(Struct):
    compute: Callable[[], Any]
    device: str | None


class Machine:
    """The values of one worker, "real" or "abstract", and the jobs on them.

    Values of more than `leaving_bytes_max` bytes are not sent; None means no limit.
    """

    __slots__ = ("_leaving_bytes_max", "abstract", "values")

    def __init__(self, values: str, leaving_bytes_max: int | None = None) -> None:
        self.values = Values()
        self.abstract = values == "abstract"
        self._leaving_bytes_max = leaving_bytes_max

    def run(self, job: Job) -> BaseException | None:
        if self.abstract and not isinstance(job, Apply):  # Nothing is computed.
            work = Work(list, self.device_of(job))
            result = _abstract_result(job, self.values.get)
            self._use_up(job)
            self.hold(job, work, result)
            return None
        work = self.begin(job)
        try:
            result = work.compute()
        except (Exception, SystemExit) as error:  # Raised by a user's function.
            return error
        self.hold(job, work, result)
        return None

    def begin(self, job: Job) -> Work:
        """Return a job's work, for any thread; drop inputs that the job uses up."""
        get = self.values.get
        compute: Callable[[], Any]
        match job:
            case Apply():
                hook = seen if job.output is None else hooked
                compute = partial(hook, job.function, get(job.input))
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
                compute = partial(job.function.run, job.inputs)
            case CompileSegment():
                compute = job.function.compile
            case _:
                assert_never(job)
        # `hold` takes the devices of a pair's results from the pair.
        device = None if isinstance(job, _PAIR_JOBS) else self.device_of(job)
        work = Work(compute, device)
        self._use_up(job)
        return work

    def _use_up(self, job: Job) -> None:
        if isinstance(job, RunSegment):
            nbytes, activation = job.freed
            self.values.account(-nbytes, -activation)
        elif used_up := inputs_used_up(job):
            self.values.drop(used_up)

    def hold(self, job: Job, work: Work, result: Any) -> None:
        match job:
            case Forward():
                outputs, residuals = result
                self._put(job.outputs, outputs, job.function.out_devices)
                if job.residuals is not None:
                    if self.abstract:
                        residuals = _AbstractResiduals(self._residual_buffers(job))
                    self.values.put(job.residuals, residuals)
                    self.values.activate(job.residuals, _activation_bytes(job))
            case VjpInputs():
                cotangents, stash = result
                avals = halves(job.function, job.weights).input_avals
                self._put(job.outputs, cotangents, [aval.device for aval in avals])
                if self.abstract:  # The stash also holds the arrays of these results.
                    cut, buffers = stash
                    results = [job.outputs[place] for place in cut.results_kept]
                    buffers = (*buffers, *map(self.values.buffer, results))
                    stash = _AbstractResiduals((Buffer(cut.stash_bytes), *buffers))
                self.values.put(job.stash, stash)
                nbytes = sum([part.nbytes for part in stash.keeps])
                self.values.activate(job.stash, nbytes)
            case VjpWeights():
                avals = halves(job.function, job.weights).weight_avals
                self._put(job.outputs, result, [aval.device for aval in avals])
            case Vjp():
                self._put(job.outputs, result, job.function.in_devices)
            case Sum() | Fill() | Apply():
                if job.output is not None:
                    self.values.put(job.output, result, work.device)
            case RunSegment():
                job.results.extend(result)
            case CompileSegment():
                pass
            case _:
                assert_never(job)

    def clear(self) -> None:
        """Drop all values; the peaks of held bytes remain."""
        before, self.values = self.values, Values()
        self.values.bytes_peak = before.bytes_peak
        self.values.activations_peak = before.activations_peak

    def device_of(self, job: Job) -> str | None:
        """Return a job's device; None is the default. A sum uses its last addend's."""
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
        value = self.values.get(key)
        if self.values.device(key) is None or self.abstract or is_deleted(value):
            return value
        return put((value,), None)[0]

    def leave(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return values of a step as they leave the worker: on the default device."""
        if self.abstract or not self.values.devices:
            return values
        return tuple([v if is_deleted(v) else put((v,), None)[0] for v in values])

    def load(
        self, message: Any, keys: tuple[Key, ...], worker: str
    ) -> tuple[Any, tuple[Key, ...], tuple[Any, ...]]:
        """Return the message, keys and values that are actually sent.

        A failure replaces an array that was deleted or is too large to send. The
        failure has the path of the call that needs the array.
        """
        get = self.values.get if not self.values.devices else self.leaving
        values = tuple(map(get, keys))
        most = self._leaving_bytes_max
        all_leave = self.abstract and (most is None or self.values.bytes_peak <= most)
        if all_leave or not isinstance(message, _WITH_JOB_RESULTS):
            return message, keys, values
        refusals = [
            self._refusal(value, key, worker)
            for value, key in zip(values, keys, strict=True)
        ]
        if not any(refusals):
            return message, keys, values
        path = message.path if isinstance(message, Primal) else ()
        new = iter([failure and replace(failure, path=path) for failure in refusals])
        failures = [failure or next(new) for failure in message.failures]
        leaves = [failure is None for failure in refusals]
        return (
            replace(message, failures=tuple(failures)),
            tuple(compress(keys, leaves)),
            tuple(compress(values, leaves)),
        )

    def _refusal(self, value: Any, key: Key, worker: str) -> Failure | None:
        if is_deleted(value):
            return deleted_failure(value, key, worker)
        most = self._leaving_bytes_max
        if most is None or self.values.bytes_peak <= most:
            return None  # No value so far was larger.
        aval = aval_of(value)
        if aval.nbytes <= most:
            return None
        name = value_name(key, worker)
        return Failure("JdagError", too_large(name, aval, most), worker)

    def fetched(self, items: Sequence[Any], worker: str) -> tuple[Any, ...]:
        get = self.values.get if not self.values.devices else self.leaving
        values = [get(item) if isinstance(item, AnyKey) else item for item in items]
        return tuple(
            [
                deleted_failure(value, key, worker) if is_deleted(value) else value
                for value, key in zip(values, items, strict=True)
            ]
        )

    def _residual_buffers(self, job: Forward) -> tuple[Buffer, ...]:
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
        put, homes = self.values.put, devices or (None,) * len(keys)
        for key, array, home in zip(keys, arrays, homes, strict=True):
            put(key, array, home)


class _AbstractResiduals(NamedTuple):
    """Abstract residuals or stash: a buffer for its own arrays, then shared buffers."""

    keeps: tuple[Buffer, ...]


def _activation_bytes(job: Forward) -> int:
    """Return the bytes of a forward's residuals. Leaves, held anyway, do not count."""
    pair = job.function
    nbytes: int = pair.residual_bytes
    for place in pair.args_kept:
        if job.inputs[place].kind != "leaf":
            nbytes += pair.avals[place].nbytes
    return nbytes + sum([pair.out_avals[place].nbytes for place in pair.outputs_kept])


def segment_sizes(function: Any, is_leaf: Sequence[bool]) -> list[tuple[int, int]]:
    """Return bytes and activation bytes of a segment's outputs.

    `is_leaf` tells which inputs are leaves, which are held anyway.
    """
    avals = function.avals
    sizes = [(aval.nbytes, 0) for aval in function.out_avals]
    for bundle in function.carried:
        kept = [avals[index].nbytes for index in bundle.inputs if not is_leaf[index]]
        sizes.append((bundle.nbytes, bundle.nbytes_most + sum(kept)))
    return sizes


def _abstract_result(job: Job, get: Callable[[Key], Any]) -> Any:
    """Return the result of an abstract job. The stash of half I is (cut, buffers)."""
    match job:
        case Forward():
            return job.function.out_avals, None
        case VjpInputs():
            pair, both_halves = job.function, halves(job.function, job.weights)
            _, *buffers = get(job.residuals).keeps
            cut = both_halves.cut(tuple(map(len, job.cotangents)))
            args = dict(zip(pair.args_kept, buffers, strict=False))
            outputs = dict(zip(pair.outputs_kept, buffers[len(args) :], strict=True))
            kept = map(args.get, cut.args_kept), map(outputs.get, cut.outputs_kept)
            return both_halves.input_avals, (cut, tuple(chain(*kept)))
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
            bundles = [Buffer(bundle.nbytes) for bundle in job.function.carried]
            return (*job.function.out_avals, *bundles)
        case _:
            return None


def inputs_used_up(job: Job) -> tuple[Key, ...]:
    match job:
        case Vjp():
            addends = tuple(chain.from_iterable(job.cotangents))
            return (*addends, job.residuals) if job.last else addends
        case VjpWeights():
            return (job.stash,)
        case Sum():
            return job.addends
        case Apply():
            return () if job.output is None else (job.input,)
        case RunSegment():
            return job.keys(job.last)
        case _:
            return ()


def inputs_kept(job: Job) -> tuple[Key, ...]:
    match job:
        case Forward():
            return job.inputs
        case Vjp():
            return () if job.last else (job.residuals,)
        case Sum():
            return () if job.base is None else (job.base,)
        case Fill() | VjpWeights() | CompileSegment():
            return ()
        case Apply():
            return (job.input,) if job.output is None else ()
        case RunSegment():
            needs = [slot for slot in job.needs if slot not in job.last]
            return (*job.kept, *job.keys(tuple(needs)))


def job_name(job: Job) -> str:
    """Return the name of a job's function, as in `function@cpu:1`, or its kind."""
    if isinstance(job, _PAIR_JOBS):
        pair = job.function
        return pair.name if pair.device is None else name_on(pair)
    if isinstance(job, Apply):
        return name_of(job.function)
    if isinstance(job, _SEGMENT_JOBS):
        name: str = job.function.name
        return name
    return type(job).__name__.lower()


def blamed_name(job: Job) -> str:
    backward = isinstance(job, Vjp | VjpWeights)
    return f"the backward of {job_name(job)}" if backward else job_name(job)


def deleted_failure(value: Any, key: Key, worker: str) -> Failure:
    return Failure(
        "JdagError",
        f"{value_name(key, worker)}, {aval_of(value)}, was deleted, or donated to a "
        "jitted function; jdag shares the arrays that are put, passed or fetched, so "
        "pass a copy (jnp.copy) if the original is to be donated",
        worker,
        key.name if key.kind in ("output", "constant") else (),
    )


def value_name(key: Key, worker: str) -> str:
    is_leaf = key.kind == "leaf"
    return str(key.name) if is_leaf else f"{key.kind} {key.name} on {worker}"


def too_large(name: str, aval: Aval, bytes_max: int) -> str:
    return (
        f"{name}, {aval}, has {aval.nbytes} bytes, but values of more than "
        f"{bytes_max} bytes are not sent: reduce the value on its worker (ctx.call), "
        "send it in parts, or raise value_bytes_max in jdag.launch or the cluster file"
    )
