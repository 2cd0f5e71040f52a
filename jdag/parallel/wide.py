"""What several processes agree on before they run one program together.

That is what they are about to do, the collectives in it, and how many rows each has.
"""

from typing import Any

import jax.tree_util as jtu

from jdag.compute.configuration import configuration
from jdag.compute.jaxprs import equations
from jdag.compute.pytrees import Template
from jdag.engine.arrays import HOLE
from jdag.errors import JdagError
from jdag.parallel.dispatch import Task
from jdag.parallel.processes import Processes, Terms


def collectives(part: Any, axis: str) -> list[str]:
    """Return what a jaxpr, and those inside of it, do over an axis, in order."""
    found = []
    for equation in equations(part):
        over = [equation.params.get(name, ()) for name in ("axes", "axis_name")]
        names = [one if isinstance(one, tuple) else (one,) for one in over]
        given = ", ".join([atom.aval.str_short() for atom in equation.invars])
        # To ask for an index is none.
        if given and any([axis in some for some in names]):
            found.append(f"{equation.primitive.name}({given})")
    return found


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
    counts = processes.agreed(task.terms, task.rows)
    if 0 in counts:
        raise JdagError(
            f"{processes.what}: process {counts.index(0)} has no rows; with axis_name "
            "each process has one or more"
        )
    size = max([-(-count // len(processes.own)) for count in counts])
    left, real = list(counts), []
    for device in processes.devices:
        real.append(min(size, left[device.process_index]))
        left[device.process_index] -= real[-1]
    both = zip(processes.devices, real, strict=True)
    own = tuple([rows for device, rows in both if device in processes.own])
    return task._replace(sizes=own, devices=processes.own, everywhere=tuple(real))


def terms_of(task: Task, processes: Processes) -> Terms:
    """Return what processes have to have alike to do a task together."""
    found = [("fn", task.name)]
    # An array of rows is the last of a template with axis_name, and of no task.
    kinds = zip(_paths(task.template), task.avals, task.tracked, strict=False)
    for index, (path, aval, tracked) in enumerate(kinds):
        sizes = list(map(str, aval.shape))
        if index >= task.shared:
            sizes[task.dim] = "rows"  # As many as each process has.
        kind = f"{aval.dtype}[{','.join(sizes)}]"
        found.append((path, f"{kind}, differentiated" if tracked else kind))
    options = ("axis_name", task.axis_name), ("has_aux", task.has_aux)
    found += [(key, repr(value)) for key, value in options]
    found += [(key, repr(value)) for key, value in configuration().settings]
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
