"""Cluster files from the environment variables of a Slurm job step.

Inputs: the `SLURM_*` variables of this task.
Output: a cluster file, which `jdag up` and `jdag.connect` read. Main is on the first
    host of the job, and each task of the step is a worker. If all tasks are on one
    host, they listen on loopback. Several hosts need TLS and a token: the files
    `ca.pem`, `host.pem`, `host.key` and `token` in the folder of the cluster file.
Invariant: all tasks write the same file, so the order of their writes does not matter.
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
# The range is below the ephemeral ports of Linux. Jobs that share a host begin at
# different ports.
_PORTS_MIN, _PORTS_MAX, _PORTS_OF_JOB = 10_000, 32_768, 127
_HOSTS = re.compile(r"(?:[\w.-]|\[[0-9,-]+\])+")
_HOST_LIST = "a Slurm host list, such as node[001-003,007],gpu1"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE"
_TASKS = "Slurm task counts, such as 2(x3),1, whose sum is SLURM_NTASKS"


def hosts_of(text: str) -> list[str]:
    """Return the hosts in a Slurm host list such as `node[001-003,007],gpu1`, in order.

    Raises:
        ValueError: the text is not a host list, or has more than `WORKERS_MAX` hosts.
    """
    hosts: list[str] = []
    for word in re.split(r",(?![^\[]*\])", text):
        if not _HOSTS.fullmatch(word):
            raise ValueError(text)
        parts = re.split(r"\[([^\]]*)\]", word)  # Text and ranges alternate.
        choices = [_numbers(p) if index % 2 else [p] for index, p in enumerate(parts)]
        for names in product(*choices):
            hosts.append("".join(names))
            if len(hosts) > WORKERS_MAX:
                raise ValueError(text)
    return hosts


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        low, high = int(first), int(last or first)
        if not low <= high < low + WORKERS_MAX:
            raise ValueError(each)
        numbers += [f"{number:0{len(first)}}" for number in range(low, high + 1)]
    return numbers


def _tasks_of(text: str) -> list[int]:
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", word)
        if match is None or len(counts) > WORKERS_MAX:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _digits(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(text)
    return int(text)


_COUNT = Annotated[int, reads(_digits, "an integer >= 0")]
_HOSTS_READ = Annotated[list[str], reads(hosts_of, _HOST_LIST)]
_TASKS_READ = Annotated[list[int], reads(_tasks_of, _TASKS)]


def _variable(environ: Mapping[str, str], keys: str, kind: Any = _COUNT) -> Any:
    *_, last = names = keys.split()
    key = next((name for name in names if name in environ), last)
    try:
        return converted(kind, environ.get(key), key)
    except ScenarioError as error:
        if key in environ:
            raise
        raise ScenarioError(
            f"{error}; srun sets it, as in: srun jdag up --slurm"
        ) from None


def write_cluster_file(
    path: Path, environ: Mapping[str, str], workers: Sequence[str] | None = None
) -> str:
    """Write the cluster file of a job step; return the worker name of this task.

    Args:
        path: the path of the file, in a folder that all hosts of the job share.
        environ: the environment variables of this task.
        workers: the name of main, then the name of each task. None means main, w0,
            w1, ...

    Raises:
        ScenarioError: a variable is missing or malformed, the number of names does not
            match the number of tasks, or the file cannot be written.
    """
    read = partial(_variable, environ)
    job, task = read("SLURM_JOB_ID"), read("SLURM_PROCID")
    count, node = read("SLURM_NTASKS"), read("SLURM_NODEID")
    hosts = read("SLURM_STEP_NODELIST SLURM_JOB_NODELIST", _HOSTS_READ)
    first = read("SLURM_JOB_NODELIST", _HOSTS_READ)[0]
    on_hosts = read(_COUNTS, _TASKS_READ)
    names = workers or [_MAIN, *[f"w{number}" for number in range(count)]]
    if len(names) != count + 1 or len(dict.fromkeys(names)) != len(names):
        allowed = f"{count + 1} different names, of main and of the {count} tasks"
        raise ScenarioError(unusable("--workers", ",".join(names), allowed))
    for name in names:
        if not is_name(name):
            raise ScenarioError(unusable("--workers", name, NAMES))
    # By default, srun numbers tasks host by host.
    host_of = [index for index, tasks in enumerate(on_hosts) for _ in range(tasks)]
    if task >= count:
        allowed = f"an integer below SLURM_NTASKS = {count}"
        raise ScenarioError(unusable("SLURM_PROCID", task, allowed))
    if len(on_hosts) != len(hosts) or len(host_of) != count:
        allowed = f"{len(hosts)} task counts, one for each host, with the sum {count}"
        raise ScenarioError(unusable(" or ".join(_COUNTS.split()), on_hosts, allowed))
    if host_of[task] != node:
        allowed = f"{host_of[task]} for task {task}; use srun --distribution=block"
        raise ScenarioError(unusable("SLURM_NODEID", node, allowed))
    places = [first, *[hosts[index] for index in host_of]]
    _write(path, job, dict(zip(names, places, strict=True)))
    return str(names[1 + task])


def _write(path: Path, job: int, places: Mapping[str, str]) -> None:
    is_one_host = len(dict.fromkeys(places.values())) == 1
    lines = [f"{_HEAD}, job {job}.", "" if is_one_host else _FILES]
    for index, (name, host) in enumerate(places.items()):
        port = (job * _PORTS_OF_JOB + index) % (_PORTS_MAX - _PORTS_MIN) + _PORTS_MIN
        address = "127.0.0.1" if is_one_host else host
        lines.append(f'[workers."{name}"]\ncontrol = "{address}:{port}"\n')
    try:
        if path.exists() and not path.read_text(encoding="utf-8").startswith(_HEAD):
            raise OSError("this file was not written by jdag up --slurm")
        for name in () if is_one_host else _NEEDED:
            if not (path.parent / name).is_file():
                needed = ", ".join(_NEEDED)
                raise OSError(
                    f"workers on several hosts need {needed} in the folder of the "
                    f"file, but {name} is missing"
                )
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as new:
            new.write("\n".join(lines))
        os.replace(new.name, path)  # Other tasks may be reading the file.
    except (OSError, ValueError) as error:
        allowed = f"a new file in a folder shared by all hosts; {reason(error)}"
        raise ScenarioError(unusable("file", spelled(path), allowed)) from error
