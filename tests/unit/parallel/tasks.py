"""Tasks for data_parallel: of each kind of what may be asked for, and the truth."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdag.parallel import data_parallel
from tests.unit.parallel.cases import array, names

TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "complex128": 1e-12, "bfloat16": 0.05}


def mixed(params: Any, x: Any) -> Any:
    h = params["act"](x["x"] * params["parts"][0] + params["parts"][1])
    y = h * params["n"][1] * x["ids"]
    return {"y": (y, jnp.argmax(jnp.abs(h), -1)), "loss": jnp.sum(y * h) / 3}


def on_one_device(params: Any, x: Any, sizes: list[int], dim: int) -> Any:
    y, best = mixed(params, x)["y"]
    h = params["act"](x["x"] * params["parts"][0] + params["parts"][1])
    rows = jnp.sum(y * h, (1 - dim, 2)) / 3
    chunk = np.repeat(np.arange(len(sizes)), sizes)
    member = jnp.asarray(chunk[:, None] == np.arange(len(sizes)), rows.dtype)
    return {"y": (y, best), "loss": rows @ member}


class Task(NamedTuple):
    dtype: str
    devices: int
    rows: int
    dim: int
    output: int

    @property
    def sizes(self) -> list[int]:
        size = max(1, -(-self.rows // self.devices))
        return [min(size, self.rows - n) for n in range(0, max(self.rows, 1), size)]


TASKS = [
    Task("float64", 1, 3, 0, 0),
    Task("float32", 2, 4, 1, 5),
    Task("bfloat16", 3, 3, 0, 1),
    Task("complex128", 4, 7, 1, 4),
    Task("float64", 5, 3, 0, 7),
    Task("float32", 6, 6, 1, 2),
    Task("bfloat16", 7, 13, 0, 3),
    Task("complex128", 8, 8, 0, 6),
    Task("float32", 8, 5, 1, 0),
    Task("float64", 3, 0, 1, 1),
    Task("float64", 4, 0, 0, 3),
    Task("complex128", 2, 6, 1, 0),
]


def asked_for(task: Task) -> tuple[Any, Any]:
    full, part = [2, 2], [2, 2]
    full.insert(task.dim, task.rows)
    part.insert(task.dim, 1)
    parts = [array(*part, seed=1, dtype=task.dtype), array(seed=2, dtype=task.dtype)]
    params = {"parts": parts, "n": np.asarray([0, 2]), "act": jnp.sin, "name": "mixed"}
    ids = jnp.ones(full, jnp.int32) * 3
    return params, {"x": array(*full, seed=3, dtype=task.dtype), "ids": ids}


def spread_as(task: Task, params: Any, x: Any) -> Any:
    devices, output = names(task.devices), f"cpu:{task.output}"
    return data_parallel(mixed, params, x, devices, output, task.dim)
