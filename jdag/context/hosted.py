"""Handles of Python objects on workers, and the programs that make and call them.

A program that is handed a handle on the object's worker gets the object itself, and
until it returns the engine there starts no other that is handed the same
(`jdag.engine.locks`). A call of a method is such a program.
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
    """A handle of a Python object on a worker: `cluster.host` gives it.

    All programs may use it. Calls run one at a time, in the order in which they reach
    the worker; in virtual time the seed decides that. None is repeated, and none is in
    a graph. A program on that worker that takes the handle as an argument is given the
    object itself, alone until it returns; on other workers it gets the handle.
    """

    leaf = SimpleNamespace(dropped=False)  # As a ref of a leaf, it is for all programs.
    __jdag_taken__ = "programs (marked by jdag.program) take handles of objects"

    def __init__(self, state: Any, id: ObjectId) -> None:
        self.holder = state
        self.data = id

    def __repr__(self) -> str:
        return f"Hosted({self.data})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # What `copy.copy`, `copy.deepcopy` and `pickle` ask for.
        raise JdagError(
            f"a copy of {self!r} would be a handle of the same object: let a method "
            "of the object copy it, or make another one by cluster.host"
        )

    @property
    def worker(self) -> str:
        """The name of the object's worker."""
        return named(self.data.worker)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and return what it returned: `start(...).result()`."""
        return self.start(method, *args, **kwargs).result()

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Task:
        """Start a call of a method; return its `Task` at once.

        Its result is a pytree of arrays, numbers and strings; numpy arrays are
        read-only copies. If the method raises, `result()` does, and the object stays.

        Args:
            method: its public name, or one of `SPECIAL`, as "__next__".
            *args: pytrees of arrays, numbers, strings, refs of leaves and handles.
            **kwargs: the same, by keyword.

        Raises:
            WorkerLost: its worker is gone, and the object with it.
            JdagError: this is no name of a method, or an argument cannot travel.
        """
        if not isinstance(method, str) or (method[:1] == "_" and method not in SPECIAL):
            raise JdagError(
                f"{self!r}: {method!r} cannot be called: allowed are names of public "
                f"methods and {', '.join(SPECIAL)}"
            )
        name = f"{self.data.name}.{method}"
        there = self.data.worker
        return launched(self.holder, invoke, name, there, self, method, *args, **kwargs)


def is_live(value: object) -> bool:
    """Tell whether a value travels as data that name it: a ref or a handle."""
    return is_ref(value) or isinstance(value, Hosted)


def rest_of(state: Any, tree: Any) -> Any:
    """Drop the objects of a pytree; return what else is in it."""
    leaves = flatten(tree)[0]
    ids = [(one.data.worker, one) for one in leaves if isinstance(one, Hosted)]
    wait([launched(state, drop, "cluster.drop", *one) for one in ids])
    for _, handle in ids if state.recovery is not None else ():
        state.recovery.unhost(handle)
    return [one for one in leaves if not isinstance(one, Hosted)] if ids else tree


def launched(
    state: Any, fn: Any, name: str, worker: Worker, /, *args: Any, **kwargs: Any
) -> Task:
    """Start one of the programs below; `name` is what tasks and errors call it."""
    state.check_open(name)
    port = state.driver.current
    if (why := port.lost(worker)) is not None:
        said = f"{name}: worker {worker!r} is lost, and its objects with it"
        raise WorkerLost(f"{said}: {why}" if why else said)
    try:
        parts = split(args, kwargs, state.is_given, 2 if fn is invoke else 1)
    except JdagError as error:
        raise type(error)(f"{name}: {error}") from None
    cluster = state.clusters.get(port)
    frame = state.frames[port] if cluster is None else cluster.caller(worker)
    frame.check(name)
    task: Task
    try:
        task = frame.start(worker, fn, parts, name)
    except WorkerLost:  # Another worker, which took part in its context.
        if cluster is None or port.lost(worker) is not None:
            raise
        task = cluster.caller(worker, anew=True).start(worker, fn, parts, name)
    return task


@remote
@program
def make(ctx: Any, factory: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Hosted:
    """Make an object on this worker; return its handle."""
    made, frame = factory(*args, **kwargs), ctx._frame
    id = ObjectId(frame.id, frame.prefix, frame.port.worker, type(made).__name__)
    frame.port.host.objects[id] = made
    return Hosted(ctx.state, id)


@remote
@program
def invoke(ctx: Any, target: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an object on this worker."""
    ctx._frame.program = name = f"{type(target).__name__}.{method}"
    found = getattr(target, method, None)
    if found is None:
        raise JdagError(f"{name}: there is none{meant(method, dir(target))}")
    if not callable(found):
        raise JdagError(f"{name} is {kind_of(found)}, and no method")
    return found(*args, **kwargs)


@remote
@program
def drop(ctx: Any, *_: Any) -> None:
    """Drop the object that this program is handed."""
    for id in ctx._frame.objects:
        del ctx._frame.port.host.objects[id]
