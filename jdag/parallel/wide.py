"""One program over the devices of several processes, for what reduces over them all.

Arrays lie on the devices of this process as they do for a program of its own; on the
way in they become its part of arrays over all processes, and on the way out that part
is taken back. Nothing is copied. Before a program runs the processes agree on it, and
on the collectives in it.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.tree_util as jtu

from jdag.compute.avals import Aval
from jdag.compute.configuration import configuration
from jdag.compute.moves import Target
from jdag.compute.pytrees import Template
from jdag.errors import JdagError
from jdag.parallel.dispatch import Task
from jdag.parallel.processes import INSIDE, Terms, numbered
from jdag.parallel.program import SAME, ByShardMap, Lie
from jdag.wire.trees import HOLE


class Wide:
    """A `jdag.parallel.program.Mapping` over the devices of all processes.

    Args:
        own: the devices of this process.
        axis: the name of the axis of replicas.
        task: what the processes do together.
    """

    reshapes = False
    brings = False  # Its part of an array over all processes is made of shards.

    def __init__(
        self,
        own: tuple[jax.Device, ...],
        axis: str,
        *,
        task: Task,
    ) -> None:
        assert task.processes is not None, task
        self._own = ByShardMap(own, axis)
        self._all = ByShardMap(task.processes.devices, axis)
        self._axis = axis
        self._processes = task.processes
        self._terms = terms_of(task)

    def mapped(
        self, local: Callable[..., Any], ins: tuple[Lie, ...], outs: tuple[Lie, ...]
    ) -> Callable[..., Any]:
        """See `Mapping`."""
        program: Any = self._all.mapped(local, ins, outs)
        step = ("step", local.__name__.strip("_"))
        found: dict[Any, Terms] = {}

        def run(*groups: Any) -> tuple[Any, ...]:
            if any(isinstance(one, jax.core.Tracer) for one in jtu.tree_leaves(groups)):
                raise JdagError(INSIDE)
            wide = [
                self._widened(group, lie)
                for group, lie in zip(groups, ins, strict=True)
            ]
            form = jtu.tree_structure(groups)
            if form not in found:
                names = collectives(program.trace(*wide).jaxpr, self._axis)
                found[form] = (*self._terms, step, *numbered("collective", names))
            self._processes.agreed(found[form])
            both = zip(program(*wide), outs, strict=True)
            return tuple([self._narrowed(group, lie) for group, lie in both])

        return run

    def target(self, lie: Lie) -> Target:
        """See `Mapping`."""
        return self._own.target(lie)

    def laid(self, array: Any, dim: int) -> Any:
        """See `Mapping`."""
        return array

    def whole(self, array: Any, dim: int) -> Any:
        """See `Mapping`."""
        return array

    def _widened(self, group: Any, lie: Lie) -> Any:
        return _with_shards(group, self._all.target(lie), lie, self._processes.count)

    def _narrowed(self, group: Any, lie: Lie) -> Any:
        return _with_shards(group, self._own.target(lie), lie, -self._processes.count)


def _with_shards(group: Any, target: Target, lie: Lie, times: int) -> Any:
    """Return arrays of the same shards that are `times` as long, or for -n an nth."""

    def one(array: Any) -> Any:
        shape = list(array.shape)
        if lie != SAME:
            dim = lie if isinstance(lie, int) else 0
            shape[dim] = shape[dim] * times if times > 0 else shape[dim] // -times
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(tuple(shape), target, shards)

    return jtu.tree_map(one, group)


def collectives(part: Any, axis: str) -> list[str]:
    """Return what a jaxpr, and those inside of it, do over an axis, in order."""
    return list(_collectives(part, axis))


def _collectives(part: Any, axis: str) -> Iterator[str]:
    for equation in getattr(getattr(part, "jaxpr", part), "eqns", ()):
        over = [equation.params.get(name, ()) for name in ("axes", "axis_name")]
        names = [one if isinstance(one, tuple) else (one,) for one in over]
        given = ", ".join([atom.aval.str_short() for atom in equation.invars])
        if given and any(
            axis in some for some in names
        ):  # To ask for an index is none.
            yield f"{equation.primitive.name}({given})"
        for param in equation.params.values():
            parts = param if isinstance(param, tuple | list) else (param,)
            for inner in parts:
                yield from _collectives(inner, axis)


def together(task: Task) -> Task:
    """Return the task as one of several processes has it.

    A function that reduces over all replicas needs chunks of one size everywhere: then
    the processes tell each other how many rows they have.

    Raises:
        JdagError: they do not do the same, or one has no rows.
    """
    processes = task.processes
    assert processes is not None, task
    if task.axis_name is None:
        return task
    counts = processes.agreed(terms_of(task), task.rows)
    if 0 in counts:
        raise JdagError(
            f"{processes.what} over {len(counts)} processes: process {counts.index(0)} "
            "has no rows; with axis_name each process has one or more"
        )
    size = max([-(-count // len(processes.own)) for count in counts])
    real = [min(size, max(0, counts[p] - n * size)) for p, n in processes.places]
    both = zip(processes.places, real, strict=True)
    own = tuple([count for (p, _), count in both if p == jax.process_index()])
    return task._replace(sizes=own, devices=processes.own, everywhere=tuple(real))


def terms_of(task: Task) -> Terms:
    """Return what processes have to have alike to do a task together."""
    return _terms(
        task.name,
        task.template,
        tuple(zip(task.avals, task.tracked, strict=True)),
        (task.shared, task.dim),
        (("axis_name", task.axis_name), ("has_aux", task.has_aux)),
        (task.processes, configuration()),
    )


@lru_cache(maxsize=256)
def _terms(
    name: str,
    template: Template,
    arrays: tuple[tuple[Aval, bool], ...],
    lie: tuple[int, int],
    options: tuple[tuple[str, Any], ...],
    around: Any,
) -> Terms:
    found = [("fn", name)]
    shared, dim = lie
    # An array of rows is the last of a template with axis_name, and of no task.
    named = zip(_paths(template), arrays, strict=False)
    for place, (path, (aval, tracked)) in enumerate(named):
        sizes = list(map(str, aval.shape))
        if place >= shared:
            sizes[dim] = "rows"  # As many as each process has.
        kind = f"{aval.dtype}[{','.join(sizes)}]"
        found.append((path, f"{kind}, differentiated" if tracked else kind))
    processes, settings = around
    for key, value in (*options, *settings.settings):
        found.append((key, repr(value)))
    return (*found, ("devices", ", ".join(map(str, processes.devices))))


def _paths(template: Template) -> list[str]:
    """The names of a call's arrays, such as `params['w']`."""
    treedef = template.treedef
    leaves = jtu.tree_leaves_with_path(
        jtu.tree_unflatten(treedef, range(treedef.num_leaves))
    )
    names = [*["fn"][: bool(template.own)], "params", "x", "rows"]
    return [
        names[path[1].idx] + jtu.keystr(path[2:])
        for (path, _), leaf in zip(leaves, template.leaves, strict=True)
        if leaf is HOLE
    ]
