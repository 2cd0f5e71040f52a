"""Data parallelism: copies of parameters, chunks of rows, and sums of gradients.

Over the devices of one process: these move arrays, and are called outside of jit; what
they are given is jitted. On a worker they are called in a function like any other.
"""

from jdag.parallel.apply import parallel_apply
from jdag.parallel.data import data_parallel, row_mean
from jdag.parallel.movement import gather, reduce_add, replicate, scatter

__all__ = [
    "data_parallel",
    "gather",
    "parallel_apply",
    "reduce_add",
    "replicate",
    "row_mean",
    "scatter",
]
