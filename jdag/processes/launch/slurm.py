"""A cluster's file, made from the variables that Slurm sets for each task of a step.

Inputs: `SLURM_*` of this task. Output: the file, which `jdag up` and `jdag.connect`
read: main on the first host of the job, and a worker for each task of the step.
Invariant: all tasks make the same text, so it does not matter which one is the first.
Tasks on one host listen on loopback. On several hosts they need TLS, and a token: the
files `ca.pem`, `host.pem`, `host.key` and `token` in the folder of the cluster's file.
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from jdag.engine.protocol import NAMES, WORKERS_MAX, is_name
from jdag.errors import ScenarioError, reason, spelled, unusable
from jdag.settings.validation import converted, reads

_MAIN = "main"
_HEAD = "# Made by jdag up --slurm"
_NEEDED = ("token", "ca.pem", "host.pem", "host.key")
_FILES = """token_file = "token"

[tls]
ca = "ca.pem"
certificate = "host.pem"
key = "host.key"
"""
# Below the ports that the system hands out; jobs of one host begin at different ones.
_PORTS_MIN, _PORTS_MAX, _PORTS_OF_JOB = 10_000, 32_768, 127
_HOSTS = re.compile(r"(?:[\w.-]|\[[0-9,-]+\])+")
_HOST_LIST = "a list of hosts as Slurm writes it, such as node[001-003,007],gpu1"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE"
_TASKS = "counts as Slurm writes them, such as 2(x3),1, a sum that is SLURM_NTASKS"


def hosts_of(text: str) -> list[str]:
    """Return the hosts of a list such as `node[001-003,007],gpu1`, in its order.

    Raises:
        ValueError: it is no such list, or too long.
    """
    hosts: list[str] = []
    for word in re.split(r",(?![^\[]*\])", text):
        if not _HOSTS.fullmatch(word):
            raise ValueError(text)
        parts = re.split(r"\[([^\]]*)\]", word)  # Texts and ranges in turn.
        choices = [_numbers(p) if at % 2 else [p] for at, p in enumerate(parts)]
        for names in product(*choices):
            hosts.append("".join(names))
            if len(hosts) > WORKERS_MAX:
                raise ValueError(text)
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ranges such as `001-003,7`, with their zeros."""
    numbers: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        low, high = int(first), int(last or first)
        if not low <= high < low + WORKERS_MAX:
            raise ValueError(each)
        numbers += [f"{one:0{len(first)}}" for one in range(low, high + 1)]
    return numbers


def _tasks_of(text: str) -> list[int]:
    """Return the number of tasks on each host, from a text such as `2(x3),1`."""
    counts: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", word)
        if found is None or len(counts) > WORKERS_MAX:
            raise ValueError(text)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _digits(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(text)
    return int(text)


_COUNT = Annotated[int, reads(_digits, "an integer >= 0")]
_HOSTS_READ = Annotated[list[str], reads(hosts_of, _HOST_LIST)]
_TASKS_READ = Annotated[list[int], reads(_tasks_of, _TASKS)]


def _variable(environ: Mapping[str, str], keys: str, kind: Any = _COUNT) -> Any:
    """Read the first of these variables, joined by blanks, that is set."""
    *_, last = names = keys.split()
    key = next((name for name in names if name in environ), last)
    try:
        return converted(kind, environ.get(key), key)
    except ScenarioError as error:
        if key in environ:
            raise
        said = f"{error}; srun sets it, as in: srun jdag up --slurm"
        raise ScenarioError(said) from None


def write_cluster_file(
    path: Path, environ: Mapping[str, str], workers: Sequence[str] | None = None
) -> str:
    """Write the cluster's file of a step; return the worker that this task is.

    Args:
        path: the file, in a folder that all hosts of the job share.
        environ: the variables of this task.
        workers: main, and then a worker for each task; None: main, w0, w1, ...

    Raises:
        ScenarioError: one line: a variable is missing or not as Slurm writes it, there
            are more or fewer tasks than workers, or the file cannot be written.
    """
    read = partial(_variable, environ)
    job, task = read("SLURM_JOB_ID"), read("SLURM_PROCID")
    count, node = read("SLURM_NTASKS"), read("SLURM_NODEID")
    hosts = read("SLURM_STEP_NODELIST SLURM_JOB_NODELIST", _HOSTS_READ)
    first = read("SLURM_JOB_NODELIST", _HOSTS_READ)[0]
    on_hosts = read(_COUNTS, _TASKS_READ)
    names = workers or [_MAIN, *[f"w{number}" for number in range(count)]]
    if len(names) != count + 1 or len(dict.fromkeys(names)) != len(names):
        allowed = f"main and a name for each of the {count} tasks, none twice"
        raise ScenarioError(unusable("--workers", ",".join(names), allowed))
    for name in names:
        if not is_name(name):
            raise ScenarioError(unusable("--workers", name, NAMES))
    # Host by host, as srun does unless told otherwise.
    of_tasks = [at for at, tasks in enumerate(on_hosts) for _ in range(tasks)]
    if task >= count:
        said = f"less than SLURM_NTASKS = {count}"
        raise ScenarioError(unusable("SLURM_PROCID", task, said))
    if len(on_hosts) != len(hosts) or len(of_tasks) != count:
        said = f"as many as SLURM_NTASKS = {count} on {len(hosts)} hosts"
        raise ScenarioError(unusable(" or ".join(_COUNTS.split()), on_hosts, said))
    if of_tasks[task] != node:
        said = f"{of_tasks[task]} for task {task}: srun --distribution=block"
        raise ScenarioError(unusable("SLURM_NODEID", node, said))
    places = [first, *[hosts[at] for at in of_tasks]]
    _write(path, job, dict(zip(names, places, strict=True)))
    return str(names[1 + task])


def _write(path: Path, job: int, places: Mapping[str, str]) -> None:
    """Replace the file, unless it is another one."""
    is_one_host = len(dict.fromkeys(places.values())) == 1
    lines = [f"{_HEAD}, job {job}.", "" if is_one_host else _FILES]
    for at, (name, host) in enumerate(places.items()):
        port = (job * _PORTS_OF_JOB + at) % (_PORTS_MAX - _PORTS_MIN) + _PORTS_MIN
        where = "127.0.0.1" if is_one_host else host
        lines.append(f'[workers."{name}"]\ncontrol = "{where}:{port}"\n')
    try:
        if path.exists() and not path.read_text(encoding="utf-8").startswith(_HEAD):
            raise OSError("this one was not made by jdag up --slurm")
        for name in () if is_one_host else _NEEDED:
            if not (path.parent / name).is_file():
                said = f"several hosts need {', '.join(_NEEDED)} beside it"
                raise OSError(f"{said}; there is no {name}")
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as made:
            made.write("\n".join(lines))
        os.replace(made.name, path)  # Other tasks may be reading it.
    except (OSError, ValueError) as error:
        allowed = f"a new file in a folder that all hosts share; {reason(error)}"
        raise ScenarioError(unusable("file", spelled(path), allowed)) from error
