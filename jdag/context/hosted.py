"""Handles of Python objects on workers, and the programs that make and call them.

A program on the object's worker that takes a handle as an argument receives the object
itself, and holds its lock until it returns (`jdag.engine.locks`). Each method call is
such a program.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from jdag.compute.pytrees import flatten, split
from jdag.compute.refs import is_ref
from jdag.context.tasks import Task, wait
from jdag.engine.functions import program, remote
from jdag.engine.protocol import ObjectId, Worker, named
from jdag.errors import JdagError, WorkerLost, kind_of, meant

SPECIAL = ("__call__", "__getitem__", "__len__", "__next__")


class Hosted:
    """A handle of a Python object on a worker; `cluster.host` returns it.

    All programs may use the handle. Calls of the object run one at a time, each exactly
    once, in the order in which they reach the worker (in a simulation the seed
    decides), and are part of no graph. A program on the object's worker that takes the
    handle as an argument receives the object itself, and holds the object's lock until
    it returns; it deadlocks if it waits for another program that calls the object. On
    other workers a program receives the handle.
    """

    leaf = SimpleNamespace(dropped=False)  # `admit` treats it as a leaf's ref.
    __jdag_taken__ = "programs (marked by jdag.program) take handles of objects"

    def __init__(self, state: Any, id: ObjectId) -> None:
        self.holder = state
        self.data = id

    def __repr__(self) -> str:
        return f"Hosted({self.data})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # `copy.copy`, `copy.deepcopy` and `pickle` call this.
        raise JdagError(
            f"a copy of {self!r} would be a handle of the same object: let a method of "
            "the object copy it, or make another object by cluster.host"
        )

    @property
    def worker(self) -> str:
        """The name of the object's worker."""
        return named(self.data.worker)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, wait, and return its result. Same as `start(...).result()`."""
        return self.start(method, *args, **kwargs).result()

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Task:
        """Start a call of a method. Return the call's `Task`, without waiting.

        The result is a pytree of arrays, numbers and strings; numpy arrays are
        read-only copies. If the method raises, so does `result()`; the object can still
        be called.

        Args:
            method: a public name, or one of `SPECIAL`, such as "__next__".
            *args: pytrees of arrays, numbers, strings, refs of leaves and handles.
            **kwargs: keyword arguments, as `args`.

        Raises:
            WorkerLost: the object's worker is lost.
            JdagError: the name is not allowed, or an argument cannot be sent.
        """
        if not isinstance(method, str) or (method[:1] == "_" and method not in SPECIAL):
            raise JdagError(
                f"{self!r}: {method!r} cannot be called: expected the name of a public "
                f"method or one of {', '.join(SPECIAL)}"
            )
        name, owner = f"{self.data.name}.{method}", self.data.worker
        return launched(self.holder, invoke, name, owner, self, method, *args, **kwargs)


def is_ref_or_handle(value: object) -> bool:
    """Whether a value is a ref or a handle, in whose place its `data` is sent."""
    return is_ref(value) or isinstance(value, Hosted)


def rest_of(state: Any, tree: Any) -> Any:
    """Drop the objects of a pytree; return a list of its other leaves.

    A pytree without objects is returned unchanged.
    """
    leaves = flatten(tree)[0]
    handles = [leaf for leaf in leaves if isinstance(leaf, Hosted)]
    wait([launched(state, drop, "cluster.drop", h.data.worker, h) for h in handles])
    for handle in handles if state.recovery is not None else ():
        state.recovery.unhost(handle)
    rest = [leaf for leaf in leaves if not isinstance(leaf, Hosted)]
    return rest if handles else tree


def launched(
    state: Any, fn: Any, name: str, worker: Worker, /, *args: Any, **kwargs: Any
) -> Task:
    """Start `make`, `invoke` or `drop` on a worker; tasks and errors call it `name`."""
    state.check_open(name)
    port = state.driver.current
    if (why := port.lost(worker)) is not None:
        message = f"{name}: worker {worker!r} is lost, and its objects too"
        raise WorkerLost(f"{message}: {why}" if why else message)
    try:
        parts = split(args, kwargs, state.is_given, 2 if fn is invoke else 1)
    except JdagError as error:
        raise type(error)(f"{name}: {error}") from None
    cluster = state.clusters.get(port)
    frame = state.frames[port] if cluster is None else cluster.object_frame(worker)
    frame.check(name)
    task: Task
    try:
        task = frame.start(worker, fn, parts, name)
    except WorkerLost:  # Another worker of the frame's context is lost.
        if cluster is None or port.lost(worker) is not None:
            raise
        task = cluster.object_frame(worker, is_new=True).start(worker, fn, parts, name)
    return task


@remote
@program
def make(ctx: Any, factory: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Hosted:
    value, frame = factory(*args, **kwargs), ctx._frame
    id = ObjectId(frame.id, frame.prefix, frame.port.worker, type(value).__name__)
    frame.port.host.objects[id] = value
    return Hosted(ctx.state, id)


@remote
@program
def invoke(ctx: Any, target: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    ctx._frame.program = name = f"{type(target).__name__}.{method}"
    function = getattr(target, method, None)
    if function is None:
        raise JdagError(f"{name}: no such method{meant(method, dir(target))}")
    if not callable(function):
        raise JdagError(f"{name} is {kind_of(function)}, not a method")
    return function(*args, **kwargs)


@remote
@program
def drop(ctx: Any, *_: Any) -> None:
    for id in ctx._frame.objects:
        del ctx._frame.port.host.objects[id]
