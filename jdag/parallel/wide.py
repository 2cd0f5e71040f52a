"""What several processes agree on before they run one program together.

That is what they are about to do, the collectives in it, and how many rows each has.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.tree_util as jtu

from jdag.compute.avals import Aval
from jdag.compute.configuration import configuration
from jdag.compute.pytrees import Template
from jdag.errors import JdagError
from jdag.parallel.dispatch import Task
from jdag.parallel.processes import Terms
from jdag.wire.trees import HOLE


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
    if processes is None or task.axis_name is None:
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
