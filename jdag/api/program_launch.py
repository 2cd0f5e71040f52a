"""Checks a program of `Cluster.run`, and packs it to be sent to its worker."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jdag.compute.pytrees import flatten, unflatten
from jdag.context.program_frame import ProgramFrame
from jdag.engine.functions import call_site, is_program, name_of
from jdag.errors import JdagError, WorkerLost


def program_launch(
    frame: ProgramFrame, place: str, program: Any, run: Callable[..., Any]
) -> tuple[Any, ...]:
    worker, device = frame.state.place(place, "cluster.run")
    if device is not None:
        raise JdagError(f"cluster.run: programs run on workers, not on {place!r}")
    if (why := frame.port.lost(worker)) is not None:
        message = f"no program can run on {worker!r}: it is lost"
        raise WorkerLost(f"{message}: {why}" if why else message)
    fn, args, kwargs = program, (), {}
    if isinstance(program, partial):
        fn, args, kwargs = program.func, program.args, program.keywords
    if not callable(fn) or not hasattr(fn, "__qualname__"):
        raise JdagError(
            f"cluster.run: the program for {place!r} is {program!r}; expected a "
            "function, a method or a functools.partial that takes a Cluster"
        )
    name = name_of(fn)
    if is_program(fn):
        raise JdagError(
            f"cluster.run: {name}, the program for {place!r}, is marked by "
            "jdag.program, so it takes a context and ctx.call calls it; expected "
            "a function of a Cluster"
        )
    leaves, treedef = flatten(((fn, args), kwargs), what=f"the arguments of {name}")
    handed = [
        leaf.__jdag_handed__() if hasattr(leaf, "__jdag_handed__") else leaf
        for leaf in leaves
    ]
    (fn, args), kwargs = unflatten(treedef, handed)
    what = f"cluster.run: what {name}"
    arguments = frame.packed(what, worker, ((fn, *args), kwargs))
    return worker, run, *arguments, name, str(call_site())
